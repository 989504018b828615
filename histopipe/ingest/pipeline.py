"""The ingest itself: keeps an executor's workers busy with the plans and chunks of several slides at once.

The process that runs this decides and records; its workers read and write pixels. A slide becomes visible by this
process's last transaction for it. Killed at any moment, the run loses the slides in flight and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from histopipe.errors import SlideUnreadable
from histopipe.files import storable
from histopipe.ingest.claims import Claims
from histopipe.ingest.outcome import SlideOutcome, Status
from histopipe.ingest.progress import Progress
from histopipe.ingest.worker import (
    Chunk,
    ChunkResult,
    PlannedSlide,
    Settings,
    SlideFailure,
    SlideJob,
    encode_chunk,
    plan_slide,
)
from histopipe.slides.identity import fingerprint
from histopipe.store.record import FailureKind, SlideRecord, SlideState
from histopipe.store.writer import StoreWriter

_CHUNK_PIXELS = 1 << 24
"""Pixels encoded between two transactions: 256 patches of 256², about 5 MB as JPEG."""
_CHUNK_PATCHES = 512
_CLAIM_POLL_SECONDS = 0.5


@dataclass(slots=True)
class _Work:
    """A slide in flight."""

    job: SlideJob
    planned: PlannedSlide
    chunks: deque[Chunk]
    running: int = 0
    length: Any = None
    crc: Any = None
    unreadable: int = 0
    problem: str | None = None


@dataclass(slots=True)
class Pipeline:
    """Ingests jobs into a store through an executor.

    Args:
        writer: the store.
        make_executor: makes what runs `plan_slide` and `encode_chunk`; called again when a worker died.
        settings: the same for every slide.
        claims: which slides are this run's.
        progress: told what happens.
        max_unreadable: share of a slide's patches, 0 to 1, that may be unreadable in a complete slide.
        in_flight: tasks given to the executor at once; twice its workers keeps all busy.
    """

    writer: StoreWriter
    make_executor: Callable[[], Executor]
    settings: Settings
    claims: Claims
    progress: Progress
    max_unreadable: float
    in_flight: int
    _executor: Executor | None = None
    _waiting: deque[SlideJob] = field(default_factory=deque)
    _suspects: deque[SlideJob] = field(default_factory=deque)
    _tried_alone: set[int] = field(default_factory=set)
    _planning: dict[int, SlideJob] = field(default_factory=dict)
    _deferred: deque[SlideJob] = field(default_factory=deque)
    _working: dict[int, _Work] = field(default_factory=dict)
    _futures: dict[Future[Any], Callable[[Any], SlideOutcome | None]] = field(default_factory=dict)

    def run(self, jobs: Sequence[SlideJob]) -> Iterator[SlideOutcome]:
        """Ingest every job, yielding outcomes as slides end.

        Raises:
            MachineShort: a full disk, or no memory. Nothing that was complete is lost.
        """
        self._waiting.extend(jobs)
        while self._waiting or self._deferred or self._suspects or self._working or self._futures:
            try:
                yield from self._advance()
            except BrokenExecutor:
                yield from self._on_dead_worker()

    def _advance(self) -> Iterator[SlideOutcome]:
        """Give out tasks, and take in those that are done."""
        self._submit()
        if not self._futures:
            yield from self._retry_deferred()
            return
        done, _ = wait(self._futures, return_when=FIRST_COMPLETED)
        for future in done:
            outcome = self._futures.pop(future)(future.result())
            if outcome is not None:
                yield outcome

    def close(self) -> None:
        """End the workers, once they are done with what they are at."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _submit(self) -> None:
        """Fill the executor: chunks of slides begun first, so that slides end; else the next slide's plan."""
        if self._executor is None:
            self._executor = self.make_executor()
        while len(self._futures) < self.in_flight:
            if not (self._submit_chunk(self._executor) or self._submit_plan(self._executor)):
                return

    def _on_dead_worker(self) -> Iterator[SlideOutcome]:
        """A worker was killed, or crashed on a slide: which one shows when each in flight is done again by itself."""
        in_flight = {job.number: job for job in self._planning.values()}
        in_flight |= {number: work.job for number, work in self._working.items()}
        self._futures.clear()
        self._planning.clear()
        self._working.clear()
        self.close()
        for number, job in in_flight.items():
            self.progress.dropped(job.slide.id)
            if number not in self._tried_alone:
                self._suspects.append(job)
                continue
            reason = (
                f"{job.slide.path}: the worker process that read it died; the file is probably damaged in a "
                "way that crashes its decoder, or memory ran out"
            )
            yield self._fail(job, SlideFailure(reason, FailureKind.FILE, job.record))

    def _submit_chunk(self, executor: Executor) -> bool:
        for work in self._working.values():
            if work.chunks:
                chunk = work.chunks.popleft()
                work.running += 1
                future = executor.submit(
                    encode_chunk, self.settings, work.job, work.planned.plan.choice, chunk
                )
                self._futures[future] = functools.partial(self._on_chunk, work)
                return True
        return False

    def _submit_plan(self, executor: Executor) -> bool:
        if self._tried_alone & {*self._planning, *self._working}:
            return False  # a suspect is at work: nothing beside it
        if self._suspects:
            job = self._suspects.popleft()
            self._tried_alone.add(job.number)
            self._plan(executor, job)
            return True
        while self._waiting:
            job = self._waiting.popleft()
            if not self.claims.take(job.number):
                self._deferred.append(job)  # another run is at it: look again when all else is done
                continue
            if not job.again and self.writer.record(job.number).state is SlideState.COMPLETE:
                self.claims.release(job.number)
                self._deferred.append(job)  # another run has done it since the store was looked at
                continue
            self._plan(executor, job)
            return True
        return False

    def _plan(self, executor: Executor, job: SlideJob) -> None:
        self.writer.restart(job.number, job.record)
        self._planning[job.number] = job
        future = executor.submit(plan_slide, self.settings, job)
        self._futures[future] = functools.partial(self._on_plan, job)

    def _retry_deferred(self) -> Iterator[SlideOutcome]:
        """Slides that another run claimed: complete by now, or free to be taken over."""
        time.sleep(_CLAIM_POLL_SECONDS)
        records = self.writer.records()
        for _ in range(len(self._deferred)):
            job = self._deferred.popleft()
            record = records[job.number]
            if record.state is SlideState.COMPLETE:
                yield self._ended(job, outcome_of(record, Status.SKIPPED))
            elif self.claims.take(job.number):
                self.claims.release(job.number)
                self._waiting.append(job)
            else:
                self._deferred.append(job)

    def _on_plan(self, job: SlideJob, result: PlannedSlide | SlideFailure) -> SlideOutcome | None:
        del self._planning[job.number]
        if isinstance(result, SlideFailure):
            return self._fail(job, result)
        plan = result.plan
        work = _Work(job, result, deque(_chunks(result, self.settings.spec.patch_size)))
        work.length = np.zeros(len(plan), np.uint32)
        work.crc = np.zeros(len(plan), np.uint32)
        self.progress.planned(job.slide.id, len(plan))
        self._working[job.number] = work
        return self._finish(work)

    def _on_chunk(self, work: _Work, result: ChunkResult) -> SlideOutcome | None:
        work.running -= 1
        rows = slice(result.first, result.first + len(result.length))
        work.length[rows], work.crc[rows] = result.length, result.crc
        work.unreadable += int((result.length == 0).sum())
        work.problem = work.problem or result.problem
        self.progress.advanced(work.job.slide.id, len(result.length))
        if work.unreadable > self.max_unreadable * len(work.planned.plan):
            work.chunks.clear()  # no use reading on: it fails once the chunks under way are in
        return self._finish(work)

    def _finish(self, work: _Work) -> SlideOutcome | None:
        if work.chunks or work.running:
            return None
        del self._working[work.job.number]
        problem = self._problem(work)
        if problem is not None:
            return self._fail(
                work.job, SlideFailure(problem, FailureKind.FILE, work.planned.record)
            )
        record = dataclasses.replace(
            work.planned.record,
            stored=len(work.planned.plan) - work.unreadable,
            unreadable=work.unreadable,
            stored_bytes=int(work.length.sum()),
            notes=[*work.planned.record.notes, *_unreadable_note(work)],
        )
        self.writer.complete(work.job.number, record, _columns(work), work.planned.thumbnails)
        return self._ended(work.job, outcome_of(record, Status.COMPLETE))

    def _problem(self, work: _Work) -> str | None:
        """Why a slide whose chunks are all in is not complete after all."""
        slide, planned = work.job.slide, len(work.planned.plan)
        if work.unreadable > self.max_unreadable * planned:
            return (
                f"{slide.path}: at least {work.unreadable} of {planned} patches cannot be read "
                f"(--max-unreadable allows {self.max_unreadable:.2%}), first: {work.problem}"
            )
        try:
            after = fingerprint(slide)
        except SlideUnreadable as error:
            return str(error)
        if after != work.planned.before:
            return f"{slide.path} changed while it was being read; ingest again once it is at rest"
        return None

    def _fail(self, job: SlideJob, failure: SlideFailure) -> SlideOutcome:
        reason = storable(failure.reason)
        self.writer.fail(job.number, failure.record, reason, failure.kind)
        return self._ended(job, failed_outcome(failure.record, reason))

    def _ended(self, job: SlideJob, outcome: SlideOutcome) -> SlideOutcome:
        self.claims.release(job.number)
        self.progress.finished(outcome)
        return outcome


