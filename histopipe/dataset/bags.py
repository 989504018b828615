"""Bags of a folder of feature files, for multiple-instance learning."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import OnError, UsageError
from histopipe.features import BagOf
from histopipe.features.feature_file import SLIDES, FeatureHeader
from histopipe.features.feature_sets import SlideFeatures, join_feature_sets
from histopipe.slides.slide_files import SlideHashes, SlideNames, patient_of
from histopipe.slides.tables import SlideLabel
from histopipe.splits.slide_table import Exclusion, SlideEntry, missing_from, read_slide_table
from histopipe.splits.splits import Splits
from histopipe.system.files import read_json
from histopipe.system.folders import ENCODER
from histopipe.system.grouping import grouped
from histopipe.system.output import counted
from histopipe.system.shared_folders import PARTS
from histopipe.system.table_cells import nfc
from histopipe.tasks.choices import SUBSETS


@dataclass(frozen=True, slots=True)
class Bag:
    """The patches of a slide, or of all slides of a patient, with the patient as `id`: a `SampleGroup` of one sample.

    `site` is None if the slides have different sites. `cells` are those of further columns of the labels file.
    """

    planned: ClassVar = 1
    stored: ClassVar = 1
    patch_labels: ClassVar[Mapping[str, int]] = {}

    id: str
    slides: tuple[str, ...]
    parts: tuple[SlideFeatures, ...]
    """Features of each slide."""
    label: str | None
    patient: str | None
    site: str | None
    cells: Mapping[str, str]

    @property
    def scans(self) -> tuple[SlideHashes, ...]:
        """Hashes of its slides. Earlier versions recorded the `content` only."""
        return tuple(
            SlideHashes(
                *(part.headers[0].text(attribute.name) for attribute in fields(SlideHashes))
            )
            for part in self.parts
        )

    @property
    def rows(self) -> int:
        """Number of patches."""
        return sum(part.rows for part in self.parts)

    def places(self) -> Iterator[tuple[str, object, object, str]]:
        """Yield slide, corner and side of each patch in level-0 pixels; empty texts where unknown."""
        for slide, part in zip(self.slides, self.parts, strict=True):
            corners, side = part.corners(), part.headers[0].side
            text = f"{side:g}" if side else ""
            for x, y in [("", "")] * part.rows if corners is None else corners.tolist():
                yield slide, x, y, text

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type that holds the features of all its files."""
        return np.result_type(*(header.dtype for part in self.parts for header in part.headers))

    @property
    def crc(self) -> int:
        """Checksum of the feature files, from their recorded checksums or from sampled rows."""
        return zlib.crc32(repr((self.slides, [part.fingerprint for part in self.parts])).encode())


