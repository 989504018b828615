"""Pool of worker processes in which a crash, a hang or a kill of a worker fails only its task.

The standard library's pool fails all tasks if one worker dies, and cannot end a task that hangs. Here, every worker has
a separate pipe with one task at a time. Workers are new interpreters. They are not started by multiprocessing, which
would import the caller's main module again. Functions of that module cannot be submitted.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from histopipe.errors import MachineShort

T = TypeVar("T")
R = TypeVar("R")

_FALSE_STARTS = 3
"""Number of workers that may end in a row before they are ready; then the waiting tasks fail."""
_LONGEST_WAIT_SECONDS = 3600.0
_GRACE_SECONDS = 10.0
"""Time for running tasks to end when the pool is shut down early."""
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
"""Environment of workers. Each has one core. Starting numpy's threads would take a third of its start. glibc keeps up to
64 MB of freed memory for the next task: getting its pages again from the kernel took a sixth of the time of a plan."""


def count_usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


class WorkerDied(BrokenExecutor):
    """The worker process ended before its task was done."""


class TookTooLong(WorkerDied):
    """A task exceeded its time limit, and its worker was killed."""


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    ready: bool = False
    future: Future[Any] | None = None
    deadline: float = math.inf


class WorkerPool(Executor):
    """Executor over worker processes, which end with this process, even if it is killed.

    Each worker calls `prepare` once before its first task, for example to import modules.

    Example:
        >>> with WorkerPool(2) as pool:  # doctest: +SKIP
        ...     pool.submit_within(60, pow, 2, 10).result()
        1024
    """

    def __init__(self, workers: int, prepare: Callable[[], None] | None = None) -> None:
        self._prepare = pickle.dumps(prepare, protocol=5)
        # Future, pickled call and time limit of each call that no worker has.
        self._waiting = deque[tuple[Future[Any], bytes, float]]()
        self._lock, self._started = threading.Lock(), threading.Event()
        self._ending, self._latest = False, math.inf
        self._false_starts = 0
        self._woken, self._wake = multiprocessing.Pipe(duplex=False)
        self._count, self._workers = workers, list[_Worker]()
        self._thread = threading.Thread(target=self._serve, name="worker-pool", daemon=True)
        self._thread.start()
        self._started.wait()  # otherwise the caller's imports would keep Python's lock from the thread

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn` in a worker. The future raises WorkerDied if the worker ends first."""
        return self.submit_within(math.inf, fn, *args, **kwargs)

    def submit_within(
        self, seconds: float, fn: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Future[T]:
        """Call `fn` in a worker. If it takes longer, the worker is killed, and the future raises TookTooLong."""
        message, future = pickle.dumps((fn, args, kwargs), protocol=5), Future[T]()
        with self._lock:
            if self._ending:
                raise RuntimeError("the pool has been shut down")
            self._waiting.append((future, message, seconds))
        self._notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all calls, then end the workers. With `cancel_futures`, cancel waiting calls and end within 10 s."""
        with self._lock:
            self._ending = True
            if cancel_futures:
                self._latest = time.monotonic() + _GRACE_SECONDS
        for future in self._take_waiting() if cancel_futures else ():
            future.cancel()
        self._notify()
        if wait:
            self._thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def _notify(self) -> None:
        """Wake the pool's thread after a change."""
        with contextlib.suppress(OSError, ValueError):  # the thread may have ended
            self._wake.send_bytes(b"")

    def _start(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        module = "histopipe.system.worker_process"
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # Block SIGINT until the worker ignores it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**_ENVIRONMENT, **os.environ, **path},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()  # the last copy is the worker's, so the pipe closes when the worker ends
        with contextlib.suppress(OSError):  # the worker has ended, which `_receive` detects
            ours.send_bytes(self._prepare)
        return _Worker(process, ours)

    def _serve(self) -> None:
        """Serve all calls in the pool's thread. If this fails, all calls fail."""
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - the futures raise it
            with self._lock:
                self._ending = True
            running = (worker.future for worker in self._workers if worker.future is not None)
            for future in (*self._take_waiting(), *running):
                future.set_exception(error)
        finally:
            self._started.set()
            for worker in self._workers:
                worker.pipe.close()  # this ends an idle worker
                if worker.future is not None or not worker.ready:
                    worker.process.kill()
            for worker in self._workers:
                worker.process.wait()
            self._wake.close()
            self._woken.close()

    def _run(self) -> None:
        # Workers are started in this thread, because the kernel kills a worker when the thread that started it ends.
        for _ in range(self._count):
            self._workers.append(self._start())
        self._started.set()
        while True:
            self._send_calls()
            with self._lock:
                idle = not self._waiting and all(worker.future is None for worker in self._workers)
                if self._ending and idle:
                    return
            self._receive_results()

    def _send_calls(self) -> None:
        for worker in self._workers:
            while worker.ready and worker.future is None:
                with self._lock:
                    if not self._waiting:
                        return
                    future, message, seconds = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    worker.future, worker.deadline = future, time.monotonic() + seconds
                    # If the worker died while idle, sending may fail. `_receive_results` then detects that it has ended.
                    with contextlib.suppress(OSError):
                        worker.pipe.send_bytes(message)

    def _receive_results(self) -> None:
        first = min(self._latest, *(worker.deadline for worker in self._workers)) - time.monotonic()
        # The kernel's timers are limited to a few weeks.
        timeout = min(max(0.0, first), _LONGEST_WAIT_SECONDS)
        ready = wait([self._woken, *(worker.pipe for worker in self._workers)], timeout)
        if self._woken in ready:
            self._woken.recv_bytes()
        for index, worker in enumerate(self._workers):
            if worker.pipe in ready:
                if not self._receive(worker):
                    self._replace(index, WorkerDied(_exit_reason(worker)))
            elif worker.future and min(worker.deadline, self._latest) <= time.monotonic():
                worker.process.kill()
                self._replace(index, TookTooLong("the task exceeded its time limit"))

    def _receive(self, worker: _Worker) -> bool:
        """Receive a worker's result or its ready message; return False if the worker has ended."""
        try:
            answer = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return False
        try:
            done, value = pickle.loads(answer)  # noqa: S301 - from our own process
        except Exception as error:  # noqa: BLE001 - the future raises it
            done, value = False, error
        worker.ready, self._false_starts = True, 0
        future, worker.future, worker.deadline = worker.future, None, math.inf
        if future is not None:
            (future.set_result if done else future.set_exception)(value)
        return True

    def _replace(self, index: int, error: WorkerDied) -> None:
        worker = self._workers[index]
        worker.pipe.close()
        worker.process.wait()
        self._false_starts += not worker.ready
        if self._false_starts >= _FALSE_STARTS:
            self._false_starts = 0
            for future in self._take_waiting():
                future.set_exception(
                    MachineShort("worker processes end before they are ready", found=str(error))
                )
        self._workers[index] = self._start()
        if worker.future is not None:
            worker.future.set_exception(error)

    def _take_waiting(self) -> list[Future[Any]]:
        """Remove all waiting calls, and return their futures."""
        with self._lock:
            calls, self._waiting = self._waiting, deque()
        return [future for future, _, _ in calls]


def _exit_reason(worker: _Worker) -> str:
    code = worker.process.wait()
    names = {-number: number.name for number in signal.Signals}
    return (
        f"ended with exit code {code}"
        if code >= 0
        else f"killed by {names.get(code, f'signal {-code}')}"
    )


def silence() -> None:
    """Discard the standard error of a worker: LMDB prints an assertion before it aborts."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def result_of(future: Future[R]) -> R:
    """Return the result of a task, like `Future.result`.

    Raises:
        WorkerDied: the task killed its worker, or exceeded its time limit.
        MachineShort: the system killed the worker by SIGKILL, most likely because memory ran out.
    """
    try:
        return future.result()
    except WorkerDied as error:
        if "SIGKILL" not in str(error):
            raise
        raise MachineShort(
            "a worker process was killed",
            found=str(error),
            todo="free memory, or use fewer --workers",
        ) from error


def run_tasks(
    start: Callable[[T], Future[R]],
    items: Iterable[T | None],
    *,
    limit: float = math.inf,
    in_order: bool = True,
) -> Generator[tuple[T, Future[R]] | None]:
    """Start a task for each item, and yield items with their tasks. Cancel waiting tasks if the caller stops.

    At most `limit` tasks are started and not yet yielded. In order, the task that is yielded may still be running;
    otherwise, it has ended. None in place of an item waits for the tasks of all items before it, and is yielded, too.
    """
    started: dict[Future[R], T] = {}
    try:
        for item in items:
            if item is not None:
                started[start(item)] = item
            while started and (item is None or len(started) >= limit):
                yield _take_next(started, in_order=in_order)
            if item is None:
                yield None
        while started:
            yield _take_next(started, in_order=in_order)
    finally:
        for future in started:
            future.cancel()


def _take_next(started: dict[Future[R], T], *, in_order: bool) -> tuple[T, Future[R]]:
    future = next(iter(started) if in_order else as_completed(started))
    return started.pop(future), future


def map_in_pool(
    pool: WorkerPool,
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    seconds: float,
    limit: float = math.inf,
    in_order: bool = True,
) -> Iterator[tuple[T, Future[R]]]:
    """Call a function for each item in a pool, with a time limit, and yield items with their futures, as `run_tasks`."""
    start = partial(pool.submit_within, seconds, function)
    return filter(None, run_tasks(start, items, limit=limit, in_order=in_order))


def results_of(
    pool: WorkerPool, seconds: float, task: Callable[[list[T]], R], batches: Iterable[list[T]]
) -> Iterator[tuple[list[T], R | WorkerDied]]:
    """Run a task on batches of items. A batch that kills its worker, or exceeds the time limit, is halved and repeated.

    Yield each batch with its result, or a batch of one item with its error. Raise MachineShort like `result_of`.
    """
    for batch, future in map_in_pool(pool, task, batches, seconds=seconds):
        try:
            yield batch, result_of(future)
        except WorkerDied as error:
            if len(batch) == 1:
                yield batch, error
            else:
                half = len(batch) // 2
                yield from results_of(pool, seconds, task, (batch[:half], batch[half:]))
