"""Read patches in one transaction: their values, index columns and offsets in the file. Decode pictures."""

from __future__ import annotations

import ctypes
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion, UsageError
from histopipe.store.environment import Environment
from histopipe.store.format import (
    FORMAT_NAME,
    INDEX,
    KNOWN_FEATURES,
    META,
    PATCHES,
    SLIDE_KEY_BYTES,
    SLIDES,
    VERSION,
    Columns,
    decode_index,
    from_json,
    patch_key,
    slide_key,
    slide_number,
)
from histopipe.store.record import SlideRecord
from histopipe.system.output import shown
from histopipe.tiling.spec import MAX_PATCH_SIZE

LARGEST_SIDE = 1 << 14
"""Maximum width and height of a picture, pixels. Thumbnails have a few thousand, patches at most 8,192."""
JPEG_START = b"\xff\xd8"
_NODE_HEADER, _PAGE_HEADER = 8, 16
_NODE = ctypes.c_uint16 * 4
_BIG_DATA = 0x01
"""LMDB's flag for a value on separate pages."""


ColumnCache = dict[int, tuple[tuple[int, int], int, Columns]]
"""Columns of slides by number, as views of LMDB's map.

They are valid for one generation of the map, in transactions with one id: the first two numbers. The third is the CRC-32
of the CRCs of the slide's patches.
"""


