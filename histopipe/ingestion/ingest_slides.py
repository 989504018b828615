"""Check and ingest slides: the main step of `ingest`, also used by `repair`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from histopipe._version import __version__
from histopipe.errors import MaskUnfit, ScaleError, SlideError, UsageError
from histopipe.geometry import Mpp, Size, same_scale
from histopipe.ingestion.ingest_report import (
    LOG,
    SUMMARY,
    IngestProgress,
    IngestReport,
    SlideOutcome,
    SlideStatus,
)
from histopipe.ingestion.options import IngestOptions, prepare
from histopipe.ingestion.pipeline import Pipeline
from histopipe.ingestion.slide_job import SlideJob
from histopipe.measure.annotate import annotate_slides
from histopipe.measure.patch_labels import NO_LABELS
from histopipe.slides.scale import MppSource, equal_scales, resolve_mpp
from histopipe.slides.slide import core_region
from histopipe.slides.slide_files import Fingerprint, file_sizes, fingerprint, open_slide
from histopipe.slides.staging import StagingArea
from histopipe.slides.tables import describe_changes
from histopipe.store.claims import Claims
from histopipe.store.record import FailureKind, SlideRecord, SlideState, describe_copies
from histopipe.store.store import recorded
from histopipe.store.writer import StoreWriter
from histopipe.system.files import network_filesystem
from histopipe.system.forecast import shares_of
from histopipe.system.output import LogProgress, Progress, counted, some
from histopipe.system.urls import is_url
from histopipe.system.worker_pool import WorkerPool, map_in_pool
from histopipe.tiling.mask_files import identify_mask_file
from histopipe.tiling.plan import choose_level
from histopipe.tiling.spec import TilingSpec


def ingest_slides(
    jobs: Sequence[SlideJob],
    store: Path,
    spec: TilingSpec,
    options: IngestOptions,
    *,
    progress: Progress,
    writer: StoreWriter | None = None,
) -> IngestReport:
    """Tile slides into a store, which is created if missing.

    Slide ids must be unique: `with_recorded_ids` assigns the ids of the store. A given writer stays open.

    Raises:
        UsageError: the store has another spec or is on a network filesystem, or `--level` would mix scales.
        DamagedStore: the store cannot be used.
        MachineShort: disk or memory ran out; complete slides are kept.
    """
    started = time.monotonic()
    check_ingest(jobs, store, spec, options)  # before the writer creates the store
    with ExitStack() as stack:
        # Closed in reverse: the processes end before the stage removes their files, and the writer closes last.
        writer = writer or stack.enter_context(StoreWriter(store, spec))
        log = stack.enter_context(LogProgress(store / LOG))
        log.message(f"histopipe {__version__}, {spec}, {options}")
        events = stack.enter_context(
            IngestProgress(file_sizes(job.file for job in jobs), progress, log)
        )
        # By id, so that numbers do not depend on the order of arguments.
        writer.register(
            sorted((SlideRecord.new(job.file) for job in jobs), key=lambda record: record.id)
        )
        records = writer.records()
        pending, relabelled = sort_slides(jobs, records, options, events)
        for text in write_labels(writer, relabelled, records):
            for display in (progress, log):
                display.message(f"changed: {text}")
        if pending:
            claims = stack.enter_context(Claims(store))
            stage = open_stage(options, progress, stack)
            pool = stack.enter_context(WorkerPool(options.worker_count, prepare))
            Pipeline(writer, pool.submit_within, spec, options, claims, events, stage).run(pending)
            records = writer.records()
        outcomes = sorted(events.outcomes.values(), key=lambda outcome: outcome.id)
        warnings = describe_copies(records.values())
        report = IngestReport(
            str(store),
            time.monotonic() - started,
            outcomes,
            warnings,
            shares_of(events.stages.seconds),
        )
        for text in [*warnings, *report.summary_lines()]:
            log.message(text)
    report = annotate_skipped(report, jobs, store, options)
    report.write_csv(store / SUMMARY, progress)
    return report


def open_stage(options: IngestOptions, progress: Progress, stack: ExitStack) -> StagingArea | None:
    """Return the staging area of an ingest, which is closed with the stack; None if slides are read in place."""
    if options.stage is None:
        return None
    bar = stack.enter_context(progress.bar("staging", unit="bytes", detail=True))
    lock = threading.Lock()

    def advance(count: int) -> None:
        with lock:  # several threads download parts of a slide
            bar.advance(count)

    return stack.enter_context(StagingArea(Path(options.stage), options.stage_bytes, advance))


def sort_slides(
    jobs: Sequence[SlideJob],
    records: Mapping[int, SlideRecord],
    options: IngestOptions,
    events: IngestProgress,
) -> tuple[list[SlideJob], list[SlideRecord]]:
    """Separate slides to ingest from others, set their numbers and records, and show the outcomes of the others.

    `records` has the records of a store; a new slide has the number -1.

    Returns:
        The slides to ingest; and the new records of complete slides whose label, patient or site has changed.
    """
    recorded_slides = {record.id: (number, record) for number, record in records.items()}
    pending, relabelled = [], []
    for job in jobs:
        job.number, before = recorded_slides.get(job.id) or (-1, SlideRecord.new(job.file))
        job.record = before.with_label(job.label, job.patient)
        outcome = find_early_outcome(job, options)
        if outcome is None:
            job.again = job.record.state is SlideState.COMPLETE
            job.record = job.record.without_results(job.file)
            pending.append(job)
        else:
            events.finished(outcome)
            if job.record != before and outcome.status is SlideStatus.SKIPPED:
                relabelled.append(job.record)
    return pending, relabelled


def find_early_outcome(job: SlideJob, options: IngestOptions) -> SlideOutcome | None:
    """Return the outcome of a slide that is not to be ingested; None if it is to be ingested."""
    file, record = job.file, job.record
    # If the recorded file does not exist, the slide was moved.
    path = record.resolved_path
    if path != file.resolve() and (file.remote if is_url(path) else Path(path).exists()):
        return SlideOutcome.of(
            record.with_failure(
                f"{file.location}: another slide, {record.path}, has the id {record.id!r} in the store; "
                "ingest their common parent folder into a new store, or rename one"
            )
        )
    if record.state is SlideState.PENDING:
        # A slide with an error is hidden by `repair`. A new ingest would delete what it still has.
        return SlideOutcome.of(record.with_failure(record.error)) if record.error else None
    try:
        changed = _file_change(fingerprint(file), record)
    except SlideError:
        return None  # planning fails with the same reason, and records it
    if record.state is SlideState.FAILED:
        retry = (
            options.retry_failed
            or changed
            # The limit that it exceeded has changed.
            or record.error_option not in (None, options.timeout_text, options.unreadable_text)
            or record.error_kind is FailureKind.OPTION
        )
        return None if retry else SlideOutcome.of(record)
    changed, scale = changed or _mask_change(job) or _core_change(job), _scale_change(job, options)
    # --force also imports coordinates again: they may have changed.
    if options.force and (changed or scale or job.coords is not None):
        return None
    if changed:
        record = record.with_failure(
            f"{file.location} {changed} since it was ingested; pass --force to ingest it again"
        )
    outcome = SlideOutcome.of(record, SlideStatus.SKIPPED)
    return replace(outcome, notes=(*outcome.notes, scale)) if scale else outcome


def _file_change(now: Fingerprint, record: SlideRecord) -> str | None:
    changes = {
        f"changed ({now.size_bytes:,} bytes, {record.size_bytes:,} before)": now.size_bytes
        != record.size_bytes,
        "was modified (its modification time has changed)": now.mtime_ns != record.mtime_ns,
        "was modified (its ETag has changed)": None not in (now.etag, record.etag)
        and now.etag != record.etag,
    }
    return next((change for change, applies in changes.items() if applies), None)


def _mask_change(job: SlideJob) -> str | None:
    before = job.record.mask
    try:
        now = None if job.mask is None else identify_mask_file(job.mask)
    except MaskUnfit as error:
        return f"has a mask that cannot be read ({error})"
    if now == before:
        return None
    return f"was assigned another mask ({now or 'none'}, {before or 'none'} before)"


def _core_change(job: SlideJob) -> str | None:
    """Return a note if the outline of a core was moved, or its name was given to another core."""
    region, record = job.file.core, job.record
    if region is None or job.file.problem:
        return "has an uncertain name of this core" if region else None
    size, corner = Size(record.width, record.height), record.frame_bounds.origin
    now = core_region(size, corner, region).to_list()
    return None if now == record.bounds else f"has another region ({now}, {record.bounds} before)"


def _scale_change(job: SlideJob, options: IngestOptions) -> str | None:
    """Return a note if the options give another scale than the slide was ingested with."""
    record, used = job.record, job.mpp
    if record.mpp_source in (None, MppSource.DEFAULT):
        used = used or options.default_mpp
    if used is None or (record.mpp is not None and equal_scales(used, Mpp(record.mpp))):
        return None
    before = (
        "an unknown scale" if record.mpp is None else f"{record.mpp:g} mpp ({record.mpp_source})"
    )
    return (
        f"it was ingested with {before}, and {used:g} mpp is not used; "
        "pass --force to ingest it again"
    )


def write_labels(
    writer: StoreWriter, records: Sequence[SlideRecord], before: Mapping[int, SlideRecord]
) -> list[str]:
    """Write label, patient and site of records. Return what changes, of all records `before`."""
    numbers = {record.id: number for number, record in before.items()}
    cells = [
        {r.id: {name: getattr(r, name) for name in ("label", "patient", "site")} for r in each}
        for each in (before.values(), records)
    ]
    for record in records:
        # Change only these fields: another command may write the others at the same time.
        writer.change(
            numbers[record.id], label=record.label, patient=record.patient, site=record.site
        )
    return list(describe_changes(cells[0], cells[1]))


def annotate_skipped(
    report: IngestReport, jobs: Sequence[SlideJob], store: Path, options: IngestOptions
) -> IngestReport:
    """Label the patches of slides that an earlier run ingested, where their annotations have changed.

    Returns:
        The report. Slides that cannot be labelled are marked as failed. A warning names slides without a labelled patch.
    """
    ids = {job.id for job in jobs}
    notes = {s.id: list(s.notes) for s in report.of(SlideStatus.COMPLETE) if s.id in ids}
    skipped = {slide.id for slide in report.of(SlideStatus.SKIPPED)}
    files = {job.id: job.annotations for job in jobs if job.annotations and job.id in skipped}
    if files:
        labelled = annotate_slides(store, files, options.rules, workers=options.worker_count)
        notes |= labelled.unlabelled
        slides = [
            replace(slide, status=SlideStatus.FAILED, reason=labelled.failed[slide.id])
            if slide.id in labelled.failed
            else slide
            for slide in report.slides
        ]
        report = replace(report, slides=slides)
    names = sorted(
        name for name, texts in notes.items() if any(NO_LABELS in text for text in texts)
    )
    warning = f"the annotations of {counted(len(names), 'slide')} label no patch: {some(names, 3)}"
    return replace(report, warnings=[*report.warnings, warning]) if names else report


def check_ingest(
    jobs: Sequence[SlideJob], store: Path, spec: TilingSpec, options: IngestOptions
) -> None:
    """Check an ingest before anything is written.

    Raises:
        UsageError: the store would be on a network filesystem, or `--level` would mix scales.
    """
    if not options.allow_network:
        refuse_network(store)
    if spec.level is None or options.allow_mixed_mpp:
        return
    if any(job.file.remote for job in jobs):
        raise UsageError(
            f"--level {spec.level} with slides at a URL",
            found="scales that are unknown before the download",
            todo="use --mpp or --mag, or pass --allow-mixed-mpp",
        )
    complete = {
        record.id: record.patch_mpp
        for record in recorded(store).values()
        if record.state is SlideState.COMPLETE
    }
    stored = {name: Mpp(mpp) for name, mpp in complete.items() if mpp}
    current, unknown = _scales_at_level(jobs, spec, options)
    # Complete slides keep their scale.
    scales = stored | current if options.force else current | stored
    if not scales:
        return
    ordered = sorted((mpp, name) for name, mpp in scales.items())
    (finest, fine), (coarsest, coarse) = ordered[0], ordered[-1]
    unknown = [name for name in unknown if options.force or name not in complete]
    if unknown:
        raise UsageError(
            f"--level {spec.level} would mix scales",
            found=f"{finest:g} mpp ({fine}), and {counted(len(unknown), 'slide')} without a scale "
            f"({some(unknown, 3)})",
            expected="the scale of every slide, or of none",
            todo="name it with --default-mpp or --mpp-csv, or pass --allow-mixed-mpp",
        )
    if not same_scale(finest, coarsest):
        raise UsageError(
            f"--level {spec.level} would mix scales",
            found=f"{finest:g} mpp ({fine}) and {coarsest:g} mpp ({coarse})",
            expected="a difference of at most 2 %",
            todo="use --mpp or --mag, or pass --allow-mixed-mpp",
        )


def refuse_network(store: Path) -> None:
    """Raise an error if a store would be on a network filesystem, where LMDB cannot keep it consistent.

    Raises:
        UsageError: the path is on a network filesystem.
    """
    kind = network_filesystem(store)
    if kind is not None:
        raise UsageError(
            f"the store {store} would be on a network filesystem",
            found=kind,
            expected="a local disk: LMDB's locks and maps do not work between machines",
            todo="write to a local disk and copy the finished store, or pass --allow-network at your own risk",
        )


def scale_at_level(job: SlideJob, spec: TilingSpec, options: IngestOptions) -> Mpp | None:
    """Return the scale of a slide's patches; a task for a worker process.

    Raises:
        SlideError: the slide cannot be opened, or its scale is unknown.
    """
    with open_slide(job.file.path, options.reader) as opened:
        scale = resolve_mpp(job.id, opened.info, from_csv=job.mpp, default=options.default_mpp)
        return choose_level(job.id, opened.info.levels, scale.mpp, spec).mpp


def _scales_at_level(
    jobs: Sequence[SlideJob], spec: TilingSpec, options: IngestOptions
) -> tuple[dict[str, Mpp], list[str]]:
    """Return the known scales, and the slides without one.

    Workers open the slides, because a damaged file may crash or hang its decoder.
    """
    read = partial(scale_at_level, spec=spec, options=options)
    with WorkerPool(options.worker_count) as pool:
        tasks = {job.id: task for job, task in map_in_pool(pool, read, jobs, seconds=120.0)}
    # The ingest reports other errors.
    scales = {name: cast(Mpp, t.result()) for name, t in tasks.items() if t.exception() is None}
    return scales, [name for name, t in tasks.items() if isinstance(t.exception(), ScaleError)]
