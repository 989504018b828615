"""Check and ingest slides: the main step of `ingest`, also used by `repair` and on clusters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from histopipe._version import __version__
from histopipe.annotations.patch_labels import NO_LABELS
from histopipe.errors import ScaleError, UsageError
from histopipe.geometry import Mpp, same_scale
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.pipeline import Pipeline
from histopipe.ingestion.records import duplicates, new_record, sort_slides
from histopipe.ingestion.report import LOG, SUMMARY, IngestProgress, IngestReport, Status
from histopipe.ingestion.storing import prepare
from histopipe.measure.annotate import annotate_slides
from histopipe.slides.readers import open_slide
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.staging import Stage
from histopipe.store.claims import Claims
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import recorded
from histopipe.store.writer import StoreWriter
from histopipe.system.filesystems import network_filesystem
from histopipe.system.progress import LogProgress, Progress
from histopipe.system.result import counted, some
from histopipe.system.worker_pool import WorkerPool
from histopipe.tiling.plan import choose_level
from histopipe.tiling.spec import TilingSpec

_OPENING_SECONDS = 120.0


def ingest_slides(
    slides: Sequence[SlideInput],
    store: Path,
    spec: TilingSpec,
    options: IngestOptions,
    *,
    progress: Progress,
    pool: WorkerPool | None = None,
    writer: StoreWriter | None = None,
) -> IngestReport:
    """Tile slides into a store, which is created if missing.

    Slide ids must be unique: `with_recorded_ids` assigns the ids of the store. A given pool or writer stays open. The
    processes of a given pool must have run `prepare`.

    Raises:
        UsageError: the store has another spec or is on a network filesystem, or `--level` would mix scales.
        DamagedStore: the store cannot be used.
        MachineShort: disk or memory ran out; complete slides are kept.
    """
    started = time.monotonic()
    check_ingest(slides, store, spec, options)
    with ExitStack() as stack:
        writer = writer or stack.enter_context(StoreWriter(store, spec))
        log = stack.enter_context(LogProgress(store / LOG))
        log.message(f"histopipe {__version__}, {spec}, {options}")
        events = stack.enter_context(IngestProgress(len(slides), progress, log))
        writer.register(sorted((new_record(s.file) for s in slides), key=lambda record: record.id))
        sorted_slides = sort_slides(slides, writer.records(), options)
        for outcome in sorted_slides.outcomes:
            events.finished(outcome)
        write_labels(writer, sorted_slides.relabelled)
        outcomes = list(sorted_slides.outcomes)
        if sorted_slides.pending:
            claims = stack.enter_context(Claims(store))
            stage = None
            if options.stage is not None:
                opened = Stage(Path(options.stage), options.stage_bytes, events.copied)
                stage = stack.enter_context(opened)
            pool = pool or stack.enter_context(WorkerPool(options.worker_count, prepare))
            pipeline = Pipeline(writer, pool.submit_within, spec, options, claims, events, stage)
            outcomes += pipeline.run(sorted_slides.pending)
        outcomes.sort(key=lambda outcome: outcome.id)
        warnings = duplicates(writer.records().values())
        report = IngestReport(str(store), time.monotonic() - started, outcomes, warnings)
        for text in [*warnings, *report.summary_lines()]:
            log.message(text)
    report = annotate_skipped(report, slides, store, options)
    report.write_csv(store / SUMMARY, progress)
    return report


def write_labels(writer: StoreWriter, records: Mapping[int, SlideRecord]) -> None:
    """Write label, patient and site of records, by slide number."""
    for number, record in records.items():
        # Change only these fields: another command may write the others at the same time.
        writer.change(number, label=record.label, patient=record.patient, site=record.site)


def annotate_skipped(
    report: IngestReport, slides: Sequence[SlideInput], store: Path, options: IngestOptions
) -> IngestReport:
    """Label the patches of slides that an earlier run ingested, where their annotations have changed.

    Returns:
        The report. Slides that cannot be labelled are marked as failed. A warning names slides without a labelled patch.
    """
    ids = {slide.id for slide in slides}
    complete = report.of(Status.COMPLETE)
    notes = {slide.id: list(slide.notes) for slide in complete if slide.id in ids}
    skipped = {slide.id for slide in report.of(Status.SKIPPED)}
    files = {s.id: s.annotations for s in slides if s.annotations is not None and s.id in skipped}
    outcomes = report.slides
    if files:
        labelled = annotate_slides(
            store, files, options.rules, only=files.keys(), workers=options.worker_count
        )
        notes |= labelled.unlabelled
        outcomes = [
            replace(slide, status=Status.FAILED, reason=labelled.failed[slide.id])
            if slide.id in labelled.failed
            else slide
            for slide in report.slides
        ]
    names = sorted(
        name for name, texts in notes.items() if any(NO_LABELS in text for text in texts)
    )
    warning = f"the annotations of {counted(len(names), 'slide')} label no patch: {some(names, 3)}"
    return replace(
        report, slides=outcomes, warnings=[*report.warnings, *([warning] if names else [])]
    )


def check_ingest(
    slides: Sequence[SlideInput], store: Path, spec: TilingSpec, options: IngestOptions
) -> None:
    """Check an ingest before anything is written.

    Raises:
        UsageError: the store would be on a network filesystem, or `--level` would mix scales.
    """
    if not options.allow_network:
        refuse_network(store)
    if spec.level is None or options.allow_mixed_mpp:
        return
    if any(slide.file.remote for slide in slides):
        raise UsageError(
            f"--level {spec.level} with slides at a URL", found="scales that are unknown before the download",
            todo="use --mpp or --mag, or pass --allow-mixed-mpp",
        )  # fmt: skip
    complete = {
        record.id: record.patch_mpp
        for record in recorded(store).values()
        if record.state is SlideState.COMPLETE
    }
    stored = {name: Mpp(mpp) for name, mpp in complete.items() if mpp}
    current, unknown = _scales_at_level(slides, spec, options)
    # Complete slides keep their scale.
    scales = stored | current if options.force else current | stored
    if not scales:
        return
    ordered = sorted((mpp, name) for name, mpp in scales.items())
    unknown = [name for name in unknown if options.force or name not in complete]
    if unknown:
        raise UsageError(
            f"--level {spec.level} would mix scales",
            found=f"{ordered[0][0]:g} mpp ({ordered[0][1]}), and {counted(len(unknown), 'slide')} without a scale "
            f"({some(unknown, 3)})",
            expected="the scale of every slide, or of none",
            todo="name it with --default-mpp or --mpp-csv, or pass --allow-mixed-mpp",
        )
    (finest, fine), (coarsest, coarse) = ordered[0], ordered[-1]
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


def scale_at_level(slide: SlideInput, spec: TilingSpec, options: IngestOptions) -> Mpp | None:
    """Return the scale of a slide's patches; a task for a worker process.

    Raises:
        SlideError: the slide cannot be opened, or its scale is unknown.
    """
    with open_slide(slide.file.path, options.reader) as opened:
        scale = resolve_mpp(slide.id, opened.info, from_csv=slide.mpp, default=options.default_mpp)
        return choose_level(slide.id, opened.info.levels, scale.mpp, spec).mpp


def _scales_at_level(
    slides: Sequence[SlideInput], spec: TilingSpec, options: IngestOptions
) -> tuple[dict[str, Mpp], list[str]]:
    """Return the known scales, and the slides without one.

    Workers open the slides, because a damaged file may crash or hang its decoder.
    """
    scales: dict[str, Mpp] = {}
    unknown = []
    with WorkerPool(options.worker_count) as pool:
        tasks = [
            pool.submit_within(_OPENING_SECONDS, scale_at_level, slide, spec, options)
            for slide in slides
        ]
        for slide, task in zip(slides, tasks, strict=True):
            with suppress(Exception):  # the ingest reports the reason
                try:
                    scales[slide.id] = cast(Mpp, task.result())
                except ScaleError:
                    unknown.append(slide.id)
    return scales, unknown
