"""Which slides this run may work on, when several runs fill one store at once.

A claim is an open-file-description lock on one byte of `ingest.lock`, the byte of the slide's number. The kernel drops it
when its owner dies, however that happens; a process id would mean nothing across containers.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (which must be 0).
_FLOCK = struct.Struct("hhqqixxxx")


class Claims:
    """The claims of one run. Closing drops them all.

    Args:
        store: the store's folder, which exists.
    """

    def __init__(self, store: Path) -> None:
        self._file = os.open(store / "ingest.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def take(self, slide: int) -> bool:
        """Whether the slide is now this run's; False if another run is at it."""
        try:
            self._lock(fcntl.F_WRLCK, slide)
        except BlockingIOError:
            return False
        return True

    def release(self, slide: int) -> None:
        """Let other runs have the slide."""
        self._lock(fcntl.F_UNLCK, slide)

    def close(self) -> None:
        """Drop every claim."""
        os.close(self._file)

    def _lock(self, kind: int, slide: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slide, 1, 0))
