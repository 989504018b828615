"""Throughput of each stage of training, in patches per second."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from histopipe.dataset.patch_batches import PatchBatches, decode
from histopipe.dataset.sample_table import SampleTable, unpack_keys
from histopipe.dataset.sampling import Shuffled, replica_rows
from histopipe.dataset.selection import select
from histopipe.dataset.tf_data import BatchFeed
from histopipe.errors import MachineShort
from histopipe.store.store import Store

_SEED = 1
_BLOCK = 4096
_LONGEST_RUN = 1 << 40
_CLASSES = 2


def sample_batches(stores: Sequence[Store], batch_size: int) -> PatchBatches:
    """Return shuffled batches of all patches of stores."""
    table = SampleTable(select(stores))
    return PatchBatches(stores, table, batch_size=batch_size, order=Shuffled(len(table), _SEED))


def measure_disk(batches: PatchBatches, seconds: float, threads: int) -> float | None:
    """Measure reads of values that bypass the page cache; None if the filesystem does not support them (tmpfs)."""
    places: list[tuple[str, int, int]] = []
    values = 0
    for store, slides, rows in _patches(batches, -(-int(2000 * seconds) // batches.batch_size)):
        with store.reading() as reading:
            extents = reading.extents(list(zip(slides, rows, strict=True))).tolist()
        path = str(store.path / "data.mdb")
        places += [(path, offset, -(-size // _BLOCK) * _BLOCK) for offset, size in extents]
        values += len(rows)
    if not places:
        return None
    longest = max(length for _, _, length in places)
    buffers = [mmap.mmap(-1, longest) for _ in range(threads)]  # aligned, as O_DIRECT requires
    files: dict[str, int] = {}

    def read(thread: int, turn: int) -> int:
        path, offset, length = places[(thread + turn * threads) % len(places)]
        os.preadv(files[path], [memoryview(buffers[thread])[:length]], offset)
        return 1

    try:
        for path in {path for path, _, _ in places}:
            files[path] = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        # One read may cover several neighbouring values.
        return _rate(read, seconds, threads) * values / len(places)
    except OSError:
        return None
    finally:
        for file in files.values():
            os.close(file)


def measure_lmdb(batches: PatchBatches, seconds: float) -> float:
    """Measure lookups of values in the page cache by one thread."""
    patches = list(_patches(batches, 64))

    def look_up(_: int, turn: int) -> int:
        store, slides, rows = patches[turn % len(patches)]
        with store.reading() as reading:
            for slide, row in zip(slides, rows, strict=True):
                reading.value(slide, row)
        return len(rows)

    for turn in range(len(patches)):  # load them into the page cache
        look_up(0, turn)
    return _rate(look_up, seconds)


def measure_decode(batches: PatchBatches, seconds: float, threads: int) -> float:
    """Measure decoding into one reused buffer per thread: the upper limit of a reader on these cores."""
    values = [
        store.value(slide, row)
        for store, slides, rows in _patches(batches, 8)
        for slide, row in zip(slides, rows, strict=True)
    ]
    side = batches.patch_size
    buffers = [np.empty((side, side, 3), np.uint8) for _ in range(threads)]

    def decode_one(thread: int, turn: int) -> int:
        decode(memoryview(values[(thread + turn * threads) % len(values)]), buffers[thread])
        return 1

    return _rate(decode_one, seconds, threads)


def measure_reader(batches: PatchBatches, seconds: float, parallel_calls: int) -> float:
    """Measure the whole reader through tf.data, after its first batches."""
    source = BatchFeed(batches)
    try:
        steps = iter(source.dataset(0, _LONGEST_RUN, parallel_calls=parallel_calls))
        for _ in range(2 * parallel_calls + 2):
            next(steps)
        return _repeated(lambda: next(steps), seconds) * batches.batch_size
    finally:
        source.settle()


def measure_device(
    side: int,
    model: str,
    batch_sizes: Sequence[int],
    devices: str,
    seconds: float,
    *,
    xla: bool = False,
    **network: Any,
) -> dict[int, float]:
    """Measure training steps on one batch of patches of `side` pixels in memory, by batch size.

    `seconds` is the time per size. Sizes must increase. The first that does not fit into memory ends the measurement.
    `network` has more arguments of `build_model`.

    Raises:
        UsageError: the model or a device does not exist.
        MachineShort: not even the smallest batch fits into memory.
    """
    # Imported late: the other stages do not need Keras.
    import keras
    import tensorflow as tf

    from histopipe.training.devices import make_strategy, one_per_replica
    from histopipe.training.models import build_model
    from histopipe.training.objective import ClassObjective
    from histopipe.training.train_step import StepSettings, TrainStep

    strategy = make_strategy(devices)
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        objective = ClassObjective(_CLASSES)
        built = build_model(model, patch_size=side, objective=objective, dropout=0.15, **network)
        optimizer = keras.optimizers.Adam()

    def step_rate(size: int) -> float:
        settings = StepSettings(
            batch_size=size, objective=objective, class_weight=np.ones(_CLASSES, np.float32), xla=xla,
            scale_loss=network.get("precision") == "mixed_float16",
        )  # fmt: skip
        train_step = TrainStep(strategy, built, optimizer, settings)
        rows = [len(replica_rows(size, replicas, replica)) for replica in range(replicas)]
        parts = [
            {
                "image": tf.zeros((count, side, side, 3), tf.uint8),
                "label": tf.zeros((count,), tf.int32),
                "weight": tf.ones((count,)),
                "key": tf.range(count, dtype=tf.int64),
            }
            for count in rows
        ]
        batch, number = one_per_replica(strategy, parts, 0), tf.constant(0, tf.int64)

        def step() -> None:
            gradients, values = train_step.gradients(batch, number, max(rows), max(rows))
            train_step.apply(gradients, tf.zeros(2))
            # Fetching a result waits for it: devices compute asynchronously.
            np.asarray(values[0][0])

        step()
        return _repeated(step, seconds) * size

    rates: dict[int, float] = {}
    for size in batch_sizes:
        try:
            rates[size] = step_rate(size)
        except tf.errors.ResourceExhaustedError as error:
            if not rates:
                raise MachineShort(
                    f"a batch of {size} does not fit into memory", todo="try --batch-size 8"
                ) from error
            break
    return rates


def _patches(batches: PatchBatches, steps: int) -> Iterator[tuple[Store, list[int], list[int]]]:
    """Yield the slides and rows of the first steps, by store."""
    for step in range(min(steps, batches.steps_per_epoch)):
        ordinals, slides, rows = unpack_keys(np.sort(batches.locate(step)[0].keys))
        for ordinal in np.unique(ordinals).tolist():
            here = ordinals == ordinal
            yield batches.stores[ordinal], slides[here].tolist(), rows[here].tolist()


def _repeated(step: Callable[[], object], seconds: float) -> float:
    """Repeat a step for some seconds, and return steps per second."""
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        step()
        count += 1
    return count / (time.perf_counter() - begun)


def _rate(work: Callable[[int, int], int], seconds: float, threads: int = 1) -> float:
    """Return the sum of the results of `work` per second. Its arguments are the numbers of thread and call."""
    stop = threading.Event()
    begun = time.perf_counter()

    def run(thread: int) -> int:
        turn = counted = 0
        while time.perf_counter() - begun < seconds and not stop.is_set():
            counted += work(thread, turn)
            turn += 1
        return counted

    with ThreadPoolExecutor(threads) as pool:
        try:
            return sum(pool.map(run, range(threads))) / (time.perf_counter() - begun)
        finally:
            stop.set()  # after an interrupt, the threads must end
