"""Reaching a cluster: one that runs, one of processes on this machine, or one that Slurm is asked for."""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from typing import Any

from histopipe.cluster.work import Done, Order, ingest_slide
from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.ingest.request import IngestOptions
from histopipe.slides.discovery import SlideFile

_KINDS = re.compile(
    r"(?P<address>(tcp|tls)://[^/\s]+:\d{1,5})|local:(?P<local>[1-9]\d*)|slurm:(?P<slurm>[1-9]\d*)"
)
_SECONDS = 30.0
_LOOK_SECONDS, _POLL_SECONDS = 0.5, 0.02
_ASK_SECONDS = 5.0
_LOGGERS = ("distributed", "distributed.client", "tornado.application", "asyncio")


@contextmanager
def connected(cluster: str) -> Iterator[Cluster]:
    """A cluster, which ends with the block if it was started here.

    Args:
        cluster: "tcp://HOST:PORT" of a scheduler, "local:N" for N processes here, "slurm:N" for N jobs of dask-jobqueue.

    Raises:
        UsageError: it is none of these.
        MachineShort: Dask is not installed, or there is no scheduler.
    """
    kind = _KINDS.fullmatch(cluster)
    if kind is None:
        raise UsageError(
            "--cluster", found=repr(cluster), expected="tcp://HOST:PORT, local:N or slurm:N"
        )
    try:
        import distributed  # late: an extra
    except ImportError as error:
        raise MachineShort(
            "--cluster needs Dask, which is not installed", found=str(error),
            todo="pip install 'histopipe[dask]', here and on the workers",
        ) from error  # fmt: skip
    if cluster.startswith("tls:") and distributed.Security().tls_client_cert is None:
        raise UsageError(
            f"--cluster {cluster}", found="no certificate",
            todo="name it in Dask's configuration, distributed.comm.tls.client.cert",
        )  # fmt: skip
    # What goes wrong in Dask's callbacks is raised where it is waited for, too, and told there.
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        started = _start(kind)
        if started is not None:
            stack.callback(started.close, timeout=10)
        if kind["slurm"]:
            _submit(started, int(kind["slurm"]))
        try:
            client = distributed.Client(
                started if started is not None else cluster, timeout=_SECONDS, set_as_default=False
            )
        except (TypeError, ValueError) as error:  # as of tls:// without certificates
            raise UsageError(f"--cluster {cluster}", found=str(error)) from error
        except OSError as error:
            raise MachineShort(
                f"no scheduler answers at {cluster}", found=str(error).split("\n", maxsplit=1)[0],
                todo="check the address, and that `dask scheduler` runs there",
            ) from error  # fmt: skip
        stack.callback(client.close, timeout=5)
        jobs = _Jobs(started, int(kind["slurm"])) if kind["slurm"] else None
        yield Cluster(client, cluster, jobs)


def run_slide(order: Order, slide: SlideFile, options: IngestOptions, topic: str) -> Done:
    """What Dask calls on a worker: `ingest_slide`, with as many processes as the worker has threads."""
    from distributed import get_worker

    worker = get_worker()

    def tell(facts: dict[str, Any]) -> None:
        worker.log_event(topic, facts)

    return ingest_slide(order, slide, options, worker.state.nthreads, tell)


