"""Supervision of trainings: time limits, stop requests, lost workers, and restarts after memory ran out.

Each training runs in a separate process (`runs.fork_server`), so its memory is freed and its crashes stay there. Keras
frees only part of a model's memory, and running out of memory usually kills a process without a message.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from histopipe.errors import HistopipeError, Interrupted, OutOfMemory, OutOfTime, WorkerLost
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.folder import resume_hint
from histopipe.runs.fork_server import TrainingProcess
from histopipe.runs.result import TrainResult
from histopipe.runs.workers import Cluster
from histopipe.system.output import (
    Bar,
    LineProgress,
    Progress,
    counted,
    default_progress,
    show_progress,
)

_GRACE_SECONDS = 25.0
"""Time for a training to save its state after a signal: Slurm and Kubernetes allow 30 s."""
_MARGIN_SECONDS = 30.0
"""Additional time for a lost worker to be reported by the training itself, whose operations have the same limit."""
_POLL_SECONDS = 0.2
"""Interval of checks whether a training should end."""
_RAISING_OR_KILLING = (signal.default_int_handler, signal.SIG_DFL)
_NO_STATE = "there was no state to save yet"
_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
"""Signals that end a process when memory runs out without an exception."""


@dataclass(slots=True)
class StopRequest:
    """A request to stop trainings. `asked`: 1 to save and stop, 2 to stop at once."""

    asked: int = 0

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Let Ctrl-C and a scheduler's SIGTERM ask, unless the program handles them itself.

        A KeyboardInterrupt could be raised in the middle of a message.
        """

        def ask(*_: object) -> None:
            self.asked += 1

        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            in_main = threading.current_thread() is threading.main_thread()
            if in_main and signal.getsignal(number) in _RAISING_OR_KILLING:
                before[number] = signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True, kw_only=True)
class Supervision:
    """Limits of a training, and what was measured of all its attempts.

    Attributes:
        seconds: time limit of an attempt; 0 for none.
        stop: request to stop the training.
        epoch: called with the row of each epoch in `history.csv`; an exception it raises stops the training at once.
        log: open file for messages; None to show them.
        alone: ignore other workers named by the environment.
        attempts, all_seconds, host_bytes: number and duration of the attempts, and peak memory so far.
    """

    seconds: float = 0.0
    stop: StopRequest = field(default_factory=StopRequest)
    epoch: Callable[[dict[str, Any]], None] = lambda _: None
    log: TextIO | None = None
    alone: bool = False
    attempts: int = 0
    all_seconds: float = 0.0
    host_bytes: int = 0


