"""The LMDB environment under a store: opened once a process, its errors made ours.

LMDB forbids opening one environment twice in a process, kills the process by SIGBUS where the file is shorter than its
pages say, and reports a full disk as an I/O error. All three are dealt with here and nowhere else.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from histopipe.store.format import DATABASES

MAP_SIZE = 1 << 44
"""16 TiB of address space. The file grows as it is used; this only bounds it."""

_SMALLEST_MAP = 1 << 28
_MAX_READERS = 4096
_MAX_DATABASES = 32
_LOCK_BYTES = 128 + 64 * _MAX_READERS
_FREE_LOW = 16 << 20
"""A disk with less free space than this counts as full when a write fails."""

ERRORS: dict[type[lmdb.Error], tuple[type[HistopipeError], str]] = {
    lmdb.BadChecksumError: (DamagedStore, "a page is damaged"),
    lmdb.BadDbiError: (DamagedStore, "a database changed under a transaction"),
    lmdb.BadRslotError: (HistopipeError, "a read transaction was used by two threads"),
    lmdb.BadTxnError: (HistopipeError, "a transaction went on after an error"),
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
    lmdb.ReadersFullError: (MachineShort, f"more than {_MAX_READERS} readers have it open"),
    lmdb.ReadonlyError: (UsageError, "it was opened for reading only"),
    lmdb.TlsFullError: (MachineShort, "the process has too many thread-local slots in use"),
    lmdb.TxnFullError: (HistopipeError, "a transaction grew too large"),
    lmdb.VersionMismatchError: (UnknownVersion, "it was written by another version of LMDB"),
}
"""What each of LMDB's errors means to a user."""


@dataclass(slots=True)
class Environment:
    """An open environment, shared by all that use it in this process.

    Made by `open_environment` only. Close it as often as it was opened.
    """

    path: Path
    writable: bool
    handle: lmdb.Environment
    databases: dict[bytes, Any] = field(default_factory=dict)
    users: int = 1

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction]:
        """A read transaction. Its values are views that must not outlive it."""
        with mapped_errors(self.path), self._begin(write=False) as transaction:
            yield transaction

    @contextmanager
    def write(self) -> Iterator[lmdb.Transaction]:
        """A write transaction: durable once left, undone by an exception."""
        with mapped_errors(self.path), self._begin(write=True) as transaction:
            yield transaction

    def grow(self) -> None:
        """Double the map, which only matters where address space is limited. No transaction may be open."""
        with mapped_errors(self.path):
            self.handle.set_mapsize(self.handle.info()["map_size"] * 2)

    def close(self) -> None:
        """Give it back; the last user's call closes it."""
        with _registry_lock:
            self.users -= 1
            if self.users == 0:
                _registry.pop(_registry_key(self.path), None)
                self.handle.close()

    def _begin(self, *, write: bool) -> lmdb.Transaction:
        try:
            return self.handle.begin(write=write, buffers=True)
        except lmdb.MapResizedError:
            self.handle.set_mapsize(0)  # take over the size another process gave it
            return self.handle.begin(write=write, buffers=True)


_registry: dict[tuple[int, str], Environment] = {}
_registry_lock = threading.Lock()


def _registry_key(path: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(path)


def open_environment(path: Path, *, write: bool = False) -> Environment:
    """The environment at a path; the same object for all users in a process.

    Raises:
        NothingToDo: there is none, and it is opened for reading.
        DamagedStore: its file is cut short, or no LMDB file.
        UsageError: it is open for reading in this process, and wanted for writing.
        MachineShort: no address space, no permission to lock.
    """
    with _registry_lock:
        shared = _registry.get(_registry_key(path))
        if shared is not None:
            if write and not shared.writable:
                raise UsageError(
                    f"{path} is open for reading in this process", todo="close that store first"
                )
            shared.users += 1
            return shared
        environment = _open(path, write=write)
        _registry[_registry_key(path)] = environment
        return environment


def _open(path: Path, *, write: bool) -> Environment:
    data = path / "data.mdb"
    try:
        # Empty where a writer has only just begun, or was killed.
        begun = data.exists() and data.stat().st_size > 0
        if begun:
            _check_length(data)
    except OSError as error:
        raise UsageError(f"{data} cannot be read", found=error.strerror) from error
    if not begun and not write:
        raise NothingToDo(
            f"no store at {path}",
            expected="a folder with a data.mdb, made by `histopipe ingest`",
            todo="check the path",
        )
    with mapped_errors(path):
        if write or os.access(path, os.W_OK):
            _allocate_lock(path)
        handle = _open_handle(path, write=write)
        if write:
            handle.reader_check()  # free the slots of readers that were killed
        environment = Environment(path, write, handle)
        try:
            for name in DATABASES:
                environment.databases[name] = _open_database(handle, name, create=write)
        except BaseException:
            handle.close()
            raise
    return environment


def _allocate_lock(path: Path) -> None:
    """Give LMDB's lock file its disk space: LMDB maps it sparse, and a full disk would then be a SIGBUS."""
    try:
        lock = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        try:
            os.posix_fallocate(lock, 0, _LOCK_BYTES)
        finally:
            os.close(lock)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineShort(f"the disk that holds {path} is full", todo="make room") from error
        # Anything else is LMDB's to tell.


def _open_handle(path: Path, *, write: bool) -> lmdb.Environment:
    size = MAP_SIZE
    while True:
        try:
            return lmdb.open(
                str(path),
                map_size=size,
                max_dbs=_MAX_DATABASES,
                max_readers=_MAX_READERS,
                readonly=not write,
                create=write,
                # Without the lock a reader beside a writer sees wrong data, so only where no writer can be.
                lock=write or os.access(path, os.W_OK),
                readahead=write,
            )
        except lmdb.Error as error:
            if size <= _SMALLEST_MAP or not _out_of_address_space(error):
                raise
            size //= 2


def _out_of_address_space(error: lmdb.Error) -> bool:
    return isinstance(error, lmdb.MemoryError) or os.strerror(errno.ENOMEM) in str(error)


def _open_database(handle: lmdb.Environment, name: bytes, *, create: bool) -> Any:
    try:
        return handle.open_db(name, create=create)
    except lmdb.NotFoundError:
        return None  # an environment without our databases: told by whoever reads its meta


def _check_length(data: Path) -> None:
    """Refuse a file shorter than its newest meta page says: reading past its end would be a SIGBUS."""
    length = data.stat().st_size
    with data.open("rb") as file:
        metas = [_meta(file.read(4096))]
        if metas[0] is not None:
            file.seek(metas[0][2])
            metas.append(_meta(file.read(4096)))
    known = [meta for meta in metas if meta is not None]
    if not known:
        raise DamagedStore(f"{data} is no LMDB file", found=f"{length} bytes of something else")
    _, last_page, page_size = max(known)
    if length < (last_page + 1) * page_size:
        raise DamagedStore(
            f"{data} is cut short",
            found=f"{length} bytes",
            expected=f"at least {(last_page + 1) * page_size}",
            todo="copy the store again, or ingest anew (a copy taken during an ingest is no store)",
        )


def _meta(page: bytes) -> tuple[int, int, int] | None:
    """Transaction number, last page and page size of an LMDB meta page (lmdb 0.9, struct MDB_meta)."""
    if len(page) < 152:
        return None
    magic, version = struct.unpack_from("<II", page, 16)
    (page_size,) = struct.unpack_from("<I", page, 40)
    last_page, transaction = struct.unpack_from("<QQ", page, 136)
    if magic != 0xBEEFC0DE or version != 1 or not 256 <= page_size <= 65536:
        return None
    return transaction, last_page, page_size


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
