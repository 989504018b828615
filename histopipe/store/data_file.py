"""Open and check data.mdb, the file of a store: its length, its page trees and its entries. The file is not trusted.

Source:
    LMDB 0.9, mdb.c: struct MDB_meta, MDB_db and MDB_page, on a 64-bit little-endian machine.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_pages

from histopipe.errors import (
    DamagedStore,
    HistopipeError,
    MachineShort,
    NothingToDo,
    UnknownVersion,
    UsageError,
)
from histopipe.store.claims import lock_for_writing
from histopipe.store.format import DATABASES, META, SLIDE_KEY_BYTES, slide_number
from histopipe.system.files import (
    PASSING,
    Closing,
    error_number,
    free_bytes,
    full_disk_error,
    is_full_disk,
    run_on_error,
)
from histopipe.system.folders import DATA

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<10xH4x II16x I36xQ 40xQ QQ")
"""Flags of the page header; magic and version; page size and root of free pages; root of databases; last page, transaction."""
_META_FLAG = 0x08
_BRANCH, _ON_OTHER_PAGES, _DATABASE = 0x01, 0x01, 0x02
"""Flags of a page; of an entry whose value is on separate pages; of an entry that is a database."""
_NO_PAGE = (1 << 64) - 1
_LONGEST_KEY = 511
_MAX_GROWTH, _MAX_GROWTH_BYTES = 16, 1 << 30
"""A meta page counts as damaged if it requires more than this factor times the file's length plus these bytes."""
_PAGE_SIZES = (4096, 8192, 16384, 32768)


class MetaPage(NamedTuple):
    """One of the two meta pages. The newest has the higher transaction. `length` is the required file length.

    `roots` are the first pages of the trees of free pages and of databases.
    """

    page_size: int
    length: int
    transaction: int
    roots: tuple[int, int]


def check_length(data: Path) -> None:
    """Check that a file has the length that its newest meta page requires. Reading past its end is a SIGBUS.

    Raises:
        DamagedStore: the file is truncated, or is not an LMDB file.
    """
    # In this order: while a writer extends the file, a length read first may be too short for the meta page read after it.
    expected = newest_meta(data).length
    length = data.stat().st_size
    if length < expected:
        raise DamagedStore(
            f"{data} is truncated",
            found=f"{length} bytes",
            expected=f"at least {expected}",
            todo="copy the store again, repair it, or ingest again (a copy taken during an ingest is not valid)",
        )


def make_readable(store: Path) -> int:
    """Change a damaged file so that LMDB can open it; return its original length in bytes.

    A damaged meta page is replaced by the other one, which is at most one transaction older. A truncated file is
    extended with zeros.

    Raises:
        UsageError: a process has the store open for writing.
    """
    data = store / DATA
    length = data.stat().st_size
    longest = _MAX_GROWTH * length + _MAX_GROWTH_BYTES
    good = {n: meta for n, meta in enumerate(_meta_pages(data)) if meta and meta.length <= longest}
    needed = max((meta.length for meta in good.values()), default=0)
    if good and (len(good) == 1 or length < needed):
        with lock_for_writing(store, alone=True), data.open("r+b") as file:
            if len(good) == 1:
                ((number, meta),) = good.items()
                file.seek(number * meta.page_size)
                page, other = file.read(meta.page_size), 1 - number
                file.seek(other * meta.page_size)
                file.write(other.to_bytes(8, "little") + page[8:])  # a page begins with its number
            file.truncate(max(length, needed))
    return length


def newest_meta(data: Path) -> MetaPage:
    """Return the meta page of the last transaction; DamagedStore if neither meta page can be read."""
    pages = list(filter(None, _meta_pages(data)))
    if not pages:
        raise DamagedStore(
            f"{data} is not an LMDB file",
            found=f"{data.stat().st_size} bytes without a meta page",
        )
    return max(pages, key=attrgetter("transaction"))


def _meta_pages(data: Path) -> tuple[MetaPage | None, MetaPage | None]:
    """Return both meta pages; None for a damaged one."""
    with data.open("rb", buffering=0) as file:
        first = _parsed(file.read(_META.size))
        for size in (first.page_size,) if first else _PAGE_SIZES:
            file.seek(size)
            second = _parsed(file.read(_META.size))
            if second is not None:
                return first, second
    return first, None


