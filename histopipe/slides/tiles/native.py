"""A level's native JPEG tiles: where they lie in the file, as plain JPEG files, and as pixels.

A shortcut past OpenSlide, which stays the truth: `check` compares the two, and what differs is not to be used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from histopipe.errors import SlideUnreadable
from histopipe.geometry import RegionLevel, Size
from histopipe.slides.tiles.jpeg import Colour, Frame, NotPlain, TileFormat, frame_of
from histopipe.system.files import Closing

_DECODED_BYTES = 48 << 20
"""Pixels of tiles kept decoded, for the patches that share them."""
_LARGEST_TILE, _LONGEST_TILE = 1 << 26, 1 << 28
"""Pixels, and bytes: what a damaged header may say beyond them is not to be taken into memory."""


class NotNative(ValueError):
    """A level's tiles cannot be taken from its file directly; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeLevel:
    """The tiles of one level, row by row from the top left.

    Attributes:
        path: the file they lie in.
        x_level, y_level: the level's pixel at the first tile's corner.
        size: of the image that they make up.
        tile: size of a tile. Those at the right and lower edge reach beyond the image.
        colour: what the slide's header says the components are.
        tables: JPEG tables that all tiles share; empty where each has its own.
        offsets, lengths: (rows, columns) int64 bytes in the file; a length of 0 is a tile that was never written.
        frame: what the tiles' own headers say; equal for all that are used.
    """

    path: Path
    x_level: int
    y_level: int
    size: Size
    tile: Size
    colour: Colour
    tables: bytes
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    frame: Frame | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        rows, columns = self.offsets.shape
        return rows, columns

    def region(self, row: int, column: int) -> RegionLevel:
        """What a tile shows of the level."""
        x, y = column * self.tile.width, row * self.tile.height
        width, height = (
            min(self.tile.width, self.size.width - x),
            min(self.tile.height, self.size.height - y),
        )
        return RegionLevel(self.x_level + x, self.y_level + y, Size(width, height))


class NativeTiles(Closing):
    """Reads a level's native tiles.

    Args:
        native: where they lie.

    Raises:
        SlideUnreadable: the file cannot be opened.
    """

    def __init__(self, native: NativeLevel) -> None:
        self.native = native
        self._file = -1
        self._format = TileFormat(native.tables, native.colour, native.frame)
        self._decoded: dict[int, Callable[[int, int], NDArray[np.uint8] | None]] = {}
        try:
            self._file = os.open(native.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SlideUnreadable(f"{native.path} cannot be read", found=error.strerror) from error

    def jpeg(self, row: int, column: int) -> bytes | None:
        """A tile as a plain JPEG file, its compressed data as the scanner wrote it; None if it was never written.

        Raises:
            SlideUnreadable: it is damaged, or not like the others.
        """
        length, offset = (
            int(self.native.lengths[row, column]),
            int(self.native.offsets[row, column]),
        )
        if length == 0:
            return None
        try:
            data = os.pread(self._file, length, offset)
            if len(data) == length:
                return self._format.plain(data)
        except (NotPlain, OSError) as error:
            raise self.unreadable(row, column, str(error)) from error
        raise self.unreadable(row, column, f"{len(data)} of {length} bytes: the file is cut short")

    def pixels(self, region: RegionLevel, reduction: int = 1) -> NDArray[np.uint8] | None:
        """A part of the level; None if any of it was never written.

        Args:
            region: within the image.
            reduction: 1, 2, 4 or 8, by scaled DCT; it divides the tiles and the region.

        Returns:
            (H / reduction, W / reduction, 3) uint8 RGB, a new array.

        Raises:
            SlideUnreadable: a tile of it is damaged.
        """
        if reduction not in self._decoded:
            # One scale at a time. Weakly, or this object and its decoded tiles would keep each other alive.
            count = _DECODED_BYTES * reduction**2 // (self.native.tile.area * 3)
            decode = functools.partial(_decode, weakref.proxy(self), reduction)
            self._decoded = {reduction: functools.lru_cache(maxsize=max(4, count))(decode)}
        decoded = self._decoded[reduction]
        tile, r = self.native.tile, reduction
        left, top = region.x - self.native.x_level, region.y - self.native.y_level
        right, bottom = left + region.size.width, top + region.size.height
        out = np.empty((region.size.height // r, region.size.width // r, 3), np.uint8)
        for row in range(top // tile.height, -(-bottom // tile.height)):
            for column in range(left // tile.width, -(-right // tile.width)):
                part = decoded(row, column)
                if part is None:
                    return None
                # The tile's corner, and the part of it that is wanted, in pixels of the level.
                x, y = column * tile.width, row * tile.height
                x0, x1 = max(left, x), min(right, x + tile.width)
                y0, y1 = max(top, y), min(bottom, y + tile.height)
                out[(y0 - top) // r : (y1 - top) // r, (x0 - left) // r : (x1 - left) // r] = part[
                    (y0 - y) // r : (y1 - y) // r, (x0 - x) // r : (x1 - x) // r
                ]
        return out

    def close(self) -> None:
        """Give the file and the decoded tiles back."""
        self._decoded = {}
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def unreadable(self, row: int, column: int, why: str) -> SlideUnreadable:
        """The error of a tile."""
        return SlideUnreadable(
            f"{self.native.path}: the tile in row {row}, column {column} of the {self.native.size} image",
            found=why,
        )


def _decode(tiles: NativeTiles, reduction: int, row: int, column: int) -> NDArray[np.uint8] | None:
    data = tiles.jpeg(row, column)
    if data is None:
        return None
    tile = tiles.native.tile
    try:
        # Only with the size it should have does simplejpeg decode at a reduced scale.
        pixels = simplejpeg.decode_jpeg(
            data,
            colorspace="RGB",
            min_height=tile.height // reduction,
            min_width=tile.width // reduction,
            min_factor=reduction,
        )
    except ValueError as error:
        raise tiles.unreadable(row, column, str(error)) from error
    return np.asarray(pixels)


def with_frame(native: NativeLevel) -> NativeLevel:
    """The same, with what its longest tile's header says: so must all that are used.

    The header of the slide is no help: CMU-1-Small-Region's says 4:2:0, and its tiles are 4:4:4.

    Raises:
        NotNative: that tile is not what can be used.
    """
    place = np.unravel_index(int(native.lengths.argmax()), native.shape)
    length = int(native.lengths[place])
    if native.tile.area > _LARGEST_TILE or length > _LONGEST_TILE:
        raise NotNative(f"its tiles are {native.tile}, the longest of {length} bytes")
    try:
        with NativeTiles(native) as tiles:
            longest = tiles.jpeg(int(place[0]), int(place[1]))
        frame = frame_of(longest or b"")
    except SlideUnreadable as error:
        raise NotNative(str(error)) from error
    except NotPlain as error:
        raise NotNative(f"its longest tile {error}") from error
    if frame.size != native.tile or frame.bits != 8 or len(frame.sampling) not in (1, 3):
        raise NotNative(f"its longest tile is {frame}, the header says {native.tile}")
    return dataclasses.replace(native, frame=frame)


def reduction_of(native: NativeLevel, factor: int) -> int:
    """The largest scale, 8, 4, 2 or 1, that divides a reduction and the tiles."""
    return math.gcd(8, factor, native.tile.width, native.tile.height)
