"""State of a slide whose tasks are running: it collects their results and failures, and builds the slide's record."""

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
from histopipe.ingestion.records import PendingSlide, with_fingerprint
from histopipe.ingestion.storing import ChunkResult
from histopipe.slides.slide_files import fingerprint
from histopipe.store.record import FailureKind, SlideRecord

_TRIES = 2
"""Number of worker deaths after which a slide fails. One death may have another cause than the slide."""

PLAN = None
"""First task of a slide. All other tasks are chunks."""


@dataclass(slots=True, eq=False)
class SlideInFlight:
    """A slide between its first task and its record in the store.

    `tasks` are the tasks to be submitted: `PLAN`, or chunks. `running` counts the submitted tasks that have not ended.
    A slide with a `failure` fails when no task is running any more. `begun` is a time of the monotonic clock.
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
        """Number of the slide in the store."""
        return self.pending.number

    @property
    def patches(self) -> int:
        """Number of planned patches; 0 before planning."""
        return len(self.plan.plan) if self.plan else 0

    @property
    def ended(self) -> bool:
        """Whether all tasks of the slide have ended."""
        return not self.tasks and not self.running

    @property
    def seconds_left(self) -> float:
        """Remaining worker time of the slide in seconds."""
        return max(0.0, self.options.seconds_for(self.patches) - self._seconds)

    @property
    def bytes_to_come(self) -> int:
        """Estimated bytes of the patches that are not stored yet."""
        if self.plan is None or not self.patches:
            return 0
        return int((1 - self._done / self.patches) * self.plan.estimate.stored_bytes)

    # Events. Each may add tasks or fail the slide.

    def planned(self, plan: PlannedSlide) -> None:
        """Receive the plan. The pipeline adds the chunks to `tasks` when they fit on the disk."""
        self.plan = plan
        self._seconds += plan.seconds
        self._length, self._crc = np.zeros((2, self.patches), np.uint32)
        self._check_time()

    def chunk_stored(self, result: ChunkResult) -> None:
        """Receive the result of a stored chunk."""
        self._length[result.rows], self._crc[result.rows] = result.length, result.crc
        self._done += len(result.rows)
        self._seconds += result.seconds
        self._unreadable += int((result.length == 0).sum())
        self._problem = self._problem or result.problem
        if self._too_many_unreadable:
            self.tasks.clear()  # the slide fails when the running chunks are stored
        elif self.tasks:
            self._check_time()

    def worker_died(self, task: Chunk | None, error: Exception) -> None:
        """Handle the death of a worker during a task. After the first death, the task is submitted again."""
        self._dead_workers += 1
        if self._dead_workers < _TRIES and self.failure is None:
            self.tasks.appendleft(task)
            return
        self._fail(
            f"{self.pending.slide.file.location}: worker processes died while reading it ({error}); the file is probably "
            "damaged and crashes its decoder, or memory ran out"
        )

    def timed_out(self) -> None:
        """Fail the slide because its time limit is exceeded."""
        self._fail(
            f"{self.pending.slide.file.location} is not complete after {self.options.seconds_for(self.patches):.0f} s "
            "of worker time; exclude it, or increase --slide-timeout",
            option=self.options.timeout_text,
        )

    def task_failed(self, error: Exception) -> None:
        """Fail the slide because a task raised an error."""
        if isinstance(error, SlideError):  # the file may be gone since planning
            self._fail(str(error))
        elif isinstance(error, MemoryError):
            self._fail(
                f"{self.pending.slide.file.location}: memory ran out while reading it; use fewer --workers"
            )
        else:
            self._fail(
                f"{self.pending.slide.file.location}: {type(error).__name__}: {error}; this is a bug in histopipe: "
                "please report it with the lines about this slide in ingest.log"
            )

    # The result, after the slide has ended.

    def result(self) -> PlannedSlide | SlideFailure:
        """Return the plan of a complete slide, or the failure."""
        if self.failure is not None:
            named = self.pending.slide.with_original_paths(self.failure.reason)
            return dataclasses.replace(self.failure, reason=named)
        if self.plan is None:
            raise RuntimeError(f"{self.id} ended without a plan or a failure")
        slide, record = self.pending.slide, self.plan.record
        if self._too_many_unreadable:
            reason = (
                f"{slide.file.location}: at least {self._unreadable} of {self.patches} patches cannot be read "
                f"(--max-unreadable allows {self.options.max_unreadable:.2%}), first: {self._problem}"
            )
            reason = slide.with_original_paths(reason)
            return SlideFailure(reason, FailureKind.FILE, record, self.options.unreadable_text)
        try:
            # A copy was compared with the original when it was complete.
            if slide.staged or fingerprint(slide.file) == self.plan.fingerprint:
                return self.plan
            reason = f"{slide.file.location} changed while it was being read; ingest it again when nothing writes to it"
        except SlideUnreadable as error:
            reason = str(error)
        return SlideFailure(reason, FailureKind.FILE, record)

    def complete_record(self, plan: PlannedSlide) -> SlideRecord:
        """Return the record of the complete slide."""
        lost = f"{self._unreadable} unreadable patches, first: {self._problem}"
        notes = [*plan.record.notes, *([lost] if self._unreadable else [])]
        named = self.pending.slide.with_original_paths
        return dataclasses.replace(
            plan.record,
            stored=self.patches - self._unreadable,
            unreadable=self._unreadable,
            stored_bytes=int(self._length.sum()),
            route_reason=named(plan.record.route_reason or ""),
            notes=list(map(named, notes)),
        )

    def columns(self, plan: PlannedSlide, classes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
        """Return the index columns of the complete slide, (N,) each; `classes` are class numbers by name."""
        cells, labels = plan.plan, plan.labels
        columns = {
            **{name: getattr(cells, name) for name in ("x_l0", "y_l0", "x_level", "y_level", "tissue")},
            "focus": np.full(len(cells), np.nan, np.float32),  # `quality` measures it later
            "length": self._length,
            "crc": self._crc,
            "label": np.full(len(cells), -1, np.int32),  # from annotations; the slide's label is in its record
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
            self.timed_out()

    def _fail(self, reason: str, *, option: str | None = None) -> None:
        """Fail the slide when no task is running any more. The first reason is kept."""
        record = self.plan.record if self.plan else self._unplanned_record()
        self.failure = self.failure or SlideFailure(reason, FailureKind.FILE, record, option)
        self.tasks.clear()

    def _unplanned_record(self) -> SlideRecord:
        """Return the record with the file's size and time. The slide is retried if they change."""
        record = self.pending.record
        try:
            now = fingerprint(self.pending.slide.file)
        except SlideUnreadable:
            return record
        return with_fingerprint(record, now)
