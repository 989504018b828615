"""Measure speed and memory of training on bags.

    python tools/bench_mil.py FOLDER [--sizes 1000,10000,100000,200000] [--dimension 1024] [--precision float32]
        [--pooling gated] [--flags "--task regression --labels labels.csv"]
    python tools/bench_mil.py FOLDER --clam CHECKOUT --stamp CHECKOUT [--rounds 3]

Create bags of each size in FOLDER, six or as many as have 200,000 patches (gigabytes for the larger ones), or reuse them.
Train two epochs on each set in a separate process. Print bags/s, patches/s, the share of time waiting for input, and the peak anonymous memory.

With checkouts of CLAM or STAMP, compare with their training loops, in turns: CLAM-SB of one bag per step against
`--pooling clam --batch-size 1`, and STAMP's loop with the same gated attention and four bags per step against `--pooling
gated`. Each runs in a virtual environment in FOLDER/environments, STAMP with the interpreter `--stamp-python` (3.13).
Dropout, learning rate, sizes of layers and bags are the same; all bags are trained on, in the second of two epochs.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
from environments import install
from peak_memory import peaks_of

BAGS, _PATCHES = 6, 200_000
_BLOCK = 20_000
_TORCH = ["torch==2.10.0", "torchvision==0.25.0"]
_PEERS = Path(__file__).parent / "peers"


@dataclass(slots=True)
class Peer:
    """A tool with a training loop: its program in tools/peers with arguments before and after the bags."""

    name: str
    program: list[str]
    arguments: list[str]
    steps: list[list[str]]
    python: str = sys.executable
    histopipe: list[str] = field(default_factory=list)
    environment: Path = Path()
    error: str | None = None

    def rate(self, bags: Path) -> float:
        """Return bags per second of the second epoch."""
        program = str(self.environment / "bin" / "python")
        command = [program, *self.program, str(bags), *self.arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        return float(done.stdout.split()[-1])


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
        *flags,
    ]
    code, peaks = peaks_of(command, quiet=True)
    if code:
        raise SystemExit(f"command failed with exit code {code}: {' '.join(command)}")
    with (run / "history.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    return row, max(kilobytes for kilobytes, _ in peaks.values()) / 1024


def install_peers(folder: Path, clam: Path | None, stamp: Path | None, python: str) -> list[Peer]:
    """Install the tools whose checkouts are there."""
    peers = []
    if clam:
        needs = ["h5py==3.16.0", "pandas==3.1.1", "scikit-learn==1.9.1", "timm==1.0.31"]
        peers.append(Peer("CLAM", [str(_PEERS / "clam_bags.py"), str(clam)], [], [_TORCH, needs]))
        peers[0].histopipe = [
            "--pooling",
            "clam",
            "--batch-size",
            "1",
            "--dropout",
            "0.25",
            "--feature-scaling",
            "none",
        ]
    if stamp:
        program = [str(_PEERS / "stamp_bags.py")]
        peers.append(Peer("STAMP", program, ["4"], [_TORCH, [str(stamp)]], python))
        peers[-1].histopipe = [
            "--pooling",
            "gated",
            "--batch-size",
            "4",
            "--dropout",
            "0.25",
            "--feature-scaling",
            "none",
        ]
    for peer in peers:
        peer.environment = folder / "environments" / peer.name.lower()
        peer.error, versions = install(peer.environment, peer.steps, peer.python)
        print(f"{peer.name}: {peer.error or ', '.join(versions)}")
    return peers


def compare(folder: Path, peers: list[Peer], sizes: list[int], rounds: int, dimension: int) -> None:
    """Train with each peer and with histopipe, in turns, and print a table of medians."""
    print("| patches per bag | loop | bags/s, median (min to max) | patches/s | histopipe is |")
    print("| --- | --- | --- | --- | --- |")
    for size in sizes:
        bags = folder / f"{size}-{dimension}-float32"
        make_bags(bags, size, dimension, "float32")
        for peer in peers:
            if peer.error:
                continue
            rates: dict[str, list[float]] = {peer.name: [], "histopipe": []}
            for _ in range(rounds):
                rates[peer.name].append(peer.rate(bags))
                with tempfile.TemporaryDirectory() as place:
                    flags = ["--fractions", "0.98,0.01,0.01", *peer.histopipe]
                    row, _ = train(bags, Path(place) / "run", flags)
                rates["histopipe"].append(float(row["bags_per_s"]))
            ours = statistics.median(rates["histopipe"])
            for name, values in rates.items():
                rate = statistics.median(values)
                loop = (
                    name if name == peer.name else f"`{' '.join(['histopipe', *peer.histopipe])}`"
                )
                print(
                    f"| {size:,} | {loop} | {rate:.2f} ({min(values):.2f} to {max(values):.2f}) "
                    f"| {rate * size:,.0f} | {ours / rate:.2f}× |",
                    flush=True,
                )


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", default="1000,10000,100000,200000")
    parser.add_argument("--dimension", type=int, default=1024)
    parser.add_argument("--precision", choices=["float32", "float16"], default="float32")
    parser.add_argument("--pooling", default="gated")
    parser.add_argument("--flags", default="", help="further flags of `histopipe train`")
    parser.add_argument("--clam", type=Path, help="checkout of CLAM")
    parser.add_argument("--stamp", type=Path, help="checkout of STAMP")
    parser.add_argument("--stamp-python", default="python3.13")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.clam or options.stamp:
        folder = options.folder.resolve()
        peers = install_peers(folder, options.clam, options.stamp, options.stamp_python)
        compare(folder, peers, sizes, options.rounds, options.dimension)
        return
    flags = ["--fractions", "0.34,0.33,0.33", "--pooling", options.pooling, *options.flags.split()]
    print(
        "| patches per bag | bags/s | patches/s | waiting | anonymous memory, MB |\n| --- | --- | --- | --- | --- |"
    )
    for size in sizes:
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
