"""Measure how time, memory and disk of whole commands grow with the number of slides.

    python tools/bench_growth.py FOLDER [--slides 10 100 1000 10000] [--only info verify]

Slides are TIFF files of two patches of 64² with different contents, of two classes, one per patient. The inputs of each
number of slides, with a store, a run and predictions, are made once, and kept in FOLDER. A cell of the printed table
has wall seconds, CPU seconds of all processes, the largest anonymous memory of a process, and the size of what the
command wrote. Then follow CPU time and memory per further slide, from each number of slides to the next one: they are
equal if the cost is linear.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg
from peak_memory import peaks_of
from tifffile import TiffWriter

from histopipe.demo.synthetic_slides import write_tiff_page
from histopipe.geometry import Size

COMMAND = [sys.executable, "-P", "-m", "histopipe"]
HEATMAP = [*COMMAND, "heatmap", "run", "--out", "out", "--to"]
PREDICT = ["predict", "run", "patches.lmdb", "--out", "predictions"]
INGEST = ["ingest", "slides", "--labels", "labels.csv", "--patch-size", "64", "--tissue", "none"]
FIRST_STEP = """
import os, keras, histopipe
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        os._exit(0)
histopipe.train("patches.lmdb", out="out", in_process=True, callbacks=[Stop()])
"""
FIRST_PAGE = """
import histopipe, urllib.request
with histopipe.view("patches.lmdb", port=0, browser=False) as viewer:
    for path in ("", "slides", "slides/0", "slides/0/tile/0/0/0"):
        urllib.request.urlopen(viewer.url + path).read()
"""
COMMANDS = {
    "ingest": [*COMMAND, *INGEST, "--out", "out"],
    "ingest again, nothing to do": [*COMMAND, *INGEST],
    "info": [*COMMAND, "info"],
    "verify": [*COMMAND, "verify"],
    "train, to its first step": [sys.executable, "-P", "-c", FIRST_STEP],
    "predict --plan": [*COMMAND, "predict", "run", "slides", "--out", "out", "--plan"],
    "predict again, nothing to do": [*COMMAND, *PREDICT],
    "report of the predictions": [*COMMAND, "report", "predictions", "--out", "out.html"],
    "report of the store": [*COMMAND, "report", "patches.lmdb", "--out", "out.html"],
    "report of the run": [*COMMAND, "report", "run", "--out", "out.html"],
    "view, to its first page": [sys.executable, "-P", "-c", FIRST_PAGE],
    "cohort": [
        *COMMAND,
        "cohort",
        "labels.csv",
        "slides",
        "--label",
        "label",
        "--out",
        "out/labels.csv",
    ],
    "heatmap of the run, GeoJSON": [*HEATMAP, "geojson"],
    "heatmap of the run, PNG": [*HEATMAP, "png"],
}


class Cost(NamedTuple):
    """Wall and CPU seconds, and bytes of memory and of disk, of a command."""

    wall: float
    cpu: float
    memory: float
    disk: float

    def __str__(self) -> str:
        return f"{self.wall:.1f}, {self.cpu:.1f}, {self.memory / 1e6:.0f}, {self.disk / 1e6:.1f}"


def make_inputs(folder: Path, count: int) -> None:
    """Write slides and tables, and make a store, a run and predictions of them."""
    made = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    (made / "slides").mkdir(parents=True)
    rows = [(f"s{n:05}", ("normal", "tumour")[n % 2], f"p{n}") for n in range(count)]
    for number, (name, *_) in enumerate(rows):
        write_slide(made / "slides" / f"{name}.tiff", number)
    with (made / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label", "patient"), *rows])
    train = ["train", "--epochs", "1", "--resamples", "100", "--out", "run"]
    for arguments in (INGEST, train, PREDICT):
        subprocess.run([*COMMAND, *arguments], cwd=made, check=True, capture_output=True)
    made.rename(folder)


def write_slide(path: Path, number: int) -> None:
    """Write a slide of two tiles of noise, with a scale."""
    rng = np.random.default_rng(number)
    tiles = rng.integers(120 + 40 * (number % 2), 240, (2, 64, 64, 3), np.uint8)
    files = [simplejpeg.encode_jpeg(tile, colorsubsampling="420") for tile in tiles]
    with TiffWriter(path) as file:
        write_tiff_page(file, Size(128, 64), Size(64, 64), files, mpp=0.5, subsampling="420")


def measure(name: str, folder: Path) -> Cost:
    """Run a command in a folder."""
    os.chdir(folder)
    before, begin, used = _size(folder), time.perf_counter(), _cpu_seconds()
    code, peaks = peaks_of(COMMANDS[name], quiet=True)
    wall, cpu = time.perf_counter() - begin, _cpu_seconds() - used
    if code:
        raise RuntimeError(f"{name}: exit code {code} in {folder}")
    memory = 1024 * max(kilobytes for kilobytes, _ in peaks.values())
    cost = Cost(wall, cpu, memory, _size(folder) - before)
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return cost


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Make the inputs, measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slides", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--only", nargs="+", default=[*COMMANDS], help="Names, or how they begin.")
    options = parser.parse_args()
    counts, beginnings = options.slides, tuple(options.only)
    folders = [options.folder.absolute() / str(count) for count in counts]
    for folder, count in zip(folders, counts, strict=True):
        if not folder.exists():
            make_inputs(folder, count)
    steps = [f"{count:,}" for count in counts]
    print(f"| s, CPU s, MB, MB written | {' | '.join(steps)} | CPU ms per further slide | kB |")
    print("| --- " * (len(counts) + 3) + "|")
    for name in COMMANDS:
        if not name.startswith(beginnings):
            continue
        costs = [measure(name, folder) for folder in folders]
        growth = [
            ((b.cpu - a.cpu) * 1e3 / (n - m), (b.memory - a.memory) / 1e3 / (n - m))
            for (a, b), (m, n) in zip(pairwise(costs), pairwise(counts), strict=True)
        ]
        cells = [name, *map(str, costs)]
        cells += [", ".join(f"{step[i]:.1f}" for step in growth) for i in (0, 1)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
