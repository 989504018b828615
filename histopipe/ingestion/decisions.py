"""Decide what to do with each slide, given what the store already has. Nothing here writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import SlideError
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.records import labelled, new_record, reset_record, resolved
from histopipe.ingestion.report import SlideOutcome, Status, failed_outcome, outcome_of
from histopipe.slides.identity import Fingerprint, fingerprint
from histopipe.slides.scale import MppSource
from histopipe.store.record import FailureKind, SlideRecord, SlideState


@dataclass(frozen=True, slots=True)
class PendingSlide:
    """A slide that is to be ingested: its number in the store, its input, and its record so far.

    `again` is true for a slide that is complete, and is ingested once more.
    """

    number: int
    slide: SlideInput
    record: SlideRecord
    again: bool = False


@dataclass(frozen=True, slots=True)
class SortedSlides:
    """Slides to ingest, and outcomes of those that need no ingest or cannot be ingested.

    `relabelled` has new records, by number, of complete slides whose label, patient or site has changed.
    """

    pending: list[PendingSlide]
    outcomes: list[SlideOutcome]
    relabelled: dict[int, SlideRecord]


def sort_slides(
    slides: Sequence[SlideInput], known: Mapping[int, SlideRecord], options: IngestOptions
) -> SortedSlides:
    """Separate slides to ingest from others, by a store's records by number; a slide without a record has the number -1."""
    known_by_id = {record.id: (number, record) for number, record in known.items()}
    found = SortedSlides([], [], {})
    for slide in slides:
        number, before = known_by_id.get(slide.id) or (-1, new_record(slide.file))
        record = labelled(before, slide.label)
        outcome = outcome_without_ingest(slide, record, options)
        if outcome is None:
            again = record.state is SlideState.COMPLETE
            reset = reset_record(record, slide.file)
            found.pending.append(PendingSlide(number, slide, reset, again))
            continue
        found.outcomes.append(outcome)
        if record != before and outcome.status is Status.SKIPPED:
            found.relabelled[number] = record
    return found


def outcome_without_ingest(
    slide: SlideInput, record: SlideRecord, options: IngestOptions
) -> SlideOutcome | None:
    """Return the outcome of a slide with this record if it is not to be ingested now; None if it is."""
    path = slide.file.path
    # If the other file is gone, the slide was moved.
    if record.resolved_path != resolved(path) and Path(record.resolved_path).exists():
        return failed_outcome(
            record,
            f"{path}: another slide, {record.path}, has the id {record.id!r} in the store; "
            "ingest their common parent folder into a new store, or rename one",
        )
    if record.state is SlideState.PENDING:
        return None
    try:
        changed = _file_change(fingerprint(slide.file), record)
    except SlideError:
        return None  # planning the slide fails with the reason, which is then recorded
    if record.state is SlideState.FAILED:
        limits = (None, options.timeout_text, options.unreadable_text)
        retry = (
            options.retry_failed
            or changed
            or record.error_option not in limits  # another limit than the one that it exceeded
            or record.error_kind is FailureKind.OPTION
        )
        return None if retry else failed_outcome(record, record.error or "unknown reason")
    changed = changed or _scale_change(record, slide, options)
    # With --force, coordinates are imported again: they may have changed.
    if options.force and (changed or slide.coords is not None):
        return None
    problem = f"{path} {changed} since it was ingested; pass --force to ingest it again"
    return failed_outcome(record, problem) if changed else outcome_of(record, Status.SKIPPED)


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
