"""Tissue masks of thumbnails, and what the algorithms that find tissue have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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


class Components:
    """Connected parts of a mask, (H, W), numbered from 1. Number 0 is not a part: its measures are 0.

    They are measured by numpy, since OpenCV's own statistics take eight times as long as finding the parts. Areas are
    summed over the runs of equal pixels in each row, which are far fewer than the pixels.
    """

    def __init__(self, mask: Mask, connectivity: int = 8) -> None:
        self._count, labels = cv2.connectedComponents(
            mask.view(np.uint8), connectivity=connectivity
        )
        self._mask, self._labels = mask, np.asarray(labels, np.int32).ravel()
        starts = np.ones(mask.shape, np.bool_)
        np.not_equal(mask[:, 1:], mask[:, :-1], out=starts[:, 1:])
        runs = np.flatnonzero(starts)
        self._lengths = np.diff(runs, append=mask.size)
        self._run_parts = self._labels[runs]

    @cached_property
    def areas(self) -> NDArray[np.int64]:
        """Number of pixels of each part, (N,)."""
        lengths = self._lengths * (self._run_parts > 0)
        return np.bincount(self._run_parts, lengths, self._count).astype(np.int64)

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._mask)

    @cached_property
    def _parts(self) -> NDArray[np.int32]:
        return self._labels[self._places]

    def means(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the mean of values, (H, W), over each part, (N,)."""
        sums = np.bincount(self._parts, values.ravel()[self._places], self._count)
        return np.asarray(sums / np.maximum(self.areas, 1))

    def boxes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the top left corners of the parts and their extents, (N, 2) each, y first."""
        first, last = np.zeros((2, self._count, 2), np.int64)
        first[1:] = max(self._mask.shape)
        for axis, values in enumerate(np.divmod(self._places, self._mask.shape[1])):
            np.minimum.at(first[:, axis], self._parts, values)
            np.maximum.at(last[:, axis], self._parts, values)
        return first, last - first + 1

    def pixels_of(self, kept: Mask) -> Mask:
        """Return the mask, (H, W), of the parts that `kept`, (N,), chooses."""
        chosen = kept[self._run_parts] & (self._run_parts > 0)
        return np.repeat(chosen, self._lengths).reshape(self._mask.shape)


def larger_than(mask: Mask, area: SquareMicrometres, mpp: Mpp, connectivity: int = 8) -> Mask:
    """Return the connected parts of a mask that are larger than an area."""
    parts = Components(mask, connectivity)
    return parts.pixels_of(parts.areas > int(area / (mpp * mpp)))


def cleaned(mask: Mask, mpp: Mpp, connectivity: int = 8) -> Mask:
    """Return a mask without small objects and small holes."""
    objects = larger_than(mask, SMALLEST_OBJECT, mpp, connectivity)
    return ~larger_than(~objects, LARGEST_HOLE, mpp, connectivity)
