"""Messages from the process of a training to its supervisor, including progress.

A message is a name and a value. Names are "cluster" (the workers), "started" (training starts), "beat" (it continues),
"micro_batch" (size of micro-batches), "epoch" (its row in `history.csv`), "restart" (a new process may continue) and
"progress" (bars and lines to show).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from histopipe.system.progress import Bar, Progress

Report = Callable[[str, Any], None]
"""Sends a message."""
_SECONDS_BETWEEN_UPDATES = 0.1


def one_at_a_time(report: Report) -> Report:
    """Return a `Report` that several threads may call."""
    lock = threading.Lock()

    def send(name: str, value: Any) -> None:
        with lock:
            report(name, value)

    return send


class ReportedProgress:
    """Progress in the process of a training, sent to its supervisor."""

    def __init__(self, report: Report) -> None:
        self._report, self._numbers = report, itertools.count()

    def bar(self, title: str, **options: Any) -> Bar:
        """Start a bar."""
        number = next(self._numbers)
        self._report("progress", ("bar", number, {"title": title, **options}))
        return _ReportedBar(self._report, number, options.get("done", 0))

    def message(self, text: str) -> None:
        """Show a line of text."""
        self._report("progress", ("message", 0, {"text": text}))


class _ReportedBar(Bar):
    def __init__(self, report: Report, number: int, done: int) -> None:
        super().__init__(done)
        self._report, self._number, self._sent = report, number, 0.0

    def update(self, done: int, total: int | None = None) -> None:
        self._done = done
        now = time.monotonic()
        if total is not None or now - self._sent >= _SECONDS_BETWEEN_UPDATES:
            self._sent = now
            self._report("progress", ("update", self._number, {"done": done, "total": total}))

    def retitle(self, title: str) -> None:
        self._report("progress", ("retitle", self._number, {"title": title}))

    def close(self) -> None:
        self._report("progress", ("close", self._number, {}))


class ProgressRelay:
    """Shows the progress of a training's process."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[int, Bar] = {}

    def show(self, event: tuple[str, int, dict[str, Any]]) -> None:
        """Show the value of a "progress" message."""
        method, number, options = event
        if method == "message":
            self._progress.message(**options)
        elif method == "bar":
            self._bars[number] = self._progress.bar(**options)
        elif number in self._bars:
            bar = self._bars.pop(number) if method == "close" else self._bars[number]
            getattr(bar, method)(**options)

    def close(self) -> None:
        """Close the bars of a process that has ended."""
        while self._bars:
            self._bars.popitem()[1].close()
