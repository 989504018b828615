"""One value per patch of a slide, and their raster: what heatmaps show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PatchValues:
    """One value per patch of a slide.

    Attributes:
        slide: slide id.
        name: of the value, such as "probability of tumour".
        x_l0, y_l0: (N,) top left corners of the patches, level-0 pixels.
        side_l0: side of the patches, level-0 pixels.
        values: (N,) float32, 0 to 1.
        predicted: (N,) most probable class of each; None if the values are not of classes.
        bounds: x, y, width and height of the scanned area, level-0 pixels.
        mpp: of level 0; None if unknown.
    """

    slide: str
    name: str
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    side_l0: float
    values: NDArray[np.float32]
    predicted: NDArray[np.object_] | None
    bounds: tuple[float, float, float, float]
    mpp: float | None

    def raster(self, pixel_l0: float) -> NDArray[np.float32]:
        """Return (H, W) float32: for each pixel the mean of the patches that cover its centre; NaN where none does.

        Args:
            pixel_l0: side of a pixel, level-0 pixels. The raster covers `bounds`.
        """
        left, top, width, height = self.bounds
        shape = max(1, round(height / pixel_l0)), max(1, round(width / pixel_l0))
        sums, counts = np.zeros(shape, np.float32), np.zeros(shape, np.uint16)
        first_x, last_x = _centres(self.x_l0 - left, self.side_l0, pixel_l0, shape[1])
        first_y, last_y = _centres(self.y_l0 - top, self.side_l0, pixel_l0, shape[0])
        places = zip(
            first_y.tolist(), last_y.tolist(), first_x.tolist(), last_x.tolist(), strict=True
        )
        for (y0, y1, x0, x1), value in zip(places, self.values.tolist(), strict=True):
            sums[y0:y1, x0:x1] += value
            counts[y0:y1, x0:x1] += 1
        with np.errstate(invalid="ignore"):
            sums /= counts  # NaN where there is no patch
        return sums


def _centres(
    start: NDArray[np.floating], side: float, pixel: float, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first pixel whose centre is in each patch, and the first one after it, along one axis."""
    first = np.ceil(start / pixel - 0.5)
    last = np.ceil((start + side) / pixel - 0.5)
    return (
        np.clip(first, 0, count).astype(np.int64),
        np.clip(last, 0, count).astype(np.int64),
    )


def ranks(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return (N,) the share of all values below each, 0 to 1. Attention weights differ by orders of magnitude; ranks do not."""
    if len(values) < 2:
        return np.ones(len(values), np.float32)
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    return np.asarray((below[place] / (len(values) - 1)).clip(0, 1), np.float32)
