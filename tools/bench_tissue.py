"""Measure how well tissue is found on synthetic slides with known tissue: intersection over union per condition.

    python tools/bench_tissue.py --slides 280 --seed 1

The condition of each slide is drawn at random. Each slide is written as a pyramidal SVS file, opened like any other
slide, and deleted. Compared are Otsu's threshold on the saturation alone, and the algorithms of `--tissue`. On blank
slides, the number is the share of the slide that is correctly not tissue.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import cv2
import numpy as np
from make_slides import make_scene
from numpy.typing import NDArray
from tissue_scenes import CONDITIONS

from histopipe.geometry import Mpp
from histopipe.slides.slide_files import open_slide
from histopipe.slides.thumbnail import Thumbnail, read_thumbnail
from histopipe.tiling.algorithms import FINDERS

Mask = NDArray[np.bool_]


def plain_otsu(thumbnail: Thumbnail) -> Mask:
    """Return Otsu's threshold on the saturation after a median filter, and nothing else."""
    saturation = cv2.cvtColor(cv2.medianBlur(thumbnail.pixels, 3), cv2.COLOR_RGB2HSV)[..., 1]
    threshold, _ = cv2.threshold(saturation, 0, 255, cv2.THRESH_OTSU)
    return np.asarray(saturation > threshold)


def finder(name: str) -> Callable[[Thumbnail], Mask]:
    """Return one of the algorithms of `--tissue`."""
    return lambda thumbnail: FINDERS[name](thumbnail.pixels, thumbnail.mpp).pixels


FOUND: Mapping[str, Callable[[Thumbnail], Mask]] = {
    "Otsu on saturation": plain_otsu,
    **{name: finder(name) for name in FINDERS},
}


def main() -> None:
    """Parse the arguments, and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--slides", type=int, default=280)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    cv2.setNumThreads(1)
    drawn = np.random.default_rng(options.seed).choice(list(CONDITIONS), options.slides)
    scores: dict[str, list[list[float]]] = defaultdict(list)
    seconds: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, condition in enumerate(drawn.tolist()):
            path = Path(folder) / "scene.svs"
            truth = make_scene(path, condition, options.seed * 1_000_000 + number)
            with open_slide(path) as slide:
                thumbnail = read_thumbnail(slide, Mpp(float(slide.info.mpp_x or 0)))
            row, times = [], []
            for find in FOUND.values():
                started = time.process_time()
                mask = find(thumbnail)
                times.append(time.process_time() - started)
                row.append(_score(mask, truth))
            scores[condition].append(row)
            seconds.append(times)
    _print(scores, np.median(seconds, axis=0))


def _score(mask: Mask, truth: Mask) -> float:
    if not truth.any():
        return 1 - float(mask.mean())
    return float((mask & truth).sum() / (mask | truth).sum())


def _print(scores: Mapping[str, list[list[float]]], seconds: NDArray[np.float64]) -> None:
    print("| condition | slides | " + " | ".join(FOUND) + " |")
    print("| --- | --- |" + " --- |" * len(FOUND))
    for condition in CONDITIONS:
        rows = np.array(scores[condition])
        if len(rows):
            cells = [
                f"{m:.3f} ({low:.3f})" for m, low in zip(rows.mean(0), rows.min(0), strict=True)
            ]
            print(f"| {condition} | {len(rows)} | " + " | ".join(cells) + " |")
    all_rows = np.concatenate([np.array(rows) for rows in scores.values() if rows])
    print(f"| all | {len(all_rows)} | " + " | ".join(f"{m:.3f}" for m in all_rows.mean(0)) + " |")
    print("| ms per slide | | " + " | ".join(f"{1000 * s:.0f}" for s in seconds) + " |")


if __name__ == "__main__":
    main()
