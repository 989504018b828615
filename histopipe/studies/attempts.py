"""One of many trainings, which may fail without the others: tried again, in bounded time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.errors import (
    DamagedStore,
    HistopipeError,
    Interrupted,
    MachineShort,
    NothingToDo,
    OutOfMemory,
    OutOfTime,
    UsageError,
)
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import TrainResult
from histopipe.runs.stopping import StopRequest, Supervision
from histopipe.runs.supervision import supervise
from histopipe.system.progress import message


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a training among many gets.

    Attributes:
        seconds: for one attempt; 0 for as long as it takes.
        retries: attempts after the first.
        stop: ends all of them.

    Raises:
        UsageError: a value is out of range.
    """

    seconds: float = 0.0
    retries: int = 0
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        for what, value in (("timeout", self.seconds), ("retries", self.retries)):
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UsageError(what, found=value, expected="0 or more")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a training.

    Attributes:
        result: of a training that was finished.
        error: why one was not.
        attempts: how many it took.
        seconds: of all attempts.
        host_bytes: the most memory that was seen.
    """

    result: TrainResult | None
    error: HistopipeError | None
    attempts: int
    seconds: float
    host_bytes: int


def has_begun(folder: Path) -> bool:
    """Whether a run's folder holds a run that may be gone on with."""
    return (folder / run_folder.CONFIG).exists()


def attempt(
    config: TrainConfig,
    folder: Path,
    limits: Limits,
    *,
    epoch: Callable[[dict[str, Any]], None] | None = None,
    log: Path | None = None,
) -> Outcome:
    """Train, and try again where that may help; each attempt goes on where the one before it was saved.

    Args:
        config: every setting.
        folder: the run's, new or of a run to go on with.
        limits: how long, how often.
        epoch: told each epoch's figures; what it raises ends the training and is not caught.
        log: where its messages go.
    """
    began, host_bytes = time.monotonic(), 0
    for number in range(1, limits.retries + 2):
        watch = Supervision(
            seconds=limits.seconds or math.inf, stop=limits.stop, epoch=epoch, log=log,
            alone=True, host_bytes=host_bytes,
        )  # fmt: skip
        result, failed = None, None
        run_folder.clear_leftovers(folder)
        try:
            result = supervise(config, folder, resume=has_begun(folder), watch=watch)
        except HistopipeError as error:
            failed = error
        host_bytes = watch.host_bytes
        if failed is None or number > limits.retries or not _may_help(failed):
            break
        message(f"{folder}: {failed}; trying again ({number} of {limits.retries})")
    return Outcome(result, failed, number, time.monotonic() - began, host_bytes)


def _may_help(error: HistopipeError) -> bool:
    """Whether another attempt could end otherwise."""
    if isinstance(error, UsageError | NothingToDo | DamagedStore | Interrupted):
        return False
    return not isinstance(error, MachineShort) or isinstance(error, OutOfMemory | OutOfTime)
