"""Predict how ingest on a cluster scales with slides and nodes, from measured costs of its stages.

python tools/simulate_cohort.py --work /scratch [--slides 1000] [--sample 100] [--workers 1,2,3]

1. Make a cohort of small synthetic slides.
2. Ingest a sample slide by slide in this process, for the costs of a worker, and on a cluster of one worker, for the
   costs of the command and the scheduler.
3. Predict the time of the whole cohort from these costs, and measure it on clusters of 1, 2 and 3 workers.
4. Predict cohorts of 10,000 and 100,000 slides on up to 64 nodes: slides as in the cohort, and scans of `--patches`
   patches.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from cohort_model import Cohort, Costs, Site, predict

from histopipe.demo.synthetic_slides import SlideSettings, make_slide
from histopipe.geometry import Mpp, Size
from histopipe.ingestion.dask_cluster import (
    ClusterSettings,
    ingest_slide,
    publish,
)
from histopipe.ingestion.ingest_report import SlideOutcome
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.slide_job import SlideJob
from histopipe.slides.discovery import discover
from histopipe.tiling.spec import TilingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SPEC = TilingSpec(mpp=Mpp(0.5))
DASK = str(Path(sys.executable).with_name("dask"))
HISTOPIPE = str(Path(sys.executable).with_name("histopipe"))
NODES = (1, 2, 4, 8, 16, 64)


def show(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def make_cohort(folder: Path, count: int) -> None:
    """Make slides with sides of 1,024 to 6,144 pixels, most of about 2,000, on all cores."""
    sides = 256 * np.clip(np.random.default_rng(0).lognormal(2.0, 0.4, count), 4, 24).astype(int)
    with ProcessPoolExecutor() as pool:
        list(pool.map(_make, [folder] * count, range(count), sides.tolist(), chunksize=8))


def _make(folder: Path, number: int, side: int) -> None:
    path = folder / f"slide-{number:05}.svs"
    if not path.exists():
        make_slide(path, "normal", number, SlideSettings(size=Size(side, side)))


def linear(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Return intercept and slope of a linear fit of y; neither is negative."""
    slope, start = np.polyfit(x, y, 1)
    if slope < 0:
        return float(y.mean()), 0.0
    return (float(start), float(slope)) if start > 0 else (0.0, float(y.sum() / x.sum()))


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its children."""
    return [process, *process.children(recursive=True)]


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its children up to now."""
    return float(sum(sum(one.cpu_times()[:2]) for one in family(process)))


def bytes_read() -> int:
    """Return the bytes that this process and its children have read from disk up to now."""
    return sum(one.io_counters().read_bytes for one in family(psutil.Process()))


