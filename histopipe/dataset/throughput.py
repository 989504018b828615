"""Throughput of each stage of reading: disk, LMDB, decoder, and the whole reader.

Rates are patches per second.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from histopipe.dataset.orders import Shuffled
from histopipe.dataset.patch_batches import PatchBatches, decode
from histopipe.dataset.sample_table import SampleTable, unpack_keys
from histopipe.dataset.selection import select
from histopipe.dataset.tf_data import BatchFeed
from histopipe.store.store import Store

_SEED = 1
_BLOCK = 4096
_LONGEST_RUN = 1 << 40


def sample_batches(stores: Sequence[Store], batch_size: int) -> PatchBatches:
    """Return shuffled batches of all patches of stores."""
    table = SampleTable(select(stores))
    return PatchBatches(stores, table, batch_size=batch_size, order=Shuffled(len(table), _SEED))


def measure_disk(batches: PatchBatches, seconds: float, threads: int) -> float | None:
    """Measure reads of values past the page cache; None where the filesystem does not support them (tmpfs)."""
    extents, values = _extents(batches, int(2000 * seconds))
    if not extents:
        return None
    try:
        files = {p: os.open(p, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC) for p, *_ in extents}
    except OSError:
        return None
    longest = max(length for _, _, length in extents)

    def reader(thread: int) -> Callable[[int], int]:
        buffer = mmap.mmap(-1, longest)  # aligned as O_DIRECT wants it
        part = extents[thread::threads] or extents

        def read(turn: int) -> int:
            path, offset, length = part[turn % len(part)]
            os.preadv(files[path], [memoryview(buffer)[:length]], offset)
            return 1

        return read

    try:
        reads = _timed([reader(thread) for thread in range(threads)], seconds)
    except OSError:
        return None
    finally:
        for file in files.values():
            os.close(file)
    return reads * values / len(extents)  # neighbours were joined to one reading


def measure_lmdb(batches: PatchBatches, seconds: float) -> float:
    """Measure lookups of values in the page cache by one thread."""
    keys = _keys(batches, 64)

    def look(turn: int) -> int:
        ordinal, slides, rows = keys[turn % len(keys)]
        with batches.stores[ordinal].reading() as reading:
            for slide, row in zip(slides, rows, strict=True):
                reading.value(slide, row)
        return len(rows)

    for turn in range(len(keys)):  # into the page cache
        look(turn)
    return _timed([look], seconds)


def measure_decode(batches: PatchBatches, seconds: float, threads: int) -> float:
    """Measure decoding into one reused buffer per thread: the upper limit of a reader on these cores."""
    values = [
        batches.stores[ordinal].value(slide, row)
        for ordinal, slides, rows in _keys(batches, 8)
        for slide, row in zip(slides, rows, strict=True)
    ]

    def worker(thread: int) -> Callable[[int], int]:
        buffer = np.empty((batches.patch_size, batches.patch_size, 3), np.uint8)

        def one(turn: int) -> int:
            decode(memoryview(values[(thread + turn * threads) % len(values)]), buffer)
            return 1

        return one

    return _timed([worker(thread) for thread in range(threads)], seconds)


def measure_reader(batches: PatchBatches, seconds: float, parallel_calls: int) -> float:
    """Measure the whole reader through tf.data, without its first batches."""
    source = BatchFeed(batches)
    try:
        steps = iter(source.dataset(0, _LONGEST_RUN, parallel_calls=parallel_calls))
        for _ in range(2 * parallel_calls + 2):
            next(steps)
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            next(steps)
            count += batches.batch_size
        return count / (time.perf_counter() - begun)
    finally:
        source.settle()


def _keys(batches: PatchBatches, steps: int) -> list[tuple[int, list[int], list[int]]]:
    """Return store, slides and rows of the first steps, store by store."""
    found = []
    for step in range(min(steps, batches.steps_per_epoch)):
        ordinals, slides, rows = unpack_keys(np.sort(batches.locate(step)[0].keys))
        for ordinal in np.unique(ordinals).tolist():
            here = ordinals == ordinal
            found.append((ordinal, slides[here].tolist(), rows[here].tolist()))
    return found


def _extents(batches: PatchBatches, most: int) -> tuple[list[tuple[str, int, int]], int]:
    """Return file, offset and length of values, in the order of batches, and the number of values."""
    found, values = [], 0
    for ordinal, slides, rows in _keys(batches, -(-most // batches.batch_size)):
        store = batches.stores[ordinal]
        with store.reading() as reading:
            extents = reading.extents(list(zip(slides, rows, strict=True))).tolist()
        found += [(str(store.path / "data.mdb"), o, -(-n // _BLOCK) * _BLOCK) for o, n in extents]
        values += len(rows)
    return found, values


def _timed(workers: Sequence[Callable[[int], int]], seconds: float) -> float:
    """Return the sum of what the workers count per second; each is called again and again with the number of its call."""
    stop = threading.Event()
    begun = time.perf_counter()

    def run(worker: Callable[[int], int]) -> int:
        turn = counted = 0
        while time.perf_counter() - begun < seconds and not stop.is_set():
            counted += worker(turn)
            turn += 1
        return counted

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            return sum(pool.map(run, workers)) / (time.perf_counter() - begun)
        finally:
            stop.set()  # interrupted: they must end
