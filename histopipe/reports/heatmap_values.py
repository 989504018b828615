"""One value per patch of a slide, as heatmaps show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.predictions.predictions_folder import PredictedSlide


@dataclass(frozen=True, slots=True)
class NamedPatchValues:
    """One value per patch of a slide.

    Attributes:
        slide: slide id.
        name: name of the value, such as "probability of tumour".
        x_l0, y_l0: (N,) top left corners of the patches, level-0 pixels.
        side_l0: side of the patches, level-0 pixels.
        values: (N,) float32, 0 to 1.
        predicted: (N,) most probable class of each patch; None if the values are not probabilities of a class.
        bounds: x, y, width and height of the scanned area, level-0 pixels.
        mpp: µm per pixel of level 0; None if unknown.
        scale: for values with a sign, the one that is shown as 1; the value 0 is shown as 0.5. None for others.
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
    scale: float | None = None

    def raster(self, pixel_l0: float) -> NDArray[np.float32]:
        """Return (H, W) float32: the mean of the patches that cover the centre of a pixel, NaN without patches.

        The raster covers `bounds`. `pixel_l0` is the side of its pixels in level-0 pixels.
        """
        left, top, width, height = self.bounds
        shape = max(1, round(height / pixel_l0)), max(1, round(width / pixel_l0))
        sums, counts = np.zeros(shape, np.float32), np.zeros(shape, np.uint16)
        edges = []
        for start, count in ((self.y_l0 - top, shape[0]), (self.x_l0 - left, shape[1])):
            # The first pixel with its centre in the patch, and the first pixel after the patch.
            for edge in (start, start + self.side_l0):
                centre = np.ceil(edge / pixel_l0 - 0.5)
                edges.append(np.clip(centre, 0, count).astype(np.int64).tolist())
        for y0, y1, x0, x1, value in zip(*edges, self.values.tolist(), strict=True):
            sums[y0:y1, x0:x1] += value
            counts[y0:y1, x0:x1] += 1
        with np.errstate(invalid="ignore"):
            sums /= counts  # NaN without patches
        return sums


ReadValues = Callable[[str], NamedPatchValues | None]
"""Reads the values of a slide. Returns None if the slide has no patches."""


def bounds_of(slide: PredictedSlide) -> tuple[float, float, float, float]:
    """Return the scanned area, or raise DamagedStore."""
    left, top, width, height = slide.bounds
    if min(width, height, slide.size_l0) <= 0:
        raise DamagedStore(
            f"slide {slide.slide}: the size of the slide or of its patches is not positive",
            found=f"{width}×{height}, {slide.size_l0}",
        )
    return left, top, width, height
