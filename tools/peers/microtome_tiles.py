"""Decode stored tiles of slides with microtome, which writes nothing. Called by tools/bench_peers.py."""

import json
import sys
from pathlib import Path

import microtome

BATCH = 512


def main() -> None:
    """Decode the tiles of a job in batches of arrays."""
    job = json.loads(Path(sys.argv[1]).read_text())
    size, count = job["patch_size"], 0
    for entry in job["slides"]:
        slide = microtome.open(entry["path"])
        level = slide.levels[entry["level"]]
        tile, across = level["tile_width"], level["tiles_across"]
        if (tile, entry["read_size"], entry["level"]) != (size, size, 0) or any(
            x % tile or y % tile for x, y in zip(entry["x_l0"], entry["y_l0"], strict=True)
        ):
            raise SystemExit(f"microtome reads whole tiles only, here of {tile} pixels")
        indices = [
            y // tile * across + x // tile
            for x, y in zip(entry["x_l0"], entry["y_l0"], strict=True)
        ]
        for first in range(0, len(indices), BATCH):
            batch = slide.read_batch(
                entry["level"], indices[first : first + BATCH], threads=job["workers"]
            )
            count += len(batch)
    print(count)


main()
