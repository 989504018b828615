"""How an ingest by a cluster grows with slides and nodes: stage costs are measured, larger cohorts predicted from them.

python tools/simulate_cohort.py --work /scratch [--slides 1000] [--sample 100] [--workers 1,2,3]

A cohort of small slides is made, of which a sample is ingested: slide by slide in this process, as a worker does it, and by a
cluster of one worker, for what the command and the scheduler spend on a slide. From these costs alone follows how long the
whole cohort takes; that is measured on clusters of 1, 2 and 3 workers of one thread, and compared. Then cohorts of 10,000 and
100,000 slides are predicted for sites of up to 64 nodes: the made slides, and scans of `--patches` patches.
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

from histopipe.demo.slide_maker import SlideSettings, make_slide
from histopipe.geometry import Mpp, Size
from histopipe.ingestion.cluster.slide_worker import (
    ClusterSettings,
    PartFolders,
    ingest_slide,
    publish,
)
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.report import SlideOutcome
from histopipe.slides.discovery import discover
from histopipe.tiling.spec import TilingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SPEC = TilingSpec(mpp=Mpp(0.5))
DASK = str(Path(sys.executable).with_name("dask"))
HISTOPIPE = str(Path(sys.executable).with_name("histopipe"))
NODES = (1, 2, 4, 8, 16, 64)


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def make_cohort(folder: Path, count: int) -> None:
    """Slides of 1,024 to 6,144 pixels a side, most of them about 2,000, by all processors."""
    sides = 256 * np.clip(np.random.default_rng(0).lognormal(2.0, 0.4, count), 4, 24).astype(int)
    with ProcessPoolExecutor() as pool:
        list(pool.map(_make, [folder] * count, range(count), sides.tolist(), chunksize=8))


def _make(folder: Path, number: int, side: int) -> None:
    path = folder / f"slide-{number:05}.svs"
    if not path.exists():
        make_slide(path, "normal", number, SlideSettings(size=Size(side, side)))


def linear(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """What y is at 0, and what it grows by with x; neither below 0."""
    slope, start = np.polyfit(x, y, 1)
    if slope < 0:
        return float(y.mean()), 0.0
    return (float(start), float(slope)) if start > 0 else (0.0, float(y.sum() / x.sum()))


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and its children."""
    return [process, *process.children(recursive=True)]


def computed(process: psutil.Process) -> float:
    """Processor seconds so far of a process and its children."""
    return float(sum(sum(one.cpu_times()[:2]) for one in family(process)))


def read_from_disk() -> int:
    """Bytes so far, by this process and its children."""
    return sum(one.io_counters().read_bytes for one in family(psutil.Process()))


def forget(path: Path) -> None:
    """Have a file read from disk next time."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)  # what is not written yet is not forgotten
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def measure_worker(
    slides: Path, sample: list[str], work: Path
) -> tuple[dict[str, float], NDArray[np.int64]]:
    """What a slide costs the worker that ingests it: parts of `Costs` by name; and how many patches each has."""
    out = work / "stage"
    out.mkdir()
    files = {slide.id: slide for slide in discover([slides])}

    def ingested(settings: ClusterSettings, name: str) -> SlideOutcome:
        return ingest_slide(settings, SlideInput(files[name]), 1, lambda _: None).outcome

    def settings_of(dataset: str) -> ClusterSettings:
        folders = PartFolders(out, work / "stage-scratch", dataset)
        return ClusterSettings(folders, SPEC, IngestOptions(workers=1), 1 << 40)

    settings = settings_of("cold")
    read = []
    for name in sample:
        forget(slides / f"{name}.svs")
        already = read_from_disk()
        ingested(settings, name)
        read.append(read_from_disk() - already)
    settings = settings_of("warm")
    rows = []
    for name in sample:
        before, started = computed(psutil.Process()), time.perf_counter()
        done = ingested(settings, name)
        took = time.perf_counter() - started
        rows.append((done.patches, took, computed(psutil.Process()) - before, done.stored_bytes))
    # The first one of either starts processes.
    patches, seconds, busy, stored = np.array(rows[1:], dtype=float).T
    started = time.perf_counter()
    publish(settings)
    publishing = time.perf_counter() - started
    (part,) = out.glob("part-*.lmdb")
    size = (part / "data.mdb").stat().st_size
    fixed, each = linear(patches, seconds)
    read_fixed, read_each = linear(patches, np.array(read[1:], dtype=float))
    costs = {
        "slide_seconds": fixed, "patch_seconds": each, "busy": float(busy.sum() / seconds.sum()),
        "slide_read": read_fixed, "patch_read": read_each,
        "patch_stored": float(stored.sum() / patches.sum()), "publish_speed": size / publishing,
    }  # fmt: skip
    return costs, np.array([row[0] for row in rows])


@contextmanager
def cluster(workers: int, work: Path) -> Iterator[tuple[str, list[psutil.Process]]]:
    """A scheduler and workers of one thread: their address, and the processes, the scheduler's first."""
    file = work / "scheduler.json"
    file.unlink(missing_ok=True)
    local = ["--no-dashboard", "--host", "127.0.0.1"]
    words = [["scheduler", *local, "--port", "0", "--scheduler-file", str(file)]]
    words += [["worker", *local, "--scheduler-file", str(file), "--nthreads", "1"]] * workers
    with (work / "dask.log").open("ab") as log:
        started = [
            subprocess.Popen([DASK, *each], cwd=work, stdout=log, stderr=log, start_new_session=True)
            for each in words
        ]  # fmt: skip
    try:
        while not (file.exists() and file.read_text().strip()):
            time.sleep(0.1)
        time.sleep(5 + workers)  # until the workers are there
        yield json.loads(file.read_text())["address"], [psutil.Process(it.pid) for it in started]
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            process.wait()


