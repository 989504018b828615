"""Parts of a command on the workers of a Dask cluster: a running one, processes on this machine, or Slurm jobs.

If a worker, the scheduler or the command is lost, complete slides are kept: the same command does the rest.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from histopipe._version import __version__
from histopipe.errors import (
    HistopipeError,
    Interrupted,
    MachineShort,
    UsageError,
    WorkerLost,
    needs_extra,
    reported_as,
    strerror,
)
from histopipe.system.output import Bar, Progress
from histopipe.system.worker_pool import WorkerDied

_KINDS = re.compile(
    r"(?P<address>(tcp|tls)://[^/\s]+:\d{1,5})|local:(?P<local>[1-9]\d*)|slurm:(?P<slurm>[1-9]\d*)"
)
_SECONDS = 30.0
"""Time limit for connecting, and for a scheduler that does not respond."""
_WAIT_SECONDS, _POLL_SECONDS = 0.5, 0.02
"""Longest wait for a result, so that lost workers are noticed and events are shown; and the interval of its polls. Dask's
own function `wait` raises an error instead of returning the futures that were lost with the scheduler."""
_SLOW_RESTARTS = {"distributed.deploy.lost-worker-timeout": "120s"}
"""Time for a local worker to start again. After that, Dask drops it for the rest of the run. Its default of 15 s is too
short for a busy machine."""
_SUBMIT_SECONDS = 5.0
"""Minimum time between two submissions of Slurm jobs."""


R = TypeVar("R")
_PARTS_PER_WORKER = 4
"""A worker that is lost, or slow, holds up a fourth of its work, which another worker does."""
_alone = threading.RLock()
"""Held by the thread that does a part. A Dask worker has several threads, but one command uses all cores."""
_doing: set[int] = set()
"""Threads of this process that do parts."""


def on_cluster(
    command: Callable[..., R],
    *arguments: Any,
    cluster: str,
    progress: Progress,
    threads_as: str = "",
    **settings: Any,
) -> R:
    """Do the parts of a public function on a cluster, see `connected`; then call it here to join them.

    `threads_as` is the setting, if any, whose default is the number of threads of the worker.

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
            try:
                while waiting or running:
                    while waiting and len(running) < len(workers.workers()):
                        number = waiting.popleft()
                        call = partial(command, *arguments, **settings, part=f"{number}/{count}")
                        task = _do_part, __version__, Path.cwd(), call, threads_as
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
                    workers.show_events(progress, bar)
            except KeyboardInterrupt:
                progress.message(
                    "interrupted: the parts keep what is complete; interrupt again to stop immediately"
                )
                workers.interrupt(running)
                workers.show_events(progress, bar)
                raise
    return command(*arguments, progress=progress, join=True, **settings)


@dataclass(frozen=True, slots=True)
class _SentProgress(Progress):
    """Sends the messages of a part, and its lines about slides, to the command."""

    send: Callable[[tuple[str, bool | None]], object]

    def message(self, text: str) -> None:
        self.send((text, None))

    def bar(self, *_: Any, **__: Any) -> Bar:
        return _SentItems(self.send)


class _SentItems(Bar):
    def __init__(self, send: Callable[[tuple[str, bool | None]], object]) -> None:
        super().__init__()
        self._send = send

    def item(self, text: str, *, problem: bool = False) -> None:
        self._send((text, problem))


def _do_part(version: str, folder: Path, call: partial[Any], threads_as: str, topic: str) -> bool:
    """Do a part in a worker, in the working folder of the command: paths may be relative."""
    from distributed import get_worker

    if version != __version__:
        raise UsageError(
            f"the worker on {socket.gethostname()} has another version of histopipe",
            found=__version__,
            expected=version,
            todo="install the same version on all machines",
        )
    worker, thread = get_worker(), threading.get_ident()
    if threads_as and call.keywords.get(threads_as) is None:
        call = partial(call, **{threads_as: worker.state.nthreads})
    with _alone:
        with reported_as(
            UsageError,
            f"the worker on {socket.gethostname()} cannot find {folder}",
            OSError,
            reason=strerror,
            todo="use a shared folder that has the same path on all machines",
        ):
            os.chdir(folder)
        _doing.add(thread)
        try:
            call(progress=_SentProgress(partial(worker.log_event, topic)))
        except HistopipeError:
            raise
        except OSError as error:  # such as a full disk: another worker would not do better
            raise MachineShort(f"a part on {socket.gethostname()}", found=str(error)) from error
        except KeyboardInterrupt as error:  # Dask would end the worker
            raise Interrupted("interrupted") from error
        finally:
            _doing.discard(thread)
    return True


