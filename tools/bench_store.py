"""Measure time and memory of verify, repair, merge and remove, on a synthetic store and on real slides.

python tools/bench_store.py --work /scratch [--patches 1000000] [--value-bytes 12000] [--slides shared/slides] [--rounds 3]

Verify is compared with reading the file by `cat`, in turns, both with a cold cache (which needs root). Medians are
printed. With `--only-verify`, nothing else is measured. Repair is measured on real slides, after one byte in each of
two was changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
from peak_memory import peaks_of
from PIL import Image

from histopipe.geometry import Mpp
from histopipe.ingestion.patch_source import encode
from histopipe.store.format import patch_key
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.tiling.spec import TilingSpec

COMMAND = [sys.executable, "-P", "-m", "histopipe"]
SIDE, PER_SLIDE, PICTURES = 64, 2000, 512


def make_store(path: Path, patches: int, value_bytes: int) -> None:
    """Create slides of two classes with 2,000 patches each: JPEGs of about 3 kB, or noise of `value_bytes`."""
    rng = np.random.default_rng(0)
    spec = TilingSpec(patch_size=SIDE, mpp=Mpp(0.5))
    coarse = rng.integers(90, 230, (PICTURES, SIDE // 4, SIDE // 4, 3), dtype=np.uint8)
    files = [encode(np.asarray(Image.fromarray(c).resize((SIDE, SIDE))), spec) for c in coarse]
    if value_bytes:
        files = [rng.bytes(value_bytes) for _ in range(PICTURES)]
    rows = np.arange(PER_SLIDE)
    with StoreWriter(path, spec) as writer:
        names = [f"slide-{i:05}" for i in range(patches // PER_SLIDE)]
        records = [
            SlideRecord(
                id=name,
                path=f"{name}.svs",
                resolved_path=f"/{name}.svs",
                label="ab"[i % 2],
                patient=name,
            )
            for i, name in enumerate(names)
        ]
        writer.register(records)
        for number, record in enumerate(records):
            values = [files[(7 * number + row) % PICTURES] for row in range(PER_SLIDE)]
            length = np.array([len(value) for value in values])
            done = dataclasses.replace(
                record,
                planned=PER_SLIDE,
                stored=PER_SLIDE,
                stored_bytes=int(length.sum()),
                width=4000,
                height=4000,
                mpp=0.5,
                mpp_source="properties",
                patch_mpp=0.5,
                level=0,
                downsample=1.0,
                read_size=SIDE,
                stride=SIDE,
                route="openslide",
            )
            columns = {
                "x_l0": rows % 60 * SIDE,
                "y_l0": rows // 60 * SIDE,
                "x_level": rows % 60 * SIDE,
                "y_level": rows // 60 * SIDE,
                "tissue": np.ones(PER_SLIDE),
                "focus": np.full(PER_SLIDE, np.nan),
                "length": length,
                "crc": writer.put_patches(number, rows.tolist(), values),
                "label": np.full(PER_SLIDE, -1),
            }
            writer.complete(number, done, columns, {"thumb": files[0]})


def cold() -> None:
    """Empty the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def timed(name: str, arguments: list[str]) -> None:
    """Run a command with a cold cache, and print its duration and largest anonymous memory of a process."""
    cold()
    started = time.monotonic()
    code, peaks = peaks_of([*COMMAND, *arguments], quiet=True)
    seconds = time.monotonic() - started
    memory = max((kilobytes for kilobytes, _ in peaks.values()), default=0) / 1024
    print(
        f"{name:<28} {seconds:8.2f} s  {memory:7.0f} MB per process"
        + (f"  exit {code}" if code else ""),
        flush=True,
    )


