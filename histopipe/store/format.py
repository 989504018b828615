"""Store format, version 1: names, keys, checksums and the columnar index block.

Pure functions on bytes. `docs/reference/store-format.md` describes the format.
"""

from __future__ import annotations

import json
import operator
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore

FORMAT_NAME = "histopipe-store"
VERSION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()
"""Features that `meta.required_features` may contain: none yet. A store with another one is refused."""

SLIDE_KEY_BYTES = 4
"""Bytes of the slide number at the start of a key."""
MAX_SLIDE_NUMBER = (1 << 24) - 1
MAX_JSON = 1 << 20
"""Maximum bytes of a JSON value. Records have a few thousand."""

DATABASES = (b"meta", b"slides", b"patches", b"index", b"thumbnails", b"stains")
META, SLIDES, PATCHES, INDEX, THUMBNAILS, STAINS = DATABASES

META_NAMES = frozenset(
    {b"format", b"required_features", b"uuid", b"created"}
    | {b"histopipe_version", b"spec", b"classes", b"next_number"}
)
"""Keys of `meta`."""

Columns = dict[str, NDArray[Any]]
"""Columns of an index block by name, (N,) each, with one row per patch."""
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
"""Columns of an index block with their little-endian types, in the order of writing."""

STAIN_COLUMNS = ("stained", "haematoxylin", "eosin", "dab", "positive")
"""Columns of stains: share of stained pixels, mean densities over these, and share of them that are positive."""
STAIN_TABLE = "stains.csv"
"""Table in a store, with a row for each slide."""
_MEASURED = ("covered", "pen", "dark", *STAIN_COLUMNS)
_KNOWN_COLUMNS = {**INDEX_COLUMNS, **dict.fromkeys(_MEASURED, "<f4")}
"""`INDEX_COLUMNS`, and columns that a block gets when they are measured."""
_PLAIN_TYPE = re.compile(r"[<|][biufS]\d{1,4}")
_SEAL = b',"crc":'
_NEARLY_SEAL = re.compile(rb',"(?:.rc|c.c|cr.)":(?=\d+\}$)')
_ALIGNMENT = 8
_PAGE, _PAGE_HEADER = 4096, 16
_PAGE_SHARE = 64
"""Bytes of the key and the page number of a value, and its share of the pages above it in the tree."""
_HEADER_LENGTH = struct.Struct("<Q")
_PATCH_KEY = struct.Struct(">II")


def slide_key(number: int) -> bytes:
    """Return the number of a slide as 4 bytes, big-endian, so that LMDB sorts by number."""
    return number.to_bytes(SLIDE_KEY_BYTES, "big")


def slide_number(key: bytes) -> int:
    """Return the slide number at the start of a key."""
    return int.from_bytes(key[:SLIDE_KEY_BYTES], "big")


def patch_key(slide: int, patch: int) -> bytes:
    """Return the numbers of a slide and a patch, each as 4 bytes, big-endian."""
    return _PATCH_KEY.pack(slide, patch)


def thumbnail_key(slide: int, kind: str) -> bytes:
    """Return the number of a slide as 4 bytes, then `thumb` or `mask`."""
    return slide_key(slide) + kind.encode()


def value_crc(key: bytes, value: bytes | memoryview) -> int:
    """Return the CRC-32 of key and value, which also detects swapped values."""
    return zlib.crc32(value, zlib.crc32(key))


