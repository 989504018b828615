"""Locks on files and folders, which end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.system.files import make_folder, remove_parts
from histopipe.system.output import message

_SILENT_SECONDS = 0.7
"""Time after which a message names what a process waits for."""


@contextmanager
def locked(
    path: Path, *, wait_seconds: float = 0.0, shared: bool = False, in_use: str = ""
) -> Iterator[bool]:
    """Lock a folder, or a file, which is created if missing. Yield whether this process has the lock.

    Several processes can have a `shared` lock, while none has another one. A lock ends with its process. On a network
    filesystem without locks, every process gets the lock. With `math.inf`, wait until the lock is free. `in_use` is the
    message if it is not free within a second.

    Raises:
        OSError: the path cannot be opened.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    fd, start = os.open(path, flags | os.O_CLOEXEC, 0o666), time.monotonic()
    try:
        while not (free := _lock_if_free(fd, shared=shared)):
            waited = time.monotonic() - start
            if waited >= wait_seconds:
                break
            if in_use and waited > _SILENT_SECONDS:
                message(f"{in_use}: waiting up to {wait_seconds:.0f} s for it")
                in_use = ""
            time.sleep(0.05)
        yield free
    finally:
        os.close(fd)


@contextmanager
def locked_alone(
    path: Path, in_use: str, todo: str, *, wait_seconds: float = 0.0, shared: bool = False
) -> Iterator[None]:
    """Lock a folder or a file as `locked`.

    Raises:
        UsageError: another process has the lock. Its message is `in_use`, with the advice `todo`.
    """
    with locked(path, wait_seconds=wait_seconds, shared=shared, in_use=in_use) as free:
        if not free:
            raise UsageError(in_use, todo=todo)
        yield


def _lock_if_free(fd: int, *, shared: bool) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN)
    return True


UNLOCK_SECONDS = 5.0
"""Time for which a killed training may keep the lock on its folder."""


@contextmanager
def held(folder: Path, *, wait_seconds: float = UNLOCK_SECONDS) -> Iterator[None]:
    """Create a folder if it is missing, and lock it.

    Raises:
        UsageError: it cannot be created, or another process has locked it.
    """
    make_folder(folder)
    with locked_alone(
        folder,
        f"{folder} is in use by another process",
        "wait until it ends, or choose another --out",
        wait_seconds=wait_seconds,
    ):
        remove_parts(folder)
        yield
