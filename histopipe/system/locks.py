"""Locks on folders, held by one process at a time."""

from __future__ import annotations

import fcntl


def lock_if_free(fd: int) -> bool:
    """Lock an open file or folder unless another process has; it is free again when that process ends, however it ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a network filesystem without locks
    return True
