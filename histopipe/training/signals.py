"""SIGTERM and Ctrl-C during a training, and when its state is to be saved."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self


class Requests(NamedTuple):
    """What a worker requests before the next step; above 0 for yes."""

    save: float = 0.0
    stop: float = 0.0


class StopSignals:
    """Turns SIGTERM and Ctrl-C into a request to stop after the current step. A second Ctrl-C interrupts at once.

    A context manager: it handles signals inside, if it is in the main thread. TensorFlow sets a handler of its own when workers
    meet, so enter it after that.

    Args:
        save_minutes: interval between two checkpoints.

    Attributes:
        stopping: a signal has come.
        saveable: there is something to save. Before that, a signal interrupts at once.
    """

    def __init__(self, save_minutes: float) -> None:
        self._seconds = 60 * save_minutes
        self._saved = time.monotonic()
        self._handlers: dict[int, Any] = {}
        self.stopping = self.saveable = False

    def requests(self) -> Requests:
        """Return what is due before the next step."""
        due = time.monotonic() - self._saved >= self._seconds
        return Requests(save=float(due), stop=float(self.stopping))

    def saved(self) -> None:
        """Note that the state has just been saved."""
        self._saved = time.monotonic()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.saveable or (self.stopping and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.stopping = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
