"""Plan an ingest without writing anything: `plan`, the function behind `histopipe ingest --plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from histopipe.errors import ExitCode, NothingToDo, SlideError
from histopipe.ingestion.ingest_slides import check_ingest, sort_slides
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.planning import plan_slide, prepare
from histopipe.ingestion.report import (
    IngestProgress,
    SlideOutcome,
    SlideStatus,
    lines_of_slides,
    reason_without_patches,
)
from histopipe.ingestion.request import read_request
from histopipe.ingestion.slide_job import Estimate, SlideJob, SlidePlan
from histopipe.slides.staging import SourceSpeed, StagedSlide, StagingArea, measure_source, staged
from histopipe.store.record import SlideRecord, describe_copies
from histopipe.store.store import Store
from histopipe.store.writer import check_spec
from histopipe.system.files import PathLike, free_bytes
from histopipe.system.output import (
    Progress,
    Result,
    counted,
    default_progress,
    exit_code_of,
    slide_failure,
)
from histopipe.system.worker_pool import WorkerPool, run_tasks
from histopipe.tiling.spec import TilingSpec


@dataclass(frozen=True, slots=True)
class SlidePreview:
    """Preview of one slide.

    Attributes:
        status, reason: as in `SlideOutcome`; `planned` for a slide that would be ingested.
        record: the record that it would get; None if it would not be ingested.
        estimate: estimated bytes and time to store it.
    """

    id: str
    status: str
    reason: str
    record: SlideRecord | None = None
    estimate: Estimate = field(default_factory=Estimate)

    @property
    def reason_without_patches(self) -> str:
        """Why no patches would be stored; empty if there would be patches, or there are."""
        if self.record is None or self.record.planned:
            return self.reason
        return reason_without_patches(self.record.notes)

    def to_json(self) -> dict[str, Any]:
        """Return the preview as a JSON-ready dict."""
        names = ("level", "downsample", "mpp", "patch_mpp", "read_size", "resampling", "route", "route_reason",
                 "planned", "notes")  # fmt: skip
        return {
            "id": self.id,
            "status": self.status,
            "reason": self.reason,
            **{name: getattr(self.record, name) if self.record else None for name in names},
            **asdict(self.estimate),
        }

    def __str__(self) -> str:
        """Return the preview as a row of a table."""
        record = self.record
        if record is None:
            return f"{self.id:<40} {self.status}{': ' * bool(self.reason)}{self.reason}"
        why = "; ".join(filter(None, [record.route_reason, *record.notes]))
        return (
            f"{self.id:<40} {record.level!s:>5} {record.read_size!s:>5} {record.resampling!s:<10} "
            f"{record.route!s:<9} {record.planned:>9,} {self.estimate.stored_bytes / 1e6:>9,.1f} "
            f"{self.estimate.seconds:>8,.1f}  {why}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class IngestPreview(Result):
    """Preview of an ingest.

    Attributes:
        store: path of the store.
        workers: number of processes assumed in the estimated time.
        slides: the preview of each slide, sorted by id.
        warnings: warnings about several slides, such as copies.
        stored_bytes, seconds: estimates for all slides together.
        free_bytes: free space on the disk of the store.
        source: speed of the disk of the slides; None if it was not measured.
    """

    store: str
    workers: int
    slides: list[SlidePreview]
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
        return Result.to_json(self) | {"slides": [slide.to_json() for slide in self.slides]}

    def __str__(self) -> str:
        """Return a table with a row for each slide, then totals."""
        lines = [
            f"{'slide':<40} {'level':>5} {'read':>5} {'resampling':<10} {'route':<9} {'patches':>9} "
            f"{'MB':>9} {'worker s':>8}  why"
        ]
        rows = {slide.id: slide for slide in self.slides}
        lines += lines_of_slides(
            {name: slide.reason_without_patches for name, slide in rows.items()},
            lambda name: str(rows[name]),
        )
        lines += [f"warning: {text}" for text in self.warnings]
        patches = sum(slide.record.planned for slide in self.slides if slide.record)
        lines.append(
            f"{self.store}: {counted(patches, 'patch')}, about {self.stored_bytes / 1e6:,.1f} MB and "
            f"{self.seconds:,.1f} s with {counted(self.workers, 'worker')}; {self.free_bytes / 1e6:,.0f} MB free"
        )
        if self.source is not None:
            lines.append(str(self.source))
        if self.stored_bytes > self.free_bytes:
            lines.append("not enough disk space: free some, or choose another --out")
        return "\n".join(lines)


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
    sorted_slides = sort_slides(jobs, store_records, options)
    previews = [SlidePreview(o.id, str(o.status), o.reason) for o in sorted_slides.outcomes]
    with IngestProgress(len(jobs), progress) as events:
        for outcome in sorted_slides.outcomes:
            events.finished(outcome)
        previews += _plan_all(sorted_slides.pending, spec, options, events)
    previews.sort(key=lambda preview: preview.id)
    records = [preview.record for preview in previews if preview.record is not None]
    unplanned = [r for r in store_records.values() if r.id not in {record.id for record in records}]
    existing = next(p for p in (store, *store.absolute().parents) if p.exists())
    return IngestPreview(
        store=str(store),
        workers=options.worker_count,
        slides=previews,
        warnings=describe_copies([*unplanned, *records]),
        stored_bytes=sum(preview.estimate.stored_bytes for preview in previews),
        seconds=sum(preview.estimate.seconds for preview in previews) / options.worker_count,
        free_bytes=free_bytes(existing),
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
    jobs: Sequence[SlideJob],
    spec: TilingSpec,
    options: IngestOptions,
    events: IngestProgress,
) -> Iterator[SlidePreview]:
    if not jobs:
        return
    with ExitStack() as stack:
        stage = None
        if options.stage is not None:
            stage = stack.enter_context(
                StagingArea(Path(options.stage), options.stage_bytes, events.copied)
            )
        pool = stack.enter_context(WorkerPool(options.worker_count, prepare))

        def plan(
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
        tasks = run_tasks(plan, copies, limit=options.worker_count + 1, in_order=False)
        for (job, _), future in filter(None, tasks):
            try:
                job.planned(future.result())
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                job.fail(slide_failure(error))
            if stage is not None and job.staged is not None:
                stage.release(job.staged.folder)
            yield _preview(job, events)


def _preview(job: SlideJob, events: IngestProgress) -> SlidePreview:
    """Show the result of a slide, and return its preview."""
    record, plan = job.record, job.plan
    job.release()
    if plan is None or job.failed:
        outcome = SlideOutcome.of(record)
        events.finished(outcome)
        return SlidePreview(record.id, str(outcome.status), outcome.reason)
    patches, route = len(plan.plan), record.route
    events.finished(SlideOutcome(record.id, record.path, SlideStatus.PLANNED, patches, route=route))
    return SlidePreview(record.id, str(SlideStatus.PLANNED), "", record, plan.estimate)
