"""Slides: their header, their pixels, and the interface of the readers of file formats.

Label and macro images, which may show a patient's name, are never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import OptionUnfit
from histopipe.geometry import Level, PointL0, RegionL0, Size
from histopipe.system.files import Closing

WHITE = (255, 255, 255)
_HASHED_SIDE = 1024
"""Longer side in pixels at the level of which `region_hash` is. Another value would give other hashes than in records."""


@dataclass(frozen=True, slots=True)
class Turn:
    """How an image is turned for display: its EXIF orientation, 1 (not at all) to 8, and its size when turned.

    Level 0 is the turned image. The stored frame, in which other tools count, is that of the pixels in the file.

    Source:
        Exif 2.32, tag Orientation.
    """

    orientation: int
    size: Size

    @property
    def _flips(self) -> tuple[bool, bool]:
        """Whether x and y are counted from the other side."""
        return self.orientation in (2, 3, 6, 7), self.orientation in (3, 4, 7, 8)

    def _flipped(self, places: NDArray[Any], side: float) -> NDArray[Any]:
        ends = np.array((self.size.width, self.size.height))
        return np.where(self._flips, ends - side - places, places)

    def turned(self, places: NDArray[Any], side: float = 0) -> NDArray[Any]:
        """Return places (N, 2) of the stored frame at level 0: points, or the corners of squares of a side."""
        return self._flipped(places[:, ::-1] if self.orientation > 4 else places, side)

    def stored(self, places: NDArray[Any], side: float = 0) -> NDArray[Any]:
        """Return places (N, 2) of level 0 in the stored frame: points, or the corners of squares of a side."""
        places = self._flipped(places, side)
        return places[:, ::-1] if self.orientation > 4 else places

    def pixels(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return the pixels of level 0, (H, W, …), of those of the stored image."""
        pixels = stored.swapaxes(0, 1) if self.orientation > 4 else stored
        across, down = (-1 if flip else 1 for flip in self._flips)
        return pixels[::down, ::across]


@dataclass(frozen=True, slots=True)
class SlideInfo:
    """Header of a slide: the name of the format, the levels, largest first, and properties; None if missing.

    `bounds` is the scanned part of level 0; all of level 0 if the file does not record it. Of a core, it is the region of the
    core, and `scan` the scanned part. `quickhash` is OpenSlide's
    `quickhash-1`, not a hash of the content. A colour profile is not applied. `reader` is the name and version of the
    library that reads the slide. `notes` are remarks for the user. `orientation` is that of `Turn`.
    """

    vendor: str
    levels: tuple[Level, ...]
    bounds: RegionL0
    mpp_x: str | None
    mpp_y: str | None
    objective_power: str | None
    quickhash: str | None
    has_icc_profile: bool
    reader: str = "openslide"
    notes: tuple[str, ...] = ()
    orientation: int = 1
    scan: RegionL0 | None = None

    @property
    def frame(self) -> RegionL0:
        """The scanned part of level 0, from whose corner QuPath counts."""
        return self.scan or self.bounds

    def within(self, core: RegionL0) -> SlideInfo:
        """Return the header of a core, whose region is from the corner of the scanned part.

        Raises:
            OptionUnfit: it is outside of the slide.
        """
        region = core_region(self.size, self.bounds.origin, core)
        if not region.size.area:
            raise OptionUnfit(
                "the core is outside of the slide", found=core.to_list(), expected=self.size
            )
        return replace(self, bounds=region, scan=self.bounds, quickhash=None)

    @property
    def size(self) -> Size:
        """Size of level 0."""
        return self.levels[0].size


