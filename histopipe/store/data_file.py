"""Read data.mdb, the file of a store, without trusting it: its length, its page trees and its entries.

Source:
    LMDB 0.9, mdb.c: struct MDB_meta, MDB_db and MDB_page, on a 64-bit little-endian machine.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import lmdb
from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_pages

from histopipe.errors import DamagedStore
from histopipe.store.claims import lock_for_writing
from histopipe.store.format import SLIDE_KEY_BYTES, slide_number
from histopipe.store.handle import mapped_errors, open_handle
from histopipe.system.files import Closing

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<10xH4x II16x I92x QQ")
"""Flags of the page header; magic and version; page size (in the record of free pages); last page, transaction."""
_META_FLAG = 0x08
_MAX_GROWTH, _MAX_GROWTH_BYTES = 16, 1 << 30
"""A meta page counts as damaged if it requires more than this factor times the file's length plus these bytes."""
_PAGE_SIZES = (4096, 8192, 16384, 32768)
_ATTEMPTS = 5


class _MetaPage(NamedTuple):
    """One of the two meta pages. The newest has the higher transaction. `length` is the required file length."""

    page_size: int
    length: int
    transaction: int


def check_length(data: Path) -> None:
    """Check that a file has the length that its newest meta page requires. Reading past its end is a SIGBUS.

    Raises:
        DamagedStore: the file is truncated, or is not an LMDB file.
    """
    # In this order: while a writer extends the file, a length read first may be too short for the meta page read after it.
    expected = _newest_meta(data).length
    length = data.stat().st_size
    if length < expected:
        raise DamagedStore(
            f"{data} is truncated",
            found=f"{length} bytes",
            expected=f"at least {expected}",
            todo="copy the store again, repair it, or ingest again (a copy taken during an ingest is not valid)",
        )


def newest_transaction(data: Path) -> int:
    """Return the number of the last transaction; DamagedStore if neither meta page can be read."""
    return _newest_meta(data).transaction


def make_readable(store: Path) -> int:
    """Change a damaged file so that LMDB can open it; return its original length in bytes.

    A damaged meta page is replaced by the other one, which is at most one transaction older. A truncated file is
    extended with zeros.

    Raises:
        UsageError: a process has the store open for writing.
    """
    data = store / "data.mdb"
    length = data.stat().st_size
    metas = _meta_pages(data)
    usable = [
        meta is not None and meta.length <= _MAX_GROWTH * length + _MAX_GROWTH_BYTES
        for meta in metas
    ]
    good = [meta for meta, is_usable in zip(metas, usable, strict=True) if meta and is_usable]
    needed = max((meta.length for meta in good), default=0)
    if not good or (len(good) == len(metas) and length >= needed):
        return length
    with lock_for_writing(store, alone=True), data.open("r+b") as file:
        if len(good) < len(metas):
            number, page_size = usable.index(False), good[0].page_size
            file.seek((1 - number) * page_size)
            page = file.read(page_size)
            file.seek(number * page_size)
            file.write(number.to_bytes(8, "little") + page[8:])
        file.truncate(max(length, needed))
    return length


def _newest_meta(data: Path) -> _MetaPage:
    pages = list(filter(None, _meta_pages(data)))
    if not pages:
        size = data.stat().st_size
        raise DamagedStore(f"{data} is not an LMDB file", found=f"{size} bytes without a meta page")
    return max(pages, key=lambda meta: meta.transaction)


def _meta_pages(data: Path) -> tuple[_MetaPage | None, _MetaPage | None]:
    """Return both meta pages; None for a damaged one."""
    with data.open("rb", buffering=0) as file:
        first = _parsed(file.read(_META.size))
        for size in (first.page_size,) if first else _PAGE_SIZES:
            file.seek(size)
            second = _parsed(file.read(_META.size))
            if second is not None:
                return first, second
    return first, None


def _parsed(data: bytes) -> _MetaPage | None:
    if len(data) < _META.size:
        return None
    flags, magic, version, size, last_page, transaction = _META.unpack(data)
    is_power = 256 <= size <= _PAGE_SIZES[-1] and size & (size - 1) == 0
    if magic != _MAGIC or version != _VERSION or not is_power or not flags & _META_FLAG:
        return None
    return _MetaPage(size, (last_page + 1) * size, transaction)


def page_faults(store: Path, keep_state: bool) -> list[str]:
    """Check the pages of a store with LMDB's verifier, which only reads the file; return the faults.

    `keep_state` keeps a read transaction open, so that a writer does not reuse pages of the checked state. For that,
    LMDB opens the file. Do not set it for an untrusted file.
    """
    with ExitStack() as stack:
        if keep_state:
            with suppress(DamagedStore):  # the verifier reports the reason
                stack.enter_context(RawStore(store))
        for _ in range(_ATTEMPTS):
            before = _newest_meta(store / "data.mdb").transaction
            faults = _verifier_faults(store) + _order_faults(store / "data.mdb")
            if not faults or _newest_meta(store / "data.mdb").transaction == before:
                break  # otherwise, a writer extended the file while its length was read
        return faults


def _order_faults(data: Path) -> list[str]:
    """Check that the transactions of the meta pages are consecutive; otherwise LMDB may use an older state."""
    transactions = sorted(meta.transaction for meta in _meta_pages(data) if meta is not None)
    if len(transactions) < 2 or transactions[1] - transactions[0] == (1 if transactions[1] else 0):
        return []
    return [
        f"transactions {transactions[0]} and {transactions[1]} of the meta pages are not consecutive"
    ]


def _verifier_faults(store: Path) -> list[str]:
    try:
        return [str(fault) for fault in verify_pages(str(store), subdir=True)]  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]
    except (MemoryError, OverflowError, struct.error) as error:
        return [f"LMDB's verifier cannot read the pages: {error!r}"]


_LONGEST_KEY = 511
"""Bytes of the longest key that LMDB allows."""


class RawStore(Closing):
    """A store open for reading single entries, in one transaction until `refresh`.

    A damaged tree can make LMDB crash or hang. Open it in a worker process only.

    Raises:
        DamagedStore: the file is truncated, or LMDB cannot open it.
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
        """Begin a new transaction. Values read before are no longer valid."""
        self._transaction.abort()
        with mapped_errors(self._path):
            self._transaction = self._handle.begin(buffers=True)

    def get(self, database: bytes, key: bytes) -> memoryview | None:
        """Return a value as a view that is valid until `refresh`; None if there is no entry or no database.

        Raises:
            DamagedStore: a page on the path to the value is damaged. A new transaction has begun.
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
            DamagedStore: a page on the path is damaged, or keys are out of order. A new transaction may have begun.
        """
        if database not in self._databases:
            return
        try:
            with self._transaction.cursor(db=self._databases[database]) as cursor:
                has_entry = cursor.set_range(prefix)
                previous = b""
                while has_entry:
                    key = bytes(cursor.key())
                    if not key.startswith(prefix):
                        return
                    if key <= previous and previous:
                        raise DamagedStore(f"keys of {database.decode()!r} are out of order")
                    previous = key
                    if len(key) >= SLIDE_KEY_BYTES and slide_number(key) in skip:
                        last = key[:SLIDE_KEY_BYTES].ljust(_LONGEST_KEY, b"\xff")
                        has_entry = cursor.set_range(last)
                    else:
                        yield key
                        has_entry = cursor.next()
        except lmdb.Error as error:
            self.refresh()
            raise DamagedStore(f"LMDB: {error}") from error

    def close(self) -> None:
        """Close the store."""
        self._transaction.abort()
        self._handle.close()
