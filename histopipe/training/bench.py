"""Benchmark of the stages of training: disk, LMDB, decoder, reader and device, measured separately."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.dataset.options import check_whole
from histopipe.dataset.patch_batches import PatchBatches, decode
from histopipe.dataset.sampling import Order, replica_rows
from histopipe.dataset.selection import SampleTable, select, store_paths, unpack_keys
from histopipe.dataset.tf_data import BatchFeed, default_calls
from histopipe.errors import MachineShort, UsageError
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.output import Progress, Result, default_progress
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import available_memory, count_usable_cores

_BLOCK = 4096
"""Bytes: O_DIRECT requires offsets and lengths that are multiples of the block size of the disk."""


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
    # Aligned, as O_DIRECT requires.
    buffers = [mmap.mmap(-1, max(length for _, _, length in places)) for _ in range(threads)]
    files: dict[str, int] = {}

    def read(thread: int, turn: int) -> int:
        path, offset, length = places[(thread + turn * threads) % len(places)]
        os.preadv(files[path], [memoryview(buffers[thread])[:length]], offset)
        return 1

    with suppress(OSError), ExitStack() as stack:
        for path in {path for path, _, _ in places}:
            files[path] = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            stack.callback(os.close, files[path])
        # One read may cover several neighbouring values.
        return _rate_of_threads(read, seconds, threads) * values / len(places)
    return None


def measure_lmdb(batches: PatchBatches, seconds: float) -> float:
    """Measure lookups of values in the page cache by one thread."""
    patches = list(_patches(batches, 64))

    def look_up(turn: int) -> int:
        store, slides, rows = patches[turn % len(patches)]
        with store.reading() as reading:
            for slide, row in zip(slides, rows, strict=True):
                reading.value(slide, row)
        return len(rows)

    for turn in range(len(patches)):  # load them into the page cache
        look_up(turn)
    return _rate(look_up, seconds)


def measure_decode(batches: PatchBatches, seconds: float, threads: int) -> float:
    """Measure decoding into one reused buffer per thread: the upper limit of a reader on these cores."""
    values = [
        store.value(slide, row)
        for store, slides, rows in _patches(batches, 8)
        for slide, row in zip(slides, rows, strict=True)
    ]
    buffers = np.empty((threads, batches.patch_size, batches.patch_size, 3), np.uint8)

    def decode_one(thread: int, turn: int) -> int:
        decode(memoryview(values[(thread + turn * threads) % len(values)]), buffers[thread])
        return 1

    return _rate_of_threads(decode_one, seconds, threads)


def measure_reader(batches: PatchBatches, seconds: float, parallel_calls: int) -> float:
    """Measure the whole reader through tf.data, after its first batches."""
    load_quietly("tensorflow")
    batches.parallel_calls = parallel_calls
    source = BatchFeed(batches)
    try:
        steps = iter(source.dataset(0, 1 << 40))  # no measurement reaches this step
        for _ in range(2 * parallel_calls + 2):
            next(steps)
        return _rate(lambda _: len(next(steps)["key"]), seconds)
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

    from histopipe.training.devices import make_strategy
    from histopipe.training.models import build_model
    from histopipe.training.objective import ClassObjective
    from histopipe.training.train_step import StepSettings, TrainStep

    strategy = make_strategy(devices)
    with strategy.scope():
        objective = ClassObjective(2)
        built = build_model(model, patch_size=side, objective=objective, dropout=0.15, **network)
        optimizer = keras.optimizers.Adam()

    rates: dict[int, float] = {}
    try:
        for size in batch_sizes:
            settings = StepSettings(
                batch_size=size,
                objective=objective,
                class_weight=np.ones(objective.outputs, np.float32),
                xla=xla,
                scale_loss=network.get("precision") == "mixed_float16",
            )
            rates[size] = _step_rate(TrainStep(strategy, built, optimizer, settings), side, seconds)
    except tf.errors.ResourceExhaustedError as error:
        if not rates:
            raise MachineShort(
                f"a batch of {batch_sizes[0]} does not fit into memory", todo="try --batch-size 8"
            ) from error
    return rates


def _step_rate(train_step: Any, side: int, seconds: float) -> float:
    """Return patches per second of a `TrainStep`, on a batch of black patches of `side` pixels in memory."""
    import tensorflow as tf

    from histopipe.training.devices import one_per_replica

    size, replicas = train_step.settings.batch_size, train_step.strategy.num_replicas_in_sync
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
    batch, number = one_per_replica(train_step.strategy, parts, 0), tf.constant(0, tf.int64)

    def step(_: int) -> int:
        gradients, values = train_step.gradients(batch, number, max(rows), max(rows))
        train_step.apply(gradients, tf.zeros(2))
        # Fetching a result waits for it: devices compute asynchronously.
        np.asarray(values[0][0])
        return int(size)

    step(0)  # compiles it
    return _rate(step, seconds)


def _patches(batches: PatchBatches, steps: int) -> Iterator[tuple[Store, list[int], list[int]]]:
    """Yield the slides and rows of the first steps, by store."""
    for step in range(min(steps, batches.steps_per_epoch)):
        ordinals, slides, rows = unpack_keys(np.sort(batches.locate(step)[0].keys))
        for ordinal in np.unique(ordinals).tolist():
            here = ordinals == ordinal
            yield batches.stores[ordinal], slides[here].tolist(), rows[here].tolist()


def _rate(work: Callable[[int], int], seconds: float, stop: threading.Event | None = None) -> float:
    """Call `work` with the number of the call for some seconds. Return the sum of its results per second."""
    begun, total = time.perf_counter(), 0
    for turn in itertools.count():
        if time.perf_counter() - begun >= seconds or (stop is not None and stop.is_set()):
            break
        total += work(turn)
    return total / (time.perf_counter() - begun)


def _rate_of_threads(work: Callable[[int, int], int], seconds: float, threads: int) -> float:
    """Return the sum of the rates of several threads. The arguments of `work` are the numbers of thread and call."""
    stop = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        try:
            return sum(
                pool.map(lambda thread: _rate(partial(work, thread), seconds, stop), range(threads))
            )
        finally:
            stop.set()  # after an interrupt, the threads must end


_DISK_THREADS = 16
"""Reads at once: an SSD needs several for its full rate."""
_GOOD_ENOUGH = 0.95
"""Share of the best rate that a smaller setting must reach to be recommended."""
_SLOW_READER = 0.7
"""Share of the decode rate that a reader reaches on a machine without other programs."""
_MIN_SECONDS, _MAX_SECONDS = 0.1, 3600


@dataclass(frozen=True, slots=True)
class BenchResult(Result):
    """Throughput of each stage in patches per second.

    Attributes:
        disk: random reads that bypass the page cache; None if the filesystem does not support them.
        lmdb: lookups of values in the page cache by one thread.
        decode: decoding by one thread per core: the upper limit of the reader.
        reader: the whole reader, by number of parallel calls.
        device: training steps, by batch size; empty if no model was given.
        store_bytes: size of the stores on disk, bytes.
        memory_bytes: available memory, bytes.
        batch_size: patches per batch of the reader.
        cores: number of cores available to this process.
    """

    disk: float | None
    lmdb: float
    decode: float
    reader: dict[int, float]
    device: dict[int, float]
    store_bytes: int
    memory_bytes: int
    batch_size: int
    cores: int

    @property
    def parallel_calls(self) -> int:
        """Recommended number of parallel calls of the reader."""
        return _smallest_good(self.reader)

    @property
    def advice(self) -> list[str]:
        """The bottleneck and recommended settings, as lines of text."""
        calls = self.parallel_calls
        batch = _smallest_good(self.device) if self.device else None
        measured = {
            "reader": self.reader[calls],
            "disk": self.disk,
            "device": None if batch is None else self.device[batch],
        }
        stages = {stage: rate for stage, rate in measured.items() if rate is not None}
        slowest = min(stages, key=stages.__getitem__)
        values = ", ".join(f"{stage} {rate:,.0f}" for stage, rate in stages.items())
        advice = [f"bottleneck: the {slowest} ({values} patches/s)"]
        if slowest == "disk":
            advice.append(
                "the store fits into free memory, so only the first epoch waits for the disk"
                if self.store_bytes < self.memory_bytes
                else "use --shuffle-block 256 to read neighbouring patches together, or a local SSD"
            )
        if slowest == "reader":
            share = self.reader[calls] / self.decode
            slow = "" if _SLOW_READER < share <= 1.1 else ": check for other running programs"
            advice.append(f"the reader reaches {share:.2f} of the decode rate of these cores{slow}")
        if batch is None:
            advice.append("pass --model NAME to measure the device")
        size = "" if batch is None else f"--batch-size {batch}, "
        return [*advice, f"recommended: {size}parallel_calls={calls}"]

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON-ready dictionary."""
        return Result.to_json(self) | {"advice": self.advice}

    def __str__(self) -> str:
        """Return a table of the stages, and the advice."""
        rows = [
            ("disk", self.disk, f"{_DISK_THREADS} threads, bypassing the page cache"),
            ("LMDB", self.lmdb, "one thread, in the page cache"),
            ("decode", self.decode, f"{self.cores} threads, the upper limit of these cores"),
            *(
                (
                    "reader",
                    rate,
                    f"{count} parallel calls, {rate / self.decode:.0%} of the decode rate",
                )
                for count, rate in self.reader.items()
            ),
            *(
                ("device", rate, f"training steps of {size} patches")
                for size, rate in self.device.items()
            ),
        ]
        lines = [
            f"{stage:<10} {'not measured' if rate is None else f'{rate:,.0f}':>12}  {text}"
            for stage, rate, text in rows
        ]
        return "\n".join([f"{'stage':<10} {'patches/s':>12}", *lines, "", *self.advice])


