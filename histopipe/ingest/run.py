"""One ingest from arguments to report: the library call behind `histopipe ingest`."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from histopipe.errors import NothingToDo, SlideError, UsageError
from histopipe.files import storable
from histopipe.geometry import Mpp, same_scale
from histopipe.ingest.claims import Claims
from histopipe.ingest.decide import Action, decide
from histopipe.ingest.labels import labelled
from histopipe.ingest.outcome import IngestReport, SlideOutcome, Status
from histopipe.ingest.pipeline import Pipeline, failed_outcome, outcome_of
from histopipe.ingest.progress import Progress
from histopipe.ingest.worker import Settings, SlideJob
from histopipe.slides.discovery import SlideFile
from histopipe.slides.identity import fingerprint
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide import Slide
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.tiling.level import choose_level
from histopipe.tiling.spec import TilingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestOptions:
    """Everything about an ingest that is not in the spec.

    Attributes:
        workers: processes; None takes one a core.
        labels: label, patient and site by slide id.
        mpps: the user's scales by slide id; `default_mpp` for slides that have none.
        allow_mixed_mpp: with `--level`, let slides of different scale into one store.
        max_unreadable: share of a slide's patches, 0 to 1, that may be unreadable.
        force: ingest again slides whose file was replaced.
        retry_failed: try again slides whose file was bad.
    """

    workers: int | None = None
    labels: Mapping[str, SlideLabel] = field(default_factory=dict)
    mpps: Mapping[str, Mpp] = field(default_factory=dict)
    default_mpp: Mpp | None = None
    allow_mixed_mpp: bool = False
    max_unreadable: float = 0.01
    force: bool = False
    retry_failed: bool = False


def ingest(
    slides: Sequence[SlideFile],
    store: Path,
    spec: TilingSpec,
    options: IngestOptions,
    progress: Progress,
) -> IngestReport:
    """Tile slides into a store.

    Args:
        slides: what `discover` found, under the ids of `with_recorded_ids`.
        store: the store's folder, made if missing.
        spec: how to tile and encode.
        options: the rest.
        progress: told what happens.

    Returns:
        What became of every slide asked for.

    Raises:
        UsageError: the store has another spec, or `--level` would mix scales.
        DamagedStore: the store cannot be used.
        MachineShort: disk or memory ran out; complete slides stay.
    """
    started = time.monotonic()
    if spec.level is not None and not options.allow_mixed_mpp:
        _refuse_mixed_scales(slides, recorded(store), spec, options)
    with StoreWriter(store, spec) as writer:
        jobs, outcomes = _sort_out(slides, writer, options)
        progress.begin(len(slides))
        for outcome in outcomes:
            progress.finished(outcome)
        if jobs:
            settings = Settings(store, spec, options.default_mpp)
            outcomes += _run(jobs, writer, settings, options, progress)
        warnings = _duplicates(writer.records())
    outcomes.sort(key=lambda outcome: outcome.id)
    return IngestReport(str(store), time.monotonic() - started, outcomes, warnings)


def recorded(store: Path) -> dict[int, SlideRecord]:
    """The records of a store by number; none where there is no store yet."""
    try:
        with Store(store) as opened:
            return opened.records
    except NothingToDo:
        return {}


def resolved(path: Path) -> str:
    """A path without links, as records hold it."""
    return storable(os.path.realpath(path))


def _sort_out(
    slides: Sequence[SlideFile], writer: StoreWriter, options: IngestOptions
) -> tuple[list[SlideJob], list[SlideOutcome]]:
    """Number the slides; tell those to ingest from those that need nothing, or can get nothing."""
    known = {record.id: record for record in writer.records().values()}
    fresh = [_new_record(slide) for slide in slides if slide.id not in known]
    numbers = writer.register(sorted(fresh, key=lambda record: record.id))
    jobs, outcomes = [], []
    for slide in slides:
        before = known.get(slide.id)
        record = labelled(before or _new_record(slide), options.labels.get(slide.id))
        number = numbers[slide.id]
        job = SlideJob(number, slide, record, options.mpps.get(slide.id))
        outcome = _without_work(job, before, options)
        if outcome is None:
            again = record.state is SlideState.COMPLETE
            jobs.append(dataclasses.replace(job, record=_renewed(record, slide), again=again))
            continue
        if before is not None and record != before and outcome.status is Status.SKIPPED:
            writer.update(number, record)  # its labels are others now; its pixels are the same
        outcomes.append(outcome)
    return jobs, outcomes


def _without_work(
    job: SlideJob, before: SlideRecord | None, options: IngestOptions
) -> SlideOutcome | None:
    """The outcome of a slide that is not to be ingested now; None if it is."""
    if before is not None and _is_another_slide(job.slide, before):
        return failed_outcome(
            job.record,
            f"{job.slide.path}: another slide, {before.path}, is called {before.id!r} in the store; "
            "ingest their common parent folder into a new store, or rename one",
        )
    try:
        now = fingerprint(job.slide)
    except SlideError:
        return None  # the plan will say why, and record it
    decision = decide(
        job.slide,
        now,
        before,
        from_csv=job.mpp_from_csv,
        default=options.default_mpp,
        force=options.force,
        retry_failed=options.retry_failed,
    )
    if decision.action is Action.INGEST:
        return None
    if decision.action is Action.KEEP:
        return outcome_of(job.record, Status.SKIPPED)
    return failed_outcome(job.record, decision.reason)


def _is_another_slide(slide: SlideFile, record: SlideRecord) -> bool:
    """Whether the record is of another file that is still there; one that is gone was moved to where this one is."""
    return record.resolved_path != resolved(slide.path) and Path(record.resolved_path).exists()


def _new_record(slide: SlideFile) -> SlideRecord:
    return SlideRecord(
        id=slide.id,
        path=storable(str(slide.path)),
        resolved_path=resolved(slide.path),
    )


def _renewed(record: SlideRecord, slide: SlideFile) -> SlideRecord:
    """A record without what an earlier ingest found, but with its labels and what a later version added."""
    return dataclasses.replace(
        _new_record(slide),
        id=record.id,
        patient=record.patient,
        label=record.label,
        site=record.site,
        unknown=record.unknown,
    )


def _run(
    jobs: list[SlideJob],
    writer: StoreWriter,
    settings: Settings,
    options: IngestOptions,
    progress: Progress,
) -> list[SlideOutcome]:
    workers = options.workers or len(os.sched_getaffinity(0))
    claims = Claims(settings.store)
    pipeline = Pipeline(
        writer=writer,
        make_executor=lambda: _process_pool(workers),
        settings=settings,
        claims=claims,
        progress=progress,
        max_unreadable=options.max_unreadable,
        in_flight=2 * workers,
    )
    try:
        return list(pipeline.run(jobs))
    finally:
        pipeline.close()
        claims.close()


def _process_pool(workers: int) -> ProcessPoolExecutor:
    """Spawned workers that end with this process, however it ends."""
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(os.getpid(),),
    )


def _begin_worker(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach a whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG: nobody writes on behalf of the dead
    if os.getppid() != parent:
        os._exit(1)


def _refuse_mixed_scales(
    slides: Sequence[SlideFile],
    records: Mapping[int, SlideRecord],
    spec: TilingSpec,
    options: IngestOptions,
) -> None:
    """With `--level`, patches are of one scale only if the slides are; ask before mixing."""
    scales = {
        record.id: Mpp(record.patch_mpp)
        for record in records.values()
        if record.state is SlideState.COMPLETE and record.patch_mpp
    }
    for slide in slides:
        scale = _scale_at_level(slide, spec, options)
        if scale is not None:
            scales[slide.id] = scale
    if not scales:
        return
    finest, coarsest = min(scales, key=scales.__getitem__), max(scales, key=scales.__getitem__)
    if not same_scale(scales[finest], scales[coarsest]):
        raise UsageError(
            f"--level {spec.level} would mix scales",
            found=f"{scales[finest]:g} mpp ({finest}) and {scales[coarsest]:g} mpp ({coarsest})",
            expected="at most 2 % difference",
            todo="use --mpp or --mag, or pass --allow-mixed-mpp",
        )


def _scale_at_level(slide: SlideFile, spec: TilingSpec, options: IngestOptions) -> Mpp | None:
    try:
        with Slide(slide.path) as opened:
            given = options.mpps.get(slide.id)
            scale = resolve_mpp(slide.id, opened.info, from_csv=given, default=options.default_mpp)
            return choose_level(slide.id, opened.info.levels, scale.mpp, spec).mpp
    except SlideError:
        return None  # the ingest itself will tell


def _duplicates(records: Mapping[int, SlideRecord]) -> list[str]:
    """A warning for each scan that the store holds under several ids."""
    copies: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for record in records.values():
        if record.state is SlideState.COMPLETE and record.content:
            copies[record.content, record.width, record.height].append(record.id)
    return [
        f"{', '.join(sorted(ids))} are copies of one slide: all are stored, and kept on one side of a split"
        for ids in copies.values()
        if len(ids) > 1
    ]