class Cluster:
    """The workers of a cluster, as whoever gives out slides sees them.

    Args:
        client: Dask's.
        name: of the cluster, for messages.
        jobs: whose workers they are; None where they are not jobs of this run.
    """

    def __init__(self, client: Any, name: str, jobs: _Jobs | None = None) -> None:
        self._client, self._name, self._jobs = client, name, jobs
        self._topic = f"histopipe-{uuid.uuid4()}"
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._silent_since: float | None = None
        client.subscribe_topic(self._topic, lambda event: self._events.put(event[1]))

    def workers(self) -> list[str]:
        """Addresses of the workers that are there.

        Raises:
            MachineShort: the scheduler has not answered for half a minute.
        """
        if self._client.status == "running":
            self._silent_since = None
            workers = self._client.scheduler_info(n_workers=-1)["workers"]
            if self._jobs is not None:
                self._jobs.renew(str(worker["name"]) for worker in workers.values())
            return list(workers)
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if self._client.status == "closed" or now - self._silent_since > _SECONDS:
            raise MachineShort(
                f"the scheduler at {self._name} is lost",
                todo="start it and its workers again; the same command goes on: what was ingested lies on the workers' disks",
            )
        return []

    def give(self, order: Order, slide: SlideFile, options: IngestOptions) -> Any:
        """Have some worker ingest a slide; a future of `Done`."""
        return self._client.submit(run_slide, order, slide, options, self._topic, pure=False)

    def wait(self, futures: Iterable[Any]) -> list[Any]:
        """Those that have ended, after at most half a second."""
        futures, until = list(futures), time.monotonic() + _LOOK_SECONDS
        while True:
            ended = [future for future in futures if future.status != "pending"]
            if ended or time.monotonic() > until:
                return ended
            time.sleep(_POLL_SECONDS)

    def result(self, future: Any) -> Any:
        """A future's; None if it was lost on the way, with the scheduler or otherwise.

        Raises:
            WorkersDied: so did every worker that was at it.
            HistopipeError: as it was raised on the worker.
        """
        from distributed import KilledWorker

        try:
            return future.result(timeout=_SECONDS)
        except KilledWorker as error:
            raise WorkersDied(str(error)) from error
        except HistopipeError:
            raise  # one of them is an OSError, too
        except (CancelledError, asyncio.CancelledError, TimeoutError, OSError):
            return None

    def everywhere(self, task: Callable[[Order], list[str]], order: Order) -> None:
        """Have every worker do a task, and wait; workers that are lost meanwhile are passed over."""
        asked = {
            address: self._client.submit(
                task, order, workers=[address], allow_other_workers=False, pure=False
            )
            for address in self.workers()
        }
        while asked:
            done = self.wait(asked.values())
            there = set(self.workers())
            for address, future in list(asked.items()):
                if future in done:
                    self.result(asked.pop(address))
                elif address not in there:
                    asked.pop(address).cancel()

    def events(self) -> Iterator[dict[str, Any]]:
        """What workers have told since the last time."""
        while not self._events.empty():
            yield self._events.get()


class _Jobs:
    """Slurm's jobs, each of one worker or several."""

    def __init__(self, slurm: Any, count: int) -> None:
        self._slurm, self._count = slurm, count
        self._alive: set[Any] = set()
        self._asked = time.monotonic()

    def renew(self, workers: Iterable[str]) -> None:
        """Ask for jobs in place of those that had workers and have none, as behind their time limit.

        Args:
            workers: names of those that are there: their job's, or that with a number behind it.
        """
        names = {name for worker in workers for name in (worker, worker.rpartition("-")[0])}
        alive = {job for job in self._slurm.workers if str(job) in names}
        for job in self._alive - alive:
            self._slurm.workers.pop(job, None)
        self._alive = alive
        if time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked = time.monotonic()
            self._slurm.scale(jobs=self._count)


class WorkersDied(Exception):
    """Several workers in a row have died of one task."""


def _start(kind: re.Match[str]) -> Any:
    """The cluster that is to be started; None of one that runs."""
    if kind["local"]:
        from distributed import LocalCluster

        # A terminal's Ctrl-C goes to all its processes: what it means is this one's to say.
        deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        return LocalCluster(
            n_workers=int(kind["local"]), threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=logging.CRITICAL,
            preload=[deaf],
        )  # fmt: skip
    if kind["slurm"]:
        handler = signal.getsignal(signal.SIGINT)
        from dask_jobqueue import SLURMCluster

        signal.signal(signal.SIGINT, handler)  # its import makes Ctrl-C a silent success
        try:
            return SLURMCluster()  # as ~/.config/dask/jobqueue.yaml says
        except (ValueError, OSError, RuntimeError) as error:
            raise UsageError(
                "--cluster slurm", found=str(error)[:300],
                todo="describe a job in ~/.config/dask/jobqueue.yaml (docs/clusters.md)",
            ) from error  # fmt: skip
    return None


def _submit(slurm: Any, jobs: int) -> None:
    """Have jobs submitted; what is wrong with them Slurm is asked first, for Dask would only log it."""
    command = ["sbatch", "--test-only"]
    try:
        asked = subprocess.run(
            command, input=slurm.job_script(), capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise MachineShort(
            "--cluster slurm needs `sbatch`", found=error.strerror,
            todo="start it where jobs are submitted from",
        ) from error  # fmt: skip
    if asked.returncode:
        raise UsageError(
            "--cluster slurm: sbatch refuses the job", found=" ".join(asked.stderr.split())[:300],
            todo="change ~/.config/dask/jobqueue.yaml (docs/clusters.md)",
        )  # fmt: skip
    slurm.scale(jobs=jobs)
