"""Write pyramidal TIFF files of compressed JPEG tiles, with one tile in memory at a time.

tifffile needs imagecodecs to write such files, although the tiles are already compressed. The tags are those of
TIFF 6.0 and of BigTIFF, which has 64-bit offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from histopipe.geometry import Size
from histopipe.system.files import atomic_write

_KINDS = {"H": 3, "I": 4, "Q": 16}
"""TIFF types by format character of `struct`."""
_ASCII, _RATIONAL, _UNDEFINED = 2, 5, 7
_JPEG, _CENTIMETRE = 7, 3
_PHOTOMETRIC = {"grey": 1, "rgb": 2, "ycbcr": 6}
_FACTORS = {"444": (1, 1), "422": (2, 1), "420": (2, 2), "440": (1, 2)}


@dataclass(frozen=True)
class TiffPage:
    """An image of the pyramid, with the sizes of the image and of a tile.

    Attributes:
        tiles: JPEG files in row order. Empty bytes are a missing tile.
        subsampling, colour: values for the header, such as "420", and `ycbcr`, `rgb` or `grey`.
        tables: JPEG tables that are missing in the tiles.
    """

    size: Size
    tile: Size
    tiles: Iterable[bytes]
    subsampling: str
    description: str | None
    mpp: float
    colour: str = "ycbcr"
    tables: bytes = b""


def write_pyramid(path: Path, pages: Iterable[TiffPage]) -> None:
    """Write the pages in order as BigTIFF. The file becomes visible by one rename."""
    with atomic_write(path) as part, part.open("wb") as file:
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        link = 8  # position of the offset of the next directory
        for page in pages:
            directory = _write_page(file, page)
            end = file.tell()
            file.seek(link)
            file.write(struct.pack("<Q", directory))
            file.seek(end)
            link = end - 8


def _write_page(file: BinaryIO, page: TiffPage) -> int:
    """Write tiles and a directory, and return the offset of the directory."""
    offsets, counts = [], []
    for tile in page.tiles:
        offsets.append(file.tell() if tile else 0)
        counts.append(len(tile))
        file.write(tile)
    samples = 1 if page.colour == "grey" else 3
    per_centimetre = struct.pack("<II", round(1e8 / page.mpp), 10_000)
    tags = [
        _tag(254, "I", 0),
        _tag(256, "I", page.size.width),
        _tag(257, "I", page.size.height),
        _tag(258, "H", *[8] * samples),
        _tag(259, "H", _JPEG),
        _tag(262, "H", _PHOTOMETRIC[page.colour]),
        _tag(277, "H", samples),
        (282, _RATIONAL, 1, per_centimetre),
        (283, _RATIONAL, 1, per_centimetre),
        _tag(284, "H", 1),
        _tag(296, "H", _CENTIMETRE),
        _tag(322, "H", page.tile.width),
        _tag(323, "H", page.tile.height),
        _tag(324, "Q", *offsets),
        _tag(325, "Q", *counts),
    ]
    if page.colour == "ycbcr":
        tags.append(_tag(530, "H", *_FACTORS[page.subsampling]))
    if page.tables:
        tags.append((347, _UNDEFINED, len(page.tables), page.tables))
    if page.description is not None:
        text = page.description.encode() + b"\0"
        tags.append((270, _ASCII, len(text), text))
    directory = struct.pack("<Q", len(tags))
    for number, kind, count, data in sorted(tags):
        value = data if len(data) <= 8 else struct.pack("<Q", _append(file, data))
        directory += struct.pack("<HHQ8s", number, kind, count, value)
    return _append(file, directory + bytes(8))


def _tag(number: int, letter: str, *values: int) -> tuple[int, int, int, bytes]:
    """Return number, type, count and data of a tag."""
    data = struct.pack(f"<{len(values)}{letter}", *values)
    return number, _KINDS[letter], len(values), data


def _append(file: BinaryIO, data: bytes) -> int:
    """Write data at the next even offset, as TIFF requires, and return the offset."""
    if file.tell() % 2:
        file.write(b"\0")
    start = file.tell()
    file.write(data)
    return start
