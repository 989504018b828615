"""Bags of a folder of feature files: the slides, or the patients, that a multiple-instance model learns of."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.features import BagOf
from histopipe.features.feature_file import FeatureHeader, read_header
from histopipe.features.feature_folder import feature_files
from histopipe.ingest.records import patient_of
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels
from histopipe.store.record import SlideRecord, SlideState
from histopipe.system.files import read_json


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
            (
                header.rows,
                header.dimension,
                str(header.dtype),
                int(header.facts.get("crc32", header.sample)),
            )
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
        numbers: of bags by name, as splits that are to be read have them; others get numbers behind these.

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
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        self.path = folder
        self.classes: Sequence[str] = ()  # a bag is of its slide's
        headers = {name: read_header(path) for name, path in feature_files(folder).items()}
        filled = {name: header for name, header in headers.items() if header.rows}
        if not filled:
            raise NothingToDo(
                f"{folder} holds no features",
                expected="files NAME.h5, as `histopipe embed` makes them",
            )
        self.dimension = _common_dimension(filled)
        self.uuid = _identity(folder, self.dimension)
        said = _said(headers, labels, allow_extra=allow_extra)
        said = {name: of_it for name, of_it in said.items() if name in filled}
        grouped = _by_patient(said) if bag == "patient" else {name: [name] for name in said}
        made = [
            Bag(name, tuple(slides), tuple(filled[slide] for slide in slides))
            for name, slides in grouped.items()
        ]
        self.bags = _numbered(made, numbers or {})
        scans = _scans(made)
        self.records = {
            number: _record(bag, [said[slide] for slide in bag.slides], scans[bag.name])
            for number, bag in self.bags.items()
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
        found = read_json(folder / "features.json")
        return f"features-{found['sha256'][:16]}-{found['precision']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"features-{dimension}"


def _said(
    headers: Mapping[str, FeatureHeader], labels: Path | None, *, allow_extra: bool
) -> dict[str, SlideLabel]:
    """Label, patient and site of every slide; its patient is never empty."""
    recorded = {
        name: SlideLabel(*(_text(header.facts.get(key)) for key in ("label", "patient", "site")))
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


def _text(value: Any) -> str | None:
    """An attribute of a file, of whatever type its writer gave it."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _numbered(bags: Sequence[Bag], numbers: Mapping[str, int]) -> dict[int, Bag]:
    """Bags by number: those that are known keep theirs, so that one more slide in the folder moves none."""
    behind = itertools.count(max(numbers.values(), default=-1) + 1)
    found = {numbers[bag.name] if bag.name in numbers else next(behind): bag for bag in bags}
    return dict(sorted(found.items()))


def _scans(bags: Sequence[Bag]) -> dict[str, str | None]:
    """What bags have in common that hold copies of one scan, by name; None for those of which no content is known."""
    parent: dict[str, str] = {}

    def root(content: str) -> str:
        while parent.setdefault(content, content) != content:
            content = parent[content]
        return content

    contents = {
        bag.name: [text for h in bag.headers if (text := _text(h.facts.get("content")))]
        for bag in bags
    }
    for first, *others in filter(None, contents.values()):
        for other in others:
            parent[root(other)] = root(first)
    return {name: root(found[0]) if found else None for name, found in contents.items()}


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


def _record(bag: Bag, said: Sequence[SlideLabel], scan: str | None) -> SlideRecord:
    """A bag as splits see it. One of slides of several sites has none: it can be split by patient only."""
    path, sites = str(bag.headers[0].path), {of_it.site for of_it in said}
    return SlideRecord(
        id=bag.name, path=path, resolved_path=path, state=SlideState.COMPLETE, planned=1, stored=1,
        label=said[0].label, patient=said[0].patient, site=sites.pop() if len(sites) == 1 else None,
        quickhash=scan,
    )  # fmt: skip
