"""What a Dask worker does: ingest slides into a store on its own disk, the part, and publish it into the folder of parts.

The process that fills a part holds a lock on its folder in scratch. Parts whose process has ended are published by the next
process on that machine, so that a worker's death costs only the slide in work.
"""

from __future__ import annotations

import atexit
import contextlib
import os
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
from histopipe.errors import MachineShort, NothingToDo, UsageError
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.report import SlideOutcome
from histopipe.ingestion.storing import prepare
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.files import appearing, locked
from histopipe.system.filesystems import is_full_disk
from histopipe.system.progress import Bar, Progress, SilentProgress
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.spec import TilingSpec

_OWN = ("lock.mdb", "ingest.lock", "ingest.csv")
"""Files of a store that are not copied."""


@dataclass(frozen=True, slots=True)
class PartFolders:
    """Where the parts of one data set are filled and published: `dataset` is the uuid of the catalog.

    Every machine sees `out`, the folder of parts, under this path, and has `scratch` on a local disk.
    """

    out: Path
    scratch: Path
    dataset: str

    @property
    def folder(self) -> Path:
        """Folder of this machine where parts of this data set are filled."""
        return self.scratch / f"histopipe-{self.dataset}"

    def publish_abandoned(self) -> None:
        """Publish the parts of this machine whose process has ended."""
        for place in sorted(self.folder.glob("part-*/")):
            # Another worker on this machine may publish it at the same time.
            with contextlib.suppress(FileNotFoundError), locked(place) as free:
                if free:
                    self.publish(place)

    def publish(self, place: Path) -> None:
        """Move a part into the folder of parts, unless it has no slides."""
        store = place / f"{place.name}.lmdb"
        target = self.out / store.name
        # If it is there, a process was killed after it had moved it.
        if _holds_slides(store) and not target.exists():
            _move(store, target)
        shutil.rmtree(place)
        with contextlib.suppress(OSError):  # other parts are in it
            self.folder.rmdir()


_parts: dict[PartFolders, PartStore] = {}
"""The part of this process for each data set."""
_beginning = threading.Lock()


class PartStore:
    """A store that this process fills with a pool of processes; `busy` is held by the thread that writes to it."""

    def __init__(self, folders: PartFolders, workers: int) -> None:
        self._folders, self.busy = folders, threading.Lock()
        self._writer: StoreWriter | None = None
        self._lock = contextlib.ExitStack()
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
        place = folders.folder / f"part-{host}-{uuid.uuid4().hex[:8]}"
        begun = place.with_name(f".{place.name}")  # no other process finds it before it is locked
        try:
            begun.mkdir(parents=True)
            self._lock.enter_context(locked(begun))
            begun.rename(place)
        except OSError as error:
            raise UsageError(
                f"the scratch folder {folders.scratch} cannot be written on {socket.gethostname()}",
                found=error.strerror, todo="choose another one with --scratch",
            ) from error  # fmt: skip
        self.store = place / f"{place.name}.lmdb"
        self.pool = WorkerPool(workers, prepare)
        atexit.register(self.close)

    def ingest(
        self, slide: SlideInput, spec: TilingSpec, options: IngestOptions, progress: Progress
    ) -> IngestedSlide:
        """Ingest a slide. The writer stays open until an error: opening a store of many slides takes time."""
        self._writer = self._writer or StoreWriter(self.store, spec, alone=True)
        try:
            report = ingest_slides(
                [slide], self.store, spec, options, progress=progress, pool=self.pool, writer=self._writer
            )  # fmt: skip
        except BaseException:
            self._close_writer()
            raise
        return IngestedSlide(report.slides[0], self.store.name)

    def publish(self) -> None:
        """Move it into the folder of parts and end the processes, unless another thread did."""
        if _parts.get(self._folders) is self:
            self._close_writer()
            self._folders.publish(self.store.parent)
            self.close()
            atexit.unregister(self.close)
            del _parts[self._folders]

    def close(self) -> None:
        """End the processes. The part stays, to be published by the next process."""
        self.pool.shutdown(cancel_futures=True)
        self._close_writer()
        with contextlib.suppress(OSError):  # unless slides or other parts are in them
            self.store.parent.rmdir()
            self._folders.folder.rmdir()
        self._lock.close()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _holds_slides(store: Path) -> bool:
    """Return whether a part has slides. It is no store if its process was killed at the start."""
    try:
        with Store(store, hidden=True) as part:
            return bool(part.slides)
    except NothingToDo:
        return False


def _move(store: Path, target: Path) -> None:
    """Move a store that no process writes; the target appears when it is complete.

    Raises:
        MachineShort: the disk is full.
    """
    try:
        with appearing(target, hidden=True) as part:
            shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
            shutil.copytree(store, part, ignore=shutil.ignore_patterns(*_OWN))
            for path in (*part.iterdir(), part):
                file = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
    except OSError as error:
        if is_full_disk(error):
            raise MachineShort(
                f"the disk that holds {target.parent} is full", todo="make room; the same command goes on"
            ) from error  # fmt: skip
        raise UsageError(
            f"{target} cannot be written from {socket.gethostname()}", found=error.strerror,
            todo="let every machine write the folder of parts",
        ) from error  # fmt: skip


SendEvent = Callable[[tuple[Any, ...]], None]
"""Sends the name of a method of `IngestProgress` and its arguments to the process that submitted the slide."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings that are the same for every slide of a run; `version` is that of the process that submits slides.

    A part that is larger than `part_bytes` is published, and another one begun.
    """

    folders: PartFolders
    spec: TilingSpec
    options: IngestOptions
    part_bytes: int
    version: str = __version__


@dataclass(frozen=True, slots=True)
class IngestedSlide:
    """The outcome of a slide, and the name of the part that has it."""

    outcome: SlideOutcome
    part: str


def ingest_slide(
    settings: ClusterSettings, slide: SlideInput, workers: int, send: SendEvent
) -> IngestedSlide:
    """Ingest a slide into this process's part, by a number of worker processes; send its progress.

    Raises:
        UsageError: this machine has another version of histopipe, or does not see the folder of parts or the slide.
        MachineShort: its disk or memory ran out.
    """
    _check(settings)
    if not slide.file.path.parent.is_dir():
        raise UsageError(
            f"the worker on {socket.gethostname()} does not see {slide.file.path.parent}",
            todo="let all machines see the slides under one path",
        )
    options = replace(settings.options, workers=workers)
    while True:
        with _beginning:
            if settings.folders not in _parts:
                _parts[settings.folders] = PartStore(settings.folders, workers)
            part = _parts[settings.folders]
        with part.busy:
            if _parts.get(settings.folders) is not part:
                continue  # it was published while this thread waited for it
            ingested = part.ingest(slide, settings.spec, options, _EventProgress(send))
            if (part.store / "data.mdb").stat().st_size >= settings.part_bytes:
                part.publish()
            return ingested


def publish(settings: ClusterSettings) -> None:
    """Publish this process's part, and the parts that ended processes left on this machine."""
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
            f"the worker on {host} has another histopipe", found=__version__, expected=settings.version,
            todo="install the same version everywhere",
        )  # fmt: skip
    if not settings.folders.out.is_dir():
        raise UsageError(
            f"the worker on {host} does not see {settings.folders.out}",
            todo="use a folder that all machines share, under one path",
        )


class _EventProgress(SilentProgress):
    def __init__(self, send: SendEvent) -> None:
        self._send = send

    def bar(self, title: str, **options: Any) -> Bar:
        if not options.get("detail"):  # only the bars of slides are details; their titles are ids
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
