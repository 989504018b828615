"""The ingest itself: keeps workers busy with the plans and chunks of several slides at once.

The process that runs this decides and records; its workers read and write pixels. A slide becomes visible by this
process's last transaction for it. Killed at any moment, the run loses the slides in flight and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from histopipe.errors import HistopipeError, MachineShort, SlideError
from histopipe.ingest.chunks import Chunk, chunks
from histopipe.ingest.job import ChunkResult, Settings, SlideFailure, SlideJob
from histopipe.ingest.outcome import SlideOutcome, Status, failed_outcome, outcome_of
from histopipe.ingest.planning import plan_slide
from histopipe.ingest.progress import Progress
from histopipe.ingest.work import SlideTimeout, Work
from histopipe.ingest.worker import store_chunk
from histopipe.store.claims import Claims
from histopipe.store.record import FailureKind, SlideState
from histopipe.store.writer import StoreWriter
from histopipe.system.files import storable
from histopipe.system.filesystems import free_bytes
from histopipe.system.worker_pool import TookTooLong, WorkerDied

_CLAIM_POLL_SECONDS = 0.5
_TRIES = 2
"""A worker may be killed by no fault of its slide; a slide whose workers die twice has failed."""
_SPARE_BYTES = 2 << 20
"""Room on the disk beyond the estimate: records, indices, and what an estimate is off by."""


class Workers(Protocol):
    """What runs tasks. Their futures raise WorkerDied, or TookTooLong, if they end without an answer."""

    def submit_within(self, seconds: float, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a task that may take so long."""


