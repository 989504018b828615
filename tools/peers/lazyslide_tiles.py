"""Tile slides with LazySlide's data set of tiles, which writes no images. Called by tools/bench_peers.py."""

import json
import sys
from pathlib import Path

import lazyslide
from torch.utils.data import DataLoader

BATCH = 256


def main() -> None:
    """Read the tiles of all slides in batches of tensors; the tool chooses the patches."""
    job, count = json.loads(Path(sys.argv[1]).read_text()), 0
    for entry in job["slides"]:
        slide = lazyslide.open_wsi(entry["path"], store=None, reader="openslide")
        lazyslide.pp.find_tissues(slide)
        lazyslide.pp.tile_tissues(slide, job["patch_size"], mpp=job["mpp"])
        loader = DataLoader(slide.ds.tile_images(), batch_size=BATCH, num_workers=job["workers"])
        count += sum(len(batch["image"]) for batch in loader)
    print(count)


if __name__ == "__main__":
    main()
