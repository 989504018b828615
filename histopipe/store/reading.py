"""One read transaction on a store's patches: their values, their index columns, and where they lie in the file."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.store.environment import Environment
from histopipe.store.format import INDEX, PATCHES, decode_index, patch_key, slide_key
from histopipe.store.record import SlideRecord

_SMALL_BLOCK = 65536
"""Larger than any page, so that a longer block has pages of its own; 64 kB are 1,800 patches."""
_NODE_HEADER = 8
_NOWHERE, _AMONG_KEYS = (-1, -1), (0, 0)
_BIG_DATA = 0x01
"""LMDB's flag of a value that lies on pages of its own."""

Columns = dict[tuple[int, int, str], tuple[tuple[int, int], NDArray[Any]]]
"""By generation of the map, slide and name: first page and length of a column's block, and the column."""


class Reading:
    """What one transaction sees. Nothing it gives may be touched after the transaction has ended.

    Made by `Store.reading`.
    """

    def __init__(
        self,
        environment: Environment,
        transaction: lmdb.Transaction,
        records: dict[int, SlideRecord],
        columns: Columns,
    ) -> None:
        self._environment, self._transaction = environment, transaction
        self._records, self._columns = records, columns
        self._patches = environment.databases[PATCHES]

    def value(self, slide: int, row: int) -> memoryview:
        """A patch's file, empty if it was unreadable. Its pages are read from disk here, without Python's lock.

        Raises:
            DamagedStore: there is none.
        """
        value = self._transaction.get(patch_key(slide, row), db=self._patches)
        if value is None:
            raise DamagedStore(f"{self.where(slide)}: patch {row} is missing")
        return memoryview(value)

    def column(self, slide: int, name: str) -> NDArray[Any]:
        """A column of a slide's index, one row a patch: a view of LMDB's map, in memory that is no process's own.

        It is looked up once and remembered, since LMDB touches every page of a block that is asked for. A block on pages of
        its own stays where it is until it is written anew, as when its slide gets other labels; where it is costs little to
        ask. A small one is copied: it shares its page with others, which is written anew elsewhere with each of them.

        Raises:
            DamagedStore: as `index`.
        """
        key = (self._environment.generation, slide, name)
        place, found = self._columns.get(key, (_NOWHERE, None))
        now = self._place_of_index(slide)
        if found is None or now != place:
            found = self.index(slide, copied=False)[name]
            self._columns[key] = now, found
        return found

    def _place_of_index(self, slide: int) -> tuple[int, int]:
        """First page and length of a slide's index block. A block of other columns may begin where an old one did."""
        database = self._environment.databases[INDEX]
        with self._transaction.cursor(db=database) as cursor:
            for key in cursor.getmulti([slide_key(slide)], values=False):
                return _place(key) or _AMONG_KEYS
        return _AMONG_KEYS

    def index(self, slide: int, *, copied: bool = True) -> dict[str, NDArray[Any]]:
        """A slide's columns, (N,) each, one row a patch.

        Raises:
            DamagedStore: the block is missing, damaged, or not of the length its record says.
        """
        where = self.where(slide)
        block = self._transaction.get(slide_key(slide), db=self._environment.databases[INDEX])
        if block is None:
            raise DamagedStore(f"{where}: its index is missing")
        small = len(block) <= _SMALL_BLOCK
        columns = decode_index(
            slide_key(slide), bytes(block) if copied or small else block, where=where
        )
        rows, expected = len(columns["crc"]), self._records[slide].planned
        if rows != expected:
            raise DamagedStore(f"{where}: rows of its index", found=rows, expected=expected)
        return columns

    def extents(self, keys: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Where values lie in data.mdb, found without touching them.

        Values small enough to lie among the keys are left out: looking for them has read them.

        Args:
            keys: slide and row of patches, best in rising order.

        Returns:
            (N, 2) offset and length, bytes, rising; neighbours are joined.
        """
        page_size = int(self._transaction.stat(self._patches)["psize"])
        found = []
        with self._transaction.cursor(db=self._patches) as cursor:
            packed = [patch_key(*key) for key in keys]
            for key in cursor.getmulti(packed, values=False):
                place = _place(key)
                if place is not None:
                    found.append((place[0] * page_size, place[1]))
        return _joined(np.array(sorted(found), np.int64).reshape(-1, 2), page_size)

    def where(self, slide: int) -> str:
        """A slide's name for a message."""
        return f"{self._environment.path}, slide {self._records[slide].id}"


class _Node(ctypes.Structure):
    _fields_ = (("fields", ctypes.c_uint16 * 4),)


def _place(key: bytes | memoryview) -> tuple[int, int] | None:
    """First page and length, with that page's header, of a value that lies on pages of its own; None of one that does not.

    Args:
        key: in LMDB's map, as a cursor gives it.

    Source:
        LMDB 0.9, mdb.c: a leaf's node is 2 × 16 bits of size, 16 of flags, 16 of the key's length, the key, and then, if
        the flag F_BIGDATA is set, the number of the first page of the value.
    """
    address = np.frombuffer(key, np.uint8).__array_interface__["data"][0]
    low, high, flags, length = _Node.from_address(address - _NODE_HEADER).fields
    if not flags & _BIG_DATA or length != len(key):
        return None
    return ctypes.c_uint64.from_address(address + length).value, (high << 16 | low) + 16


def _joined(extents: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """Extents of whole pages, neighbours as one."""
    if not len(extents):
        return extents
    first = extents[:, 0]
    end = first + -(-extents[:, 1] // page_size) * page_size
    starts = np.flatnonzero(np.append(True, first[1:] > end[:-1]))
    return np.stack([first[starts], np.maximum.reduceat(end, starts) - first[starts]], axis=1)
