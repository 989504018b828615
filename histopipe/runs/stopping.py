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

_STDERR = 2


class StopRequest:
    """A request from another thread to stop trainings: asked once to save and stop, twice to stop at once."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self) -> None:
        """Ask once more."""
        self.asked += 1


@dataclass(slots=True, kw_only=True)
class Supervision:
    """Limits of a training, and its observed memory.

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
        """Update `host_bytes` from the peak resident set size of a process: VmHWM in kB, see proc_pid_status(5)."""
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        self.host_bytes = max([self.host_bytes, *peaks])

    @contextlib.contextmanager
    def shown(self, progress: Progress | None) -> Iterator[tuple[Progress, int]]:
        """Yield where to show progress, and the file descriptor for other messages: of the log, or of standard error."""
        if self.log is None:
            yield progress or default_progress(), _STDERR
            return
        with self.log.open("a", encoding="utf-8") as file:
            yield LineProgress(file), file.fileno()


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