class BagSet:
    """The bags of a folder of feature files, or of several: a `SampleSource` like a store.

    The files come from `histopipe embed`, CLAM or TRIDENT. With several folders, the first one decides the patches, and
    the features of the others are joined to them by position; see `histopipe.features.feature_sets`. `labels` reads the
    labels of slides, such as `read_labels`; by default they are those that `histopipe embed` recorded. `columns` are those
    that all slides of a patient have in common. Bags keep their `numbers`, by name, in existing splits; other bags get
    higher ones. `unlabelled` keeps slides without label, and does
    not compare the labels of a patient's slides. With `on_error` "skip", files whose header is damaged are left out;
    `failed` has the reasons by slide.

    Attributes:
        complete: the bags by number.

    Raises:
        NothingToDo: the folders contain no features of a slide.
        UsageError: files have no features or different numbers of features, sets cannot be joined, labels are of
            unknown slides, or a patient has two labels.
        DamagedStore: a file cannot be read.
    """

    classes: Sequence[str] = ()
    """Empty, since patches of bags have no classes."""

    def __init__(
        self,
        folder: Path | Sequence[Path],
        *,
        bag: BagOf = "slide",
        labels: Callable[[SlideNames], Mapping[str, SlideLabel]] | None = None,
        columns: Sequence[str] = (),
        numbers: Mapping[str, int] | None = None,
        unlabelled: bool = False,
        on_error: OnError = "raise",
    ) -> None:
        self.folders = (folder,) if isinstance(folder, Path) else tuple(folder)
        for each in self.folders:
            if any((each / PARTS).glob("*-of-*")) and not (each / SLIDES).exists():
                raise UsageError(
                    f"{each} has parts that are not joined",
                    todo="run `histopipe embed` with --join when all parts have ended",
                )
        self.path = self.folders[0]
        headers, parts, self.failed, notes = join_feature_sets(self.folders, on_error)
        recorded = _recorded_slides(self.path, headers)
        dimensions = [header.dimension for header in next(iter(parts.values())).headers]
        self.dimension = sum(dimensions)
        self.uuid = "+".join(map(_identity, self.folders, dimensions))
        elsewhere = (recorded.keys() | self.failed.keys()) - headers.keys()
        rows = None if labels is None else labels(SlideNames(headers, elsewhere))
        self.slides = _slide_entries(headers, recorded, rows, self.path.name)
        """All slides by name, also those without label, patches or file; with a reason if they cannot be used."""
        labelled = {name: entry for name, entry in self.slides.items() if name in parts}
        groups = (
            _by_patient(labelled, columns, unlabelled=unlabelled)
            if bag == "patient"
            else {name: [name] for name in labelled}
        )
        bags = _numbered(
            [
                _bag(name, [labelled[slide] for slide in slides], parts)
                for name, slides in groups.items()
            ],
            numbers or {},
        )
        self.complete = dict(sorted(bags.items()))
        self.by_id = {bag.id: bag for bag in self}
        self.empty = tuple(name for name, header in headers.items() if not header.rows)
        """Slides without patches."""
        ignored = f"ignored: {counted(len(self.empty), 'feature file')} without patches"
        self.notes = (*notes, ignored) if self.empty else tuple(notes)

    def __iter__(self) -> Iterator[Bag]:
        return iter(self.complete.values())

    @property
    def records(self) -> Mapping[int, Bag]:
        """The same: all bags are complete."""
        return self.complete

    def slide_table(self, splits: Splits, *, from_file: bool) -> list[SlideEntry]:
        """Return all slides, each in the subset of its bag. `from_file` as for `missing_from`."""
        split_of = {slide.slide: slide for slide in splits.slides}
        # Joined sets may have fewer patches than the first one.
        used = {
            slide: (split_of.get(number), part.rows)
            for number, bag in self.complete.items()
            for slide, part in zip(bag.slides, bag.parts, strict=True)
        }
        entries = []
        for entry in self.slides.values():
            (split, rows), changes = used.get(entry.slide, (None, 0)), dict[str, Any]()
            if entry.reason is None and split is None:
                changes["reason"] = missing_from(splits, entry, from_file=from_file)
            elif entry.reason is None and split is not None:
                changes = {name: rows for name in SUBSETS if len(split.on(name))}
                left_out = entry.planned - entry.unreadable - (rows if changes else 0)
                reason = None if changes else Exclusion.LEFT_OUT
                changes |= {"reason": reason, "left_out": left_out}
            entries.append(replace(entry, **changes))
        return entries

    def index(self, slide: int) -> Mapping[str, NDArray[Any]]:
        """Return the columns of a bag, with one row."""
        return {"crc": np.array([self.complete[slide].crc], np.uint32)}


def _bag(name: str, entries: Sequence[SlideEntry], parts: Mapping[str, SlideFeatures]) -> Bag:
    return Bag(
        name,
        tuple(entry.slide for entry in entries),
        tuple(parts[entry.slide] for entry in entries),
        common_value([entry.label for entry in entries]) or None,
        entries[0].patient,
        common_value([entry.site for entry in entries]) or None,
        entries[0].cells,
    )


def _numbered(bags: Iterable[Bag], numbers: Mapping[str, int]) -> dict[int, Bag]:
    """Return bags by number. Known bags keep theirs, so that a new slide does not change them."""
    numbering = {nfc(name): n for name, n in numbers.items()} | dict(numbers)
    free = itertools.count(max(numbering.values(), default=-1) + 1)
    numbered = {}
    for bag in bags:
        number = numbering.get(bag.id, numbering.get(nfc(bag.id)))
        numbered[next(free) if number is None else number] = bag
    return numbered


