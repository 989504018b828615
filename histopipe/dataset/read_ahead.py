"""Requests to the disk for the next batches while the current ones are decoded."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from histopipe.dataset.batch_sampler import BatchLoader

STEPS_AHEAD = 16
_KEPT_UP = 256
"""Number of steps for which requests continue after a step had to wait for the disk."""


class ReadAhead:
    """Loads batches, and requests the values of the following ones from the disk.

    A store in the page cache needs no requests, which would cost a few percent. Major page faults show whether a batch had to
    wait for the disk. `histopipe.store.reading` explains why the kernel cannot do this.

    Args:
        batches: batches to load.
        parts: parts of each step that are loaded here.
        last_step: first step that is not loaded any more.
        steps: number of steps to request in advance; 0 for none, None for `STEPS_AHEAD` while batches wait for the disk.
    """

    def __init__(
        self,
        batches: BatchLoader,
        parts: Sequence[int],
        last_step: int,
        steps: int | None = None,
    ) -> None:
        self._batches, self._parts, self._last = batches, parts, last_step
        self._distance = STEPS_AHEAD if steps is None else steps
        self._wanted_until = 0 if steps is None else (1 << 62)
        self._next = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "histopipe-read-ahead") if self._distance else None
        self._window_steps = -(-batches.order.window // batches.batch_size) + 1

    def load(self, step: int, part: int) -> tuple[Any, ...]:
        """Return the fields of a step's part."""
        if self._thread is None:
            return self._batches.values(step, part)
        if step < self._wanted_until:
            self._request_from(step + 1)
        before = _major_faults()
        values = self._batches.values(step, part)
        if _major_faults() > before:
            self._wanted_until = max(self._wanted_until, step + _KEPT_UP)
        return values

    def close(self) -> None:
        """Stop the requests."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _request_from(self, first: int) -> None:
        with self._lock:
            if first + self._distance < self._next - self._window_steps:
                self._next = first  # a new iteration
            begin, end = max(first, self._next), first + self._distance
            if begin < end:
                end = min(self._last, max(end, self._end_of_window(begin)))
                self._next = end
        if begin < end and self._thread is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: nothing more is wanted
                # An error in the thread is raised again when the step is loaded.
                self._thread.submit(self._batches.advise, range(begin, end), self._parts)

    def _end_of_window(self, step: int) -> int:
        """Return the first step after a step's window: neighbours on disk are requested together."""
        window = self._batches.order.window
        if not window:
            return 0
        epoch, step = divmod(step, self._batches.steps_per_epoch)
        end = (step * self._batches.batch_size // window + 1) * window
        steps = -(-end // self._batches.batch_size)
        return epoch * self._batches.steps_per_epoch + min(steps, self._batches.steps_per_epoch)


def _major_faults() -> int:
    """Return the number of page faults of this thread that waited for a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