def _parsed(data: bytes) -> MetaPage | None:
    if len(data) < _META.size:
        return None
    flags, magic, version, size, free, main, last_page, transaction = _META.unpack(data)
    is_power = 256 <= size <= _PAGE_SIZES[-1] and size & (size - 1) == 0
    if (magic, version) != (_MAGIC, _VERSION) or not is_power or not flags & _META_FLAG:
        return None
    return MetaPage(size, (last_page + 1) * size, transaction, (free, main))


_WRITE_MAP = 1 << 44
"""A writer's map: 16 TiB of address space. It only limits the file, which grows with its contents."""
_SMALLEST_MAP = 1 << 28
_READ_MAP, _READ_ROOM = 1 << 36, 8
"""A reader's map: 64 GiB, or eight times the file. A process has 128 TiB, enough for only eight maps of 16 TiB."""
_MAX_DATABASES = 32
_MAX_READERS = 4096
_FREE_LOW = 16 << 20
"""Free bytes below which a disk counts as full when a write fails."""

ERRORS: dict[type[lmdb.Error], tuple[type[HistopipeError], str]] = {
    lmdb.BadChecksumError: (DamagedStore, "a page is damaged"),
    lmdb.BadDbiError: (DamagedStore, "a database changed under a transaction"),
    lmdb.BadRslotError: (HistopipeError, "a read transaction was used by two threads"),
    lmdb.BadTxnError: (DamagedStore, "a transaction failed because a page is damaged"),
    lmdb.BadValsizeError: (HistopipeError, "a key or value is too long for LMDB"),
    lmdb.CorruptedError: (DamagedStore, "a page is damaged"),
    lmdb.CryptoFailError: (DamagedStore, "the environment is encrypted"),
    lmdb.CursorFullError: (DamagedStore, "a tree is deeper than LMDB allows"),
    lmdb.DbsFullError: (DamagedStore, "it has more databases than a store"),
    lmdb.DiskError: (MachineShort, "the disk failed"),
    lmdb.EnvEncryptionError: (DamagedStore, "the environment is encrypted"),
    lmdb.IncompatibleError: (DamagedStore, "a database has unexpected flags"),
    lmdb.InvalidError: (DamagedStore, "data.mdb is not an LMDB file"),
    lmdb.InvalidParameterError: (HistopipeError, "LMDB was called with wrong arguments"),
    lmdb.KeyExistsError: (HistopipeError, "a key was written twice"),
    lmdb.LockError: (MachineShort, "its lock file cannot be used"),
    lmdb.MapFullError: (MachineShort, "it is larger than its address space"),
    lmdb.MapResizedError: (
        MachineShort,
        "another process extended it beyond the address space of this one",
    ),
    lmdb.MemoryError: (MachineShort, "out of memory"),
    lmdb.NotFoundError: (DamagedStore, "a database is missing"),
    lmdb.PageFullError: (DamagedStore, "a page is damaged"),
    lmdb.PageNotFoundError: (DamagedStore, "a page is missing"),
    lmdb.PanicError: (DamagedStore, "LMDB stopped after a fatal error"),
    lmdb.ProblemError: (DamagedStore, "its pages are inconsistent"),
    lmdb.ReadersFullError: (MachineShort, f"more than {_MAX_READERS} readers have it open"),
    lmdb.ReadonlyError: (UsageError, "it was opened for reading only"),
    lmdb.TlsFullError: (MachineShort, "the process has too many thread-local slots in use"),
    lmdb.TxnFullError: (HistopipeError, "a transaction grew too large"),
    lmdb.VersionMismatchError: (UnknownVersion, "it was written by another version of LMDB"),
}
"""Error class and text for each error of LMDB."""
_CAUSES: dict[int | None, tuple[type[HistopipeError], str]] = {
    **dict.fromkeys(PASSING, (MachineShort, "cannot be used now")),
    errno.EACCES: (UsageError, "cannot be written or locked"),
    errno.EPERM: (UsageError, "cannot be written or locked"),
    errno.EROFS: (UsageError, "is on a read-only filesystem"),
    errno.ENOENT: (NothingToDo, "does not exist"),
    errno.ENOMEM: (MachineShort, "needs more address space than `ulimit -v` allows"),
    errno.ENOSPC: (MachineShort, "is on a full disk"),
    errno.EDQUOT: (MachineShort, "is on a disk with a full quota"),
    errno.EIO: (MachineShort, "is on a disk that failed, or reached its limit of file size"),
    errno.EFBIG: (MachineShort, "is larger than its filesystem or `ulimit -f` allows"),
}
"""Error class and text for each error of the operating system, which LMDB reports in the text of an error."""


