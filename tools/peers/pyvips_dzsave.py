"""Tile slides with dzsave of libvips, which writes all tiles as JPEG files. Called by tools/bench_peers.py."""

import json
import sys
from pathlib import Path

import pyvips


def main() -> None:
    """Tile all slides of a job into files."""
    job = json.loads(Path(sys.argv[1]).read_text())
    pyvips.cache_set_max(0)
    for number, slide in enumerate(job["slides"]):
        # The wheel of libvips reads Aperio SVS as TIFF, so the first page is level 0.
        image = pyvips.Image.new_from_file(slide["path"], access="sequential")
        shrink = slide["slide_mpp"] / slide["patch_mpp"]
        if shrink < 0.98:
            image = image.resize(shrink)
        image.dzsave(
            f"{sys.argv[2]}/{number}",
            tile_size=job["patch_size"],
            overlap=0,
            depth="one",
            suffix=".jpg[Q=90]",
            skip_blanks=-1,
        )
    print(sum(1 for _ in Path(sys.argv[2]).rglob("*.jpg")))


if __name__ == "__main__":
    main()
