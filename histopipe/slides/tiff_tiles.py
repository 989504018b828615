"""TIFF files: read them although they may be damaged, hash them, and locate their native JPEG tiles.

Source:
    TIFF 6.0; TIFF Technical Note 2 (JPEG in TIFF), for compression 7 and its shared tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tifffile

from histopipe.errors import SlideUnreadable
from histopipe.geometry import Level, Size
from histopipe.slides.native_tiles import Colour, NativeLevel, NotNative, with_frame, with_transform
from histopipe.slides.slide import SlideInfo

_COMPRESSIONS = {
    1: "not compressed",
    6: "old-style JPEG (TIFF compression 6), which stores its tables separately",
    **dict.fromkeys((33003, 33005, 34712), "JPEG 2000"),
}
_COLOURS: dict[int, Colour] = {1: "grey", 2: "rgb", 6: "ycbcr"}
"""Colour by photometric interpretation, which OpenSlide also uses."""


T = TypeVar("T")


def try_tiff(path: Path, read: Callable[[tifffile.TiffFile], T]) -> T | None:
    """Return what a function reads of a TIFF file; None if the file is no TIFF, or damaged.

    Raises:
        SlideUnreadable: the function raises it.
    """
    try:
        with tifffile.TiffFile(path) as tiff:
            return read(tiff)
    except SlideUnreadable:
        raise
    except Exception:  # noqa: BLE001 - on a damaged header, tifffile may raise any exception
        return None


def has_one_image(tiff: tifffile.TiffFile) -> bool:
    """Return whether a file is one image without tiles, and not a scan."""
    return not (tiff.is_ome or tiff.is_svs or tiff.pages.first.is_tiled) and len(tiff.pages) == 1


def hash_tiles(tiff: tifffile.TiffFile) -> str:
    """Return the hash of `slide_files.tile_hash`."""
    page = tiff.pages.first
    counts = np.asarray(page.databytecounts, dtype="<u8")
    digest = hashlib.sha256(counts.tobytes())
    for index in np.unique(np.linspace(0, len(counts) - 1, 64).astype(int)):
        tiff.filehandle.seek(int(page.dataoffsets[index]))
        digest.update(tiff.filehandle.read(int(counts[index])))
    return digest.hexdigest()


def find_largest(
    tiff: tifffile.TiffFile,
) -> tuple[Size, Sequence[Path], Sequence[int], Sequence[int]]:
    """Return the size of the largest image; and the file, the offset and the length of each of its tiles or strips."""
    page = max(_pages(tiff.pages), key=lambda page: page.imagewidth * page.imagelength)
    offsets, lengths = page.dataoffsets, page.databytecounts
    return _size(page), [Path(tiff.filehandle.path)] * len(offsets), offsets, lengths


def _pages(images: Iterable[Any]) -> list[tifffile.TiffPage]:
    return [page for page in images if isinstance(page, tifffile.TiffPage)]


def find_tiles(files: tuple[Path, ...], info: SlideInfo, level: Level) -> NativeLevel:
    """Locate the native JPEG tiles of a level in the file of a slide.

    Raises:
        NotNative: they cannot be used directly; the text is the reason.
    """
    path = files[0]
    try:
        with tifffile.TiffFile(path) as tiff:
            pages = _pages(tiff.pages)
            if pages and pages[0].subifds:  # the lower levels of OME-TIFF
                pages += _pages(pages[0].pages or ())
            for x, y, size in _places(info, level):
                matches = [page for page in pages if page.is_tiled and _size(page) == size]
                if len(matches) == 1:
                    return with_frame(_native(path, matches[0], x, y))
    except NotNative:
        raise
    except Exception as error:  # on a damaged header, tifffile may raise any exception
        raise NotNative(f"its tiles cannot be found: {error}") from error
    raise NotNative(f"its file does not contain exactly one tiled image of {level.size}")


def _places(info: SlideInfo, level: Level) -> list[tuple[int, int, Size]]:
    """Return x, y and size of possible images of the level: all of it, or only the scanned part."""
    places = [(0, 0, level.size)]
    x, y = (v / level.downsample for v in (info.bounds.origin.x, info.bounds.origin.y))
    if (x, y) != (0, 0) and max(abs(x - round(x)), abs(y - round(y))) < 1e-3:
        places.append((round(x), round(y), level.inside(info.bounds).size))
    return places


def _size(page: tifffile.TiffPage) -> Size:
    return Size(page.imagewidth, page.imagelength)


def _native(path: Path, page: tifffile.TiffPage, x: int, y: int) -> NativeLevel:
    compression = int(page.compression)
    colour = _COLOURS.get(int(page.photometric))
    if compression != tifffile.COMPRESSION.JPEG:
        colour = colour or "rgb"
    elif colour is None or page.bitspersample != 8 or page.samplesperpixel not in (1, 3):
        raise NotNative(
            f"its pixels are {page.samplesperpixel}×{page.bitspersample} bits, {page.photometric}"
        )
    if page.planarconfig != 1 and page.samplesperpixel > 1:
        raise NotNative("its colours are in separate planes")
    shape = -(-page.imagelength // page.tilelength), -(-page.imagewidth // page.tilewidth)
    if len(page.dataoffsets) != shape[0] * shape[1]:
        raise NotNative(f"it has {len(page.dataoffsets)} tiles, not {shape[0]} by {shape[1]}")
    offsets, lengths = (
        np.array(values, np.int64).reshape(shape)
        for values in (page.dataoffsets, page.databytecounts)
    )
    native = NativeLevel(
        path,
        x,
        y,
        _size(page),
        Size(page.tilewidth, page.tilelength),
        colour,
        page.jpegtables or b"",
        offsets,
        lengths,
    )
    if compression == tifffile.COMPRESSION.JPEG:
        return native
    if compression == tifffile.COMPRESSION.APERIO_JP2000_YCBC:
        native = with_transform(native, "YCbCr pixels", transformed=False)
    name = getattr(page.compression, "name", str(compression)).lower().replace("_", " ")
    raise NotNative(
        f"its tiles are {_COMPRESSIONS.get(compression, f'compressed by {name}')}", native
    )
