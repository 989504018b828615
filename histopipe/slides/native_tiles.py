"""Native JPEG tiles of a level: their positions in the file, and reading them as plain JPEG files or as pixels.

Native tiles bypass OpenSlide, which remains the reference: `check` compares both, and tiles that differ are not used.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from histopipe.errors import SlideUnreadable, reported_as, strerror
from histopipe.geometry import RegionLevel, Size
from histopipe.slides.slide import overlaps
from histopipe.system.files import Closing

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
            sampling = tuple((n >> 4, n & 15) for n in body[7 : 6 + 3 * body[5] : 3])
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


_DECODED_BYTES = 48 << 20
"""Bytes of decoded tiles that are cached for the patches that share them."""
_JPEG_2000_HEADER = 4096
_LARGEST_TILE, _LONGEST_TILE = 1 << 26, 1 << 28
"""Most pixels and bytes of a tile. A damaged header may claim more, which must not be read into memory."""

_COLOURS: dict[Colour, str] = {"rgb": "RGB", "ycbcr": "YCbCr", "grey": "grey"}
_SAMPLED_FRAMES = 9
"""Number of tiles whose frames are compared. A few tiles of a level may have another one."""


class NotNative(ValueError):
    """Tiles of a level cannot be used directly; the text is the reason.

    `native` has the tiles if they were located: which of them are missing, and a conflict about their colours.
    """

    def __init__(self, reason: str, native: NativeLevel | None = None) -> None:
        super().__init__(reason)
        self.native = native


@dataclass(frozen=True, slots=True, eq=False)
class NativeLevel:
    """The tiles of one level, row by row from the top left.

    `x_level` and `y_level` are the corner of the first tile. `size` is that of the image that the tiles form; tiles at
    the right and lower edge extend beyond it. `colour` is from the slide's header. `tables` are JPEG tables that all
    tiles share; empty if each contains its tables. `offsets` and `lengths` are (rows, columns) int64 bytes in the file;
    the length is 0 for a tile that was never written. `frame` is the JPEG frame of most tiles; OpenSlide reads the others.
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
    frame: JpegFrame | None = None
    conflict: str | None = None
    """Note that markers of the tiles declare other colours than the header, which OpenSlide follows."""

    def tile_at(
        self, x: NDArray[np.int64], y: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows and columns of the tiles that contain pixels of the level; `x` and `y` are arrays of any shape."""
        return (y - self.y_level) // self.tile.height, (x - self.x_level) // self.tile.width

    def region(self, row: int, column: int) -> RegionLevel:
        """Return the region of the level that a tile covers."""
        x, y = column * self.tile.width, row * self.tile.height
        width = min(self.tile.width, self.size.width - x)
        height = min(self.tile.height, self.size.height - y)
        return RegionLevel(self.x_level + x, self.y_level + y, Size(width, height))


class NativeTiles(Closing):
    """Reads the native tiles of a level, as plain JPEG files or as pixels. Tiles with another frame are refused.

    `comparison` is a text on how they compare with OpenSlide's pixels.

    Raises:
        SlideUnreadable: the file cannot be opened.
    """

    comparison = "not compared"

    def __init__(self, native: NativeLevel) -> None:
        self.native = native
        kept = (native.tables[s:e] for marker, s, e in _segments(native.tables) if marker in _KEPT)
        self._begin = SOI + _ADOBE.get(native.colour, b"") + b"".join(kept)
        # Most tiles of an image begin with the same bytes, which are parsed only once: 2 µs for a copied tile instead of 13.
        self._parsed: tuple[bytes, bytes] | None = None
        self._decoded: dict[int, Callable[[int, int], NDArray[np.uint8] | None]] = {}
        with reported_as(
            SlideUnreadable, f"{native.path} cannot be read", OSError, reason=strerror
        ):
            self._file = os.open(native.path, os.O_RDONLY | os.O_CLOEXEC)
        # It closes the file once: when this object is closed or collected, or when the interpreter ends.
        self._close_file = weakref.finalize(self, os.close, self._file)

    def jpeg(self, row: int, column: int) -> bytes | None:
        """Return a tile as a plain JPEG file with its original compressed data.

        None if it was never written, or has another frame than the other tiles: only OpenSlide can read it.

        Raises:
            SlideUnreadable: the tile is damaged.
        """
        length = int(self.native.lengths[row, column])
        if length == 0:
            return None
        try:
            data = os.pread(self._file, length, int(self.native.offsets[row, column]))
            if len(data) == length:
                return self.plain(data)
        except OtherFrame:
            return None
        except (NotPlain, OSError) as error:
            raise self.unreadable(row, column, str(error)) from error
        raise self.unreadable(row, column, f"{len(data)} of {length} bytes: the file is truncated")

    def jpegs(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> Iterator[bytes | SlideUnreadable | None]:
        """Yield tiles like `jpeg`, with the error in place of a damaged tile; `rows` and `columns` are (N,)."""
        for place in zip(rows.tolist(), columns.tolist(), strict=True):
            try:
                yield self.jpeg(*place)
            except SlideUnreadable as error:
                yield error

    def plain(self, tile: bytes) -> bytes:
        """Return a tile as a JPEG file; its compressed data is unchanged.

        Raises:
            OtherFrame: the tile has another frame than the other tiles.
            NotPlain: the tile is truncated, or not a JPEG.
        """
        end = _end(tile)
        if self._parsed is None or not tile.startswith(self._parsed[0]):
            self._parsed = self._header(tile)
        raw, header = self._parsed
        return b"".join((header, memoryview(tile)[len(raw) : end]))

    def _header(self, tile: bytes) -> tuple[bytes, bytes]:
        """Return the bytes of a tile before the compressed data, and the bytes that replace them."""
        if tile[:2] != SOI:
            raise NotPlain(
                f"{tile[:2].hex(' ') or 'no bytes'} at its start, not the JPEG start marker"
            )
        segments = list(_segments(tile))
        kept = (tile[start:stop] for marker, start, stop in segments if marker in _KEPT)
        header = self._begin + b"".join(kept)
        frame = frame_of(header)
        if self.native.frame is not None and frame != self.native.frame:
            raise OtherFrame(f"{frame}, the other tiles are {self.native.frame}")
        markers = {marker for marker, _, _ in _segments(header)}
        for marker, name in ((_DQT, "quantisation"), (_DHT, "Huffman")):
            if marker not in markers:
                raise NotPlain(f"no {name} tables, neither in the tile nor shared")
        return tile[: max((stop for _, _, stop in segments), default=0)], header

    def pixels(self, region: RegionLevel, reduction: int = 1) -> NDArray[np.uint8] | None:
        """Return a region of the image as a new (H / reduction, W / reduction, 3) uint8 RGB array.

        `reduction` is 1, 2, 4 or 8, and must divide the tiles and the region; tiles are decoded by scaled DCT. Return
        None if only OpenSlide can read part of the region.

        Raises:
            SlideUnreadable: a tile in the region is damaged.
        """
        if reduction not in self._decoded:
            # Only one scale is cached. The weak reference avoids a reference cycle of this object and its cache.
            count = _DECODED_BYTES * reduction**2 // (self.native.tile.area * 3)
            decode = functools.partial(_decode, weakref.proxy(self), reduction)
            self._decoded = {reduction: functools.lru_cache(maxsize=max(4, count))(decode)}
        decoded = self._decoded[reduction]
        left, top, width, height = (
            side // reduction
            for side in (
                region.x - self.native.x_level,
                region.y - self.native.y_level,
                region.size.width,
                region.size.height,
            )
        )
        tile = Size(self.native.tile.width // reduction, self.native.tile.height // reduction)
        out = np.empty((height, width, 3), np.uint8)
        for row, column, place, part in overlaps(left, top, Size(width, height), tile):
            pixels = decoded(row, column)
            if pixels is None:
                return None
            out[place] = pixels[part]
        return out

    def close(self) -> None:
        """Close the file and free the decoded tiles."""
        self._close_file()
        self._decoded, self._file = {}, -1

    def unreadable(self, row: int, column: int, why: str) -> SlideUnreadable:
        """Return the error for a tile."""
        return SlideUnreadable(
            f"{self.native.path}: the tile in row {row}, column {column} of the {self.native.size} image cannot be read",
            found=why,
        )


def _decode(tiles: NativeTiles, reduction: int, row: int, column: int) -> NDArray[np.uint8] | None:
    data = tiles.jpeg(row, column)
    if data is None:
        return None
    tile = tiles.native.tile
    try:
        # simplejpeg decodes at a reduced scale only if the size is given.
        height, width = tile.height // reduction, tile.width // reduction
        return np.asarray(
            simplejpeg.decode_jpeg(
                data, colorspace="RGB", min_height=height, min_width=width, min_factor=reduction
            )
        )
    except ValueError as error:
        raise tiles.unreadable(row, column, str(error)) from error


def with_frame(native: NativeLevel) -> NativeLevel:
    """Return the level with the most frequent frame of some of its longer tiles.

    The slide's header is not reliable: that of CMU-1-Small-Region has 4:2:0, but its tiles are 4:4:4.

    Raises:
        NotNative: these tiles cannot be used.
    """
    length = int(native.lengths.max())
    if native.tile.area > _LARGEST_TILE or length > _LONGEST_TILE:
        raise NotNative(f"its tiles are too large: {native.tile} pixels, up to {length} bytes")
    longer = np.argsort(-native.lengths, axis=None, kind="stable")
    longer = longer[: max(1, np.count_nonzero(native.lengths) // 2)]
    frames, colours, problems = Counter[JpegFrame](), Counter[Colour](), list[str]()
    with NativeTiles(native) as tiles:
        for number in np.unique(np.linspace(0, len(longer) - 1, _SAMPLED_FRAMES).astype(int)):
            place = int(longer[number])
            length, offset = int(native.lengths.flat[place]), int(native.offsets.flat[place])
            try:
                frames[frame_of(tiles.jpeg(*divmod(place, native.lengths.shape[1])) or b"")] += 1
                colour = declared_colour(os.pread(tiles._file, length, offset))
                colours[colour or native.colour] += 1
            except (NotPlain, SlideUnreadable) as error:
                problems.append(f"its longest tile: {error}")
    if not frames:
        raise NotNative(problems[0])
    frame = frames.most_common(1)[0][0]
    if frame.size != native.tile or frame.bits != 8 or len(frame.sampling) not in (1, 3):
        raise NotNative(
            f"its tiles are {frame}, expected {native.tile} of 8 bits with 1 or 3 components"
        )
    declared = [_COLOURS[colour] for colour in colours if colour != native.colour]
    conflict = (
        f"its header declares {_COLOURS[native.colour]} pixels, but {colours.total() - colours[native.colour]} of "
        f"{colours.total()} of its tiles declare {' or '.join(declared)}: their colours may be wrong"
    )
    return replace(native, frame=frame, conflict=conflict if declared else None)


def with_transform(native: NativeLevel, header: str, transformed: bool | None) -> NativeLevel:
    """Return the level with the conflict that its JPEG 2000 tiles have, if the header declares something else.

    `transformed` is whether the header declares a component transform; None if it declares nothing.
    """
    with native.path.open("rb") as file:
        file.seek(int(native.offsets.flat[native.lengths.argmax()]))
        present = has_component_transform(file.read(_JPEG_2000_HEADER))
    if None in (present, transformed) or present == transformed:
        return native
    conflict = (
        f"its header declares {header}, but its JPEG 2000 tiles have {'a' if present else 'no'} component transform: "
        "its colours may be wrong"
    )
    return replace(native, conflict=conflict)


def reduction_of(native: NativeLevel, factor: int) -> int:
    """Return the largest of the reductions 8, 4, 2 and 1 that divides a factor and the tile size."""
    return math.gcd(8, factor, native.tile.width, native.tile.height)
