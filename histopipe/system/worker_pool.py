"""Pool of worker processes in which a crash, a hang or a kill of a worker fails only its task.

The standard library's pool fails all tasks if one worker dies, and cannot end a task that hangs. Here, every worker has
a separate pipe with one task at a time, and a thread that waits for its answer and replaces it when it ends. Workers
are forks of a new interpreter, the server of the pool, see `system.worker_process`. They are not started by
multiprocessing, which would import the caller's main module again. Functions of that module cannot be submitted.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from histopipe.errors import MachineShort

T = TypeVar("T")
R = TypeVar("R")

_FALSE_STARTS = 3
"""Number of workers, or servers, that may end in a row before they are ready; then the waiting tasks fail."""
_MOST_DEATHS = 500
"""Number of workers that may be killed in a row by halves of batches: a damaged page kills those of all its entries, two
hundred or so; if the root of a tree is damaged, each of millions of entries kills one."""
_AHEAD = 64
"""Number of batches that wait for a worker."""
_POLL_SECONDS = 0.2
"""Time after which a thread that waits for its worker checks its time limit again."""
_END_SECONDS = 1.0
"""Time in which a server has ended whose connections have closed."""
_GRACE_SECONDS = 10.0
"""Time for running tasks to end when the pool is shut down early."""
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
"""Environment of workers. Each has one core. Starting numpy's threads would take a third of its start. glibc keeps up to
64 MB of freed memory for the next task: getting its pages again from the kernel took a sixth of the time of a plan, and
3 % of an ingest of small slides."""


def count_usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Return the bytes of memory that processes can still take, of this machine or of its container."""
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available, groups = int(match[1]) << 10 if match else 0, Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kind, path = line.split(":", 2)
            # Version 2 has no name; a job of a scheduler is a group in groups.
            names = {"": ("max", "current"), "memory": ("limit_in_bytes", "usage_in_bytes")}
            folder = groups / kind / path.lstrip("/")
            for each in (folder, *folder.parents) if kind in names else ():
                with contextlib.suppress(OSError, ValueError):  # "max", or no control group
                    limit, used = (int((each / f"memory.{n}").read_text()) for n in names[kind])
                    available = min(available, max(0, limit - used))
    return available


class WorkerDied(BrokenExecutor):
    """The worker process ended before its task was done."""


class TookTooLong(WorkerDied):
    """A task exceeded its time limit, and its worker was killed."""


@dataclass(slots=True)
class _PoolServer:
    process: subprocess.Popen[bytes]
    control: socket.socket
    ready: bool = False

    def end(self) -> None:
        """End it and all of its workers."""
        self.control.close()
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class _Worker:
    """A worker: the connection for its calls, and that on which its server sends its exit code."""

    server: _PoolServer
    pipe: Connection
    end: Connection
    ready: bool = False
    code: int | None = None

    def wait(self, *, kill: bool = False) -> int:
        """Wait until the worker has ended; return its exit code, or that of the server if this has ended."""
        if self.code is None:
            try:
                self.end.send(kill)
                self.code = self.end.recv()
            except (EOFError, OSError):
                try:
                    self.code = self.server.process.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:  # it lives, but could not fork
                    self.code = -signal.SIGKILL
        return self.code


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, sys.path))
    return {**_ENVIRONMENT, **os.environ, "PYTHONPATH": path}


def _start_server(prepare: bytes, environment: Mapping[str, str]) -> _PoolServer:
    ours, theirs = socket.socketpair()
    module = "histopipe.system.worker_process"
    # Block SIGINT until the server ignores it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()  # the last copy is the server's, so the socket closes when the server ends
    assert process.stdin is not None  # noqa: S101 - for mypy
    with contextlib.suppress(OSError), process.stdin:  # if it has ended, see `_start`
        process.stdin.write(prepare)
    return _PoolServer(process, ours)


_early: dict[bytes, _PoolServer] = {}
"""Servers for the next pool, by what prepares them."""


