"""Bags of a folder of feature files, for multiple-instance learning, and batches of whole bags without padding."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import OnError
from histopipe.dataset.sample_table import SampleTable, SlideValues
from histopipe.dataset.sampling import BatchSampler, Field, Order
from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.features import BagOf
from histopipe.features.feature_file import (
    ENCODER,
    FeatureHeader,
    feature_files,
    read_features,
    read_header,
)
from histopipe.ingestion.records import patient_of
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels
from histopipe.system.files import read_json
from histopipe.system.hashing import combine, permuted


@dataclass(frozen=True, slots=True)
class Bag:
    """The patches of a slide, or of all slides of a patient, with the patient as `id`: a `SampleGroup` of one sample.

    `site` is None if the slides have different sites. Bags with copies of one slide have the same `content`. `cells` are
    those of further columns of the labels file.
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
    cells: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of patches."""
        return sum(header.rows for header in self.headers)

    @property
    def crc(self) -> int:
        """Checksum of the feature files, from their recorded checksums or from sampled rows."""
        files = [
            (h.rows, h.dimension, str(h.dtype), int(h.facts.get("crc32", h.sample)))
            for h in self.headers
        ]
        return zlib.crc32(repr((self.slides, files)).encode())


class BagSet:
    """The bags of a folder of feature files: a `SampleSource` like a store.

    The files come from `histopipe embed`, CLAM or TRIDENT. Labels come from a CSV file with the columns slide, label, and
    optionally patient and site; `allow_extra` ignores its rows that name no slide. By default they are those that
    `histopipe embed` recorded. `columns` and `with_label` as for `read_labels`. Bags keep their `numbers`, by name, in existing splits; other bags get higher ones.

    Raises:
        NothingToDo: the folder contains no features.
        UsageError: files have no features or different numbers of features, labels are of unknown slides, or a patient
            has two labels.
        DamagedStore: a file cannot be read.
    """

    classes: Sequence[str] = ()
    """Empty, since patches of bags have no classes."""

    def __init__(
        self,
        folder: Path,
        *,
        bag: BagOf = "slide",
        labels: Path | None = None,
        columns: Sequence[str] = (),
        with_label: bool = True,
        allow_extra: bool = False,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        self.path = folder
        headers = {name: read_header(path) for name, path in feature_files(folder).items()}
        filled = {name: header for name, header in headers.items() if header.rows}
        if not filled:
            raise NothingToDo(
                f"{folder} contains no features",
                expected="files SLIDE.h5 from `histopipe embed`",
            )
        self.dimension = _common_dimension(filled)
        self.uuid = _identity(folder, self.dimension)
        rows = None
        if labels is not None:
            rows = read_labels(
                labels, SlideNames(headers), columns=columns, with_label=with_label,
                allow_extra=allow_extra,
            )  # fmt: skip
        labelled = _slide_labels(headers, rows)
        labelled = {name: label for name, label in labelled.items() if name in filled}
        groups = _by_patient(labelled) if bag == "patient" else {name: [name] for name in labelled}
        contents = _contents(groups, filled)
        # Known bags keep their numbers, so that a new slide does not change them.
        known = numbers or {}
        others = itertools.count(max(known.values(), default=-1) + 1)
        bags = {}
        for name, slides in groups.items():
            sites, first = {labelled[slide].site for slide in slides}, labelled[slides[0]]
            bags[known[name] if name in known else next(others)] = Bag(
                name, tuple(slides), tuple(filled[slide] for slide in slides), first.label, first.patient,
                sites.pop() if len(sites) == 1 else None, contents[name], first.cells,
            )  # fmt: skip
        self.bags = self.records = self.complete = dict(sorted(bags.items()))
        empty = len(headers) - len(filled)
        self.notes = (f"{empty} feature files without patches are ignored",) if empty else ()

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
    """Return an identifier: the recorded encoder, or the number of features in folders of other tools."""
    try:
        found = read_json(folder / ENCODER)
        return f"features-{found['sha256'][:16]}-{found['precision']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"features-{dimension}"


def _slide_labels(
    headers: Mapping[str, FeatureHeader], rows: Mapping[str, SlideLabel] | None
) -> dict[str, SlideLabel]:
    """Return label, patient and site of every slide. The patient is never empty. `rows` are of the labels file."""
    found = {}
    for name, header in headers.items():
        label, patient, site = (
            _text(header.facts.get(key)) for key in ("label", "patient", "site")
        )
        given = SlideLabel(label) if rows is None else rows.get(name, SlideLabel(None))
        patient = given.patient or patient or patient_of(name)
        found[name] = SlideLabel(given.label, patient, given.site or site, given.cells)
    return found


def _text(value: Any) -> str | None:
    """Return an attribute of a file as text; writers use several types."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _contents(
    groups: Mapping[str, Sequence[str]], headers: Mapping[str, FeatureHeader]
) -> dict[str, str | None]:
    """Return a content checksum per bag, by name; None if unknown. It is equal for bags with copies of one slide."""
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
    """Return the labelled slides of each patient. All of them must have the same label and the same cells."""
    groups: dict[str, list[str]] = {}
    for name, label in labels.items():
        if label.label or any(label.cells.values()):
            groups.setdefault(str(label.patient), []).append(name)
    for patient, slides in groups.items():
        texts = [{"labels": str(it.label), **it.cells} for it in map(labels.__getitem__, slides)]
        for column in texts[0]:
            found = sorted({text[column] or "empty" for text in texts})
            if len(found) > 1:
                raise UsageError(
                    f"patient {patient}", found=f"slides with {column} {' and '.join(found)}",
                    expected="the same for all slides of a patient with --bag patient",
                    todo="use --bag slide, or one value per patient in --labels",
                )  # fmt: skip
    return dict(sorted(groups.items()))


