"""Worker processes that may crash, hang or be killed: each costs the task it was at, and nothing else.

The standard library's pool gives up all of its tasks when one worker dies, and cannot end a task that hangs. Here every
worker has a pipe of its own, with one task in it at a time, so that it is always known who was at what.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from histopipe.errors import MachineShort

T = TypeVar("T")

_FALSE_STARTS = 3
"""Workers in a row that may end before they are ready; then none will be."""
_LONGEST_WAIT = 3600.0
_GRACE_SECONDS = 10.0
"""What tasks get to end in when the pool is shut down before its time."""


class WorkerDied(BrokenExecutor):
    """The process that worked on a task ended before the task did."""


class TookTooLong(WorkerDied):
    """A task was not done in the time it had; its process was ended."""


@dataclass(slots=True)
class _Task:
    future: Future[Any]
    payload: bytes
    seconds: float | None


@dataclass(slots=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    ready: bool = False
    task: _Task | None = None
    deadline: float | None = None


class WorkerPool(Executor):
    """An executor over spawned processes, which end with this one, however it ends.

    Args:
        workers: how many.
        prepare: called in each once, before its first task: imports, mostly.

    Example:
        >>> with WorkerPool(2) as pool:  # doctest: +SKIP
        ...     pool.submit_within(60, pow, 2, 10).result()
        1024
    """

    def __init__(self, workers: int, prepare: Callable[[], None] | None = None) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._prepare = prepare
        self._tasks: deque[_Task] = deque()
        self._lock = threading.Lock()
        self._ending = self._hurried = False
        self._false_starts = 0
        self._woken, self._wake = self._context.Pipe(duplex=False)
        self._count = workers
        self._workers: list[_Worker] = []
        self._thread = threading.Thread(target=self._serve, name="worker-pool", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Have a worker call `fn`.

        The future raises WorkerDied if its worker ended on the way.
        """
        return self._submit(None, fn, args, kwargs)

    def submit_within(self, seconds: float, fn: Callable[..., T], /, *args: Any) -> Future[T]:
        """Have a worker call `fn`, and end the worker if that takes longer.

        The future raises TookTooLong then.
        """
        return self._submit(seconds, fn, args, {})

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let workers end what they are at, then end them; with `cancel_futures`, within ten seconds."""
        with self._lock:
            self._ending, self._hurried = True, cancel_futures
            dropped = list(self._tasks) if cancel_futures else []
            if cancel_futures:
                self._tasks.clear()
        for task in dropped:
            task.future.cancel()
        self._nudge()
        if wait:
            self._thread.join()

    def _submit(
        self, seconds: float | None, fn: Callable[..., T], args: Any, kwargs: Any
    ) -> Future[T]:
        task = _Task(Future(), pickle.dumps((fn, args, kwargs), protocol=5), seconds)
        with self._lock:
            if self._ending:
                raise RuntimeError("the pool has been shut down")
            self._tasks.append(task)
        self._nudge()
        return task.future

    def _nudge(self) -> None:
        """Make the serving thread look at what has changed."""
        with contextlib.suppress(OSError, ValueError):  # it may have ended already
            self._wake.send_bytes(b"")

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(theirs, os.getpid(), self._prepare), daemon=True
        )
        # A Ctrl-C that comes before the worker can ignore it waits until then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()  # so that the pipe ends with the worker
        return _Worker(process, ours)

    def _serve(self) -> None:
        """The thread between futures and processes. Whatever befalls it, nobody is left waiting for an answer."""
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - it is raised where answers are waited for
            with self._lock:
                self._ending = True
                waiting = [*self._tasks, *(w.task for w in self._workers if w.task is not None)]
                self._tasks.clear()
            for task in waiting:
                task.future.set_exception(error)
        finally:
            for worker in self._workers:
                worker.pipe.close()  # a worker that has no task ends by that
                if worker.task is not None:
                    worker.process.kill()
            for worker in self._workers:
                worker.process.join()
            self._wake.close()
            self._woken.close()

    def _run(self) -> None:
        """Give out and take in until the end."""
        # Here, because the system ends a worker with the thread that started it.
        self._workers += [self._start() for _ in range(self._count)]
        while True:
            self._give_out()
            with self._lock:
                idle = not self._tasks and all(worker.task is None for worker in self._workers)
                if self._ending and idle:
                    return
                hurried, self._hurried = self._hurried, False
            if hurried:
                self._hurry()
            self._take_in()

    def _give_out(self) -> None:
        for worker in self._workers:
            while worker.ready and worker.task is None:
                with self._lock:
                    task = self._tasks.popleft() if self._tasks else None
                if task is None:
                    return
                if not task.future.set_running_or_notify_cancel():
                    continue
                worker.task = task
                worker.deadline = task.seconds and time.monotonic() + task.seconds
                # A worker that died while idle is found by its pipe's end, and its task given up as any other's.
                with contextlib.suppress(OSError):
                    worker.pipe.send_bytes(task.payload)

    def _hurry(self) -> None:
        soon = time.monotonic() + _GRACE_SECONDS
        for worker in self._workers:
            if worker.task is not None:
                worker.deadline = min(soon, worker.deadline or soon)

    def _take_in(self) -> None:
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        timeout = min([max(0.0, d - time.monotonic()) for d in deadlines], default=None)
        if timeout is not None:
            timeout = min(timeout, _LONGEST_WAIT)  # the system's own timers end at a few weeks
        ready = wait([self._woken, *(worker.pipe for worker in self._workers)], timeout)
        if self._woken in ready:
            self._woken.recv_bytes()
        for place, worker in enumerate(self._workers):
            if worker.pipe in ready:
                if not self._receive(worker):
                    self._replace(place, WorkerDied(_how_it_ended(worker)))
            elif worker.deadline is not None and worker.deadline <= time.monotonic():
                worker.process.kill()
                self._replace(place, TookTooLong("it was not done in time"))

    def _receive(self, worker: _Worker) -> bool:
        """Take in that a worker is ready, or its result; False if it is gone."""
        try:
            answer = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return False
        try:
            done, value = pickle.loads(answer)  # noqa: S301 - our own process wrote it
        except Exception as error:  # noqa: BLE001 - an answer that cannot be read is an answer
            done, value = False, error
        worker.ready, self._false_starts = True, 0
        task, worker.task, worker.deadline = worker.task, None, None
        if task is not None:
            (task.future.set_result if done else task.future.set_exception)(value)
        return True

    def _replace(self, place: int, error: WorkerDied) -> None:
        worker = self._workers[place]
        worker.pipe.close()
        worker.process.join()
        self._false_starts += not worker.ready
        if self._false_starts >= _FALSE_STARTS:
            self._give_up(str(error))
        self._workers[place] = self._start()
        if worker.task is not None:
            worker.task.future.set_exception(error)

    def _give_up(self, why: str) -> None:
        """No worker can be started: fail what waits for one."""
        with self._lock:
            waiting, self._tasks = list(self._tasks), deque()
        self._false_starts = 0
        for task in waiting:
            task.future.set_exception(
                MachineShort("worker processes end before they begin", found=why)
            )


def _how_it_ended(worker: _Worker) -> str:
    worker.process.join()
    code = worker.process.exitcode or 0
    if code < 0:
        known = -code in {*signal.Signals}
        return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended with exit code {code}"


def _work(pipe: Connection, parent: int, prepare: Callable[[], None] | None) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent = 1, signal.SIGKILL  # PR_SET_PDEATHSIG: nobody writes on behalf of the dead
    ctypes.CDLL(None).prctl(*die_with_parent)
    if os.getppid() != parent:
        os._exit(1)
    if prepare is not None:
        prepare()
    with contextlib.suppress(
        EOFError, OSError
    ):  # the pipe's other end is closed: there is no more to do
        pipe.send_bytes(pickle.dumps((True, None)))  # ready
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(payload: bytes) -> bytes:
    try:
        fn, args, kwargs = pickle.loads(payload)  # noqa: S301 - our own process wrote it
        answer = True, fn(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is wanted
        error.add_note(traceback.format_exc())  # where it was raised does not travel with it
        answer = False, error
    return pickle.dumps(answer, protocol=5)
