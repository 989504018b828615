"""Benchmark ingest: its speed relative to a common script and to copying the file.

    python tools/bench_ingest.py FOLDER                  all benchmarks: about 25 minutes and 4 GB in FOLDER
    python tools/bench_ingest.py FOLDER copy decode      only these benchmarks

The baseline is the script below: OpenSlide, Pillow and LMDB in a pool of two processes, for the same patches. Both
sides of a comparison run alternately, and their medians are compared, because the speed of a machine varies.

    copy       copy stage, from the plan to the last commit, compared with the baseline and with `cp` and sync
    decode     patches of 224 on native tiles of 256, compared with the baseline
    dct        0.5 mpp from a 0.25-mpp level by scaled decoding, compared with a baseline that reads and reduces
    openslide  the openslide route, compared with the baseline
    threads    two processes, compared with two threads of one process
    whole      the whole command on eight slides, compared with the baseline and with `cp` and sync, and the time of its
               parts; with --texture SLIDE, patches are as large as real ones
    scale      time and memory of the whole command for slides of 0.1 to 3 gigapixels
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path

import lmdb
import openslide
from peak_memory import peaks_of

from histopipe.geometry import Mpp
from histopipe.ingestion.options import AskedRoute, IngestOptions, prepare
from histopipe.ingestion.patch_source import chunks, close_all, store_chunk
from histopipe.ingestion.planning import plan_slide
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.slides.slide_files import SlideFile, open_slide
from histopipe.slides.thumbnail import encode_thumbnail, read_thumbnail, thumbnail_level, usual_mpp
from histopipe.slides.tile_check import NativeLevels
from histopipe.store.record import SlideRecord
from histopipe.store.writer import StoreWriter
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.algorithms import find_on_thumbnail
from histopipe.tiling.mask import Grid
from histopipe.tiling.mask_files import encode_png
from histopipe.tiling.spec import TilingSpec

TOOLS = Path(__file__).parent
COMMAND = str(Path(sys.executable).with_name("histopipe"))
WORKERS, REPEATS, SLIDES = 2, 5, 8
GIGAPIXEL_SIZES = {
    "0.1": "10240x10240",
    "0.3": "17408x17408",
    "1": "32000x32000",
    "3": "54784x54784",
}
LARGE = "35520x35604"  # 1.26 gigapixels

Corners = list[tuple[int, int]]
Run = Callable[[Path], float]
"""Writes to a path, and returns the seconds that it took."""


# --- the baseline -----------------------------------------------------------------------------------------------------------

_open: dict[str, openslide.OpenSlide] = {}
_stores: dict[str, lmdb.Environment] = {}


def baseline_chunk(
    path: str, store: str, first: int, corners: Corners, read: int, patch: int
) -> int:
    """Read, reduce (if needed), encode and store 256 patches in one process of the baseline."""
    if path not in _open:
        _open[path] = openslide.OpenSlide(path)
    if store not in _stores:
        _stores[store] = lmdb.open(store, map_size=1 << 40)
    items = []
    for number, corner in enumerate(corners, start=first):
        image = _open[path].read_region(corner, 0, (read, read)).convert("RGB")
        if read != patch:
            image = image.reduce(read // patch)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        items.append((struct.pack(">I", number), buffer.getvalue()))
    with _stores[store].begin(write=True) as transaction:
        transaction.cursor().putmulti(items)
    return len(items)


def baseline(slides: list[tuple[Path, SlidePlan]], spec: TilingSpec, out: Path) -> float:
    """Return the seconds of the baseline for all patches of some slides. Starting its processes is not included."""
    tasks, first = [], 0
    for path, planned in slides:
        plan = planned.plan
        corners = list(zip(plan.x_l0.tolist(), plan.y_l0.tolist(), strict=True))
        for begin in range(0, len(corners), 256):
            part = corners[begin : begin + 256]
            read = plan.choice.read_size
            tasks.append((str(path), str(out), first, part, read, spec.patch_size))
            first += len(part)
    out.mkdir()
    with multiprocessing.get_context("spawn").Pool(WORKERS) as processes:
        processes.map(time.sleep, [0.01] * WORKERS, chunksize=1)
        return timed(functools.partial(processes.starmap, baseline_chunk, tasks, chunksize=1))


# --- the measured functions -------------------------------------------------------------------------------------------------


def job_of(path: Path) -> SlideJob:
    """Return the job of a slide that is the first one of a store."""
    return SlideJob(SlideFile(path.stem, path, (path,)), number=0)


def planned(path: Path, spec: TilingSpec, route: AskedRoute = "auto") -> SlidePlan:
    """Return the plan of a slide."""
    result = plan_slide(job_of(path), spec, IngestOptions(route=route))
    if isinstance(result, SlideRecord):
        raise SystemExit(result.error)
    return result


def stage(workers: Executor, path: Path, plan: SlidePlan, spec: TilingSpec, out: Path) -> float:
    """Return the seconds to store all chunks of a planned slide.

    Starting and ending the workers is not included. New workers are needed: old ones would keep the previous store
    open, and freeing the pages of a removed file takes as long as writing it.
    """
    with workers:
        wait([workers.submit(time.sleep, 0.01) for _ in range(WORKERS)])
        started = time.perf_counter()
        job = job_of(path)
        with StoreWriter(out, spec) as writer:
            writer.register([job.record])
            job.planned(plan)
            tasks = [
                workers.submit(store_chunk, out, 0, plan.recipe, rows, plan.plan.take(rows))
                for rows in chunks(plan.plan, plan.recipe.route, spec.patch_size)
            ]
            for task in tasks:
                job.chunk_stored(*task.result())
            job.finish()
            if job.failed or job.record.unreadable:
                raise SystemExit(f"{path}: {job.record.error or job.record.notes}")
            writer.complete(0, job.record, job.columns(plan, {}), plan.thumbnails)
        return time.perf_counter() - started


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


class Bench:
    """Synthetic slides, which are kept between runs, and a scratch folder."""

    def __init__(self, folder: Path, texture: Path | None) -> None:
        self.folder, self.texture = folder, texture
        self.scratch = folder / "scratch"
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self.number = itertools.count()

    def close(self) -> None:
        """Remove the scratch folder."""
        shutil.rmtree(self.scratch)

    def slide(self, name: str, size: str, *arguments: str) -> Path:
        """Return a synthetic slide. It is kept for the next run."""
        path = self.folder / f"{name}-000.svs"
        if not path.exists():
            make = [
                sys.executable,
                str(TOOLS / "make_slides.py"),
                str(self.folder),
                "--name",
                f"{name}-",
            ]
            subprocess.run([*make, "--size", size, *arguments], check=True)
        return path

    def compare(self, *runs: tuple[str, Run], repeats: int = REPEATS) -> dict[str, float]:
        """Return the median seconds of several functions, run alternately. Their output is removed after each run."""
        seconds: dict[str, list[float]] = {name: [] for name, _ in runs}
        for _ in range(repeats):
            for name, run in runs:
                out = self.scratch / f"{next(self.number)}"
                os.sync()
                seconds[name].append(run(out))
                shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        return {name: statistics.median(values) for name, values in seconds.items()}


def pool() -> WorkerPool:
    """Return a pool of workers, the same as in an ingest."""
    return WorkerPool(WORKERS, prepare)


def show(text: str) -> None:
    """Print a line of the result at once."""
    print(text, flush=True)


def show_ratio(what: str, patches: int, ours: float, theirs: float, target: str) -> None:
    """Print a line that compares two times for the same patches."""
    show(
        f"{what}: {theirs / ours:.2f}× ({patches} patches, {patches / ours:,.0f}/s and {patches / theirs:,.0f}/s; "
        f"target: {target})"
    )


def against_baseline(
    bench: Bench,
    what: str,
    path: Path,
    spec: TilingSpec,
    route: AskedRoute,
    target: str,
    **runs: Run,
) -> dict[str, float]:
    """Compare a route with the baseline on one slide, and return the median seconds."""
    plan = planned(path, spec, route)
    show(
        f"{what}: {path.name}, {plan.record.width}×{plan.record.height}, route {plan.recipe.route} ({plan.recipe.reason})"
    )
    times = bench.compare(
        ("ours", lambda out: stage(pool(), path, plan, spec, out)),
        (
            "baseline",
            lambda out: baseline([(path, plan)], spec, out),
        ),
        *runs.items(),
    )
    show_ratio(what, len(plan.plan), times["ours"], times["baseline"], target)
    return times


def bench_copy(bench: Bench) -> None:
    """Benchmark the copy stage."""
    path = bench.slide("large", LARGE)
    times = against_baseline(
        bench,
        "copy stage",
        path,
        TilingSpec(mpp=Mpp(0.5)),
        "copy",
        "25×",
        cp=functools.partial(timed, copy_files, [path]),
    )
    show(
        f"copy stage, relative to cp and sync of the slide ({path.stat().st_size / 1e6:.0f} MB): "
        f"{times['ours'] / times['cp']:.2f} of the time (target: at most 3)"
    )


def bench_decode(bench: Bench) -> None:
    """Benchmark patches that are not aligned with native tiles."""
    spec = TilingSpec(mpp=Mpp(0.5), patch_size=224)
    against_baseline(
        bench, "decode, 224 on 256", bench.slide("large", LARGE), spec, "decode", "2.5×"
    )


def bench_dct(bench: Bench) -> None:
    """Benchmark patches at half the scale of level 0, on a slide with levels 1, 4 and 16."""
    path = bench.slide("fine", LARGE, "--mpp", "0.25")
    against_baseline(bench, "decode at 1/2", path, TilingSpec(mpp=Mpp(0.5)), "decode", "4×")
    spec = TilingSpec(mpp=Mpp(0.5), resample="exact")
    against_baseline(bench, "decode in full, then reduce", path, spec, "decode", "none")


def bench_openslide(bench: Bench) -> None:
    """Benchmark the route openslide with 4:4:4, and with 4:2:0, which the baseline writes."""
    path = bench.slide("large", LARGE)
    for patch_size in (256, 224):
        spec = TilingSpec(mpp=Mpp(0.5), patch_size=patch_size)
        against_baseline(bench, f"openslide, {patch_size}", path, spec, "openslide", "1×")
        spec = TilingSpec(mpp=Mpp(0.5), patch_size=patch_size, subsampling="420")
        against_baseline(bench, f"openslide, {patch_size}, 4:2:0", path, spec, "openslide", "1×")


def by_threads(path: Path, plan: SlidePlan, spec: TilingSpec, out: Path) -> float:
    """Return the seconds of the same stage with threads of this process."""
    try:
        return stage(ThreadPoolExecutor(WORKERS), path, plan, spec, out)
    finally:
        close_all()


def bench_threads(bench: Bench) -> None:
    """Compare processes with threads, since the libraries release Python's lock."""
    path = bench.slide("large", LARGE)
    for spec in (TilingSpec(mpp=Mpp(0.5)), TilingSpec(mpp=Mpp(0.5), patch_size=224)):
        plan = planned(path, spec)
        times = bench.compare(
            ("processes", lambda out: stage(pool(), path, plan, spec, out)),  # noqa: B023
            ("threads", lambda out: by_threads(path, plan, spec, out)),  # noqa: B023
        )
        show_ratio(
            f"processes compared with threads, {plan.recipe.route}",
            len(plan.plan),
            times["processes"],
            times["threads"],
            "above 1",
        )


