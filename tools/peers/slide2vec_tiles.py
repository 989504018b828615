"""Tile slides with slide2vec's reader, which writes no images. Called by tools/bench_peers.py."""

import json
import sys
from pathlib import Path

from hs2p import SegmentationConfig, SlideSpec, TilingConfig, tile_slide
from slide2vec.data.tile_reader import WSITileReader

BATCH = 256


def main() -> None:
    """Read the tiles of all slides in batches of tensors; the tool chooses the patches."""
    job, count = json.loads(Path(sys.argv[1]).read_text()), 0
    for entry in job["slides"]:
        path = Path(entry["path"])
        result = tile_slide(
            SlideSpec(sample_id=path.stem, image_path=path),
            tiling=TilingConfig(
                backend="cucim",
                requested_spacing_um=job["mpp"],
                requested_tile_size_px=job["patch_size"],
                tolerance=0.05,
                overlap=0.0,
            ),
            segmentation=SegmentationConfig(method="hsv", downsample=64),
        )
        reader = WSITileReader(
            path, result, backend="cucim", num_cucim_workers=job["workers"], use_supertiles=True
        )
        order = reader.ordered_indices
        for first in range(0, len(order), BATCH):
            count += len(reader.read_batch(order[first : first + BATCH]))
    print(count)


if __name__ == "__main__":
    main()
