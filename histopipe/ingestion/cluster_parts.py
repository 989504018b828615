"""Parts of a command on the workers of a Dask cluster: `embed`, `predict`, `tissue` and `export` with `cluster`."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from histopipe._version import __version__
from histopipe.errors import HistopipeError, MachineShort, UsageError, WorkerLost
from histopipe.ingestion.dask_cluster import alone, check_version, connected
from histopipe.system.output import Progress
from histopipe.system.worker_pool import WorkerDied

R = TypeVar("R")
_PARTS_PER_WORKER = 4
"""A worker that is lost, or slow, holds up a fourth of its work, which another worker does."""


def on_cluster(
    command: Callable[..., R], *arguments: Any, cluster: str, progress: Progress, **settings: Any
) -> R:
    """Do the parts of a public function on a cluster, see `connected`; then call it here to join them.

    Raises:
        UsageError: a worker has another version, or cannot find this working folder.
        WorkerLost: every worker that did a part died. Complete slides are kept.
        MachineShort: the scheduler is lost.
    """
    settings = {name: value for name, value in settings.items() if name not in ("part", "join")}
    with connected(cluster) as workers:
        if not workers.workers():
            progress.message("the cluster has no workers: waiting for one")
        while not workers.workers():
            workers.wait(())
        count = _PARTS_PER_WORKER * len(workers.workers())
        waiting, running = deque(range(1, count + 1)), dict[Any, int]()
        with progress.bar("parts on the cluster", unit="parts", total=count) as bar:
            while waiting or running:
                while waiting and len(running) < len(workers.workers()):
                    number = waiting.popleft()
                    call = partial(command, *arguments, **settings, part=f"{number}/{count}")
                    task = _do_part, __version__, Path.cwd(), call
                    running[workers.submit(*task, resource="GPU")] = number
                for future in workers.wait(running):
                    number = running.pop(future)
                    try:
                        done = workers.result(future)
                    except WorkerDied as error:
                        raise WorkerLost(
                            f"part {number}/{count}: every worker that did it died",
                            found=str(error)[:300],
                            todo="check their memory, and run the same command again",
                        ) from error
                    bar.advance(done is not None)
                    waiting.extend([number] if done is None else [])  # it was lost
                while not workers.events.empty():
                    progress.message(workers.events.get()[0])
    return command(*arguments, progress=progress, join=True, **settings)


class _SentMessages(Progress):
    def __init__(self, topic: str, send: Callable[[str, Any], None]) -> None:
        self._topic, self._send = topic, send

    def message(self, text: str) -> None:
        self._send(self._topic, (text,))


def _do_part(version: str, folder: Path, call: Callable[..., Any], topic: str) -> bool:
    """Do a part in a worker, in the working folder of the command: paths may be relative."""
    from distributed import get_worker

    check_version(version)
    with alone:  # one command uses all cores
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(
                f"the worker on {socket.gethostname()} cannot find {folder}",
                found=error.strerror,
                todo="use a shared folder that has the same path on all machines",
            ) from error
        try:
            call(progress=_SentMessages(topic, get_worker().log_event))
        except HistopipeError:
            raise
        except OSError as error:  # such as a full disk: another worker would not do better
            raise MachineShort(f"a part on {socket.gethostname()}", found=str(error)) from error
    return True
