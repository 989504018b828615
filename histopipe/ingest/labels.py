"""Label, patient and site of every slide: from a CSV, from the sub-folders, from TCGA barcodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from histopipe.slides.discovery import SlideFile
from histopipe.slides.tables import SlideLabel

_TCGA_PATIENT = re.compile(r"TCGA-\w{2}-\w{4}(?=-|$)")
_SLIDES_A_CLASS = 2


@dataclass(frozen=True, slots=True)
class SlideLabels:
    """What is known of a slide besides its pixels. `patient` is never empty: a slide of no one is its own."""

    label: str | None
    patient: str
    site: str | None


def label_slides(
    slides: Sequence[SlideFile], rows: Mapping[str, SlideLabel] | None
) -> dict[str, SlideLabels]:
    """Labels by slide id.

    Args:
        slides: all slides asked for.
        rows: a labels file's rows by slide id; None where there is no such file, and sub-folders may serve.
    """
    folders = subfolder_labels(slides) if rows is None else {}
    labels = {}
    for slide in slides:
        row = (rows or {}).get(slide.id) or SlideLabel(folders.get(slide.id))
        labels[slide.id] = SlideLabels(row.label, row.patient or patient_of(slide.id), row.site)
    return labels


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
