"""The record of a slide, as JSON in the database `slides`, and the fit of its stain."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UsageError
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.slides.slide_files import (
    Fingerprint,
    SlideFile,
    SlideHashes,
    SlideNames,
    copy_groups,
    patient_of,
)
from histopipe.slides.tables import SlideLabel
from histopipe.store.format import corrected, seal, slide_key, unseal
from histopipe.system.files import Closing
from histopipe.system.grouping import grouped, grouped_values
from histopipe.system.output import shown, to_storable_text
from histopipe.system.table_cells import nfc


class SlideState(StrEnum):
    """State of a slide. Readers see complete slides only."""

    PENDING = "pending"
    COMPLETE = "complete"
    FAILED = "failed"


class FailureKind(StrEnum):
    """Cause of a failure, which decides when the slide is retried."""

    OPTION = "option"
    """The slide does not fit the options, or could not be copied to be read: tried again at each ingest."""
    FILE = "file"
    """The file is bad: retried when its size or time has changed, or on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideRecord:
    """One slide of a store. docs/reference/slide-record.md describes the fields; `unknown` has those of later versions.

    Times are nanoseconds since 1970, sizes bytes, dimensions level-0 pixels. `level`, `downsample`, `read_size` and
    `stride` refer to the level that was read. For complete slides, `planned = stored + unreadable`.
    """

    id: str
    path: str
    resolved_path: str
    state: SlideState = SlideState.PENDING
    size_bytes: int = 0
    mtime_ns: int = 0
    etag: str | None = None
    quickhash: str | None = None
    tile_hash: str | None = None
    pixel_hash: str | None = None
    vendor: str | None = None
    reader: str | None = None
    width: int = 0
    height: int = 0
    bounds: list[int] = field(default_factory=list)
    scan: list[int] = field(default_factory=list)
    orientation: int | None = None
    frame: str | None = None
    icc_profile: bool = False
    mpp: float | None = None
    mpp_source: str | None = None
    patch_mpp: float | None = None
    level: int | None = None
    downsample: float | None = None
    read_size: int | None = None
    stride: int | None = None
    resampling: str | None = None
    route: str | None = None
    route_reason: str | None = None
    patient: str | None = None
    label: str | None = None
    site: str | None = None
    mask: str | None = None
    annotations: str | None = None
    annotation_notes: list[str] = field(default_factory=list)
    patch_labels: dict[str, int] = field(default_factory=dict)
    quality: str | None = None
    stain_amounts: str | None = None
    planned: int = 0
    stored: int = 0
    unreadable: int = 0
    stored_bytes: int = 0
    thumbnail_crc: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    error_kind: FailureKind | None = None
    error_option: str | None = None
    notes: list[str] = field(default_factory=list)
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def new(cls, slide: SlideFile) -> SlideRecord:
        """Return the record of a slide that is not planned yet."""
        return cls(
            id=slide.id,
            path=to_storable_text(slide.location),
            resolved_path=slide.resolve(),
            # Planning sets them. Before, and if it fails, the id is still not that of the file.
            scan=[0, 0, 0, 0] if slide.core is not None else [],
        )

    def without_results(self, slide: SlideFile) -> SlideRecord:
        """Return the record without the results of an earlier ingest. Labels and unknown fields are kept.

        The source of the annotations is also kept, so that the next ingest can report that the patch labels were removed.
        """
        return replace(
            SlideRecord.new(slide),
            id=self.id,
            patient=self.patient,
            label=self.label,
            site=self.site,
            annotations=self.annotations,
            unknown=self.unknown,
        )

    def with_label(self, label: SlideLabel | None, patient: str | None = None) -> SlideRecord:
        """Return the record with label, patient and site.

        The patient is that of the label, else `patient`, else the recorded one, else the one of `patient_of`.
        """
        patient = (label.patient if label else None) or patient or self.patient
        record = replace(self, patient=patient or patient_of(self.id))
        if label is None:
            return record
        name = self.label if label.keeps_label else label.label
        return replace(record, label=name, site=label.site or self.site)

    def with_fingerprint(self, stamp: Fingerprint) -> SlideRecord:
        """Return the record with the size, time and ETag of the slide's files."""
        return replace(self, size_bytes=stamp.size_bytes, mtime_ns=stamp.mtime_ns, etag=stamp.etag)

    def with_failure(
        self, reason: str, kind: FailureKind = FailureKind.FILE, option: str | None = None
    ) -> SlideRecord:
        """Return the record of the failed slide.

        `option` is the limit that was exceeded. The slide is ingested again if this limit changes.
        """
        return replace(
            self,
            state=SlideState.FAILED,
            error=to_storable_text(reason),
            error_kind=kind,
            error_option=option,
            planned=0,
            stored=0,
            unreadable=0,
            stored_bytes=0,
        )

    def to_bytes(self, number: int) -> bytes:
        """Return the stored form of the record under a slide number, with a checksum."""
        return seal(slide_key(number), self.to_json())

    @classmethod
    def from_bytes(cls, number: int, data: bytes | memoryview, *, where: str) -> SlideRecord:
        """Read a stored record.

        Raises:
            DamagedStore: it does not match its checksum, or a field is missing, of another type or out of range.
        """
        return cls.from_json(unseal(slide_key(number), data, where=where), where=where)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON-ready dict."""
        return {**self.unknown, **{name: _shown(getattr(self, name)) for name in _TYPES}}

    @classmethod
    def from_json(cls, value: object, *, where: str) -> SlideRecord:
        """Read what `to_json` returned; DamagedStore if a field is missing, of another type or out of range."""
        if not isinstance(value, dict):
            raise DamagedStore(f"{where} is not a slide record", found=type(value).__name__)
        values: dict[str, Any] = {
            name: value[name] if _plain(name, value[name]) else _checked(where, name, value[name])
            for name in _TYPES
            if name in value
        }
        missing = [name for name in ("id", "path", "resolved_path", "state") if name not in values]
        if missing:
            raise DamagedStore(f"{where}: the slide record has no {', '.join(missing)}")
        # Earlier versions stored texts as they were written, and no patient of lower-case TCGA barcodes.
        values |= {
            name: nfc(values[name]) for name in ("patient", "label", "site") if values.get(name)
        }
        if values.get("patient") == values["id"] and "TCGA" not in values["id"]:
            values["patient"] = patient_of(values["id"])
        record = cls(**values, unknown={k: v for k, v in value.items() if k not in _TYPES})
        _check(record, where)
        return record

    @property
    def frame_bounds(self) -> RegionL0:
        """Scanned area of the file, from whose corner QuPath counts."""
        left, top, width, height = self.scan or self.bounds or (0, 0, self.width, self.height)
        return RegionL0(PointL0(left, top), Size(width, height))

    @property
    def core(self) -> RegionL0 | None:
        """Region of a core, from the corner of the scanned area of its file; None for a slide."""
        corner = self.frame_bounds.origin
        x, y, width, height = self.bounds or (0, 0, 0, 0)
        place = PointL0(x - corner.x, y - corner.y)
        return RegionL0(place, Size(width, height)) if self.scan else None

    @property
    def side_l0(self) -> float:
        """Side of the patches in level-0 pixels; 0 if the slide is not planned."""
        return (self.read_size or 0) * (self.downsample or 0.0)

    @property
    def hashes(self) -> SlideHashes:
        """Hashes by which copies of the slide are recognized."""
        return SlideHashes(self.quickhash or self.tile_hash, self.tile_hash, self.pixel_hash)

    @property
    def scans(self) -> tuple[SlideHashes, ...]:
        """The same, for the slides of a dataset, which may be bags of several slides."""
        return (self.hashes,)


def slide_names(records: Collection[SlideRecord]) -> SlideNames:
    """Return the names of slides, for files about them: cores also have those of their slide."""
    return SlideNames(
        [record.id for record in records],
        parents={record.id: record.id.rpartition("/")[0] for record in records if record.scan},
    )


def describe_copies(records: Iterable[SlideRecord]) -> list[str]:
    """Return a warning for each group of slides that are copies, or may be."""
    slides = [record for record in records if record.state is not SlideState.FAILED]
    members = grouped_values(
        (group, (record.id, scan))
        for record, scan, group in zip(
            slides, *copy_groups([slide.scans for slide in slides]), strict=True
        )
    )
    return [
        f"{', '.join(sorted(name for name, _ in copies))} "
        + (
            "are copies of one slide: all are stored, and stay in the same subset of a split"
            if len({scan for _, scan in copies}) == 1
            else "may be copies of one slide: they have the same quickhash, and not all records have a pixel hash, which "
            "earlier versions did not write. They stay in the same subset of a split; to compare their pixels, ingest them "
            "into a new store"
        )
        for copies in members.values()
        if len(copies) > 1
    ]


def _check(record: SlideRecord, where: str) -> None:
    """Refuse counts and ids that no ingest writes. Readers allocate arrays by counts, and name files by ids."""
    for name in (
        "size_bytes",
        "width",
        "height",
        "planned",
        "stored",
        "unreadable",
        "stored_bytes",
    ):
        if getattr(record, name) < 0:
            raise DamagedStore(f"{where}: field {name!r}", found=getattr(record, name))
    is_whole = record.planned == record.stored + record.unreadable
    if record.planned >= 1 << 32 or (record.state is SlideState.COMPLETE and not is_whole):
        raise DamagedStore(
            f"{where}: its counts are inconsistent",
            found=f"{record.planned} planned, {record.stored} stored, {record.unreadable} unreadable",
            expected="planned = stored + unreadable",
        )
    if not {"", ".", ".."}.isdisjoint(record.id.split("/")):
        raise DamagedStore(
            f"{where}: its id",
            found=repr(record.id)[:80],
            expected="a valid file name, possibly with folders",
        )


_TYPES = {
    name: get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for name, hint in get_type_hints(SlideRecord).items()
    if name != "unknown"
}
"""Types of each field."""
_PLAIN = {name: {str, int, bool, NoneType}.intersection(types) for name, types in _TYPES.items()}


def _plain(name: str, value: Any) -> bool:
    """Return whether a value needs no further check. For speed: each command reads the records of all slides."""
    return type(value) in _PLAIN[name] and (type(value) is not str or value.isprintable())


def _shown(value: Any) -> Any:
    """Return a value whose texts are safe on a terminal: control characters are written as \\xNN."""
    if isinstance(value, str):
        return shown(value)
    return [_shown(item) for item in value] if isinstance(value, list) else value


def _checked(where: str, name: str, value: Any) -> Any:
    if _shown(value) != value:
        raise DamagedStore(
            f"{where}: field {name!r} of the slide record", found="control characters"
        )
    for kind in _TYPES[name]:
        if isinstance(kind, type) and issubclass(kind, StrEnum) and value in list(kind):
            return kind(value)
        if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
        if get_origin(kind) is type(
            value
        ):  # a list, or a dict, whose keys are always texts in JSON
            items = value.values() if isinstance(value, dict) else value
            if all(type(item) is get_args(kind)[-1] for item in items):
                return value
        if kind is not float and type(value) is kind:
            return value
    raise DamagedStore(f"{where}: field {name!r} of the slide record", found=repr(value)[:80])


def corrected_record(number: int, data: bytes) -> SlideRecord | None:
    """Correct one wrong byte of a record with its checksum; None if more bytes are wrong, or there is no checksum."""
    body = corrected(slide_key(number), data)
    with suppress(DamagedStore):
        return None if body is None else SlideRecord.from_bytes(number, body, where="record")
    return None


ALGORITHM = "stain-1"

_SHAPES = {
    "reinhard_mean": (3,),
    "reinhard_std": (3,),
    "macenko_stains": (2, 3),
    "macenko_maximum": (2,),
}


@dataclass(frozen=True, slots=True)
class StainFit:
    """Stain of a slide by two methods, float32, measured on `pixels` pixels of tissue.

    Attributes:
        reinhard_mean, reinhard_std: (3,) in lαβ with logarithms to base 10.
        macenko_stains: (2, 3) unit vectors of optical density of haematoxylin and eosin.
        macenko_maximum: (2,) 99th percentile of the concentration of each.
    """

    pixels: int
    reinhard_mean: NDArray[np.float32]
    reinhard_std: NDArray[np.float32]
    macenko_stains: NDArray[np.float32]
    macenko_maximum: NDArray[np.float32]

    def to_json(self) -> dict[str, Any]:
        """Return the stored form as a JSON-ready dict."""
        return {
            "algorithm": ALGORITHM,
            "pixels": self.pixels,
            **{name: getattr(self, name).tolist() for name in _SHAPES},
        }

    @classmethod
    def from_json(cls, value: object, *, where: str) -> Self:
        """Read what `to_json` returned; DamagedStore if an entry is missing or wrong."""
        entries = value if isinstance(value, dict) else {}
        try:
            arrays = {name: np.array(entries[name], np.float32) for name in _SHAPES}
            fit = cls(pixels=int(entries["pixels"]), **arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedStore(f"{where} is not a stain fit", found=repr(error)[:120]) from error
        for name, shape in _SHAPES.items():
            if arrays[name].shape != shape or not np.isfinite(arrays[name]).all():
                raise DamagedStore(
                    f"{where}: {name}", found=entries[name], expected=f"{shape} finite numbers"
                )
        return fit


def read_fits(entries: Mapping[int, bytes], *, where: str) -> dict[int, StainFit]:
    """Return the stain fits of this version's algorithm, by slide number."""
    fits = {}
    for number, entry in entries.items():
        here = f"{where}, slide {number}"
        value = unseal(slide_key(number), entry, where=f"{here}: stain")
        if value.get("algorithm") == ALGORITHM:
            fits[number] = StainFit.from_json(value, where=here)
    return fits


class NumberedSlides(Closing):
    """Slides of one store, or of several, by number."""

    records: dict[int, SlideRecord]

    def __len__(self) -> int:
        """Number of patches that can be read."""
        return sum(record.stored for record in self.complete.values())

    @property
    def slides(self) -> list[SlideRecord]:
        """Slide records in the order of their numbers."""
        return list(self.records.values())

    @cached_property
    def complete(self) -> dict[int, SlideRecord]:
        """Records of the complete slides, by number."""
        return {n: r for n, r in self.records.items() if r.state is SlideState.COMPLETE}

    @cached_property
    def numbers(self) -> dict[str, list[int]]:
        """Numbers of the complete slides, by id."""
        return grouped(self.complete, lambda number: self.records[number].id)

    def number(self, slide_id: str) -> int:
        """Return the number of a complete slide.

        Raises:
            UsageError: there is no such slide, it is not complete, or several stores have it.
        """
        numbers = self.numbers.get(slide_id, [])
        if len(numbers) != 1:
            states = [str(slide.state) for slide in self.slides if slide.id == slide_id]
            raise UsageError(
                f"slide {slide_id!r}",
                found=", ".join(states) or "no such slide",
                expected="one complete slide",
            )
        return numbers[0]
