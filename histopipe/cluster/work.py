"""What a worker of a cluster does: ingest one slide into its part, publish its parts. Plain functions of picklable values."""

from __future__ import annotations

import atexit
import multiprocessing
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from histopipe._version import __version__
from histopipe.cluster.part import Depot, Part
from histopipe.errors import UsageError
from histopipe.ingest.job import SlideJob
from histopipe.ingest.outcome import SlideOutcome
from histopipe.ingest.request import IngestOptions
from histopipe.ingest.run import ingest
from histopipe.slides.discovery import SlideFile
from histopipe.slides.tables import SlideLabel
from histopipe.tiling.spec import TilingSpec

Tell = Callable[[dict[str, Any]], None]
"""Sends a few facts of a slide to whoever gave it out."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is the same for every slide of a run.

    Attributes:
        depot: where parts lie.
        spec: how to tile.
        part_bytes: a part that is larger is published, and another begun.
        version: of the histopipe that gives slides out.
    """

    depot: Depot
    spec: TilingSpec
    part_bytes: int
    version: str = __version__


@dataclass(frozen=True, slots=True)
class Done:
    """A slide that a worker has finished with: its outcome, and the name of the part that has it."""

    outcome: SlideOutcome
    part: str


def absolute(slide: SlideFile) -> SlideFile:
    """With paths that do not depend on where a worker was started."""
    files = tuple(path.absolute() for path in slide.files)
    return replace(slide, path=slide.path.absolute(), files=files)


def options_of(options: IngestOptions, job: SlideJob) -> IngestOptions:
    """The options that one slide needs: of a cohort's tables only its own row, with what was known of it before."""
    name, record = job.slide.id, job.record
    return replace(
        options, labels={name: SlideLabel(record.label, record.patient, record.site)},
        mpps={} if job.mpp_from_csv is None else {name: job.mpp_from_csv},
        coords={} if job.coords is None else {name: replace(job.coords, path=job.coords.path.absolute())},
        annotations={} if job.annotations is None else {name: job.annotations.absolute()},
        allow_mixed_mpp=True, # of all slides it was looked at before
    )  # fmt: skip


_parts: dict[Depot, Part] = {}
"""Of this process: one a data set."""
_beginning = threading.Lock()


def ingest_slide(
    order: Order, slide: SlideFile, options: IngestOptions, workers: int, tell: Tell
) -> Done:
    """Ingest a slide into this process's part.

    Args:
        order: of the run.
        slide: its files, under the same paths as where it was given out.
        options: of this slide.
        workers: processes to read it with.
        tell: hears how far it is.

    Raises:
        UsageError: this machine has another histopipe, or does not see the folder of parts.
        MachineShort: its disk or memory ran out.
    """
    _check(order)
    if not slide.path.parent.is_dir():
        raise UsageError(
            f"the worker on {socket.gethostname()} does not see {slide.path.parent}",
            todo="let all machines see the slides under one path",
        )
    while True:
        part = _part(order, workers)
        with part.busy:
            if _parts.get(order.depot) is not part:
                continue  # it was published while this thread waited for it
            with part.writing(order.spec) as writer:
                report = ingest(
                    [slide], part.store, order.spec, replace(options, workers=workers), _Told(tell),
                    pool=part.pool, writer=writer,
                )  # fmt: skip
            done = Done(report.slides[0], part.name)
            if part.bytes >= order.part_bytes:
                part.publish()
            return done


def _part(order: Order, workers: int) -> Part:
    """This process's, begun if there is none."""
    with _beginning:
        if order.depot not in _parts:
            _let_have_children()
            _parts[order.depot] = part = Part(order.depot, workers)
            atexit.register(part.close)
        return _parts[order.depot]


def publish(order: Order) -> list[str]:
    """Publish this process's part, and those that others have left on this machine; their names."""
    _check(order)
    published = []
    part = _parts.get(order.depot)
    if part is not None:
        with part.busy:
            published += part.publish()
            part.close()
            _parts.pop(order.depot, None)
        atexit.unregister(part.close)
    return published + order.depot.publish_abandoned()


def _check(order: Order) -> None:
    host = socket.gethostname()
    if order.version != __version__:
        raise UsageError(
            f"the worker on {host} has another histopipe", found=__version__, expected=order.version,
            todo="install the same version everywhere",
        )  # fmt: skip
    if not order.depot.out.is_dir():
        raise UsageError(
            f"the worker on {host} does not see {order.depot.out}",
            todo="take a folder that all machines share, under one path",
        )


def _let_have_children() -> None:
    """Let this process have some, which Python refuses to what Dask's nanny starts.

    It would leave them behind if the nanny ended it; ours end with their parent, however it ends.
    """
    multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]


class _Told:
    """A progress that is told elsewhere."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def begin(self, slides: int) -> None:
        """It is one slide."""

    def planned(self, slide: str, patches: int) -> None:
        self._tell({"what": "planned", "slide": slide, "patches": patches})

    def advanced(self, slide: str, patches: int) -> None:
        self._tell({"what": "advanced", "slide": slide, "patches": patches})

    def finished(self, outcome: SlideOutcome) -> None:
        """The task's result says it."""

    def said(self, text: str) -> None:
        self._tell({"what": "said", "text": f"{socket.gethostname()}: {text}"})

    def close(self) -> None:
        """Nothing is open."""