def open_handle(
    path: Path, *, write: bool, readahead: bool = False
) -> tuple[lmdb.Environment, dict[bytes, Any]]:
    """Open the LMDB environment and the databases of a store, None for a missing one. Call it within `mapped_errors`.

    `readahead` lets the kernel read ahead also for a reader, for reading a whole store.
    """
    if write or os.access(path, os.W_OK):
        _allocate_lock(path)
    while True:
        before = path.stat().st_ino
        handle = _open(path, write=write, readahead=readahead or write)
        if path.stat().st_ino == before:
            break
        handle.close()  # another process has just replaced the store: LMDB may have opened a file of each
    with run_on_error(handle.close):
        if write:
            handle.reader_check()  # free the slots of readers that were killed
        return handle, _databases(handle, create=write)


def read_map_size(length: int) -> int:
    """Return the bytes of address space for a reader of a file of `length` bytes."""
    return min(_WRITE_MAP, max(_READ_MAP, _READ_ROOM * length))


def _allocate_lock(path: Path) -> None:
    """Allocate the disk space of LMDB's lock file. LMDB maps it sparse, so that a full disk would be a SIGBUS.

    A link is refused, since another file would be written.
    """
    if (path / "lock.mdb").is_symlink():
        raise DamagedStore(
            f"{path / 'lock.mdb'} is a link", expected="a regular file", todo="delete it"
        )
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path / "lock.mdb", flags, 0o664)) as lock:
            os.posix_fallocate(lock.fileno(), 0, 128 + 64 * _MAX_READERS)
    except OSError as error:
        if is_full_disk(error):
            raise full_disk_error(error, path, "run the same command again") from error
        # LMDB reports all other errors.


def _open(path: Path, *, write: bool, readahead: bool) -> lmdb.Environment:
    size = _WRITE_MAP if write else read_map_size((path / DATA).stat().st_size)
    while True:
        try:
            return lmdb.open(
                str(path),
                map_size=size,
                max_dbs=_MAX_DATABASES,
                max_readers=_MAX_READERS,
                readonly=not write,
                create=write,
                # Without the lock, a writer may change pages during a read. Omit it only where no writer can be.
                lock=write or os.access(path, os.W_OK),
                max_spare_txns=0,  # a spare transaction could not be closed after a fork
                readahead=readahead,
            )
        except lmdb.Error as error:
            is_too_large = isinstance(error, lmdb.MemoryError)
            if size <= _SMALLEST_MAP or not (is_too_large or error_number(error) == errno.ENOMEM):
                raise
            size //= 2


