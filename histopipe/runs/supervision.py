"""Supervision of trainings: time limits, stop requests, lost workers, and restarts after memory ran out.

Keras frees only part of a model's memory, and running out of it usually kills a process without a message. Workers of a
training on several machines write heartbeats, by which the others see who is missing.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
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
    WorkerLost,
)
from histopipe.runs.config import TrainConfig
from histopipe.runs.folder import clear_leftovers, has_begun, resume_hint, write_micro_batch
from histopipe.runs.fork_server import TrainingProcess
from histopipe.runs.run import TrainResult
from histopipe.system.files import read_json, write_json
from histopipe.system.output import Bar, Progress, counted, default_progress, show_progress

HEARTBEATS = "workers"
"""Subfolder of a run's folder with the heartbeat of each worker: a JSON file, whose time is that of the last beat."""
_HEARTBEAT_SECONDS = 2.0
_STALE_SECONDS = 10.0  # age of a dead worker's heartbeat: network filesystems show a new time late
COMPUTING, READING, _FAILED = "computing", "reading", "failed: "
_LOST, _STUCK, _COMPUTING = range(3)  # the likely cause first: a computing worker waits for others


@dataclass(slots=True)
class Cluster:
    """The addresses `host:port` of the workers of a training, and the index of this one.

    `resolver` is TensorFlow's cluster resolver, and `doing` the activity of this worker, for its heartbeat.
    """

    workers: tuple[str, ...] = ("",)
    index: int = 0
    resolver: Any = field(default=None, repr=False)
    doing: str = "starting"

    @property
    def alone(self) -> bool:
        """Whether there is no other worker."""
        return len(self.workers) == 1

    @property
    def chief(self) -> bool:
        """Whether this worker, the first one, writes the run's files."""
        return self.index == 0

    def own_part(self, replicas: int) -> range:
        """Return the replicas of this worker. All workers have the same number."""
        local = replicas // len(self.workers)
        return range(self.index * local, (self.index + 1) * local)

    @contextmanager
    def heartbeats(self, folder: Path) -> Iterator[None]:
        """Write a heartbeat to the run's folder every 2 seconds. At the end remove it, or write the error to it."""
        if self.alone:
            yield
            return
        path, ended = folder / HEARTBEATS / f"{self.index}.json", threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)

        def beat() -> None:
            is_last = False
            while not is_last:
                is_last = ended.is_set()
                with suppress(OSError):  # the next beat may succeed
                    write_json(path, {"doing": self.doing})
                ended.wait(_HEARTBEAT_SECONDS)

        # A thread, which beats also while this worker waits for data or for others.
        thread = threading.Thread(target=beat, daemon=True, name="heartbeats")
        thread.start()
        try:
            yield
        except BaseException as error:
            self.doing = f"{_FAILED}{error or type(error).__name__}"
            raise
        finally:
            ended.set()
            thread.join()
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # the last worker removes the folder

    def missing(self, folder: Path, since: float) -> str:
        """Describe the missing workers, from heartbeats after `since`, the `time.time()` when this worker started."""
        until = time.monotonic() + _STALE_SECONDS + 1  # until then, a dead worker can seem alive
        while True:
            workers = [
                (f"worker {index} ({address})", *_read_heartbeat(folder, index, since))
                for index, address in enumerate(self.workers)
                if index != self.index
            ]
            worst = min(rank for _, rank, _ in workers)
            if worst == _LOST or time.monotonic() > until:
                return "; ".join(f"{name} {text}" for name, rank, text in workers if rank == worst)
            time.sleep(1)


def _read_heartbeat(folder: Path, index: int, since: float) -> tuple[int, str]:
    """Return the state of another worker, also as text."""
    path = folder / HEARTBEATS / f"{index}.json"
    try:
        written, doing = path.stat().st_mtime, read_json(path)["doing"]
    except (OSError, ValueError, KeyError):
        return _LOST, "never started, or uses another run folder"
    age = time.time() - written
    if written < since - _STALE_SECONDS:
        return _LOST, "never started"
    if doing.startswith(_FAILED):
        return _LOST, doing
    if age > _STALE_SECONDS:
        return _LOST, f"had its last heartbeat {age:.0f} s ago, {doing}"
    return _COMPUTING if doing == COMPUTING else _STUCK, f"is alive, {doing}"