def bench_whole(bench: Bench) -> None:
    """Benchmark the whole command, and show the time of its parts."""
    texture = ["--texture", str(bench.texture)] if bench.texture else []
    make = ["--quality", "70", "--subsampling", "420", *texture]
    name = f"{bench.texture.stem}-" if bench.texture else "cohort"
    paths = [bench.slide(f"{name}{n}", LARGE, "--seed", str(n), *make) for n in range(SLIDES)]
    spec = TilingSpec(mpp=Mpp(0.5))
    slides = [(path, planned(path, spec)) for path in paths]
    patches = sum(len(plan.plan) for _, plan in slides)
    stored = sum(plan.stored_bytes for _, plan in slides)
    show(
        f"{SLIDES} slides of {sum(path.stat().st_size for path in paths) / 1e6:,.0f} MB, {patches} patches of about "
        f"{stored / patches / 1000:.1f} kB, route {slides[0][1].recipe.route}"
    )
    start = bench.compare(("start", lambda _: timed(command, "--version")))["start"]
    times = bench.compare(
        ("ours", functools.partial(ingest_to, list(map(str, paths)))),
        ("cp", functools.partial(timed, copy_files, paths)),
        ("baseline", lambda out: baseline(slides, spec, out)),
        repeats=2 * REPEATS,
    )
    ours = times["ours"] - start
    show_ratio(
        f"whole command on {SLIDES} slides, without the start of Python ({start:.2f} s)",
        patches,
        ours,
        times["baseline"],
        "20×",
    )
    show(
        f"whole command, relative to cp and sync of the slides ({times['cp']:.2f} s): {ours / times['cp']:.2f} of the time "
        "(target: at most 2.5)"
    )
    parts = {name: SLIDES * seconds / WORKERS for name, seconds in plan_parts(paths[0]).items()}
    stages = bench.compare(("copy", lambda out: stage(pool(), *slides[0], spec, out)))
    parts["copy"] = SLIDES * stages["copy"]
    parts["start and end of workers"] = bench.compare(("pool", lambda _: timed(start_pool)))["pool"]
    show(f"\n| part, measured separately | s | of the {ours:.2f} s of the command |\n|---|---|---|")
    for name, seconds in parts.items():
        show(f"| {name} | {seconds:.2f} | {seconds / ours:.0%} |")


