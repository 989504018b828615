"""Read OME-TIFF and plain TIFF files with tifffile: 8-bit RGB or grey, tiled or striped, with any compression."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

from histopipe.errors import SlideUnreadable
from histopipe.geometry import PointL0, Size
from histopipe.slides.slide import Slide
from histopipe.slides.tiff_pyramid import TiffImage, read_pyramid

_CACHED_BYTES = 64 << 20
"""Bytes of decoded tiles or strips that are kept for the regions that share them."""
_BLOCK_PIXELS = 2048 * 2048


class TiffReader(Slide):
    """A slide that tifffile opens.

    Raises:
        SlideUnreadable: the file is no TIFF, has several channels or another kind of pixels, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._cached: OrderedDict[tuple[int, int], NDArray[np.uint8]] = OrderedDict()
        try:
            with tifffile.TiffFile(path) as tiff:
                self._images, self.info = read_pyramid(path, tiff)
        except SlideUnreadable:
            raise
        except OSError as error:
            raise SlideUnreadable(f"{path} cannot be read", found=str(error)) from error
        except Exception as error:  # on a damaged header, tifffile may raise any exception
            raise SlideUnreadable(
                f"{path} cannot be read as a TIFF file",
                found=f"{type(error).__name__}: {error}"[:200],
            ) from error
        first = self._images[0]
        if not first.page.is_tiled:
            width = first.size.width
            self.natural_block = Size(width, max(first.segment.height, _BLOCK_PIXELS // width))

    def read_bgrx(self, origin: PointL0, level: int, size: Size) -> NDArray[np.uint8]:
        """Return the pixels of a region; see `Slide`. A region between two pixels of the level takes the nearest."""
        image, scale = self._images[level], self.info.levels[level].downsample
        left, top = round(origin.x / scale), round(origin.y / scale)
        out = np.full((size.height, size.width, 4), 255, np.uint8)
        for index, x, y in image.segments_in(left, top, size):
            x0, x1 = max(left, x), min(left + size.width, x + image.segment.width, image.size.width)
            y0, y1 = (
                max(top, y),
                min(top + size.height, y + image.segment.height, image.size.height),
            )
            try:
                part = self._part(level, index, (x0 - x, x1 - x), (y0 - y, y1 - y))
            except Exception as error:  # the decoders raise many types
                raise SlideUnreadable(
                    f"{self.path}: level {level} cannot be read at ({origin.x}, {origin.y})",
                    found=f"{type(error).__name__}: {error}"[:200],
                ) from error
            if part is not None:
                out[y0 - top : y1 - top, x0 - left : x1 - left, :3] = part[..., ::-1]
        return out

    def close(self) -> None:
        """Close the file, and free the decoded tiles. The next read opens it again."""
        self._cached.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        # When the interpreter ends, the module `os` may be gone; the system closes the file.
        if hasattr(self, "_cached") and os is not None:
            self.close()

    def _part(
        self, level: int, index: int, columns: tuple[int, int], rows: tuple[int, int]
    ) -> NDArray[np.uint8] | None:
        """Return some pixels of a tile or strip, (H, W, 1 or 3); None if it was never written."""
        image = self._images[level]
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        if image.is_raw:
            return self._raw(image, index, columns, rows)
        key = level, index
        if key in self._cached:
            self._cached.move_to_end(key)
        else:
            planes = [self._decoded(image, number) for number in image.planes_of(index)]
            written = [plane for plane in planes if plane is not None]
            if not written:
                return None
            if len(written) < len(planes):
                raise ValueError("a colour plane is missing")
            self._cached[key] = np.concatenate(written, axis=2) if len(written) > 1 else written[0]
            total = sum(part.nbytes for part in self._cached.values())
            while total > _CACHED_BYTES and len(self._cached) > 1:
                total -= self._cached.popitem(last=False)[1].nbytes
        pixels: NDArray[np.uint8] = self._cached[key][rows[0] : rows[1], columns[0] : columns[1]]
        return pixels

    def _decoded(self, image: TiffImage, number: int) -> NDArray[np.uint8] | None:
        length = image.lengths[number]
        if length == 0:
            return None
        data = os.pread(self._file, length, image.offsets[number])
        if len(data) < length:
            raise ValueError(f"{len(data)} of {length} bytes: the file is truncated")
        pixels, _, _ = image.decode(data, number)
        if pixels is None:
            return None
        planes = np.asarray(pixels)
        if planes.ndim != 4 or planes.shape[0] != 1 or planes.dtype != np.uint8:
            raise ValueError(f"pixels of shape {planes.shape}, {planes.dtype}")
        width = min(image.segment.width, image.size.width)
        if planes.shape[2] < width and not image.page.is_tiled:
            raise ValueError(f"a strip of {planes.shape[2]} pixels, expected {width}")
        plane: NDArray[np.uint8] = planes[0]
        return np.subtract(255, plane, dtype=np.uint8) if image.page.photometric == 0 else plane

    def _raw(
        self, image: TiffImage, index: int, columns: tuple[int, int], rows: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """Read some rows of an uncompressed strip or tile."""
        samples, first = image.samples, image.offsets[index]
        wide = image.segment.width if image.page.is_tiled else image.size.width
        count = (columns[1] - columns[0]) * samples
        out = np.empty((rows[1] - rows[0], count), np.uint8)
        for number, row in enumerate(range(*rows)):
            place = (row * wide + columns[0]) * samples
            data = os.pread(self._file, count, first + place)
            if len(data) < count or place + count > image.lengths[index]:
                raise ValueError("the file is truncated")
            out[number] = np.frombuffer(data, np.uint8)
        pixels = out.reshape(len(out), -1, samples)
        return np.subtract(255, pixels, dtype=np.uint8) if image.page.photometric == 0 else pixels
