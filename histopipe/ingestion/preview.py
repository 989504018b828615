"""Plan an ingest without writing anything: `plan`, the function behind `histopipe ingest --plan`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from histopipe.ingestion.ingest_report import (
    IngestProgress,
    IngestReport,
    SlideOutcome,
    SlideStatus,
    lines_of_slides,
    reason_without_patches,
)
from histopipe.ingestion.ingest_slides import check_ingest, open_stage, sort_slides
from histopipe.ingestion.options import INGEST_SETTINGS, prepare
from histopipe.ingestion.planning import plan_slides
from histopipe.ingestion.request import read_recorded_spec, read_request
from histopipe.slides.slide_files import file_sizes
from histopipe.store.record import SlideRecord, describe_copies
from histopipe.store.store import recorded
from histopipe.store.writer import check_spec
from histopipe.system.files import free_bytes
from histopipe.system.output import (
    Progress,
    counted,
    default_progress,
)
from histopipe.system.settings import PathLike, takes
from histopipe.system.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class IngestPreview(IngestReport):
    """Report of an ingest that was only planned: outcomes of slides have estimated bytes and worker time.

    Attributes:
        workers: number of processes assumed in the estimated time.
        records: the records that the planned slides would get, by slide id.
        stored_bytes: estimate for all slides together; so are the `seconds`.
        free_bytes: free space on the disk of the store.
    """

    workers: int
    records: dict[str, SlideRecord]
    stored_bytes: int
    free_bytes: int

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
        values = IngestReport.to_json(self) | {"slides": slides}
        del values["records"]
        return values

    def __str__(self) -> str:
        """Return a table with a row for each slide, then totals."""
        slides = {slide.id: slide for slide in self.slides}
        reasons = {slide.id: slide.reason for slide in self.slides} | {
            name: reason_without_patches(record.notes)
            for name, record in self.records.items()
            if not record.planned
        }
        patches = sum(record.planned for record in self.records.values())
        lines = [
            f"{'slide':<40} {'level':>5} {'read':>5} {'resampling':<10} {'route':<9} {'patches':>9} "
            f"{'MB':>9} {'worker s':>8}  why",
            *lines_of_slides(reasons, lambda name: self._row(slides[name])),
            *(f"warning: {text}" for text in self.warnings),
            f"{self.store}: {counted(patches, 'patch')}, about {self.stored_bytes / 1e6:,.1f} MB and "
            f"{self.seconds:,.1f} s with {counted(self.workers, 'worker')}; {self.free_bytes / 1e6:,.0f} MB free",
            "not enough disk space: free some, or choose another --out"
            * (self.stored_bytes > self.free_bytes),
        ]
        return "\n".join(filter(None, lines))

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


@takes(INGEST_SETTINGS)
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
    store_spec, store_records = read_recorded_spec(store), recorded(store)
    if store_spec is not None:
        check_spec(store_spec, spec.to_json(), store)
    with (
        IngestProgress(file_sizes(job.file for job in jobs), progress) as events,
        ExitStack() as stack,
    ):
        pending, _ = sort_slides(jobs, store_records, options, events)
        if pending:
            stage = open_stage(options, progress, stack)
            pool = stack.enter_context(WorkerPool(options.worker_count, prepare))
            for job in filter(None, plan_slides(pending, spec, options, pool, stage)):
                outcome = SlideOutcome.of(job.record)
                if job.plan is not None and not job.failed:
                    outcome = replace(
                        outcome,
                        status=SlideStatus.PLANNED,
                        patches=job.patches,
                        notes=(),
                        stored_bytes=job.plan.stored_bytes,
                        seconds=job.plan.storing_seconds,
                    )
                job.release(stage)
                events.finished(outcome)
    outcomes = sorted(events.outcomes.values(), key=lambda outcome: outcome.id)
    planned = {outcome.id: outcome for outcome in outcomes if outcome.status is SlideStatus.PLANNED}
    records = {job.id: job.record for job in pending if job.id in planned}
    unplanned = (record for record in store_records.values() if record.id not in records)
    return IngestPreview(
        store=str(store),
        workers=options.worker_count,
        slides=outcomes,
        records=records,
        warnings=describe_copies([*unplanned, *records.values()]),
        stored_bytes=sum(outcome.stored_bytes for outcome in planned.values()),
        seconds=sum(outcome.seconds for outcome in planned.values()) / options.worker_count,
        free_bytes=free_bytes(store),
    )