def copy_files(paths: list[Path], out: Path) -> None:
    """Copy slides with `cp` to a new folder, and sync the copies."""
    out.mkdir()
    subprocess.run(["/bin/cp", *map(str, paths), str(out)], check=True)
    subprocess.run(["/bin/sync", *map(str, out.iterdir())], check=True)


def plan_parts(path: Path) -> dict[str, float]:
    """Return the median seconds of one process for each part of planning a slide."""
    seconds: dict[str, list[float]] = {}
    last = 0.0

    def lap(name: str) -> None:
        nonlocal last
        seconds.setdefault(name, []).append(time.perf_counter() - last)
        last = time.perf_counter()

    for _ in range(REPEATS):
        last = time.perf_counter()
        with open_slide(path) as slide:
            lap("opening")
            levels = NativeLevels(slide, (path,))
            at = usual_mpp(slide, Mpp(0.499))
            levels.get(thumbnail_level(slide.info.levels, Mpp(0.499), at))
            levels.get(slide.info.levels[0])
            lap("finding and checking native tiles")
            thumbnail = read_thumbnail(slide, Mpp(0.499), levels, at)
            encode_thumbnail(thumbnail.pixels)
            lap("thumbnail")
            encode_png(find_on_thumbnail(thumbnail).pixels, Grid.of(thumbnail, slide.info.size))
            lap("mask")
        planned(path, TilingSpec(mpp=Mpp(0.5)))
        lap("plan")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    medians["the rest of the plan"] = medians.pop("plan") - sum(medians.values())
    return medians


