"""Trainings in processes of their own, since neither the memory that a training takes nor what it dies of stays in them.

Keras gives back only part of a model's memory, whatever is cleared; an allocator in pieces recovers in a new process only; and
out of memory mostly ends a process without a word.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from histopipe.dataset.arguments import store_paths
from histopipe.errors import HistopipeError, Interrupted, OutOfMemory, OutOfTime, WorkerLost
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.fork_server import TrainingProcess
from histopipe.runs.result import TrainResult
from histopipe.runs.settings_file import known, resumed
from histopipe.runs.watch import Watch
from histopipe.runs.workers import Cluster, in_cluster, without_cluster
from histopipe.store.catalog import no_store
from histopipe.system.progress import message
from histopipe.system.tensorflow import load_quietly

_GRACE_SECONDS = 25.0
"""What a training gets to save its state in when told to stop: Slurm and Kubernetes give 30 s."""
_MARGIN_SECONDS = 30.0
_GLANCE_SECONDS = 1.0
"""How often it is looked at whether a training should end."""
_STDERR = 2
_AT_ONCE = "ended at once; the last saved state stays"
_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
"""What a process dies of when memory runs out and no exception says so."""


def train(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    in_process: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train a patch model on stores, in a process of its own.

    Args:
        stores: a store, or several, whose patches are of one size; "patches.lmdb", or those of a resumed run, if not given.
        out: the run's folder.
        resume: go on with the run in `out`, with its own settings and those given here.
        in_process: train in this process. Keras keeps 4 to 50 MB of each model until the process ends, running out of memory
            may end it, and TensorFlow stays with the devices of the first training.
        settings: by the names of `TrainConfig`, which are those of the flags of `histopipe train`.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine.
        NothingToDo: no store, or nothing to tell apart.
        DamagedStore: a store or run is damaged.
        MachineShort: disk or memory ran out, even with the smallest micro-batches.
        WorkerLost: another worker is gone.
        Interrupted: told to stop; the state is saved.

    Example:
        >>> result = train("patches.lmdb", out="runs/first", epochs=5)  # doctest: +SKIP
        >>> result.metrics["test"].patch.auc  # doctest: +SKIP
    """
    if stores is not None:
        paths = [stores] if isinstance(stores, str | Path) else stores
        settings["stores"] = tuple(map(str, paths))
    config = resumed(Path(out), settings) if resume else TrainConfig(**known(settings))
    if in_process:
        here = load_quietly("histopipe.training.train").train_here
        result: TrainResult = here(config, Path(out), resume=resume)
        return result
    return supervise(config, Path(out), resume=resume)


def supervise(
    config: TrainConfig, folder: Path, *, resume: bool = False, watch: Watch | None = None
) -> TrainResult:
    """Train in a process of its own; in a fresh one, in smaller pieces, where memory ran out.

    Args:
        config: every setting.
        folder: where the run goes.
        resume: go on with the run that is there.
        watch: what may end it from outside, and is told of its epochs.

    Raises:
        HistopipeError: as `train`.
        OutOfTime: it took longer than it may; the state is saved.
    """
    _check_early(config, folder, resume=resume)
    watch = watch or Watch()
    ends = time.monotonic() + watch.seconds
    while True:
        with _Process(config, folder, resume=resume, watch=watch, ends=ends) as process:
            result = process.result()
        if isinstance(result, TrainResult):
            return result
        if process.stopping or not process.restart:
            raise result
        message(f"{result.what} ({result.found}): going on in a fresh process")
        resume = True


def _check_early(config: TrainConfig, folder: Path, *, resume: bool) -> None:
    """Find the most frequent mistakes before TensorFlow is loaded, which takes several seconds."""
    if not in_cluster():
        run_folder.check(folder, resume=resume)
    for path in () if config.mil is not None else store_paths(config.stores):
        if not path.exists():
            raise no_store(path)


