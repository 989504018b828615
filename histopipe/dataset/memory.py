"""Memory of batches: aligned, and used again for later batches."""

from __future__ import annotations

import math
import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
_KEPT = 4
"""Free buffers that are kept. While batches are read, one is freed whenever one is taken."""
_MOST = 24
"""Buffers that are used again, of those in use at the same time: enough for the calls of 16 cores."""


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
        self._lock = threading.Lock()
        self._buffers: list[tuple[mmap.mmap, weakref.ref[NDArray[np.uint8]]]] = []

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return a uint8 array of any content, aligned to a page."""
        size = math.prod(shape)
        length = max(1, size)
        with self._lock:
            # Not by a callback when an array ends: Ctrl-C during a callback would be lost.
            free = [buffer for buffer in self._buffers if buffer[1]() is None]
            ended = {id(memory) for memory, _ in free}
            used = [buffer for buffer in self._buffers if id(buffer[0]) not in ended]
            memory = next((memory for memory, _ in free if len(memory) == length), None)
            if memory is None:  # private: a forked process must not share it
                memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # The base of every view of `whole` is `whole`, because its own base is no array: it lives as long as they.
            whole = np.frombuffer(memory, np.uint8)
            kept = [buffer for buffer in free if buffer[0] is not memory][-_KEPT:]
            self._buffers = [*used, (memory, weakref.ref(whole)), *kept][:_MOST]
        return whole[:size].reshape(shape)
