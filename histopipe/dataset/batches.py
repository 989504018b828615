"""Batches of patches and of bags in numpy, as a pure function of the step, and the moments of the features of bags.

Needs no TensorFlow.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.bags import BagSet, joined_rows, read_bag, read_positions
from histopipe.dataset.patch_masks import MaskedStore
from histopipe.dataset.sampling import BatchSampler, Field, Order
from histopipe.dataset.selection import (
    PatchColumn,
    SampleLocations,
    SampleTable,
    SlideValues,
    unpack_keys,
)
from histopipe.errors import DamagedStore, OnError, UsageError
from histopipe.features.feature_file import feature_files, features_at, read_header
from histopipe.store.format import patch_key, value_crc
from histopipe.store.reading import Reading, decode
from histopipe.store.store import Store
from histopipe.system.hashing import combine, permuted
from histopipe.system.output import default_progress
from histopipe.system.worker_pool import available_memory
from histopipe.tasks.choices import Subset

_KEPT = 4
"""Free buffers that are kept. While batches are read, one is freed whenever one is taken."""
_MOST = 24
"""Buffers that are used again, of those in use at the same time: enough for the calls of 16 cores."""


class ReusedMemory:
    """Arrays whose memory is used again when nothing refers to them any more. Threads may share it.

    The kernel clears every page of new memory: then two cores read 0.92 of the patches of 20 kB, and 0.86 of those of 5 kB
    (docs/design/benchmarks-training.md). A buffer is never used while a batch in it is alive, or one of its tensors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[tuple[mmap.mmap, weakref.ref[NDArray[np.uint8]]]] = []

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return a uint8 array of any content, aligned to a page."""
        size = math.prod(shape)
        length = max(1, size)
        with self._lock:
            # Not by a callback when an array ends: Ctrl-C during a callback would be lost.
            free = [buffer for buffer in self._buffers if buffer[1]() is None]
            ended = {id(memory) for memory, _ in free}
            used = [buffer for buffer in self._buffers if id(buffer[0]) not in ended]
            memory = next((memory for memory, _ in free if len(memory) == length), None)
            if memory is None:  # private: a forked process must not share it
                memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # The base of every view of `whole` is `whole`, because its own base is no array: it lives as long as they.
            whole = np.frombuffer(memory, np.uint8)
            kept = [buffer for buffer in free if buffer[0] is not memory][-_KEPT:]
            self._buffers = [*used, (memory, weakref.ref(whole)), *kept][:_MOST]
        return whole[:size].reshape(shape)


class PatchBatches(BatchSampler):
    """Batches of a table of patches, in a given order.

    With `on_error="skip"`, a damaged patch gets weight 0 and black pixels. `check` compares each value with its CRC.

    Raises:
        UsageError: an option has an invalid value.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        table: SampleTable,
        *,
        batch_size: int,
        order: Order,
        replicas: int = 1,
        on_error: OnError = "raise",
        columns: Sequence[PatchColumn] = (),
        check: bool = True,
        by_slide: Mapping[str, SlideValues] | None = None,
    ) -> None:
        super().__init__(
            table, batch_size=batch_size, order=order, replicas=replicas, by_slide=by_slide
        )
        self.stores, self.columns = stores, tuple(columns)
        self.masked = isinstance(stores[0], MaskedStore)
        self.patch_size = stores[0].patch_size
        self.fields = (
            Field("image", np.uint8, (self.patch_size, self.patch_size, 3)),
            *([Field("mask", np.uint8, (self.patch_size, self.patch_size))] if self.masked else []),
            Field("label", np.int32),
            Field("weight", np.float32),
            Field("key", np.int64),
            *(Field(name, _TYPES[name]) for name in self.columns),
            *self._slide_fields(),
        )
        self.on_error = on_error
        self._check, self._memory = check, ReusedMemory()

    def load(self, step: int, replica: int = 0) -> dict[str, NDArray[Any]]:
        """Load a replica's part of a step, counted over all epochs: an array for each of the `fields`, by name.

        "image" is (B, H, W, 3) RGB, "mask" (B, H, W) of stores with masks; all others have a row per patch. "label" is -1
        without a class. "weight" is 0 for padding and for skipped patches. Columns are the requested ones: "x_l0" and "y_l0",
        and "slide", ids as bytes.

        Raises:
            DamagedStore: a patch is missing, differs from its CRC or cannot be decoded, and `on_error` is "raise".
        """
        return self.read(*self.locate(step, replica))

    def read(
        self, located: SampleLocations, weights: NDArray[np.float32]
    ) -> dict[str, NDArray[Any]]:
        """Load a batch of located patches; see `load`."""
        keys = located.keys
        images = self._memory.empty((len(keys), self.patch_size, self.patch_size, 3))
        columns: dict[str, NDArray[Any]] = {
            name: np.empty(len(keys), _TYPES[name]) for name in self.columns
        }
        order = np.argsort(keys)  # the order of LMDB: neighbours on disk are read together
        for ordinal in np.unique(located.stores).tolist():
            store, positions = self.stores[ordinal], order[located.stores[order] == ordinal]
            slides, rows = located.slides[positions], located.rows[positions]
            with store.reading() as reading:
                for name, values in columns.items():
                    values[positions] = (
                        [store.records[slide].id.encode() for slide in slides.tolist()]
                        if name == "slide"
                        else _column_values(reading, slides, rows, name)
                    )
                crcs = _column_values(reading, slides, rows, "crc").tolist()
                for i, slide, row, crc in zip(
                    positions.tolist(), slides.tolist(), rows.tolist(), crcs, strict=True
                ):
                    try:
                        self._read(reading, slide, row, crc, images[i])
                    except DamagedStore as error:
                        problem = _with_location(error, reading.where(slide), row)
                        if self.on_error != "skip":
                            raise problem from error
                        images[i], weights[i] = 0, 0
                        self._note_skipped(int(keys[i]), str(problem))
        return {
            "image": images,
            **({"mask": self._masks(located)} if self.masked else {}),
            "label": located.labels,
            "weight": weights,
            "key": keys,
            **columns,
            **{name: located.values(values) for name, values in self.by_slide.items()},
        }

    def _masks(self, located: SampleLocations) -> NDArray[np.uint8]:
        masks = self._memory.empty((len(located.rows), self.patch_size, self.patch_size))
        places = zip(
            *(a.tolist() for a in (located.stores, located.slides, located.rows)), strict=True
        )
        for mask, (ordinal, slide, row) in zip(masks, places, strict=True):
            mask[:] = cast(MaskedStore, self.stores[ordinal]).mask(slide, row)
        return masks

    def advise(self, steps: range, parts: Sequence[int]) -> int:
        """Request some parts of steps from the disk, without waiting, and return the number of bytes requested."""
        keys = [self.locate(step, part)[0].keys for step in steps for part in parts]
        ordinals, slides, rows = unpack_keys(np.unique(np.concatenate(keys)))
        places = np.stack([slides, rows], axis=1)
        return sum(
            self.stores[ordinal].advise(list(map(tuple, places[ordinals == ordinal].tolist())))
            for ordinal in np.unique(ordinals).tolist()
        )

    def _read(
        self, reading: Reading, slide: int, row: int, crc: int, out: NDArray[np.uint8]
    ) -> None:
        value = reading.value(slide, row)
        if self._check and value_crc(patch_key(slide, row), value) != crc:
            raise DamagedStore("does not match its checksum")
        decode(value, out)


