"""Plan an ingest without writing anything: `plan`, the function behind `histopipe ingest --plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from histopipe.errors import ExitCode, NothingToDo, SlideError
from histopipe.ingestion.ingest_report import (
    IngestProgress,
    SlideOutcome,
    SlideStatus,
    lines_of_slides,
    reason_without_patches,
)
from histopipe.ingestion.ingest_slides import check_ingest, open_stage, sort_slides
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.planning import plan_slide, prepare
from histopipe.ingestion.request import read_request
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.slides.staging import SourceSpeed, StagedSlide, measure_source, staged
from histopipe.store.record import SlideRecord, describe_copies
from histopipe.store.store import Store
from histopipe.store.writer import check_spec
from histopipe.system.filesystems import free_bytes
from histopipe.system.output import (
    Progress,
    Result,
    counted,
    default_progress,
    exit_code_of,
    slide_failure,
)
from histopipe.system.settings import PathLike
from histopipe.system.worker_pool import WorkerPool, run_tasks
from histopipe.tiling.spec import TilingSpec


@dataclass(frozen=True, slots=True, repr=False)
class IngestPreview(Result):
    """Preview of an ingest.

    Attributes:
        store: path of the store.
        workers: number of processes assumed in the estimated time.
        slides: the expected outcome of each slide, sorted by id, with estimated bytes and worker time of planned slides.
        records: the records that the planned slides would get, by slide id.
        warnings: warnings about several slides, such as copies.
        stored_bytes, seconds: estimates for all slides together.
        free_bytes: free space on the disk of the store.
        source: speed of the disk of the slides; None if it was not measured.
    """

    store: str
    workers: int
    slides: list[SlideOutcome]
    records: dict[str, SlideRecord]
    warnings: list[str]
    stored_bytes: int
    seconds: float
    free_bytes: int
    source: SourceSpeed | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Expected exit code of the ingest, if all patches can be read."""
        failed = sum(slide.status == SlideStatus.FAILED for slide in self.slides)
        return exit_code_of(failed, len(self.slides) - failed)

    def to_json(self) -> dict[str, Any]:
        """Return the preview as a JSON-ready dict."""
        names = (
            "level",
            "downsample",
            "mpp",
            "patch_mpp",
            "read_size",
            "resampling",
            "route",
            "route_reason",
            "planned",
            "notes",
        )
        slides = [
            {
                "id": slide.id,
                "status": str(slide.status),
                "reason": slide.reason,
                **{name: getattr(self.records.get(slide.id), name, None) for name in names},
                "stored_bytes": slide.stored_bytes if slide.id in self.records else 0,
                "seconds": slide.seconds if slide.id in self.records else 0.0,
            }
            for slide in self.slides
        ]
        return {
            name: value for name, value in Result.to_json(self).items() if name != "records"
        } | {"slides": slides}

    def __str__(self) -> str:
        """Return a table with a row for each slide, then totals."""
        lines = [
            f"{'slide':<40} {'level':>5} {'read':>5} {'resampling':<10} {'route':<9} {'patches':>9} "
            f"{'MB':>9} {'worker s':>8}  why"
        ]
        slides = {slide.id: slide for slide in self.slides}
        reasons = {slide.id: slide.reason for slide in self.slides} | {
            name: reason_without_patches(record.notes)
            for name, record in self.records.items()
            if not record.planned
        }
        lines += lines_of_slides(reasons, lambda name: self._row(slides[name]))
        lines += [f"warning: {text}" for text in self.warnings]
        patches = sum(record.planned for record in self.records.values())
        lines.append(
            f"{self.store}: {counted(patches, 'patch')}, about {self.stored_bytes / 1e6:,.1f} MB and "
            f"{self.seconds:,.1f} s with {counted(self.workers, 'worker')}; {self.free_bytes / 1e6:,.0f} MB free"
        )
        if self.source is not None:
            lines.append(str(self.source))
        if self.stored_bytes > self.free_bytes:
            lines.append("not enough disk space: free some, or choose another --out")
        return "\n".join(lines)

    def _row(self, slide: SlideOutcome) -> str:
        record = self.records.get(slide.id)
        if record is None:
            return f"{slide.id:<40} {slide.status}{': ' * bool(slide.reason)}{slide.reason}"
        why = "; ".join(filter(None, [record.route_reason, *record.notes]))
        return (
            f"{slide.id:<40} {record.level!s:>5} {record.read_size!s:>5} {record.resampling!s:<10} "
            f"{record.route!s:<9} {record.planned:>9,} {slide.stored_bytes / 1e6:>9,.1f} "
            f"{slide.seconds:>8,.1f}  {why}"
        )


