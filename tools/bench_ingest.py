"""How fast an ingest is, as ratios to what people write today and to copying the file.

    python tools/bench_ingest.py FOLDER                  everything: about 25 minutes and 4 GB in FOLDER
    python tools/bench_ingest.py FOLDER copy decode      some of it

The baseline is written out below: OpenSlide, Pillow and LMDB in a pool of two processes, given the same patches. Each pair
is measured in one run, taking turns, and compared by medians, since machines drift.

    copy       the copy stage alone, plan in hand to committed, against the baseline and against `cp` and sync
    decode     patches of 224 on native tiles of 256, against the baseline
    dct        0.5 mpp from a 0.25-mpp level by scaled decoding, against a baseline that reads and reduces
    openslide  the openslide route against the baseline
    threads    the decode route by two threads of one process against two processes
    whole      the whole command over eight slides against the baseline, and where its time goes
    scale      time and memory of the whole command by slides of 0.1 to 3 gigapixels
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
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.patch_source import chunks, encode_thumbnail, png
from histopipe.ingestion.planning import PlannedSlide, SlideFailure, plan_slide
from histopipe.ingestion.records import PendingSlide
from histopipe.ingestion.route import AskedRoute
from histopipe.ingestion.slide_in_flight import SlideInFlight
from histopipe.ingestion.storing import close_all, prepare, store_chunk
from histopipe.slides.discovery import SlideFile
from histopipe.slides.slide import Slide
from histopipe.slides.thumbnail import read_thumbnail, thumbnail_level
from histopipe.slides.tiles.check import NativeLevels
from histopipe.store.record import SlideRecord
from histopipe.store.writer import StoreWriter
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.mask import tissue_mask
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

Places = list[tuple[int, int]]
Way = Callable[[Path], float]


# --- the baseline -----------------------------------------------------------------------------------------------------------

_open: dict[str, openslide.OpenSlide] = {}
_stores: dict[str, lmdb.Environment] = {}


def baseline_chunk(path: str, store: str, first: int, places: Places, read: int, patch: int) -> int:
    """What one process of the baseline does with 256 patches: read, reduce if need be, encode, put."""
    if path not in _open:
        _open[path] = openslide.OpenSlide(path)
    if store not in _stores:
        _stores[store] = lmdb.open(store, map_size=1 << 40)
    items = []
    for number, place in enumerate(places, start=first):
        image = _open[path].read_region(place, 0, (read, read)).convert("RGB")
        if read != patch:
            image = image.reduce(read // patch)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        items.append((struct.pack(">I", number), buffer.getvalue()))
    with _stores[store].begin(write=True) as transaction:
        transaction.cursor().putmulti(items)
    return len(items)


def baseline(slides: list[tuple[Path, PlannedSlide]], spec: TilingSpec, out: Path) -> float:
    """Seconds that the baseline takes for all patches of some slides; its processes are new and warm."""
    tasks, first = [], 0
    for path, planned in slides:
        plan = planned.plan
        places = list(zip(plan.x_l0.tolist(), plan.y_l0.tolist(), strict=True))
        for begin in range(0, len(places), 256):
            part = places[begin : begin + 256]
            read = plan.choice.read_size
            tasks.append((str(path), str(out), first, part, read, spec.patch_size))
            first += len(part)
    out.mkdir()
    with multiprocessing.get_context("spawn").Pool(WORKERS) as processes:
        processes.map(time.sleep, [0.01] * WORKERS, chunksize=1)
        return timed(functools.partial(processes.starmap, baseline_chunk, tasks, chunksize=1))


# --- what is measured -------------------------------------------------------------------------------------------------------


def pending_of(path: Path) -> PendingSlide:
    """A slide as an ingest would number it."""
    record = SlideRecord(id=path.stem, path=str(path), resolved_path=str(path))
    return PendingSlide(0, SlideInput(SlideFile(path.stem, path, (path,))), record)


def planned(path: Path, spec: TilingSpec, route: AskedRoute = "auto") -> PlannedSlide:
    """A slide's plan."""
    pending = pending_of(path)
    result = plan_slide(pending.slide, pending.record, spec, IngestOptions(route=route))
    if isinstance(result, SlideFailure):
        raise SystemExit(result.reason)
    return result