def _interrupt_parts() -> None:
    """Interrupt the parts of this process as Ctrl-C does. Dask does not end a task that runs."""
    for thread in [*_doing]:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt)
        )


@contextmanager
def connected(cluster: str) -> Iterator[DaskCluster]:
    """Connect to a cluster: "tcp://HOST:PORT", "local:N" or "slurm:N". A cluster started here ends with the block.

    Raises:
        UsageError: `cluster` has another form.
        MachineShort: Dask is not installed, or no scheduler responds.
    """
    kind = _KINDS.fullmatch(cluster)
    if kind is None:
        raise UsageError(
            "--cluster", found=repr(cluster), expected="tcp://HOST:PORT, local:N or slurm:N"
        )
    with needs_extra(
        "dask", "--cluster needs Dask, which is not installed", ", here and on the workers"
    ):
        import dask  # late: an extra
        import distributed
    if cluster.startswith("tls:") and distributed.Security().tls_client_cert is None:
        raise UsageError(
            f"--cluster {cluster}",
            found="no certificate",
            todo="set distributed.comm.tls.client.cert in Dask's configuration",
        )
    # Errors in Dask's callbacks are raised again when their result is read.
    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        if kind["local"]:
            stack.enter_context(dask.config.set(_SLOW_RESTARTS))
        target = _start(kind)
        if target != cluster:
            stack.callback(target.close, timeout=10)
        if kind["slurm"]:
            _check_job(target)
        try:
            client = distributed.Client(target, timeout=_SECONDS, set_as_default=False)
        except (TypeError, ValueError) as error:  # for example tls:// without certificates
            raise UsageError(f"--cluster {cluster}", found=str(error)) from error
        except OSError as error:
            raise MachineShort(
                f"no scheduler responds at {cluster}",
                found=str(error).split("\n", maxsplit=1)[0],
                todo="check the address, and that `dask scheduler` runs there",
            ) from error
        stack.callback(client.close, timeout=5)
        yield DaskCluster(
            client,
            cluster,
            local=target if kind["local"] else None,
            slurm=target if kind["slurm"] else None,
            jobs=int(kind["slurm"] or 0),
        )


