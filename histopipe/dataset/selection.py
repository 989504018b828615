"""Selection: the stores, slides and patches of a dataset, and the class of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import Classes
from histopipe.errors import NothingToDo, UsageError
from histopipe.splits.labelling import NO_CLASS, PatchFilter
from histopipe.splits.splits import SampleGroup, SampleSource, Splits
from histopipe.store.store import parts_of
from histopipe.system.hashing import combine, permuted
from histopipe.system.output import some
from histopipe.system.table_cells import nfc
from histopipe.tasks.choices import LabelsFrom, Subset

_MAX_STORES = 127
"""A key has 7 bits for the store: the eighth is the sign of int64."""

_CAP_DRAW = 201


SlideValues = Mapping[tuple[int, int], Sequence[float]]
"""W numbers of each slide, targets or covariates, by position of the store and slide number."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of one slide, or of one bag, in a dataset.

    `store` is the position in the list of stores, `label` a class number or `NO_CLASS`. `rows` are (N,) int32, or None
    for all rows.
    """

    store: int
    slide: int
    count: int
    label: int
    rows: NDArray[np.int32] | None = None
    patient: str = ""


@dataclass(frozen=True, slots=True)
class SampleLocations:
    """Locations of samples, (N,) each: position of the store, slide number, row in the slide; and class numbers."""

    stores: NDArray[np.int64]
    slides: NDArray[np.int64]
    rows: NDArray[np.int64]
    labels: NDArray[np.int32]

    @property
    def keys(self) -> NDArray[np.int64]:
        """Keys of the samples in the dataset, (N,) int64: store << 56 | slide << 32 | row; see `unpack_keys`."""
        return (self.stores << 56) | (self.slides << 32) | self.rows

    def values(self, of_slides: SlideValues) -> NDArray[np.float32]:
        """Return the (N, W) values of the slides of the samples."""
        places = zip(self.stores.tolist(), self.slides.tolist(), strict=True)
        return np.array([of_slides[place] for place in places], np.float32)


class SampleTable:
    """All samples of a dataset, numbered consecutively. Memory: a row per slide, and 4 bytes per selected row.

    `max_per_slide`, 1 or more, limits the samples of a slide per epoch. With a seed, each epoch draws different samples,
    until all have been drawn. Without a seed, the samples are spread evenly over the slide.

    Attributes:
        counts, starts: (S,) samples of each slide per epoch, and the number of its first sample.
        capped: whether there is a `max_per_slide`.

    Raises:
        NothingToDo: there is no sample.
    """

    def __init__(
        self,
        slides: Sequence[SampleRows],
        *,
        max_per_slide: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.slides = [slide for slide in slides if slide.count]
        if not self.slides:
            raise NothingToDo(
                "no patch to read", todo="run `histopipe info` to show the contents of the store"
            )
        self._sizes, self._stores, self._numbers, labels = (
            np.array(column, np.int64)
            for column in zip(
                *((s.count, s.store, s.slide, s.label) for s in self.slides), strict=True
            )
        )
        self._labels = labels.astype(np.int32)
        self._seed, self.capped = seed, max_per_slide is not None
        self.counts = np.minimum(self._sizes, max_per_slide or self._sizes.max())
        self._ends = np.cumsum(self.counts)
        self.starts = self._ends - self.counts
        self._chosen = {
            i: slide.rows for i, slide in enumerate(self.slides) if slide.rows is not None
        }

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, numbers: NDArray[np.int64], epoch: int = 0) -> SampleLocations:
        """Locate samples by number (N,); with `max_per_slide` the location depends on the epoch."""
        position = np.searchsorted(self._ends, numbers, side="right")
        rows = numbers - self.starts[position]
        if self.capped:
            rows = self._draw_rows(position, rows, epoch)
        for i in self._chosen.keys() & position.tolist():
            in_slide = position == i
            rows[in_slide] = self._chosen[i][rows[in_slide]]
        return SampleLocations(
            self._stores[position], self._numbers[position], rows, self._labels[position]
        )

    def _draw_rows(
        self, position: NDArray[np.int64], rows: NDArray[np.int64], epoch: int
    ) -> NDArray[np.int64]:
        """Return the row of each sample of an epoch, from its number within its slide."""
        sizes, counts = self._sizes[position], self.counts[position]
        if self._seed is None:
            return rows * sizes // counts
        # A round of epochs goes through one permutation. Its last epoch continues at the start of the permutation.
        rounds, number = np.divmod(epoch, -(-sizes // counts))
        keys = combine(self._seed, _CAP_DRAW, position, rounds)
        return permuted((number * counts + rows) % sizes, sizes, keys)


def unpack_keys(
    keys: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Unpack keys into store, slide and row, (N,) each."""
    return keys >> 56, (keys >> 32) & 0xFFFFFF, keys & 0xFFFFFFFF


LabelById = Mapping[str, str | None]


def store_paths(path: Any) -> list[Path]:
    """Return the paths of the stores in one path or several. A folder of parts is replaced by its parts.

    Raises:
        UsageError: there is no store, or a store is given twice.
    """
    parts = [path] if isinstance(path, str) or not isinstance(path, Iterable) else list(path)
    if not parts:
        raise UsageError("no store given")
    paths = [store for part in parts for store in parts_of(Path(part))]
    twice = [real for real, times in Counter(map(os.path.realpath, paths)).items() if times > 1]
    if twice:
        raise UsageError("a store is given twice", found=", ".join(twice))
    return paths