def stage(workers: Executor, path: Path, plan: PlannedSlide, spec: TilingSpec, out: Path) -> float:
    """Seconds that a planned slide's chunks take, from nothing to committed.

    The workers are new and warm, and are ended outside of the time: they would hold the store of the time before open, and
    giving back the pages of a removed file takes as long as writing it.
    """
    with workers:
        wait([workers.submit(time.sleep, 0.01) for _ in range(WORKERS)])
        started = time.perf_counter()
        pending = pending_of(path)
        with StoreWriter(out, spec) as writer:
            writer.register([pending.record])
            slide = SlideInFlight(pending, IngestOptions())
            slide.planned(plan)
            tasks = [
                workers.submit(store_chunk, out, 0, plan.recipe, chunk)
                for chunk in chunks(plan.plan, plan.recipe.route.name, spec.patch_size)
            ]
            for task in tasks:
                slide.chunk_stored(task.result())
            record = slide.complete_record(plan)
            if record.unreadable:
                raise SystemExit(f"{path}: {record.notes}")
            writer.complete(0, record, slide.columns(plan, {}), plan.thumbnails)
        return time.perf_counter() - started


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def copy_file(path: Path, out: Path) -> None:
    """`cp` and sync of the slide."""
    subprocess.run(["/bin/cp", str(path), str(out)], check=True)
    subprocess.run(["/bin/sync", str(out)], check=True)


class Bench:
    """Slides that are made once, and a folder to write to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self.number = itertools.count()

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.scratch)

    def slide(self, name: str, size: str, *arguments: str) -> Path:
        """A made slide; kept for the next run."""
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

    def compare(self, *ways: tuple[str, Way], repeats: int = REPEATS) -> dict[str, float]:
        """Median seconds of each way, taking turns. Each gets a path to write to that is gone afterwards."""
        seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
        for _ in range(repeats):
            for name, way in ways:
                out = self.scratch / f"{next(self.number)}"
                os.sync()
                seconds[name].append(way(out))
                shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        return {name: statistics.median(values) for name, values in seconds.items()}


def pool() -> WorkerPool:
    """Workers as an ingest has them."""
    return WorkerPool(WORKERS, prepare)


def say(text: str) -> None:
    """A line of the result."""
    print(text, flush=True)


def ratio(what: str, patches: int, ours: float, theirs: float, wanted: str) -> None:
    """A line that compares two times for the same patches."""
    say(
        f"{what}: {theirs / ours:.2f}× ({patches} patches, {patches / ours:,.0f}/s against {patches / theirs:,.0f}/s; "
        f"wanted {wanted})"
    )


def against_baseline(
    bench: Bench,
    what: str,
    path: Path,
    spec: TilingSpec,
    route: AskedRoute,
    wanted: str,
    **more: Way,
) -> dict[str, float]:
    """One slide by a route and by the baseline."""
    plan = planned(path, spec, route)
    say(
        f"{what}: {path.name}, {plan.record.width}×{plan.record.height}, route {plan.recipe.route.name} ({plan.recipe.route.reason})"
    )
    times = bench.compare(
        ("ours", lambda out: stage(pool(), path, plan, spec, out)),
        (
            "baseline",
            lambda out: baseline([(path, plan)], spec, out),
        ),
        *more.items(),
    )
    ratio(what, len(plan.plan), times["ours"], times["baseline"], wanted)
    return times


def bench_copy(bench: Bench) -> None:
    """The copy stage alone."""
    path = bench.slide("large", LARGE)
    times = against_baseline(
        bench, "copy stage", path, TilingSpec(mpp=Mpp(0.5)), "copy", "25×",
        cp=functools.partial(timed, copy_file, path),
    )  # fmt: skip
    say(
        f"copy stage against cp and sync of the slide ({path.stat().st_size / 1e6:.0f} MB): "
        f"{times['ours'] / times['cp']:.2f} of its time (wanted 3 at most)"
    )


def bench_decode(bench: Bench) -> None:
    """Patches that lie across native tiles."""
    spec = TilingSpec(mpp=Mpp(0.5), patch_size=224)
    against_baseline(
        bench, "decode, 224 on 256", bench.slide("large", LARGE), spec, "decode", "2.5×"
    )


def bench_dct(bench: Bench) -> None:
    """Half the scale of the finest level, of a slide with levels 1, 4 and 16."""
    path = bench.slide("fine", LARGE, "--mpp", "0.25")
    against_baseline(bench, "decode at 1/2", path, TilingSpec(mpp=Mpp(0.5)), "decode", "4×")
    spec = TilingSpec(mpp=Mpp(0.5), resample="exact")
    against_baseline(bench, "decode in full, then half", path, spec, "decode", "nothing said")


def bench_openslide(bench: Bench) -> None:
    """What has no shortcut; as it is, and with chroma at half the size, which is what the baseline writes."""
    path = bench.slide("large", LARGE)
    for patch_size in (256, 224):
        spec = TilingSpec(mpp=Mpp(0.5), patch_size=patch_size)
        against_baseline(bench, f"openslide, {patch_size}", path, spec, "openslide", "1×")
        spec = TilingSpec(mpp=Mpp(0.5), patch_size=patch_size, subsampling="420")
        against_baseline(bench, f"openslide, {patch_size}, 4:2:0", path, spec, "openslide", "1×")


def by_threads(path: Path, plan: PlannedSlide, spec: TilingSpec, out: Path) -> float:
    """The same stage by threads of this process."""
    try:
        return stage(ThreadPoolExecutor(WORKERS), path, plan, spec, out)
    finally:
        close_all()


def bench_threads(bench: Bench) -> None:
    """Whether threads would do where the libraries release Python's lock."""
    path = bench.slide("large", LARGE)
    for spec in (TilingSpec(mpp=Mpp(0.5)), TilingSpec(mpp=Mpp(0.5), patch_size=224)):
        plan = planned(path, spec)
        times = bench.compare(
            ("processes", lambda out: stage(pool(), path, plan, spec, out)),  # noqa: B023
            ("threads", lambda out: by_threads(path, plan, spec, out)),  # noqa: B023
        )
        ratio(
            f"processes against threads, {plan.recipe.route.name}",
            len(plan.plan),
            times["processes"],
            times["threads"],
            "above 1",
        )


