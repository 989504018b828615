"""When a training pauses to save its state: by the clock, and when it is told to stop."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from histopipe.training.loop import Wishes


class Pauses:
    """Turns SIGTERM and Ctrl-C into a wish to stop behind the current step. A second Ctrl-C interrupts at once.

    A context manager: handlers are set within it, if it is the main thread's. TensorFlow sets one of its own when workers
    meet, so it is entered after that.

    Args:
        minutes: between two saves.

    Attributes:
        stopping: whether the training was told to stop.
        saveable: whether there is anything to save yet; before, a signal interrupts at once.
    """

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._saved = time.monotonic()
        self._handlers: dict[int, Any] = {}
        self.stopping = self.saveable = False

    def wishes(self) -> Wishes:
        """What is due before the next step."""
        due = time.monotonic() - self._saved >= self._seconds
        return Wishes(save=float(due), stop=float(self.stopping))

    def saved(self) -> None:
        """The state has just been saved."""
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