def supervise(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    watch: Supervision | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train in a separate process. If memory runs out, continue in a new process with smaller micro-batches.

    Raises:
        HistopipeError: as `train`.
        OutOfTime: the time limit was reached; the state is saved.
    """
    watch = watch or Supervision()
    progress = LineProgress(watch.log) if watch.log else progress or default_progress()
    stderr = watch.log.fileno() if watch.log else 2
    ends = time.monotonic() + (watch.seconds or math.inf)
    level = "0" if config.log_device_placement else "3"
    environment = {"TF_CPP_MIN_LOG_LEVEL": level, **os.environ}
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS") if watch.alone else ():
        environment.pop(name, None)
    with watch.stop.by_signals():
        while True:
            process = TrainingProcess(environment, (config, folder, resume), stderr=stderr)
            with closing(_Attempt(config, folder, watch, progress, process, ends)) as attempt:
                outcome = attempt.outcome()
            if isinstance(outcome, TrainResult):
                return outcome
            if not attempt.can_restart:
                raise outcome
            progress.message(f"{outcome.what} ({outcome.found}): continuing in a new process")
            resume = True


@dataclass(slots=True)
class _Attempt:
    """A training in one process, and what its messages have reported. `close` kills the process if it still runs."""

    _config: TrainConfig
    _folder: Path
    _watch: Supervision
    _progress: Progress
    _process: TrainingProcess
    _ends: float
    _grace_ends: float = math.inf
    _started_at: float = field(default_factory=time.time)
    _last_message: float = field(default_factory=time.monotonic)
    _cluster: Cluster = field(default_factory=Cluster)
    _bars: dict[int, Bar] = field(default_factory=dict)
    _state: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """End the process and its progress bars."""
        self._process.end()
        self._watch.host_bytes = max(self._watch.host_bytes, self._process.peak_bytes)
        for bar in self._bars.values():
            bar.close()

    @property
    def can_restart(self) -> bool:
        """Whether the training can continue in a new process."""
        return "restart" in self._state and self._cluster.alone and self._grace_ends == math.inf

    def outcome(self) -> TrainResult | HistopipeError:
        """Wait for the result of the training, or the reason why it has none."""
        outcome = None
        while outcome is None:
            message = self._process.receive(_POLL_SECONDS)
            outcome = self._handle(*message) if message else self._check_waiting()
            outcome = outcome or self._check_requests()
        is_late = self._grace_ends < math.inf and not self._watch.stop.asked
        if is_late and not isinstance(outcome, TrainResult):
            what, todo = f"not done within {self._watch.seconds:.0f} s", resume_hint(self._folder)
            return OutOfTime(what, found=outcome.found, todo=todo)
        return outcome

    def _handle(self, name: str, value: Any) -> TrainResult | HistopipeError | None:
        """Handle a message. Return the result, if it ends the training."""
        self._last_message = time.monotonic()
        match name:
            case "result":
                return value or self._interrupted(_NO_STATE)
            case "ended":
                return self._died(self._process.status)
            case "progress":
                show_progress(self._progress, self._bars, value)
            case "cluster":
                self._cluster = Cluster(*value)
            case "epoch":
                self._watch.epoch(value)
            case _:  # micro_batch, restart, started
                self._state[name] = value
        return None

    def _check_waiting(self) -> HistopipeError | None:
        """Return why not to wait for messages any longer. Without other workers, nothing else can hang."""
        now, timeout = time.monotonic(), self._config.worker_timeout
        if now > self._grace_ends:
            reason = f"no answer within {_GRACE_SECONDS:.0f} s; the last checkpoint remains"
            return self._interrupted(reason)
        margin = _MARGIN_SECONDS if "started" in self._state else 0.0
        is_lost = not self._cluster.alone and now > self._last_message + timeout + margin
        if is_lost and self._grace_ends == math.inf:
            return self._lost(f"waited {timeout:.0f} s for the other workers")
        return None

    def _check_requests(self) -> HistopipeError | None:
        """Ask the process to save its state and end, if this is requested or due. Return why not to wait for it."""
        asked, now = self._watch.stop.asked, time.monotonic()
        if self._grace_ends == math.inf and (asked or now > self._ends):
            self._grace_ends = now + _GRACE_SECONDS
            self._process.send_signal(signal.SIGTERM)
        if asked > 1:
            return self._interrupted("stopped at once; the last checkpoint remains")
        if self._grace_ends < math.inf and not self._process.begun:
            return self._interrupted(_NO_STATE)
        return None

    def _interrupted(self, reason: str) -> Interrupted:
        has_begun = run_folder.has_begun(self._folder)
        todo = resume_hint(self._folder) if has_begun else "run the same command again"
        return Interrupted("interrupted", found=reason, todo=todo)

    def _lost(self, what: str) -> WorkerLost:
        return WorkerLost(
            what,
            found=self._cluster.missing(self._folder, self._started_at),
            todo=f"start all workers within --worker-timeout, or {resume_hint(self._folder)} on all of them",
        )

    def _died(self, status: int) -> HistopipeError:
        """Return the reason why the process ended without a result."""
        if status == -signal.SIGTERM:
            return self._interrupted(_NO_STATE)
        if status in (-signal.SIGABRT, -signal.SIGSEGV) and not self._cluster.alone:
            # TensorFlow ends like this if workers lose each other; SIGSEGV was seen on a busy machine.
            return self._lost("the training process was aborted")
        if -status not in _MEMORY_SIGNALS:
            what = "the training process ended without a result"
            return HistopipeError(what, found=f"status {status}")
        died = (
            f"the training process died of {signal.Signals(-status).name}: probably out of memory"
        )
        if "micro_batch" not in self._state or not run_folder.has_begun(self._folder):
            return OutOfMemory(died, todo="use a smaller --batch-size or --model")
        smaller = max(1, self._state["micro_batch"] // 2)
        run_folder.write_micro_batch(self._folder, smaller, died)
        size = counted(smaller, "patch")
        return OutOfMemory(
            died, todo=f"{resume_hint(self._folder)}, which uses micro-batches of {size}"
        )
