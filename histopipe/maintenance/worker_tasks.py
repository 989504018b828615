"""Tasks on many items in worker processes that may die: an item that kills its worker costs only itself."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from histopipe.errors import MachineShort
from histopipe.system.worker_pool import WorkerDied, WorkerPool

T = TypeVar("T")
R = TypeVar("R")


def silence() -> None:
    """Let a worker write nothing to standard error: LMDB prints an assertion before it aborts."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def result_of(future: Future[R]) -> R:
    """Return the result of a task, as `Future.result`.

    Raises:
        WorkerDied: the task killed its worker, or took too long.
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


def results_of(
    pool: WorkerPool, seconds: float, task: Callable[[list[T]], R], batches: Iterable[list[T]]
) -> Iterator[tuple[list[T], R | WorkerDied]]:
    """Run a task on batches of items. A batch that kills its worker, or takes too long, is halved until the item is known.

    Yields each batch with its result, or a batch of one item with the error of its worker. Raises MachineShort as `result_of`.
    """
    waiting = deque((batch, pool.submit_within(seconds, task, batch)) for batch in batches)
    while waiting:
        batch, future = waiting.popleft()
        try:
            yield batch, result_of(future)
        except WorkerDied as error:
            if len(batch) == 1:
                yield batch, error
                continue
            half = len(batch) // 2
            for part in (batch[:half], batch[half:]):
                waiting.append((part, pool.submit_within(seconds, task, part)))
