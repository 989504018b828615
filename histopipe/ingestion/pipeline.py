"""Run the tasks of several slides in parallel, and record each slide that ends.

The main process schedules tasks and writes records. Workers read and write pixels. A slide becomes visible by the last
transaction of the main process for it. If the run is killed, only the slides in flight are lost.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from histopipe.errors import HistopipeError, MachineShort, SlideError
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.patch_source import Chunk, chunks
from histopipe.ingestion.planning import PlannedSlide, SlideFailure, plan_slide
from histopipe.ingestion.records import PendingSlide
from histopipe.ingestion.report import (
    IngestProgress,
    SlideOutcome,
    Status,
    failed_outcome,
    outcome_of,
)
from histopipe.ingestion.slide_in_flight import SlideInFlight
from histopipe.ingestion.storing import ChunkResult, store_chunk
from histopipe.slides.staging import Stage, StagedSlide
from histopipe.store.claims import Claims
from histopipe.store.record import FailureKind, SlideState
from histopipe.store.writer import StoreWriter
from histopipe.system.files import to_storable_text
from histopipe.system.filesystems import free_bytes
from histopipe.system.worker_pool import TookTooLong, WorkerDied
from histopipe.tiling.spec import TilingSpec

_CLAIM_POLL_SECONDS = 0.5
_LEAST_COPIED = 4
"""Least number of slides that are claimed and copied in advance; more with many workers."""
_SPARE_BYTES = 2 << 20
"""Free disk space needed in addition to the estimate: for records, indices and the error of the estimate."""


@dataclass(slots=True)
class Pipeline:
    """Ingest the slides that no other run has claimed into a store."""

    writer: StoreWriter
    submit_within: Callable[..., Future[Any]]
    """Run a task with a time limit in seconds; the method of a `WorkerPool`."""
    spec: TilingSpec
    options: IngestOptions
    claims: Claims
    progress: IngestProgress
    stage: Stage | None = None
    """Where slides are copied before they are read; None reads them in place."""
    _waiting: deque[PendingSlide] = field(default_factory=deque)
    _claimed_elsewhere: deque[PendingSlide] = field(default_factory=deque)
    _copying: dict[Future[StagedSlide], PendingSlide] = field(default_factory=dict)
    _copied: deque[PendingSlide] = field(default_factory=deque)
    _in_flight: dict[int, SlideInFlight] = field(default_factory=dict)
    _without_room: deque[SlideInFlight] = field(default_factory=deque)
    _futures: dict[Future[Any], tuple[SlideInFlight, Chunk | None]] = field(default_factory=dict)

    def run(self, slides: Sequence[PendingSlide]) -> Iterator[SlideOutcome]:
        """Ingest slides, and yield the outcome of each slide when it ends.

        Raises:
            MachineShort: disk or memory ran out. Complete slides are kept.
        """
        self._waiting.extend(slides)
        while self._unfinished:
            self._copy_ahead()
            self._submit_tasks()
            if self._futures or self._copying:
                done, _ = wait([*self._futures, *self._copying], return_when=FIRST_COMPLETED)
                for future in done & self._copying.keys():
                    yield from self._receive_copy(self._copying.pop(future), future)
                for future in done & self._futures.keys():
                    slide, task = self._futures.pop(future)
                    self._receive(slide, task, future)
                    if slide.ended and slide not in self._without_room:
                        yield self._record(slide)
            elif self._without_room:
                slide = self._without_room.popleft()
                self._add_chunks(slide, last_chance=True)
                if slide.ended:
                    yield self._record(slide)
            else:
                yield from self._retry_claims()

    @property
    def _unfinished(self) -> bool:
        return bool(
            self._waiting
            or self._claimed_elsewhere
            or self._copying
            or self._copied
            or self._in_flight
        )

    def _copy_ahead(self) -> None:
        """Start to copy the next slides, as far as they fit into the staging folder."""
        most = max(_LEAST_COPIED, 2 * self.options.worker_count)
        while self.stage is not None and len(self._copying) + len(self._copied) < most:
            pending = self._claim_next()
            if pending is None:
                return
            future = self.stage.start(pending.slide.file)
            if future is None:
                self.claims.release(pending.number)
                self._waiting.appendleft(pending)
                return
            self._copying[future] = pending

    def _receive_copy(
        self, pending: PendingSlide, future: Future[StagedSlide]
    ) -> Iterator[SlideOutcome]:
        """Receive the copy of a slide. If it failed, record the failure; the next ingest tries again."""
        try:
            staged = future.result()
        except SlideError as error:
            reason = to_storable_text(str(error))
            self.writer.fail(pending.number, pending.record, reason, FailureKind.OPTION)
            self.claims.release(pending.number)
            outcome = failed_outcome(pending.record, reason)
            self.progress.finished(outcome)
            yield outcome
        else:
            slide = dataclasses.replace(pending.slide, staged=staged)
            self._copied.append(dataclasses.replace(pending, slide=slide))

    def _submit_tasks(self) -> None:
        """Submit tasks so that no worker is idle."""
        while len(self._futures) < 2 * self.options.worker_count:
            slide = self._next()
            if slide is None:
                return
            chunk, pending = slide.tasks.popleft(), slide.pending
            slide.running += 1
            if chunk is None or slide.plan is None:
                inputs = pending.slide, pending.record, self.spec, self.options
                future = self.submit_within(slide.seconds_left, plan_slide, *inputs)
            else:
                target = self.writer.path, pending.number, slide.plan.recipe
                future = self.submit_within(slide.seconds_left, store_chunk, *target, chunk)
            self._futures[future] = slide, chunk

    def _next(self) -> SlideInFlight | None:
        """Return the slide whose task is submitted next: the first one in flight, or a new one to be planned.

        Up to half of the workers plan while the others copy, because copying waits for LMDB's lock and for the disk.
        """
        ready = [slide for slide in self._in_flight.values() if slide.tasks]
        planning = sum(chunk is None for _, chunk in self._futures.values())
        half = self.options.worker_count // 2
        idle = not ready and len(self._futures) < max(2, self.options.worker_count)
        begun = self._begin() if idle or (planning < half and len(ready) <= half) else None
        return begun or next(iter(ready), None)

    def _begin(self) -> SlideInFlight | None:
        """Begin the next slide; None if there is none, or the disk of the store has no space."""
        if self._without_room:
            return None
        if self.stage is None:
            pending = self._claim_next()
        else:
            pending = self._copied.popleft() if self._copied else None
        if pending is None:
            return None
        self.writer.restart(pending.number, pending.record)
        slide = self._in_flight[pending.number] = SlideInFlight(pending, self.options)
        return slide

    def _claim_next(self) -> PendingSlide | None:
        """Claim the next slide that no other run has claimed or completed; None if there is none."""
        while self._waiting:
            pending = self._waiting.popleft()
            claimed = self.claims.take(pending.number)
            complete = claimed and self.writer.record(pending.number).state is SlideState.COMPLETE
            if claimed and (pending.again or not complete):
                return pending
            if claimed:
                self.claims.release(pending.number)
            self._claimed_elsewhere.append(pending)
        return None

    def _receive(self, slide: SlideInFlight, task: Chunk | None, future: Future[Any]) -> None:
        slide.running -= 1
        try:
            result: PlannedSlide | SlideFailure | ChunkResult = future.result()
        except TookTooLong:
            slide.timed_out()
        except WorkerDied as error:
            self.progress.message(f"worker process for {slide.id} died: {error}")
            slide.worker_died(task, error)
        except SlideError as error:
            slide.task_failed(error)
        except HistopipeError:
            raise  # an error of the store or the machine, not of the slide
        except Exception as error:  # noqa: BLE001 - an unexpected error of one slide must not end the run
            self.progress.message("".join(traceback.format_exception(error)))
            slide.task_failed(error)
        else:
            if isinstance(result, SlideFailure):
                slide.failure = result
            elif isinstance(result, PlannedSlide):
                slide.planned(result)
                self.progress.planned(slide.id, slide.patches)
                if slide.failure is None:
                    self._add_chunks(slide, last_chance=False)
            else:
                slide.chunk_stored(result)
                self.progress.advanced(slide.id, len(result.rows))

    def _add_chunks(self, slide: SlideInFlight, *, last_chance: bool) -> None:
        """Add the chunks of a planned slide if it fits on the disk; otherwise it waits for other slides to end.

        Raises:
            MachineShort: it does not fit, and no other slide is in flight whose reserved space may become free.
        """
        if slide.plan is None:
            return
        with_room = [other for other in self._in_flight.values() if other not in self._without_room]
        needed = sum(other.bytes_to_come for other in {*with_room, slide}) + _SPARE_BYTES
        free = free_bytes(self.writer.path) + self.writer.reusable_bytes()
        if needed <= free:
            route = slide.plan.recipe.route.name
            slide.tasks.extend(chunks(slide.plan.plan, route, self.spec.patch_size))
        elif not last_chance:
            self._without_room.append(slide)
        else:
            raise MachineShort(
                f"{slide.pending.slide.file.location} needs about {slide.bytes_to_come / 1e6:,.0f} MB in {self.writer.path}",
                found=f"{free / 1e6:,.0f} MB free, of which {_SPARE_BYTES / 1e6:.0f} MB are reserved",
                todo="free disk space and run the same command again: complete slides are kept",
            )

    def _record(self, slide: SlideInFlight) -> SlideOutcome:
        """Write the record of a slide that has ended. This makes a complete slide visible."""
        del self._in_flight[slide.number]
        result = slide.result()
        if self.stage is not None and slide.pending.slide.staged is not None:
            self.stage.release(slide.pending.slide.staged)
        if isinstance(result, SlideFailure):
            reason = to_storable_text(result.reason)
            record = dataclasses.replace(result.record, error_option=result.option)
            self.writer.fail(slide.number, record, reason, result.kind)
            outcome = failed_outcome(record, reason)
        else:
            record = slide.complete_record(result)
            classes = self.writer.class_numbers(list(record.patch_labels))
            columns = slide.columns(result, classes)
            self.writer.complete(slide.number, record, columns, result.thumbnails)
            outcome = outcome_of(record, Status.COMPLETE)
        outcome = dataclasses.replace(outcome, seconds=round(time.monotonic() - slide.begun, 3))
        self.claims.release(slide.number)
        self.progress.finished(outcome)
        return outcome

    def _retry_claims(self) -> Iterator[SlideOutcome]:
        """Check the slides that another run claimed: skip complete ones, take over those that are free again."""
        time.sleep(_CLAIM_POLL_SECONDS)
        records = self.writer.records()
        for _ in range(len(self._claimed_elsewhere)):
            pending = self._claimed_elsewhere.popleft()
            record = records[pending.number]
            if record.state is SlideState.COMPLETE:
                outcome = outcome_of(record, Status.SKIPPED)
                self.progress.finished(outcome)
                yield outcome
            elif self.claims.take(pending.number):
                self.claims.release(pending.number)
                self._waiting.append(pending)
            else:
                self._claimed_elsewhere.append(pending)
