"""Supervision of trainings. Each runs in a separate process, so its memory is freed and its crashes stay there.

Keras frees only part of a model's memory, and running out of memory usually kills a process without a message.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.dataset.selection import store_paths
from histopipe.errors import HistopipeError, Interrupted, OutOfMemory, OutOfTime, WorkerLost
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.fork_server import TrainingProcess, show_progress
from histopipe.runs.result import TrainResult
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.runs.workers import Cluster, in_cluster, without_cluster
from histopipe.store.catalog import no_store
from histopipe.system.files import Closing
from histopipe.system.output import Bar, LineProgress, Progress, counted, default_progress

_GRACE_SECONDS = 25.0
"""Time for a training to save its state after a signal: Slurm and Kubernetes allow 30 s."""
_MARGIN_SECONDS = 30.0
_POLL_SECONDS = 1.0
"""Interval of checks whether a training should end."""
_AT_ONCE = "stopped at once; the last checkpoint remains"
_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
"""Signals that end a process when memory runs out without an exception."""


@dataclass(slots=True)
class StopRequest:
    """A request from another thread to stop trainings. `asked`: 1 to save and stop, 2 to stop at once."""

    asked: int = 0


@dataclass(slots=True, kw_only=True)
class Supervision:
    """Limits of a training, and what was measured of all its attempts.

    Attributes:
        seconds: time limit of an attempt; 0 for none.
        stop: request to stop the training.
        epoch: called with the row of each epoch in `history.csv`; an exception it raises stops the training at once.
        log: file for messages; None to show them.
        alone: ignore other workers named by the environment.
        attempts, all_seconds, host_bytes: number and duration of the attempts, and peak memory so far.
    """

    seconds: float = 0.0
    stop: StopRequest = field(default_factory=StopRequest)
    epoch: Callable[[dict[str, Any]], None] | None = None
    log: Path | None = None
    alone: bool = False
    attempts: int = 0
    all_seconds: float = 0.0
    host_bytes: int = 0

    def note_memory(self, pid: int) -> None:
        """Update `host_bytes` from the peak resident set size of a process: VmHWM in kB, see proc_pid_status(5)."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    self.host_bytes = max(self.host_bytes, int(line.split()[1]) * 1024)

    @contextlib.contextmanager
    def shown(self, progress: Progress | None) -> Iterator[tuple[Progress, int]]:
        """Yield the progress display, and the file descriptor for other messages: the log's, or standard error."""
        if self.log is None:
            yield progress or default_progress(), 2  # standard error
            return
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("a", encoding="utf-8") as file:
            yield LineProgress(file), file.fileno()


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Turn the SIGTERM of a scheduler into a KeyboardInterrupt."""
    applies = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if applies:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if applies:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
    # Frequent mistakes are detected before TensorFlow is loaded, which takes seconds.
    if not in_cluster():
        run_folder.check(folder, resume=resume)
    for path in store_paths(config.stores) if isinstance(config, PatchTrainConfig) else ():
        if not path.exists():
            raise no_store(path)
    watch = watch or Supervision()
    ends = time.monotonic() + (watch.seconds or math.inf)
    with watch.shown(progress) as output:
        while True:
            with _Process(config, folder, watch, ends, output, resume=resume) as process:
                result = process.result()
            if isinstance(result, TrainResult):
                return result
            if process.grace_ends is not None or not process.restart:
                raise result
            output[0].message(f"{result.what} ({result.found}): continuing in a new process")
            resume = True


class _Process(Closing):
    """The process of a training, and its reports. `close` kills it if it still runs."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        watch: Supervision,
        ends: float,
        output: tuple[Progress, int],
        *,
        resume: bool,
    ) -> None:
        self._config, self._folder, self._watch, self._ends = config, folder, watch, ends
        self.grace_ends: float | None = None
        self._progress, stderr = output
        self._bars: dict[int, Bar] = {}
        self._cluster, self._state = Cluster(), dict[str, Any]()
        self._started_at, self._last_message = time.time(), time.monotonic()
        self._pipe, theirs = multiprocessing.Pipe()
        environment = {
            "TF_CPP_MIN_LOG_LEVEL": "0" if config.log_device_placement else "3",
            **(without_cluster(os.environ) if watch.alone else os.environ),
        }
        with theirs:
            self._child = TrainingProcess(environment, pipe=theirs.fileno(), stderr=stderr)
        with contextlib.suppress(BrokenPipeError):  # the process died: reported by `_died`
            self._pipe.send((config, folder, resume))

    def close(self) -> None:
        """End the process and its progress bars."""
        self._child.end()
        self._pipe.close()
        for bar in self._bars.values():
            bar.close()

    @property
    def restart(self) -> bool:
        """Whether the training can continue in a new process."""
        return "restart" in self._state and self._cluster.alone

    def result(self) -> TrainResult | HistopipeError:
        """Wait for the result of the training, or its error."""
        with sigterm_interrupts():
            try:
                outcome = self._listen()
                in_time = self.grace_ends is None or self._watch.stop.asked
                if isinstance(outcome, TrainResult) or in_time:
                    return outcome
                return OutOfTime(
                    f"not done within {self._watch.seconds:.0f} s",
                    found=outcome.found,
                    todo=self._resume_hint(),
                )
            except KeyboardInterrupt:
                self._request_stop()
            try:
                return self._listen()
            except KeyboardInterrupt:
                return self._interrupted(_AT_ONCE)

    def _request_stop(self) -> None:
        """Ask the process to save its state and end within the grace period."""
        if self.grace_ends is None:
            self.grace_ends = time.monotonic() + _GRACE_SECONDS
            self._child.terminate()

    def _listen(self) -> TrainResult | HistopipeError:
        while True:
            ended = self._end_early()
            if ended is not None:
                return ended
            seconds = self._seconds_to_wait()
            try:
                if not self._pipe.poll(min(seconds, _POLL_SECONDS)):
                    if seconds:
                        continue
                    return self._timed_out()
                name, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                return self._died()
            self._last_message = time.monotonic()
            match name:
                case "result" | "error":
                    return value  # type: ignore[no-any-return]  # sent by the child
                case "interrupted":
                    return self._interrupted("there was no state to save yet")
                case "failure":
                    return HistopipeError("the training failed", found=value)
                case _:
                    self._note(name, value)

    def _note(self, name: str, value: Any) -> None:
        match name:
            case "progress":
                show_progress(self._progress, self._bars, value)
            case "pid":
                self._child.pid = value
            case "cluster":
                self._cluster = Cluster(*value)
            case "epoch" if self._watch.epoch is not None:
                self._watch.epoch(value)
            case _:  # micro_batch, restart, started, beat
                self._state[name] = value

    def _end_early(self) -> HistopipeError | None:
        """Check the time limit and stop requests. Return the reason to stop listening, or None."""
        if self._child.pid is not None:
            self._watch.note_memory(self._child.pid)
        if self._watch.stop.asked or time.monotonic() > self._ends:
            self._request_stop()
        if self._watch.stop.asked > 1:
            return self._interrupted(_AT_ONCE)
        return self._died() if self._child.cancelled else None

    def _seconds_to_wait(self) -> float:
        """Return the seconds to wait for a message. Without other workers there is no limit: nothing else can hang."""
        if self.grace_ends is not None:
            until = self.grace_ends
        elif self._cluster.alone:
            return math.inf
        else:
            margin = _MARGIN_SECONDS if "started" in self._state else 0.0
            until = self._last_message + self._config.worker_timeout + margin
        return max(0.0, until - time.monotonic())

    def _timed_out(self) -> HistopipeError:
        if self.grace_ends is not None:
            return self._interrupted(
                f"no answer within {_GRACE_SECONDS:.0f} s; the last checkpoint remains"
            )
        return self._lost(f"waited {self._config.worker_timeout:.0f} s for the other workers")

    def _interrupted(self, reason: str) -> Interrupted:
        return Interrupted(
            "interrupted",
            found=reason,
            todo=self._resume_hint()
            if run_folder.has_begun(self._folder)
            else "run the same command again",
        )

    def _lost(self, what: str) -> WorkerLost:
        return WorkerLost(
            what,
            found=self._cluster.missing(self._folder, self._started_at),
            todo=f"start all workers within --worker-timeout, or {self._resume_hint()} on all of them",
        )

    def _resume_hint(self) -> str:
        return f"continue with `histopipe train --resume --out {self._folder}`"

    def _died(self) -> HistopipeError:
        code = self._child.wait()
        if code == -signal.SIGTERM:
            return self._interrupted("there was no state to save yet")
        if code in (-signal.SIGABRT, -signal.SIGSEGV) and not self._cluster.alone:
            # TensorFlow ends like this if workers lose each other; SIGSEGV was seen on a busy machine.
            return self._lost("the training process was aborted")
        if -code not in _MEMORY_SIGNALS:
            return HistopipeError(
                "the training process ended without a result", found=f"status {code}"
            )
        died = f"the training process died of {signal.Signals(-code).name}: probably out of memory"
        if "micro_batch" not in self._state or not run_folder.has_begun(self._folder):
            return OutOfMemory(died, todo="use a smaller --batch-size or --model")
        smaller = max(1, self._state["micro_batch"] // 2)
        run_folder.write_micro_batch(self._folder, smaller, died)
        return OutOfMemory(
            died,
            todo=f"{self._resume_hint()}, which uses micro-batches of {counted(smaller, 'patch')}",
        )