@dataclass(frozen=True)
class Spent:
    """What an ingest by a cluster took: seconds, and processor seconds of each side."""

    seconds: float
    command: float
    scheduler: float
    workers: float


def ingest_by(workers: int, slides: list[Path], work: Path) -> Spent:
    """Ingest by a cluster into an empty folder."""
    for name in ("parts", "scratch"):
        shutil.rmtree(work / name, ignore_errors=True)
    with cluster(workers, work) as (address, processes):
        before, started = [computed(it) for it in processes], time.perf_counter()
        process = subprocess.Popen(
            [HISTOPIPE, "ingest", *map(str, slides), "--out", "parts", "--cluster", address, "--scratch", "scratch"],
            cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - started
        if status:
            raise SystemExit(f"ingest by {workers} workers ended with {status}")
        scheduler, *each = [
            computed(it) - already for it, already in zip(processes, before, strict=True)
        ]
    return Spent(took, usage.ru_utime + usage.ru_stime, scheduler, sum(each))


def measure_costs(slides: Path, names: list[str], work: Path) -> tuple[Costs, NDArray[np.int64]]:
    """What each stage costs, from a sample of slides; and how many patches each of these has."""
    worker, patches = measure_worker(slides, names, work)
    sample = work / "sample"
    sample.mkdir()
    for name in names:
        (sample / f"{name}.svs").symlink_to(slides / f"{name}.svs")
    one = ingest_by(1, [slides / f"{names[0]}.svs"], work)
    many = ingest_by(1, [sample], work)

    def each(what: str) -> float:
        """Processor seconds of each slide but the first."""
        more = float(getattr(many, what) - getattr(one, what))
        return max(0.0, more / (len(names) - 1))

    alone = worker["slide_seconds"] + worker["patch_seconds"] * patches
    task = max(0.0, each("workers") - worker["busy"] * float(alone[1:].mean()))
    costs = Costs(
        start=one.seconds - float(alone[0]), task_seconds=task, command=each("command"),
        scheduler=each("scheduler"), **worker,
    )  # fmt: skip
    return costs, patches


def check(
    costs: Costs, cohort: Cohort, counts: list[int], rounds: int, slides: Path, work: Path
) -> None:
    """Predict the cohort on this machine, and measure it, in turns."""
    cores = len(os.sched_getaffinity(0))
    took = [[ingest_by(n, [slides], work).seconds for n in counts] for _ in range(rounds)]
    say(f"\n{len(cohort.patches):,} slides on {cores} cores, workers, command and scheduler together; {rounds} rounds")  # fmt: skip
    say("workers  predicted s  measured s (median, least to most)  ratio  by")
    for workers, measured in zip(counts, np.array(took).T, strict=True):
        expected = predict(costs, cohort, Site(1, workers, cores, shared=True))
        median, least, most = np.median(measured), measured.min(), measured.max()
        say(
            f"{workers:7}  {expected.seconds:11.1f}  {median:10.1f} ({least:.1f} to {most:.1f})"
            f"            {median / expected.seconds:5.2f}  {expected.bottleneck}"
        )


def tell(costs: Costs, cohort: Cohort, name: str, site: Site) -> None:
    """Print what a cohort takes on 1 to 64 nodes."""
    first = predict(costs, cohort, site)
    say(f"\n{name}: {first.read / 1e12:.3g} TB read, {first.stored / 1e12:.3g} TB stored; {site}")
    say("nodes     minutes  scratch  bottleneck  " + "  ".join(f"{it:>10}" for it in first.demands))
    for nodes in NODES:
        it = predict(costs, cohort, site.of(nodes))
        shares = "  ".join(f"{value / it.seconds:10.0%}" for value in it.demands.values())
        say(
            f"{nodes:5}  {it.seconds / 60:10.1f}  {it.scratch / 1e12:4.2f} TB  {it.bottleneck:10}  {shares}"
        )


def main() -> None:
    """Make, measure, check, predict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="a folder on a local disk; slides in it are kept"
    )
    parser.add_argument("--slides", type=int, default=1000)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument(
        "--workers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 3]
    )
    parser.add_argument("--rounds", type=int, default=3, help="of measuring the cohort (3)")
    parser.add_argument("--patches", type=int, default=5000, help="of a scan (5000)")
    parser.add_argument(
        "--node-workers", type=int, default=32, help="workers and cores of a node (32)"
    )
    parser.add_argument(
        "--network", type=float, default=1.25e9, help="bytes a second of a node (1.25e9)"
    )
    parser.add_argument(
        "--storage", type=float, default=5e9, help="bytes a second of the shared storage (5e9)"
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
    say("\n".join(costs.lines()))
    # How many patches the others have is known only once they are ingested.
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
        tell(costs, Cohort(rng.choice(drawn, count)), f"{count:,} slides as these", site)
        scans = np.full(count, options.patches)
        tell(costs, Cohort(scans), f"{count:,} scans of {options.patches:,} patches", site)


if __name__ == "__main__":
    main()
