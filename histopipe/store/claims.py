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
from contextlib import AbstractContextManager, nullcontext
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
        self._path = store / _LOCK
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def take(self, slide: int, *, shared: bool = False) -> bool:
        """Claim a slide, or another byte. Return False if another process has a conflicting claim."""
        return self._lock(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, slide)

    def release(self, slide: int) -> None:
        """Release the claim on a slide."""
        self._lock(fcntl.F_UNLCK, slide)

    def is_current(self) -> bool:
        """Return whether the store is still the one of these claims, and was not replaced by another process."""
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release all claims."""
        os.close(self._file)

    def _lock(self, kind: int, byte: int) -> bool:
        """Lock or unlock a byte; return False if another process has locked it."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, by POSIX
            return False
        return True


def lock_for_writing(store: Path, *, alone: bool = False) -> AbstractContextManager[object]:
    """Lock a store for writing, shared or exclusive (`alone`), until the result is closed.

    If the lock file cannot be created, nothing is locked: LMDB then reports that the store cannot be written.

    Raises:
        UsageError: another process holds an exclusive lock; with `alone`, another process holds any lock.
    """
    while True:
        try:
            store.mkdir(exist_ok=True)
            claims = Claims(store)
        except OSError as error:
            if alone:
                raise UsageError(f"{store} cannot be written", found=error.strerror) from error
            return nullcontext()
        try:
            is_free = claims.take(_WRITERS, shared=not alone)
        except OSError:
            return claims  # a filesystem without locks
        if is_free and claims.is_current():
            return claims
        claims.close()  # if it is free, another process has just replaced the store
        if not is_free:
            raise UsageError(
                f"{store} is being {'written' if alone else 'rewritten'} by another process",
                todo="wait until that process has finished",
            )
