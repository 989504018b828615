"""Measure time and memory of `histopipe probe` on many patches.

    python tools/bench_probe.py FOLDER [--bags 200] [--size 5000] [--dimension 1024] [--sets 2]

Create feature sets of noise in FOLDER, of two classes at four sites (2 bytes per feature), or reuse them; and probe them.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

import h5py
import numpy as np
from peak_memory import peaks_of


def make_set(folder: Path, bags: int, size: int, dimension: int) -> None:
    """Create bags of noise with a weak signal of the class and of the site."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for number in range(bags):
        path = folder / f"s{number}.h5"
        if path.exists():
            continue
        values = rng.normal(size=(size, dimension)).astype(np.float16)
        values[:, 0] += number % 2
        values[:, 1 + number // 2 % 4] += 0.5
        with h5py.File(path, "w") as file:
            file["features"] = values
            places = np.arange(size)
            file["coords"] = 256 * np.stack([places % 1000, places // 1000], axis=1)


def main() -> None:
    """Create the sets, probe them, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bags", type=int, default=200)
    parser.add_argument("--size", type=int, default=5000)
    parser.add_argument("--dimension", type=int, default=1024)
    parser.add_argument("--sets", type=int, default=2)
    options = parser.parse_args()
    sets = [options.folder / f"set{number}" for number in range(options.sets)]
    for path in sets:
        make_set(path, options.bags, options.size, options.dimension)
    labels = options.folder / "labels.csv"
    with labels.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["slide", "label", "patient", "site"])
        rows.writerows(
            [f"s{n}", "ab"[n % 2], f"p{n}", f"h{n // 2 % 4}"] for n in range(options.bags)
        )
    program = str(Path(sys.executable).with_name("histopipe"))
    out = str(options.folder / "probe")
    command = [program, "probe", *map(str, sets), "--labels", str(labels), "--out", out]
    begun = time.perf_counter()
    code, peaks = peaks_of(command, quiet=True)
    if code:
        raise SystemExit(f"command failed with exit code {code}: {' '.join(command)}")
    anonymous = max(kilobytes for kilobytes, _ in peaks.values()) / 1024
    patches = options.bags * options.size
    print(
        f"{options.sets} sets of {patches:,} patches of {options.dimension} features: "
        f"{time.perf_counter() - begun:.0f} s, {anonymous:,.0f} MB of anonymous memory"
    )


if __name__ == "__main__":
    main()
