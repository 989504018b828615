"""A store's data.mdb as a file of pages, read without LMDB: whether it is one, and whole, and what its pages hold.

Source:
    LMDB 0.9, mdb.c: struct MDB_meta, MDB_db and MDB_page, on a machine of 64 bits, little-endian.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.system.files import Closing

HEADER = 16
"""Bytes of a page before what it holds."""
NO_PAGE = (1 << 64) - 1
"""Root of a tree without pages."""

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<QHH4x IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_LAST = struct.Struct("<QQ")
_META_SIZE = _META.size + 2 * _TREE.size + _LAST.size
_META_FLAG = 0x08


@dataclass(frozen=True, slots=True)
class Tree:
    """What LMDB has written down of one database: flags, counts, and the page that its tree begins at.

    `padding` is 0 but in the free pages' tree, whose has the size of a page; LMDB takes nothing else.
    """

    padding: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Tree:
        """From the 48 bytes of a record."""
        return cls(*_TREE.unpack(data))


@dataclass(frozen=True, slots=True)
class Meta:
    """One of the two meta pages: a state of the whole file.

    Attributes:
        number: of the page, as it says itself.
        address: always 0; another would have the file mapped there.
        transaction: number of the one that wrote it; the higher of both is the state that counts.
        free, main: trees of the free pages and of the databases.
    """

    number: int
    flags: int
    address: int
    map_size: int
    page_size: int
    last_page: int
    transaction: int
    free: Tree
    main: Tree


class DataFile(Closing):
    """data.mdb, open for plain reads: nothing that it holds can harm who reads it so.

    Attributes:
        path: of the file.
        metas: by page, None for one that is no meta page.
        page_size: bytes.

    Raises:
        DamagedStore: neither meta page can be read.
        OSError: the file cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.metas = self.read_metas()
        known = [meta for meta in self.metas if meta is not None]
        if not known:
            length = self.length
            self.close()
            raise DamagedStore(f"{path} is no LMDB file", found=f"{length} bytes of something else")
        self.page_size = known[0].page_size

    @property
    def identity(self) -> tuple[int, int]:
        """What tells the file from another one that was put in its place."""
        facts = os.fstat(self._file)
        return facts.st_dev, facts.st_ino

    @property
    def length(self) -> int:
        """Bytes of the file, as it is now."""
        return os.fstat(self._file).st_size

    def read_metas(self) -> tuple[Meta | None, Meta | None]:
        """Both meta pages as they are now."""
        first = parse_meta(self._at(0, _META_SIZE))
        sizes = (first.page_size,) if first else (4096, 8192, 16384, 32768)
        second = (parse_meta(self._at(size, _META_SIZE), size) for size in sizes)
        return first, next((meta for meta in second if meta is not None), None)

    def read(self, page: int, pages: int) -> NDArray[np.uint8]:
        """Neighbouring pages, (pages × page_size,) uint8; fewer where the file ends."""
        return np.frombuffer(self._at(page * self.page_size, pages * self.page_size), np.uint8)

    def pages(self, numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Single pages, (N, page_size) uint8; zeros beyond the end of the file."""
        found = np.zeros((len(numbers), self.page_size), np.uint8)
        starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
        for start, end in pairwise([*starts.tolist(), len(numbers)]):
            run = self.read(int(numbers[start]), end - start)
            found[start:end].reshape(-1)[: len(run)] = run
        return found

    def read_ahead(self, first: int, last: int) -> None:
        """Ask the system for pages that will be wanted soon."""
        size = self.page_size
        os.posix_fadvise(
            self._file, first * size, (last + 1 - first) * size, os.POSIX_FADV_WILLNEED
        )

    def close(self) -> None:
        """Close it."""
        os.close(self._file)

    def _at(self, offset: int, length: int) -> bytes:
        length = min(
            length, self.length - offset
        )  # places that a damaged file names may be anywhere
        parts = []
        while length > 0:  # a read may give less than was asked for
            part = os.pread(self._file, length, offset)
            if not part:
                break
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_meta(data: bytes, page_size: int | None = None) -> Meta | None:
    """A meta page; None if it is none, or of another page size."""
    if len(data) < _META_SIZE:
        return None
    number, _, flags, magic, version, address, map_size = _META.unpack_from(data)
    free = _META.size
    main, last = free + _TREE.size, free + 2 * _TREE.size
    (size,) = struct.unpack_from("<I", data, free)  # the free pages' tree keeps it for all
    last_page, transaction = _LAST.unpack_from(data, last)
    power = size >= 256 and size <= 32768 and size & (size - 1) == 0
    if magic != _MAGIC or version != _VERSION or not power or page_size not in (None, size):
        return None
    return Meta(
        number, flags, address, map_size, size, last_page, transaction,
        Tree.parse(data[free:main]), Tree.parse(data[main:last]),
    )  # fmt: skip


def check_length(data: Path) -> None:
    """Refuse a file shorter than its newest meta page says: reading past its end would be a SIGBUS.

    Raises:
        DamagedStore: it is, or it is no LMDB file.
    """
    with DataFile(data) as file:
        newest = max((m for m in file.metas if m is not None), key=lambda meta: meta.transaction)
        expected = (newest.last_page + 1) * newest.page_size
        if file.length < expected:
            raise DamagedStore(
                f"{data} is cut short",
                found=f"{file.length} bytes",
                expected=f"at least {expected}",
                todo="copy the store again, or ingest anew (a copy taken during an ingest is no store)",
            )
