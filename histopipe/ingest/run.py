"""One ingest from arguments to report: the library call behind `histopipe ingest`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from histopipe._version import __version__
from histopipe.ingest.job import Settings
from histopipe.ingest.outcome import IngestReport, SlideOutcome, Status
from histopipe.ingest.pipeline import Pipeline
from histopipe.ingest.progress import Both, Progress, logged
from histopipe.ingest.request import IngestOptions, check_request, duplicates, new_record, sort_out
from histopipe.ingest.summary import LOG, SUMMARY, leave_csv, summary_lines
from histopipe.ingest.worker import prepare
from histopipe.measure.annotate import label_slides
from histopipe.slides.discovery import SlideFile
from histopipe.store.claims import Claims
from histopipe.store.writer import StoreWriter
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.spec import TilingSpec


def ingest(
    slides: Sequence[SlideFile],
    store: Path,
    spec: TilingSpec,
    options: IngestOptions,
    progress: Progress,
    *,
    pool: WorkerPool | None = None,
    writer: StoreWriter | None = None,
) -> IngestReport:
    """Tile slides into a store.

    Args:
        slides: what `discover` found, under the ids of `with_recorded_ids`.
        store: the store's folder, made if missing.
        spec: how to tile and encode.
        options: the rest.
        progress: told what happens.
        pool: of `prepare`d processes, to be used and left open; if not given, one is started.
        writer: of the store, likewise; if not given, it is opened.

    Returns:
        What became of every slide asked for.

    Raises:
        UsageError: the store has another spec or lies on a network filesystem, or `--level` would mix scales.
        DamagedStore: the store cannot be used.
        MachineShort: disk or memory ran out; complete slides stay.
    """
    started = time.monotonic()
    check_request(slides, store, spec, options)
    with ExitStack() as stack:
        if writer is None:
            writer = stack.enter_context(StoreWriter(store, spec))
        log = stack.enter_context(logged(store / LOG))
        log.said(f"histopipe {__version__}, {spec}, {options}")
        outcomes = _ingest(slides, writer, spec, options, Both(log, progress), pool=pool)
        warnings = duplicates(writer.records().values())
        report = IngestReport(str(store), time.monotonic() - started, outcomes, warnings)
        for text in [*warnings, *summary_lines(report)]:
            log.said(text)
    report = labelled_too(report, store, options)
    leave_csv(report, store / SUMMARY, progress)
    return report


def labelled_too(report: IngestReport, store: Path, options: IngestOptions) -> IngestReport:
    """Label the slides that an earlier run has ingested, where their annotations are others now."""
    before = {slide.id for slide in report.of(Status.SKIPPED) if slide.id in options.annotations}
    if not before:
        return report
    result = label_slides(
        store, options.annotations, options.rules, only=before, workers=options.worker_count
    )
    slides = [
        replace(slide, status=Status.FAILED, reason=result.failed[slide.id])
        if slide.id in result.failed
        else slide
        for slide in report.slides
    ]
    return replace(report, slides=slides)


def _ingest(
    slides: Sequence[SlideFile],
    writer: StoreWriter,
    spec: TilingSpec,
    options: IngestOptions,
    progress: Progress,
    *,
    pool: WorkerPool | None,
) -> list[SlideOutcome]:
    """What became of each slide, in the order of their ids."""
    known = writer.records()
    numbers = writer.register(sorted(map(new_record, slides), key=lambda record: record.id))
    todo = sort_out(slides, known, numbers, options)
    for number, record in todo.relabelled.items():
        # Its labels are others now; its pixels are the same, and another command may be at its index.
        writer.change(number, label=record.label, patient=record.patient, site=record.site)
    progress.begin(len(slides))
    for outcome in todo.outcomes:
        progress.finished(outcome)
    outcomes = list(todo.outcomes)
    if todo.jobs:
        settings = Settings(writer.path, spec, options.default_mpp, options.route, options.rules)
        workers = options.worker_count
        with ExitStack() as stack:
            claims = stack.enter_context(Claims(settings.store))
            if pool is None:
                pool = WorkerPool(workers, prepare)
                stack.callback(pool.shutdown, cancel_futures=True)
            pipeline = Pipeline(
                writer=writer,
                workers=pool,
                settings=settings,
                claims=claims,
                progress=progress,
                max_unreadable=options.max_unreadable,
                in_flight=2 * workers,
                timeout=options.timeout,
            )
            outcomes += pipeline.run(todo.jobs)
    return sorted(outcomes, key=lambda outcome: outcome.id)
