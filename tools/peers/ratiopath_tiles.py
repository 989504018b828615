"""Tile slides with ratiopath on Ray into Parquet files of JPEG. Called by tools/bench_peers.py."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import ray
from PIL import Image
from ratiopath.tiling import read_slide_tiles

BATCH = 128


def encoded(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of tiles as JPEG, resized where the level is finer than the patches."""
    out = []
    for tile, size in zip(batch.pop("tile"), batch["size"], strict=True):
        image, buffer = Image.fromarray(tile), io.BytesIO()
        if image.width != size:
            image = image.resize((size, size), Image.Resampling.BOX)
        image.save(buffer, "JPEG", quality=90)
        out.append(buffer.getvalue())
    return {"path": batch["path"], "x": batch["tile_x"], "y": batch["tile_y"], "jpeg": out}


def main() -> None:
    """Tile all slides of a job with the coordinates of the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    ray.init(num_cpus=job["workers"], include_dashboard=False, log_to_driver=False)
    rows = [
        {
            "path": entry["path"],
            "tile_x": round(x / entry["downsample"]),
            "tile_y": round(y / entry["downsample"]),
            "level": entry["level"],
            "tile_extent_x": entry["read_size"],
            "tile_extent_y": entry["read_size"],
            "size": job["patch_size"],
        }
        for entry in job["slides"]
        for x, y in zip(entry["x_l0"], entry["y_l0"], strict=True)
    ]
    if rows:
        tiles = ray.data.from_items(rows).map_batches(read_slide_tiles, batch_size=BATCH)
        encode = tiles.map_batches(encoded, batch_size=BATCH)
        encode.write_parquet(str(Path(sys.argv[2]).resolve()))
    print(len(rows))


if __name__ == "__main__":
    main()
