"""Benchmark of the stages of training: disk, LMDB, decoder, reader and device, measured separately."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import check_whole
from histopipe.dataset.selection import store_paths
from histopipe.dataset.tf_data import default_calls
from histopipe.errors import UsageError
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import count_usable_cores
from histopipe.training import throughput

_DISK_THREADS = 16
_GOOD_ENOUGH = 0.95
"""Share of the best rate that a smaller setting must reach to be recommended."""
_SLOW_READER = 0.7
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
        slowest = min(stages, key=lambda stage: stages[stage])
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
        values = ["not measured" if rate is None else f"{rate:,.0f}" for _, rate, _ in rows]
        lines = [
            f"{row[0]:<10} {text:>12}  {row[2]}" for row, text in zip(rows, values, strict=True)
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
        batches = throughput.sample_batches(opened, batch_size)
        disk = throughput.measure_disk(batches, seconds, _DISK_THREADS)
        bar.advance()
        lmdb = throughput.measure_lmdb(batches, seconds)
        bar.advance()
        decode = throughput.measure_decode(batches, seconds, cores)
        bar.advance()
        load_quietly("tensorflow")
        reader = {}
        for count in calls:
            reader[count] = throughput.measure_reader(batches, seconds, count)
            bar.advance()
        device = {}
        if model is not None:
            sizes = [max(1, batch_size // 2), batch_size, 2 * batch_size, 4 * batch_size]
            side = opened[0].patch_size
            device = throughput.measure_device(side, model, sizes, devices, seconds)
            bar.advance()
    return BenchResult(
        disk, lmdb, decode, reader, device,
        store_bytes=sum((path / "data.mdb").stat().st_blocks * 512 for path in paths),
        memory_bytes=_available_memory(), batch_size=batch_size, cores=cores,
    )  # fmt: skip


def _smallest_good(rates: dict[int, float]) -> int:
    """Return the smallest setting whose rate is close to the best."""
    best = max(rates.values())
    return min(setting for setting, rate in rates.items() if rate >= _GOOD_ENOUGH * best)


def _available_memory() -> int:
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0
