"""Find tissue by the algorithm of a tiling spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import Mpp
from histopipe.slides.thumbnail import Thumbnail
from histopipe.tiling import otsu1, otsu2
from histopipe.tiling.mask import TissueMask
from histopipe.tiling.spec import NEWEST

FINDERS: Mapping[str, Callable[[NDArray[np.uint8], Mpp], TissueMask]] = {
    "otsu-1": otsu1.find_tissue,
    "otsu-2": otsu2.find_tissue,
    "otsu-3": partial(otsu2.find_tissue, requires_glass=False),
}
"""Algorithms by name."""


def tissue_mask(thumbnail: Thumbnail, algorithm: str = NEWEST) -> TissueMask:
    """Find the tissue on a thumbnail.

    Areas that could not be read may be tissue, and count as such: their patches are recorded as unreadable if reading
    fails again.
    """
    mask = FINDERS[algorithm](thumbnail.pixels, thumbnail.mpp)
    return mask if thumbnail.lost is None else replace(mask, pixels=mask.pixels | thumbnail.lost)
