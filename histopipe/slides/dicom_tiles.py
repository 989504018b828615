"""DICOM files: read values of their headers, and locate native JPEG tiles, which are the frames of one file of a slide.

Headers are untrusted input: they may be damaged, and pydicom does not check the lengths in them.

Source:
    DICOM PS3.3 C.8.12 (whole-slide images) and PS3.5 A.4 (encapsulated frames).
"""

from __future__ import annotations

import os
import struct
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.encaps import parse_basic_offsets, parse_fragments
from pydicom.uid import JPEG2000TransferSyntaxes, JPEGBaseline8Bit

from histopipe.geometry import Level, Size
from histopipe.slides.native_tiles import Colour, NativeLevel, NotNative, with_frame, with_transform

_SIZE = ("TotalPixelMatrixColumns", "TotalPixelMatrixRows")
_ELEMENT_HEADER = 12
"""Bytes of tag, value representation and length, in the explicit form that every compressed transfer syntax uses."""
_LONGEST_VALUE = 1 << 16
"""Most bytes of a value that is read. All values that are needed are shorter."""
_ITEM_HEADER = struct.Struct("<HHI")
_COLOURS: dict[str, Colour] = {
    "YBR_FULL_422": "ycbcr",
    "YBR_FULL": "ycbcr",
    "RGB": "rgb",
    "MONOCHROME2": "grey",
}


def read_header(file: Path | BinaryIO, *names: str) -> pydicom.Dataset:
    """Read some values of a file's header. An open file is then positioned at the start of its pixel data.

    pydicom warns about damaged values when they are read and when they are used: catch the warnings of both.

    Raises:
        ValueError: the file is not a DICOM file, or is damaged.
    """
    try:
        return pydicom.dcmread(
            file, stop_before_pixels=True, specific_tags=list(names), defer_size=_LONGEST_VALUE
        )
    except Exception as error:  # on a damaged header, pydicom may raise any exception
        raise ValueError(f"its header cannot be read: {error}") from error


def find_tiles(files: tuple[Path, ...], level: Level) -> NativeLevel:
    """Locate the native JPEG tiles of a level in the files of a series.

    Raises:
        NotNative: they cannot be used directly; the text is the reason.
    """
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            matches = [path for path in files if _shows(path, level.size)]
            if len(matches) != 1:
                raise NotNative(  # noqa: TRY301
                    f"{len(matches)} of its files have images of {level.size}, expected 1"
                )
            return with_frame(_native(matches[0], level.size))
    except Exception as error:  # pydicom parses values only when they are used
        unknown = "" if isinstance(error, NotNative) else "its frames cannot be found: "
        damage = {str(warning.message).partition("\n")[0][:200]: None for warning in caught}
        headers = f" (damaged header: {'; '.join(list(damage)[:2])})" if damage else ""
        raise NotNative(f"{unknown}{error}{headers}", getattr(error, "native", None)) from error


def find_pixel_data(files: tuple[Path, ...], size: Size) -> list[tuple[Path, int]]:
    """Return the files of a series with images of a size, and where their pixel data begin.

    They are in the order of their UIDs, which does not change when files are renamed.
    """
    parts = []
    with warnings.catch_warnings(action="ignore"):
        for path in files:
            if _shows(path, size):
                with path.open("rb") as file:
                    uid = str(read_header(file, "SOPInstanceUID").get("SOPInstanceUID"))
                    parts.append((uid, path, file.tell()))
    return [(path, start) for _, path, start in sorted(parts)]


def _shows(path: Path, size: Size) -> bool:
    """Return whether a file contains the image of the slide with this size."""
    try:
        header = read_header(path, "ImageType", *_SIZE)
        width, height = (int(header.get(name, 0)) for name in _SIZE)
        kind = header.get("ImageType", [])
        return Size(width, height) == size and len(kind) > 2 and kind[2] == "VOLUME"
    except Exception:  # noqa: BLE001 - pydicom parses values only when they are used
        return False


def _native(path: Path, size: Size) -> NativeLevel:
    header = read_header(
        path, "Columns", "Rows", "PhotometricInterpretation", "DimensionOrganizationType"
    )
    syntax = header.file_meta.TransferSyntaxUID
    declared = str(header.PhotometricInterpretation)
    is_jpeg_2000 = syntax in JPEG2000TransferSyntaxes
    if syntax != JPEGBaseline8Bit and not is_jpeg_2000:
        raise NotNative(f"its tiles are {syntax.name}")
    colour = "rgb" if is_jpeg_2000 else _COLOURS.get(declared)
    if colour is None:
        raise NotNative(f"its pixels are {declared}")
    if header.get("DimensionOrganizationType") != "TILED_FULL":
        raise NotNative("its tiles are not in row order (not TILED_FULL)")
    tile = Size(int(header.Columns), int(header.Rows))
    shape = -(-size.height // tile.height), -(-size.width // tile.width)
    offsets, lengths = _frames(path)
    if len(offsets) != shape[0] * shape[1]:
        raise NotNative(f"it has {len(offsets)} fragments, not {shape[0]} by {shape[1]} tiles")
    native = NativeLevel(
        path, 0, 0, size, tile, colour, b"", offsets.reshape(shape), lengths.reshape(shape)
    )
    if is_jpeg_2000:
        transformed = True if declared in ("YBR_ICT", "YBR_RCT") else None
        raise NotNative(
            f"its tiles are {syntax.name}", with_transform(native, declared, transformed)
        )
    return native


def _frames(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return offsets and lengths of all fragments of the pixel data."""
    with path.open("rb") as file:
        read_header(file)
        file.seek(_ELEMENT_HEADER, os.SEEK_CUR)
        parse_basic_offsets(file)  # skip this table, which may be empty: read the fragments instead
        _, items = parse_fragments(file)
        lengths = [
            _ITEM_HEADER.unpack(os.pread(file.fileno(), _ITEM_HEADER.size, item))[2]
            for item in items
        ]
    return np.array(items, np.int64) + _ITEM_HEADER.size, np.array(lengths, np.int64)