def compared(store: Path, rounds: int) -> None:
    """Compare verify with reading the file, in turns."""
    times: dict[str, list[float]] = {"cat": [], "verify": [], "verify --workers 1": []}
    commands: dict[str, Callable[[], object]] = {
        "cat": lambda: subprocess.run(
            ["/bin/cat", str(store / "data.mdb")], stdout=subprocess.DEVNULL, check=True
        ),
        "verify": lambda: subprocess.run(
            [*COMMAND, "verify", str(store)], stdout=subprocess.DEVNULL, check=True
        ),
        "verify --workers 1": lambda: subprocess.run(
            [*COMMAND, "verify", str(store), "--workers", "1"],
            stdout=subprocess.DEVNULL,
            check=True,
        ),
    }
    for _ in range(rounds):
        for name, run in commands.items():
            cold()
            started = time.monotonic()
            run()
            times[name].append(time.monotonic() - started)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    size = (store / "data.mdb").stat().st_size
    for name, seconds in medians.items():
        share = medians["cat"] / seconds
        print(
            f"{name:<28} {seconds:8.2f} s  {size / seconds / 1e6:7.0f} MB/s  {share:.2f} of the reading speed",
            flush=True,
        )


def flip(store: Path, slides: list[int]) -> None:
    """Change one byte of the first patch of some slides."""
    with lmdb.open(str(store), max_dbs=32, map_size=1 << 40) as handle:
        database = handle.open_db(b"patches", create=False)
        with handle.begin(write=True) as transaction:
            for slide in slides:
                value = bytearray(transaction.get(patch_key(slide, 0), b"", db=database))
                value[100] ^= 1
                transaction.put(patch_key(slide, 0), bytes(value), db=database)


def measured(store: Path, work: Path, slides: Path | None, rounds: int) -> None:
    """Measure every command on a store."""
    with Store(store) as opened:
        complete = opened.complete
        size = (store / "data.mdb").stat().st_size
        print(
            f"\n{store.name}: {len(complete)} slides, {len(opened):,} patches of {opened.patch_size}², {size / 1e9:.2f} GB"
        )
    names = [record.id for record in complete.values()]
    half = work / "half.csv"
    half.write_text("\n".join(names[::2]))
    compared(store, rounds)
    timed("verify --full", ["verify", str(store), "--full"])
    timed("verify --untrusted", ["verify", str(store), "--untrusted"])
    timed("info --untrusted", ["info", str(store), "--untrusted"])
    merged = ["merge", str(store), "--out", str(work / "merged.lmdb")]
    timed("merge half of the slides", [*merged, "--slides", str(half)])
    timed("merge the others", merged)
    some = names[:: max(2, len(names) // 50)] if len(names) > 4 else names[:1]
    timed(f"remove {len(some)} slides", ["remove", str(work / "merged.lmdb"), *some])
    timed("compact", ["remove", str(work / "merged.lmdb"), "--compact"])
    timed("verify after compact", ["verify", str(work / "merged.lmdb")])
    if slides is not None:
        damaged = [number for number, record in complete.items() if record.stored][:2]
        flip(store, damaged)
        verified = subprocess.run(
            [*COMMAND, "verify", str(store), "--json"], capture_output=True, check=False
        )
        print("  damaged:", json.loads(verified.stdout)["damaged_slides"])
        timed(f"repair {len(damaged)} slides", ["repair", str(store), str(slides)])
        timed("verify after repair", ["verify", str(store)])
    shutil.rmtree(work / "merged.lmdb")


def main() -> None:
    """Create the stores and measure the commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, required=True, help="New or empty folder on the disk to measure."
    )
    parser.add_argument("--patches", type=int, default=1_000_000)
    parser.add_argument("--slides", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--value-bytes", type=int, default=0, help="Bytes per patch; 0: a JPEG of 64 pixels."
    )
    parser.add_argument("--only-verify", action="store_true")
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(exist_ok=True)
    if arguments.slides:
        subprocess.run(
            [
                *COMMAND,
                "ingest",
                str(arguments.slides),
                "--out",
                str(work / "real.lmdb"),
                "--default-mpp",
                "0.5",
            ],
            capture_output=True,
            check=False,
        )
        measured(work / "real.lmdb", work, arguments.slides, arguments.rounds)
    if arguments.patches:
        make_store(work / "synthetic.lmdb", arguments.patches, arguments.value_bytes)
        if arguments.only_verify:
            compared(work / "synthetic.lmdb", arguments.rounds)
            return
        measured(work / "synthetic.lmdb", work, None, arguments.rounds)


if __name__ == "__main__":
    main()
