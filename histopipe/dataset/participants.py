"""Slides of a training, each with its side of the split or the reason of its exclusion: the file `slides.csv`.

`dataset.flow` counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.labelling import Labelling
from histopipe.dataset.options import SIDES, Side
from histopipe.dataset.sample_table import SampleGroup, SampleSource
from histopipe.dataset.splits import SlideSplit, Splits
from histopipe.slides.slide_hashes import copy_groups
from histopipe.slides.tables import SlideLabel
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.system.csv_files import read_dicts, write_table
from histopipe.system.files import reading

_MEASURES = ("tissue", "focus", "pen", "dark")
EXCLUDED = "excluded"
NOT_A_CLASS = "label is no class of the model"
"""Reason of exclusion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A slide that was found.

    Attributes:
        slide: name as in `predictions.csv`.
        label_source: "labels file", "folder or import", "annotation" or ""; where its label comes from.
        status: "train", "validation", "test", several of them ("train and test"), or "excluded".
        reason: why it is excluded.
        copy_of: first slide of its group of copies. All are used, on one side.
        planned: patches of its grid; unreadable, no_class, filtered, left_out, damaged (found when they were read):
            those not used, by the first reason; train, validation, test: those on each side.
        route, jpeg_generations, reader, vendor, mpp: how its patches were read; see the slide record.
            `jpeg_generations`: how often pixels were JPEG-encoded, including the slide itself.
        tissue, focus, pen, dark: medians over its patches; empty if not measured.
        cells: further columns of the labels file.
    """

    slide: str
    patient: str
    site: str = ""
    label: str = ""
    label_source: str = ""
    store: str = ""
    status: str = EXCLUDED
    reason: str = ""
    copy_of: str = ""
    planned: int = 0
    unreadable: int = 0
    no_class: int = 0
    filtered: int = 0
    left_out: int = 0
    damaged: int = 0
    train: int = 0
    validation: int = 0
    test: int = 0
    route: str = ""
    jpeg_generations: str = ""
    reader: str = ""
    vendor: str = ""
    mpp: str = ""
    tissue: str = ""
    focus: str = ""
    pen: str = ""
    dark: str = ""
    cells: Mapping[str, str] = field(default_factory=dict)

    def value(self, column: str) -> str:
        """Return the text in a column of `slides.csv`, or else of the labels file; empty if it is missing."""
        return str(getattr(self, column)) if column in COLUMNS else self.cells.get(column, "")


COLUMNS = tuple(column.name for column in fields(Participant) if column.name != "cells")
"""Columns of `slides.csv` that are not from the labels file."""
UNUSED = ("unreadable", "no_class", "filtered", "left_out", "damaged")
COUNTS = ("planned", *UNUSED, *SIDES)
_OF_LABELS = "labels:"
"""Prefix of columns of the labels file that are named like one of `COLUMNS`."""


def participants(
    sources: Sequence[SampleSource], splits: Splits, labelling: Labelling, *, given_splits: bool
) -> list[Participant]:
    """Return all slides of the sources. `given_splits`: the split comes from a file, which may lack slides."""
    in_split = {(slide.store, slide.slide): slide for slide in splits.slides}
    # Names as in the predictions; two stores may each have a slide "1".
    names = Counter(record.id for source in sources for record in source.records.values())
    names_in_split = Counter(slide.id for slide in splits.slides)
    all_slides: list[Participant] = []
    for ordinal, source in enumerate(sources):
        for number, record in source.records.items():
            slide = in_split.get((ordinal, number))
            once = (names if slide is None else names_in_split)[record.id] == 1
            name = record.id if once else f"{record.id}@{source.uuid[:8]}"
            participant = _of_slide(source, number, slide, labelling)
            if slide is None:
                missing = (
                    missing_from(splits, participant, from_file=given_splits)
                    if participant.label or splits.targets
                    else "no label"
                )
                participant = replace(participant, reason=exclusion_of(record) or missing)
            all_slides.append(replace(participant, slide=name))
    return _with_copies(all_slides, sources)


def missing_from(splits: Splits, slide: Participant, *, from_file: bool) -> str:
    """Return why a slide with patches is not in a split, which may be given by a file (`from_file`)."""
    if splits.column is not None and not slide.cells.get(splits.column):
        return f"no value in column {splits.column}"
    return "not in the given split" if from_file else "no target" if splits.targets else "no label"


def found_slide(
    source: SampleSource, number: int, labels: Mapping[str, SlideLabel] | None
) -> Participant:
    """Return a slide, excluded without a reason. `labels` replace those of the source."""
    record = source.records[number]
    entry = None if labels is None else labels.get(record.id, SlideLabel(None))
    label = (record if entry is None else entry).label or ""
    facts: dict[str, Any] = {
        "slide": record.id,
        "patient": (entry.patient if entry else None) or record.patient or record.id,
        "label": label,
        "label_source": "" if not label else "folder or import" if entry is None else "labels file",
        "site": (entry.site if entry else None) or record.site or "",
        "store": source.path.name,
        "planned": record.planned,
        "cells": dict(entry.cells) if entry else {},
    }
    if isinstance(record, SlideRecord) and isinstance(source, Store):
        facts |= _measured(source, number, record)
    return Participant(**facts)


def found_slides(
    sources: Iterable[SampleSource], labels: Mapping[str, SlideLabel] | None = None
) -> list[Participant]:
    """Return all slides of the sources, excluded, with a reason if they have no usable patches."""
    sources = list(sources)
    names = Counter(record.id for source in sources for record in source.records.values())
    slides = []
    for source in sources:
        for number, record in source.records.items():
            slide = replace(found_slide(source, number, labels), reason=exclusion_of(record))
            # Another slide of this name may be usable.
            if slide.reason and names[record.id] > 1:
                slide = replace(slide, slide=f"{record.id}@{source.uuid[:8]}")
            slides.append(slide)
    return _with_copies(slides, sources)


def _of_slide(
    source: SampleSource,
    number: int,
    split: SlideSplit | None,
    labelling: Labelling,
) -> Participant:
    record, participant = source.records[number], found_slide(source, number, labelling.labels)
    unreadable = record.planned - record.stored
    if split is None:
        return replace(participant, unreadable=unreadable)
    counts: dict[str, Any] = _patch_counts(
        source, number, split, labelling, unreadable=unreadable > 0
    )
    sides = [side for side in SIDES if counts[side]]
    reason = ""
    if not sides:
        reason = _REASONS[max(UNUSED, key=counts.__getitem__)]
    source_of = "annotation" if split.labels is not None else participant.label_source
    return replace(
        participant, patient=split.patient, label=split.label, label_source=source_of, reason=reason,
        status=" and ".join(sides) or EXCLUDED, **counts,
    )  # fmt: skip


_REASONS = {
    "unreadable": "no readable patch", "no_class": "no patch with a class", "filtered": "all patches filtered out",
    "left_out": "left out by the split", "damaged": "all patches damaged",
}  # fmt: skip
"""Reasons of slides without used patches."""


def with_damaged(
    slides: Sequence[Participant], damaged: Mapping[str, Mapping[Side, int]]
) -> list[Participant]:
    """Return the slides without patches that were damaged when they were read, given by slide and side."""
    return [
        _without(slide, damaged[slide.slide]) if damaged.get(slide.slide) else slide for slide in slides
    ]  # fmt: skip


def _without(slide: Participant, lost: Mapping[Side, int]) -> Participant:
    counts: dict[str, Any] = {side: getattr(slide, side) - lost.get(side, 0) for side in SIDES}
    sides = [side for side in SIDES if counts[side]]
    reason = "" if sides else _REASONS["damaged"]
    return replace(
        slide, damaged=sum(lost.values()), status=" and ".join(sides) or EXCLUDED, reason=reason, **counts,
    )  # fmt: skip


def exclusion_of(record: SampleGroup) -> str:
    """Return why a slide has no usable patches; empty if it has."""
    state = getattr(record, "state", SlideState.COMPLETE)
    if state is SlideState.FAILED:
        return "ingest failed"
    if state is not SlideState.COMPLETE:
        return "not ingested"
    if not record.planned:
        return "no patches"
    return "" if record.stored else "no readable patch"


def _patch_counts(
    source: SampleSource, number: int, split: SlideSplit, labelling: Labelling, *, unreadable: bool
) -> dict[str, int]:
    """Return the number of patches by side, or by the first reason why they are not used."""
    dropped = split.sides < 0
    counts: dict[str, int] = {side: len(split.on(side)) for side in SIDES}
    index = source.index(number) if dropped.any() else {}
    reasons: list[tuple[str, NDArray[np.bool_]]] = []
    if unreadable and "length" in index:
        reasons.append(("unreadable", index["length"] == 0))
    if split.labels is not None:
        reasons.append(("no_class", split.labels < 0))
    if labelling.patch_filter.active and dropped.any():
        fit = labelling.patch_filter.fit(index, where=f"slide {split.id}")
        reasons.append(("filtered", ~fit))
    rest = dropped
    for name, rows in reasons:
        counts[name] = int((rest & rows).sum())
        rest = rest & ~rows
    return {**dict.fromkeys(COUNTS[1:], 0), **counts, "left_out": int(rest.sum())}


def _measured(store: Store, number: int, record: SlideRecord) -> dict[str, str]:
    """Return how a slide was read, and the medians of its measures."""
    if record.state is not SlideState.COMPLETE:
        return {}
    facts = {name: getattr(record, name) or "" for name in ("route", "reader", "vendor")}
    if record.route:
        once_more = record.route != "copy" and store.spec.get("codec") != "png"
        facts["jpeg_generations"] = str(1 + once_more)
    if record.mpp is not None:
        facts["mpp"] = f"{record.mpp:.4g}"
    if record.planned:
        index = store.index(number)
        for name in _MEASURES:
            values = index.get(name, np.empty(0))
            finite_values = values[np.isfinite(values)]
            if len(finite_values):
                facts[name] = f"{float(np.median(finite_values)):.6g}"
    return facts


def _with_copies(slides: list[Participant], sources: Sequence[SampleSource]) -> list[Participant]:
    scans = [record.scans for source in sources for record in source.records.values()]
    first: dict[int, str] = {}
    return [
        slide if (name := first.setdefault(group, slide.slide)) == slide.slide else replace(slide, copy_of=name)
        for slide, group in zip(slides, copy_groups(scans)[1], strict=True)
    ]  # fmt: skip


def write_participants(path: Path, slides: Iterable[Participant]) -> None:
    """Write `slides.csv` by one rename."""
    slides = list(slides)
    label_columns = list(dict.fromkeys(name for slide in slides for name in slide.cells))
    header = [f"{_OF_LABELS}{name}" if name in COLUMNS else name for name in label_columns]
    rows = (
        [
            *(getattr(slide, name) for name in COLUMNS),
            *(slide.cells.get(name, "") for name in label_columns),
        ]
        for slide in slides
    )
    write_table(path, [*COLUMNS, *header], rows)


def read_participants(path: Path) -> list[Participant]:
    """Read `slides.csv`; empty if there is none, as in runs of earlier versions.

    Raises:
        DamagedStore: the file is damaged.
    """
    with (
        suppress(FileNotFoundError),
        reading(path, todo="restore it from a backup, or remove it"),
    ):
        return list(_rows(path))
    return []


def _rows(path: Path) -> Iterator[Participant]:
    for row in read_dicts(path):
        # A file of another version may lack columns.
        values: dict[str, Any] = {name: row.pop(name) for name in COLUMNS if name in row}
        values |= {name: int(values[name]) for name in COUNTS if name in values}
        cells = {name.removeprefix(_OF_LABELS): cell for name, cell in row.items()}
        yield Participant(**values, cells=cells)
