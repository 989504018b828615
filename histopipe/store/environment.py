"""The LMDB environment under a store, opened once a process.

LMDB forbids opening one environment twice in a process, is not to be used by a forked child, and kills the process by SIGBUS
where the file is shorter than its pages say. All three are dealt with here and nowhere else.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from histopipe.errors import MachineShort, NothingToDo, UsageError
from histopipe.store.data_file import check_length
from histopipe.store.format import DATABASES
from histopipe.store.lmdb_errors import MAX_READERS, mapped_errors

MAP_SIZE = 1 << 44
"""16 TiB of address space for a writer. The file grows as it is used; this only bounds it."""

_SMALLEST_MAP = 1 << 28
_LONGEST_READ = 5.0
_READ_MAP, _READ_ROOM = 1 << 36, 8
"""A reader's map: 64 GiB, or eight times the file. A process has 128 TiB, so that eight stores of 16 TiB would be all it
could open."""
_MAX_DATABASES = 32
_LOCK_BYTES = 128 + 64 * MAX_READERS


@dataclass(slots=True)
class Environment:
    """An open environment, shared by all that use it in this process.

    Made by `open_environment` only. Close it as often as it was opened.

    Attributes:
        path: as it was given, for messages.
        real_path: absolute and without links, whatever the working folder is by then.
        pid: the process that opened it. Another one must open its own, which `Store` does.
        generation: how often its map was put elsewhere in memory, which it is when the file outgrows it.
    """

    path: Path
    real_path: str
    writable: bool
    handle: lmdb.Environment
    databases: dict[bytes, Any] = field(default_factory=dict)
    users: int = 1
    pid: int = field(default_factory=os.getpid)
    generation: int = 0
    _readers: int = 0
    _idle: threading.Condition = field(default_factory=threading.Condition)
    _descriptor: int = -1

    @property
    def descriptor(self) -> int:
        """data.mdb, open for reading; for advice only, since data is read through the map."""
        with _registry_lock:
            if self._descriptor < 0:
                self._descriptor = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptor

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction]:
        """A read transaction; not within another one of the same thread.

        Its values are views that must not outlive it. An environment that is closed meanwhile closes when it ends.
        """
        self._take()
        try:
            with mapped_errors(self.path):
                transaction = self._begin_read()
                try:
                    with transaction:
                        yield transaction
                finally:
                    self._leave()
        finally:
            self.close()

    @contextmanager
    def write(self) -> Iterator[lmdb.Transaction]:
        """A write transaction: durable once left, undone by an exception."""
        with mapped_errors(self.path), self.handle.begin(write=True, buffers=True) as transaction:
            yield transaction

    def grow(self) -> None:
        """Double the map, which only matters where address space is limited."""
        with mapped_errors(self.path):
            self._remap(self.generation, self.handle.info()["map_size"] * 2)

    def close(self) -> None:
        """Give it back; the last user's call closes it."""
        with _registry_lock:
            self.users -= 1
            if self.users == 0 and self.pid == os.getpid():
                _registry.pop(self.real_path, None)
                self.handle.close()
                if self._descriptor >= 0:
                    os.close(self._descriptor)

    def close_later(self) -> None:
        """As `close`, for finalisers: these run anywhere, even in a thread that holds the lock."""
        _leaving.append(self)

    def pause(self) -> None:
        """Begin no read until `go_on`, and wait for those under way, but not for ever: this thread's own cannot end."""
        self._idle.acquire()
        self._idle.wait_for(lambda: self._readers == 0, _LONGEST_READ)

    def go_on(self) -> None:
        """After `pause`."""
        self._idle.release()

    def abandon(self) -> None:
        """In a forked child, after `pause` in its parent: close what can be closed without touching the parent's."""
        if self.writable or self._readers:
            _lost.add(self.real_path)
        else:
            self.handle.close()

    def _take(self) -> None:
        with _registry_lock:
            if self.users == 0:
                raise UsageError(f"the store {self.path} is closed", todo="open it again")
            self.users += 1

    def _begin_read(self) -> lmdb.Transaction:
        while True:
            with self._idle:
                self._readers += 1
                generation = self.generation
            try:
                return self.handle.begin(buffers=True)
            except lmdb.MapResizedError:
                self._leave()
                self._remap(generation, _read_map_size(self._data.stat().st_size))
            except BaseException:
                self._leave()
                raise

    @property
    def _data(self) -> Path:
        return Path(self.real_path) / "data.mdb"

    def _leave(self) -> None:
        with self._idle:
            self._readers -= 1
            self._idle.notify_all()

    def _remap(self, generation: int, size: int) -> None:
        """Give the map another size, once no view of it is in use and unless another thread has done so."""
        with self._idle:
            while self._readers:
                self._idle.wait()
            if self.generation == generation:
                self.handle.set_mapsize(size)
                self.generation += 1


_registry: dict[str, Environment] = {}
_registry_lock = threading.Lock()
_leaving: deque[Environment] = deque()
"""To be closed when next an environment is opened."""
_lost: set[str] = set()
"""In a forked child: what the parent was reading just then."""


def _before_fork() -> None:
    """No read may be under way: its slot in the lock file would be shared with the child, and given back by it."""
    _registry_lock.acquire()
    for environment in _registry.values():
        environment.pause()


def _after_fork() -> None:
    for environment in _registry.values():
        environment.go_on()
    _registry_lock.release()


def _after_fork_in_child() -> None:
    """The parent's environments are of no use here; LMDB lets them be opened anew only once they are closed."""
    for environment in _registry.values():
        environment.abandon()
    _registry.clear()
    _registry_lock.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)


def _registry_key(path: Path) -> str:
    return os.path.realpath(path)


def open_environment(path: Path, *, write: bool = False) -> Environment:
    """The environment at a path; the same object for all users in a process.

    Raises:
        NothingToDo: there is none, and it is opened for reading.
        DamagedStore: its file is cut short, or no LMDB file.
        UsageError: it is open for reading in this process, and wanted for writing.
        MachineShort: no address space, no permission to lock.
    """
    while _leaving:
        _leaving.popleft().close()
    with _registry_lock:
        if _registry_key(path) in _lost:
            raise UsageError(
                f"{path} was being read or written when this process was forked, and cannot be opened in it",
                todo="start processes by spawn or forkserver: multiprocessing.get_context('spawn')",
            )
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
            check_length(data)
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
        environment = Environment(path, _registry_key(path), write, handle)
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
    size = MAP_SIZE if write else _read_map_size((path / "data.mdb").stat().st_size)
    while True:
        try:
            return lmdb.open(
                str(path),
                map_size=size,
                max_dbs=_MAX_DATABASES,
                max_readers=MAX_READERS,
                readonly=not write,
                create=write,
                # Without the lock a reader beside a writer sees wrong data, so only where no writer can be.
                lock=write or os.access(path, os.W_OK),
                max_spare_txns=0,  # a spare one could not be left behind by a fork
                readahead=write,
            )
        except lmdb.Error as error:
            if size <= _SMALLEST_MAP or not _out_of_address_space(error):
                raise
            size //= 2


def _read_map_size(length: int) -> int:
    return min(MAP_SIZE, max(_READ_MAP, _READ_ROOM * length))


def _out_of_address_space(error: lmdb.Error) -> bool:
    return isinstance(error, lmdb.MemoryError) or os.strerror(errno.ENOMEM) in str(error)


def _open_database(handle: lmdb.Environment, name: bytes, *, create: bool) -> Any:
    try:
        return handle.open_db(name, create=create)
    except lmdb.NotFoundError:
        return None  # an environment without our databases: told by whoever reads its meta
