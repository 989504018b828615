"""The LMDB environment of a store, opened once per process.

LMDB forbids opening an environment twice in a process, and using it in a forked child. Reading a truncated file is a
SIGBUS. This module handles all three.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from histopipe.errors import NothingToDo, UsageError, reported_as, strerror
from histopipe.store.claims import lock_for_writing
from histopipe.store.data_file import check_length, mapped_errors, open_handle, read_map_size
from histopipe.store.format import META, SLIDES, slide_key
from histopipe.system.files import Closing
from histopipe.system.folders import DATA, FolderKind, folder_kind

T = TypeVar("T")
PART_SUFFIX = ".lmdb"
"""End of the names of parts in a folder of parts."""


@dataclass(slots=True)
class Environment(Closing):
    """An open environment, shared by all its users in this process.

    Only `open_environment` creates it. Close it as often as it was opened.

    Attributes:
        path: path as passed by the user, for messages.
        real_path: absolute path without links.
        databases: databases by name, also those of a later version; None for a missing one of this version.
        descriptor: file descriptor of data.mdb, for `posix_fadvise`. Data is read through the map.
        users: number of times that it was opened and not yet closed.
        pid: process that opened it. Other processes must open it again.
        generation: number of times that the map was moved in memory because the file outgrew it.
    """

    path: Path
    real_path: str
    writable: bool
    handle: lmdb.Environment
    databases: dict[bytes, Any]
    descriptor: int
    _resources: ExitStack
    users: int = 1
    pid: int = field(default_factory=os.getpid)
    generation: int = 0
    _readers: int = 0
    _idle: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction]:
        """Begin a read transaction. Do not nest two in one thread.

        Its values are views that are valid until it ends. An environment that is closed before then closes at its end.
        """
        with _registry_lock:
            if self.users == 0:
                raise UsageError(f"the store {self.path} is closed", todo="open it again")
            self.users += 1
        with self, mapped_errors(self.path):
            transaction = self._begin_read()
            try:
                with transaction:
                    yield transaction
            finally:
                self._end_read()

    def change(self, work: Callable[[lmdb.Transaction], T]) -> T:
        """Run `work` in one write transaction, and return its result. If the map is full, enlarge it and repeat.

        The changes are durable afterwards. An exception rolls them back.
        """
        with mapped_errors(self.path):
            while True:
                try:
                    with self.handle.begin(write=True, buffers=True) as transaction:
                        return work(transaction)
                except lmdb.MapFullError:
                    self._remap(self.generation, self.handle.info()["map_size"] * 2)

    def used_bytes(self) -> int:
        """Return the bytes of the pages in use. The rest of the file is free."""
        with self.read() as transaction:
            stats = [
                transaction.stat(),
                *(transaction.stat(db) for db in self.databases.values() if db is not None),
            ]
        return int(
            stats[0]["psize"]
            * sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        )

    def database(self, name: bytes, transaction: lmdb.Transaction) -> Any:
        """Return a database of any version. A write transaction creates it if it is missing."""
        if self.databases.get(name) is None:
            self.databases[name] = self.handle.open_db(name, txn=transaction)
        return self.databases[name]

    def slide_databases(self) -> list[Any]:
        """Return the databases with entries of slides, except for `slides`. All their keys begin with slide numbers."""
        return [
            db
            for name, db in self.databases.items()
            if db is not None and name not in (META, SLIDES)
        ]

    def close(self) -> None:
        """Release the environment. The call of the last user closes it."""
        with _registry_lock:
            self.users -= 1
            if self.users == 0 and self.pid == os.getpid():
                _registry.pop(self.real_path, None)
                self._resources.close()

    def close_later(self) -> None:
        """Close it at the next `open_environment`. For finalisers, which may run in a thread that holds the lock."""
        _to_close.append(self)

    def _begin_read(self) -> lmdb.Transaction:
        while True:
            with self._idle:
                self._readers += 1
                generation = self.generation
            try:
                return self.handle.begin(buffers=True)
            except lmdb.MapResizedError:
                self._end_read()
                self._remap(generation, read_map_size(Path(self.real_path, DATA).stat().st_size))
            except BaseException:
                self._end_read()
                raise

    def _end_read(self) -> None:
        with self._idle:
            self._readers -= 1
            self._idle.notify_all()

    def _remap(self, generation: int, size: int) -> None:
        """Resize the map when no view of it is in use, unless another thread has done so."""
        with self._idle:
            while self._readers:
                self._idle.wait()
            if self.generation == generation:
                self.handle.set_mapsize(size)
                self.generation += 1


_registry: dict[str, Environment] = {}
_registry_lock = threading.Lock()
_to_close: deque[Environment] = deque()
"""Environments to close at the next `open_environment`."""
_unusable: set[str] = set()
"""In a forked child: environments that the parent was using at the fork."""


def _close_in_child() -> None:
    """Close the parent's environments in a forked child, so that the child can open them again.

    An open transaction has a slot in the lock file. Closing would free that slot, which the parent still uses.
    """
    global _registry_lock  # noqa: PLW0603 - another thread of the parent may have held it
    _registry_lock = threading.Lock()
    for path, environment in _registry.items():
        if environment.writable or environment._readers:
            _unusable.add(path)
        else:
            environment.handle.close()
    _registry.clear()


os.register_at_fork(after_in_child=_close_in_child)


def open_environment(path: Path, *, write: bool = False) -> Environment:
    """Open the environment at a path. All users in a process get the same object.

    Raises:
        NothingToDo: there is no store, and `write` is False.
        DamagedStore: its file is truncated, or is not an LMDB file.
        UsageError: `write` is True, and it is open for reading in this process.
        MachineShort: there is no address space, or no permission to lock.
    """
    real_path = os.path.realpath(path)
    if write:
        gc.collect()  # readers that are no longer used may be part of a cycle, such as data sets of TensorFlow
    while _to_close:
        _to_close.popleft().close()
    with _registry_lock:
        if real_path in _unusable:
            raise UsageError(
                f"{path} cannot be opened in this process: it was in use when the process was forked",
                todo="start processes by spawn or forkserver: multiprocessing.get_context('spawn')",
            )
        shared = _registry.get(real_path)
        if shared is not None:
            if write and not shared.writable:
                raise UsageError(
                    f"{path} is open for reading in this process", todo="close that store first"
                )
            shared.users += 1
            return shared
        _registry[real_path] = environment = _open(path, real_path, write=write)
        return environment


def _open(path: Path, real_path: str, *, write: bool) -> Environment:
    data = path / DATA
    with reported_as(UsageError, f"{data} cannot be read", OSError, reason=strerror):
        # The file is empty if a writer has just started, or was killed.
        begun = data.exists() and data.stat().st_size > 0
        if begun:
            check_length(data)
    if not begun and not write:
        raise no_store(path)
    with ExitStack() as resources:
        if write:
            resources.enter_context(lock_for_writing(path))
        with mapped_errors(path):
            handle, databases = open_handle(path, write=write)
        resources.callback(handle.close)
        descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        resources.callback(os.close, descriptor)
        return Environment(
            path, real_path, write, handle, databases, descriptor, resources.pop_all()
        )


def delete_entries(environment: Environment, slide: int) -> None:
    """Delete all entries of a slide except its record, in small transactions, since none of them is visible."""
    while environment.change(
        lambda transaction: sum(
            delete_slide(transaction, database, slide, most=20_000)
            for database in environment.slide_databases()
        )
    ):
        pass


def delete_slide(
    transaction: lmdb.Transaction,
    database: Any,
    slide: int,
    *,
    first: bytes = b"",
    most: int | None = None,
) -> int:
    """Delete the entries of a slide in a database from the key `first` on, at most `most` of them; return their number."""
    prefix, count = slide_key(slide), 0
    with transaction.cursor(db=database) as cursor:
        has_entry = cursor.set_range(first or prefix)
        while has_entry and bytes(cursor.key()).startswith(prefix) and count != most:
            has_entry = cursor.delete() and bool(cursor.key())
            count += 1
    return count


def no_store(path: Path) -> NothingToDo:
    """Return the error for a path that is not a store. Only commands that read data sets accept a folder of parts."""
    if folder_kind(path) is FolderKind.PARTS:
        return NothingToDo(
            f"no store at {path}",
            found="a folder of parts",
            expected="one store",
            todo="pass one of its parts, or merge them into one store with `histopipe merge`",
        )
    if any(path.glob(f"part-*{PART_SUFFIX}")):
        return NothingToDo(
            f"no store at {path}",
            found="parts of an ingest that are not joined",
            expected="a folder of parts with its catalog",
            todo="run the command of the parts with --join",
        )
    return NothingToDo(
        f"no store at {path}",
        expected="a folder with a data.mdb, created by `histopipe ingest`",
        todo="check the path",
    )
