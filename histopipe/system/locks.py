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
    """Lock a folder, or a file, which is made if missing. A lock ends with its process, however that ends.

    On a network filesystem without locks every process gets the lock.

    Args:
        path: nothing is written to it.
        wait_seconds: how long to wait while another process has the lock; `math.inf` waits until it is free.

    Yields:
        Whether this process has the lock.

    Raises:
        OSError: the path cannot be opened.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield _lock_within(fd, wait_seconds)
    finally:
        os.close(fd)


def _lock_within(fd: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not lock_if_free(fd):
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def lock_if_free(fd: int) -> bool:
    """Lock an open file or folder unless another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN)
    return True
