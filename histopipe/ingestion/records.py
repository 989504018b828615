"""Records of slides before planning, and the selection of slides to ingest. No function here writes."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from histopipe.errors import MaskUnfit, SlideError, UsageError
from histopipe.geometry import Mpp
from histopipe.ingestion.options import IngestOptions, SlideInput
from histopipe.ingestion.report import SlideOutcome, Status, failed_outcome, outcome_of
from histopipe.slides.scale import MppSource, equal_scales
from histopipe.slides.slide_files import Fingerprint, SlideFile, fingerprint
from histopipe.slides.slide_hashes import copy_groups
from histopipe.slides.tables import SlideLabel, patient_of
from histopipe.store.record import FailureKind, SlideRecord, SlideState
from histopipe.system.files import to_storable_text
from histopipe.system.urls import is_url
from histopipe.tissue_masks.mask_files import identify_mask_file

_SLIDES_PER_CLASS = 2


def resolved(slide: SlideFile) -> str:
    """Return the path of a slide without symbolic links, or its URL, in the form used in records."""
    return slide.location if slide.remote else to_storable_text(os.path.realpath(slide.path))


def new_record(slide: SlideFile) -> SlideRecord:
    """Return the record of a new slide."""
    return SlideRecord(
        id=slide.id, path=to_storable_text(slide.location), resolved_path=resolved(slide)
    )


def with_fingerprint(record: SlideRecord, stamp: Fingerprint) -> SlideRecord:
    """Return a record with the size, time and ETag of a slide's files."""
    return replace(record, size_bytes=stamp.size_bytes, mtime_ns=stamp.mtime_ns, etag=stamp.etag)


def reset_record(record: SlideRecord, slide: SlideFile) -> SlideRecord:
    """Return a record without the results of an earlier ingest. Labels and unknown fields are kept.

    The source of the annotations is also kept, so that the next ingest can report that the patch labels were removed.
    """
    return replace(
        new_record(slide), id=record.id, patient=record.patient, label=record.label, site=record.site,
        annotations=record.annotations, unknown=record.unknown,
    )  # fmt: skip


def labelled(
    record: SlideRecord, label: SlideLabel | None, named: str | None = None
) -> SlideRecord:
    """Return a record with label, patient and site.

    The patient is that of the label, else `named`, else the recorded one, else the one of `patient_of`.
    """
    patient = (label.patient if label else None) or named or record.patient or patient_of(record.id)
    if label is None:
        return replace(record, patient=patient)
    return replace(record, label=label.label, patient=patient, site=label.site or record.site)


def subfolder_labels(slides: Sequence[SlideFile]) -> dict[str, str]:
    """Return the sub-folders' names as labels, if all slides are in sub-folders of at least two slides each.

    A download with one folder per slide, as from GDC, gets no labels.
    """
    count = Counter(slide.subfolder for slide in slides)
    if None in count or len(count) < 2 or min(count.values(), default=0) < _SLIDES_PER_CLASS:
        return {}
    return {slide.id: slide.subfolder for slide in slides if slide.subfolder is not None}


def with_recorded_ids(
    slides: Sequence[SlideFile], records: Mapping[int, SlideRecord]
) -> list[SlideFile]:
    """Return the slides sorted by id. Slides that are in a store get their id in the store.

    Raises:
        UsageError: a slide of another file has that id.
    """
    by_path = {record.resolved_path: record.id for record in records.values()}
    named = [replace(s, id=by_path.get(resolved(s), s.id)) for s in slides]
    places: dict[str, str] = {}
    for slide in named:
        other = places.setdefault(slide.id, slide.location)
        if other != slide.location:
            raise UsageError(
                f"two slides would both have the id {slide.id!r}",
                found=f"{other}, which has this id in the store, and {slide.location}",
                todo="rename one, or use another --out",
            )
    return sorted(named, key=lambda slide: slide.id)


def duplicates(records: Iterable[SlideRecord]) -> list[str]:
    """Return a warning for each group of slides that are copies, or may be."""
    slides = [record for record in records if record.state is not SlideState.FAILED]
    members: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for record, scan, group in zip(
        slides, *copy_groups([slide.scans for slide in slides]), strict=True
    ):
        members[group].append((record.id, scan))
    return [
        f"{', '.join(sorted(name for name, _ in copies))} "
        + (
            "are copies of one slide: all are stored, and stay on the same side of a split"
            if len({scan for _, scan in copies}) == 1
            else "may be copies of one slide: they have the same quickhash, and not all records have a pixel hash, which "
            "earlier versions did not write. They stay on the same side of a split; to compare their pixels, ingest them "
            "into a new store"
        )
        for copies in members.values()
        if len(copies) > 1
    ]


