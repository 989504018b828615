"""Tile slides into TFRecords with slideflow and its libvips backend. Called by tools/bench_peers.py."""

import json
import os
import sys
from pathlib import Path

os.environ["SF_SLIDE_BACKEND"] = "libvips"
os.environ["SF_BACKEND"] = "tensorflow"

import slideflow as sf


def main() -> None:
    """Tile the tissue of all slides of a job, detected by Otsu's threshold."""
    job = json.loads(Path(sys.argv[1]).read_text())
    count = 0
    for entry in job["slides"]:
        um = round(job["patch_size"] * job["mpp"])
        slide = sf.WSI(entry["path"], tile_px=job["patch_size"], tile_um=um, verbose=False)
        slide.qc("otsu")
        slide.extract_tiles(
            tfrecord_dir=sys.argv[2],
            img_format="jpg",
            report=False,
            num_processes=job["workers"],
            whitespace_fraction=1,
            grayspace_fraction=1,
        )
        count += int(slide.estimated_num_tiles)
    print(count)


if __name__ == "__main__":
    main()
