"""Records of slides before they are planned: ids, labels, patients, and copies of one scan."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from histopipe.errors import UsageError
from histopipe.slides.discovery import SlideFile
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import SlideRecord, SlideState
from histopipe.system.files import storable

_TCGA_PATIENT = re.compile(r"TCGA-\w{2}-\w{4}(?=-|$)")
_SLIDES_PER_CLASS = 2


def resolved(path: Path) -> str:
    """Return a path without symbolic links, as records have it."""
    return storable(os.path.realpath(path))


def new_record(slide: SlideFile) -> SlideRecord:
    """Return the record of a slide that was not ingested yet."""
    return SlideRecord(
        id=slide.id, path=storable(str(slide.path)), resolved_path=resolved(slide.path)
    )


def reset_record(record: SlideRecord, slide: SlideFile) -> SlideRecord:
    """Return a record without the results of an earlier ingest: labels and unknown fields stay.

    The source of the annotations stays as well, so that the next ingest can report that the patch labels are gone.
    """
    return replace(
        new_record(slide), id=record.id, patient=record.patient, label=record.label, site=record.site,
        annotations=record.annotations, unknown=record.unknown,
    )  # fmt: skip


def labelled(record: SlideRecord, label: SlideLabel | None) -> SlideRecord:
    """Return a record with label, patient and site. The default patient is the slide's id."""
    patient = (label.patient if label else None) or record.patient or patient_of(record.id)
    if label is None:
        return replace(record, patient=patient)
    return replace(record, label=label.label, patient=patient, site=label.site or record.site)


def subfolder_labels(slides: Sequence[SlideFile]) -> dict[str, str]:
    """Return the sub-folders' names as labels, if all slides are in sub-folders of at least two slides each.

    A download with one folder per slide, as from GDC, has no labels by this.
    """
    count = Counter(slide.subfolder for slide in slides)
    if None in count or len(count) < 2 or min(count.values(), default=0) < _SLIDES_PER_CLASS:
        return {}
    return {slide.id: slide.subfolder for slide in slides if slide.subfolder is not None}


def patient_of(slide_id: str) -> str:
    """Return the patient part of a TCGA barcode, else the slide id.

    Example:
        >>> patient_of("brca/TCGA-A1-A0SB-01Z-00-DX1")
        'TCGA-A1-A0SB'
    """
    barcode = _TCGA_PATIENT.match(PurePosixPath(slide_id).name)
    return barcode.group() if barcode else slide_id


def with_recorded_ids(
    slides: Sequence[SlideFile], records: Mapping[int, SlideRecord]
) -> list[SlideFile]:
    """Return slides under the ids that a store has for their files, sorted by id.

    Raises:
        UsageError: a slide of another file has that id.
    """
    by_path = {record.resolved_path: record.id for record in records.values()}
    named = [replace(s, id=by_path.get(resolved(s.path), s.id)) for s in slides]
    paths: dict[str, Path] = {}
    for slide in named:
        other = paths.setdefault(slide.id, slide.path)
        if other != slide.path:
            raise UsageError(
                f"two slides would both have the id {slide.id!r}",
                found=f"{other}, which has this id in the store, and {slide.path}",
                todo="rename one, or use another --out",
            )
    return sorted(named, key=lambda slide: slide.id)


def duplicates(records: Iterable[SlideRecord]) -> list[str]:
    """Return a warning for each scan that the store has under several ids."""
    copies: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for record in records:
        if record.state is not SlideState.FAILED and record.content:
            copies[record.content, record.width, record.height].append(record.id)
    return [
        f"{', '.join(sorted(ids))} are copies of one slide: all are stored, and stay on the same side of a split"
        for ids in copies.values()
        if len(ids) > 1
    ]