class DaskCluster:
    """The workers of a cluster, with the Slurm jobs or the processes that this run started for them.

    `events` are those that workers have sent: a message, or a line about a slide and whether it is a problem.
    """

    def __init__(
        self, client: Any, name: str, *, local: Any = None, slurm: Any = None, jobs: int = 0
    ) -> None:
        self._client, self._name, self._local = client, name, local
        self._slurm, self._jobs = slurm, jobs
        self._alive: set[Any] = set()
        self._submitted = -math.inf
        self._topic = f"histopipe-{uuid.uuid4()}"
        self._events: queue.SimpleQueue[tuple[str, bool | None]] = queue.SimpleQueue()
        self._silent_since: float | None = None
        client.subscribe_topic(self._topic, lambda event: self._events.put(event[1]))

    def workers(self) -> list[str]:
        """Return the addresses of the workers.

        Raises:
            MachineShort: the scheduler has not responded for half a minute.
            WorkerLost: all workers on this machine ended, and Dask does not start them again.
        """
        # Dask drops a local worker that has not come back in time.
        if self._local is not None and not self._local.workers:
            raise WorkerLost(
                f"all workers of --cluster {self._name} ended, and cannot be started again",
                todo="check memory and process limits of this machine, and run the same command again: ingested slides are kept",
            )
        if self._client.status == "running":
            self._silent_since = None
            workers = self._client.scheduler_info(n_workers=-1)["workers"]
            if self._slurm is not None:
                self._renew_jobs(str(worker["name"]) for worker in workers.values())
            return list(workers)
        self._silent_since = self._silent_since or time.monotonic()
        if self._client.status == "closed" or time.monotonic() - self._silent_since > _SECONDS:
            raise MachineShort(
                f"the scheduler at {self._name} is lost",
                todo="restart it and its workers, then run the same command: ingested slides are on the workers' disks",
            )
        return []

    def submit(self, task: Callable[..., Any], *arguments: Any, resource: str = "") -> Any:
        """Submit a task, which also gets the topic of events; return a future of its result.

        If workers declare a resource of this name, the task takes one.
        """
        declared = (
            worker["resources"]
            for worker in self._client.scheduler_info(n_workers=-1)["workers"].values()
        )
        resources = {resource: 1} if any(resource in each for each in declared) else None
        return self._client.submit(task, *arguments, self._topic, pure=False, resources=resources)

    def wait(self, futures: Iterable[Any]) -> list[Any]:
        """Wait at most half a second, and return the futures that have ended."""
        futures, until = list(futures), time.monotonic() + _WAIT_SECONDS
        while True:
            ended = [future for future in futures if future.status != "pending"]
            if ended or time.monotonic() > until:
                return ended
            time.sleep(_POLL_SECONDS)

    def result(self, future: Any) -> Any:
        """Return the result of a future; None if it was lost, for example with the scheduler.

        Raises:
            WorkerDied: several workers in a row died during the task.
            HistopipeError: raised on the worker.
        """
        import asyncio  # loaded by Dask

        from distributed import KilledWorker

        try:
            return future.result(timeout=_SECONDS)
        except KilledWorker as error:
            raise WorkerDied(str(error)) from error
        except HistopipeError:
            raise  # some of these are also OSErrors
        except (CancelledError, asyncio.CancelledError, TimeoutError, OSError):
            return None

    def interrupt(self, futures: Iterable[Any]) -> None:
        """Interrupt the parts that run, and wait until they have ended."""
        self._client.run(_interrupt_parts, on_error="ignore")
        while pending := [future for future in futures if future.status == "pending"]:
            self.workers()  # raises if all are lost
            self.wait(pending)

    def show_events(self, progress: Progress, bar: Bar) -> None:
        """Show the messages and the lines about slides that workers have sent."""
        while not self._events.empty():
            text, problem = self._events.get()
            if problem is None:
                progress.message(text)
            else:
                bar.item(text, problem=problem)

    def _renew_jobs(self, workers: Iterable[str]) -> None:
        """Submit the jobs, and new ones for those that have lost their workers, for example at their time limit."""
        # The name of a worker is the name of its job, with a number if the job has several workers.
        names = {name for worker in workers for name in (worker, worker.rpartition("-")[0])}
        alive = {job for job in self._slurm.workers if str(job) in names}
        for job in self._alive - alive:
            self._slurm.workers.pop(job, None)  # otherwise, `scale` would count the job
        self._alive = alive
        if time.monotonic() - self._submitted > _SUBMIT_SECONDS:
            self._submitted = time.monotonic()
            self._slurm.scale(jobs=self._jobs)


def _check_job(slurm: Any) -> None:
    """Check that Slurm accepts the script of a job. Dask would only log an error."""
    command = ["sbatch", "--test-only"]
    with reported_as(
        MachineShort,
        "--cluster slurm needs `sbatch`",
        OSError,
        reason=strerror,
        todo="run this command on a machine that can submit Slurm jobs",
    ):
        checked = subprocess.run(
            command,
            input=slurm.job_script(),
            capture_output=True,
            text=True,
            check=False,
        )
    if checked.returncode:
        raise UsageError(
            "--cluster slurm: sbatch rejects the job",
            found=" ".join(checked.stderr.split())[:300],
            todo="change ~/.config/dask/jobqueue.yaml (docs/how-to/machines.md)",
        )


def _start(kind: re.Match[str]) -> Any:
    """Start a cluster and return it, or return the address of a running one."""
    if kind["local"]:
        from distributed import LocalCluster

        try:
            return LocalCluster(
                n_workers=int(kind["local"]),
                threads_per_worker=1,
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,
                # A terminal sends Ctrl-C to all processes, but only this process may handle it.
                preload=["import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"],
            )
        except (RuntimeError, OSError) as error:
            raise WorkerLost(
                f"the workers of --cluster {kind[0]} cannot be started",
                found=str(error)[:300],
                todo="check memory and process limits of this machine, or ingest without --cluster",
            ) from error
    if kind["slurm"]:
        handler = signal.getsignal(signal.SIGINT)
        from dask_jobqueue import SLURMCluster

        # The import sets a handler that ends the process with exit code 0 on Ctrl-C.
        signal.signal(signal.SIGINT, handler)
        try:
            return SLURMCluster()  # settings: ~/.config/dask/jobqueue.yaml
        except (ValueError, OSError, RuntimeError) as error:
            raise UsageError(
                "--cluster slurm",
                found=str(error)[:300],
                todo="describe a job in ~/.config/dask/jobqueue.yaml (docs/how-to/machines.md)",
            ) from error
    return kind["address"]
