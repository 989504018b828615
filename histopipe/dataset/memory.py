"""Memory of batches: aligned, and used again for later batches."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
_KEPT = 4
"""Free buffers that are kept. While batches are read, one is freed whenever one is taken."""


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return a new uint8 array, aligned to 64 bytes so that TensorFlow uses it without a copy."""
    size = math.prod(shape)
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].reshape(shape)


class ReusedMemory:
    """Arrays whose memory is used again when nothing refers to them any more. Threads may share it.

    The kernel clears every page of new memory, which takes a tenth of the time to decode a batch. TensorFlow keeps an
    array until its last tensor is gone, so a buffer is never used while a batch in it is alive.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_KEPT)

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return a uint8 array of any content, aligned to a page."""
        size = math.prod(shape)
        memory = self._taken(size)
        # The base of every view of `whole` is `whole`, because its own base is not an array. So it lives as long as they.
        whole = np.frombuffer(memory, np.uint8)
        weakref.finalize(whole, self._free.append, memory).atexit = False
        return whole[:size].reshape(shape)

    def _taken(self, size: int) -> mmap.mmap:
        while True:
            try:
                memory = self._free.pop()
            except IndexError:  # private: a forked process must not share it
                return mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if len(memory) == max(1, size):
                return memory