@contextlib.contextmanager
def started_early(prepare: Callable[[], None]) -> Iterator[None]:
    """Start the server of the next pool with this `prepare`, which loads while the caller does. Without a pool, end it."""
    pickled = pickle.dumps(prepare, protocol=5)
    server = _start_server(pickled, _environment())
    is_next = _early.setdefault(pickled, server) is server  # another thread may have started one
    try:
        yield
    finally:
        if _early.get(pickled) is server:
            _early.pop(pickled).end()
        elif not is_next:
            server.end()


class WorkerPool(Executor):
    """Executor over worker processes, which end with this process, even if it is killed.

    `prepare` is called once before the first task, for example to import modules which all workers then share. It must
    start no thread.

    Example:
        >>> with WorkerPool(2) as pool:  # doctest: +SKIP
        ...     pool.submit_within(60, pow, 2, 10).result()
        1024
    """

    def __init__(self, workers: int, prepare: Callable[[], None] | None = None) -> None:
        self._prepare = pickle.dumps(prepare, protocol=5)
        # Not in the threads: the caller may change its environment, as `load_quietly` does.
        self._environment = _environment()
        # Future, pickled call and time limit of each call that no worker has.
        self._waiting = deque[tuple[Future[Any], bytes, float]]()
        self._changed = threading.Condition()
        self._ending, self._latest, self._false_starts = False, math.inf, 0
        self._starting = threading.Lock()
        early = _early.pop(self._prepare, None)
        self._server = early or _start_server(self._prepare, self._environment)
        self._threads = [
            threading.Thread(target=self._serve, name="worker-pool", daemon=True)
            for _ in range(workers)
        ]
        self._serving = workers
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn` in a worker. The future raises WorkerDied if the worker ends first."""
        return self.submit_within(math.inf, fn, *args, **kwargs)

    def submit_within(
        self, seconds: float, fn: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Future[T]:
        """Call `fn` in a worker. If it takes longer, the worker is killed, and the future raises TookTooLong."""
        message, future = pickle.dumps((fn, args, kwargs), protocol=5), Future[T]()
        with self._changed:
            if self._ending:
                raise RuntimeError("the pool has been shut down")
            self._waiting.append((future, message, seconds))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all calls, then end the workers. With `cancel_futures`, cancel waiting calls and end within 10 s."""
        with self._changed:
            self._ending = True
            if cancel_futures:
                self._latest = time.monotonic() + _GRACE_SECONDS
            self._changed.notify_all()
        if cancel_futures:
            self._end_waiting()
        for thread in self._threads if wait else ():
            thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def _start(self) -> _Worker:
        with self._starting:
            if self._server.process.poll() is not None:
                self._server.end()
                self._server = _start_server(self._prepare, self._environment)
            server = self._server
            while not server.ready:
                if wait([server.control], _POLL_SECONDS):
                    server.ready = server.control.recv(1) == b"\n"
                    if not server.ready:
                        raise WorkerDied(_exit_reason(server.process.wait()))
                elif time.monotonic() >= self._latest or (self._ending and not self._waiting):
                    server.process.kill()
        (ours, theirs), (end, their_end) = multiprocessing.Pipe(), multiprocessing.Pipe()
        with theirs, their_end, contextlib.suppress(OSError):  # if it has ended, so has the worker
            socket.send_fds(server.control, [b"\n"], [theirs.fileno(), their_end.fileno()])
        return _Worker(server, ours, end)

    def _serve(self) -> None:
        """Keep a worker running from the first call on. If it cannot be started, all waiting calls fail."""
        try:
            while self._has_calls():
                self._use_worker()
        except BaseException as error:  # noqa: BLE001 - the futures raise it
            self.shutdown(wait=False)
            self._end_waiting(error)
        finally:
            with self._changed:
                self._serving -= 1
                if not self._serving:
                    self._server.end()

    def _has_calls(self) -> bool:
        """Wait until there are calls without a worker. Return False at the end of the pool."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return bool(self._waiting)

    def _use_worker(self) -> None:
        """Start a worker, and give it calls until it or the pool ends."""
        worker = future = None
        try:
            worker = self._start()
            self._receive(worker, math.inf)
            worker.ready, self._false_starts = True, 0
            while (call := self._next_call(worker)) is not None:
                future, message, seconds = call
                # If the worker has just died, sending may fail. `_receive` then detects that it has ended.
                with contextlib.suppress(OSError):
                    worker.pipe.send_bytes(message)
                done, value = self._receive(worker, seconds)
                (future.set_result if done else future.set_exception)(value)
                future = None
        except BaseException as error:
            if future is not None:
                future.set_exception(error)
            # An error of the pool itself ends it. If a worker died, `_serve` starts another one.
            if not isinstance(error, WorkerDied):
                raise
            self._false_starts += worker is None or not worker.ready
            if self._false_starts >= _FALSE_STARTS:
                self._false_starts = 0
                self._end_waiting(
                    MachineShort("worker processes end before they are ready", found=str(error))
                )
        finally:
            if worker is not None:
                worker.pipe.close()  # this ends an idle worker
                worker.wait(kill=future is not None or not worker.ready)
                worker.end.close()

    def _next_call(self, worker: _Worker) -> tuple[Future[Any], bytes, float] | None:
        """Return the next call that is not cancelled; None at the end of the pool.

        Raises:
            WorkerDied: the worker was killed while it was idle. Another one gets the call.
        """
        with self._changed:
            while self._changed.wait_for(lambda: self._waiting or self._ending) and self._waiting:
                if worker.pipe.poll():  # it sends nothing unasked: this is the end
                    raise WorkerDied(_exit_reason(worker.wait()))
                call = self._waiting.popleft()
                if call[0].set_running_or_notify_cancel():
                    return call
        return None

    def _receive(self, worker: _Worker, seconds: float) -> tuple[bool, Any]:
        """Return an answer of a worker: whether the call succeeded, with its result or its exception.

        Raises:
            WorkerDied: the worker has ended.
            TookTooLong: the time is over. The worker was killed.
        """
        deadline = time.monotonic() + seconds
        try:
            while not worker.pipe.poll(_POLL_SECONDS):
                is_late = time.monotonic() >= min(deadline, self._latest)
                if is_late or (not worker.ready and self._ending and not self._waiting):
                    worker.wait(kill=True)
                    raise TookTooLong("the task exceeded its time limit")
            answer = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDied(_exit_reason(worker.wait())) from None
        try:
            done, value = pickle.loads(answer)  # noqa: S301 - from our own process
        except Exception as error:  # noqa: BLE001 - the future raises it
            return False, error
        return done, value

    def _end_waiting(self, error: BaseException | None = None) -> None:
        """Fail all waiting calls by an error; without one, cancel them."""
        with self._changed:
            calls, self._waiting = self._waiting, deque()
        for future, _, _ in calls:
            if error is None:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                future.set_exception(error)


def _exit_reason(code: int) -> str:
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

    Yield each batch with its result, or a batch of one item with its error. If hundreds of workers in a row are killed, no
    batch is halved until one succeeds. Raise MachineShort like `result_of`.
    """
    deaths = 0

    def run(parts: Iterable[list[T]]) -> Iterator[tuple[list[T], R | WorkerDied]]:
        nonlocal deaths
        for batch, future in map_in_pool(pool, task, parts, seconds=seconds, limit=_AHEAD):
            try:
                yield batch, result_of(future)
                deaths = 0
            except WorkerDied as error:
                deaths += 1
                if len(batch) == 1 or deaths > _MOST_DEATHS:
                    yield batch, error
                else:
                    half = len(batch) // 2
                    yield from run((batch[:half], batch[half:]))

    return run(batches)