@dataclass(slots=True)
class _Process:
    """A training's process, and what it has said."""

    config: TrainConfig
    folder: Path
    resume: bool = field(kw_only=True)
    watch: Watch = field(kw_only=True)
    ends: float = field(kw_only=True)
    restart: bool = False
    stopping: bool = False
    _cluster: Cluster = field(default_factory=Cluster)
    _started: bool = False
    _micro_batch: int | None = None
    _begun: float = field(default_factory=time.time)
    _heard: float = field(default_factory=time.monotonic)
    _grace_ends: float | None = None
    _pipe: Connection[Any, Any] = field(init=False)
    _child: TrainingProcess = field(init=False)

    def __enter__(self) -> Self:
        self._pipe, theirs = multiprocessing.Pipe()
        environment = {
            "TF_CPP_MIN_LOG_LEVEL": "0" if self.config.log_device_placement else "3",
            **(without_cluster(os.environ) if self.watch.alone else os.environ),
        }
        with theirs, self._messages() as messages:
            self._child = TrainingProcess(environment, pipe=theirs.fileno(), stderr=messages)
        with contextlib.suppress(BrokenPipeError):  # the process died: reported by `_died`
            self._pipe.send((self.config, self.folder, self.resume))
        return self

    @contextlib.contextmanager
    def _messages(self) -> Iterator[int]:
        """File descriptor for the training's messages."""
        if self.watch.log is None:
            yield _STDERR
            return
        with self.watch.log.open("ab") as file:
            yield file.fileno()

    def __exit__(self, *error: object) -> None:
        self._child.end()
        self._pipe.close()

    def result(self) -> TrainResult | HistopipeError:
        """Wait for what the training comes to."""
        with sigterm_interrupts():
            try:
                return self._in_time(self._listen())
            except KeyboardInterrupt:
                self._tell_to_end()
                try:
                    return self._listen()
                except KeyboardInterrupt:
                    return self._interrupted(_AT_ONCE)

    def _in_time(self, found: TrainResult | HistopipeError) -> TrainResult | HistopipeError:
        """What was found, or that it was told to end because its time was over."""
        if self.watch.stop.asked or not self.stopping or isinstance(found, TrainResult):
            return found
        return OutOfTime(
            f"not done within {self.watch.seconds:.0f} s", found=found.found,
            todo=f"go on with `histopipe train --resume --out {self.folder}`",
        )  # fmt: skip

    def _tell_to_end(self) -> None:
        """Let it save its state and end, within bounds."""
        if not self.stopping:
            self.stopping = True
            self._grace_ends = time.monotonic() + _GRACE_SECONDS
            self._child.terminate()

    def _listen(self) -> TrainResult | HistopipeError:
        while True:
            ended = self._end_early()
            if ended is not None:
                return ended
            try:
                patience = self._patience()
                if not self._pipe.poll(min(patience, _GLANCE_SECONDS)):
                    if patience:
                        continue
                    return self._late()
                name, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                return self._died()
            self._heard = time.monotonic()
            match name:
                case "result" | "error":
                    return value  # type: ignore[no-any-return]  # the child's own
                case "interrupted":
                    return self._interrupted("nothing was to be saved yet")
                case "failure":
                    return HistopipeError("the training failed", found=value)
                case _:
                    self._note(name, value)

    def _end_early(self) -> HistopipeError | None:
        """Do what the watch asks for. Returns the reason to stop listening, if there is one."""
        if self._child.pid is not None:
            self.watch.look_at(self._child.pid)
        if self.watch.stop.asked or time.monotonic() > self.ends:
            self._tell_to_end()
        if self.watch.stop.asked > 1:
            return self._interrupted(_AT_ONCE)
        return self._died() if self._child.cancelled else None

    def _note(self, name: str, value: Any) -> None:
        match name:
            case "pid":
                self._child.pid = value
            case "micro_batch":
                self._micro_batch = value
            case "restart":
                self.restart = self._cluster.alone
            case "cluster":
                self._cluster = Cluster(*value)
            case "started":
                self._started = True
            case "epoch" if self.watch.epoch is not None:
                self.watch.epoch(value)

    def _patience(self) -> float:
        """Seconds to wait for a word. Who is alone may take its time: nobody else could hang."""
        if self._grace_ends is not None:
            until = self._grace_ends
        elif self._cluster.alone:
            return math.inf
        else:
            margin = _MARGIN_SECONDS if self._started else 0.0
            until = self._heard + self.config.worker_timeout + margin
        return max(0.0, until - time.monotonic())

    def _late(self) -> HistopipeError:
        if self._grace_ends is not None:
            return self._interrupted(
                f"no answer within {_GRACE_SECONDS:.0f} s; the last saved state stays"
            )
        return self._lost(f"waited {self.config.worker_timeout:.0f} s for the other workers")

    def _interrupted(self, found: str) -> Interrupted:
        begun = (self.folder / run_folder.CONFIG).exists()
        again = f"`histopipe train --resume --out {self.folder}`" if begun else "the same command"
        return Interrupted("interrupted", found=found, todo=f"go on with {again}")

    def _lost(self, what: str) -> WorkerLost:
        return WorkerLost(
            what, found=self._cluster.missing(self.folder, self._begun),
            todo="start all workers within --worker-timeout, or go on with "
            f"`histopipe train --resume --out {self.folder}` on all of them",
        )  # fmt: skip

    def _died(self) -> HistopipeError:
        code = self._child.wait()
        todo = f"go on with `histopipe train --resume --out {self.folder}`"
        if code == -signal.SIGTERM:
            return self._interrupted("nothing was to be saved yet")
        if code in (-signal.SIGABRT, -signal.SIGSEGV) and not self._cluster.alone:
            # TensorFlow's own ways out where workers lose each other; the second was seen on a busy machine.
            return self._lost("the training process was aborted")
        if -code not in _MEMORY_SIGNALS:
            return HistopipeError(
                "the training process ended without a result", found=f"status {code}"
            )
        died = f"the training process died of {signal.Signals(-code).name}: probably out of memory"
        if self._micro_batch is None or not (self.folder / run_folder.CONFIG).exists():
            return OutOfMemory(died, todo="take a smaller --batch-size or --model")
        smaller = max(1, self._micro_batch // 2)
        run_folder.write_micro_batch(self.folder, smaller, died)
        return OutOfMemory(died, todo=f"{todo}, which takes micro-batches of {smaller} patches")


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A scheduler's SIGTERM as a Ctrl-C, where Python would end without a word."""
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
