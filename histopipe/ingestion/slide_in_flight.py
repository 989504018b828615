"""A slide in flight: receives the results and failures of its tasks, and becomes a record in the store."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import SlideError, SlideUnreadable
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.patch_source import Chunk
from histopipe.ingestion.planning import PlannedSlide, SlideFailure
from histopipe.ingestion.records import PendingSlide
from histopipe.ingestion.storing import ChunkResult
from histopipe.slides.discovery import fingerprint
from histopipe.store.record import FailureKind, SlideRecord

_TRIES = 2
"""A worker may be killed for another reason than its slide: a slide fails when its workers have died twice."""

PLAN = None
"""The first task of a slide; all others are chunks."""


@dataclass(slots=True, eq=False)
class SlideInFlight:
    """A slide between its first task and its record in the store.

    `tasks` are still to be submitted: `PLAN`, or chunks. `running` counts those that are submitted and have not ended. A
    slide with a `failure` fails once none of its tasks runs any more. `begun` is a time of the monotonic clock.
    """

    pending: PendingSlide
    options: IngestOptions
    tasks: deque[Chunk | None] = field(default_factory=lambda: deque([PLAN]))
    running: int = 0
    plan: PlannedSlide | None = None
    failure: SlideFailure | None = None
    begun: float = field(default_factory=time.monotonic)
    _dead_workers: int = 0
    _seconds: float = 0.0
    _length: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    _crc: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    _done: int = 0
    _unreadable: int = 0
    _problem: str | None = None

    @property
    def id(self) -> str:
        """Slide id."""
        return self.pending.slide.id

    @property
    def number(self) -> int:
        """Number in the store."""
        return self.pending.number

    @property
    def patches(self) -> int:
        """Number of patches planned; 0 before that."""
        return len(self.plan.plan) if self.plan else 0

    @property
    def ended(self) -> bool:
        """Whether nothing of the slide is left to do."""
        return not self.tasks and not self.running

    @property
    def seconds_left(self) -> float:
        """Worker time that its next task may take."""
        return max(0.0, self.options.seconds_for(self.patches) - self._seconds)

    @property
    def bytes_to_come(self) -> int:
        """Estimated bytes that are still to be stored."""
        if self.plan is None or not self.patches:
            return 0
        return int((1 - self._done / self.patches) * self.plan.estimate.stored_bytes)

    # Events, each of which may add tasks or let the slide fail.

    def planned(self, plan: PlannedSlide) -> None:
        """The slide is planned; its chunks are added to `tasks` once they fit on the disk."""
        self.plan = plan
        self._seconds += plan.seconds
        self._length, self._crc = np.zeros((2, self.patches), np.uint32)
        self._check_time()

    def chunk_stored(self, result: ChunkResult) -> None:
        """A chunk is stored."""
        self._length[result.rows], self._crc[result.rows] = result.length, result.crc
        self._done += len(result.rows)
        self._seconds += result.seconds
        self._unreadable += int((result.length == 0).sum())
        self._problem = self._problem or result.problem
        if self._too_many_unreadable:
            self.tasks.clear()  # it fails once the running chunks are stored
        elif self.tasks:
            self._check_time()

    def worker_died(self, task: Chunk | None, error: Exception) -> None:
        """A worker died during a task, which is submitted once more if no worker of the slide died before."""
        self._dead_workers += 1
        if self._dead_workers < _TRIES and self.failure is None:
            self.tasks.appendleft(task)
            return
        self._fail(
            f"{self.pending.slide.file.path}: worker processes that read it died ({error}); the file is probably "
            "damaged in a way that crashes its decoder, or memory ran out"
        )

    def time_is_up(self) -> None:
        """A task was not done in the time that the slide had left."""
        self._fail(
            f"{self.pending.slide.file.path} is not done after {self.options.seconds_for(self.patches):.0f} s "
            "of work; leave it out, or give it more time with --slide-timeout",
            option=self.options.timeout_text,
        )

    def task_failed(self, error: Exception) -> None:
        """A task raised an error."""
        if isinstance(error, SlideError):  # the file was there when the slide was planned
            self._fail(str(error))
        elif isinstance(error, MemoryError):
            self._fail(
                f"{self.pending.slide.file.path}: memory ran out while it was read; use fewer --workers"
            )
        else:
            self._fail(
                f"{self.pending.slide.file.path}: {type(error).__name__}: {error}; this is an error of histopipe: "
                "please report it with the lines about it in ingest.log"
            )

    # The result, once the slide has ended.

    def result(self) -> PlannedSlide | SlideFailure:
        """Return the plan of a slide that is complete, or why the slide fails."""
        if self.failure is not None:
            return self.failure
        if self.plan is None:
            raise RuntimeError(f"{self.id} ended without a plan or a failure")
        file, record = self.pending.slide.file, self.plan.record
        if self._too_many_unreadable:
            reason = (
                f"{file.path}: at least {self._unreadable} of {self.patches} patches cannot be read "
                f"(--max-unreadable allows {self.options.max_unreadable:.2%}), first: {self._problem}"
            )
            return SlideFailure(reason, FailureKind.FILE, record, self.options.unreadable_text)
        try:
            if fingerprint(file) == self.plan.fingerprint:
                return self.plan
            reason = f"{file.path} changed while it was being read; ingest it again once it is no longer written"
        except SlideUnreadable as error:
            reason = str(error)
        return SlideFailure(reason, FailureKind.FILE, record)

    def complete_record(self, plan: PlannedSlide) -> SlideRecord:
        """Return the record of the complete slide."""
        lost = f"{self._unreadable} unreadable patches, first: {self._problem}"
        return dataclasses.replace(
            plan.record,
            stored=self.patches - self._unreadable,
            unreadable=self._unreadable,
            stored_bytes=int(self._length.sum()),
            notes=[*plan.record.notes, *([lost] if self._unreadable else [])],
        )

    def columns(self, plan: PlannedSlide, classes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
        """Return the index of the complete slide, (N,) per column, by the numbers of its patches' classes."""
        places, labels = plan.plan, plan.labels
        columns = {
            **{name: getattr(places, name) for name in ("x_l0", "y_l0", "x_level", "y_level", "tissue")},
            "focus": np.full(len(places), np.nan, np.float32),  # `quality` measures it later
            "length": self._length,
            "crc": self._crc,
            "label": np.full(len(places), -1, np.int32),  # of annotations; the slide's is in its record
            **plan.columns,
        }  # fmt: skip
        if labels is not None:
            columns |= {"label": labels.numbered(classes), "covered": labels.covered}
        return columns

    @property
    def _too_many_unreadable(self) -> bool:
        return self._unreadable / max(1, self.patches) > self.options.max_unreadable

    def _check_time(self) -> None:
        if self._seconds > self.options.seconds_for(self.patches):
            self.time_is_up()

    def _fail(self, reason: str, *, option: str | None = None) -> None:
        """Let the slide fail once none of its tasks runs any more; the first reason counts."""
        record = self.plan.record if self.plan else self._unplanned_record()
        self.failure = self.failure or SlideFailure(reason, FailureKind.FILE, record, option)
        self.tasks.clear()

    def _unplanned_record(self) -> SlideRecord:
        """Return the record with the file's size and time: another size or time is a reason to try again."""
        record = self.pending.record
        try:
            now = fingerprint(self.pending.slide.file)
        except SlideUnreadable:
            return record
        return dataclasses.replace(record, size_bytes=now.size_bytes, mtime_ns=now.mtime_ns)