def stored_size(lengths: NDArray[Any] | float) -> NDArray[np.int64]:
    """Return the bytes that values of these lengths occupy in data.mdb: whole pages, with headers and keys."""
    return np.asarray(-(-(lengths + _PAGE_HEADER) // _PAGE) * _PAGE + _PAGE_SHARE, np.int64)


def to_json(value: Any) -> bytes:
    """Return a value as stored JSON: UTF-8, compact, keys not sorted, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def from_json(data: bytes | memoryview, *, where: str) -> Any:
    """Parse stored JSON; DamagedStore if it is not JSON. `where` names its place in the message."""
    if len(data) > MAX_JSON:
        raise DamagedStore(where, found=f"{len(data)} bytes", expected=f"at most {MAX_JSON}")
    try:
        value = json.loads(bytes(data))
        if any(word in bytes(data) for word in (b"\\u", b"NaN", b"Infinity")):
            to_json(value)  # lone surrogates and numbers that are none could not be written again
    except (ValueError, RecursionError) as error:
        raise DamagedStore(f"{where} is not JSON", found=bytes(data[:60])) from error
    return value


def seal(key: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object whose last field `crc` is the CRC-32 of its key and of the object without that field."""
    body = to_json({name: value for name, value in fields.items() if name != "crc"})
    return body[:-1] + _SEAL + b"%d}" % value_crc(key, body)


def unseal(key: bytes, data: bytes | memoryview, *, where: str) -> dict[str, Any]:
    """Return a sealed object without its `crc`. Objects of earlier versions may have none.

    Raises:
        DamagedStore: it is not a JSON object, or does not match its checksum.
    """
    value = from_json(data, where=where)
    if not isinstance(value, dict):
        raise DamagedStore(where, found=type(value).__name__, expected="a JSON object")
    body, mark, _ = bytes(data).rpartition(_SEAL)
    if not mark and _NEARLY_SEAL.search(bytes(data)):
        raise DamagedStore(f"{where} does not match its checksum", found="a damaged checksum")
    crc = value.pop("crc", None)
    if mark and crc is not None and crc != value_crc(key, body + b"}"):
        raise DamagedStore(f"{where} does not match its checksum", found=f"CRC-32 {crc}")
    return value


def corrected(key: bytes, data: bytes) -> bytes | None:
    """Correct one wrong byte of a sealed object with its CRC-32; None if more bytes before the checksum are wrong."""
    body, mark, digits = _NEARLY_SEAL.sub(_SEAL, data).rpartition(_SEAL)
    if not mark:
        return None
    body += b"}"
    right = b"%d}" % value_crc(key, body)
    if len(right) == len(digits) and sum(map(operator.ne, right, digits)) <= 1:
        return body[:-1] + mark + right
    if not digits[:-1].isdigit():
        return None
    difference = value_crc(key, body) ^ int(digits[:-1])
    table = np.array([zlib.crc32(bytes([b])) ^ zlib.crc32(b"\0") for b in range(256)], np.int64)
    effect = table  # of each change of the last byte on the checksum; then of the bytes before it
    for position in reversed(range(len(body))):
        change = np.flatnonzero(effect == difference)
        if len(change):
            repaired = bytearray(body)
            repaired[position] ^= int(change[0])
            return bytes(repaired[:-1]) + mark + b"%d}" % value_crc(key, bytes(repaired))
        effect = table[effect & 0xFF] ^ (effect >> 8)
    return None


def encode_index(key: bytes, columns: Mapping[str, NDArray[Any]]) -> bytes:
    """Return a columnar block of arrays (N,): header length, JSON header, then each column at a multiple of 8 bytes.

    The checksum includes the key. Columns with unknown names keep their types.
    """
    # The header contains offsets, which depend on its length. So its size is fixed per column.
    header_size = _aligned(_HEADER_LENGTH.size + 96 * len(columns) + 64)
    block, described = bytearray(header_size), []
    for name, values in columns.items():
        dtype = np.dtype(_KNOWN_COLUMNS.get(name) or values.dtype.newbyteorder("<"))
        described.append(
            {"name": name, "dtype": dtype.str, "offset": len(block), "count": len(values)}
        )
        block += values.astype(dtype, copy=False).tobytes()
        block += bytes(_aligned(len(block)) - len(block))
    crc = _index_crc(key, described, memoryview(block)[header_size:])
    header = to_json({"columns": described, "crc": crc}).ljust(header_size - _HEADER_LENGTH.size)
    block[:header_size] = _HEADER_LENGTH.pack(len(header)) + header
    return bytes(block)


def decode_index(key: bytes, block: bytes | memoryview, *, where: str) -> Columns:
    """Return all columns of a block, as views of it; DamagedStore if it is damaged."""
    block = memoryview(block)
    try:
        (header_length,) = _HEADER_LENGTH.unpack_from(block)
        if header_length > MAX_JSON:
            raise ValueError(f"a header of {header_length} bytes")  # noqa: TRY301 - one handler for all faults
        end = _HEADER_LENGTH.size + header_length
        header = json.loads(bytes(block[_HEADER_LENGTH.size : end]))
        crc = header.get("crc")
        if crc is not None and crc != _index_crc(key, header["columns"], block[end:]):
            raise ValueError(f"CRC-32 {crc} does not match")  # noqa: TRY301
        columns = {str(c["name"]): _column(block, c) for c in header["columns"]}
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedStore(f"{where}: the index block is damaged", found=str(error)) from error
    counts = {len(column) for column in columns.values()}
    if not columns.keys() >= INDEX_COLUMNS.keys() or len(counts) != 1:
        raise DamagedStore(
            f"{where}: the index block is damaged",
            found=f"columns {', '.join(columns) or 'none'} of lengths {sorted(counts)}",
            expected="one length, and at least the columns " + ", ".join(INDEX_COLUMNS),
        )
    return columns


def _column(block: memoryview, column: Mapping[str, Any]) -> NDArray[Any]:
    name, dtype = str(column["name"]), str(column["dtype"])
    if dtype != _KNOWN_COLUMNS.get(name, dtype) or not _PLAIN_TYPE.fullmatch(dtype):
        raise ValueError(f"column {name[:40]!r} of type {dtype[:40]!r}")
    count = int(column["count"])
    if count == 0:  # numpy cannot read an empty column at the end of a block
        return np.empty(0, dtype)
    if count < 0:
        raise ValueError(f"column {name[:40]!r} of length {count}")
    return np.frombuffer(block, dtype, count, int(column["offset"]))


def _index_crc(key: bytes, described: Any, columns: memoryview) -> int:
    """Return the CRC-32 of a block's key, its column descriptions and its columns."""
    return zlib.crc32(columns, zlib.crc32(to_json(described), zlib.crc32(key)))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
