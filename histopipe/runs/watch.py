"""What a training's supervisor looks after from outside: when it must end, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Stop:
    """A wish that trainings end, from another thread.

    Attributes:
        asked: 0; 1 to save and end; 2 to end at once.
    """

    def __init__(self) -> None:
        self.asked = 0

    def ask(self) -> None:
        """Ask once more."""
        self.asked += 1


@dataclass(slots=True, kw_only=True)
class Watch:
    """What to watch while a training runs.

    Attributes:
        seconds: after so many it is told to end.
        stop: asked for from elsewhere.
        epoch: told each epoch's row of `history.csv`; what it raises ends the training at once.
        log: where the training's messages go; None for standard error.
        alone: whether it is no worker of a cluster, whatever the environment says.
        host_bytes: the most memory that was seen.
    """

    seconds: float = math.inf
    stop: Stop = field(default_factory=Stop)
    epoch: Callable[[dict[str, Any]], None] | None = None
    log: Path | None = None
    alone: bool = False
    host_bytes: int = 0

    def look_at(self, pid: int) -> None:
        """Take in how much memory a process has taken.

        Source:
            proc_pid_status(5): VmHWM, the most that was resident, in kB.
        """
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        self.host_bytes = max([self.host_bytes, *peaks])