@dataclass(frozen=True, slots=True)
class PendingSlide:
    """A slide to ingest: its number in the store, its input and its current record.

    `again` is true for a complete slide that is ingested again.
    """

    number: int
    slide: SlideInput
    record: SlideRecord
    again: bool = False


@dataclass(frozen=True, slots=True)
class SortedSlides:
    """Slides to ingest, and outcomes of slides that need no ingest or cannot be ingested.

    `relabelled` has the new records, by number, of complete slides whose label, patient or site has changed.
    """

    pending: list[PendingSlide]
    outcomes: list[SlideOutcome]
    relabelled: dict[int, SlideRecord]


def sort_slides(
    slides: Sequence[SlideInput], records: Mapping[int, SlideRecord], options: IngestOptions
) -> SortedSlides:
    """Separate slides to ingest from others. `records` has the records of a store; a new slide has the number -1."""
    known_by_id = {record.id: (number, record) for number, record in records.items()}
    sorted_slides = SortedSlides([], [], {})
    for slide in slides:
        number, before = known_by_id.get(slide.id) or (-1, new_record(slide.file))
        record = labelled(before, slide.label, slide.patient)
        outcome = outcome_without_ingest(slide, record, options)
        if outcome is None:
            again = record.state is SlideState.COMPLETE
            reset = reset_record(record, slide.file)
            sorted_slides.pending.append(PendingSlide(number, slide, reset, again))
            continue
        sorted_slides.outcomes.append(outcome)
        if record != before and outcome.status is Status.SKIPPED:
            sorted_slides.relabelled[number] = record
    return sorted_slides


def outcome_without_ingest(
    slide: SlideInput, record: SlideRecord, options: IngestOptions
) -> SlideOutcome | None:
    """Return the outcome of a slide that is not to be ingested; None if it is to be ingested."""
    path, recorded = slide.file.location, record.resolved_path
    # If the recorded file does not exist, the slide was moved.
    there = slide.file.remote if is_url(recorded) else Path(recorded).exists()
    if recorded != resolved(slide.file) and there:
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
        return None  # planning fails with the same reason, and records it
    if record.state is SlideState.FAILED:
        limits = (None, options.timeout_text, options.unreadable_text)
        retry = (
            options.retry_failed
            or changed
            or record.error_option not in limits  # the limit that it exceeded has changed
            or record.error_kind is FailureKind.OPTION
        )
        return None if retry else failed_outcome(record, record.error or "unknown reason")
    changed = changed or _mask_change(record, slide)
    scale = _scale_change(record, slide, options)
    # --force also imports coordinates again: they may have changed.
    if options.force and (changed or scale or slide.coords is not None):
        return None
    problem = f"{path} {changed} since it was ingested; pass --force to ingest it again"
    outcome = failed_outcome(record, problem) if changed else outcome_of(record, Status.SKIPPED)
    return replace(outcome, notes=(*outcome.notes, scale)) if scale else outcome


def _file_change(now: Fingerprint, record: SlideRecord) -> str | None:
    if now.size_bytes != record.size_bytes:
        return f"changed ({now.size_bytes:,} bytes, {record.size_bytes:,} before)"
    if now.mtime_ns != record.mtime_ns:
        return "was modified (its modification time has changed)"
    if None not in (now.etag, record.etag) and now.etag != record.etag:
        return "was modified (its ETag has changed)"
    return None


def _mask_change(record: SlideRecord, slide: SlideInput) -> str | None:
    try:
        now = None if slide.mask is None else identify_mask_file(slide.mask)
    except MaskUnfit as error:
        return f"has a mask that cannot be read ({error})"
    if now == record.mask:
        return None
    return f"was assigned another mask ({now or 'none'}, {record.mask or 'none'} before)"


def _scale_change(record: SlideRecord, slide: SlideInput, options: IngestOptions) -> str | None:
    """Return a note if the options give another scale than the slide was ingested with."""
    # The default applies only to slides without another scale.
    default = options.default_mpp if record.mpp_source in (None, MppSource.DEFAULT) else None
    used = slide.mpp or default
    if used is None or (record.mpp is not None and equal_scales(used, Mpp(record.mpp))):
        return None
    before = (
        "an unknown scale" if record.mpp is None else f"{record.mpp:g} mpp ({record.mpp_source})"
    )
    return (
        f"it was ingested with {before}, and {used:g} mpp is not used; "
        "pass --force to ingest it again"
    )
