"""Tissue masks of thumbnails, and what the algorithms that find tissue have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import Mpp, SquareMicrometres

SMALLEST_OBJECT = SquareMicrometres(10_000.0)
"""A square of 0.1 mm. Smaller objects are dust or single cells; the core of a needle biopsy is 100 times larger."""
LARGEST_HOLE = SquareMicrometres(5_000.0)
"""Smaller holes (fat cells, gland lumina) count as tissue. The area is well below that of a usual patch (0.128 mm
wide), so that a patch of bare glass does not count as tissue."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TissueMask:
    """Tissue on a thumbnail: (H, W) bool, and notes on how it was found.

    `threshold` is in the unit of the algorithm; None if the mask was not found by a threshold.
    """

    pixels: Mask
    threshold: float | None = None
    notes: tuple[str, ...] = ()


def otsu_threshold(counts: NDArray[Any]) -> int:
    """Return the bin that separates a histogram, (N,), into two classes: it is the last one of the lower class.

    The result is 0 if fewer than two bins are used.

    Source:
        N. Otsu, "A threshold selection method from gray-level histograms", IEEE Trans. SMC 9 (1979).
    """
    if np.count_nonzero(counts) < 2:
        return 0
    bins = np.arange(len(counts))
    below, sums = np.cumsum(counts, dtype=np.float64), np.cumsum(counts * bins, dtype=np.float64)
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = sums / below - (sums[-1] - sums) / above
        return int(np.nanargmax(below * above * distance**2))


def components(
    mask: Mask, keep: Callable[[NDArray[np.int32], NDArray[np.int32]], Mask], connectivity: int = 8
) -> Mask:
    """Return the connected parts of a mask that `keep` chooses.

    `keep` gets the number of the part of each pixel, (H, W), 0 outside the mask, and OpenCV's statistics of the parts,
    (N, 5); it returns (N,) bool. Part 0 is never kept.
    """
    if not mask.any():
        return mask
    _, parts, statistics, _ = cv2.connectedComponentsWithStats(
        mask.view(np.uint8), connectivity=connectivity
    )
    kept = keep(np.asarray(parts, np.int32), np.asarray(statistics, np.int32))
    kept[0] = False
    return np.asarray(kept[parts])


def larger_than(mask: Mask, area: SquareMicrometres, mpp: Mpp, connectivity: int = 8) -> Mask:
    """Return the connected parts of a mask that are larger than an area."""
    most = int(area / (mpp * mpp))
    return components(mask, lambda _, found: found[:, cv2.CC_STAT_AREA] > most, connectivity)


def cleaned(mask: Mask, mpp: Mpp, connectivity: int = 8) -> Mask:
    """Return a mask without small objects and small holes."""
    objects = larger_than(mask, SMALLEST_OBJECT, mpp, connectivity)
    return ~larger_than(~objects, LARGEST_HOLE, mpp, connectivity)
