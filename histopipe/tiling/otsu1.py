"""Algorithm `otsu-1`, of older stores: Otsu's threshold of the saturation (of HSV).

Black pixels (pen, coverslip edges, unscanned areas) are excluded, since JPEG may give them a high saturation.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import Mpp
from histopipe.tiling.mask import TissueMask, cleaned, otsu_threshold

SATURATION_BOUNDS = (15, 27)
"""Limits of the threshold (0 to 255). Below, the tinted glass of a blank slide would count as tissue (glass has 0 to
5). Above, a slide with dark stain would lose pale eosin, which starts near 28. Between the limits, the tissue found on
the H&E test slides changes by 5 % and 1 %."""
BLACK_BELOW = 45
"""A pixel whose brightest channel is below this (0 to 255) is black."""
_DARK = 0.5


def find_tissue(rgb: NDArray[np.uint8], mpp: Mpp) -> TissueMask:
    """Find the tissue on a thumbnail, (H, W, 3) uint8 RGB. The threshold is a saturation, 0 to 255."""
    # The median removes single pixels of JPEG noise.
    saturation, value = saturation_and_value(np.asarray(cv2.medianBlur(rgb, 3), np.uint8))
    black = value < BLACK_BELOW
    counts = np.bincount(saturation[~black], minlength=256)
    threshold = int(np.clip(otsu_threshold(counts), *SATURATION_BOUNDS))
    tissue = cleaned((saturation > threshold) & ~black, mpp, connectivity=4)
    notes = ("dark background: try --tissue otsu-3 or none",) if black.mean() > _DARK else ()
    # Filling holes may have added pen marks and coverslip edges.
    return TissueMask(tissue & ~black, threshold, notes)


def saturation_and_value(rgb: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return S and V of HSV, (H, W) uint8 each, rounded down. OpenCV rounds to the nearest number."""
    red, green, blue = cv2.split(rgb)
    value = np.asarray(cv2.max(cv2.max(red, green), blue), np.uint8)
    spread = value - cv2.min(cv2.min(red, green), blue)
    levels = np.arange(256, dtype=np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        table = np.nan_to_num(levels[None, :] / levels[:, None] * np.float32(255), posinf=0)
    return table.clip(0, 255).astype(np.uint8)[value, spread], value
