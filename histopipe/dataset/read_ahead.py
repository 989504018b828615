"""Asking a disk for the batches to come while those at hand are decoded."""

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
"""Steps for which the asking goes on after one had to wait for the disk."""


class ReadAhead:
    """Loads batches, and asks the disk for those that follow while values come from it.

    A store in the page cache needs no asking, which would cost a few percent. Whether it is there is told by major page faults,
    those that waited for a disk.

    Args:
        batches: what is loaded.
        parts: those of each step that are loaded here.
        last_step: the one that nothing is wanted from on.
        steps: how many to ask for ahead; 0 for none, None for `STEPS_AHEAD` while the disk is waited for.
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
        self._asker = ThreadPoolExecutor(1, "histopipe-read-ahead") if self._distance else None
        self._window_steps = -(-batches.order.window // batches.batch_size) + 1
        self.asked_bytes = 0

    def load(self, step: int, part: int) -> tuple[Any, ...]:
        """The fields of a step's part."""
        if self._asker is None:
            return self._batches.values(step, part)
        if step < self._wanted_until:
            self._ask_from(step + 1)
        before = _major_faults()
        values = self._batches.values(step, part)
        if _major_faults() > before:
            self._wanted_until = max(self._wanted_until, step + _KEPT_UP)
        return values

    def close(self) -> None:
        """Ask no more."""
        if self._asker is not None:
            self._asker.shutdown(wait=True, cancel_futures=True)

    def _ask_from(self, first: int) -> None:
        with self._lock:
            if first + self._distance < self._next - self._window_steps:
                self._next = first  # begun anew
            begin, end = max(first, self._next), first + self._distance
            if begin < end:
                end = min(self._last, max(end, self._whole_window(begin)))
                self._next = end
        if begin < end and self._asker is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: nothing more is wanted
                self._asker.submit(self._ask, range(begin, end))

    def _ask(self, steps: range) -> None:
        # An error here is met again, and told, by whoever loads the step.
        self.asked_bytes += self._batches.advise(steps, self._parts)

    def _whole_window(self, step: int) -> int:
        """The first step behind the window that a step lies in: neighbours on disk are asked for together."""
        window = self._batches.order.window
        if not window:
            return 0
        epoch, step = divmod(step, self._batches.steps_per_epoch)
        end = (step * self._batches.batch_size // window + 1) * window
        steps = -(-end // self._batches.batch_size)
        return epoch * self._batches.steps_per_epoch + min(steps, self._batches.steps_per_epoch)


def _major_faults() -> int:
    """Page faults of this thread that waited for a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
