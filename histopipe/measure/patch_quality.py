"""Measures of patch quality as pure functions of pixels: algorithms `focus-1`, `pen-1` and `dark-1` (folds and black).

Colours are measured as optical densities, -log10((value + 1) / 256), on pixels of about 8 µm: pen lines are wider, and
JPEG noise and single nuclei are averaged out. Focus is measured at 1 µm per pixel, where nuclei have edges.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import Mpp
from histopipe.tissue_masks.mask import coloured_ink

COLOUR_MPP = Mpp(8.0)


FOCUS_MPP = Mpp(1.0)


_FOLD_DENSITY = 2.4
"""Least density of folds, as the sum of channels at 8 µm. A layer of stained tissue has 0.6 to 1.8; layers add up."""


_DENSITY: NDArray[np.float32] = -np.log10((np.arange(256) + 1) / 256).astype(np.float32)


def pen_mask(rgb: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Find blue, green and red felt-tip ink, (H, W) bool, in (H, W, 3) uint8 of about 8 µm per pixel.

    A large area of bright blood may be detected as red ink. `dark_mask` finds black ink.
    """
    if not rgb.size:
        return np.zeros(rgb.shape[:2], np.bool_)
    if len(rgb) > 64:  # parts that fit into the processor's cache take half of the time or less
        return np.concatenate([pen_mask(rgb[top : top + 64]) for top in range(0, len(rgb), 64)])
    return coloured_ink(np.asarray(cv2.LUT(rgb, _DENSITY), np.float32))


def dark_mask(rgb: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Find folds and black (ink, edges of coverslips, unscanned areas); input and output as for `pen_mask`."""
    return np.asarray(_DENSITY[rgb].sum(axis=2) > _FOLD_DENSITY)


def focus_of(grey: NDArray[Any]) -> float:
    """Return the variance of the Laplacian of (H, W) luma, 0 to 255, at about 1 µm per pixel; at least 3 by 3 pixels.

    Source:
        J. L. Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
    """
    laplacian = cv2.Laplacian(grey.astype(np.float32), cv2.CV_32F)
    return float(laplacian[1:-1, 1:-1].var())  # without the border, where it needs pixels outside


def reduction_to(target_mpp: Mpp, mpp: float | None, side: int) -> int:
    """Return the whole number by which to reduce an image to about the wanted scale; 1 if its scale is unknown.

    The reduced image keeps a side of at least four pixels.
    """
    return 1 if mpp is None else max(1, min(round(target_mpp / mpp), side // 4))
