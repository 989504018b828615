"""Batches of patches in numpy, as a pure function of the step. Needs no TensorFlow."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import PatchColumn
from histopipe.dataset.sampling import BatchSampler, Field, Order
from histopipe.dataset.selection import SampleLocations, SampleTable, SlideValues, unpack_keys
from histopipe.errors import DamagedStore, OnError
from histopipe.store.format import patch_key, value_crc
from histopipe.store.reading import Reading, decode
from histopipe.store.store import Store

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
        self.patch_size = stores[0].patch_size
        self.fields = (
            Field("image", np.uint8, (self.patch_size, self.patch_size, 3)),
            Field("label", np.int32),
            Field("weight", np.float32),
            Field("key", np.int64),
            *(Field(name, _TYPES[name]) for name in self.columns),
            *self._slide_fields(),
        )
        self._skip, self._check, self._memory = on_error == "skip", check, ReusedMemory()

    def load(self, step: int, replica: int = 0) -> dict[str, NDArray[Any]]:
        """Load a replica's part of a step, counted over all epochs: an array for each of the `fields`, by name.

        "image" is (B, H, W, 3) RGB, all others have a row per patch. "label" is -1 without a class. "weight" is 0 for
        padding and for skipped patches. Columns are the requested ones: "x_l0" and "y_l0", and "slide", ids as bytes.

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
                        if not self._skip:
                            raise problem from error
                        images[i], weights[i] = 0, 0
                        self._note_skipped(int(keys[i]), str(problem))
        return {
            "image": images,
            "label": located.labels,
            "weight": weights,
            "key": keys,
            **columns,
            **{name: located.values(values) for name, values in self.by_slide.items()},
        }

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
