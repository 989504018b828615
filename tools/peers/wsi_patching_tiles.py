"""Tile slides with wsi-patching into tar files of PNG. Called by tools/bench_peers.py."""

import json
import sys
import tarfile
from pathlib import Path

from wsi_patching import (
    LowContrastBackgroundFilter,
    PatchExtractor,
    PNGEncoder,
    WebDatasetWriter,
    WSIGrid,
)


def main() -> None:
    """Tile all slides of a job; the tool chooses the patches."""
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    size = job["patch_size"]
    grid = WSIGrid(slides=[entry["path"] for entry in job["slides"]], resolution=job["mpp"])
    pipeline = (
        grid.then(PatchExtractor(tile_size=size, stride=size))
        .then(LowContrastBackgroundFilter())
        .then(PNGEncoder())
        .to(WebDatasetWriter(outdir=out))
    )
    pipeline.materialize(num_workers=job["workers"])
    count = 0
    for path in out.rglob("*.tar"):
        with tarfile.open(path) as archive:
            count += sum(name.endswith(".png") for name in archive.getnames())
    print(count)


if __name__ == "__main__":
    main()
