"""Tasks of a Dask worker: ingest slides into a part, a store on a local disk, and publish it into the folder of parts.

The process that fills a part holds a lock on its folder in scratch. If the process has ended, the next process on that
machine publishes the part. If a worker dies, only the slide in progress is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import shutil
import socket
import threading
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from histopipe._version import __version__
from histopipe.errors import NothingToDo, UsageError
from histopipe.ingestion.ingest_report import SendEvent, SlideOutcome
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.planning import prepare
from histopipe.ingestion.slide_job import SlideJob
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.files import atomic_write, flush_to_disk, locked, run_on_error
from histopipe.system.filesystems import full_disk_error, is_full_disk
from histopipe.system.output import Progress
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.spec import TilingSpec


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


@dataclass(frozen=True, slots=True)
class PartStore:
    """A store in scratch that this process fills with a pool of processes.

    Closing `resources` ends both, and unlocks the part: the next `publish` on this machine publishes its slides.
    """

    writer: StoreWriter
    pool: WorkerPool
    resources: contextlib.ExitStack


_parts: dict[tuple[Path, Path], PartStore] = {}
"""Part of this process by the folder of parts, and the folder in which it is filled. It stays open between slides:
starting processes, and opening a store of many slides, takes time."""
_busy = threading.RLock()
"""Held by the thread that fills or publishes a part. A Dask worker has several threads, but one writer and one pool of
processes, which a single slide keeps busy."""


def _open_part(settings: ClusterSettings, workers: int) -> PartStore:
    """Create the part of this process in a folder of scratch, which stays locked until the part is closed."""
    key = settings.out, settings.folder
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    folder = settings.folder / f"part-{host}-{uuid.uuid4().hex[:8]}"
    hidden = folder.with_name(f".{folder.name}")  # not visible before it is locked
    with contextlib.ExitStack() as stack:
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
        writer = stack.enter_context(StoreWriter(folder / f"{folder.name}.lmdb", settings.spec))
        pool = WorkerPool(workers, prepare)
        stack.callback(pool.shutdown, cancel_futures=True)
        stack.callback(_parts.pop, key)
        _parts[key] = PartStore(writer, pool, stack.pop_all())
    return _parts[key]


@atexit.register
def _close_parts() -> None:
    """Close the parts of a process that ends. They stay in scratch, and the next process publishes them."""
    for part in [*_parts.values()]:
        part.resources.close()


def _publish_folder(folder: Path, out: Path) -> None:
    """Move a part into the folder of parts if it has slides, and remove its scratch folder."""
    store = folder / f"{folder.name}.lmdb"
    target, slides = out / store.name, []
    # If its process was killed at the start, the part is no valid store.
    with contextlib.suppress(NothingToDo), Store(store, hidden=True) as part:
        slides = part.slides
    # The target exists if a process was killed after it had moved the part.
    if slides and not target.exists():
        _move(store, target)
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # other parts are in it
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
    with _busy:
        part = _parts.get((settings.out, settings.folder)) or _open_part(settings, workers)
        store = part.writer.path
        # After an error, a writer must be closed. `publish` publishes the complete slides of the part.
        with run_on_error(part.resources.close):
            (outcome,) = ingest_slides(
                [job],
                store,
                settings.spec,
                options,
                progress=Progress(),
                pool=part.pool,
                writer=part.writer,
                send=send,
            ).slides
        if (store / "data.mdb").stat().st_size >= settings.part_bytes:
            publish(settings)
        return outcome, store.name


def publish(settings: ClusterSettings) -> None:
    """Publish this process's part, and the parts of this machine that other processes have left or closed."""
    _check(settings)
    with _busy:
        part = _parts.get((settings.out, settings.folder))
        if part is not None:
            part.resources.close()
        for folder in sorted(settings.folder.glob("part-*/")):
            # Another worker on this machine may publish it at the same time.
            with contextlib.suppress(FileNotFoundError), locked(folder) as free:
                if free:
                    _publish_folder(folder, settings.out)


def _check(settings: ClusterSettings) -> None:
    host = socket.gethostname()
    if settings.version != __version__:
        raise UsageError(
            f"the worker on {host} has another version of histopipe",
            found=__version__,
            expected=settings.version,
            todo="install the same version on all machines",
        )
    if not settings.out.is_dir():
        raise UsageError(
            f"the worker on {host} cannot find {settings.out}",
            todo="use a shared folder that has the same path on all machines",
        )
