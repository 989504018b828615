"""A Dask cluster that ingests slides: the connection to it, and the tasks of its workers.

The cluster is a running one, processes on this machine, or Slurm jobs. Its workers ingest slides into parts, which are
stores on a local disk, and publish them into the folder of parts. The process that fills a part holds a lock on its
folder in scratch. If the process has ended, the next process on that machine publishes the part. If a worker dies, only
the slide in progress is lost.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import queue
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from histopipe._version import __version__
from histopipe.errors import (
    HistopipeError,
    MachineShort,
    NothingToDo,
    UsageError,
    WorkerLost,
    needs_extra,
)
from histopipe.ingestion.ingest_report import SendEvent, SlideOutcome
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.planning import prepare
from histopipe.ingestion.slide_job import SlideJob
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.files import (
    atomic_write,
    flush_to_disk,
    full_disk_error,
    is_full_disk,
    run_on_error,
)
from histopipe.system.locks import locked
from histopipe.system.output import Progress
from histopipe.system.worker_pool import WorkerDied, WorkerPool
from histopipe.tiling.spec import TilingSpec

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


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings that are the same for every slide of a run.

    `out`, the folder of parts, has the same path on all machines. `folder` is on a local disk of each machine: there,
    the parts of this data set are filled. A part of at least `part_bytes` is published, and a new part is started.
    `version` is the version of the process that submits slides.
    """

    out: Path
    folder: Path
    spec: TilingSpec
    options: IngestOptions
    part_bytes: int
    version: str = __version__


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

    `events` are those that workers have sent: the name of a method of `IngestProgress`, and its arguments.
    """

    def __init__(
        self, client: Any, name: str, *, local: Any = None, slurm: Any = None, jobs: int = 0
    ) -> None:
        self._client, self._name, self._local = client, name, local
        self._slurm, self._jobs = slurm, jobs
        self._alive: set[Any] = set()
        self._submitted = -math.inf
        self._topic = f"histopipe-{uuid.uuid4()}"
        self.events: queue.SimpleQueue[Sequence[Any]] = queue.SimpleQueue()
        self._silent_since: float | None = None
        client.subscribe_topic(self._topic, lambda event: self.events.put(event[1]))

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
        from distributed import KilledWorker

        try:
            return future.result(timeout=_SECONDS)
        except KilledWorker as error:
            raise WorkerDied(str(error)) from error
        except HistopipeError:
            raise  # some of these are also OSErrors
        except (CancelledError, asyncio.CancelledError, TimeoutError, OSError):
            return None

    def publish_parts(self, settings: ClusterSettings) -> None:
        """Make every worker publish its parts, and wait for all. Skip workers that are lost in the meantime."""
        running = {
            address: self._client.submit(
                publish, settings, workers=[address], allow_other_workers=False, pure=False
            )
            for address in self.workers()
        }
        while running:
            done, workers = self.wait(running.values()), self.workers()
            for address, future in list(running.items()):
                if future in done:
                    self.result(running.pop(address))
                elif address not in workers:
                    running.pop(address).cancel()

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
    try:
        checked = subprocess.run(
            command,
            input=slurm.job_script(),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise MachineShort(
            "--cluster slurm needs `sbatch`",
            found=error.strerror,
            todo="run this command on a machine that can submit Slurm jobs",
        ) from error
    if checked.returncode:
        raise UsageError(
            "--cluster slurm: sbatch rejects the job",
            found=" ".join(checked.stderr.split())[:300],
            todo="change ~/.config/dask/jobqueue.yaml (docs/how-to/slurm.md)",
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
                todo="describe a job in ~/.config/dask/jobqueue.yaml (docs/how-to/slurm.md)",
            ) from error
    return kind["address"]


_parts: dict[tuple[Path, Path], tuple[StoreWriter, WorkerPool, ExitStack]] = {}
"""Part of this process by the folder of parts, and the folder in which it is filled: the store in scratch, and the
processes that fill it. It stays open between slides: starting processes, and opening a store of many slides, takes time.
Closing the stack ends both, and unlocks the part: the next `publish` on this machine publishes its slides."""
alone = threading.RLock()
"""Held by the thread that fills or publishes a part. A Dask worker has several threads, but one writer and one pool of
processes, which a single slide keeps busy."""


def _open_part(
    settings: ClusterSettings, workers: int
) -> tuple[StoreWriter, WorkerPool, ExitStack]:
    """Create the part of this process in a folder of scratch, which stays locked until the part is closed."""
    key = settings.out, settings.folder
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    folder = settings.folder / f"part-{host}-{uuid.uuid4().hex[:8]}"
    hidden = folder.with_name(f".{folder.name}")  # not visible before it is locked
    with ExitStack() as stack:
        try:
            hidden.mkdir(parents=True)
            stack.enter_context(locked(hidden))
            hidden.rename(folder)
        except OSError as error:
            raise UsageError(
                f"the scratch folder {settings.folder.parent} cannot be written on {socket.gethostname()}",
                found=error.strerror,
                todo="choose another folder with --scratch",
            ) from error
        # Closed in reverse: the folder is unlocked last, since the file of a store may move only while no process
        # writes to it.
        writer = stack.enter_context(
            StoreWriter(folder / f"{folder.name}.lmdb", settings.spec, alone=True)
        )
        pool = WorkerPool(workers, prepare)
        stack.callback(pool.shutdown, cancel_futures=True)
        stack.callback(_parts.pop, key)
        _parts[key] = writer, pool, stack.pop_all()
    return _parts[key]


@atexit.register
def _close_parts() -> None:
    """Close the parts of a process that ends. They stay in scratch, and the next process publishes them."""
    for _, _, resources in [*_parts.values()]:
        resources.close()


def _publish_folder(folder: Path, out: Path) -> None:
    """Move a part into the folder of parts if it has slides, and remove its scratch folder."""
    store = folder / f"{folder.name}.lmdb"
    target, slides = out / store.name, []
    # If its process was killed at the start, the part is no valid store.
    with suppress(NothingToDo), Store(store, hidden=True) as part:
        slides = part.slides
    # The target exists if a process was killed after it had moved the part.
    if slides and not target.exists():
        _move(store, target)
    shutil.rmtree(folder)
    with suppress(OSError):  # other parts are in it
        folder.parent.rmdir()


def _move(store: Path, target: Path) -> None:
    """Move a store that no process writes to. The target appears when it is complete.

    Raises:
        MachineShort: the disk is full.
    """
    try:
        with atomic_write(target) as part:
            shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
            shutil.copytree(
                store, part, ignore=shutil.ignore_patterns("lock.mdb", "ingest.lock", "ingest.csv")
            )
            for path in (*part.iterdir(), part):
                flush_to_disk(path)
    except OSError as error:
        if is_full_disk(error):
            raise full_disk_error(error, target.parent, "run the same command again") from error
        raise UsageError(
            f"{target} cannot be written from {socket.gethostname()}",
            found=error.strerror,
            todo="make the folder of parts writable on every machine",
        ) from error


def run_slide(settings: ClusterSettings, job: SlideJob, topic: str) -> tuple[SlideOutcome, str]:
    """Ingest a slide on a Dask worker, with as many processes as the worker has threads; see `ingest_slide`."""
    from distributed import get_worker

    worker = get_worker()
    return ingest_slide(settings, job, worker.state.nthreads, partial(worker.log_event, topic))


def ingest_slide(
    settings: ClusterSettings, job: SlideJob, workers: int, send: SendEvent
) -> tuple[SlideOutcome, str]:
    """Ingest a slide into this process's part with a number of worker processes, and send its progress.

    Returns:
        The outcome of the slide, and the name of its part.

    Raises:
        UsageError: this machine has another version of histopipe, or cannot find the folder of parts or the slide.
        MachineShort: disk or memory of this machine ran out.
    """
    _check(settings)
    if not job.file.remote and not job.file.path.parent.is_dir():
        raise UsageError(
            f"the worker on {socket.gethostname()} cannot find {job.file.path.parent}",
            todo="make the slides available under the same path on all machines",
        )
    options = replace(settings.options, workers=workers)
    with alone:
        part = _parts.get((settings.out, settings.folder)) or _open_part(settings, workers)
        writer, pool, resources = part
        # After an error, a writer must be closed. `publish` publishes the complete slides of the part.
        with run_on_error(resources.close):
            (outcome,) = ingest_slides(
                [job],
                writer.path,
                settings.spec,
                options,
                progress=Progress(),
                pool=pool,
                writer=writer,
                send=send,
            ).slides
        if (writer.path / "data.mdb").stat().st_size >= settings.part_bytes:
            publish(settings)
        return outcome, writer.path.name


def publish(settings: ClusterSettings) -> None:
    """Publish this process's part, and the parts of this machine that other processes have left or closed."""
    _check(settings)
    with alone:
        if (settings.out, settings.folder) in _parts:
            _, _, resources = _parts[settings.out, settings.folder]
            resources.close()
        for folder in sorted(settings.folder.glob("part-*/")):
            # Another worker on this machine may publish it at the same time.
            with suppress(FileNotFoundError), locked(folder) as free:
                if free:
                    _publish_folder(folder, settings.out)


def check_version(version: str) -> None:
    """Raise a UsageError in a worker that has another version than the command."""
    if version != __version__:
        raise UsageError(
            f"the worker on {socket.gethostname()} has another version of histopipe",
            found=__version__,
            expected=version,
            todo="install the same version on all machines",
        )


def _check(settings: ClusterSettings) -> None:
    check_version(settings.version)
    if not settings.out.is_dir():
        raise UsageError(
            f"the worker on {socket.gethostname()} cannot find {settings.out}",
            todo="use a shared folder that has the same path on all machines",
        )
