"""A small picture of a whole slide, made without ever holding the slide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.geometry import Level, Mpp, PointL0, Size
from histopipe.slides.slide import Slide

THUMBNAIL_MPP = Mpp(8.0)
ASSUMED_MPP = Mpp(0.5)
"""Level-0 scale taken for the thumbnail, and for it alone, where a slide's is unknown."""

_BLOCK = 2048
"""Side of the squares that are read, in pixels of the level: 16 MB each as RGBA."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A slide's scanned area, small.

    Attributes:
        pixels: (H, W, 3) uint8 RGB.
        level: the level it was reduced from.
        x_level, y_level: that level's pixel at the thumbnail's top left corner.
        reduction: pixels of that level per thumbnail pixel, a whole number.
        mpp: micrometres per thumbnail pixel.
    """

    pixels: NDArray[np.uint8]
    level: Level
    x_level: int
    y_level: int
    reduction: int
    mpp: Mpp


def read_thumbnail(slide: Slide, mpp: Mpp | None) -> Thumbnail:
    """The scanned area at about 8 µm a pixel, averaged over whole pixels of the cheapest level.

    Args:
        slide: an open slide.
        mpp: its level-0 scale; None where unknown.

    Raises:
        SlideUnreadable: the file is damaged.
    """
    level, level_mpp = _cheapest_level(slide.info.levels, mpp or ASSUMED_MPP)
    reduction = max(1, int(THUMBNAIL_MPP / level_mpp + 0.05))
    area = level.inside(slide.info.bounds)
    shape = (-(-area.size.height // reduction), -(-area.size.width // reduction), 3)
    pixels = np.empty(shape, np.uint8)
    block = max(1, _BLOCK // reduction) * reduction
    for top in range(0, area.size.height, block):
        for left in range(0, area.size.width, block):
            size = Size(min(block, area.size.width - left), min(block, area.size.height - top))
            corner = level.to_l0(np.array([area.x + left, area.y + top], np.int64))
            part = slide.read_region(PointL0(*map(int, corner)), level.number, size)
            small = np.asarray(Image.fromarray(part).reduce(reduction))
            y, x = top // reduction, left // reduction
            pixels[y : y + small.shape[0], x : x + small.shape[1]] = small
    return Thumbnail(pixels, level, area.x, area.y, reduction, Mpp(level_mpp * reduction))


def _cheapest_level(levels: tuple[Level, ...], mpp: Mpp) -> tuple[Level, Mpp]:
    """The coarsest level that is still about fine enough."""
    scales = [Mpp(mpp * level.downsample) for level in levels]
    fine = [pair for pair in zip(levels, scales, strict=True) if pair[1] <= THUMBNAIL_MPP * 1.1]
    return max(fine, key=lambda pair: pair[1]) if fine else (levels[0], scales[0])
