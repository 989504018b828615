"""A small picture of a whole slide, made without ever holding the slide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import SlideUnreadable
from histopipe.geometry import Level, Mpp, PointL0, RegionLevel, Size
from histopipe.slides.slide import Slide
from histopipe.slides.tiles.native import NativeTiles, reduction_of

THUMBNAIL_MPP = Mpp(8.0)
ASSUMED_MPP = Mpp(0.5)
"""Level-0 scale taken for the thumbnail, and for it alone, where a slide's is unknown."""

MOST_PIXELS = 6_000_000
"""A thumbnail's size, whatever the slide's: one that would be larger is made coarser. 6 million pixels of 8 µm are 384 mm²."""

_BLOCK = 2048
"""Side of the squares that are read, in pixels of the level: 16 MB each as RGBA."""
_SMALL_BLOCK = 256
"""Side of the squares that a damaged one is read again in."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A slide's scanned area, small.

    Attributes:
        pixels: (H, W, 3) uint8 RGB.
        level: the level it was reduced from.
        x_level, y_level: that level's pixel at the thumbnail's top left corner.
        reduction: pixels of that level per thumbnail pixel, a whole number.
        mpp: micrometres per thumbnail pixel.
        lost: (H, W) bool, what could not be read; None where all could.
    """

    pixels: NDArray[np.uint8]
    level: Level
    x_level: int
    y_level: int
    reduction: int
    mpp: Mpp
    lost: NDArray[np.bool_] | None = None


def thumbnail_level(levels: tuple[Level, ...], mpp: Mpp | None, at: Mpp = THUMBNAIL_MPP) -> Level:
    """The coarsest level that is still about fine enough for a thumbnail: the cheapest to read.

    Args:
        levels: the slide's pyramid.
        mpp: its level-0 scale; None where unknown.
        at: scale of the thumbnail.
    """
    scale = mpp or ASSUMED_MPP
    fine = [level for level in levels if scale * level.downsample <= at * 1.1]
    return max(fine, key=lambda level: level.downsample) if fine else levels[0]


def read_thumbnail(
    slide: Slide, mpp: Mpp | None, tiles: NativeTiles | None = None, at: Mpp = THUMBNAIL_MPP
) -> Thumbnail:
    """The scanned area at about 8 µm a pixel, very large ones coarser, averaged over whole pixels of `thumbnail_level`.

    Args:
        slide: an open slide.
        mpp: its level-0 scale; None where unknown.
        tiles: that level's native tiles, if they can be had: several times as fast as OpenSlide.
        at: the scale wanted in place of 8 µm.

    Raises:
        SlideUnreadable: nothing of it can be read.
    """
    level = thumbnail_level(slide.info.levels, mpp, at)
    level_mpp = Mpp((mpp or ASSUMED_MPP) * level.downsample)
    area = level.inside(slide.info.bounds)
    smallest = math.sqrt(area.size.area / MOST_PIXELS)
    reduction = max(1, int(at / level_mpp + 0.05), math.ceil(smallest))
    shape = (-(-area.size.height // reduction), -(-area.size.width // reduction))
    canvas = _Canvas(
        slide,
        tiles,
        level,
        area,
        reduction,
        np.full((*shape, 3), 255, np.uint8),
        np.zeros(shape, np.bool_),
    )
    for square in _squares(RegionLevel(0, 0, area.size), _BLOCK, reduction):
        if not canvas.paint(square):
            # The damage may be one tile: only that is lost.
            for small in _squares(square, _SMALL_BLOCK, reduction):
                if not canvas.paint(small):
                    canvas.lose(small)
    if canvas.lost.size and canvas.lost.all():
        raise SlideUnreadable(f"{slide.path}: nothing of level {level.number} can be read")
    return Thumbnail(
        canvas.pixels,
        level,
        area.x,
        area.y,
        reduction,
        Mpp(level_mpp * reduction),
        canvas.lost if canvas.lost.any() else None,
    )


@dataclass(frozen=True, slots=True)
class _Canvas:
    """A thumbnail being painted, square by square of the area it shows."""

    slide: Slide
    tiles: NativeTiles | None
    level: Level
    area: RegionLevel
    reduction: int
    pixels: NDArray[np.uint8]
    lost: NDArray[np.bool_]

    def paint(self, square: RegionLevel) -> bool:
        """Read a square, its place counted from the area's corner. False if it cannot be read."""
        region = RegionLevel(self.area.x + square.x, self.area.y + square.y, square.size)
        try:
            part, reduced = self._read(region)
        except SlideUnreadable:
            return False
        small = Image.fromarray(part).reduce(self.reduction // reduced)
        self.pixels[self._place(square)] = np.asarray(small)
        return True

    def _read(self, region: RegionLevel) -> tuple[NDArray[np.uint8], int]:
        """A region's pixels, and by how much they are reduced already."""
        if self.tiles is not None:
            x, y = region.x - self.tiles.native.x_level, region.y - self.tiles.native.y_level
            sides = math.gcd(x, y, region.size.width, region.size.height)
            reduced = math.gcd(sides, reduction_of(self.tiles.native, self.reduction))
            pixels = self.tiles.pixels(region, reduced)
            if pixels is not None:
                return pixels, reduced
        x, y = self.level.to_l0(np.array([region.x, region.y], np.int64)).tolist()
        return self.slide.read_region(PointL0(x, y), self.level.number, region.size), 1

    def lose(self, square: RegionLevel) -> None:
        """Mark a square as unknown."""
        self.lost[self._place(square)] = True

    def _place(self, square: RegionLevel) -> tuple[slice, slice]:
        x, y = square.x // self.reduction, square.y // self.reduction
        width = -(-square.size.width // self.reduction)
        height = -(-square.size.height // self.reduction)
        return slice(y, y + height), slice(x, x + width)


def _squares(area: RegionLevel, side: int, reduction: int) -> Iterator[RegionLevel]:
    """An area cut into squares of about `side`, a whole number of thumbnail pixels each."""
    side = max(1, side // reduction) * reduction
    for y in range(area.y, area.y + area.size.height, side):
        for x in range(area.x, area.x + area.size.width, side):
            width = min(side, area.x + area.size.width - x)
            height = min(side, area.y + area.size.height - y)
            yield RegionLevel(x, y, Size(width, height))
