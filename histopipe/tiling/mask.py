"""Where the tissue is: `otsu-1`, on a thumbnail.

Tissue is coloured and glass is not, so the saturation (of HSV) is split by Otsu's threshold (Otsu 1979). Black is neither:
pen, coverslip edges and unscanned areas are excluded, however saturated JPEG makes them. Then holes and specks smaller
than a stated area are filled and removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from histopipe.geometry import Mpp, SquareMicrometres

SATURATION_BOUNDS = (15, 27)
"""Otsu's threshold is kept within these (0 to 255). Below, the tint of the glass would be tissue on a blank slide (glass
measures 0 to 5); above, a slide with dark stain would lose pale eosin, which starts near 28. On the H&E test slides the
tissue found changes by 5 % and 1 % of itself between the two bounds."""

BLACK_BELOW = 45
"""A pixel whose brightest channel is below this (0 to 255) is no tissue."""

SMALLEST_OBJECT = SquareMicrometres(10_000.0)
"""A square of 0.1 mm: smaller specks are dust or lone cells. A needle biopsy's core is 100 times that."""

LARGEST_HOLE = SquareMicrometres(5_000.0)
"""Smaller holes (fat cells, gland lumina) count as tissue. Well below a usual patch of 0.128 mm, or one of bare glass
could count as tissue."""


@dataclass(frozen=True, slots=True)
class TissueMask:
    """Tissue on a thumbnail.

    Attributes:
        pixels: (H, W) bool.
        saturation_threshold: what Otsu gave, within bounds.
        black_fraction: share of the thumbnail that is black.
    """

    pixels: NDArray[np.bool_]
    saturation_threshold: int
    black_fraction: float


def tissue_mask(thumbnail: NDArray[np.uint8], mpp: Mpp) -> TissueMask:
    """Tissue on a thumbnail.

    Args:
        thumbnail: (H, W, 3) uint8 RGB.
        mpp: its scale.

    Source:
        N. Otsu, "A threshold selection method from gray-level histograms", IEEE Trans. SMC 9 (1979).
    """
    # Late: half a second that `--tissue none` and every command but ingest need not spend.
    from skimage.filters import threshold_otsu
    from skimage.morphology import remove_small_holes, remove_small_objects

    # A median keeps edges and drops the single pixels of JPEG noise.
    smooth = Image.fromarray(thumbnail).filter(ImageFilter.MedianFilter(3))
    _, saturation_image, value_image = smooth.convert("HSV").split()
    saturation, value = np.asarray(saturation_image), np.asarray(value_image)
    black = value < BLACK_BELOW
    counts = np.bincount(saturation[~black], minlength=256)
    occupied = np.count_nonzero(counts) > 1
    histogram = (counts, np.arange(256))
    otsu = int(threshold_otsu(hist=histogram)) if occupied else 0  # type: ignore[no-untyped-call]
    threshold = int(np.clip(otsu, *SATURATION_BOUNDS))
    tissue = (saturation > threshold) & ~black
    pixel_um2 = mpp * mpp
    tissue = remove_small_objects(tissue, max_size=int(SMALLEST_OBJECT / pixel_um2))
    tissue = remove_small_holes(tissue, max_size=int(LARGEST_HOLE / pixel_um2))
    # Filling may reach into pen marks and edges: black stays out.
    return TissueMask(tissue & ~black, threshold, float(black.mean()) if black.size else 0.0)