_GRACE_SECONDS = 25.0  # to save the state after a signal: Slurm and Kubernetes allow 30 s
_MARGIN_SECONDS = 30.0  # for the training to report a lost worker itself, after the same timeout
_POLL_SECONDS = 0.2  # interval of checks whether a training should end


@contextmanager
def signals_handled(
    handler: Callable[..., None], *, only_unhandled: bool = False
) -> Iterator[None]:
    """Handle Ctrl-C and a scheduler's SIGTERM in the block, if this is the main thread.

    With `only_unhandled`, the handlers of the program itself remain.
    """
    in_main = threading.current_thread() is threading.main_thread()
    usual = (signal.default_int_handler, signal.SIG_DFL)
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM) if in_main else ():
            if not only_unhandled or signal.getsignal(number) in usual:
                stack.callback(signal.signal, number, signal.signal(number, handler))
        yield


@dataclass(slots=True)
class StopRequest:
    """A request to stop trainings. `asked`: 1 to save and stop, 2 to stop at once."""

    asked: int = 0

    def by_signals(self) -> AbstractContextManager[None, bool | None]:
        """Let Ctrl-C and a scheduler's SIGTERM ask, unless the program handles them itself."""

        # A KeyboardInterrupt could be raised in the middle of a message.
        def ask(*_: object) -> None:
            self.asked += 1

        return signals_handled(ask, only_unhandled=True)


@dataclass(slots=True, kw_only=True)
class Supervision:
    """Limits of a training, and where its messages go."""

    seconds: float = 0.0  # of an attempt; 0 for no limit
    stop: StopRequest = field(default_factory=StopRequest)
    # Called with the row of each epoch in `history.csv`; an exception it raises stops the training at once.
    epoch: Callable[[dict[str, Any]], None] = lambda _: None
    progress: Progress = field(default_factory=default_progress)
    stderr: int = 2  # file descriptor for the output of the process
    alone: bool = False  # ignore other workers that the environment names


def supervise(
    config: TrainConfig, folder: Path, *, watch: Supervision, resume: bool = False
) -> TrainResult:
    """Train in a separate process. If memory runs out, continue in a new process with smaller micro-batches.

    Raise as `train`, or an OutOfTime at the time limit; the state is saved.
    """
    ends = time.monotonic() + (watch.seconds or math.inf)
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "0" if config.log_device_placement else "3",
        **os.environ,
    }
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS") if watch.alone else ():
        environment.pop(name, None)
    with watch.stop.by_signals():
        while True:
            process = TrainingProcess(environment, (config, folder, resume), stderr=watch.stderr)
            with closing(_Attempt(config, folder, watch, process, ends)) as attempt:
                outcome, can_restart = attempt.wait()
            if isinstance(outcome, TrainResult):
                return outcome
            if not can_restart:
                raise outcome
            watch.progress.message(f"{outcome.what} ({outcome.found}): continuing in a new process")
            resume = True