def bench(
    stores: str | Path | Sequence[str | Path],
    *,
    batch_size: int = 64,
    seconds: float = 2.0,
    model: str | None = None,
    devices: str = "auto",
    progress: Progress | None = None,
) -> BenchResult:
    """Measure disk, LMDB, decoder, reader and, with a model, the device.

    Args:
        stores: a store, or several with one patch size.
        batch_size: patches per batch.
        seconds: time for each of about eight stages, 0.1 to 3600.
        model: also measure training steps of this model, named as for `histopipe train --model`.
        devices: devices for the model, as for `histopipe train --devices`.
        progress: where to show the stages; None for `default_progress()`.

    Raises:
        UsageError: an option is out of range, or a model or device does not exist.
        NothingToDo: there is no store or no patch.
        MachineShort: TensorFlow is missing, or a batch does not fit into memory.

    Example:
        >>> bench("patches.lmdb").parallel_calls  # doctest: +SKIP
        4
    """
    check_whole(1, batch_size=batch_size)
    if not isinstance(seconds, int | float) or not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise UsageError("seconds", found=seconds, expected=f"{_MIN_SECONDS} to {_MAX_SECONDS}")
    paths = store_paths(stores)
    cores = count_usable_cores()
    calls = sorted({max(1, cores // 2), cores, default_calls(), 2 * cores})
    with ExitStack() as stack:
        opened = [stack.enter_context(Store(path)) for path in paths]
        check_patch_sizes(opened)
        bar = stack.enter_context(
            (progress or default_progress()).bar(
                "bench", unit="stages", total=3 + len(calls) + (model is not None)
            )
        )
        table = SampleTable(select(opened))
        batches = PatchBatches(
            opened, table, batch_size=batch_size, order=Order(len(table), seed=1)
        )

        def run(measure: Callable[..., Any], *arguments: Any) -> Any:
            value = measure(*arguments)
            bar.advance()
            return value

        sizes = [max(1, batch_size // 2), batch_size, 2 * batch_size, 4 * batch_size]
        # From the disk to the device: TensorFlow is loaded after the stages that do not need it.
        return BenchResult(
            disk=run(measure_disk, batches, seconds, _DISK_THREADS),
            lmdb=run(measure_lmdb, batches, seconds),
            decode=run(measure_decode, batches, seconds, cores),
            reader={count: run(measure_reader, batches, seconds, count) for count in calls},
            device={}
            if model is None
            else run(measure_device, opened[0].patch_size, model, sizes, devices, seconds),
            store_bytes=sum((path / "data.mdb").stat().st_blocks * 512 for path in paths),
            memory_bytes=available_memory(),
            batch_size=batch_size,
            cores=cores,
        )


def _smallest_good(rates: dict[int, float]) -> int:
    """Return the smallest setting whose rate is close to the best."""
    best = max(rates.values())
    return min(setting for setting, rate in rates.items() if rate >= _GOOD_ENOUGH * best)