def _databases(handle: lmdb.Environment, *, create: bool) -> dict[bytes, Any]:
    """Open the databases of this version, None for a missing one, and those of a later version."""
    databases: dict[bytes, Any] = dict.fromkeys(DATABASES)
    for name in DATABASES:
        with suppress(lmdb.NotFoundError):
            databases[name] = handle.open_db(name, create=create)
    if databases[META] is None:
        return databases  # not a histopipe store
    with handle.begin() as transaction, transaction.cursor() as cursor:
        names = {bytes(name) for name in islice(cursor.iternext(values=False), _MAX_DATABASES)}
    for name in names - databases.keys():
        # Not a database, or with a damaged name.
        with suppress(lmdb.IncompatibleError, lmdb.NotFoundError, lmdb.BadValsizeError):
            databases[name] = handle.open_db(name, create=False)
    return databases


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Convert LMDB's errors to histopipe's, also a full disk, which LMDB reports as an I/O error."""
    try:
        yield
    except lmdb.Error as error:
        raise _mapped(error, path) from error


def _mapped(error: lmdb.Error, path: Path) -> HistopipeError:
    free, text, number = free_bytes(path), str(error), error_number(error)
    may_be_full = isinstance(error, lmdb.DiskError) or number in (errno.EIO, errno.ENOSPC)
    if free < _FREE_LOW and may_be_full:
        return MachineShort(
            f"the disk that holds {path} is full",
            found=f"{free >> 20} MB free",
            todo="free disk space and run the same command again: complete slides are kept",
        )
    if number in _CAUSES:
        kind, what = _CAUSES[number]
        return kind(f"the store {path} {what}", found=text)
    kind, what = ERRORS.get(type(error), (DamagedStore, "LMDB cannot use it"))
    return kind(f"the store {path}: {what}", found=text)


def page_faults(store: Path, keep_state: bool) -> list[str]:
    """Check the pages of a store with LMDB's verifier, which only reads the file; return the faults.

    `keep_state` keeps a read transaction open, so that a writer does not reuse pages of the checked state. For that,
    LMDB opens the file. Do not set it for an untrusted file.
    """
    with ExitStack() as stack:
        if keep_state:
            with suppress(DamagedStore):  # the verifier reports the reason
                stack.enter_context(RawStore(store))
        for _ in range(5):
            before = newest_meta(store / DATA).transaction
            faults = _verifier_faults(store) + _order_faults(store / DATA)
            faults = faults or _length_faults(store / DATA)
            if not faults or newest_meta(store / DATA).transaction == before:
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


def _length_faults(data: Path) -> list[str]:
    """Check that the entries of each page fill it to its end; LMDB's verifier has found no fault.

    Otherwise the length of a key or value is wrong. If LMDB deletes the entry, it moves those before it by the wrong number of
    bytes, and so damages them.

    Source:
        LMDB 0.9, mdb.c: `mdb_node_add` and `mdb_node_del`.
    """
    faults, meta = [], newest_meta(data)
    todo = [root for root in meta.roots if root != _NO_PAGE]
    with data.open("rb", buffering=0) as file:
        while todo:
            number = todo.pop()
            file.seek(number * meta.page_size)
            page = file.read(meta.page_size)
            words = np.frombuffer(page, "<u2").astype(np.int64)
            _, _, _, _, _, kind, lower, upper = words[:8].tolist()
            starts = words[8 : lower // 2]
            low, high, flags, keys = words[starts[:, np.newaxis] // 2 + np.arange(4)].T
            sizes = 8 + keys
            if kind & _BRANCH:
                todo += (low | high << 16 | flags << 32).tolist()
            else:
                for end in (starts + sizes)[flags & _DATABASE > 0].tolist():
                    root = int.from_bytes(page[end + 40 : end + 48], "little")
                    todo += [root] * (root != _NO_PAGE)
                sizes += np.where(flags & _ON_OTHER_PAGES, 8, low | high << 16)
            used = int((sizes + sizes % 2).sum())
            if used != meta.page_size - upper:
                what = f"{used} bytes of entries in {meta.page_size - upper}"
                faults.append(f"page {number} has {what}: the length of one is wrong")
    return faults


def _verifier_faults(store: Path) -> list[str]:
    try:
        return [str(fault) for fault in verify_pages(str(store), subdir=True)]  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]
    except (MemoryError, OverflowError, struct.error) as error:
        return [f"LMDB's verifier cannot read the pages: {error!r}"]


class RawStore(Closing):
    """A store open for reading single entries, in one transaction until `refresh`.

    A damaged tree can make LMDB crash or hang. Open it in a worker process only.

    Raises:
        DamagedStore: the file is truncated, or LMDB cannot open it.

    Attributes:
        databases: the databases that the store has, by name.
    """

    def __init__(self, path: Path) -> None:
        check_length(path / DATA)
        self._path = path
        with mapped_errors(path):
            self._handle, databases = open_handle(path, write=False, readahead=True)
            self.databases = {name: d for name, d in databases.items() if d is not None}
            self._transaction = self._handle.begin(buffers=True)

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
        if database not in self.databases:
            return None
        try:
            value = self._transaction.get(key, None, self.databases[database])
        except lmdb.Error as error:
            self.refresh()
            raise DamagedStore(f"LMDB: {error}") from error
        return None if value is None else memoryview(value)

    def keys(
        self, database: bytes, prefix: bytes = b"", *, skip: Set[int] = frozenset()
    ) -> Iterator[bytes]:
        """Iterate over the keys that begin with a prefix. The keys of the slides in `skip` are not read.

        Damaged keys of a length that LMDB does not write are left out.

        Raises:
            DamagedStore: a page on the path is damaged, or keys are out of order. A new transaction may have begun.
        """
        if database not in self.databases:
            return
        try:
            with self._transaction.cursor(db=self.databases[database]) as cursor:
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
                        if 0 < len(key) <= _LONGEST_KEY:
                            yield key
                        has_entry = cursor.next()
        except lmdb.Error as error:
            self.refresh()
            raise DamagedStore(f"LMDB: {error}") from error

    def close(self) -> None:
        """Close the store."""
        self._transaction.abort()
        self._handle.close()
