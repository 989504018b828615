"""Where the native JPEG tiles of a DICOM slide lie: the frames of one of its files.

Source:
    DICOM PS3.3 C.8.12 (whole-slide images) and PS3.5 A.4 (encapsulated frames).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydicom.encaps import parse_basic_offsets, parse_fragments
from pydicom.uid import JPEGBaseline8Bit

from histopipe.geometry import Level, Size
from histopipe.slides.dicom_header import pydicom_warnings, read_header
from histopipe.slides.tiles.jpeg import Colour
from histopipe.slides.tiles.native import NativeLevel, NotNative, with_frame

_SIZE = ("TotalPixelMatrixColumns", "TotalPixelMatrixRows")
_FRAMES = ("Columns", "Rows", "PhotometricInterpretation", "DimensionOrganizationType")
_ELEMENT_HEADER = 12
"""Bytes of tag, representation and length, in the explicit form that every compressed syntax has."""
_ITEM_HEADER = struct.Struct("<HHI")
_COLOURS: dict[str, Colour] = {
    "YBR_FULL_422": "ycbcr",
    "YBR_FULL": "ycbcr",
    "RGB": "rgb",
    "MONOCHROME2": "grey",
}


def find_tiles(files: tuple[Path, ...], level: Level) -> NativeLevel:
    """Where a level's native JPEG tiles lie.

    Args:
        files: the series' files.
        level: one of its levels.

    Raises:
        NotNative: they cannot be taken directly; the text says why.
    """
    try:
        with pydicom_warnings() as damage:
            found = [path for path in files if _shows(path, level.size)]
            if len(found) != 1:
                raise NotNative(  # noqa: TRY301
                    f"{len(found)} of its files are {level.size}, where one should be"
                )
            return with_frame(_native(found[0], level.size))
    except NotNative as error:
        raise NotNative(_with_damage(str(error), damage)) from error
    except Exception as error:
        reason = f"its frames cannot be found: {error}"
        raise NotNative(_with_damage(reason, damage)) from error


def _with_damage(reason: str, damage: list[str]) -> str:
    """Return a reason with the damage of the header that pydicom has found."""
    return f"{reason} (damaged header: {'; '.join(damage[:2])})" if damage else reason


def _shows(path: Path, size: Size) -> bool:
    """Whether a file is the slide's image of a size."""
    try:
        header = read_header(path, "ImageType", *_SIZE)
        width, height = (int(header.get(name, 0)) for name in _SIZE)
        kind = header.get("ImageType", [])
        return Size(width, height) == size and len(kind) > 2 and kind[2] == "VOLUME"
    except Exception:  # noqa: BLE001 - pydicom looks at values only when they are asked for
        return False


def _native(path: Path, size: Size) -> NativeLevel:
    header = read_header(path, *_FRAMES)
    syntax = header.file_meta.TransferSyntaxUID
    if syntax != JPEGBaseline8Bit:
        raise NotNative(f"its tiles are {syntax.name}")
    colour = _COLOURS.get(header.PhotometricInterpretation)
    if colour is None:
        raise NotNative(f"its pixels are {header.PhotometricInterpretation}")
    if header.get("DimensionOrganizationType") != "TILED_FULL":
        raise NotNative("its tiles lie in an order of their own (not TILED_FULL)")
    tile = Size(int(header.Columns), int(header.Rows))
    shape = -(-size.height // tile.height), -(-size.width // tile.width)
    offsets, lengths = _frames(path)
    if len(offsets) != shape[0] * shape[1]:
        raise NotNative(f"it has {len(offsets)} fragments, not {shape[0]} by {shape[1]} tiles")
    return NativeLevel(
        path=path,
        x_level=0,
        y_level=0,
        size=size,
        tile=tile,
        colour=colour,
        tables=b"",
        offsets=offsets.reshape(shape),
        lengths=lengths.reshape(shape),
    )


def _frames(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offset and length of every fragment of the pixel data."""
    with path.open("rb") as file:
        read_header(file)
        file.seek(_ELEMENT_HEADER, os.SEEK_CUR)
        parse_basic_offsets(
            file
        )  # the first item; it may be empty, so fragments are looked at one by one
        _, items = parse_fragments(file)
        lengths = []
        for item in items:
            file.seek(item)
            lengths.append(_ITEM_HEADER.unpack(file.read(_ITEM_HEADER.size))[2])
    return np.array(items, np.int64) + _ITEM_HEADER.size, np.array(lengths, np.int64)
