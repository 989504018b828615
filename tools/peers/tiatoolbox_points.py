"""Tile slides with tiatoolbox's point patch extractor in a pool of processes. Called by tools/bench_peers.py."""

import json
import multiprocessing
import sys
from pathlib import Path

import numpy as np
from tiatoolbox.tools.patchextraction import get_patch_extractor
from tiatoolbox.utils.misc import imwrite

CHUNK = 256


def write(task: tuple[str, int, float, np.ndarray, str]) -> int:
    """Extract some patches of a slide and write each as a JPEG file."""
    path, patch_size, mpp, centres, prefix = task
    extractor = get_patch_extractor(
        "point",
        input_img=path,
        locations_list=centres,
        patch_size=(patch_size, patch_size),
        resolution=mpp,
        units="mpp",
    )
    count = 0
    for patch in extractor:
        imwrite(Path(f"{prefix}_{count}.jpg"), patch)
        count += 1
    return count


def main() -> None:
    """Tile all slides of a job into files."""
    job = json.loads(Path(sys.argv[1]).read_text())
    size = job["patch_size"]
    tasks = []
    for number, slide in enumerate(job["slides"]):
        # tiatoolbox expects centres of patches, in pixels of the requested scale.
        shrink = slide["patch_mpp"] / slide["slide_mpp"]
        corners = np.stack([slide["x_l0"], slide["y_l0"]], axis=1) / shrink
        centres = np.rint(corners).astype(int) + (size - 1) // 2
        for first in range(0, len(centres), CHUNK):
            prefix = f"{sys.argv[2]}/{number}_{first}"
            tasks.append(
                (slide["path"], size, slide["patch_mpp"], centres[first : first + CHUNK], prefix)
            )
    with multiprocessing.Pool(job["workers"]) as pool:
        print(sum(pool.imap(write, tasks)))


if __name__ == "__main__":
    main()
