"""Benchmark the labelling of a million patches from five thousand outlines, sparse and dense.

python tools/bench_annotations.py [--patches 1000000] [--outlines 5000]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from histopipe.annotations.annotation_files import read_regions
from histopipe.annotations.regions import Regions
from histopipe.annotations.rules import AnnotationRules
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.measure.patch_labels import label_patches

SIDE = 100
"""Side of a patch in level-0 pixels."""
DENSITIES = {"sparse": (100, 900), "dense": (200, 2500)}
"""Minimum and maximum radius of the outlines. Where they are dense, three overlap on average."""
CLASSES = "abcdef"


def write_outlines(path: Path, count: int, side: int, radii: tuple[int, int]) -> int:
    """Write random star-shaped outlines of 20 to 400 points, and return the total number of points."""
    rng = np.random.default_rng(1)
    features, points = [], 0
    for number in range(count):
        corners = int(rng.integers(20, 400))
        turns = np.sort(rng.uniform(0, 2 * np.pi, corners))
        reach = rng.uniform(*radii) * rng.uniform(0.6, 1.2, corners)
        x, y = rng.uniform(0, side, 2)
        ring = np.stack([x + reach * np.cos(turns), y + reach * np.sin(turns)], axis=1)
        points += corners
        features.append(
            {
                "type": "Feature",
                "geometry": {"type": "Polygon", "coordinates": [ring.round(1).tolist()]},
                "properties": {"classification": {"name": CLASSES[number % len(CLASSES)]}},
            }
        )
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return points


def labelled(regions: Regions, count: int) -> float:
    """Return the seconds to label a square grid of about `count` patches."""
    across = round(count**0.5)
    x, y = (grid.ravel() * SIDE for grid in np.meshgrid(np.arange(across), np.arange(across)))
    started = time.monotonic()
    label_patches(regions.outlines, x, y, SIDE, threshold=0.5)
    return time.monotonic() - started


def main() -> None:
    """Run the benchmark, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--patches", type=int, default=1_000_000)
    parser.add_argument("--outlines", type=int, default=5000)
    options = parser.parse_args()
    side = round(options.patches**0.5) * SIDE
    size = Size(side, side)
    print(f"{options.patches:,} patches, {options.outlines:,} outlines")
    for name, radii in DENSITIES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outlines.geojson"
            points = write_outlines(path, options.outlines, side, radii)
            started = time.monotonic()
            bounds = RegionL0(PointL0(0, 0), size)
            regions = read_regions(path, AnnotationRules(), size=size, bounds=bounds)
            reading = time.monotonic() - started
        seconds = labelled(regions, options.patches)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{name}: {points:,} points read in {reading:.1f} s, patches labelled in {seconds:.1f} s, {peak:.2f} GB"
        )


if __name__ == "__main__":
    main()