def common_value(values: Sequence[Any]) -> Any:
    """Return the value that all have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None


def _identity(folder: Path, dimension: int) -> str:
    """Return an identifier: the recorded encoder, or the number of features in folders of other tools."""
    try:
        record = read_json(folder / ENCODER)
        return f"features-{record['sha256'][:16]}-{record['precision']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"features-{dimension}"


def _recorded_slides(folder: Path, names: Iterable[str]) -> dict[str, SlideEntry]:
    """Return the slides that `histopipe embed` found, by the name of the file; empty for folders of other tools."""
    by_name = {nfc(name): name for name in names}
    entries = read_slide_table(folder / SLIDES) if (folder / ENCODER).exists() else []
    return {by_name.get(nfc(slide.slide), slide.slide): slide for slide in entries}


def _slide_entries(
    headers: Mapping[str, FeatureHeader],
    recorded: Mapping[str, SlideEntry],
    rows: Mapping[str, SlideLabel] | None,
    store: str,
) -> dict[str, SlideEntry]:
    """Return all slides: those with a file, then the others. A file has priority over the record of its slide.

    `rows` are of the labels file. Slides that failed before have a reason, and so have slides without patches.
    """
    entries, label_source = {}, "folder or import" if rows is None else "labels file"
    for name in {**headers, **recorded}:
        header, entry = headers.get(name), recorded.get(name, SlideEntry(slide=name, patient=""))
        label, patient, site = (
            nfc(entry.value(key)) or None if header is None else header.text(key)
            for key in ("label", "patient", "site")
        )
        row = SlideLabel(label) if rows is None else rows.get(name, SlideLabel(None))
        if patient == name and "TCGA" not in name:
            patient = None  # earlier versions recorded no patient of lower-case TCGA barcodes
        reason: Exclusion | None = entry.reason or Exclusion.NO_FEATURES
        if header is not None:
            planned = max(entry.planned, header.rows)
            unusable = Exclusion.NO_READABLE_PATCH if planned else Exclusion.NO_PATCHES
            reason = None if header.rows else unusable
            entry = replace(entry, planned=planned, unreadable=planned - header.rows)
        entries[name] = replace(
            entry,
            slide=name,
            patient=row.patient or patient or patient_of(name),
            site=row.site or site or "",
            label=row.label or "",
            label_source=label_source if row.label else "",
            store=entry.store or store,
            cells=dict(row.cells),
            reason=reason,
        )
    return entries


def _by_patient(
    entries: Mapping[str, SlideEntry], columns: Sequence[str], *, unlabelled: bool
) -> dict[str, list[str]]:
    """Return the labelled slides of each patient, or all slides.

    All slides of a patient must have the same cells in `columns`, and the same label except with `unlabelled`.
    """
    labelled = (n for n, e in entries.items() if e.label or any(map(e.cells.get, columns)))
    groups = grouped(entries if unlabelled else labelled, lambda name: entries[name].patient)
    for patient, slides in groups.items():
        texts = [
            {
                **({} if unlabelled else {"labels": entry.label or "None"}),
                **{name: entry.cells.get(name, "") for name in columns},
            }
            for entry in map(entries.__getitem__, slides)
        ]
        for column in texts[0]:
            values = sorted({text[column] or "empty" for text in texts})
            if len(values) > 1:
                raise UsageError(
                    f"patient {patient}",
                    found=f"slides with {column} {' and '.join(values)}",
                    expected="the same for all slides of a patient with --bag patient",
                    todo="use --bag slide, or one value per patient in --labels",
                )
    return dict(sorted(groups.items()))


def read_bag(
    bag: Bag, dtype: np.dtype[Any], rows: NDArray[np.int64] | None = None
) -> NDArray[np.floating]:
    """Return the (R, D) features of (R,) sorted rows of a bag, or of all of them.

    Raises:
        DamagedStore: a file is damaged.
    """
    return joined_rows(
        [part.read(part_rows).astype(dtype, copy=False) for part, part_rows in _by_part(bag, rows)]
    )


def read_positions(bag: Bag, rows: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
    """Return the (R, 2) positions of (R,) sorted rows of a bag, or of all; see `SlideFeatures.positions`."""
    return joined_rows(
        [
            part.positions() if part_rows is None else part.positions()[part_rows]
            for part, part_rows in _by_part(bag, rows)
        ]
    )


def _by_part(
    bag: Bag, rows: NDArray[np.int64] | None
) -> Iterator[tuple[SlideFeatures, NDArray[np.int64] | None]]:
    ends = itertools.accumulate(part.rows for part in bag.parts)
    for part, end in zip(bag.parts, ends, strict=True):
        begin = end - part.rows
        yield part, None if rows is None else rows[(rows >= begin) & (rows < end)] - begin


def joined_rows(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the rows of all arrays."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # one part needs no copy
