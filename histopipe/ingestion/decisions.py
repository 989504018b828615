"""Decide what to do with each slide, given what the store already has. Nothing here writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from histopipe.errors import SlideError
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.records import labelled, new_record, reset_record, resolved
from histopipe.ingestion.report import SlideOutcome, Status, failed_outcome, outcome_of
from histopipe.slides.discovery import SlideFile
from histopipe.slides.identity import Fingerprint, fingerprint
from histopipe.slides.scale import MppSource
from histopipe.store.record import FailureKind, SlideRecord, SlideState


class Action(StrEnum):
    """What an ingest does with a slide."""

    INGEST = "ingest"
    KEEP = "keep"
    """It is complete already."""
    REFUSE = "refuse"
    """It is complete, but its file or scale has changed since."""
    STILL_FAILED = "still failed"
    """It failed before, and nothing has changed since."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and its reason, which is empty for INGEST and KEEP."""

    action: Action
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PendingSlide:
    """A slide that is to be ingested.

    Attributes:
        number: its number in the store.
        slide: its file, and what the user gave for it.
        record: its record so far.
        again: it is complete already, and is ingested once more.
    """

    number: int
    slide: SlideInput
    record: SlideRecord
    again: bool = False


@dataclass(frozen=True, slots=True)
class SortedSlides:
    """Slides by what is to be done with them.

    Attributes:
        pending: slides to ingest.
        outcomes: of slides that need no ingest, or cannot be ingested.
        relabelled: new records, by number, of complete slides whose label, patient or site has changed.
    """

    pending: list[PendingSlide]
    outcomes: list[SlideOutcome]
    relabelled: dict[int, SlideRecord]


def sort_slides(
    slides: Sequence[SlideInput],
    known: Mapping[int, SlideRecord],
    numbers: Mapping[str, int],
    options: IngestOptions,
) -> SortedSlides:
    """Separate slides to ingest from those that need no ingest, or cannot be ingested.

    Args:
        slides: all slides of the run.
        known: the store's records by number.
        numbers: the number of every slide by id, including new ones.
        options: the run's options.
    """
    known_by_id = {record.id: record for record in known.values()}
    found = SortedSlides([], [], {})
    for slide in slides:
        before, number = known_by_id.get(slide.id), numbers[slide.id]
        record = labelled(before or new_record(slide.file), slide.label)
        outcome = _outcome_without_ingest(slide, record, before, options)
        if outcome is None:
            again = record.state is SlideState.COMPLETE
            found.pending.append(
                PendingSlide(number, slide, reset_record(record, slide.file), again)
            )
            continue
        if before is not None and record != before and outcome.status is Status.SKIPPED:
            found.relabelled[number] = record
        found.outcomes.append(outcome)
    return found


def decide(
    slide: SlideInput, now: Fingerprint, record: SlideRecord | None, options: IngestOptions
) -> Decision:
    """Decide what to do with a slide.

    Args:
        slide: the slide.
        now: size and modification time of its files.
        record: the store's record of it; None if it has none.
        options: the run's options.
    """
    if record is None or record.state is SlideState.PENDING:
        return Decision(Action.INGEST)
    changed = _file_change(now, record)
    if record.state is SlideState.FAILED:
        limits = (None, options.timeout_text, options.unreadable_text)
        retry = (
            options.retry_failed
            or changed
            or record.error_option not in limits  # another limit than the one that it exceeded
            or record.error_kind is FailureKind.OPTION
        )
        if retry:
            return Decision(Action.INGEST)
        return Decision(Action.STILL_FAILED, record.error or "unknown reason")
    change = changed or _scale_change(record, slide, options)
    if change is None:
        return Decision(Action.KEEP)
    if options.force:
        return Decision(Action.INGEST)
    return Decision(
        Action.REFUSE,
        f"{slide.file.path} {change} since it was ingested; pass --force to ingest it again",
    )


def _outcome_without_ingest(
    slide: SlideInput, record: SlideRecord, before: SlideRecord | None, options: IngestOptions
) -> SlideOutcome | None:
    """Return the outcome of a slide that is not to be ingested now; None if it is."""
    if before is not None and _is_another_slide(slide.file, before):
        return failed_outcome(
            record,
            f"{slide.file.path}: another slide, {before.path}, has the id {before.id!r} in the store; "
            "ingest their common parent folder into a new store, or rename one",
        )
    try:
        now = fingerprint(slide.file)
    except SlideError:
        return None  # planning the slide fails with the reason, which is then recorded
    decision = decide(slide, now, before, options)
    if decision.action is Action.INGEST:
        return None
    if decision.action is Action.KEEP:
        # With --force, coordinates are imported again: they may have changed.
        forced = options.force and slide.coords is not None
        return None if forced else outcome_of(record, Status.SKIPPED)
    return failed_outcome(record, decision.reason)


def _is_another_slide(slide: SlideFile, record: SlideRecord) -> bool:
    """Return whether the record is of another file that still exists. If that is gone, the slide was moved."""
    return record.resolved_path != resolved(slide.path) and Path(record.resolved_path).exists()


def _file_change(now: Fingerprint, record: SlideRecord) -> str | None:
    if now.size_bytes != record.size_bytes:
        return f"changed ({now.size_bytes:,} bytes, {record.size_bytes:,} before)"
    if now.mtime_ns != record.mtime_ns:
        return "was modified (its modification time has changed)"
    return None


def _scale_change(record: SlideRecord, slide: SlideInput, options: IngestOptions) -> str | None:
    if record.mpp_source == MppSource.PROPERTIES:  # the header has priority over the user
        return None
    default = options.default_mpp if record.mpp_source == MppSource.DEFAULT else None
    used = slide.mpp or default
    if used is not None and used != record.mpp:
        return f"was given another mpp ({used:g}, {record.mpp:g} before)"
    return None
