"""What an ingest would do, without writing a byte: `histopipe ingest --plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.errors import ExitCode, NothingToDo
from histopipe.ingest.job import Estimate, PlannedSlide, Settings, SlideFailure, SlideJob
from histopipe.ingest.outcome import SlideOutcome, Status, exit_code, failed_outcome
from histopipe.ingest.planning import plan_slide
from histopipe.ingest.progress import Progress
from histopipe.ingest.request import IngestOptions, check_request, duplicates, sort_out
from histopipe.ingest.worker import prepare
from histopipe.slides.discovery import SlideFile
from histopipe.store.record import FailureKind, SlideRecord
from histopipe.store.store import Store
from histopipe.store.writer import check_spec
from histopipe.system.filesystems import free_bytes
from histopipe.system.worker_pool import WorkerDied, WorkerPool
from histopipe.tiling.spec import TilingSpec

_NOTHING = Estimate()


@dataclass(frozen=True, slots=True)
class SlidePreview:
    """What would become of a slide.

    Attributes:
        status, reason: as of an outcome; `planned` for a slide that would be ingested.
        record: what its record would say; None where it would not be ingested.
        estimate: what it would take.
    """

    id: str
    status: str
    reason: str
    record: SlideRecord | None = None
    estimate: Estimate = _NOTHING


@dataclass(frozen=True, slots=True)
class IngestPreview:
    """What a whole ingest would do.

    Attributes:
        stored_bytes, seconds: estimates for all slides together, with `workers` at work.
        free_bytes: on the disk that the store is, or would be, on.
    """

    store: str
    workers: int
    slides: list[SlidePreview]
    warnings: list[str]
    stored_bytes: int
    seconds: float
    free_bytes: int

    @property
    def exit_code(self) -> ExitCode:
        """What the ingest would exit with, as far as can be told."""
        failed = sum(slide.status == Status.FAILED for slide in self.slides)
        return exit_code(failed, len(self.slides))

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        slides = [_slide_json(slide) for slide in self.slides]
        return dataclasses.asdict(self) | {"slides": slides, "exit_code": int(self.exit_code)}


def plan_ingest(
    slides: Sequence[SlideFile],
    store: Path,
    spec: TilingSpec,
    options: IngestOptions,
    progress: Progress,
) -> IngestPreview:
    """Plan every slide as `ingest` would. Arguments and errors are those of `ingest`; nothing is written."""
    check_request(slides, store, spec, options)
    known = _known(store, spec)
    ids = sorted({slide.id for slide in slides} - {record.id for record in known.values()})
    numbers = {record.id: number for number, record in known.items()}
    numbers |= {name: 1 + max(known, default=0) + place for place, name in enumerate(ids)}
    todo = sort_out(slides, known, numbers, options)
    workers = options.worker_count
    progress.begin(len(slides))
    for outcome in todo.outcomes:
        progress.finished(outcome)
    settings = Settings(store, spec, options.default_mpp, options.route, options.rules)
    previews = [SlidePreview(o.id, str(o.status), o.reason) for o in todo.outcomes]
    previews += _plans(todo.jobs, settings, options, workers, progress)
    previews.sort(key=lambda preview: preview.id)
    records = [preview.record for preview in previews if preview.record is not None]
    others = [r for r in known.values() if r.id not in {record.id for record in records}]
    existing = next(p for p in (store, *store.absolute().parents) if p.exists())
    return IngestPreview(
        store=str(store),
        workers=workers,
        slides=previews,
        warnings=duplicates([*others, *records]),
        stored_bytes=sum(preview.estimate.stored_bytes for preview in previews),
        seconds=sum(preview.estimate.seconds for preview in previews) / workers,
        free_bytes=free_bytes(existing),
    )


def preview_lines(preview: IngestPreview) -> list[str]:
    """A line a slide, then totals."""
    lines = [
        f"{'slide':<40} {'level':>5} {'read':>5} {'resampling':<10} {'route':<9} {'patches':>9} "
        f"{'MB':>9} {'worker s':>8}  why"
    ]
    for slide in preview.slides:
        record = slide.record
        if record is None:
            lines.append(f"{slide.id:<40} {slide.status}{': ' * bool(slide.reason)}{slide.reason}")
            continue
        why = "; ".join(filter(None, [record.route_reason, *record.notes]))
        lines.append(
            f"{slide.id:<40} {record.level!s:>5} {record.read_size!s:>5} {record.resampling!s:<10} "
            f"{record.route!s:<9} {record.planned:>9,} {slide.estimate.stored_bytes / 1e6:>9,.1f} "
            f"{slide.estimate.seconds:>8,.1f}  {why}"
        )
    lines += [f"warning: {text}" for text in preview.warnings]
    patches = sum(slide.record.planned for slide in preview.slides if slide.record)
    lines.append(
        f"{preview.store}: {patches:,} patches, about {preview.stored_bytes / 1e6:,.1f} MB and "
        f"{preview.seconds:,.1f} s with {preview.workers} workers; {preview.free_bytes / 1e6:,.0f} MB free"
    )
    if preview.stored_bytes > preview.free_bytes:
        lines.append("this does not fit on the disk: make room, or choose another --out")
    return lines


def _known(store: Path, spec: TilingSpec) -> dict[int, SlideRecord]:
    """The records of a store that may be added to; none where there is no store yet."""
    try:
        with Store(store) as opened:
            check_spec(opened.spec, spec.to_json(), store)
            return opened.records
    except NothingToDo:
        return {}


def _plans(
    jobs: Sequence[SlideJob],
    settings: Settings,
    options: IngestOptions,
    workers: int,
    progress: Progress,
) -> Iterator[SlidePreview]:
    if not jobs:
        return
    pool = WorkerPool(workers, prepare)
    try:
        begun: dict[Future[Any], SlideJob] = {
            pool.submit_within(options.timeout.base, plan_slide, settings, job): job for job in jobs
        }
        for future in as_completed(begun):
            yield _preview(begun.pop(future), future, progress)
    finally:
        pool.shutdown(cancel_futures=True)


def _preview(job: SlideJob, future: Future[Any], progress: Progress) -> SlidePreview:
    try:
        result: PlannedSlide | SlideFailure = future.result()
    except WorkerDied as error:
        result = SlideFailure(f"{job.slide.path}: {error}", FailureKind.FILE, job.record)
    if isinstance(result, SlideFailure):
        progress.finished(failed_outcome(result.record, result.reason))
        return SlidePreview(job.slide.id, str(Status.FAILED), result.reason)
    outcome = SlideOutcome(
        result.record.id,
        result.record.path,
        Status.PLANNED,
        len(result.plan),
        route=result.route.name,
    )
    progress.finished(outcome)
    return SlidePreview(job.slide.id, str(Status.PLANNED), "", result.record, result.estimate)


def _slide_json(slide: SlidePreview) -> dict[str, Any]:
    record = slide.record
    fields = ("level", "downsample", "mpp", "patch_mpp", "read_size", "resampling", "route", "route_reason",
              "planned", "notes")  # fmt: skip
    return {
        "id": slide.id,
        "status": slide.status,
        "reason": slide.reason,
        **{name: getattr(record, name) if record else None for name in fields},
        **dataclasses.asdict(slide.estimate),
    }
