"""Thumbnails of slides, read in blocks to limit memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import SlideUnreadable
from histopipe.geometry import Level, Mpp, PointL0, RegionLevel, Size
from histopipe.slides.native_tiles import NativeTiles, NotNative, reduction_of
from histopipe.slides.slide import Slide, overlaps
from histopipe.slides.tile_check import NativeLevels

THUMBNAIL_MPP = Mpp(8.0)
ASSUMED_MPP = Mpp(0.5)
"""Level-0 scale that is assumed if that of a slide is unknown; used only for thumbnails."""

_MOST_PIXELS = 6_000_000
"""Most pixels of a thumbnail; a larger one is reduced further. 6 million pixels of 8 µm are 384 mm²."""

_FINE_PIXELS = 1_500_000
"""Most pixels at 8 µm, 96 mm², of a slide whose thumbnail is as fine as that: planning a larger slide would take longer
than copying its patches."""

_QUALITY = 85
"""Quality of thumbnails as JPEG files."""

_SAMPLED_ROWS = 256
"""Rows, or columns, of the thumbnail that are enough to see the colour of the background."""

_SMALL_BLOCK = Size(256, 256)
"""Side of the blocks in which a damaged block is read again."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """Small image of a slide's scanned area, (H, W, 3) uint8 RGB.

    `x_level` and `y_level` are its top left corner in pixels of the level, and `reduction` is the side of a thumbnail
    pixel in them. `lost` is (H, W), true where the slide cannot be read; None if all of it was read.
    """

    pixels: NDArray[np.uint8]
    level: Level
    x_level: int
    y_level: int
    reduction: int
    mpp: Mpp
    lost: NDArray[np.bool_] | None = None


def thumbnail_level(levels: tuple[Level, ...], mpp: Mpp | None, at: Mpp = THUMBNAIL_MPP) -> Level:
    """Return the coarsest level that is fine enough for a thumbnail of about scale `at`; `mpp` is that of level 0."""
    fine = [level for level in levels if (mpp or ASSUMED_MPP) * level.downsample <= at * 1.1]
    return max(fine, key=lambda level: level.downsample) if fine else levels[0]


def usual_mpp(slide: Slide, mpp: Mpp | None) -> Mpp:
    """Return the scale of a slide's thumbnail: 8 µm, or 16 µm for a large slide. `mpp` is that of level 0."""
    pixels = slide.info.bounds.size.area * ((mpp or ASSUMED_MPP) / THUMBNAIL_MPP) ** 2
    return Mpp(2 * THUMBNAIL_MPP) if pixels > _FINE_PIXELS else THUMBNAIL_MPP