def start_pool() -> None:
    """Start workers, wait until all are ready, and end them."""
    pool = WorkerPool(WORKERS, prepare)
    wait([pool.submit(time.sleep, 0.01) for _ in range(WORKERS)])
    pool.shutdown()


def command(*arguments: str) -> None:
    """Run the command line."""
    subprocess.run([COMMAND, *arguments], check=True, capture_output=True)


def ingest_to(arguments: list[str], out: Path) -> float:
    """Return the seconds of an ingest by the command line."""
    return timed(command, "ingest", *arguments, "--out", str(out))


def bench_scale(bench: Bench) -> None:
    """Benchmark time and memory for slides of increasing size."""
    for flags in ([], ["--patch-size", "224"], ["--route", "openslide"]):
        for gigapixels, size in GIGAPIXEL_SIZES.items():
            path = bench.slide(f"scale{gigapixels}", size)
            plan = planned(path, TilingSpec(mpp=Mpp(0.5)))
            repeats = 1 if flags else REPEATS
            run = [str(path), *flags]
            times = bench.compare(
                ("ours", functools.partial(ingest_to, run)),
                repeats=repeats,
            )
            out = bench.scratch / "memory"
            _, peaks = peaks_of([COMMAND, "ingest", *run, "--out", str(out)], quiet=True)
            shutil.rmtree(out)
            show(
                f"{' '.join(flags) or 'auto'}, {gigapixels} gigapixels, {len(plan.plan)} patches: {times['ours']:.2f} s, largest "
                f"anonymous memory of a process {max(kilobytes for kilobytes, _ in peaks.values()) / 1024:.0f} MB"
            )


BENCHES = {
    "copy": bench_copy,
    "decode": bench_decode,
    "dct": bench_dct,
    "openslide": bench_openslide,
    "threads": bench_threads,
    "whole": bench_whole,
    "scale": bench_scale,
}


def main() -> None:
    """Run the chosen benchmarks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder in which synthetic slides are kept")
    parser.add_argument("which", nargs="*", choices=[*BENCHES, []], help="benchmarks; default: all")
    parser.add_argument(
        "--texture", type=Path, help="real slide whose texture the slides of `whole` have"
    )
    options = parser.parse_args()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    show(
        f"{os.cpu_count()} × {cpu[1] if cpu else 'unknown'}, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )
    bench = Bench(options.folder, options.texture)
    try:
        for which in options.which or BENCHES:
            BENCHES[which](bench)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
