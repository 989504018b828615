"""`histopipe bench`: what feeds a training, stage by stage, and what to do about the slowest."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import UsageError

_DISK_THREADS = 16
_GOOD_ENOUGH = 0.95
_SLOWER = 0.7
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 3600


@dataclass(frozen=True, slots=True)
class _Result:
    """Patches a second of each stage; None where it was not measured."""

    disk: float | None
    lmdb: float
    decode: float
    reader: dict[int, float]
    device: dict[int, float]
    store_bytes: int
    memory_bytes: int
    batch_size: int


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("stores", nargs=-1, type=click.Path(path_type=Path))
@click.option("--batch-size", type=click.IntRange(1), default=64, help="Patches a batch.")
@click.option("--seconds", type=float, default=2.0, help="For each of about eight stages.")
@click.option("--model", help="Measure training steps of this model, too.")
@click.option("--devices", default="auto", help="For --model: as of `histopipe train`.")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
@untrusted_option("stores")
def command(  # noqa: PLR0917 - click passes them by name
    stores: tuple[Path, ...],
    batch_size: int,
    seconds: float,
    model: str | None,
    devices: str,
    as_json: bool,
) -> None:
    """Measure disk, LMDB, decoder, reader and (with --model) device on STORES, name the bottleneck, and recommend settings.

    The figures are patches a second. The disk is read past the page cache, so nothing needs to be dropped from it.

    \b
    Example: histopipe bench patches.lmdb --model resnet50
    """
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise UsageError(
            "--seconds", found=seconds, expected=f"{_LEAST_SECONDS} to {_MOST_SECONDS}"
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is loaded
    paths = list(stores) or [Path("patches.lmdb")]
    result = _measure(paths, batch_size, seconds, model, devices)
    advice = _advice(result)
    if as_json:
        click.echo(json.dumps({**asdict(result), "advice": advice}, indent=2))
        return
    for line in (*_lines(result), "", *advice):
        click.echo(line)


def _measure(
    paths: list[Path], batch_size: int, seconds: float, model: str | None, devices: str
) -> _Result:
    # Late: `--help` needs none of it.
    from contextlib import ExitStack

    from histopipe.dataset import measure
    from histopipe.dataset.arguments import store_paths
    from histopipe.store.store import Store, check_patch_sizes
    from histopipe.system.tensorflow import load_quietly

    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        opened = [stack.enter_context(Store(path)) for path in store_paths(paths)]
        check_patch_sizes(opened)
        batches = measure.sample(opened, batch_size)
        disk = measure.measure_disk(batches, seconds, _DISK_THREADS)
        lmdb = measure.measure_lmdb(batches, seconds)
        decode = measure.measure_decode(batches, seconds, cores)
        load_quietly("tensorflow")
        calls = sorted({max(1, cores // 2), cores, cores + 2})
        reader = {n: measure.measure_reader(batches, seconds, n) for n in calls}
        device = {}
        if model is not None:
            sizes = [max(1, batch_size // 2), batch_size, 2 * batch_size, 4 * batch_size]
            measure_device = load_quietly("histopipe.training.step_rate").measure_device
            device = measure_device(opened, model, sizes, devices, seconds)
        return _Result(
            disk, lmdb, decode, reader, device,
            sum((path / "data.mdb").stat().st_blocks * 512 for path in paths), _available_memory(), batch_size,
        )  # fmt: skip


def _lines(result: _Result) -> list[str]:
    def line(stage: str, rate: float | None, note: str) -> str:
        figure = "not measured" if rate is None else f"{rate:,.0f}"
        return f"{stage:<10} {figure:>12}  {note}".rstrip()

    cores = len(os.sched_getaffinity(0))
    lines = [
        f"{'stage':<10} {'patches/s':>12}",
        line("disk", result.disk, f"{_DISK_THREADS} threads, past the page cache"),
        line("LMDB", result.lmdb, "one thread, in the page cache"),
        line("decode", result.decode, f"{cores} threads, the ceiling of these cores"),
    ]
    for calls, rate in result.reader.items():
        share = rate / result.decode
        lines.append(
            line("reader", rate, f"{calls} parallel calls, {share:.0%} of the decode ceiling")
        )
    for size, rate in result.device.items():
        lines.append(line("device", rate, f"training steps of {size} patches"))
    return lines


def _advice(result: _Result) -> list[str]:
    """The bottleneck in words, and settings."""
    calls = _smallest_good(result.reader)
    batch = _smallest_good(result.device) if result.device else None
    stages = {"reader": result.reader[calls]}
    if result.disk is not None:
        stages["disk"] = result.disk
    if batch is not None:
        stages["device"] = result.device[batch]
    slowest = min(stages, key=lambda stage: stages[stage])
    figures = ", ".join(f"{stage} {rate:,.0f}" for stage, rate in stages.items())
    advice = [f"bottleneck: the {slowest} ({figures} patches/s)"]
    if slowest == "disk":
        advice.append(
            "the store fits into free memory, so only the first epoch waits for the disk"
            if result.store_bytes < result.memory_bytes
            else "--shuffle-block 256 reads neighbours together; a local SSD is faster"
        )
    if slowest == "reader":
        share = result.reader[calls] / result.decode
        slow = "" if _SLOWER < share <= 1.1 else ": is something else running?"
        advice.append(f"it decodes at {share:.2f} of what these cores can{slow}")
    if batch is None:
        advice.append("--model NAME tells whether a device waits")
    size = "" if batch is None else f"--batch-size {batch}, "
    return [*advice, f"recommended: {size}parallel_calls={calls}"]


def _smallest_good(rates: dict[int, float]) -> int:
    """The smallest setting that is hardly slower than the best."""
    best = max(rates.values())
    return min(setting for setting, rate in rates.items() if rate >= _GOOD_ENOUGH * best)


def _available_memory() -> int:
    for entry in Path("/proc/meminfo").read_text().splitlines():
        name, value, *_ = entry.split()
        if name == "MemAvailable:":
            return int(value) << 10
    return 0