def plan(
    slides: PathLike | Sequence[PathLike],
    out: PathLike = "patches.lmdb",
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> IngestPreview:
    """Plan every slide in the same way as `ingest`, and write nothing.

    Args:
        slides, out, progress: as for `ingest`.
        settings: options of `ingest`, apart from those of a cluster.

    Returns:
        Level, route, number of patches, and estimated bytes and time of each slide.

    Raises:
        UsageError, NothingToDo, DamagedStore: as for `ingest`.

    Example:
        >>> plan("slides", "patches.lmdb", mpp=0.5).stored_bytes  # doctest: +SKIP
    """
    progress, store = progress or default_progress(), Path(out)
    jobs, spec, options = read_request(slides, store, settings, progress)
    check_ingest(jobs, store, spec, options)
    source = measure_source([job.file for job in jobs], options.worker_count)
    store_records = _known(store, spec)
    pending, outcomes, _ = sort_slides(jobs, store_records, options)
    with IngestProgress(len(jobs), progress) as events:
        for outcome in outcomes:
            events.finished(outcome)
        outcomes += _plan_all(pending, spec, options, events)
    planned = {outcome.id: outcome for outcome in outcomes if outcome.status is SlideStatus.PLANNED}
    records = {job.id: job.record for job in pending if job.id in planned}
    unplanned = (record for record in store_records.values() if record.id not in records)
    return IngestPreview(
        store=str(store),
        workers=options.worker_count,
        slides=sorted(outcomes, key=attrgetter("id")),
        records=records,
        warnings=describe_copies([*unplanned, *records.values()]),
        stored_bytes=sum(outcome.stored_bytes for outcome in planned.values()),
        seconds=sum(outcome.seconds for outcome in planned.values()) / options.worker_count,
        free_bytes=free_bytes(next(p for p in (store, *store.absolute().parents) if p.exists())),
        source=source,
    )


def _known(store: Path, spec: TilingSpec) -> dict[int, SlideRecord]:
    """Return the records of a store, which must have the same spec; an empty dict if there is no store yet."""
    try:
        with Store(store) as opened:
            check_spec(opened.spec, spec.to_json(), store)
            return opened.records
    except NothingToDo:
        return {}


def _plan_all(
    jobs: Sequence[SlideJob], spec: TilingSpec, options: IngestOptions, events: IngestProgress
) -> Iterator[SlideOutcome]:
    """Plan slides in worker processes; show and yield the outcome of each."""
    if not jobs:
        return
    with ExitStack() as stack:
        stage = open_stage(options, events, stack)
        pool = stack.enter_context(WorkerPool(options.worker_count, prepare))

        def start(
            item: tuple[SlideJob, StagedSlide | SlideError | None],
        ) -> Future[SlidePlan | SlideRecord]:
            job, copy = item
            if isinstance(copy, SlideError):
                failed = Future[SlidePlan | SlideRecord]()
                failed.set_exception(copy)
                return failed
            job.staged = copy
            job.begin(options)
            return pool.submit_within(job.seconds_left, plan_slide, job, spec, options)

        copies = staged(stage, jobs, lambda job: job.file)
        tasks = run_tasks(start, copies, limit=options.worker_count + 1, in_order=False)
        for (job, _), future in filter(None, tasks):
            try:
                job.planned(future.result())
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                job.fail(slide_failure(error))
            if stage is not None and job.staged is not None:
                stage.release(job.staged.folder)
            outcome, planned = SlideOutcome.of(job.record), job.plan
            if planned is not None and not job.failed:
                outcome = replace(
                    outcome,
                    status=SlideStatus.PLANNED,
                    patches=job.patches,
                    notes=(),
                    stored_bytes=planned.stored_bytes,
                    seconds=planned.storing_seconds,
                )
            job.release()
            events.finished(outcome)
            yield outcome