def read_thumbnail(
    slide: Slide, mpp: Mpp | None, native: NativeLevels | None = None, at: Mpp = THUMBNAIL_MPP
) -> Thumbnail:
    """Read the scanned area at about the scale `at`, averaged over whole pixels of `thumbnail_level`.

    Very large areas are coarser. `mpp` is that of level 0; None if unknown. Native tiles make it several times as fast.

    Raises:
        SlideUnreadable: no part of the level can be read.
    """
    level = thumbnail_level(slide.info.levels, mpp, at)
    tiles = None if native is None else native.get(level)
    level_mpp = Mpp((mpp or ASSUMED_MPP) * level.downsample)
    area = level.inside(slide.info.bounds)
    smallest = math.sqrt(area.size.area / _MOST_PIXELS)
    reduction = max(1, int(at / level_mpp + 0.05), math.ceil(smallest))
    shape = (-(-area.size.height // reduction), -(-area.size.width // reduction))
    pixels, lost = np.full((*shape, 3), 255, np.uint8), np.zeros(shape, np.bool_)
    read = partial(_read_block, slide, tiles, level, reduction)
    for block, place in _blocks(area, area, slide.natural_block, reduction):
        try:
            pixels[place] = read(block)
        except SlideUnreadable:
            # The damage may be only one tile: read the rest of the block.
            for small, small_place in _blocks(block, area, _SMALL_BLOCK, reduction):
                try:
                    pixels[small_place] = read(small)
                except SlideUnreadable as error:
                    lost[small_place], reason = True, error.found or error
    if lost.size and lost.all():
        raise SlideUnreadable(
            f"{slide.path}: no part of level {level.number} can be read", found=reason
        )
    return Thumbnail(
        pixels,
        level,
        area.x,
        area.y,
        reduction,
        Mpp(level_mpp * reduction),
        lost if lost.any() else None,
    )


def _read_block(
    slide: Slide,
    tiles: NativeTiles | NotNative | None,
    level: Level,
    reduction: int,
    block: RegionLevel,
) -> NDArray[np.uint8]:
    """Return the reduced pixels of a block, of native tiles if possible."""
    pixels, reduced = None, 1
    if isinstance(tiles, NativeTiles):
        reduced = math.gcd(
            block.x - tiles.native.x_level,
            block.y - tiles.native.y_level,
            block.size.width,
            block.size.height,
            reduction_of(tiles.native, reduction),
        )
        pixels = tiles.pixels(block, reduced)
    if pixels is None:
        x, y = level.to_l0(np.array([block.x, block.y], np.int64)).tolist()
        pixels, reduced = slide.read_region(PointL0(x, y), level.number, block.size), 1
    return np.asarray(Image.fromarray(pixels).reduce(reduction // reduced))


def colour_note(pixels: NDArray[np.uint8]) -> str | None:
    """Return a note if the background of a thumbnail has the colour of a wrong colour space; None if it has not.

    Glass is light and neutral, (v, v, v). The same glass as YCbCr is (v, 128, 128); as RGB that is taken for YCbCr, it is
    magenta. Stains have neither of these colours.
    """
    step = max(1, min(pixels.shape[:2]) // _SAMPLED_ROWS)
    red, green, blue = np.moveaxis(pixels[::step, ::step], 2, 0).astype(np.int16)
    # `np.ptp` over three channels takes ten times as long.
    spread = np.maximum(np.maximum(red, green), blue) - np.minimum(np.minimum(red, green), blue)
    neutral = (spread < 40) & (green > 150)
    pink = (red > 180) & (abs(green - 128) < 8) & (abs(blue - 128) < 8)
    magenta = (red > 245) & (blue > 245) & (abs(green - 122) < 8)
    for wrong, text in (
        (pink, "pink, as if YCbCr pixels were read as RGB"),
        (magenta, "magenta, as if RGB pixels were read as YCbCr"),
    ):
        if wrong.sum() > max(wrong.size / 20, 10 * neutral.sum()):
            return f"its colours are probably wrong: its background is {text}; check the colour space in its header"
    return None


def encode_thumbnail(pixels: NDArray[np.uint8]) -> bytes:
    """Return a thumbnail, (H, W, 3) uint8 RGB, as a JPEG file."""
    pixels = np.ascontiguousarray(pixels)
    return bytes(simplejpeg.encode_jpeg(pixels, quality=_QUALITY, colorspace="RGB"))


def resize_image(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Resize an image to the longer side `side`. Small images are enlarged, so that lines drawn on them are visible."""
    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    filtering = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(pixels).resize(size, filtering, reducing_gap=2.0))


def _blocks(
    part: RegionLevel, area: RegionLevel, size: Size, reduction: int
) -> Iterator[tuple[RegionLevel, tuple[slice, slice]]]:
    """Yield blocks of about a size that cover a part of an area, each a whole number of thumbnail pixels.

    Each comes with its rows and columns in the thumbnail of the area.
    """
    tile = Size(*(max(1, side // reduction) * reduction for side in (size.width, size.height)))
    for _, _, (rows, columns), _ in overlaps(0, 0, part.size, tile):
        x, y = part.x + columns.start, part.y + rows.start
        width, height = columns.stop - columns.start, rows.stop - rows.start
        left, top = (x - area.x) // reduction, (y - area.y) // reduction
        place = (
            slice(top, top - (-height // reduction)),
            slice(left, left - (-width // reduction)),
        )
        yield RegionLevel(x, y, Size(width, height)), place
