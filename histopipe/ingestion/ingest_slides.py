"""Ingest slides that are already found into a store: the step behind `ingest`, also used by `repair` and on clusters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from histopipe._version import __version__
from histopipe.ingestion.checks import check_ingest
from histopipe.ingestion.decisions import sort_slides
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.pipeline import Pipeline
from histopipe.ingestion.records import duplicates, new_record
from histopipe.ingestion.report import LOG, SUMMARY, IngestProgress, IngestReport, Status
from histopipe.ingestion.storing import prepare
from histopipe.measure.annotate import annotate_slides
from histopipe.store.claims import Claims
from histopipe.store.writer import StoreWriter
from histopipe.system.progress import LogProgress, Progress, default_progress
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.spec import TilingSpec


def ingest_slides(
    slides: Sequence[SlideInput],
    store: Path,
    spec: TilingSpec,
    options: IngestOptions | None = None,
    *,
    progress: Progress | None = None,
    pool: WorkerPool | None = None,
    writer: StoreWriter | None = None,
) -> IngestReport:
    """Tile slides into a store.

    Args:
        slides: each with a different id; `with_recorded_ids` gives them the ids that the store has.
        store: the store's folder, created if missing.
        spec: how to tile and encode.
        options: the rest.
        progress: where progress is shown.
        pool: processes that ran `prepare`, used and left open; None starts and ends them.
        writer: of the store, used and left open; None opens and closes it.

    Raises:
        UsageError: the store has another spec or is on a network filesystem, or `--level` would mix scales.
        DamagedStore: the store cannot be used.
        MachineShort: disk or memory ran out; complete slides stay.
    """
    started = time.monotonic()
    options, shown = options or IngestOptions(), progress or default_progress()
    check_ingest(slides, store, spec, options)
    with ExitStack() as stack:
        writer = writer or stack.enter_context(StoreWriter(store, spec))
        log = stack.enter_context(LogProgress(store / LOG))
        log.message(f"histopipe {__version__}, {spec}, {options}")
        events = stack.enter_context(IngestProgress(len(slides), shown, log))
        writer.register(sorted((new_record(s.file) for s in slides), key=lambda record: record.id))
        found = sort_slides(slides, writer.records(), options)
        for number, record in found.relabelled.items():
            # Only these fields: another command may be writing the rest of the record.
            writer.change(number, label=record.label, patient=record.patient, site=record.site)
        for outcome in found.outcomes:
            events.finished(outcome)
        outcomes = list(found.outcomes)
        if found.pending:
            claims = stack.enter_context(Claims(store))
            if pool is None:
                pool = WorkerPool(options.worker_count, prepare)
                stack.callback(pool.shutdown, cancel_futures=True)
            outcomes += Pipeline(writer, pool, spec, options, claims, events).run(found.pending)
        outcomes.sort(key=lambda outcome: outcome.id)
        warnings = duplicates(writer.records().values())
        report = IngestReport(str(store), time.monotonic() - started, outcomes, warnings)
        for text in [*warnings, *report.summary_lines()]:
            log.message(text)
    report = annotate_skipped(report, slides, store, options)
    report.write_csv(store / SUMMARY, shown)
    return report


def annotate_skipped(
    report: IngestReport, slides: Sequence[SlideInput], store: Path, options: IngestOptions
) -> IngestReport:
    """Label the patches of slides that an earlier run ingested, where their annotations have changed.

    Returns:
        The report, in which slides that cannot be labelled have failed.
    """
    skipped = {slide.id for slide in report.of(Status.SKIPPED)}
    files = {s.id: s.annotations for s in slides if s.annotations is not None and s.id in skipped}
    if not files:
        return report
    failed = annotate_slides(
        store, files, options.rules, only=files.keys(), workers=options.worker_count
    ).failed
    outcomes = [
        replace(slide, status=Status.FAILED, reason=failed[slide.id])
        if slide.id in failed
        else slide
        for slide in report.slides
    ]
    return replace(report, slides=outcomes)