def outcome_of(record: SlideRecord, status: Status) -> SlideOutcome:
    """The outcome that a complete slide's record tells."""
    return SlideOutcome(
        id=record.id, path=record.path, status=status, patches=record.stored,
        unreadable=record.unreadable, stored_bytes=record.stored_bytes, notes=tuple(record.notes),
    )  # fmt: skip


def failed_outcome(record: SlideRecord, reason: str) -> SlideOutcome:
    """The outcome of a slide that failed."""
    return SlideOutcome(record.id, record.path, Status.FAILED, reason=reason)


def _chunks(planned: PlannedSlide, patch_size: int) -> Iterator[Chunk]:
    pixels = max(patch_size, planned.plan.choice.read_size) ** 2
    size = max(1, min(_CHUNK_PATCHES, _CHUNK_PIXELS // pixels))
    for first in range(0, len(planned.plan), size):
        rows = slice(first, first + size)
        yield Chunk(first, planned.plan.x_l0[rows], planned.plan.y_l0[rows])


def _columns(work: _Work) -> Mapping[str, Any]:
    plan = work.planned.plan
    return {
        "x_l0": plan.x_l0,
        "y_l0": plan.y_l0,
        "x_level": plan.x_level,
        "y_level": plan.y_level,
        "tissue": plan.tissue,
        "focus": np.full(len(plan), np.nan, np.float32),  # measured later, by its own command
        "length": work.length,
        "crc": work.crc,
        "label": np.full(
            len(plan), -1, np.int32
        ),  # of annotations; a slide's label is in its record
    }


def _unreadable_note(work: _Work) -> list[str]:
    return (
        [f"{work.unreadable} unreadable patches, first: {work.problem}"] if work.unreadable else []
    )