def class_numbers(classes: Classes | None, labels: Iterable[str]) -> dict[str, int]:
    """Return the number of each class by name.

    `classes` are names in the order of their numbers, or numbers by name; several names may have the same number.
    Default: the sorted labels in `labels`.

    Raises:
        UsageError: a name is given twice, or numbers are not 0, 1, 2, ….
    """
    if classes is None:
        classes = sorted(set(labels))
    elif (
        not classes
        or not isinstance(classes, list | tuple | Mapping)
        or not all(isinstance(name, str) for name in classes)
    ):
        raise UsageError(
            "classes", found=repr(classes), expected="a list of names, or a mapping of them"
        )
    if isinstance(classes, Mapping):
        used = sorted(set(classes.values()))
        if used != list(range(len(used))):
            raise UsageError("classes: the numbers", found=used, expected="0, 1, 2, … without gaps")
        return dict(classes)
    if len(set(classes)) != len(classes):
        raise UsageError("classes: a name is given twice", found=", ".join(classes))
    return {name: number for number, name in enumerate(classes)}


def select(
    stores: Sequence[SampleSource],
    *,
    classes: Classes | None = None,
    labels: LabelById | None = None,
    splits: Splits | None = None,
    subset: Subset = "train",
    labelled_only: bool = False,
    labels_from: LabelsFrom = "slide",
    patch_filter: PatchFilter | None = None,
) -> list[SampleRows]:
    """Select the slides and rows of a dataset, in the order of the stores.

    A slide whose label is not in `classes` (see `class_numbers`) is unlabelled. `labels`, by slide id, replace the
    recorded ones; all other slides are unlabelled. With labels from annotations, the result has an item per slide and
    class. Splits select the patches in `subset`, and record the source of their labels.

    Raises:
        UsageError: there are too many stores, wrong classes, or labels of unknown slides.
    """
    if labels is not None and not (isinstance(labels, Mapping) and labels):
        raise UsageError("labels", found=repr(labels), expected="a CSV, or labels by slide id")
    if len(stores) > _MAX_STORES:
        raise UsageError(
            "stores in one dataset", found=len(stores), expected=f"at most {_MAX_STORES}"
        )
    complete = {(o, n): r for o, store in enumerate(stores) for n, r in store.complete.items()}
    if labels is not None:
        labels = {nfc(slide): label and nfc(label) for slide, label in labels.items()}
        unknown = sorted(
            labels.keys()
            - {nfc(record.id) for store in stores for record in store.records.values()}
        )
        if unknown:
            raise UsageError(
                "labels of slides that are not in the stores",
                found=some(unknown, 3),
                expected="slide ids as `histopipe info` shows them",
            )
    elif splits is not None and classes is None:
        classes = splits.classes
    parts = list(
        _parts(stores, complete, labels, labels_from)
        if splits is None
        else _parts_of(splits, subset, complete, labels)
    )
    numbers = class_numbers(classes, [name for _, _, name in parts if name])
    numbers = {**{nfc(name): number for name, number in numbers.items()}, **numbers}
    patients = {(s.store, s.slide): s.patient for s in splits.slides} if splits else {}
    chosen = []
    for key, rows, name in parts:
        label = numbers.get(name or "", numbers.get(nfc(name or ""), NO_CLASS))
        if label == NO_CLASS and labelled_only:
            continue
        store, record = stores[key[0]], complete[key]
        if patch_filter is not None and patch_filter.active:
            fit = patch_filter.fit(store.index(key[1]), where=f"{store.path}, slide {record.id}")
            rows = (np.flatnonzero(fit) if rows is None else rows[fit[rows]]).astype(np.int32)  # noqa: PLW2901
        count = record.stored if rows is None else len(rows)
        chosen.append(
            SampleRows(*key, count, label, rows, patients.get(key) or record.patient or record.id)
        )
    return chosen


_Key = tuple[int, int]
"""Position in the list of stores, and slide number."""


_Part = tuple[_Key, NDArray[np.int32] | None, str | None]
"""A slide, or a class of it: its rows, None for all to save memory; and its label."""


def _parts_of(
    splits: Splits,
    subset: Subset,
    complete: Mapping[_Key, SampleGroup],
    labels: LabelById | None,
) -> Iterator[_Part]:
    """Yield the slides in a subset; with labels from annotations, each class of a slide."""
    for slide in splits.slides:
        key = (slide.store, slide.slide)
        if slide.labels is not None:
            for name, rows in splits.by_class(slide, subset).items():
                yield key, rows, name
        else:
            in_subset = slide.on(subset)
            label = slide.label if labels is None else labels.get(nfc(complete[key].id))
            yield key, None if len(in_subset) == slide.count else in_subset, label


def _parts(
    stores: Sequence[SampleSource],
    complete: Mapping[_Key, SampleGroup],
    labels: LabelById | None,
    labels_from: LabelsFrom,
) -> Iterator[_Part]:
    """Yield all slides; with labels from annotations, each class of a slide."""
    for key, record in complete.items():
        store = stores[key[0]]
        if labels_from == "annotation":
            index, names = store.index(key[1]), dict(enumerate(map(nfc, store.classes)))
            for number in np.unique(index["label"]).tolist():
                of_class = np.flatnonzero((index["label"] == number) & (index["length"] > 0))
                yield key, of_class.astype(np.int32), names.get(number)
        else:
            readable = None
            if record.stored < record.planned:  # otherwise the index is not needed
                readable = np.flatnonzero(store.index(key[1])["length"]).astype(np.int32)
            yield key, readable, record.label if labels is None else labels.get(nfc(record.id))