class Reading:
    """A read transaction from `Store.reading`. Its views are not valid after its end."""

    def __init__(
        self,
        environment: Environment,
        transaction: lmdb.Transaction,
        records: dict[int, SlideRecord],
        columns: ColumnCache,
    ) -> None:
        self._environment, self._transaction = environment, transaction
        self._records, self._columns = records, columns
        self._patches = environment.databases[PATCHES]
        self._state = environment.generation, int(transaction.id())

    def value(self, slide: int, row: int) -> memoryview:
        """Return the file of a patch; empty if the patch was unreadable. Reads its pages from disk without the GIL.

        Raises:
            DamagedStore: the value is missing.
        """
        value = self._transaction.get(patch_key(slide, row), db=self._patches)
        if value is None:
            raise DamagedStore(f"{self.where(slide)}: patch {row} is missing")
        return memoryview(value)

    def column(self, slide: int, name: str) -> NDArray[Any]:
        """Return a column of a slide's index, (N,), as a view of LMDB's map, which needs no memory per patch.

        Views are cached until the store is written, since LMDB reads every page of a block at each lookup.

        Raises:
            DamagedStore: as `index`; or the slide was replaced after its columns were first read.
        """
        state, cached_crc, columns = self._columns.get(slide, (None, None, {}))
        if state != self._state:
            columns = self.index(slide, copied=False)
            patches_crc = zlib.crc32(columns["crc"].tobytes())
            if cached_crc not in (None, patches_crc):
                raise DamagedStore(
                    f"{self.where(slide)}: its patches were replaced after the store was opened",
                    todo="open the store again",
                )
            self._columns[slide] = self._state, patches_crc, columns
        return columns[name]

    def index(self, slide: int, *, copied: bool = True) -> Columns:
        """Return the columns of a slide's index by name, (N,) each: copies, or views of LMDB's map.

        Raises:
            DamagedStore: the block is missing or damaged, or its length differs from the record's.
        """
        where = self.where(slide)
        block = self._transaction.get(slide_key(slide), db=self._environment.databases[INDEX])
        if block is None:
            raise DamagedStore(f"{where}: its index is missing")
        columns = decode_index(slide_key(slide), bytes(block) if copied else block, where=where)
        rows, expected = len(columns["crc"]), self._records[slide].planned
        if rows != expected:
            raise DamagedStore(
                f"{where}: wrong number of index rows", found=rows, expected=expected
            )
        return columns

    def extents(self, keys: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Return the offsets of patch values in data.mdb without reading the values, for prefetching.

        LMDB maps the file without the kernel's read-ahead. Each page of a value is then a separate page fault: five for
        20 kB, one after another. `posix_fadvise` for the whole value is one read, but needs its offset, which LMDB's
        interface does not return. The alternative, 16 threads that read values in advance, is equally fast on a disk
        without a limit of reads. On a disk limited to 3,000 reads per second, it has 0.6 of the rate.

        Values that are stored on the pages of the keys are left out: the search for the key has read them.

        `keys` are slide and row of each patch, best in ascending order. Returns (N, 2) offset and length in bytes,
        ascending; adjacent ranges are joined.
        """
        ranges = sorted(self._page_ranges([patch_key(*key) for key in keys]))
        if not ranges:
            return np.zeros((0, 2), np.int64)
        page_size = int(self._transaction.stat(self._patches)["psize"])
        pages, lengths = np.array(ranges, np.int64).T
        first = pages * page_size
        end = first + -(-lengths // page_size) * page_size
        starts = np.flatnonzero(np.append(True, first[1:] > end[:-1]))
        return np.stack([first[starts], np.maximum.reduceat(end, starts) - first[starts]], axis=1)

    def _page_ranges(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Yield first page and length in bytes, with the page header, of each value on separate pages.

        Source:
            LMDB 0.9, mdb.c: the node of a value in a leaf page has 2 × 16 bits of size, 16 of flags, 16 of the key's
            length, the key, and then, if the flag F_BIGDATA is set, the number of the value's first page.
        """
        with self._transaction.cursor(db=self._patches) as cursor:
            for key in cursor.getmulti(keys, values=False):  # a view of the key in the mapped page
                address = np.frombuffer(key, np.uint8).__array_interface__["data"][0]
                low, high, flags, length = _NODE.from_address(address - _NODE_HEADER)
                if flags & _BIG_DATA and length == len(key):
                    page = ctypes.c_uint64.from_address(address + length)
                    yield page.value, (high << 16 | low) + _PAGE_HEADER

    def where(self, slide: int) -> str:
        """Return the store and id of a slide, for messages.

        Raises:
            UsageError: there is no slide with this number.
        """
        if slide not in self._records:
            raise UsageError(f"{self._environment.path} has no slide number {slide!r}")
        return f"{self._environment.path}, slide {self._records[slide].id}"


def decode_picture(
    value: bytes | memoryview,
    where: str,
    *,
    mode: str = "RGB",
    side: int | None = None,
    least: int = 0,
) -> NDArray[np.uint8]:
    """Decode a JPEG or PNG file to (H, W, 3) uint8, or (H, W) with mode L.

    `side` is the required width and height in pixels; by default, at most 16,384. With `least`, a JPEG may be decoded
    at a smaller scale, whose longer side has at least this many pixels. `where` is for messages.

    Raises:
        DamagedStore: it cannot be decoded, or has another size. A file of a few kB may declare gigapixels.
    """
    # Imported late: only decoding of single pictures needs it.
    from PIL import Image

    try:
        with Image.open(io.BytesIO(value), formats=("JPEG", "PNG")) as image:
            if max(image.size) > LARGEST_SIDE if side is None else image.size != (side, side):
                raise DamagedStore(  # noqa: TRY301 - before the picture is decoded
                    f"{where}: wrong size",
                    found=f"{image.size[0]} × {image.size[1]} pixels",
                    expected=f"{side} × {side}" if side else f"at most {LARGEST_SIDE}",
                )
            if least:
                image.draft(mode, (least, least))
            return np.asarray(image.convert(mode), np.uint8)
    except DamagedStore:
        raise
    # Pillow raises all of these for a damaged PNG.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DamagedStore(f"{where} cannot be decoded", found=str(error)[:200]) from error


T = TypeVar("T")
Stored = Callable[[bytes], bytes | memoryview | None]


def decode(value: memoryview, out: NDArray[np.uint8]) -> None:
    """Decode a JPEG or PNG file into (H, W, 3) uint8."""
    if value[:2] != JPEG_START:
        out[:] = decode_picture(value, "the image", side=len(out))
        return
    # Imported late, as above: many commands decode nothing.
    import simplejpeg

    try:
        # Not strict: a copied tile with damaged data then has the same pixels as OpenSlide decodes.
        size = simplejpeg.decode_jpeg(value, colorspace="RGB", buffer=out, strict=False).shape
    except ValueError as error:
        raise DamagedStore(
            "the image cannot be decoded", found=str(error), expected="an image of the patch size"
        ) from error
    if size != out.shape:
        raise DamagedStore("the image size", found=size, expected=out.shape)


def _is_number(value: object, *types: type) -> bool:
    return type(value) in types and 0 <= value <= MAX_PATCH_SIZE  # type: ignore[operator]


_READ_SETTINGS: Mapping[str, Callable[[object], bool]] = {
    "patch_size": lambda value: _is_number(value, int) and value != 0,
    "overlap": lambda value: _is_number(value, int),
    "mpp": lambda value: value is None or (_is_number(value, int, float) and value != 0),
    "level": lambda value: value is None or _is_number(value, int),
    "tissue": lambda value: isinstance(value, str),
    "tissue_threshold": lambda value: _is_number(value, int, float),
    "codec": lambda value: isinstance(value, str),
}
"""Settings of a spec that readers use, and the check of each value."""


def meta_entries(
    transaction: lmdb.Transaction, databases: Mapping[bytes, Any], path: Path
) -> Stored:
    """Check the format, and return a function that maps a key of `meta` to its value.

    Raises:
        NothingToDo: the LMDB environment is empty, or belongs to another program.
        UnknownVersion, DamagedStore: as `check_format`.
    """
    if databases.get(META) is None:
        raise NothingToDo(f"{path} is an LMDB environment, but not a histopipe store")
    if transaction.stat(databases[META])["entries"] == 0:
        raise NothingToDo(
            f"{path} is empty: an ingest has just started, or was stopped at its start"
        )

    def stored(key: bytes) -> bytes | memoryview | None:
        return transaction.get(key, db=databases[META])

    check_format(stored, path)
    return stored


def read_meta(
    transaction: lmdb.Transaction,
    databases: Mapping[bytes, Any],
    name: str,
    kind: type[T],
    path: Path,
) -> T:
    """Check the format, and return one entry of `meta`; raises as `meta_entries` and `entry`."""
    return entry(meta_entries(transaction, databases, path), name, kind, path)


def read_records(
    transaction: lmdb.Transaction, databases: Mapping[bytes, Any], path: Path
) -> dict[int, SlideRecord]:
    """Return every slide record by number, in order."""
    records = {}
    with transaction.cursor(db=databases[SLIDES]) as cursor:
        for key, value in cursor:
            if len(key) != SLIDE_KEY_BYTES:
                raise DamagedStore(f"{path}: a key of `slides`", found=bytes(key))
            number = slide_number(bytes(key))
            records[number] = SlideRecord.from_bytes(number, value, where=f"{path}, slide {number}")
    return records


def read_record(
    transaction: lmdb.Transaction, databases: Mapping[bytes, Any], slide: int, path: Path
) -> SlideRecord:
    """Return a slide's record; DamagedStore if it is missing or damaged."""
    where = f"{path}, slide {slide}"
    value = transaction.get(slide_key(slide), db=databases[SLIDES])
    if value is None:
        raise DamagedStore(f"{where} has no record")
    return SlideRecord.from_bytes(slide, value, where=where)


def check_format(stored: Stored, path: Path) -> None:
    """Check that this version can read a store.

    Raises:
        UnknownVersion: a later version wrote the store, or it needs an unknown feature.
        DamagedStore: the entries of the format are missing or wrong.
    """
    format_entry = entry(stored, "format", dict, path)
    if format_entry.get("name") != FORMAT_NAME:
        raise DamagedStore(
            f"{path}: format", found=repr(format_entry.get("name"))[:80], expected=FORMAT_NAME
        )
    if format_entry.get("version") != VERSION:
        raise UnknownVersion(
            f"{path}: store format version",
            found=repr(format_entry.get("version"))[:80],
            expected=VERSION,
            todo="use the histopipe version that wrote it, or a later one",
        )
    unknown = sorted(set(map(str, entry(stored, "required_features", list, path))) - KNOWN_FEATURES)
    if unknown:
        raise UnknownVersion(
            f"{path} needs a feature that this version does not have",
            found=", ".join(unknown)[:200],
            todo="use a later histopipe",
        )


def entry(stored: Stored, name: str, kind: type[T], path: Path) -> T:
    """Return one entry of `meta`; DamagedStore if it is missing, not JSON, or of another type."""
    where = f"{path}, meta {name!r}"
    data = stored(name.encode())
    if data is None:
        raise DamagedStore(f"{where} is missing")
    value = from_json(data, where=where)
    if type(value) is not kind or not _can_be_shown(value):
        raise DamagedStore(where, found=repr(value)[:80], expected=f"a JSON {kind.__name__}")
    return value


def _can_be_shown(value: object) -> bool:
    """Check that no text contains terminal control characters. Without recursion, since values may be nested deeply."""
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            todo += [*part, *part.values()]
        elif isinstance(part, list):
            todo += part
        elif isinstance(part, str) and shown(part) != part:
            return False
    return True


def read_spec(stored: Stored, path: Path) -> dict[str, Any]:
    """Return the spec of a store; DamagedStore if a setting that readers need is missing or out of range."""
    spec = entry(stored, "spec", dict, path)
    if _READ_SETTINGS.keys() - spec.keys():
        raise DamagedStore(
            f"{path}, meta 'spec'",
            found=repr(spec)[:120],
            expected="settings " + ", ".join(sorted(_READ_SETTINGS)),
        )
    for name, is_right in _READ_SETTINGS.items():
        if not is_right(spec[name]):
            raise DamagedStore(f"{path}, meta 'spec': {name}", found=repr(spec[name])[:80])
    return spec


def read_classes(stored: Stored, path: Path) -> list[str]:
    """Return the names of the patch classes; DamagedStore if they are not texts, or not unique."""
    classes = entry(stored, "classes", list, path)
    if not all(isinstance(name, str) for name in classes) or len(set(classes)) != len(classes):
        raise DamagedStore(
            f"{path}, meta 'classes'", found=repr(classes)[:80], expected="unique names"
        )
    return classes
