"""What is asked of an ingest, and what that means for each slide, given what the store holds. Nothing here writes."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from histopipe.annotations.rules import AnnotationRules
from histopipe.errors import SlideError, UsageError
from histopipe.geometry import Mpp, same_scale
from histopipe.ingest.coords import CoordsFile
from histopipe.ingest.decide import Action, decide
from histopipe.ingest.job import SlideJob
from histopipe.ingest.labels import labelled
from histopipe.ingest.outcome import SlideOutcome, Status, failed_outcome, outcome_of
from histopipe.ingest.route import AskedRoute
from histopipe.ingest.work import SlideTimeout, unreadable_text
from histopipe.slides.discovery import SlideFile
from histopipe.slides.identity import fingerprint
from histopipe.slides.scale import resolve_mpp
from histopipe.slides.slide import Slide
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.recorded import recorded
from histopipe.system.files import storable
from histopipe.system.filesystems import network_filesystem
from histopipe.system.worker_pool import WorkerDied, WorkerPool
from histopipe.tiling.level import choose_level
from histopipe.tiling.spec import TilingSpec

_OPENING_SECONDS = 120.0


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
        route: the only route to take, or "auto".
        slide_timeout: seconds of work that a slide may take; None takes a generous one that grows with the slide.
        allow_network: let the store lie on a network filesystem.
        coords: the patches of slides, by id, where another tool has chosen them.
        annotations: files of outlines by slide id; `rules` say how they become labels.
    """

    workers: int | None = None
    labels: Mapping[str, SlideLabel] = field(default_factory=dict)
    mpps: Mapping[str, Mpp] = field(default_factory=dict)
    default_mpp: Mpp | None = None
    allow_mixed_mpp: bool = False
    max_unreadable: float = 0.01
    force: bool = False
    retry_failed: bool = False
    route: AskedRoute = "auto"
    slide_timeout: float | None = None
    allow_network: bool = False
    coords: Mapping[str, CoordsFile] = field(default_factory=dict)
    annotations: Mapping[str, Path] = field(default_factory=dict)
    rules: AnnotationRules = field(default_factory=AnnotationRules)

    @property
    def worker_count(self) -> int:
        """Processes to start."""
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def timeout(self) -> SlideTimeout:
        """What a slide may take."""
        return (
            SlideTimeout() if self.slide_timeout is None else SlideTimeout(self.slide_timeout, 0.0)
        )


@dataclass(frozen=True, slots=True)
class SortedOut:
    """What is to be done.

    Attributes:
        jobs: slides to ingest.
        outcomes: of slides that need nothing, or can get nothing.
        relabelled: new records, by number, of complete slides whose labels changed.
    """

    jobs: list[SlideJob]
    outcomes: list[SlideOutcome]
    relabelled: dict[int, SlideRecord]


def check_request(
    slides: Sequence[SlideFile], store: Path, spec: TilingSpec, options: IngestOptions
) -> None:
    """Refuse what cannot be right before anything is done.

    Raises:
        UsageError: the store would lie on a network filesystem, or `--level` would mix scales.
    """
    if not options.allow_network:
        refuse_network(store)
    if spec.level is not None and not options.allow_mixed_mpp:
        _refuse_mixed_scales(slides, recorded(store), spec, options)


def sort_out(
    slides: Sequence[SlideFile],
    known: Mapping[int, SlideRecord],
    numbers: Mapping[str, int],
    options: IngestOptions,
) -> SortedOut:
    """Tell slides to ingest from those that need nothing, or can get nothing.

    Args:
        slides: all that were asked for.
        known: the store's records by number.
        numbers: every slide's number by id, also of those that are new.
        options: the user's.
    """
    before_by_id = {record.id: record for record in known.values()}
    sorted_out = SortedOut([], [], {})
    for slide in slides:
        before, number = before_by_id.get(slide.id), numbers[slide.id]
        record = labelled(before or new_record(slide), options.labels.get(slide.id))
        job = SlideJob(
            number, slide, record, options.mpps.get(slide.id), coords=options.coords.get(slide.id),
            annotations=options.annotations.get(slide.id),
        )  # fmt: skip
        outcome = _without_work(job, before, options)
        if outcome is None:
            again = record.state is SlideState.COMPLETE
            job = dataclasses.replace(job, record=_renewed(record, slide), again=again)
            sorted_out.jobs.append(job)
            continue
        if before is not None and record != before and outcome.status is Status.SKIPPED:
            sorted_out.relabelled[number] = record
        sorted_out.outcomes.append(outcome)
    return sorted_out


