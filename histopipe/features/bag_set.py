"""Bags of a folder of feature files: the slides, or patients, that a multiple-instance model is trained on."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.features import BagOf
from histopipe.features.feature_file import FeatureHeader, read_header
from histopipe.features.feature_folder import ENCODER, feature_files
from histopipe.ingestion.records import patient_of
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels
from histopipe.system.files import read_json


@dataclass(frozen=True, slots=True)
class Bag:
    """The patches of a slide, or of all slides of a patient: a `SampleGroup` of one sample.

    Attributes:
        id: slide id, or patient.
        slides: ids of its slides.
        headers: their feature files.
        label, patient, site: of its slides; no site if these are of several.
        content: checksum that bags with copies of one slide share; None if unknown.
    """

    planned: ClassVar = 1
    stored: ClassVar = 1
    patch_labels: ClassVar[Mapping[str, int]] = {}

    id: str
    slides: tuple[str, ...]
    headers: tuple[FeatureHeader, ...]
    label: str | None
    patient: str | None
    site: str | None
    content: str | None

    @property
    def rows(self) -> int:
        """Number of patches."""
        return sum(header.rows for header in self.headers)

    @property
    def crc(self) -> int:
        """Checksum of its feature files, by their recorded checksums or by sampled rows."""
        files = [
            (
                header.rows,
                header.dimension,
                str(header.dtype),
                int(header.facts.get("crc32", header.sample)),
            )
            for header in self.headers
        ]
        return zlib.crc32(repr((self.slides, files)).encode())


class BagSet:
    """The bags of a folder of feature files: a `SampleSource`, as a store is.

    Args:
        folder: feature files by `histopipe embed`, CLAM or TRIDENT.
        bag: what a bag holds the patches of.
        labels: CSV file slide,label[,patient][,site]; by default the labels that `histopipe embed` recorded.
        allow_extra: ignore rows that name no slide.
        numbers: numbers of bags by name in existing splits; other bags get higher numbers.

    Raises:
        NothingToDo: the folder holds no features.
        UsageError: files without features or with different numbers of features, labels of unknown slides, or a patient with two
            labels.
        DamagedStore: a file cannot be read.

    Attributes:
        bags: bags by number.
        dimension: number of features per patch.
        notes: remarks for the user.
    """

    classes: Sequence[str] = ()
    """Patches of bags have no classes of their own."""

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
        headers = {name: read_header(path) for name, path in feature_files(folder).items()}
        filled = {name: header for name, header in headers.items() if header.rows}
        if not filled:
            raise NothingToDo(
                f"{folder} holds no features",
                expected="files SLIDE.h5, as `histopipe embed` writes them",
            )
        self.dimension = _common_dimension(filled)
        self.uuid = _identity(folder, self.dimension)
        labelled = _slide_labels(headers, labels, allow_extra=allow_extra)
        labelled = {name: label for name, label in labelled.items() if name in filled}
        groups = _by_patient(labelled) if bag == "patient" else {name: [name] for name in labelled}
        contents = _contents(groups, filled)
        self.bags = _numbered(
            [
                _bag(name, slides, filled, labelled, contents[name])
                for name, slides in groups.items()
            ],
            numbers or {},
        )
        empty = len(headers) - len(filled)
        self.notes = (f"{empty} feature files without patches are ignored",) if empty else ()

    @property
    def records(self) -> Mapping[int, Bag]:
        """All bags by number."""
        return self.bags

    @property
    def complete(self) -> Mapping[int, Bag]:
        """All bags by number: all can be read."""
        return self.bags

    @property
    def slides(self) -> Sequence[Bag]:
        """All bags."""
        return list(self.bags.values())

    def index(self, slide: int) -> Mapping[str, NDArray[Any]]:
        """Return the columns of a bag, with one row."""
        return {"crc": np.array([self.bags[slide].crc], np.uint32)}


def _common_dimension(headers: Mapping[str, FeatureHeader]) -> int:
    first, *others = headers.values()
    for header in others:
        if header.dimension != first.dimension:
            raise UsageError(
                f"{header.path}: features per patch", found=header.dimension,
                expected=f"{first.dimension}, as in {first.path}",
                todo="use one folder per encoder",
            )  # fmt: skip
    return first.dimension


def _identity(folder: Path, dimension: int) -> str:
    """Return the recorded encoder of the features; in folders of other tools, the number of features."""
    try:
        found = read_json(folder / ENCODER)
        return f"features-{found['sha256'][:16]}-{found['precision']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"features-{dimension}"


def _slide_labels(
    headers: Mapping[str, FeatureHeader], labels: Path | None, *, allow_extra: bool
) -> dict[str, SlideLabel]:
    """Return label, patient and site of every slide. The patient is never empty."""
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
            label.label,
            label.patient or recorded[name].patient or patient_of(name),
            label.site or recorded[name].site,
        )
        for name, label in given.items()
    }


def _text(value: Any) -> str | None:
    """Return an attribute of a file as text; writers use several types."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _numbered(bags: Sequence[Bag], numbers: Mapping[str, int]) -> dict[int, Bag]:
    """Return bags by number. Known bags keep their numbers, so that a new slide in the folder changes none."""
    others = itertools.count(max(numbers.values(), default=-1) + 1)
    found = {numbers[bag.id] if bag.id in numbers else next(others): bag for bag in bags}
    return dict(sorted(found.items()))


def _contents(
    groups: Mapping[str, Sequence[str]], headers: Mapping[str, FeatureHeader]
) -> dict[str, str | None]:
    """Return one content checksum per bag, by name. Bags with copies of one slide share it; None if unknown."""
    parent: dict[str, str] = {}

    def root(content: str) -> str:
        while parent.setdefault(content, content) != content:
            content = parent[content]
        return content

    contents = {
        name: [text for it in slides if (text := _text(headers[it].facts.get("content")))]
        for name, slides in groups.items()
    }
    for first, *others in filter(None, contents.values()):
        for other in others:
            parent[root(other)] = root(first)
    return {name: root(found[0]) if found else None for name, found in contents.items()}


def _by_patient(labels: Mapping[str, SlideLabel]) -> dict[str, list[str]]:
    """Return the labelled slides of each patient.

    Raises:
        UsageError: a patient has slides with different labels.
    """
    groups: dict[str, list[str]] = {}
    for name, label in labels.items():
        if label.label:
            groups.setdefault(str(label.patient), []).append(name)
    for patient, slides in groups.items():
        found = sorted({str(labels[name].label) for name in slides})
        if len(found) > 1:
            raise UsageError(
                f"patient {patient}", found=f"slides labelled {' and '.join(found)}",
                expected="one label for all slides of a patient with --bag patient",
                todo="use --bag slide, or one label per patient in --labels",
            )  # fmt: skip
    return dict(sorted(groups.items()))


def _bag(
    name: str,
    slides: Sequence[str],
    headers: Mapping[str, FeatureHeader],
    labels: Mapping[str, SlideLabel],
    content: str | None,
) -> Bag:
    """Create a bag. With slides of several sites it has none: then it can be split by patient only."""
    sites, first = {labels[slide].site for slide in slides}, labels[slides[0]]
    return Bag(
        name, tuple(slides), tuple(headers[slide] for slide in slides), first.label, first.patient,
        sites.pop() if len(sites) == 1 else None, content,
    )  # fmt: skip