class Slide(Closing):
    """An open slide: the base class of all readers. `readers.open_slide` opens one.

    A reader has `read_bgrx`, or `fill` if it reads only inside of a level. If it keeps a file open, this is its cached
    property `handle`. `natural_block` is the size of the blocks, in pixels of any level, in which reading all of the level
    is fastest.
    """

    path: Path
    info: SlideInfo
    natural_block = Size(2048, 2048)

    def close(self) -> None:
        """Close the file, if one is open. The next read opens it again."""
        if "handle" in self.__dict__:
            self.__dict__.pop("handle").close()

    def read_region(self, origin: PointL0, level: int, size: Size) -> NDArray[np.uint8]:
        """Return (H, W, 3) uint8 RGB pixels of a level; transparent pixels get the slide's background colour.

        Raises:
            SlideUnreadable: the file is damaged in this region. Other regions can still be read.
        """
        return np.asarray(rgb_image(self.read_bgrx(origin, level, size)))

    def read_bgrx(self, origin: PointL0, level: int, size: Size) -> NDArray[np.uint8]:
        """Return the same pixels as (H, W, 4) uint8: blue, green, red, and an unused byte.

        Pixels outside of the level are white. A region between two pixels of the level takes the nearest.
        """
        image = self.info.levels[level]
        x, y = round(origin.x / image.downsample), round(origin.y / image.downsample)
        bgrx = np.full((size.height, size.width, 4), 255, np.uint8)
        rows = slice(max(0, -y), max(0, image.size.height - y))
        columns = slice(max(0, -x), max(0, image.size.width - x))
        self.fill(bgrx[rows, columns, 2::-1], origin, level, max(0, x), max(0, y))
        return bgrx

    def region_hash(self) -> str:
        """Return a hash of the pixels in the bounds, at the coarsest level that has enough of them.

        Raises:
            SlideUnreadable: they cannot be read.
        """
        bounds, levels = self.info.bounds, self.info.levels
        longer = max(bounds.size.width, bounds.size.height)
        fine = [level for level in levels if longer / level.downsample >= _HASHED_SIDE]
        level = max(fine or levels[:1], key=lambda level: level.downsample)
        pixels = self.read_region(bounds.origin, level.number, level.inside(bounds).size)
        return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()

    def fill(
        self, out: NDArray[np.uint8], origin: PointL0, level: int, left: int, top: int
    ) -> None:
        """Write the pixels of a region inside of a level to `out`, (h, w, 3) uint8 RGB, which may be empty.

        `left` and `top` are its edges in pixels of the level. `origin` is that of `read_bgrx`, for messages.
        """
        raise NotImplementedError


def overlaps(
    left: int, top: int, size: Size, tile: Size
) -> Iterator[tuple[int, int, tuple[slice, slice], tuple[slice, slice]]]:
    """Yield the tiles of a grid that overlap a region: row, column, place in the region, and part of the tile.

    `left` and `top` are the corner of the region. Places are rows and columns of pixels.
    """
    rows = range(top // tile.height, -(-(top + size.height) // tile.height))
    for row in rows if size.area else ():
        y = row * tile.height
        y0, y1 = max(top, y), min(top + size.height, y + tile.height)
        for column in range(left // tile.width, -(-(left + size.width) // tile.width)):
            x = column * tile.width
            x0, x1 = max(left, x), min(left + size.width, x + tile.width)
            place = slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)
            yield row, column, place, (slice(y0 - y, y1 - y), slice(x0 - x, x1 - x))


def clip_region(size: Size, x: int, y: int, width: int, height: int) -> RegionL0:
    """Return the part of a region that is inside of a slide of a size."""
    x, y = max(0, x), max(0, y)
    part = Size(max(0, min(width, size.width - x)), max(0, min(height, size.height - y)))
    return RegionL0(PointL0(x, y), part)


def core_region(size: Size, corner: PointL0, core: RegionL0) -> RegionL0:
    """Return the part inside of a slide of the region of a core, which is from the corner of the scanned part."""
    x, y = core.origin.x + corner.x, core.origin.y + corner.y
    return clip_region(size, x, y, core.size.width + min(0, x), core.size.height + min(0, y))


def rgb_image(bgrx: NDArray[np.uint8]) -> Image.Image:
    """Return an RGB image of the pixels that `Slide.read_bgrx` returns."""
    size = bgrx.shape[1], bgrx.shape[0]
    return Image.frombuffer("RGB", size, np.ascontiguousarray(bgrx), "raw", "BGRX", 0, 1)
