"""Store format, version 1: names, keys, checksums and the columnar index block.

Pure functions on bytes. `docs/store-format.md` says the same in words.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore

FORMAT_NAME = "histopipe-store"
VERSION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()
"""Names that may stand in `meta.required_features`: none yet. Any other refuses the store."""

MAX_SLIDE_NUMBER = (1 << 24) - 1

META, SLIDES, PATCHES, INDEX, THUMBNAILS, STAINS = DATABASES = (
    b"meta",
    b"slides",
    b"patches",
    b"index",
    b"thumbnails",
    b"stains",
)

INDEX_COLUMNS: Mapping[str, str] = {
    "x_l0": "<i4",
    "y_l0": "<i4",
    "x_level": "<i4",
    "y_level": "<i4",
    "tissue": "<f4",
    "focus": "<f4",
    "length": "<u4",
    "crc": "<u4",
    "label": "<i4",
}
"""Columns of an index block with their little-endian types, in the order written."""

FURTHER_COLUMNS: Mapping[str, str] = {"covered": "<f4", "pen": "<f4", "dark": "<f4"}
"""Columns that a block may have, as what they hold is measured."""

_KNOWN_COLUMNS = {**INDEX_COLUMNS, **FURTHER_COLUMNS}
_ALIGNMENT = 8
_PAGE, _PAGE_HEADER = 4096, 16
_PAGE_SHARE = 64
"""A value's key, its place, and its part of the pages above it in the tree."""
_HEADER_LENGTH = struct.Struct("<Q")
_PATCH_KEY = struct.Struct(">II")
_SLIDE_KEY = struct.Struct(">I")


def slide_key(number: int) -> bytes:
    """4-byte big-endian slide number, so that LMDB's order is the numbers' order."""
    return _SLIDE_KEY.pack(number)


def slide_number(key: bytes) -> int:
    """The number of a key that `slide_key` made."""
    return cast(int, _SLIDE_KEY.unpack(key)[0])


def patch_key(slide: int, patch: int) -> bytes:
    """4-byte slide number, 4-byte patch number, both big-endian."""
    return _PATCH_KEY.pack(slide, patch)


def thumbnail_key(slide: int, kind: str) -> bytes:
    """4-byte slide number, then `thumb` or `mask`."""
    return slide_key(slide) + kind.encode()


def value_crc(key: bytes, value: bytes | memoryview) -> int:
    """CRC-32 over key and value, so that two swapped values are found."""
    return zlib.crc32(value, zlib.crc32(key))


def stored_size(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Bytes that values of these lengths take in LMDB's file: whole pages, with their headers and keys."""
    return np.asarray(-(-(lengths + _PAGE_HEADER) // _PAGE) * _PAGE + _PAGE_SHARE, np.int64)


def to_json(value: Any) -> bytes:
    """JSON as it is stored: UTF-8, compact, keys as given, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def from_json(data: bytes | memoryview, *, where: str) -> Any:
    """The value, or DamagedStore naming where it stood."""
    try:
        return json.loads(bytes(data))
    except ValueError as error:
        raise DamagedStore(f"{where} is not JSON", found=bytes(data[:60])) from error


def encode_index(columns: Mapping[str, NDArray[Any]]) -> bytes:
    """A columnar block: header length, JSON header, then each column at a multiple of 8.

    Args:
        columns: (N,) arrays of one length, by name. Names not known here keep their own type.
    """
    arrays = {
        name: np.ascontiguousarray(
            values, _KNOWN_COLUMNS.get(name) or values.dtype.newbyteorder("<")
        )
        for name, values in columns.items()
    }
    # An offset's digits are in the header, and the header's length decides the offsets: one size for all ends the circle.
    header_size = _aligned(_HEADER_LENGTH.size + 96 * len(arrays) + 64)
    offset, described = header_size, []
    for name, array in arrays.items():
        described.append(
            {"name": name, "dtype": array.dtype.str, "offset": offset, "count": len(array)}
        )
        offset = _aligned(offset + array.nbytes)
    header = to_json({"columns": described}).ljust(header_size - _HEADER_LENGTH.size)
    block = bytearray(offset)
    block[:header_size] = _HEADER_LENGTH.pack(len(header)) + header
    for place, array in zip(described, arrays.values(), strict=True):
        start = cast(int, place["offset"])
        block[start : start + array.nbytes] = array.tobytes()
    return bytes(block)


def decode_index(block: bytes | memoryview, *, where: str) -> dict[str, NDArray[Any]]:
    """The columns of a block, views into it, unknown ones too.

    Raises:
        DamagedStore: the block does not hold what its header says.
    """
    try:
        (header_length,) = _HEADER_LENGTH.unpack_from(block)
        header = json.loads(bytes(block[_HEADER_LENGTH.size :][:header_length]))
        columns = {
            str(c["name"]): np.frombuffer(block, c["dtype"], int(c["count"]), int(c["offset"]))
            for c in header["columns"]
        }
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(f"{where}: the index block is damaged", found=str(error)) from error
    counts = {len(column) for column in columns.values()}
    missing = [name for name in INDEX_COLUMNS if name not in columns]
    if missing or len(counts) != 1:
        raise DamagedStore(
            f"{where}: the index block is damaged",
            found=f"columns {', '.join(columns) or 'none'} of lengths {sorted(counts)}",
            expected="one length, and among them " + ", ".join(INDEX_COLUMNS),
        )
    return columns


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
