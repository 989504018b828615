"""Convert native tiles to plain JPEG files without decoding them.

A tile in a slide is rarely a complete file. Its tables may be stored once for all tiles, and its colour space, RGB or
YCbCr, may only be recorded in the slide's header.

Source:
    ITU-T T.81 (markers and segments); ITU-T T.872 (the Adobe segment with the colour transform).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from histopipe.geometry import Size

Colour = Literal["rgb", "ycbcr", "grey"]

SOI, EOI = b"\xff\xd8", b"\xff\xd9"

_SOS, _SOF, _DHT, _DQT, _DRI = 0xDA, (0xC0, 0xC1, 0xC2), 0xC4, 0xDB, 0xDD
_APP0, _APP14 = 0xE0, 0xEE
_KEPT = {_SOS, _DHT, _DQT, _DRI, *_SOF}
"""Segments that decoding needs. Comments and application segments (JFIF, Exif, profiles, Adobe) are left out: they may
contradict the slide's header, and may contain private data."""

_ADOBE = {
    colour: b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform])
    for colour, transform in (("rgb", 0), ("ycbcr", 1))
}
_LONGEST_PADDING = 16
"""Most bytes after the end marker: DICOM pads to even lengths, some TIFF writers to words."""


class NotPlain(ValueError):
    """A tile cannot be converted to a JPEG file; the text is what was found."""


class OtherFrame(NotPlain):
    """A tile has another frame than the other tiles of its level, or one that few decoders support."""


@dataclass(frozen=True, slots=True)
class JpegFrame:
    """Size, sampling and bits per sample in a JPEG header.

    `sampling` contains the horizontal and vertical factor of each component: `((2, 2), (1, 1), (1, 1))` for 4:2:0.
    """

    size: Size
    sampling: tuple[tuple[int, int], ...]
    bits: int

    def __str__(self) -> str:
        factors = ", ".join(f"{h}×{v}" for h, v in self.sampling)
        return f"{self.size} of {self.bits} bits, sampling {factors}"


class TileFormat:
    """Converts the tiles of an image to plain JPEG files.

    `tables` are those that all tiles share, as in TIFF's `JPEGTables`; empty if each tile contains its tables. `colour`
    is from the slide's header. If `frame` is given, tiles with another frame are refused.
    """

    def __init__(self, tables: bytes, colour: Colour, frame: JpegFrame | None = None) -> None:
        kept = (tables[s:e] for marker, s, e in _segments(tables) if marker in _KEPT)
        self._begin = SOI + _ADOBE.get(colour, b"") + b"".join(kept)
        self._frame = frame
        # Most tiles of an image begin with the same bytes, so these are parsed only once.
        self._known: tuple[bytes, bytes] | None = None

    def plain(self, tile: bytes) -> bytes:
        """Return a tile as a JPEG file; its compressed data is unchanged.

        Raises:
            OtherFrame: the tile has another frame than `frame`.
            NotPlain: the tile is truncated, or not a JPEG.
        """
        end = _end(tile)
        if self._known is None or not tile.startswith(self._known[0]):
            self._known = self._header(tile)
        raw, header = self._known
        return b"".join((header, memoryview(tile)[len(raw) : end]))

    def _header(self, tile: bytes) -> tuple[bytes, bytes]:
        """Return the bytes of a tile before the compressed data, and the bytes that replace them."""
        if tile[:2] != SOI:
            raise NotPlain(
                f"{tile[:2].hex(' ') or 'no bytes'} at its start, not the JPEG start marker"
            )
        kept, stop = [], 0
        for marker, start, stop in _segments(tile):
            if marker in _KEPT:
                kept.append(tile[start:stop])
        header = self._begin + b"".join(kept)
        frame = frame_of(header)
        if self._frame is not None and frame != self._frame:
            raise OtherFrame(f"{frame}, the other tiles are {self._frame}")
        markers = {marker for marker, _, _ in _segments(header)}
        for marker, name in ((_DQT, "quantisation"), (_DHT, "Huffman")):
            if marker not in markers:
                raise NotPlain(f"no {name} tables, neither in the tile nor shared")
        return tile[:stop], header


def frame_of(jpeg: bytes) -> JpegFrame:
    """Return the frame of a JPEG header.

    Raises:
        OtherFrame: there is no frame, or it has a type that few decoders support.
        NotPlain: the header is damaged.
    """
    for marker, start, stop in _segments(jpeg):
        if marker in _SOF:
            body = jpeg[start + 4 : stop]
            height, width = int.from_bytes(body[1:3]), int.from_bytes(body[3:5])
            factors = body[7 : 6 + 3 * body[5] : 3]
            sampling = tuple((factor >> 4, factor & 15) for factor in factors)
            return JpegFrame(Size(width, height), sampling, body[0])
    raise OtherFrame("no baseline or progressive frame")


def declared_colour(jpeg: bytes) -> Colour | None:
    """Return the colour space of three components that the markers of a JPEG header declare; None if they do not.

    Unlike in libjpeg, the Adobe segment and the components' names come before JFIF, which some writers add to RGB.
    """
    declared: Colour | None = None
    with suppress(NotPlain):
        for marker, start, stop in _segments(jpeg):
            body = jpeg[start + 4 : stop]
            if marker == _APP14 and body.startswith(b"Adobe"):
                return "ycbcr" if body[11:12] == b"\x01" else "rgb"
            if marker == _APP0 and body.startswith(b"JFIF"):
                declared = "ycbcr"
            if marker in _SOF:
                names, factors = body[6:15:3], body[7:15:3]
                if len(names) != 3 or names == b"RGB":
                    return "rgb" if names == b"RGB" else None
                # Only the chroma of YCbCr is subsampled.
                return "ycbcr" if len(set(factors)) > 1 else declared
    return None


def has_component_transform(stream: bytes) -> bool | None:
    """Return whether a JPEG 2000 code stream stores transformed RGB; None if its header cannot be read.

    Source:
        ITU-T T.800, A.6.1 (the COD segment).
    """
    place = 2
    while stream[:2] == b"\xff\x4f" and stream[place : place + 1] == b"\xff":
        if stream[place + 1 : place + 2] == b"\x52" and place + 9 <= len(stream):
            return stream[place + 8] == 1
        place += 2 + int.from_bytes(stream[place + 2 : place + 4])
    return None


def _segments(jpeg: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of each segment before the compressed data.

    Raises:
        NotPlain: the header is truncated, or a marker is missing.
    """
    place = 2
    while place + 4 <= len(jpeg):
        if jpeg[place] != 0xFF:
            raise NotPlain(f"{jpeg[place]:02x} where a marker should be, at byte {place}")
        if jpeg[place + 1] == 0xFF:
            place += 1  # fill bytes may precede a marker
            continue
        start, marker = place, jpeg[place + 1]
        if marker == EOI[1]:
            return
        place += 2 + int.from_bytes(jpeg[place + 2 : place + 4])
        if place > len(jpeg):
            raise NotPlain("a truncated header")
        yield marker, start, place
        if marker == _SOS:
            return


def _end(tile: bytes) -> int:
    """Return the position after the end marker."""
    if tile.endswith(EOI):
        return len(tile)
    place = tile.rfind(EOI, max(0, len(tile) - _LONGEST_PADDING))
    if place < 0 or tile[place + 2 :].strip(b"\0\xff"):
        raise NotPlain("no end marker: it is truncated")
    return place + 2
