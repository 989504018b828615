"""Measure speed and memory of training on bags.

    python tools/bench_mil.py FOLDER [--sizes 1000,10000,100000,200000] [--dimension 1024] [--precision float32]
        [--pooling gated] [--flags "--task regression --labels labels.csv"]

Create bags of each size in FOLDER, six or as many as have 200,000 patches (gigabytes for the larger ones), or reuse them.
Train two epochs on each set in a separate process. Print bags/s, patches/s, the share of time waiting for input, and the peak anonymous memory.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np
from peak_memory import peaks_of

BAGS, _PATCHES = 6, 200_000
_BLOCK = 20_000


def make_bags(folder: Path, size: int, dimension: int, precision: str) -> None:
    """Create bags of noise with alternating labels."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for number in range(min(600, max(BAGS, _PATCHES // size))):
        path = folder / f"bag{number}.h5"
        if path.exists():
            continue
        with h5py.File(path, "w") as file:
            features = file.create_dataset("features", (size, dimension), precision)
            for first in range(0, size, _BLOCK):
                rows = min(_BLOCK, size - first)
                features[first : first + rows] = rng.normal(size=(rows, dimension))
            places = np.arange(size)
            file["coords"] = 256 * np.stack([places % 1000, places // 1000], axis=1)
            file["coords"].attrs["patch_size_level0"] = 256
            file.attrs["label"] = "ab"[number % 2]


def train(bags: Path, run: Path, flags: list[str]) -> tuple[dict[str, str], float]:
    """Return the history row of the second epoch, and the largest anonymous memory in MB."""
    command = [
        str(Path(sys.executable).with_name("histopipe")),
        "train",
        "--mil",
        str(bags),
        "--out",
        str(run),
        "--epochs",
        "2",
        "--patience",
        "0",
        "--resamples",
        "0",
        "--fractions",
        "0.34,0.33,0.33",
        *flags,
    ]
    code, peaks = peaks_of(command, quiet=True)
    if code:
        raise SystemExit(f"command failed with exit code {code}: {' '.join(command)}")
    with (run / "history.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    return row, max(kilobytes for kilobytes, _ in peaks.values()) / 1024


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", default="1000,10000,100000,200000")
    parser.add_argument("--dimension", type=int, default=1024)
    parser.add_argument("--precision", choices=["float32", "float16"], default="float32")
    parser.add_argument("--pooling", default="gated")
    parser.add_argument("--flags", default="", help="further flags of `histopipe train`")
    options = parser.parse_args()
    flags = ["--pooling", options.pooling, *options.flags.split()]
    print(
        "| patches per bag | bags/s | patches/s | waiting | anonymous memory, MB |\n| --- | --- | --- | --- | --- |"
    )
    for size in map(int, options.sizes.split(",")):
        bags = options.folder / f"{size}-{options.dimension}-{options.precision}"
        make_bags(bags, size, options.dimension, options.precision)
        with tempfile.TemporaryDirectory() as place:
            row, peak = train(bags, Path(place) / "run", flags)
        rate = float(row["bags_per_s"])
        print(
            f"| {size:,} | {rate:.2f} | {rate * size:,.0f} | {float(row['input_wait']):.0%} | {peak:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