def drop_from_cache(path: Path) -> None:
    """Remove a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)  # pages that are not written yet stay in the cache
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def measure_worker(
    slides: Path, sample: list[str], work: Path
) -> tuple[dict[str, float], NDArray[np.int64]]:
    """Return the costs of a worker, as fields of `Costs` by name, and the number of patches per slide."""
    out = work / "stage"
    out.mkdir()
    files = {slide.id: slide for slide in discover([slides])}

    def ingested(settings: ClusterSettings, name: str) -> SlideOutcome:
        outcome, _ = ingest_slide(settings, SlideJob(files[name]), 1, lambda _: None)
        return outcome

    def settings_of(dataset: str) -> ClusterSettings:
        folder = work / "stage-scratch" / dataset
        return ClusterSettings(out, folder, SPEC, IngestOptions(workers=1), 1 << 40)

    settings = settings_of("cold")
    read = []
    for name in sample:
        drop_from_cache(slides / f"{name}.svs")
        before = bytes_read()
        ingested(settings, name)
        read.append(bytes_read() - before)
    settings = settings_of("warm")
    rows = []
    for name in sample:
        busy_before, started = cpu_seconds(psutil.Process()), time.perf_counter()
        done = ingested(settings, name)
        took = time.perf_counter() - started
        spent = cpu_seconds(psutil.Process()) - busy_before
        rows.append((done.patches, took, spent, done.stored_bytes))
    # The first slide of each round starts processes.
    patches, seconds, busy, stored = np.array(rows[1:], dtype=float).T
    started = time.perf_counter()
    publish(settings)
    publishing = time.perf_counter() - started
    (part,) = out.glob("part-*.lmdb")
    size = (part / "data.mdb").stat().st_size
    fixed, each = linear(patches, seconds)
    read_fixed, read_each = linear(patches, np.array(read[1:], dtype=float))
    costs = {
        "slide_seconds": fixed,
        "patch_seconds": each,
        "busy": float(busy.sum() / seconds.sum()),
        "slide_read": read_fixed,
        "patch_read": read_each,
        "patch_stored": float(stored.sum() / patches.sum()),
        "publish_speed": size / publishing,
    }
    return costs, np.array([row[0] for row in rows])


@contextmanager
def cluster(workers: int, work: Path) -> Iterator[tuple[str, list[psutil.Process]]]:
    """Start a scheduler and workers of one thread. Yield the address and the processes, the scheduler first."""
    file = work / "scheduler.json"
    file.unlink(missing_ok=True)
    local = ["--no-dashboard", "--host", "127.0.0.1"]
    words = [["scheduler", *local, "--port", "0", "--scheduler-file", str(file)]]
    words += [["worker", *local, "--scheduler-file", str(file), "--nthreads", "1"]] * workers
    with (work / "dask.log").open("ab") as log:
        started = [
            subprocess.Popen(
                [DASK, *each], cwd=work, stdout=log, stderr=log, start_new_session=True
            )
            for each in words
        ]
    try:
        while not (file.exists() and file.read_text().strip()):
            time.sleep(0.1)
        time.sleep(5 + workers)  # until the workers are connected
        yield (
            json.loads(file.read_text())["address"],
            [psutil.Process(process.pid) for process in started],
        )
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            process.wait()


@dataclass(frozen=True)
class Spent:
    """Cost of an ingest on a cluster: wall time, and CPU seconds of the command, the scheduler and the workers."""

    seconds: float
    command: float
    scheduler: float
    workers: float


def ingest_by(workers: int, slides: list[Path], work: Path) -> Spent:
    """Ingest on a cluster into an empty folder, and return the cost."""
    for name in ("parts", "scratch"):
        shutil.rmtree(work / name, ignore_errors=True)
    with cluster(workers, work) as (address, processes):
        before, started = [cpu_seconds(process) for process in processes], time.perf_counter()
        process = subprocess.Popen(
            [
                HISTOPIPE,
                "ingest",
                *map(str, slides),
                "--out",
                "parts",
                "--cluster",
                address,
                "--scratch",
                "scratch",
            ],
            cwd=work,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - started
        if status:
            raise SystemExit(f"ingest on {workers} workers failed with wait status {status}")
        scheduler, *each = [
            cpu_seconds(process) - start for process, start in zip(processes, before, strict=True)
        ]
    return Spent(took, usage.ru_utime + usage.ru_stime, scheduler, sum(each))


def measure_costs(slides: Path, names: list[str], work: Path) -> tuple[Costs, NDArray[np.int64]]:
    """Return the costs of each stage, measured on a sample of slides, and the number of patches per slide."""
    worker, patches = measure_worker(slides, names, work)
    sample = work / "sample"
    sample.mkdir()
    for name in names:
        (sample / f"{name}.svs").symlink_to(slides / f"{name}.svs")
    one = ingest_by(1, [slides / f"{names[0]}.svs"], work)
    many = ingest_by(1, [sample], work)

    def each(what: str) -> float:
        """Return the CPU seconds per slide, without the first slide."""
        extra = float(getattr(many, what) - getattr(one, what))
        return max(0.0, extra / (len(names) - 1))

    alone = worker["slide_seconds"] + worker["patch_seconds"] * patches
    task = max(0.0, each("workers") - worker["busy"] * float(alone[1:].mean()))
    costs = Costs(
        start=one.seconds - float(alone[0]),
        task_seconds=task,
        command=each("command"),
        scheduler=each("scheduler"),
        **worker,
    )
    return costs, patches


def check(
    costs: Costs, cohort: Cohort, counts: list[int], rounds: int, slides: Path, work: Path
) -> None:
    """Predict and measure the time of the cohort on this machine, and print both."""
    cores = len(os.sched_getaffinity(0))
    took = [[ingest_by(n, [slides], work).seconds for n in counts] for _ in range(rounds)]
    show(
        f"\n{len(cohort.patches):,} slides; workers, command and scheduler share {cores} cores; {rounds} rounds"
    )
    show("workers  predicted s  measured s (median, min to max)  ratio  bottleneck")
    for workers, measured in zip(counts, np.array(took).T, strict=True):
        expected = predict(costs, cohort, Site(1, workers, cores, shared=True))
        median, low, high = np.median(measured), measured.min(), measured.max()
        show(
            f"{workers:7}  {expected.seconds:11.1f}  {median:10.1f} ({low:.1f} to {high:.1f})"
            f"         {median / expected.seconds:5.2f}  {expected.bottleneck}"
        )


def show_prediction(costs: Costs, cohort: Cohort, name: str, site: Site) -> None:
    """Print the predicted time of a cohort on 1 to 64 nodes."""
    first = predict(costs, cohort, site)
    show(f"\n{name}: {first.read / 1e12:.3g} TB read, {first.stored / 1e12:.3g} TB stored; {site}")
    show(
        "nodes     minutes  scratch  bottleneck  "
        + "  ".join(f"{demand:>10}" for demand in first.demands)
    )
    for nodes in NODES:
        prediction = predict(costs, cohort, site.of(nodes))
        shares = "  ".join(
            f"{value / prediction.seconds:10.0%}" for value in prediction.demands.values()
        )
        show(
            f"{nodes:5}  {prediction.seconds / 60:10.1f}  {prediction.scratch / 1e12:4.2f} TB  {prediction.bottleneck:10}  {shares}"
        )


def main() -> None:
    """Make the cohort, measure the costs, compare the model with measurements, and print predictions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder on a local disk; its slides are kept"
    )
    parser.add_argument("--slides", type=int, default=1000)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument(
        "--workers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 3]
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of the cohort (3)")
    parser.add_argument("--patches", type=int, default=5000, help="patches per scan (5000)")
    parser.add_argument(
        "--node-workers", type=int, default=32, help="workers and cores per node (32)"
    )
    parser.add_argument(
        "--network", type=float, default=1.25e9, help="bytes per second per node (1.25e9)"
    )
    parser.add_argument(
        "--storage", type=float, default=5e9, help="bytes per second of the shared storage (5e9)"
    )
    options = parser.parse_args()
    work, slides = options.work.resolve(), options.work.resolve() / "slides"
    slides.mkdir(parents=True, exist_ok=True)
    make_cohort(slides, options.slides)
    for name in ("stage", "stage-scratch", "sample", "parts", "scratch"):
        shutil.rmtree(work / name, ignore_errors=True)
    names = [f"slide-{number:05}" for number in range(options.slides)]
    sample = np.random.default_rng(1).choice(names, options.sample, replace=False).tolist()
    costs, drawn = measure_costs(slides, sample, work)
    show("\n".join(costs.lines()))
    # The patches of the other slides are not known before they are ingested: draw them from the sample.
    rng = np.random.default_rng(2)
    check(
        costs,
        Cohort(rng.choice(drawn, options.slides)),
        options.workers,
        options.rounds,
        slides,
        work,
    )
    site = Site(1, options.node_workers, options.node_workers, options.network, options.storage)
    for count in (10_000, 100_000):
        slides_text = f"{count:,} slides as in the cohort"
        show_prediction(costs, Cohort(rng.choice(drawn, count)), slides_text, site)
        scans = np.full(count, options.patches)
        scans_text = f"{count:,} scans of {options.patches:,} patches"
        show_prediction(costs, Cohort(scans), scans_text, site)


if __name__ == "__main__":
    main()
