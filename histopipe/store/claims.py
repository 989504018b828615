"""Locks that let several processes use one store at the same time.

A claim is an open-file-description lock on one byte of `ingest.lock`. The slide's number is the offset of the byte. The
kernel releases the lock when the process dies; a process id would not be valid in another container. A process that
writes to the store holds a shared lock on a byte after those of all slides. To replace the store's file, it must be
exclusive.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.system.files import Closing

_LOCK = "ingest.lock"
_WRITERS = 1 << 40

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (which must be 0).
_FLOCK = struct.Struct("hhqqixxxx")


class Claims(Closing):
    """Claims of one run on slides of a store. Closing releases all of them."""

    def __init__(self, store: Path) -> None:
        self._file = _open(store)

    def take(self, slide: int) -> bool:
        """Claim a slide. Return False if another process is ingesting it."""
        return _lock(self._file, fcntl.F_WRLCK, slide)

    def release(self, slide: int) -> None:
        """Release the claim on a slide."""
        _lock(self._file, fcntl.F_UNLCK, slide)

    def close(self) -> None:
        """Release all claims."""
        os.close(self._file)


class WriteLease(Closing):
    """Lock for writing a store, shared or exclusive (`alone`); held until it is closed.

    If the lock file cannot be created, nothing is locked: LMDB then reports that the store cannot be written.

    Raises:
        UsageError: another process holds an exclusive lock; with `alone`, another process holds any lock.
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
                    todo="wait until that process has finished",
                )
            if self._is_in(store):
                return
            self.close()  # another process has just replaced the store

    def close(self) -> None:
        """Release the lock."""
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
    """Lock or unlock a byte; return False if another process has locked it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, by POSIX
        return False
    return True
