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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from histopipe._version import __version__
from histopipe.errors import NothingToDo, UsageError
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.planning import prepare
from histopipe.ingestion.report import SlideOutcome
from histopipe.ingestion.slide_job import SlideJob
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.files import (
    atomic_write,
    flush_to_disk,
    full_disk_error,
    is_full_disk,
    locked,
)
from histopipe.system.output import Bar, Progress
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.spec import TilingSpec

_OWN = ("lock.mdb", "ingest.lock", "ingest.csv")
"""Files of a store that are not copied."""


@dataclass(frozen=True, slots=True)
class PartFolders:
    """Folders in which the parts of a data set are filled and published. `dataset` is the uuid of the catalog.

    `out`, the folder of parts, has the same path on all machines. `scratch` is on a local disk of each machine.
    """

    out: Path
    scratch: Path
    dataset: str

    @property
    def folder(self) -> Path:
        """Folder on this machine in which parts of this data set are filled."""
        return self.scratch / f"histopipe-{self.dataset}"

    def publish_abandoned(self) -> None:
        """Publish the parts of this machine whose process has ended."""
        for folder in sorted(self.folder.glob("part-*/")):
            # Another worker on this machine may publish it at the same time.
            with contextlib.suppress(FileNotFoundError), locked(folder) as free:
                if free:
                    self.publish(folder)

    def publish(self, folder: Path) -> None:
        """Move a part into the folder of parts if it has slides, and remove its scratch folder."""
        store = folder / f"{folder.name}.lmdb"
        target = self.out / store.name
        # The target exists if a process was killed after it had moved the part.
        if _has_slides(store) and not target.exists():
            _move(store, target)
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # other parts are in it
            self.folder.rmdir()


_parts: dict[PartFolders, PartStore] = {}
"""Part of this process for each data set."""
_beginning = threading.Lock()


class PartStore:
    """A store that this process fills with a pool of processes. `busy` is locked by the thread that writes to it."""

    def __init__(self, folders: PartFolders, workers: int) -> None:
        self._folders, self.busy = folders, threading.Lock()
        self._writer: StoreWriter | None = None
        self._lock = contextlib.ExitStack()
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
        folder = folders.folder / f"part-{host}-{uuid.uuid4().hex[:8]}"
        hidden = folder.with_name(f".{folder.name}")  # not visible before it is locked
        try:
            hidden.mkdir(parents=True)
            self._lock.enter_context(locked(hidden))
            hidden.rename(folder)
        except OSError as error:
            raise UsageError(
                f"the scratch folder {folders.scratch} cannot be written on {socket.gethostname()}",
                found=error.strerror, todo="choose another folder with --scratch",
            ) from error  # fmt: skip
        self.store = folder / f"{folder.name}.lmdb"
        self.pool = WorkerPool(workers, prepare)
        atexit.register(self.close)

    def ingest(
        self, job: SlideJob, spec: TilingSpec, options: IngestOptions, progress: Progress
    ) -> SlideOutcome:
        """Ingest a slide. The writer stays open unless an error occurs: opening a store of many slides takes time."""
        self._writer = self._writer or StoreWriter(self.store, spec, alone=True)
        try:
            report = ingest_slides(
                [job], self.store, spec, options, progress=progress, pool=self.pool, writer=self._writer
            )  # fmt: skip
        except BaseException:
            self._close_writer()
            raise
        return report.slides[0]

    def publish(self) -> None:
        """Move the part into the folder of parts and end the processes, unless another thread has done so."""
        if _parts.get(self._folders) is self:
            self._close_writer()
            self._folders.publish(self.store.parent)
            self.close()
            atexit.unregister(self.close)
            del _parts[self._folders]

    def close(self) -> None:
        """End the processes. The part stays in scratch, and the next process publishes it."""
        self.pool.shutdown(cancel_futures=True)
        self._close_writer()
        with contextlib.suppress(OSError):  # raised if slides or other parts are in them
            self.store.parent.rmdir()
            self._folders.folder.rmdir()
        self._lock.close()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _has_slides(store: Path) -> bool:
    """Return whether a part has slides. It is not a valid store if its process was killed at the start."""
    try:
        with Store(store, hidden=True) as part:
            return bool(part.slides)
    except NothingToDo:
        return False


def _move(store: Path, target: Path) -> None:
    """Move a store that no process writes to. The target appears when it is complete.

    Raises:
        MachineShort: the disk is full.
    """
    try:
        with atomic_write(target) as part:
            shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
            shutil.copytree(store, part, ignore=shutil.ignore_patterns(*_OWN))
            for path in (*part.iterdir(), part):
                flush_to_disk(path)
    except OSError as error:
        if is_full_disk(error):
            raise full_disk_error(error, target.parent, "run the same command again") from error
        raise UsageError(
            f"{target} cannot be written from {socket.gethostname()}", found=error.strerror,
            todo="make the folder of parts writable on every machine",
        ) from error  # fmt: skip


SendEvent = Callable[[tuple[Any, ...]], None]
"""Function that sends a method name of `IngestProgress` and its arguments to the process that submitted the slide."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings that are the same for every slide of a run. `version` is the version of the process that submits slides.

    A part of at least `part_bytes` is published, and a new part is started.
    """

    folders: PartFolders
    spec: TilingSpec
    options: IngestOptions
    part_bytes: int
    version: str = __version__


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
    while True:
        with _beginning:
            if settings.folders not in _parts:
                _parts[settings.folders] = PartStore(settings.folders, workers)
            part = _parts[settings.folders]
        with part.busy:
            if _parts.get(settings.folders) is not part:
                continue  # the part was published while this thread waited
            outcome = part.ingest(job, settings.spec, options, _EventProgress(send))
            if (part.store / "data.mdb").stat().st_size >= settings.part_bytes:
                part.publish()
            return outcome, part.store.name


def publish(settings: ClusterSettings) -> None:
    """Publish this process's part, and the parts of ended processes on this machine."""
    _check(settings)
    part = _parts.get(settings.folders)
    if part is not None:
        with part.busy:
            part.publish()
    settings.folders.publish_abandoned()


def _check(settings: ClusterSettings) -> None:
    host = socket.gethostname()
    if settings.version != __version__:
        raise UsageError(
            f"the worker on {host} has another version of histopipe", found=__version__, expected=settings.version,
            todo="install the same version on all machines",
        )  # fmt: skip
    if not settings.folders.out.is_dir():
        raise UsageError(
            f"the worker on {host} cannot find {settings.folders.out}",
            todo="use a shared folder that has the same path on all machines",
        )


class _EventProgress(Progress):
    def __init__(self, send: SendEvent) -> None:
        self._send = send

    def bar(self, title: str, **options: Any) -> Bar:
        # Only the bar of a slide is a detail that counts patches; its title is the id.
        if not options.get("detail") or options["unit"] != "patches":
            return Bar()
        self._send(("planned", title, options["total"]))
        return _EventBar(title, self._send)

    def message(self, text: str) -> None:
        self._send(("message", f"{socket.gethostname()}: {text}"))


class _EventBar(Bar):
    def __init__(self, slide: str, send: SendEvent) -> None:
        self._slide, self._send = slide, send

    def advance(self, count: int = 1) -> None:
        self._send(("advanced", self._slide, count))
