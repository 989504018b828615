"""Run the tasks of several slides in parallel, and record each slide that ends.

The main process schedules tasks and writes records. Workers read and write pixels. A slide becomes visible by the last
transaction of the main process for it. If the run is killed, only the slides in flight are lost.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import HistopipeError, MachineShort, SlideError
from histopipe.ingestion.ingest_report import IngestProgress, SlideOutcome, SlideStatus
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.patch_source import chunks, store_chunk
from histopipe.ingestion.planning import plan_slide
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.staging import StagingArea
from histopipe.store.claims import Claims
from histopipe.store.record import FailureKind, SlideState
from histopipe.store.writer import StoreWriter
from histopipe.system.files import free_bytes
from histopipe.system.worker_pool import TookTooLong, WorkerDied
from histopipe.tiling.spec import TilingSpec

_LEAST_COPIED = 4
"""Least number of slides that are claimed and copied in advance, twice the number of workers if that is more. A copied
slide can be planned at once, but a claimed slide is lost to other runs, and a copy takes space."""
_SPARE_BYTES = 2 << 20
"""Free disk space needed in addition to the estimate: for records, indices and the error of the estimate."""

_CLAIM_SECONDS = 0.5
"""Time between two tries to claim the slides of other runs, when nothing else is left to do."""


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
    stage: StagingArea | None = None
    """Where slides are copied before they are read; None reads them in place."""
    _waiting: deque[SlideJob] = field(default_factory=deque)
    _claimed_elsewhere: deque[SlideJob] = field(default_factory=deque)
    _copying: dict[Future[SlideFile], SlideJob] = field(default_factory=dict)
    _copied: deque[SlideJob] = field(default_factory=deque)
    _in_flight: dict[int, SlideJob] = field(default_factory=dict)
    _without_room: deque[SlideJob] = field(default_factory=deque)
    _futures: dict[Future[Any], tuple[SlideJob, NDArray[np.int64] | None]] = field(
        default_factory=dict
    )

    def run(self, slides: Sequence[SlideJob]) -> None:
        """Ingest slides. `progress` has their outcomes.

        Raises:
            MachineShort: disk or memory ran out. Complete slides are kept.
        """
        self._waiting.extend(slides)
        while any(
            (
                self._waiting,
                self._claimed_elsewhere,
                self._copying,
                self._copied,
                self._in_flight,
            )
        ):
            self._copy_ahead()
            self._submit_tasks()
            if self._futures or self._copying:
                done, _ = wait([*self._futures, *self._copying], return_when=FIRST_COMPLETED)
                for future in done:
                    job = self._receive(future)
                    # Also a failed slide is recorded after its last task: tasks that run may still write patches.
                    if job.ended and all(job is not other for other, _ in self._futures.values()):
                        self._record(job)
            elif self._without_room:
                # No task runs any more, so that no more space becomes free.
                self._fits(self._without_room.popleft(), last_chance=True)
            elif self._claimed_elsewhere:
                time.sleep(_CLAIM_SECONDS)
                self._waiting, self._claimed_elsewhere = self._claimed_elsewhere, deque()

    def _copy_ahead(self) -> None:
        """Start to copy the next slides, as far as they fit into the staging folder."""
        most = max(_LEAST_COPIED, 2 * self.options.worker_count)
        while self.stage is not None and len(self._copying) + len(self._copied) < most:
            job = self._claim_next()
            if job is None:
                return
            future = self.stage.start(job.file)
            if future is None:
                self.claims.release(job.number)
                self._waiting.appendleft(job)
                return
            self._copying[future] = job

    def _submit_tasks(self) -> None:
        """Submit tasks so that no worker is idle: two per worker, one that runs and one that waits.

        More would only delay the chunks of slides in flight, whose early end frees memory, disk and claims.
        """
        while len(self._futures) < 2 * self.options.worker_count and (job := self._next()):
            rows, planned = job.tasks.popleft(), job.plan
            task: tuple[Any, ...] = (plan_slide, job, self.spec, self.options)
            if rows is not None and planned is not None:
                task = (
                    store_chunk,
                    self.writer.path,
                    job.number,
                    planned.recipe,
                    rows,
                    planned.plan.take(rows),
                )
            self._futures[self.submit_within(job.seconds_left, *task)] = job, rows

    def _next(self) -> SlideJob | None:
        """Return the slide whose task is submitted next: the first one in flight, or a new one to be planned.

        Up to half of the workers plan while the others copy, because copying waits for LMDB's lock and for the disk.
        """
        ready = [
            job for job in self._in_flight.values() if job.tasks and job not in self._without_room
        ]
        planning = sum(rows is None for _, rows in self._futures.values())
        half = self.options.worker_count // 2
        idle = not ready and len(self._futures) < max(2, self.options.worker_count)
        begun = self._begin() if idle or (planning < half and len(ready) <= half) else None
        return begun or next(iter(ready), None)

    def _begin(self) -> SlideJob | None:
        """Begin the next slide; None if there is none, or the disk of the store has no space."""
        if self._without_room:
            return None
        if self.stage is None:
            job = self._claim_next()
        else:
            job = self._copied.popleft() if self._copied else None
        if job is None:
            return None
        job.begin(self.options)
        self.writer.restart(job.number, job.record)
        self._in_flight[job.number] = job
        return job

    def _claim_next(self) -> SlideJob | None:
        """Claim the next slide that no other run has claimed; None if there is none. Skip slides that one has completed."""
        while self._waiting:
            job = self._waiting.popleft()
            if not self.claims.take(job.number):
                job.again = False  # the other run ingests it
                self._claimed_elsewhere.append(job)
                continue
            record = self.writer.record(job.number)  # now that no other run can change it
            if job.again or record.state is not SlideState.COMPLETE:
                return job
            self.claims.release(job.number)
            self.progress.finished(SlideOutcome.of(record, SlideStatus.SKIPPED))
        return None

    def _receive(self, future: Future[Any]) -> SlideJob:
        """Receive the result of a task: the copy or the plan of a slide, or a stored chunk."""
        if future in self._copying:
            job = self._copying.pop(future)
            try:
                job.staged = future.result()
                self._copied.append(job)
            except SlideError as error:
                job.fail(str(error), FailureKind.OPTION)  # the next ingest tries again
            return job
        job, rows = self._futures.pop(future)
        try:
            result = future.result()
        except TookTooLong:
            job.timed_out()
        except WorkerDied as error:
            self.progress.message(f"worker process for {job.id} died: {error}")
            job.worker_died(rows, error)
        except SlideError as error:
            job.task_failed(error)
        except HistopipeError:
            raise  # an error of the store or the machine, not of the slide
        except Exception as error:  # noqa: BLE001 - an unexpected error of one slide must not end the run
            self.progress.message("".join(traceback.format_exception(error)))
            job.task_failed(error)
        else:
            if rows is not None:
                job.chunk_stored(*result)
                self.progress.spent(result[-1], len(rows))
                self.progress.advanced(job.id, len(rows))
            else:
                job.planned(result)
                if job.plan is not None:
                    self.progress.spent({"planning": job.plan.seconds}, 0, 1)
                    self._add_chunks(job, job.plan)
        return job

    def _add_chunks(self, job: SlideJob, plan: SlidePlan) -> None:
        """Show a planned slide, and add its chunks. If it does not fit on the disk, it waits for other slides to end."""
        self.progress.planned(job.id, job.patches)
        if not job.failed:
            job.tasks.extend(chunks(plan.plan, plan.recipe.route, self.spec.patch_size))
        if job.tasks and not self._fits(job, last_chance=False):
            self._without_room.append(job)

    def _fits(self, job: SlideJob, *, last_chance: bool) -> bool:
        """Return whether a planned slide fits on the disk, in addition to the other slides in flight that have room.

        Raises:
            MachineShort: it does not fit, and this is the last chance.
        """
        with_room = {*self._in_flight.values()} - {*self._without_room} | {job}
        needed = sum(other.bytes_to_come for other in with_room) + _SPARE_BYTES
        free = free_bytes(self.writer.path) + self.writer.reusable_bytes()
        if needed > free and last_chance:
            raise MachineShort(
                f"{job.file.location} needs about {job.bytes_to_come / 1e6:,.0f} MB in {self.writer.path}",
                found=f"{free / 1e6:,.0f} MB free, of which {_SPARE_BYTES / 1e6:.0f} MB are reserved",
                todo="free disk space and run the same command again: complete slides are kept",
            )
        return needed <= free

    def _record(self, job: SlideJob) -> None:
        """Write the record of a slide that has ended. This makes a complete slide visible.

        The claim is released last: another run that takes it reads the record.
        """
        self._in_flight.pop(job.number, None)  # a slide that could not be copied is not in flight
        plan = job.finish()
        if plan is None:
            self.writer.fail(job.number, job.record)
        else:
            classes = self.writer.class_numbers(list(job.record.patch_labels))
            self.writer.complete(
                job.number, job.record, job.columns(plan, classes), plan.thumbnails
            )
        job.release(self.stage)
        self.claims.release(job.number)
        self.progress.finished(SlideOutcome.of(job.record, seconds=job.seconds))
