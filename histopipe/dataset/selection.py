"""Selection: the stores, slides and patches of a dataset, and the class of each; and the options of a dataset."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, OnError, UsageError
from histopipe.splits.labelling import NO_CLASS, PatchFilter
from histopipe.splits.splits import SampleGroup, SampleSource, Splits
from histopipe.store.store import parts_of
from histopipe.system.hashing import combine, permuted
from histopipe.system.output import some
from histopipe.system.settings import check_settings, setting
from histopipe.system.table_cells import NA_VALUES, nfc
from histopipe.tasks.choices import Balance, LabelsFrom, StainNorm, Subset

PatchColumn = Literal["x_l0", "y_l0", "slide"]


def check_whole(least: int, **values: Any) -> None:
    """Check that arguments are whole numbers of at least `least`. A `seed` has a higher maximum."""
    for name, value in values.items():
        most = (1 << 63) - 1 if name == "seed" else (1 << 40) - 1
        if type(value) is not int or not least <= value <= most:
            raise UsageError(
                name, found=repr(value), expected=f"a whole number, {least} to {most:,}"
            )


def check_shard(shard: Any) -> tuple[int, int]:
    """Check a shard, and return its index and count."""
    match shard:
        case (int(index), int(count)) if 0 <= index < count and bool not in map(type, shard):
            return index, count
    raise UsageError(
        "shard", found=repr(shard), expected="(index, count), index from 0 to count - 1"
    )


Classes = Sequence[str] | Mapping[str, int]
_ORDER, _LABELS, _PATCHES, _LOADING = "Order", "Labels", "Patches", "Loading"
_MOST = 1_000_000_000
"""Maximum of counts, far below those that TensorFlow cannot hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Further options of `load_dataset`."""

    start_step: int = setting(
        0,
        "First step to yield, counted over all epochs. Skipping steps costs nothing.",
        flag_name="start_step",
        group=_ORDER,
        at_least=0,
        at_most=_MOST,
    )
    shuffle: bool = setting(True, "False keeps the order of the stores.", group=_ORDER)
    shuffle_block: int | None = setting(
        None,
        "Shuffle blocks of this many neighbours, and patches within every 16 blocks. For hard disks and network "
        "filesystems; 256 is a good size.",
        flag_name="shuffle_block",
        group=_ORDER,
        at_least=1,
        at_most=_MOST,
    )
    balance: Balance = setting(
        "none",
        "Draw every class, slide or patient equally often. The length of an epoch is rounded up to a multiple of their "
        "number. Patches of small groups are repeated; of large groups, each epoch draws different patches.",
        group=_ORDER,
    )
    max_per_slide: int | None = setting(
        None,
        "Maximum number of patches per slide and epoch; each epoch draws different ones. With labels from annotations, "
        "the maximum is per class of a slide.",
        flag_name="max_per_slide",
        group=_ORDER,
        at_least=1,
        at_most=_MOST,
    )
    shard: tuple[int, ...] = setting(
        (0, 1),
        "(index, count): yield only this worker's part of each step. All shards together are one epoch, and have the same "
        "number of steps.",
        group=_ORDER,
    )
    classes: Classes | None = setting(
        None,
        "Names of the classes in the order of their numbers, or numbers by name.",
        group=_LABELS,
        default_text="the sorted labels",
    )
    na: Sequence[str] = setting(
        NA_VALUES,
        "Cells of a labels CSV that are missing values, apart from the empty cell.",
        group=_LABELS,
    )
    labelled_only: bool = setting(
        False,
        "Leave out slides, or patches, without a label in `classes`. Otherwise they have label -1.",
        group=_LABELS,
    )
    labels_from: LabelsFrom = setting(
        "slide",
        "annotation takes the class of each patch from `histopipe annotate`. `splits` record their source.",
        group=_LABELS,
    )
    min_tissue: float = setting(0.0, "Minimum share of tissue, 0 to 1.", group=_PATCHES)
    min_focus: float = setting(0.0, "Minimum focus (`histopipe quality`).", group=_PATCHES)
    exclude_pen: float = setting(1.0, "Maximum share of pen marks.", group=_PATCHES)
    exclude_dark: float = setting(1.0, "Maximum share of folds and black.", group=_PATCHES)
    columns: Sequence[PatchColumn] = setting(
        (), "Additional fields: x_l0, y_l0 (level-0 pixels), slide (its id).", group=_PATCHES
    )
    stain_norm: StainNorm = setting(
        "none",
        "Normalize the stain of every slide to one reference; see `histopipe stains`.",
        group=_PATCHES,
    )
    on_error: OnError = setting(
        "raise",
        "raise stops at a damaged patch. skip gives it weight 0, logs it, and records it in the dataset's attribute "
        "`skipped`, a dictionary of reasons by key.",
        group=_LOADING,
    )
    parallel_calls: int | None = setting(
        None,
        "Number of batches decoded in parallel.",
        flag_name="parallel_calls",
        group=_LOADING,
        at_least=1,
        at_most=_MOST,
        default_text="the number of cores and a quarter more",
    )
    prefetch: int = setting(
        2,
        "Number of batches to load in advance.",
        flag_name="prefetch",
        group=_LOADING,
        at_least=0,
        at_most=_MOST,
    )
    read_ahead: int | None = setting(
        None,
        "Number of batches to request from disk in advance.",
        flag_name="read_ahead",
        group=_LOADING,
        at_least=0,
        at_most=_MOST,
        default_text="16 while batches wait for the disk",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        check_shard(self.shard)


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

    def rows_at(self, numbers: NDArray[np.intp]) -> SampleLocations:
        """Return some of the samples, by their numbers."""
        return SampleLocations(*(getattr(self, each.name)[numbers] for each in fields(self)))

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

    @property
    def keys(self) -> NDArray[np.int64]:
        """(N,) keys of the samples of the first epoch."""
        return self.locate(np.arange(len(self))).keys

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
