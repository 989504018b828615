"""Label, patient and site of every slide: from a CSV, from the sub-folders, from TCGA barcodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from histopipe.slides.discovery import SlideFile
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import SlideRecord

_TCGA_PATIENT = re.compile(r"TCGA-\w{2}-\w{4}(?=-|$)")
_SLIDES_A_CLASS = 2


def label_slides(
    slides: Sequence[SlideFile], rows: Mapping[str, SlideLabel] | None
) -> dict[str, SlideLabel]:
    """What is said of slides, by id; slides of which nothing is said are left out, and keep what was recorded.

    Args:
        slides: all slides found.
        rows: labels files' rows by slide id; None where there is no such file, and sub-folders may serve.
    """
    if rows is not None:
        return dict(rows)
    return {name: SlideLabel(label) for name, label in subfolder_labels(slides).items()}


def labelled(record: SlideRecord, said: SlideLabel | None) -> SlideRecord:
    """A record with what is said of its slide. Its patient is never empty: a slide of no one is its own."""
    patient = (said.patient if said else None) or record.patient or patient_of(record.id)
    if said is None:
        return replace(record, patient=patient)
    return replace(record, label=said.label, patient=patient, site=said.site or record.site)


def subfolder_labels(slides: Sequence[SlideFile]) -> dict[str, str]:
    """The sub-folder's name as label, if every slide is in one and every one has two slides.

    A download with one folder a slide (as from GDC) is thus not taken for classes.
    """
    count = Counter(slide.subfolder for slide in slides)
    if None in count or len(count) < 2 or min(count.values(), default=0) < _SLIDES_A_CLASS:
        return {}
    return {slide.id: slide.subfolder for slide in slides if slide.subfolder is not None}


def patient_of(slide_id: str) -> str:
    """The patient part of a TCGA barcode, else the slide itself.

    Example:
        >>> patient_of("brca/TCGA-A1-A0SB-01Z-00-DX1")
        'TCGA-A1-A0SB'
    """
    barcode = _TCGA_PATIENT.match(PurePosixPath(slide_id).name)
    return barcode.group() if barcode else slide_id
