"""Locks on files and folders, each held by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.05


@contextmanager
def locked(path: Path, *, wait_seconds: float = 0.0) -> Iterator[bool]:
    """Lock a folder, or a file, which is created if missing. Yields whether this process has the lock.

    A lock ends with its process. On a network filesystem without locks every process gets it. With `math.inf`, it waits
    until the lock is free.

    Raises:
        OSError: the path cannot be opened.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        until = time.monotonic() + wait_seconds
        while not (free := _lock_if_free(fd)) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        yield free
    finally:
        os.close(fd)


def _lock_if_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN)
    return True
