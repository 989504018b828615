"""Write pyramidal TIFF files of compressed JPEG tiles, with one tile in memory at a time.

tifffile would need imagecodecs for that, although the tiles are already compressed. The tags are those of TIFF 6.0 and of
BigTIFF, which has 64-bit offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from histopipe.geometry import Size
from histopipe.system.files import appearing

JpegTiles = Iterable[bytes]

_SHORT, _LONG, _RATIONAL, _LONG8, _ASCII, _BYTES = 3, 4, 5, 16, 2, 7
_FORMATS = {_SHORT: "H", _LONG: "I", _LONG8: "Q"}
_PHOTOMETRIC = {"grey": 1, "rgb": 2, "ycbcr": 6}


@dataclass(frozen=True)
class TiffPage:
    """An image of the pyramid, with sizes of the image and of a tile.

    Attributes:
        tiles: JPEG files row by row; an empty one is a tile that was never written.
        subsampling, colour: for the header, such as "420", and `ycbcr`, `rgb` or `grey`.
        tables: JPEG tables that the tiles leave out.
        compression: TIFF's number; 7 is JPEG.
    """

    size: Size
    tile: Size
    tiles: JpegTiles
    subsampling: str
    description: str | None
    mpp: float
    colour: str = "ycbcr"
    tables: bytes = b""
    compression: int = 7


def write_pyramid(path: Path, pages: Iterable[TiffPage]) -> None:
    """Write the pages in order, as BigTIFF, by one rename."""
    with appearing(path, hidden=True) as part, part.open("wb") as file:
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        link = 8  # where the offset of the next directory is to be written
        for page in pages:
            link = _write_page(file, page, link)


def _write_page(file: BinaryIO, page: TiffPage, link: int) -> int:
    offsets, counts = [], []
    for tile in page.tiles:
        offsets.append(file.tell() if tile else 0)
        counts.append(len(tile))
        file.write(tile)
    factors = {"444": [1, 1], "422": [2, 1], "420": [2, 2], "440": [1, 2]}[page.subsampling]
    samples = 1 if page.colour == "grey" else 3
    per_centimetre = round(1e8 / page.mpp), 10_000
    tags: list[tuple[int, int, list[int] | bytes]] = [
        (254, _LONG, [0]),
        (256, _LONG, [page.size.width]),
        (257, _LONG, [page.size.height]),
        (258, _SHORT, [8] * samples),
        (259, _SHORT, [page.compression]),
        (262, _SHORT, [_PHOTOMETRIC[page.colour]]),
        (277, _SHORT, [samples]),
        (282, _RATIONAL, struct.pack("<II", *per_centimetre)),
        (283, _RATIONAL, struct.pack("<II", *per_centimetre)),
        (284, _SHORT, [1]),
        (296, _SHORT, [3]),
        (322, _SHORT, [page.tile.width]),
        (323, _SHORT, [page.tile.height]),
        (324, _LONG8, offsets),
        (325, _LONG8, counts),
    ]
    if page.colour == "ycbcr":
        tags.append((530, _SHORT, factors))
    if page.tables:
        tags.append((347, _BYTES, page.tables))
    if page.description is not None:
        tags.append((270, _ASCII, page.description.encode() + b"\0"))
    return _write_directory(file, sorted(tags), link)


def _write_directory(
    file: BinaryIO, tags: list[tuple[int, int, list[int] | bytes]], link: int
) -> int:
    entries = []
    for tag, kind, values in tags:
        data = values
        if not isinstance(data, bytes):
            data = struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)
        count = len(data) // 8 if kind == _RATIONAL else len(values)
        if len(data) > 8:
            data = struct.pack("<Q", _append(file, data))
        entries.append(struct.pack("<HHQ", tag, kind, count) + data.ljust(8, b"\0"))
    start = _append(file, struct.pack("<Q", len(entries)) + b"".join(entries) + bytes(8))
    end = file.tell()
    file.seek(link)
    file.write(struct.pack("<Q", start))
    file.seek(end)
    return end - 8


def _append(file: BinaryIO, data: bytes) -> int:
    """Write at the next even offset, as TIFF requires, and return it."""
    if file.tell() % 2:
        file.write(b"\0")
    start = file.tell()
    file.write(data)
    return start
