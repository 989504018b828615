"""One read transaction on a store's patches: their values and their index columns."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.store.environment import Environment
from histopipe.store.extents import find_extents
from histopipe.store.format import INDEX, PATCHES, decode_index, patch_key, slide_key
from histopipe.store.record import SlideRecord


class CachedColumn(NamedTuple):
    """A column of a slide's index as a view of LMDB's map.

    Attributes:
        generation: generation of the map.
        transaction: id of the transaction; one with the same id sees the same pages.
        patches_crc: CRC-32 over the CRCs of the slide's patches.
        values: the column, (N,).
    """

    generation: int
    transaction: int
    patches_crc: int
    values: NDArray[Any]


Columns = dict[tuple[int, str], CachedColumn]
"""Cached columns by slide and name."""


class Reading:
    """A read transaction. Views that it returns must not be used after it has ended.

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
        self._id = int(transaction.id())

    def value(self, slide: int, row: int) -> memoryview:
        """Return the file of a patch; empty if the patch was unreadable. Reads its pages from disk, without Python's lock.

        Raises:
            DamagedStore: the value is missing.
        """
        value = self._transaction.get(patch_key(slide, row), db=self._patches)
        if value is None:
            raise DamagedStore(f"{self.where(slide)}: patch {row} is missing")
        return memoryview(value)

    def column(self, slide: int, name: str) -> NDArray[Any]:
        """Return a column of a slide's index, (N,), as a view of LMDB's map, which costs no memory per patch.

        Views are cached until something is written, since LMDB touches every page of a block that it looks up.

        Raises:
            DamagedStore: as `index`; or the slide has been replaced since its columns were first read.
        """
        generation = self._environment.generation
        cached = self._columns.get((slide, name))
        if cached is not None and cached[:2] == (generation, self._id):
            return cached.values
        columns = self.index(slide, copied=False)
        patches_crc = zlib.crc32(columns["crc"].tobytes())
        if cached is not None and cached.patches_crc != patches_crc:
            raise DamagedStore(
                f"{self.where(slide)}: its patches have been replaced since the store was opened",
                todo="open the store again",
            )
        self._columns[slide, name] = CachedColumn(generation, self._id, patches_crc, columns[name])
        return columns[name]

    def index(self, slide: int, *, copied: bool = True) -> dict[str, NDArray[Any]]:
        """Return the columns of a slide's index by name, (N,) each, one row per patch.

        Args:
            slide: number of the slide.
            copied: False returns views of LMDB's map, valid in this transaction.

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
            raise DamagedStore(f"{where}: rows of its index", found=rows, expected=expected)
        return columns

    def extents(self, keys: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Find where the values of patches are in data.mdb, without reading them; see `find_extents`.

        Args:
            keys: slide and row of each patch, best in rising order.

        Returns:
            (N, 2) offset and length, bytes.
        """
        packed = [patch_key(*key) for key in keys]
        return find_extents(self._transaction, self._patches, packed)

    def where(self, slide: int) -> str:
        """Return the store and id of a slide, for messages."""
        return f"{self._environment.path}, slide {self._records[slide].id}"