@dataclass(slots=True)
class _Attempt:
    """A training in one process, and what its messages have reported. `close` kills the process if it still runs."""

    _config: TrainConfig
    _folder: Path
    _watch: Supervision
    _process: TrainingProcess
    _ends: float
    _grace_ends: float = math.inf  # finite after the request to stop
    _started_at: float = field(default_factory=time.time)
    _last_message: float = field(default_factory=time.monotonic)
    _cluster: Cluster = field(default_factory=Cluster)
    _bars: dict[int, Bar] = field(default_factory=dict)
    _state: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """End the process and its progress bars."""
        self._process.end()
        for bar in self._bars.values():
            bar.close()

    def wait(self) -> tuple[TrainResult | HistopipeError, bool]:
        """Return the result of the training, or why it has none, and whether a new process can continue it."""
        outcome = None
        while outcome is None:
            message = self._process.receive(_POLL_SECONDS)
            outcome = self._handle(*message) if message else None
            outcome = outcome or self._check(is_waiting=message is None)
        stopping = self._grace_ends < math.inf
        if stopping and not self._watch.stop.asked and not isinstance(outcome, TrainResult):
            what, todo = f"not done within {self._watch.seconds:.0f} s", resume_hint(self._folder)
            return OutOfTime(what, found=outcome.found, todo=todo), False
        return outcome, "restart" in self._state and self._cluster.alone and not stopping

    def _handle(self, name: str, value: Any) -> TrainResult | HistopipeError | None:
        """Handle a message. Return the result, if it ends the training."""
        self._last_message = time.monotonic()
        match name:
            case "result":
                return value or self._interrupted()
            case "ended":
                return self._died(self._process.status)
            case "progress":
                show_progress(self._watch.progress, self._bars, value)
            case "cluster":
                self._cluster = Cluster(*value)
            case "epoch":
                self._watch.epoch(value)
            case _:  # micro_batch, restart, started
                self._state[name] = value
        return None

    def _check(self, *, is_waiting: bool) -> HistopipeError | None:
        """Return why not to wait for the process. Ask it to save its state and end, if this is requested or due."""
        now, asked = time.monotonic(), self._watch.stop.asked
        if is_waiting and now > self._grace_ends:
            return self._interrupted(
                f"no answer within {_GRACE_SECONDS:.0f} s; the last checkpoint remains"
            )
        if self._grace_ends == math.inf:
            timeout = self._config.worker_timeout
            limit = self._last_message + timeout + ("started" in self._state) * _MARGIN_SECONDS
            # Without other workers, nothing else can hang.
            if is_waiting and now > limit and not self._cluster.alone:
                return self._lost(f"waited {timeout:.0f} s for the other workers")
            if asked or now > self._ends:
                self._grace_ends = now + _GRACE_SECONDS
                self._process.send_signal(signal.SIGTERM)
        if asked > 1:
            saved = (
                "the last checkpoint remains" if has_begun(self._folder) else "nothing was saved"
            )
            return self._interrupted(f"stopped at once; {saved}")
        runs = self._process.begun or self._grace_ends == math.inf
        return None if runs else self._interrupted()

    def _interrupted(self, reason: str = "there was no state to save yet") -> Interrupted:
        return Interrupted(
            "interrupted",
            found=reason,
            todo=resume_hint(self._folder)
            if has_begun(self._folder)
            else "run the same command again",
        )

    def _lost(self, what: str) -> WorkerLost:
        return WorkerLost(
            what,
            found=self._cluster.missing(self._folder, self._started_at),
            todo=f"start all workers within --worker-timeout, or {resume_hint(self._folder)} on all of them",
        )

    def _died(self, status: int) -> HistopipeError:
        """Return the reason why the process ended without a result."""
        if status == -signal.SIGTERM:
            return self._interrupted()
        if status in (-signal.SIGABRT, -signal.SIGSEGV) and not self._cluster.alone:
            # TensorFlow ends like this if workers lose each other; SIGSEGV was seen on a busy machine.
            return self._lost("the training process was aborted")
        # Signals that end a process when memory runs out without an exception.
        if -status not in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT):
            return HistopipeError(
                "the training process ended without a result", found=f"status {status}"
            )
        died = (
            f"the training process died of {signal.Signals(-status).name}: probably out of memory"
        )
        if "micro_batch" not in self._state or not has_begun(self._folder):
            return OutOfMemory(died, todo="use a smaller --batch-size or --model")
        smaller = max(1, self._state["micro_batch"] // 2)
        write_micro_batch(self._folder, smaller, died)
        return OutOfMemory(
            died,
            todo=f"{resume_hint(self._folder)}, which uses micro-batches of {counted(smaller, 'patch')}",
        )


def train_with_retries(
    config: TrainConfig, folder: Path, watch: Supervision, *, retries: int, progress: Progress
) -> tuple[TrainResult | HistopipeError, int, float]:
    """Train, and retry after failures that may be temporary. Each attempt resumes from the last checkpoint.

    Return the result, or the error of the last attempt; the number of attempts; and their duration in seconds. An
    exception raised by `watch.epoch` ends the training and propagates.
    """
    start, attempts = time.monotonic(), 0
    while True:
        attempts += 1
        clear_leftovers(folder)
        try:
            outcome: TrainResult | HistopipeError = supervise(
                config, folder, watch=watch, resume=has_begun(folder)
            )
        except HistopipeError as error:
            outcome = error
        if isinstance(outcome, TrainResult) or attempts > retries or not _is_temporary(outcome):
            return outcome, attempts, time.monotonic() - start
        progress.message(f"{folder}: {outcome}; retry {attempts} of {retries}")


def _is_temporary(error: HistopipeError) -> bool:
    lasting = UsageError | NothingToDo | DamagedStore | Interrupted | MachineShort
    return not isinstance(error, lasting) or isinstance(error, OutOfMemory | OutOfTime)
