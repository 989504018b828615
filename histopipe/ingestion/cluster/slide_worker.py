"""The tasks of a Dask worker: ingest a slide into the worker's part, and publish its part."""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from histopipe._version import __version__
from histopipe.errors import UsageError
from histopipe.ingestion.cluster.part_store import PartFolders, PartStore
from histopipe.ingestion.ingest_slides import ingest_slides
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.report import SlideOutcome
from histopipe.system.progress import Bar, SilentProgress
from histopipe.tiling.spec import TilingSpec

SendEvent = Callable[[dict[str, Any]], None]
"""Sends an event of a slide to the process that submitted it."""


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


_parts: dict[PartFolders, PartStore] = {}
"""The part of this process for each data set."""
_beginning = threading.Lock()


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
        part = _part(settings.folders, workers)
        with part.busy:
            if _parts.get(settings.folders) is not part:
                continue  # it was published while this thread waited for it
            with part.writing(settings.spec) as writer:
                report = ingest_slides(
                    [slide], part.store, settings.spec, options, progress=_EventProgress(send),
                    pool=part.pool, writer=writer,
                )  # fmt: skip
            ingested = IngestedSlide(report.slides[0], part.store.name)
            if part.bytes >= settings.part_bytes:
                part.publish()
            return ingested


def publish(settings: ClusterSettings) -> list[str]:
    """Publish this process's part, and the parts that ended processes left on this machine; return their names."""
    _check(settings)
    published = []
    part = _parts.get(settings.folders)
    if part is not None:
        with part.busy:
            published += part.publish()
            part.close()
            _parts.pop(settings.folders, None)
        atexit.unregister(part.close)
    return published + settings.folders.publish_abandoned()


def _part(folders: PartFolders, workers: int) -> PartStore:
    """Return this process's part, begun if there is none."""
    with _beginning:
        if folders not in _parts:
            _parts[folders] = part = PartStore(folders, workers)
            atexit.register(part.close)
        return _parts[folders]


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
    """Sends progress as events."""

    def __init__(self, send: SendEvent) -> None:
        self._send = send

    def bar(self, title: str, **options: Any) -> Bar:
        if not options.get("detail"):  # only the bars of slides are details; their titles are ids
            return Bar()
        self._send({"event": "planned", "slide": title, "patches": options["total"]})
        return _EventBar(title, self._send)

    def message(self, text: str) -> None:
        self._send({"event": "message", "text": f"{socket.gethostname()}: {text}"})


class _EventBar(Bar):
    def __init__(self, slide: str, send: SendEvent) -> None:
        self._slide, self._send = slide, send

    def advance(self, count: int = 1) -> None:
        self._send({"event": "advanced", "slide": self._slide, "patches": count})
