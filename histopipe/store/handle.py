"""Open LMDB with the right map, lock and databases, and convert its errors to histopipe's."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from histopipe.errors import (
    DamagedStore,
    HistopipeError,
    MachineShort,
    NothingToDo,
    UnknownVersion,
    UsageError,
)
from histopipe.store.format import DATABASES, META
from histopipe.system.files import PASSING, free_bytes, full_disk_error, is_full_disk

_WRITE_MAP = 1 << 44
"""A writer's map: 16 TiB of address space. It only limits the file, which grows with its contents."""
_SMALLEST_MAP = 1 << 28
_READ_MAP, _READ_ROOM = 1 << 36, 8
"""A reader's map: 64 GiB, or eight times the file. A process has 128 TiB, enough for only eight maps of 16 TiB."""
_MAX_DATABASES = 32
_MAX_READERS = 4096
_LOCK_BYTES = 128 + 64 * _MAX_READERS
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
    try:
        if write:
            handle.reader_check()  # free the slots of readers that were killed
        return handle, _databases(handle, create=write)
    except BaseException:
        handle.close()
        raise


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
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(path / "lock.mdb", flags, 0o664)
        try:
            os.posix_fallocate(lock, 0, _LOCK_BYTES)
        finally:
            os.close(lock)
    except OSError as error:
        if is_full_disk(error):
            raise full_disk_error(error, path, "run the same command again") from error
        # LMDB reports all other errors.


def _open(path: Path, *, write: bool, readahead: bool) -> lmdb.Environment:
    size = _WRITE_MAP if write else read_map_size((path / "data.mdb").stat().st_size)
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
            is_too_large = isinstance(error, lmdb.MemoryError) or _mentions(
                str(error), errno.ENOMEM
            )
            if size <= _SMALLEST_MAP or not is_too_large:
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
        with suppress(lmdb.IncompatibleError, lmdb.NotFoundError):  # not a database
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
    free, text = free_bytes(path), str(error)
    may_be_full = isinstance(error, lmdb.DiskError) or _mentions(text, errno.EIO, errno.ENOSPC)
    if free < _FREE_LOW and may_be_full:
        return MachineShort(
            f"the disk that holds {path} is full",
            found=f"{free >> 20} MB free",
            todo="free disk space and run the same command again: complete slides are kept",
        )
    causes: tuple[tuple[int, type[HistopipeError], str], ...] = (
        (errno.EACCES, UsageError, "cannot be written or locked"),
        (errno.EPERM, UsageError, "cannot be written or locked"),
        (errno.EROFS, UsageError, "is on a read-only filesystem"),
        (errno.ENOENT, NothingToDo, "does not exist"),
        (errno.ENOMEM, MachineShort, "needs more address space than `ulimit -v` allows"),
        (errno.ENOSPC, MachineShort, "is on a full disk"),
        (errno.EDQUOT, MachineShort, "is on a disk with a full quota"),
        (errno.EIO, MachineShort, "is on a disk that failed, or reached its limit of file size"),
        (errno.EFBIG, MachineShort, "is larger than its filesystem or `ulimit -f` allows"),
        *((number, MachineShort, "cannot be used now") for number in PASSING),
    )
    for number, cause, what in causes:
        if _mentions(text, number):
            return cause(f"the store {path} {what}", found=text)
    kind, what = ERRORS.get(type(error), (DamagedStore, "LMDB cannot use it"))
    return kind(f"the store {path}: {what}", found=text)


def _mentions(text: str, *numbers: int) -> bool:
    return any(os.strerror(number) in text for number in numbers)