@dataclass(slots=True)
class Pipeline:
    """Ingests jobs into a store.

    Args:
        writer: the store.
        workers: what runs `plan_slide` and `store_chunk`.
        settings: the same for every slide.
        claims: which slides are this run's.
        progress: told what happens.
        max_unreadable: share of a slide's patches, 0 to 1, that may be unreadable in a complete slide.
        timeout: what a slide may take.
        in_flight: tasks given out at once; twice the workers keeps all busy.
    """

    writer: StoreWriter
    workers: Workers
    settings: Settings
    claims: Claims
    progress: Progress
    max_unreadable: float
    in_flight: int
    timeout: SlideTimeout = field(default_factory=SlideTimeout)
    _waiting: deque[SlideJob] = field(default_factory=deque)
    _deferred: deque[SlideJob] = field(default_factory=deque)
    _cramped: deque[Work] = field(default_factory=deque)
    _working: dict[int, Work] = field(default_factory=dict)
    _futures: dict[Future[Any], Callable[[], SlideOutcome | None]] = field(default_factory=dict)

    def run(self, jobs: Sequence[SlideJob]) -> Iterator[SlideOutcome]:
        """Ingest every job, yielding outcomes as slides end.

        Raises:
            MachineShort: no room on the disk, or no memory. Nothing that was complete is lost.
        """
        self._waiting.extend(jobs)
        while self._waiting or self._deferred or self._working:
            self._submit()
            if self._futures:
                done, _ = wait(self._futures, return_when=FIRST_COMPLETED)
                ended = (self._futures.pop(future)() for future in done)
                yield from (outcome for outcome in ended if outcome is not None)
            elif self._cramped:
                work = self._cramped.popleft()
                self._begin_chunks(work, last_chance=True)
                outcome = self._finish(work)
                if outcome is not None:
                    yield outcome
            else:
                yield from self._retry_deferred()

    def _submit(self) -> None:
        """Give out tasks: chunks of slides begun first, so that slides end; else the next slide's plan."""
        while len(self._futures) < self.in_flight:
            if not (self._submit_chunk() or self._submit_plan()):
                return

    def _submit_chunk(self) -> bool:
        for work in self._working.values():
            if work.chunks:
                chunk, planned = work.chunks.popleft(), work.plan
                self._give(
                    work, functools.partial(self._on_chunk, work, chunk),
                    store_chunk, self.settings, work.job, planned.plan.choice, planned.route, chunk,
                )  # fmt: skip
                return True
        return False

    def _submit_plan(self) -> bool:
        while self._waiting and not self._cramped:
            job = self._waiting.popleft()
            if not self.claims.take(job.number):
                self._deferred.append(job)  # another run is at it: look again when all else is done
                continue
            if not job.again and self.writer.record(job.number).state is SlideState.COMPLETE:
                self.claims.release(job.number)
                self._deferred.append(job)  # another run has done it since the store was looked at
                continue
            self.writer.restart(job.number, job.record)
            work = self._working[job.number] = Work(job, time.monotonic())
            self._plan(work)
            return True
        return False

    def _plan(self, work: Work) -> None:
        self._give(
            work, functools.partial(self._on_plan, work), plan_slide, self.settings, work.job
        )

    def _give(
        self,
        work: Work,
        then: Callable[[Future[Any]], SlideOutcome | None],
        task: Callable[..., Any],
        *args: Any,
    ) -> None:
        """Have a worker do a task of a slide within the time that the slide has left."""
        work.running += 1
        left = max(0.0, self.timeout.of(work.patches) - work.spent)
        future = self.workers.submit_within(left, task, *args)
        self._futures[future] = functools.partial(then, future)

    def _on_plan(self, work: Work, future: Future[Any]) -> SlideOutcome | None:
        result = self._result(work, future, functools.partial(self._plan, work))
        if isinstance(result, SlideFailure):
            work.failure = result
        elif result is not None:
            work.plan_in(result)
            self.progress.planned(work.job.slide.id, len(result.plan))
            self._look_at_the_clock(work)
            if work.failure is None and not self._begin_chunks(work, last_chance=False):
                return None
        return self._finish(work)

    def _begin_chunks(self, work: Work, *, last_chance: bool) -> bool:
        """Let a planned slide's chunks be given out, if they will fit on the disk; False if it has to wait.

        Raises:
            MachineShort: they do not fit, and nothing else is in flight that could turn out smaller.
        """
        begun = [other for other in self._working.values() if other not in self._cramped]
        needed = sum(other.bytes_to_come for other in {*begun, work}) + _SPARE_BYTES
        free = free_bytes(self.settings.store) + self.writer.reusable_bytes()
        if needed > free and not last_chance:
            self._cramped.append(work)
            return False
        if needed > free:
            raise MachineShort(
                f"{work.job.slide.path} needs about {work.bytes_to_come / 1e6:,.0f} MB in {self.settings.store}",
                found=f"{free / 1e6:,.0f} MB free there, {_SPARE_BYTES / 1e6:.0f} MB of which are kept",
                todo="make room and run the same command again: what was complete stays",
            )
        plan, route = work.plan.plan, work.plan.route
        work.chunks.extend(chunks(plan, route.name, self.settings.spec.patch_size))
        return True

    def _on_chunk(self, work: Work, chunk: Chunk, future: Future[Any]) -> SlideOutcome | None:
        again = functools.partial(work.chunks.appendleft, chunk)
        result: ChunkResult | None = self._result(work, future, again)
        if result is not None:
            work.chunk_in(result)
            self.progress.advanced(work.job.slide.id, len(chunk))
            if work.lost_share > self.max_unreadable:
                work.chunks.clear()  # no use reading on: it fails once the chunks under way are in
            elif work.chunks:
                self._look_at_the_clock(work)
        return self._finish(work)

    def _look_at_the_clock(self, work: Work) -> None:
        """Fail a slide that has used up its time with work left to do."""
        limit = self.timeout.of(work.patches)
        if work.spent > limit:
            self._give_up(work, TookTooLong(), limit)

    def _give_up(self, work: Work, error: Exception | str, limit: float) -> None:
        """Let a slide fail once nothing of it runs any more."""
        reason = (
            error
            if isinstance(error, str)
            else f"{work.job.slide.path}{_what_happened(error, limit)}"
        )
        option = self.timeout.text if isinstance(error, TookTooLong) else None
        record = work.planned.record if work.planned else work.seen()
        work.failure = work.failure or SlideFailure(reason, FailureKind.FILE, record, option)
        work.chunks.clear()

    def _result(self, work: Work, future: Future[Any], again: Callable[[], None]) -> Any:
        """A task's answer; None if it gave none, and is to be done again or the slide has failed."""
        work.running -= 1
        try:
            return future.result()
        except SlideError as error:  # it has gone since it was planned
            self._give_up(work, str(error), 0.0)
        except HistopipeError:
            raise  # the store or the machine, not the slide
        except Exception as error:  # noqa: BLE001 - one slide that nobody thought of must not end a night's run
            name = work.job.slide.id
            if isinstance(error, WorkerDied) and not isinstance(error, TookTooLong):
                self.progress.said(f"a worker at {name} died: {error}")
                work.deaths += 1
                if work.deaths < _TRIES and work.failure is None:
                    again()
                    return None
            elif not isinstance(error, TookTooLong):
                self.progress.said("".join(traceback.format_exception(error)))
            self._give_up(work, error, self.timeout.of(work.patches))
        return None

    def _finish(self, work: Work) -> SlideOutcome | None:
        """The slide's outcome once nothing of it is left to do; None before."""
        if work.chunks or work.running:
            return None
        del self._working[work.job.number]
        failure = work.failure or work.last_look(self.max_unreadable)
        if failure is not None:
            return self._fail(work, failure)
        record = work.record()
        classes = self.writer.class_numbers(list(record.patch_labels))
        columns = work.columns(classes)
        self.writer.complete(work.job.number, record, columns, work.plan.thumbnails)
        return self._ended(work, outcome_of(record, Status.COMPLETE))

    def _fail(self, work: Work, failure: SlideFailure) -> SlideOutcome:
        reason = storable(failure.reason)
        record = dataclasses.replace(failure.record, error_option=failure.option)
        self.writer.fail(work.job.number, record, reason, failure.kind)
        return self._ended(work, failed_outcome(failure.record, reason))

    def _ended(self, work: Work, outcome: SlideOutcome) -> SlideOutcome:
        outcome = dataclasses.replace(outcome, seconds=round(time.monotonic() - work.begun, 3))
        self.claims.release(work.job.number)
        self.progress.finished(outcome)
        return outcome

    def _retry_deferred(self) -> Iterator[SlideOutcome]:
        """Slides that another run claimed: complete by now, or free to be taken over."""
        time.sleep(_CLAIM_POLL_SECONDS)
        records = self.writer.records()
        for _ in range(len(self._deferred)):
            job = self._deferred.popleft()
            record = records[job.number]
            if record.state is SlideState.COMPLETE:
                outcome = outcome_of(record, Status.SKIPPED)
                self.progress.finished(outcome)
                yield outcome
            elif self.claims.take(job.number):
                self.claims.release(job.number)
                self._waiting.append(job)
            else:
                self._deferred.append(job)


def _what_happened(error: Exception, limit: float) -> str:
    """What befell a slide's task, said of the slide."""
    if isinstance(error, TookTooLong):
        return (
            f" is not done after {limit:.0f} s of work; leave it out, or give it more time with "
            "--slide-timeout"
        )
    if isinstance(error, WorkerDied):
        return (
            f": worker processes that read it died ({error}); the file is probably damaged in a way that "
            "crashes its decoder, or memory ran out"
        )
    if isinstance(error, MemoryError):
        return ": memory ran out as it was read; use fewer --workers"
    return (
        f": {type(error).__name__}: {error}; this is an error of histopipe: please report it with the "
        "lines about it in ingest.log"
    )