_TYPES: dict[PatchColumn, Any] = {"x_l0": np.int32, "y_l0": np.int32, "slide": object}


def _column_values(
    reading: Reading, slides: NDArray[np.int64], rows: NDArray[np.int64], name: str
) -> NDArray[Any]:
    """Return the values of a column for patches that are sorted by slide."""
    first = np.flatnonzero(np.append(True, slides[1:] != slides[:-1]))
    parts = zip(slides[first].tolist(), np.split(rows, first[1:]), strict=True)
    return np.concatenate([reading.column(slide, name)[part] for slide, part in parts])


def _with_location(error: DamagedStore, where: str, row: int) -> DamagedStore:
    """Return the error, with store, slide and patch at the start of its message."""
    return DamagedStore(
        error.what if error.what.startswith(where) else f"{where}: patch {row}: {error.what}",
        found=error.found,
        expected=error.expected,
        todo="ingest the slide again, or skip its damaged patches (on_error='skip')",
    )


_CACHED_SHARE = 8
"""The bags of all subsets take at most an eighth of the available memory: other folds may run at the same time."""
_DRAW = 301
"""Purpose of a random number, different from those in `dataset.sampling`."""


class BagBatches(BatchSampler):
    """Batches of bags, in a given order.

    With `on_error="skip"`, a damaged bag gets weight 0. `most` limits the patches of a bag per epoch; 0 is no limit.
    Each epoch draws different patches, by `seed`. Bags that are read whole stay in memory if all fit. With `positions`,
    batches also have the positions of the patches.
    """

    # A bag may be a gigabyte, so only the next one is loaded in advance.
    parallel_calls = 1
    prefetch = 0
    read_ahead = 0

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
        positions: bool = False,
    ) -> None:
        super().__init__(
            table, batch_size=batch_size, order=order, replicas=replicas, by_slide=by_slide
        )
        self.bags, self._skip, self._most, self._seed = bags, on_error == "skip", most, seed
        self._positions = positions
        self.dtype = np.result_type(*(bag.dtype for bag in bags))
        size = sum(bag.rows for bag in bags) * bags.dimension * self.dtype.itemsize
        self._cached = size * _CACHED_SHARE <= available_memory()
        self._cache: dict[int, NDArray[np.floating]] = {}
        self.fields = (
            Field("features", self.dtype, (bags.dimension,), ragged=True),
            Field("end", np.int64),
            Field("label", np.int32),
            Field("weight", np.float32),
            Field("key", np.int64),
            *self._slide_fields(),
            *([Field("position", np.float32, (2,), ragged=True)] if positions else []),
        )

    def load(self, step: int, replica: int = 0) -> dict[str, NDArray[Any]]:
        """Load a replica's part of a step: (R, D) features, and for each bag its end row and so on; see `fields`.

        Raises:
            DamagedStore: a bag is damaged, and damaged bags are not skipped.
        """
        located, weights = self.locate(step, replica)
        keys = located.keys
        parts, positions = [], []
        for i, number in enumerate(located.slides.tolist()):
            rows = self._draw_rows(number, step // self.steps_per_epoch)
            features = self._read(number, rows, keys[i]) if weights[i] else None
            if features is None:  # a bag of weight 0 is not read
                weights[i] = 0
                features = np.zeros((1, self.bags.dimension), self.dtype)
                positions.append(np.zeros((1, 2), np.float32))
            elif self._positions:
                positions.append(read_positions(self.bags.complete[number], rows))
            parts.append(features)
        return {
            "features": joined_rows(parts),
            "end": np.cumsum([len(part) for part in parts], dtype=np.int64),
            "label": located.labels,
            "weight": weights,
            "key": keys,
            **{name: located.values(values) for name, values in self.by_slide.items()},
            **({"position": joined_rows(positions)} if self._positions else {}),
        }

    def _read(
        self, number: int, rows: NDArray[np.int64] | None, key: int
    ) -> NDArray[np.floating] | None:
        if number in self._cache:
            return self._cache[number]
        try:
            features = read_bag(self.bags.complete[number], self.dtype, rows)
        except DamagedStore as error:
            if not self._skip:
                raise
            self._note_skipped(int(key), str(error))
            return None
        if self._cached and rows is None:
            self._cache[number] = features
        return features

    def _draw_rows(self, number: int, epoch: int) -> NDArray[np.int64] | None:
        """Return the rows of a bag in an epoch, sorted; None for all."""
        size = self.bags.complete[number].rows
        if not 0 < self._most < size:
            return None
        # Consecutive epochs go through one permutation, so that the fewest epochs cover all rows.
        rounds, begin = divmod(epoch, -(-size // self._most))
        positions = (begin * self._most + np.arange(self._most)) % size
        return np.sort(permuted(positions, size, combine(self._seed, _DRAW, number, rounds)))


_BAGS, _ROWS = 1000, 4096
"""Most bags, and most patches of a bag, that are read: more would take as long as an epoch and change little."""
_ROUNDING, _SMALLEST = 1e-6, 1e-15
"""Deviations of a constant feature: relative to its mean, by the rounding of float32; and with a square of 0."""
_ONE_UNIT = 16
"""Effective number of features from which they have one unit, as those of an encoder. Columns of a table have fewer."""


def feature_moments(
    bags: BagSet, numbers: Sequence[int], *, on_error: OnError = "raise"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (D,) mean and variance of the features of some bags, computed in float64. Each bag has the same weight.

    All patches are read of up to 1,000 bags of 4,096 patches. Larger numbers are read at equal distances. With `on_error`
    "skip", damaged bags are left out.

    Raises:
        DamagedStore: a bag is damaged, or all are.
    """
    chosen = [numbers[place] for place in _spaced(len(numbers), _BAGS)]
    moments: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    with default_progress().bar("feature scaling", unit="bags", total=len(chosen)) as bar:
        for number in chosen:
            bag = bags.complete[number]
            try:
                values = read_bag(
                    bag, bag.dtype, _spaced(bag.rows, _ROWS) if bag.rows > _ROWS else None
                ).astype(np.float64)
            except DamagedStore:
                if on_error == "raise" or (number == chosen[-1] and not moments):
                    raise
                continue
            moments.append((values.mean(axis=0), values.var(axis=0)))
            bar.advance()
    means, variances = zip(*moments, strict=True)
    # The variance of all patches is that within the bags and that between them.
    return np.mean(means, axis=0), np.mean(variances, axis=0) + np.var(means, axis=0)


def scaling_variance(
    mean: NDArray[np.float64], variance: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return which features vary, (D,), and the variances by which they are scaled, (D,); 1 for constant features.

    If few features have almost all of the variance, each has its own unit, and is standardised. Otherwise, the mean of the
    variances is added to each of them: the outputs of an encoder that hardly vary are mostly noise.
    """
    varied = variance > np.maximum(_ROUNDING * np.abs(mean), _SMALLEST) ** 2
    shares = variance / max(variance.sum(), np.finfo(np.float64).tiny)
    added = variance.mean() if (shares**2).sum() * _ONE_UNIT < 1 else 0.0
    return varied, np.where(varied, variance + added, 1.0)


def _spaced(count: int, most: int) -> NDArray[np.int64]:
    """Return sorted numbers below a count, at equal distances: all of them, or as many as allowed."""
    used = min(count, most)
    return np.arange(used) * count // used


def read_patch_features(
    folder: Path,
    stores: Sequence[Store],
    tables: Mapping[Subset, SampleTable],
    on_error: OnError,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the sorted (N,) keys of all patches of tables, and their (N, D) features in a folder; NaN for damaged ones.

    Raises:
        UsageError: a slide has no features, or those of other patches, or they do not fit into the memory.
        DamagedStore: a file cannot be read.
    """
    files = feature_files(folder)
    keys = np.unique(np.concatenate([table.keys for table in tables.values()]))
    starts = np.flatnonzero(np.diff(keys >> 32, prepend=-1))
    features = np.empty((0, 0), np.float32)
    with default_progress().bar("features", unit="slides", total=len(starts)) as bar:
        for start, of_slide in zip(starts.tolist(), np.split(keys, starts[1:]), strict=True):
            values = _features_of_slide(folder, files, stores, of_slide, on_error)
            if not start:
                needed, free = 4 * len(keys) * values.shape[1], available_memory()
                if needed > free * _MEMORY_SHARE:
                    raise UsageError(
                        f"{folder}: features of {len(keys):,} patches",
                        found=f"{needed / 1e9:.1f} GB",
                        expected=f"at most {_MEMORY_SHARE:.0%} of the free memory, {free / 1e9:.1f} GB",
                        todo="use fewer patches of each slide (--patches-per-slide)",
                    )
                features = np.empty((len(keys), values.shape[1]), np.float32)
            if values.shape[1] != features.shape[1]:
                raise UsageError(
                    f"{folder}: features per patch",
                    found=f"{values.shape[1]} of a slide",
                    expected=f"{features.shape[1]}, as of the slides before",
                )
            features[start : start + len(values)] = values
            bar.advance()
    return keys, features


_MEMORY_SHARE = 0.7
"""Share of the free memory that features may take."""


def _features_of_slide(
    folder: Path,
    files: Mapping[str, Path],
    stores: Sequence[Store],
    keys: NDArray[np.int64],
    on_error: OnError,
) -> NDArray[np.float32]:
    """Return (N, D) features of patches of one slide; see `read_patch_features`."""
    stores_of, numbers, rows = unpack_keys(keys)
    store, number = stores[stores_of[0]], int(numbers[0])
    record, index = store.records[number], store.index(number)
    if record.id not in files:
        raise UsageError(
            f"{folder} has no features of {record.id}",
            expected=f"those of all slides of {store.path}",
        )
    path = files[record.id]
    side = read_header(path).side
    values = features_at(path, np.stack([index["x_l0"], index["y_l0"]], axis=1)[rows])
    missing = int(np.isnan(values[:, 0]).sum())
    is_other = side and abs(side - record.side_l0) > 1
    if is_other or missing == len(rows) or (missing and on_error == "raise"):
        raise UsageError(
            f"{path}: features of other patches than those of {store.path}",
            found=f"patches of {side:g} level-0 pixels, none at {missing:,} of {len(rows):,} places",
            expected=f"the patches of the store, of {record.side_l0:g} level-0 pixels",
            todo="embed the store; or leave out damaged patches with --on-error skip",
        )
    return values
