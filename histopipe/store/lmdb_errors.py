"""LMDB's errors, made ours. A full disk is among them, which LMDB reports as an I/O error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from histopipe.errors import (
    DamagedStore,
    HistopipeError,
    MachineShort,
    NothingToDo,
    UnknownVersion,
    UsageError,
)

MAX_READERS = 4096
_FREE_LOW = 16 << 20
"""A disk with less free space than this counts as full when a write fails."""

ERRORS: dict[type[lmdb.Error], tuple[type[HistopipeError], str]] = {
    lmdb.BadChecksumError: (DamagedStore, "a page is damaged"),
    lmdb.BadDbiError: (DamagedStore, "a database changed under a transaction"),
    lmdb.BadRslotError: (HistopipeError, "a read transaction was used by two threads"),
    lmdb.BadTxnError: (DamagedStore, "a page is damaged, so that a transaction ended"),
    lmdb.BadValsizeError: (HistopipeError, "a key or value is too long for LMDB"),
    lmdb.CorruptedError: (DamagedStore, "a page is damaged"),
    lmdb.CryptoFailError: (DamagedStore, "the environment is encrypted"),
    lmdb.CursorFullError: (DamagedStore, "a tree is deeper than LMDB allows"),
    lmdb.DbsFullError: (DamagedStore, "it holds more databases than a store has"),
    lmdb.DiskError: (MachineShort, "the disk failed"),
    lmdb.EnvEncryptionError: (DamagedStore, "the environment is encrypted"),
    lmdb.IncompatibleError: (DamagedStore, "a database has flags that a store's have not"),
    lmdb.InvalidError: (DamagedStore, "data.mdb is no LMDB file"),
    lmdb.InvalidParameterError: (HistopipeError, "LMDB was called wrongly"),
    lmdb.KeyExistsError: (HistopipeError, "a key was written twice"),
    lmdb.LockError: (MachineShort, "its lock file cannot be used"),
    lmdb.MapFullError: (MachineShort, "it is larger than the address space allowed to it"),
    lmdb.MapResizedError: (
        MachineShort,
        "another process made it larger than the address space here",
    ),
    lmdb.MemoryError: (MachineShort, "memory ran out"),
    lmdb.NotFoundError: (DamagedStore, "a database is missing"),
    lmdb.PageFullError: (DamagedStore, "a page is damaged"),
    lmdb.PageNotFoundError: (DamagedStore, "a page is missing"),
    lmdb.PanicError: (DamagedStore, "LMDB gave up on it"),
    lmdb.ProblemError: (DamagedStore, "LMDB found it inconsistent"),
    lmdb.ReadersFullError: (MachineShort, f"more than {MAX_READERS} readers have it open"),
    lmdb.ReadonlyError: (UsageError, "it was opened for reading only"),
    lmdb.TlsFullError: (MachineShort, "the process has too many thread-local slots in use"),
    lmdb.TxnFullError: (HistopipeError, "a transaction grew too large"),
    lmdb.VersionMismatchError: (UnknownVersion, "it was written by another version of LMDB"),
}
"""What each of LMDB's errors means to a user."""


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Turns LMDB's errors into ours, a full disk among them."""
    try:
        yield
    except lmdb.Error as error:
        raise _mapped(error, path) from error


def _mapped(error: lmdb.Error, path: Path) -> HistopipeError:
    full = _disk_is_full(path)
    text = str(error)
    if full and (isinstance(error, lmdb.DiskError) or _mentions(text, errno.EIO, errno.ENOSPC)):
        return MachineShort(
            f"the disk that holds {path} is full",
            found=full,
            todo="make room and run the same command again: what was complete stays",
        )
    causes: tuple[tuple[int, type[HistopipeError], str], ...] = (
        (errno.EACCES, UsageError, "may not be written or locked"),
        (errno.EPERM, UsageError, "may not be written or locked"),
        (errno.EROFS, UsageError, "lies on a read-only filesystem"),
        (errno.ENOENT, NothingToDo, "is not there"),
        (errno.ENOMEM, MachineShort, "needs more address space than `ulimit -v` allows"),
        (errno.ENOSPC, MachineShort, "lies on a full disk"),
    )
    for number, cause, what in causes:
        if _mentions(text, number):
            return cause(f"the store {path} {what}", found=text)
    kind, what = ERRORS.get(type(error), (DamagedStore, "LMDB cannot use it"))
    return kind(f"the store {path}: {what}", found=text)


def _mentions(text: str, *numbers: int) -> bool:
    return any(os.strerror(number) in text for number in numbers)


def _disk_is_full(path: Path) -> str | None:
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    stat = os.statvfs(existing)
    free = stat.f_bavail * stat.f_frsize
    return f"{free >> 20} MB free" if free < _FREE_LOW else None