def resolved(path: Path) -> str:
    """A path without links, as records hold it."""
    return storable(os.path.realpath(path))


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
        options=(options.timeout.text, unreadable_text(options.max_unreadable)),
    )
    if decision.action is Action.INGEST:
        return None
    if decision.action is Action.KEEP and options.force and job.coords is not None:
        return None  # the coordinates may be others now
    if decision.action is Action.KEEP:
        return outcome_of(job.record, Status.SKIPPED)
    return failed_outcome(job.record, decision.reason)


def _is_another_slide(slide: SlideFile, record: SlideRecord) -> bool:
    """Whether the record is of another file that is still there; one that is gone was moved to where this one is."""
    return record.resolved_path != resolved(slide.path) and Path(record.resolved_path).exists()


def new_record(slide: SlideFile) -> SlideRecord:
    """The record of a slide of which nothing is known."""
    return SlideRecord(
        id=slide.id,
        path=storable(str(slide.path)),
        resolved_path=resolved(slide.path),
    )


def _renewed(record: SlideRecord, slide: SlideFile) -> SlideRecord:
    """A record without what an earlier ingest found, but with its labels and what a later version added."""
    return dataclasses.replace(
        new_record(slide),
        id=record.id,
        patient=record.patient,
        label=record.label,
        site=record.site,
        annotations=record.annotations,  # only so that it can be told that its labels are gone
        unknown=record.unknown,
    )


def duplicates(records: Iterable[SlideRecord]) -> list[str]:
    """A warning for each scan that the store holds under several ids."""
    copies: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for record in records:
        if record.state is not SlideState.FAILED and record.content:
            copies[record.content, record.width, record.height].append(record.id)
    return [
        f"{', '.join(sorted(ids))} are copies of one slide: all are stored, and kept on one side of a split"
        for ids in copies.values()
        if len(ids) > 1
    ]


def refuse_network(store: Path) -> None:
    """Refuse to write a store where LMDB cannot keep it whole.

    Raises:
        UsageError: the path lies on a network filesystem.
    """
    kind = network_filesystem(store)
    if kind is not None:
        raise UsageError(
            f"the store {store} would lie on a network filesystem",
            found=kind,
            expected="a local disk: LMDB's locks and maps do not hold between machines",
            todo="write to a local disk and copy the finished store, or pass --allow-network at your own risk",
        )


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
    scales |= _scales_at_level(slides, spec, options)
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


def _scales_at_level(
    slides: Sequence[SlideFile], spec: TilingSpec, options: IngestOptions
) -> dict[str, Mpp]:
    """The scale of each slide that has one; by workers, since a bad file may crash or hang who opens it."""
    pool = WorkerPool(options.worker_count)
    try:
        asked = {
            slide.id: pool.submit_within(
                _OPENING_SECONDS,
                scale_at_level,
                slide,
                spec,
                options.mpps.get(slide.id),
                options.default_mpp,
            )
            for slide in slides
        }
        scales = {name: _scale_or_none(future) for name, future in asked.items()}
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: scale for name, scale in scales.items() if scale is not None}


def _scale_or_none(future: Future[Mpp | None]) -> Mpp | None:
    try:
        return future.result()
    except (SlideError, WorkerDied):
        return None  # the ingest itself will tell


def scale_at_level(
    slide: SlideFile, spec: TilingSpec, given: Mpp | None, default: Mpp | None
) -> Mpp | None:
    """The scale of a slide's patches.

    Raises:
        SlideError: it cannot be told.
    """
    with Slide(slide.path) as opened:
        scale = resolve_mpp(slide.id, opened.info, from_csv=given, default=default)
        return choose_level(slide.id, opened.info.levels, scale.mpp, spec).mpp
