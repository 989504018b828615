"""Tile slides with OpenSlide, Pillow and LMDB in a pool, like common scripts. Called by tools/bench_peers.py."""

import io
import json
import multiprocessing
import sys
from pathlib import Path

import lmdb
import openslide
from PIL import Image

CHUNK = 256


def encode(task: tuple[str, int, int, int, list[tuple[int, int]]]) -> list[bytes]:
    """Read, resize and encode some patches of a slide."""
    path, level, read_size, patch_size, corners = task
    values = []
    with openslide.OpenSlide(path) as slide:
        for corner in corners:
            image = slide.read_region(corner, level, (read_size, read_size)).convert("RGB")
            if read_size != patch_size:
                image = image.resize((patch_size, patch_size), Image.Resampling.LANCZOS)
            file = io.BytesIO()
            image.save(file, "JPEG", quality=90)
            values.append(file.getvalue())
    return values


def main() -> None:
    """Tile all slides of a job into one LMDB environment."""
    job = json.loads(Path(sys.argv[1]).read_text())
    tasks = []
    for slide in job["slides"]:
        corners = list(zip(slide["x_l0"], slide["y_l0"], strict=True))
        for first in range(0, len(corners), CHUNK):
            chunk = corners[first : first + CHUNK]
            tasks.append(
                (slide["path"], slide["level"], slide["read_size"], job["patch_size"], chunk)
            )
    count = 0
    with (
        lmdb.open(f"{sys.argv[2]}/patches.lmdb", map_size=1 << 40) as env,
        multiprocessing.Pool(job["workers"]) as pool,
    ):
        for values in pool.imap(encode, tasks):
            with env.begin(write=True) as txn:
                for value in values:
                    txn.put(count.to_bytes(8, "big"), value)
                    count += 1
    print(count)


if __name__ == "__main__":
    main()