def bench_whole(bench: Bench) -> None:
    """The whole command, with all that is around the copying."""
    paths = [bench.slide(f"cohort{n}", LARGE, "--seed", str(n)) for n in range(SLIDES)]
    spec = TilingSpec(mpp=Mpp(0.5))
    slides = [(path, planned(path, spec)) for path in paths]
    patches = sum(len(plan.plan) for _, plan in slides)
    start = bench.compare(("start", lambda _: timed(command, "--version")))["start"]
    times = bench.compare(
        ("ours", functools.partial(ingest_to, list(map(str, paths)))),
        ("baseline", lambda out: baseline(slides, spec, out)),
    )
    ours = times["ours"] - start
    ratio(
        f"whole command over {SLIDES} slides, start of Python ({start:.2f} s) taken off",
        patches,
        ours,
        times["baseline"],
        "8×",
    )
    parts = {name: SLIDES * seconds / WORKERS for name, seconds in plan_parts(paths[0]).items()}
    stages = bench.compare(("copy", lambda out: stage(pool(), *slides[0], spec, out)))
    parts["copy"] = SLIDES * stages["copy"]
    parts["pool"] = bench.compare(("pool", lambda _: timed(start_pool)))["pool"]
    for name, seconds in parts.items():
        say(f"  {name}: {seconds:.2f} s of {ours:.2f} s, {seconds / ours:.0%} (measured by itself)")


def plan_parts(path: Path) -> dict[str, float]:
    """Seconds of one process for each part of one slide's plan; medians."""
    seconds: dict[str, list[float]] = {}
    last = 0.0

    def lap(name: str) -> None:
        nonlocal last
        seconds.setdefault(name, []).append(time.perf_counter() - last)
        last = time.perf_counter()

    for _ in range(REPEATS):
        last = time.perf_counter()
        with Slide(path) as slide:
            lap("opening")
            levels = NativeLevels(slide, (path,))
            tiles, _ = levels.get(thumbnail_level(slide.info.levels, Mpp(0.499)))
            levels.get(slide.info.levels[0])
            lap("finding and checking native tiles")
            thumbnail = read_thumbnail(slide, Mpp(0.499), tiles)
            encode_thumbnail(thumbnail.pixels)
            lap("thumbnail")
            png(tissue_mask(thumbnail.pixels, thumbnail.mpp).pixels)
            lap("mask")
        planned(path, TilingSpec(mpp=Mpp(0.5)))
        lap("plan")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    medians["the rest of the plan"] = medians.pop("plan") - sum(medians.values())
    return medians


def start_pool() -> None:
    """Start workers and wait until each can work."""
    pool = WorkerPool(WORKERS, prepare)
    wait([pool.submit(time.sleep, 0.01) for _ in range(WORKERS)])
    pool.shutdown()


def command(*arguments: str) -> None:
    """The command as a user runs it."""
    subprocess.run([COMMAND, *arguments], check=True, capture_output=True)


def ingest_to(arguments: list[str], out: Path) -> float:
    """Seconds of an ingest by the command."""
    return timed(command, "ingest", *arguments, "--out", str(out))


def bench_scale(bench: Bench) -> None:
    """How time and memory grow with a slide."""
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
            say(
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
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="slides are made and kept here")
    parser.add_argument("which", nargs="*", choices=[*BENCHES, []], help="all if none is named")
    options = parser.parse_args()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    say(
        f"{os.cpu_count()} × {cpu[1] if cpu else 'unknown'}, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )
    bench = Bench(options.folder)
    try:
        for which in options.which or BENCHES:
            BENCHES[which](bench)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
