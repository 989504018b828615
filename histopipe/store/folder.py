"""Open or create the folder of a store for writing, and coordinate processes that write to one store."""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lmdb

from histopipe._version import __version__
from histopipe.errors import MachineShort, NothingToDo, SpecMismatch, UsageError
from histopipe.store.environment import Environment, open_environment
from histopipe.store.format import FORMAT_NAME, META, VERSION, to_json
from histopipe.store.meta import read_meta
from histopipe.system.files import Closing
from histopipe.tiling.spec import differences

_BEGUN_FILES = ("data.mdb", "lock.mdb", "ingest.lock")
_OWN_FILES = {*_BEGUN_FILES, "ingest.log", "ingest.csv"}


def open_for_change(path: Path) -> Environment:
    """Open an existing store for writing, before any `Store` of it in the same process.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion, UsageError, MachineShort: it cannot be written.
    """
    open_environment(path).close()  # a wrong path must not become a store
    environment = open_environment(path, write=True)
    try:
        with environment.read() as transaction:
            read_meta(transaction, environment.databases, "format", dict, path)
    except BaseException:
        environment.close()
        raise
    return environment


def open_or_make(path: Path, spec: Mapping[str, Any]) -> Environment:
    """Open a store of a spec for writing; raises as `StoreWriter`."""
    is_new = _make_folder(path)
    try:
        environment = open_environment(path, write=True)
    except MachineShort:
        if is_new:
            for name in _BEGUN_FILES:
                (path / name).unlink(missing_ok=True)
            path.rmdir()
        raise

    def work(transaction: lmdb.Transaction) -> None:
        databases = environment.databases
        if transaction.stat(databases[META])["entries"]:
            check_spec(read_meta(transaction, databases, "spec", dict, path), spec, path)
            return
        for name, value in _new_meta(spec).items():
            transaction.put(name.encode(), to_json(value), db=databases[META])

    try:
        environment.change(work)
    except BaseException:
        environment.close()
        raise
    return environment


def check_spec(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuse to put patches of one spec into a store of another, with SpecMismatch."""
    if found != wanted:
        raise SpecMismatch(
            f"{path} was made with other settings",
            found="; ".join(differences(found, wanted)),
            todo="use the store's settings, or another --out",
        )


def _new_meta(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": {"name": FORMAT_NAME, "version": VERSION},
        "required_features": [],
        "uuid": str(uuid.uuid4()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "histopipe_version": __version__,
        "spec": dict(spec),
        "classes": [],
        "next_number": 0,
    }


def _make_folder(path: Path) -> bool:
    """Make a store's folder; False if it was there. Something else than a store is refused, and nothing is written into it."""
    if path.is_dir():
        others = [p.name for p in path.iterdir() if p.name not in _OWN_FILES]
        if others and not (path / "data.mdb").exists():
            raise UsageError(
                f"{path} is a folder of something else",
                found=", ".join(sorted(others)[:3]),
                expected="a store, an empty folder, or a new path",
                todo="choose another --out",
            )
    elif path.exists():
        raise UsageError(f"{path} is a file", expected="a folder", todo="choose another --out")
    try:
        environment = open_environment(path)  # for reading
    except NothingToDo:
        made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path} cannot be made", found=str(error)) from error
        return made
    with environment, environment.read() as transaction:
        if environment.databases[META] is not None:
            if transaction.stat(environment.databases[META])["entries"]:
                read_meta(transaction, environment.databases, "format", dict, path)
        elif transaction.stat()["entries"]:
            raise UsageError(
                f"{path} is an LMDB environment of something else", todo="choose another --out"
            )
    return False


_LOCK = "ingest.lock"
_WRITERS = 1 << 40

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (which must be 0).
_FLOCK = struct.Struct("hhqqixxxx")


class Claims(Closing):
    """The slides of a store that one process is ingesting, so that several processes can share a store. Closing drops all claims.

    A claim is an open-file-description lock on one byte of `ingest.lock`: the byte at the slide's number. The kernel drops it
    when its process dies; a process id would mean nothing in another container. A process that writes to the store shares
    the lock of a byte after all slides. A process that replaces the store's file must hold that lock alone.
    """

    def __init__(self, store: Path) -> None:
        self._file = _open(store)

    def take(self, slide: int) -> bool:
        """Claim a slide. Return False if another process is ingesting it."""
        return _lock(self._file, fcntl.F_WRLCK, slide)

    def release(self, slide: int) -> None:
        """Let other runs have the slide."""
        _lock(self._file, fcntl.F_UNLCK, slide)

    def close(self) -> None:
        """Drop every claim."""
        os.close(self._file)


class WriteLease(Closing):
    """The right to write a store, shared with other processes, or alone; held until it is closed.

    If the lock's file cannot be made, nothing is locked: LMDB then says that the store cannot be written.

    Raises:
        UsageError: another process has it alone, or has the store open for writing when it is wanted alone.
    """

    def __init__(self, store: Path, *, alone: bool = False) -> None:
        self._file = -1
        while True:
            try:
                store.mkdir(exist_ok=True)
                self._file = _open(store)
            except OSError as error:
                if alone:
                    raise UsageError(f"{store} cannot be written", found=error.strerror) from error
                return
            try:
                free = _lock(self._file, fcntl.F_WRLCK if alone else fcntl.F_RDLCK, _WRITERS)
            except OSError:
                return  # a filesystem without locks
            if not free:
                self.close()
                doing = "written" if alone else "rewritten"
                raise UsageError(
                    f"{store} is being {doing} by another process",
                    todo="wait until that one is done",
                )
            if self._is_in(store):
                return
            self.close()  # another store was put in its place just now

    def close(self) -> None:
        """Give it back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _is_in(self, store: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), (store / _LOCK).stat())
        except FileNotFoundError:
            return False


def _open(store: Path) -> int:
    return os.open(store / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _lock(file: int, kind: int, byte: int) -> bool:
    """Lock a byte or unlock it; False if another process has it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, by POSIX
        return False
    return True
