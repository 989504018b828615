"""What may stop a training from outside: signals, requests of other threads, time limits."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.system.progress import LineProgress, Progress, default_progress


class StopRequest:
    """A request from another thread to stop trainings.

    Attributes:
        asked: 0; 1 to save and stop; 2 to stop at once.
    """

    def __init__(self) -> None:
        self.asked = 0

    def ask(self) -> None:
        """Ask once more."""
        self.asked += 1


@dataclass(slots=True, kw_only=True)
class Supervision:
    """What may stop a training from outside, and what is observed of it.

    Attributes:
        seconds: time limit.
        stop: request to stop.
        epoch: called with the row of each epoch in `history.csv`; an exception it raises stops the training at once.
        log: file for messages; None shows them.
        alone: ignore the other workers that the environment may name.
        host_bytes: the largest memory seen.
    """

    seconds: float = math.inf
    stop: StopRequest = field(default_factory=StopRequest)
    epoch: Callable[[dict[str, Any]], None] | None = None
    log: Path | None = None
    alone: bool = False
    host_bytes: int = 0

    def note_memory(self, pid: int) -> None:
        """Update `host_bytes` from a running process.

        Source:
            proc_pid_status(5): VmHWM, the peak resident set size, in kB.
        """
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        self.host_bytes = max([self.host_bytes, *peaks])

    @contextlib.contextmanager
    def shown(self, progress: Progress | None) -> Iterator[Progress]:
        """Where to show the training's progress: the log, or what is given."""
        if self.log is None:
            yield progress or default_progress()
            return
        with self.log.open("a", encoding="utf-8") as file:
            yield LineProgress(file)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Turn the SIGTERM of a scheduler into a KeyboardInterrupt."""
    mine = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if mine:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