_DRAW = 301


class BagBatches(BatchSampler):
    """Batches of bags, in a given order.

    With `on_error="skip"`, a damaged bag gets weight 0. `most` limits the patches of a bag per epoch; 0 is no limit.
    Each epoch draws different patches, by `seed`.
    """

    # A bag may be a gigabyte, so only the next one is loaded in advance.
    parallel_calls: int | None = 1
    prefetch = 0
    read_ahead: int | None = 0

    def __init__(
        self,
        bags: BagSet,
        table: SampleTable,
        *,
        batch_size: int,
        order: Order,
        replicas: int = 1,
        on_error: OnError = "raise",
        most: int = 0,
        seed: int = 0,
        by_slide: Mapping[str, SlideValues] | None = None,
    ) -> None:
        super().__init__(
            table, batch_size=batch_size, order=order, replicas=replicas, by_slide=by_slide
        )
        self._bags, self._skip, self._most, self._seed = bags, on_error == "skip", most, seed
        self.dtype = np.result_type(*(h.dtype for bag in bags.bags.values() for h in bag.headers))
        self.fields = (
            Field("features", self.dtype, (bags.dimension,), ragged=True),
            Field("end", np.int64), Field("label", np.int32), Field("weight", np.float32),
            Field("key", np.int64), *self._slide_fields(),
        )  # fmt: skip

    def values(self, step: int, replica: int) -> tuple[Any, ...]:
        """Return the fields of a replica's part of a step: (R, D) features, and for each bag its end row and so on.

        Raises:
            DamagedStore: a bag is damaged, and damaged bags are not skipped.
        """
        located, weights = self.locate(step, replica)
        keys = located.keys
        parts = []
        for i, number in enumerate(located.slides.tolist()):
            found = (
                self._read(number, step // self.steps_per_epoch, keys[i]) if weights[i] else None
            )
            if found is None:
                # A bag of weight 0 is not read.
                weights[i], found = 0, np.zeros((1, self._bags.dimension), self.dtype)
            parts.append(found)
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return _joined(parts), ends, located.labels, weights, keys, *self._slide_values(located)

    def _read(self, number: int, epoch: int, key: int) -> NDArray[np.floating] | None:
        try:
            return read_bag(self._bags.bags[number], self.dtype, self._draw_rows(number, epoch))
        except DamagedStore as error:
            if not self._skip:
                raise
            self._note_skipped(int(key), str(error))
            return None

    def _draw_rows(self, number: int, epoch: int) -> NDArray[np.int64] | None:
        """Return the rows of a bag in an epoch, sorted; None for all."""
        size = self._bags.bags[number].rows
        if not 0 < self._most < size:
            return None
        # Consecutive epochs go through one permutation, so that the fewest epochs cover all rows.
        rounds, begin = divmod(epoch, -(-size // self._most))
        positions = (begin * self._most + np.arange(self._most)) % size
        return np.sort(permuted(positions, size, combine(self._seed, _DRAW, number, rounds)))


def read_bag(
    bag: Bag, dtype: np.dtype[Any], rows: NDArray[np.int64] | None = None
) -> NDArray[np.floating]:
    """Return the (R, D) features of (R,) sorted rows of a bag, or of all of them.

    Raises:
        DamagedStore: a file is damaged.
    """
    begins = np.cumsum([0, *(header.rows for header in bag.headers)])
    parts = []
    for header, begin, end in zip(bag.headers, begins, begins[1:], strict=False):
        own = None if rows is None else rows[(rows >= begin) & (rows < end)] - begin
        parts.append(read_features(header, own).astype(dtype, copy=False))
    return _joined(parts)


def _joined(parts: list[NDArray[np.floating]]) -> NDArray[np.floating]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # one part needs no copy
