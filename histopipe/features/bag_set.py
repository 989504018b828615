"""Bags of a folder of feature files: the slides, or the patients, that a multiple-instance model learns of."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.features.feature_file import FeatureHeader, read_header
from histopipe.features.folder import feature_files
from histopipe.features.kinds import BagOf
from histopipe.ingest.labels import patient_of
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels
from histopipe.store.record import SlideRecord, SlideState


@dataclass(frozen=True, slots=True)
class Bag:
    """The patches of a slide, or of all of a patient's slides.

    Attributes:
        name: the slide's id, or the patient.
        slides: ids of its slides.
        headers: their feature files.
    """

    name: str
    slides: tuple[str, ...]
    headers: tuple[FeatureHeader, ...]

    @property
    def rows(self) -> int:
        """Patches."""
        return sum(header.rows for header in self.headers)

    @property
    def crc(self) -> int:
        """A checksum of what its files are, without reading their features."""
        facts = [
            (header.rows, header.dimension, str(header.dtype), int(header.facts.get("crc32", 0)))
            for header in self.headers
        ]
        return zlib.crc32(repr((self.slides, facts)).encode())


class BagSet:
    """The bags of a folder. To splits it is what a store is: slides with one item each.

    Args:
        folder: of feature files, as `histopipe embed`, CLAM or TRIDENT make them.
        bag: what a bag is of.
        labels: a CSV slide,label[,patient][,site]; what `histopipe embed` recorded, if not given.
        allow_extra: ignore rows of it that name no slide.

    Raises:
        NothingToDo: the folder holds no features.
        UsageError: its files are no features or differ in their number, labels that fit no slide, or a patient of two labels.
        DamagedStore: a file cannot be read.

    Attributes:
        bags: by number.
        dimension: features of a patch.
        notes: what to know about it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bag: BagOf = "slide",
        labels: Path | None = None,
        allow_extra: bool = False,
    ) -> None:
        self.path = folder
        headers = {name: read_header(path) for name, path in feature_files(folder).items()}
        filled = {name: header for name, header in headers.items() if header.rows}
        if not filled:
            raise NothingToDo(
                f"{folder} holds no features",
                expected="files NAME.h5, as `histopipe embed` makes them",
            )
        self.dimension = _common_dimension(filled)
        self.uuid = _identity(folder, self.dimension)
        said = _said(filled, labels, allow_extra=allow_extra)
        grouped = _by_patient(said) if bag == "patient" else {name: [name] for name in said}
        self.bags = [
            Bag(name, tuple(slides), tuple(filled[slide] for slide in slides))
            for name, slides in grouped.items()
        ]
        self.records = {
            number: _record(bag, said[bag.slides[0]]) for number, bag in enumerate(self.bags)
        }
        empty = len(headers) - len(filled)
        self.notes = (f"{empty} feature files without a patch are left out",) if empty else ()

    @property
    def slides(self) -> list[SlideRecord]:
        """Every bag's record."""
        return list(self.records.values())

    @property
    def complete(self) -> Mapping[int, SlideRecord]:
        """Every bag's record by number: all can be read."""
        return self.records

    def index(self, slide: int) -> Mapping[str, NDArray[Any]]:
        """The columns of a bag's one item."""
        return {"crc": np.array([self.bags[slide].crc], np.uint32)}


def _common_dimension(headers: Mapping[str, FeatureHeader]) -> int:
    first, *others = headers.values()
    for header in others:
        if header.dimension != first.dimension:
            raise UsageError(
                f"{header.path}: features of a patch", found=header.dimension,
                expected=f"{first.dimension}, as in {first.path}",
                todo="give each encoder's features a folder of their own",
            )  # fmt: skip
    return first.dimension


def _identity(folder: Path, dimension: int) -> str:
    """What made the features, if that is written down; how many there are, in other tools' folders."""
    try:
        found = json.loads((folder / "features.json").read_text(encoding="utf-8"))
        return f"features-{found['sha256'][:16]}-{found['precision']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"features-{dimension}"


def _said(
    headers: Mapping[str, FeatureHeader], labels: Path | None, *, allow_extra: bool
) -> dict[str, SlideLabel]:
    """Label, patient and site of every slide; its patient is never empty."""
    recorded = {
        name: SlideLabel(*(header.facts.get(key) for key in ("label", "patient", "site")))
        for name, header in headers.items()
    }
    if labels is None:
        given = recorded
    else:
        rows = read_labels(labels, SlideNames(headers), allow_extra=allow_extra)
        given = {name: rows.get(name, SlideLabel(None)) for name in headers}
    return {
        name: SlideLabel(
            said.label,
            said.patient or recorded[name].patient or patient_of(name),
            said.site or recorded[name].site,
        )
        for name, said in given.items()
    }


def _by_patient(said: Mapping[str, SlideLabel]) -> dict[str, list[str]]:
    """The labelled slides of each patient."""
    grouped: dict[str, list[str]] = {}
    for name, of_it in said.items():
        if of_it.label:
            grouped.setdefault(str(of_it.patient), []).append(name)
    for patient, slides in grouped.items():
        found = sorted({str(said[name].label) for name in slides})
        if len(found) > 1:
            raise UsageError(
                f"patient {patient}", found=f"slides labelled {' and '.join(found)}",
                expected="one label, where a bag is all of a patient's slides",
                todo="take --bag slide, or label patients in --labels",
            )  # fmt: skip
    return dict(sorted(grouped.items()))


def _record(bag: Bag, said: SlideLabel) -> SlideRecord:
    contents: Sequence[Any] = [header.facts.get("content") for header in bag.headers]
    return SlideRecord(
        id=bag.name, path=str(bag.headers[0].path), resolved_path=str(bag.headers[0].path),
        state=SlideState.COMPLETE, planned=1, stored=1, label=said.label, patient=said.patient,
        site=said.site,
        # A patient's slides together are a copy of nothing.
        quickhash=contents[0] if len(contents) == 1 else None,
    )  # fmt: skip
