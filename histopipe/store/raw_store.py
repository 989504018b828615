"""A store read entry by entry, without trusting its records: for checks and repairs, in a process that may die of it."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

import lmdb

from histopipe.errors import DamagedStore
from histopipe.store.data_file import check_length
from histopipe.store.handle import mapped_errors, open_handle
from histopipe.system.files import Closing

_NUMBER, _LONGEST_KEY = 4, 511
"""Bytes of a slide number at the start of a key; bytes of the longest key that LMDB allows."""


class RawStore(Closing):
    """A store open for reading entry by entry, in one transaction until `refresh`.

    A damaged tree can make LMDB crash or hang the process. Open it in a worker process only.

    Raises:
        DamagedStore: the file is truncated, or LMDB refuses it.
    """

    def __init__(self, path: Path) -> None:
        check_length(path / "data.mdb")
        self._path = path
        with mapped_errors(path):
            self._handle, databases = open_handle(path, write=False, readahead=True)
            self._databases = {name: d for name, d in databases.items() if d is not None}
            self._transaction = self._handle.begin(buffers=True)

    @property
    def databases(self) -> set[bytes]:
        """Names of the databases that the store has."""
        return set(self._databases)

    def refresh(self) -> None:
        """Begin a new transaction. Values read before must not be used any more."""
        self._transaction.abort()
        with mapped_errors(self._path):
            self._transaction = self._handle.begin(buffers=True)

    def get(self, database: bytes, key: bytes) -> memoryview | None:
        """Look up a value, as a view that is valid until `refresh`; None where there is no entry or no database.

        Raises:
            DamagedStore: a page on the way is damaged. A new transaction has begun.
        """
        if database not in self._databases:
            return None
        try:
            value = self._transaction.get(key, None, self._databases[database])
        except lmdb.Error as error:
            self.refresh()
            raise DamagedStore(f"LMDB: {error}") from error
        return None if value is None else memoryview(value)

    def keys(
        self, database: bytes, prefix: bytes = b"", *, skip: Set[int] = frozenset()
    ) -> Iterator[bytes]:
        """Iterate over the keys that begin with a prefix. The keys of the slides in `skip` are not read.

        Raises:
            DamagedStore: a page on the way is damaged, or keys are out of order. A new transaction may have begun.
        """
        if database not in self._databases:
            return
        try:
            with self._transaction.cursor(db=self._databases[database]) as cursor:
                found = cursor.set_range(prefix)
                before = b""
                while found:
                    key = bytes(cursor.key())
                    if not key.startswith(prefix):
                        return
                    if key <= before and before:
                        raise DamagedStore(f"keys of {database.decode()!r} are out of order")
                    before = key
                    if len(key) >= _NUMBER and int.from_bytes(key[:_NUMBER], "big") in skip:
                        found = cursor.set_range(key[:_NUMBER].ljust(_LONGEST_KEY, b"\xff"))
                    else:
                        yield key
                        found = cursor.next()
        except lmdb.Error as error:
            self.refresh()
            raise DamagedStore(f"LMDB: {error}") from error

    def close(self) -> None:
        """Close the store."""
        self._transaction.abort()
        self._handle.close()
