"""The job of a slide: what is known before the ingest, the plan, and the events up to its record in the store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.rules import Frame
from histopipe.errors import SlideError, SlideUnreadable
from histopipe.geometry import Mpp
from histopipe.ingestion.coords import CoordsFile
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.patch_source import PatchRecipe
from histopipe.measure.patch_labels import PatchLabels
from histopipe.slides.slide_files import SlideFile, fingerprint
from histopipe.slides.staging import StagingArea
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import FailureKind, SlideRecord, SlideState
from histopipe.system.output import to_storable_text
from histopipe.tiling.core_grid import Core
from histopipe.tiling.plan import TilingPlan

_TRIES = 2
"""Number of worker deaths after which a slide fails. One death may have another cause than the slide."""


@dataclass(frozen=True, slots=True)
class SlidePlan:
    """Plan of a slide whose patches can be stored.

    The record has the fingerprint that was taken before the files were read. `thumbnails` are JPEG and PNG files by
    name. `seconds` is the worker time of planning. `columns` are additional columns of the index, (N,) each.
    `stored_bytes` and `storing_seconds`, of one worker, are estimates from a sample of the patches.
    """

    record: SlideRecord
    plan: TilingPlan
    recipe: PatchRecipe
    thumbnails: dict[str, bytes]
    columns: dict[str, NDArray[Any]]
    stored_bytes: int
    storing_seconds: float
    seconds: float
    labels: PatchLabels | None


@dataclass(slots=True, eq=False)
class SlideJob:
    """A slide to ingest, from its file to its record in the store. Small enough to be sent to a worker before planning.

    Attributes:
        label: row of the labels file; None keeps the label, patient and site that the store has.
        mpp: scale at level 0 from a table.
        coords, annotations, mask: files about the slide.
        patient: patient from the slide's id, which a patient in `label` overrides.
        staged: local copy, which is read instead of the file.
        frame: setting `frame` for the files about the slide.
        core: core of a tissue microarray whose outline it is; None for a slide.
        number: number of the slide in the store; -1 if it has none yet.
        record: current record. It is failed as soon as the slide has failed, and complete after `finish`.
        again: whether the slide was complete and is ingested again.
        options: options of the ingest, from `begin`.
        tasks: tasks to be submitted: None to plan the slide, or the patch numbers of a chunk.
        plan: plan of the slide, from planning until `release`.
    """

    file: SlideFile
    label: SlideLabel | None = None
    mpp: Mpp | None = None
    coords: CoordsFile | None = None
    annotations: Path | None = None
    mask: Path | None = None
    patient: str | None = None
    staged: SlideFile | None = None
    number: int = -1
    again: bool = False
    frame: Frame = "auto"
    core: Core | None = None
    record: SlideRecord = field(init=False)
    options: IngestOptions = field(init=False, default_factory=IngestOptions)
    tasks: deque[NDArray[np.int64] | None] = field(init=False, default_factory=deque)
    plan: SlidePlan | None = field(init=False, default=None)
    _begun: float | None = field(init=False, default=None)
    _dead_workers: int = field(init=False, default=0)
    _worker_seconds: float = field(init=False, default=0.0)
    _stored: NDArray[np.uint32] = field(
        init=False, default_factory=lambda: np.zeros((2, 0), np.uint32)
    )
    """Length in bytes and CRC of each patch, (2, N)."""
    _unreadable: int = field(init=False, default=0)
    _problem: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.record = SlideRecord.new(self.file)

    @property
    def id(self) -> str:
        """Slide id."""
        return self.file.id

    def with_original_paths(self, text: str) -> str:
        """Return a text, such as an error message, with the paths of the original in place of those of a copy."""
        if self.staged is None:
            return text
        base = self.file.location.rpartition("/")[0]
        folder = f"{base}/" if base or self.file.remote else ""
        return text.replace(f"{self.staged.path.parent}/", folder)

    @property
    def patches(self) -> int:
        """Number of planned patches; 0 before planning."""
        return len(self.plan.plan) if self.plan else 0

    @property
    def failed(self) -> bool:
        """Whether the slide has failed."""
        return self.record.state is SlideState.FAILED

    @property
    def ended(self) -> bool:
        """Whether the slide has failed or is planned, and no task is left to be submitted."""
        return (self.failed or self.plan is not None) and not self.tasks

    @property
    def seconds(self) -> float:
        """Wall time since `begin`, in seconds."""
        return 0.0 if self._begun is None else round(time.monotonic() - self._begun, 3)

    @property
    def seconds_left(self) -> float:
        """Remaining worker time of the slide in seconds."""
        return max(0.0, self.options.seconds_for(self.patches) - self._worker_seconds)

    @property
    def bytes_to_come(self) -> int:
        """Estimated bytes of the patches that are not stored yet."""
        left = self.patches - np.count_nonzero(self._stored[0]) - self._unreadable
        return int(left / max(1, self.patches) * self.plan.stored_bytes) if self.plan else 0

    # Events. Each may add tasks or fail the slide.

    def begin(self, options: IngestOptions) -> None:
        """Begin the ingest of the slide with its planning."""
        self.options, self._begun = options, time.monotonic()
        self.tasks.append(None)

    def planned(self, result: SlidePlan | SlideRecord) -> None:
        """Receive the plan, or the record of the failure. The pipeline adds the chunks when they fit on the disk."""
        if isinstance(result, SlideRecord):
            reason = to_storable_text(self.with_original_paths(result.error or ""))
            self.record = replace(result, error=reason)
            return
        self.plan, record = result, result.record
        self.record = replace(
            record,
            route_reason=self.with_original_paths(record.route_reason or ""),
            notes=list(map(self.with_original_paths, record.notes)),
        )
        self._worker_seconds += result.seconds
        self._stored = np.zeros((2, self.patches), np.uint32)
        if not self.seconds_left:
            self.timed_out()

    def chunk_stored(
        self,
        rows: NDArray[np.int64],
        stored: NDArray[np.uint32],
        problem: str | None,
        seconds: Mapping[str, float],
    ) -> None:
        """Receive the result of `store_chunk`."""
        self._stored[:, rows] = stored
        self._worker_seconds += sum(seconds.values())
        self._unreadable += int((stored[0] == 0).sum())
        self._problem = self._problem or problem
        if self._too_many_unreadable:
            self.tasks.clear()  # the slide fails when the running chunks are stored
        elif self.tasks and not self.seconds_left:
            self.timed_out()

    def worker_died(self, task: NDArray[np.int64] | None, error: Exception) -> None:
        """Handle the death of a worker during a task. After the first death, the task is submitted again, before others."""
        self._dead_workers += 1
        if self._dead_workers < _TRIES and not self.failed:
            self.tasks.appendleft(task)
        else:
            self.fail(
                f"{self.file.location}: worker processes died while reading it ({error}); the file is probably "
                "damaged and crashes its decoder, or memory ran out"
            )

    def timed_out(self) -> None:
        """Fail the slide because its time limit is exceeded."""
        self.fail(
            f"{self.file.location} is not complete after {self.options.seconds_for(self.patches):.0f} s "
            "of worker time; exclude it, or increase --slide-timeout",
            option=self.options.timeout_text,
        )

    def task_failed(self, error: Exception) -> None:
        """Fail the slide because a task raised an error."""
        reason = (
            f"{type(error).__name__}: {error}; this is a bug in histopipe: "
            "please report it with the lines about this slide in ingest.log"
        )
        if isinstance(error, MemoryError):
            reason = "memory ran out while reading it; use fewer --workers"
        # The message of a SlideError is complete; for example, the file is gone since planning.
        self.fail(
            str(error) if isinstance(error, SlideError) else f"{self.file.location}: {reason}"
        )

    def fail(
        self, reason: str, kind: FailureKind = FailureKind.FILE, option: str | None = None
    ) -> None:
        """Fail the slide; it is recorded when no task is running any more. The first reason is kept."""
        if not self.failed:
            if self.plan is None and kind is FailureKind.FILE:
                # Planning would have set it: the slide is ingested again if its size or time changes.
                with suppress(SlideUnreadable):
                    self.record = self.record.with_fingerprint(fingerprint(self.file))
            self.record = self.record.with_failure(self.with_original_paths(reason), kind, option)
        self.tasks.clear()

    # The result, after the slide has ended.

    def has_changed(self) -> bool:
        """Return whether the file has changed since the slide was planned; SlideUnreadable if it is missing."""
        return self.record.with_fingerprint(fingerprint(self.file)) != self.record

    def finish(self) -> SlidePlan | None:
        """Complete or fail the record of a slide that has ended; return its plan if it is complete.

        It fails if too many patches are unreadable, or the file has changed since it was planned.
        """
        plan = self.plan
        if plan is not None and self._too_many_unreadable:
            self.fail(
                f"{self.file.location}: at least {self._unreadable} of {self.patches} patches cannot be read "
                f"(--max-unreadable allows {self.options.max_unreadable:.2%}), first: {self._problem}",
                option=self.options.unreadable_text,
            )
        elif plan is not None and self.staged is None:  # a copy was compared when it was complete
            try:
                if self.has_changed():
                    self.fail(
                        f"{self.file.location} changed while it was being read; ingest it again when nothing writes to it"
                    )
            except SlideUnreadable as error:
                self.fail(str(error))
        if plan is None or self.failed:
            return None
        lost = f"{self._unreadable} unreadable patches, first: {self._problem}"
        self.record = replace(
            self.record,
            state=SlideState.COMPLETE,
            stored=self.patches - self._unreadable,
            unreadable=self._unreadable,
            stored_bytes=int(self._stored[0].sum()),
            notes=self.record.notes + [self.with_original_paths(lost)] * bool(self._unreadable),
        )
        return plan

    def columns(self, plan: SlidePlan, classes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
        """Return the index columns of the complete slide, (N,) each; `classes` are class numbers by name."""
        cells, labels = plan.plan, plan.labels
        places = ("x_l0", "y_l0", "x_level", "y_level", "tissue")
        return {
            **{name: getattr(cells, name) for name in places},
            "focus": np.full(len(cells), np.nan, np.float32),  # `quality` measures it later
            "length": self._stored[0],
            "crc": self._stored[1],
            # From annotations; the slide's label is in its record.
            "label": np.full(len(cells), -1, np.int32)
            if labels is None
            else labels.numbered(classes),
            **({} if labels is None else {"covered": labels.covered}),
            **plan.columns,
        }

    def release(self, stage: StagingArea | None) -> None:
        """Free the plan, the arrays and the copy of a slide, since the jobs of all slides are kept until the end."""
        self.plan, self._stored = None, np.zeros((2, 0), np.uint32)
        if stage is not None and self.staged is not None:
            stage.release(self.staged.path.parent)

    @property
    def _too_many_unreadable(self) -> bool:
        return self._unreadable / max(1, self.patches) > self.options.max_unreadable
