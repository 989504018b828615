"""Benchmark of the stages of training: disk, LMDB, decoder, reader and device, measured separately."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.dataset.options import check_whole
from histopipe.dataset.patch_batches import PatchBatches, decode
from histopipe.dataset.sampling import Shuffled, replica_rows
from histopipe.dataset.selection import SampleTable, select, store_paths, unpack_keys
from histopipe.dataset.tf_data import BatchFeed, default_calls
from histopipe.errors import MachineShort, UsageError
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.output import Progress, Result, default_progress
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import count_usable_cores

_SEED = 1
_BLOCK = 4096
"""Bytes: O_DIRECT requires offsets and lengths that are multiples of the block size of the disk."""
_LONGEST_RUN = 1 << 40
"""Steps that no measurement reaches."""
_CLASSES = 2


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
    buffers = np.empty((threads, batches.patch_size, batches.patch_size, 3), np.uint8)

    def decode_one(thread: int, turn: int) -> int:
        decode(memoryview(values[(thread + turn * threads) % len(values)]), buffers[thread])
        return 1

    return _rate(decode_one, seconds, threads)


def measure_reader(batches: PatchBatches, seconds: float, parallel_calls: int) -> float:
    """Measure the whole reader through tf.data, after its first batches."""
    batches.parallel_calls = parallel_calls
    source = BatchFeed(batches)
    try:
        steps = iter(source.dataset(0, _LONGEST_RUN))
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
            batch_size=size,
            objective=objective,
            class_weight=np.ones(_CLASSES, np.float32),
            xla=xla,
            scale_loss=network.get("precision") == "mixed_float16",
        )
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

        step()  # compiles it
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
        stages = {"reader": self.reader[calls]}
        if self.disk is not None:
            stages["disk"] = self.disk
        if batch is not None:
            stages["device"] = self.device[batch]
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
        calls, sizes = self.reader.items(), self.device.items()
        share = {count: rate / self.decode for count, rate in calls}
        rows = [
            ("disk", self.disk, f"{_DISK_THREADS} threads, bypassing the page cache"),
            ("LMDB", self.lmdb, "one thread, in the page cache"),
            ("decode", self.decode, f"{self.cores} threads, the upper limit of these cores"),
            *(
                ("reader", r, f"{n} parallel calls, {share[n]:.0%} of the decode rate")
                for n, r in calls
            ),
            *(("device", rate, f"training steps of {size} patches") for size, rate in sizes),
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
    total = 3 + len(calls) + (model is not None)
    progress = progress or default_progress()
    with ExitStack() as stack:
        opened = [stack.enter_context(Store(path)) for path in paths]
        check_patch_sizes(opened)
        bar = stack.enter_context(progress.bar("bench", unit="stages", total=total))
        table = SampleTable(select(opened))
        batches = PatchBatches(
            opened, table, batch_size=batch_size, order=Shuffled(len(table), _SEED)
        )

        def run(measure: Callable[..., Any], *arguments: Any) -> Any:
            value = measure(*arguments)
            bar.advance()
            return value

        # From the disk to the device. TensorFlow is loaded after the stages that do not need it.
        disk = run(measure_disk, batches, seconds, _DISK_THREADS)
        lmdb = run(measure_lmdb, batches, seconds)
        decode = run(measure_decode, batches, seconds, cores)
        load_quietly("tensorflow")
        reader = {count: run(measure_reader, batches, seconds, count) for count in calls}
        sizes = [max(1, batch_size // 2), batch_size, 2 * batch_size, 4 * batch_size]
        side = opened[0].patch_size
        device = (
            run(measure_device, side, model, sizes, devices, seconds) if model is not None else {}
        )
    return BenchResult(
        disk,
        lmdb,
        decode,
        reader,
        device,
        store_bytes=sum((path / "data.mdb").stat().st_blocks * 512 for path in paths),
        memory_bytes=_available_memory(),
        batch_size=batch_size,
        cores=cores,
    )


def _smallest_good(rates: dict[int, float]) -> int:
    """Return the smallest setting whose rate is close to the best."""
    least = _GOOD_ENOUGH * max(rates.values())
    return min(setting for setting, rate in rates.items() if rate >= least)


def _available_memory() -> int:
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0
