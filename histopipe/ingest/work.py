"""A slide in flight: what is planned of it, what is done, and what it will be recorded as."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import SlideUnreadable
from histopipe.ingest.chunks import Chunk
from histopipe.ingest.job import ChunkResult, PlannedSlide, SlideFailure, SlideJob
from histopipe.slides.identity import fingerprint
from histopipe.store.record import FailureKind, SlideRecord


@dataclass(frozen=True, slots=True)
class SlideTimeout:
    """How many seconds of workers' time a slide may take.

    Attributes:
        base, per_patch: a fixed part, and one for each of its patches. The default would do for a slide of which five
            patches a second are read, a hundredth of what is usual.
    """

    base: float = 600.0
    per_patch: float = 0.2

    @property
    def text(self) -> str:
        """As an option that a failure may be due to."""
        return f"--slide-timeout {self.base:g}, {self.per_patch:g} a patch"

    def of(self, patches: int) -> float:
        """For a slide of so many patches."""
        return self.base + self.per_patch * patches


def unreadable_text(share: float) -> str:
    """The most that may be unreadable, as an option that a failure may be due to."""
    return f"--max-unreadable {share:g}"


def _no_numbers() -> NDArray[np.uint32]:
    return np.zeros(0, np.uint32)


@dataclass(slots=True, eq=False)
class Work:
    """A slide in flight: first its plan, then its chunks.

    Attributes:
        begun: when, by the monotonic clock.
        chunks: still to be given out; `running` tasks are.
        deaths: of workers at it.
        spent: seconds of workers' time, of the tasks that are done.
        failure: why it will fail once nothing of it runs any more.
        length, crc: (N,) uint32 of every patch stored.
    """

    job: SlideJob
    begun: float
    planned: PlannedSlide | None = None
    chunks: deque[Chunk] = field(default_factory=deque)
    running: int = 0
    deaths: int = 0
    spent: float = 0.0
    failure: SlideFailure | None = None
    length: NDArray[np.uint32] = field(default_factory=_no_numbers)
    crc: NDArray[np.uint32] = field(default_factory=_no_numbers)
    done: int = 0
    unreadable: int = 0
    problem: str | None = None

    @property
    def plan(self) -> PlannedSlide:
        """What was planned; only to be asked once it was."""
        if self.planned is None:
            raise RuntimeError(f"{self.job.slide.id} is not planned yet")
        return self.planned

    @property
    def patches(self) -> int:
        """How many are planned; 0 as long as none are."""
        return len(self.planned.plan) if self.planned else 0

    @property
    def lost_share(self) -> float:
        """Patches found unreadable so far, of all."""
        return self.unreadable / max(1, self.patches)

    @property
    def bytes_to_come(self) -> int:
        """The estimate of what is still to be stored."""
        if not self.patches:
            return 0
        return int((1 - self.done / self.patches) * self.plan.estimate.stored_bytes)

    def plan_in(self, planned: PlannedSlide) -> None:
        """Take in the plan."""
        self.planned = planned
        self.spent += planned.seconds
        self.length, self.crc = np.zeros((2, len(planned.plan)), np.uint32)

    def chunk_in(self, result: ChunkResult) -> None:
        """Take in what was stored of a chunk."""
        self.length[result.rows], self.crc[result.rows] = result.length, result.crc
        self.done += len(result.rows)
        self.spent += result.seconds
        self.unreadable += int((result.length == 0).sum())
        self.problem = self.problem or result.problem

    def last_look(self, max_unreadable: float) -> SlideFailure | None:
        """Why a slide whose chunks are all in is not complete after all; None if it is."""
        path, record = self.job.slide.path, self.plan.record
        if self.lost_share > max_unreadable:
            reason = (
                f"{path}: at least {self.unreadable} of {self.patches} patches cannot be read "
                f"(--max-unreadable allows {max_unreadable:.2%}), first: {self.problem}"
            )
            return SlideFailure(reason, FailureKind.FILE, record, unreadable_text(max_unreadable))
        try:
            if fingerprint(self.job.slide) == self.plan.before:
                return None
            reason = f"{path} changed while it was being read; ingest again once it is at rest"
        except SlideUnreadable as error:
            reason = str(error)
        return SlideFailure(reason, FailureKind.FILE, record)

    def seen(self) -> SlideRecord:
        """The record of a slide that is not planned, with what can be seen from outside: it may be tried again by that."""
        try:
            now = fingerprint(self.job.slide)
        except SlideUnreadable:
            return self.job.record
        return dataclasses.replace(
            self.job.record, size_bytes=now.size_bytes, mtime_ns=now.mtime_ns
        )

    def record(self) -> SlideRecord:
        """The record of the slide when all of it is stored."""
        record = self.plan.record
        lost = f"{self.unreadable} unreadable patches, first: {self.problem}"
        return dataclasses.replace(
            record,
            stored=self.patches - self.unreadable,
            unreadable=self.unreadable,
            stored_bytes=int(self.length.sum()),
            notes=[*record.notes, *([lost] if self.unreadable else [])],
        )

    def columns(self, classes: Mapping[str, int]) -> Mapping[str, NDArray[Any]]:
        """The index of the slide when all of it is stored.

        Args:
            classes: numbers of the classes that its patches have.
        """
        plan, labels = self.plan.plan, self.plan.labels
        found = dict(self.plan.columns)
        if labels is not None:
            found |= {"label": labels.numbered(classes), "covered": labels.covered}
        return {
            "x_l0": plan.x_l0,
            "y_l0": plan.y_l0,
            "x_level": plan.x_level,
            "y_level": plan.y_level,
            "tissue": plan.tissue,
            "focus": np.full(len(plan), np.nan, np.float32),  # measured later, by its own command
            "length": self.length,
            "crc": self.crc,
            # Of annotations; a slide's label is in its record.
            "label": np.full(len(plan), -1, np.int32),
            **found,
        }
