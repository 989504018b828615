"""Tile slides by libvips' dzsave, which writes every tile of a slide as a JPEG file. Called by tools/bench_peers.py."""

import json
import sys
from pathlib import Path

import pyvips


def main() -> None:
    """Tile all slides of a job into files."""
    job = json.loads(Path(sys.argv[1]).read_text())
    pyvips.cache_set_max(0)
    for number, slide in enumerate(job["slides"]):
        image = pyvips.Image.openslideload(slide["path"], level=slide["level"], access="sequential", rgb=True)
        if slide["read_size"] != job["patch_size"]:
            image = image.resize(job["patch_size"] / slide["read_size"])
        image.dzsave(
            f"{sys.argv[2]}/{number}", tile_size=job["patch_size"], overlap=0, depth="one", suffix=".jpg[Q=90]", skip_blanks=-1
        )
    print(sum(1 for _ in Path(sys.argv[2]).rglob("*.jpg")))


if __name__ == "__main__":
    main()
