"""Find native tiles, and compare them with the pixels that OpenSlide returns.

If the downsample of a level is a whole number, OpenSlide returns the pixels of the tiles, and both must be equal. If it
is not (8.00045 is common), level-0 coordinates are between the pixels of the level, and OpenSlide interpolates. Then
the difference must be small, and smallest without a shift of the tiles.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import SlideUnreadable
from histopipe.geometry import Level, PointL0, RegionLevel, Size
from histopipe.slides.native_tiles import NativeLevel, NativeTiles, NotNative
from histopipe.slides.slide import Slide, SlideInfo
from histopipe.slides.slide_formats import READERS
from histopipe.system.output import counted

_SAMPLED_TILES, _INTERPOLATED_TILES = 8, 4
_LEAST_SIDE = 32

LARGEST_DIFFERENCE = 8.0
"""Largest mean absolute difference, of 255, by interpolation. A shift of sharp H&E by half a pixel gives 4 to 6."""

LEAST_PSNR = 40.0
"""Least PSNR of scaled decoding against decoding and averaging, in decibels. Compression at quality 90 has 31 to 37."""


class NativeLevels(ExitStack):
    """Native tiles of the levels of an open slide, from all of its files. Each level is located and checked once.

    `close` closes the files and frees the decoded tiles.
    """

    def __init__(self, slide: Slide, files: tuple[Path, ...]) -> None:
        super().__init__()
        self._slide, self._files = slide, files
        self._checked: dict[int, NativeTiles | NotNative] = {}

    def get(self, level: Level) -> NativeTiles | NotNative:
        """Return the tiles of a level, with the result of their comparison with OpenSlide's pixels.

        If they cannot be used directly, or differ from OpenSlide's pixels, return the error with the reason. Its `native`
        has the tiles, too, if they are located.
        """
        if level.number not in self._checked:
            try:
                native = find_native(self._files, self._slide.info, level)
                tiles = self.enter_context(NativeTiles(native))
                tiles.comparison = check(self._slide, level, tiles)
                self._checked[level.number] = tiles
            except NotNative as error:
                self._checked[level.number] = error
        return self._checked[level.number]


def find_native(files: tuple[Path, ...], info: SlideInfo, level: Level) -> NativeLevel:
    """Locate the native JPEG tiles of a level in the files of a slide.

    Raises:
        NotNative: they cannot be used directly; the text is the reason.
    """
    name = info.reader.partition(" ")[0]
    if not READERS[name].native_tiles:
        raise NotNative(f"read by {name}, which has no native tiles")
    # Late: a slide needs only one of the two modules, and each import takes 0.1 s.
    if info.vendor == "dicom":
        from histopipe.slides import dicom_tiles as dicom

        return dicom.find_tiles(files, level)
    from histopipe.slides import tiff_tiles as tiff

    return tiff.find_tiles(files, info, level)


def check(slide: Slide, level: Level, tiles: NativeTiles) -> str:
    """Compare sampled tiles with OpenSlide, and return the result as text.

    Raises:
        NotNative: they differ, or none could be compared.
    """
    places = sampled(tiles.native)
    if not level.downsample.is_integer():
        places = places[:: _SAMPLED_TILES // _INTERPOLATED_TILES]
    compared = [pair for place in places if (pair := _pair(slide, level, tiles, *place))]
    if not compared:
        raise NotNative(
            "none of its sampled tiles can be read" if places else "no tile is completely inside it"
        )
    zero = float(np.mean([_difference(a, b) for a, b in compared]))
    if level.downsample.is_integer() and zero:
        raise NotNative(f"its tiles differ from OpenSlide's pixels, by {zero:.2g} of 255")
    if zero == 0:
        return f"{counted(len(compared), 'tile')} equal to OpenSlide's"
    shifted = {
        (dx, dy): np.mean(
            [
                _difference(a[1:-1, 1:-1], np.roll(b, (-dy, -dx), (0, 1))[1:-1, 1:-1])
                for a, b in compared
            ]
        )
        for dy, dx in product((-1, 0, 1), repeat=2)
    }
    best = min(shifted, key=shifted.__getitem__)
    if zero > LARGEST_DIFFERENCE or shifted[best] < shifted[0, 0]:
        raise NotNative(
            f"its tiles differ from OpenSlide's pixels, by {zero:.2g} of 255, "
            f"least when shifted by {best}"
        )
    return (
        f"approximate: OpenSlide interpolates this level; tiles differ from it by {zero:.2g} of 255"
    )


def scaled_psnr(tiles: NativeTiles, reduction: int) -> float:
    """Return the PSNR, in decibels, of scaled decoding of sampled tiles against decoding and averaging."""
    squares = []
    for row, column in sampled(tiles.native):
        region = tiles.native.region(row, column)
        with suppress(SlideUnreadable):
            full, small = tiles.pixels(region), tiles.pixels(region, reduction)
            if full is not None and small is not None:
                truth = np.asarray(Image.fromarray(full).reduce(reduction), np.float32)
                squares.append(np.mean((truth - small) ** 2))
    mean = float(np.mean(squares)) if squares else np.inf
    return float(10 * np.log10(255**2 / mean)) if mean else np.inf


def sampled(native: NativeLevel) -> list[tuple[int, int]]:
    """Return rows and columns of complete tiles spread over the level, from the longer half, which show tissue."""
    rows, columns = native.size.height // native.tile.height, native.size.width // native.tile.width
    lengths = native.lengths[:rows, :columns]
    written = lengths[lengths > 0]
    if not written.size:
        return []
    places = np.argwhere(lengths >= np.median(written))
    chosen = sorted({*np.linspace(0, len(places) - 1, _SAMPLED_TILES).astype(int).tolist()})
    return [(int(row), int(column)) for row, column in places[chosen]]


def _pair(
    slide: Slide, level: Level, tiles: NativeTiles, row: int, column: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
    """Return the pixels of a tile and those of OpenSlide; None if either cannot be read, which the ingest records."""
    region = tiles.native.region(row, column)
    width, height = region.size.width // 2, region.size.height // 2
    if not level.downsample.is_integer() and min(width, height) >= _LEAST_SIDE:
        # Only its middle: for a whole tile that is between the pixels of a level, OpenSlide decodes four tiles. A wrong
        # colour, place or size of tiles shows in their middle, too.
        region = RegionLevel(region.x + width // 2, region.y + height // 2, Size(width, height))
    x, y = level.to_l0(np.array([region.x, region.y], np.int64)).tolist()
    try:
        tile = tiles.pixels(region)
        truth = slide.read_region(PointL0(x, y), level.number, region.size)
    except SlideUnreadable:
        return None
    return None if tile is None else (tile, truth)


def _difference(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    return float(np.mean(np.maximum(a, b) - np.minimum(a, b)))  # a - b would wrap around in uint8
