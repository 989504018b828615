"""Tasks on many items in worker processes that may die: an item that kills its worker costs only itself."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from histopipe.errors import MachineShort
from histopipe.system.worker_pool import TookTooLong, WorkerDied, WorkerPool

T = TypeVar("T")
R = TypeVar("R")


def silence() -> None:
    """Let a worker write nothing to standard error: LMDB prints an assertion before it aborts."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def results_of(
    pool: WorkerPool, seconds: float, task: Callable[[list[T]], R], batches: Iterable[list[T]]
) -> Iterator[tuple[list[T], R | WorkerDied]]:
    """Run a task on batches of items. A batch that kills its worker, or takes too long, is halved until the item is known.

    Yields each batch with its result, or a batch of one item with the error of its worker.

    Raises:
        MachineShort: the system killed a worker.
    """
    waiting: deque[tuple[list[T], Future[R]]] = deque()

    def submit(batch: list[T]) -> None:
        waiting.append((batch, pool.submit_within(seconds, task, batch)))

    for batch in batches:
        submit(batch)
    while waiting:
        batch, future = waiting.popleft()
        try:
            yield batch, future.result()
        except WorkerDied as error:
            refuse_killed(error)
            if len(batch) == 1:
                yield batch, error
            else:
                half = len(batch) // 2
                submit(batch[:half])
                submit(batch[half:])


def refuse_killed(error: Exception) -> None:
    """Raise MachineShort for a worker that was killed by SIGKILL: most likely memory ran out, and the store is not the reason."""
    if isinstance(error, TookTooLong) or not isinstance(error, WorkerDied):
        return
    if "SIGKILL" in str(error):
        raise MachineShort(
            "a worker process was killed",
            found=str(error),
            todo="free memory, or use fewer --workers",
        ) from error
