"""The table of slides of a run: each slide with its subset, or the reason why it is not used; and the participant flow.

`slides.csv` is derived from it. The source of the subsets is `splits.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.slides.slide_files import copy_groups
from histopipe.splits.labelling import Labelling, unusable_patches
from histopipe.splits.splits import SampleSource, SlideSplit, Splits
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.system.files import reading
from histopipe.system.grouping import grouped
from histopipe.system.table_files import read_dicts, write_table
from histopipe.tasks.choices import SUBSETS, Subset

_MEASURES = ("tissue", "focus", "pen", "dark")
MEASURED = ("route", "jpeg_generations", "reader", "vendor", "mpp", *_MEASURES)
"""Columns of `slides.csv` on how patches were read (see the slide record), and medians over the patches.

`jpeg_generations`: how often pixels were JPEG-encoded, including the slide itself.
"""
_EXCLUDED = "excluded"
"""Status in `slides.csv` of a slide that is in no subset."""
CHOSEN, READ, LABELLED, SELECTED = range(4)
"""Steps at which slides and patches are excluded: not in the cohort, no pixels, no label, not selected."""


class Exclusion(StrEnum):
    """Why a slide, or a patch, is not used. The values are texts of `slides.csv` and of the participant flow."""

    NO_SLIDE = "no slide file"
    OTHER_KIND = "other kind of slide"
    DUPLICATE = "copy of another file"
    NOT_ON_DISK = "not on disk"
    INCOMPLETE = "damaged download"
    IN_NO_TABLE = "in no table"
    NOT_WANTED = "condition not fulfilled"
    NO_VALUE = "no label in the cohort"
    INGEST_FAILED = "ingest failed"
    PREDICTION_FAILED = "prediction failed"
    EMBEDDING_FAILED = "embedding failed"
    NO_FEATURES = "no features"
    NOT_INGESTED = "not ingested"
    NO_PATCHES = "no patches"
    NO_READABLE_PATCH = "no readable patch"
    UNREADABLE = "unreadable"
    NOT_A_CLASS = "label is no class of the model"
    CALIBRATES = "calibrates the probabilities"
    NO_LABEL = "no label"
    NO_TARGET = "no target"
    NO_CLASS = "no class"
    NO_PATCH_WITH_CLASS = "no patch with a class"
    NOT_IN_SPLIT = "not in the given split"
    NOT_IN_COLUMN = "no value in the split column"
    FILTERED = "filtered out"
    ALL_FILTERED = "all patches filtered out"
    LEFT_OUT = "left out by the split"
    DAMAGED = "damaged"
    ALL_DAMAGED = "all patches damaged"

    @classmethod
    def _missing_(cls, value: object) -> Exclusion | None:
        # Earlier versions named the column, and marked patches of excluded slides.
        text = str(value).removeprefix("slide excluded: ")
        if text.startswith("no value in column"):
            return cls.NOT_IN_COLUMN
        return None if text == value else cls(text)

    @property
    def step(self) -> int:
        """Step of the exclusion: `CHOSEN`, `READ`, `LABELLED` or `SELECTED`."""
        order = list(Exclusion)
        ends = (Exclusion.NO_VALUE, Exclusion.UNREADABLE, Exclusion.NO_PATCH_WITH_CLASS)
        return sum(order.index(self) > order.index(end) for end in ends)


_UNUSED = {
    "unreadable": (Exclusion.UNREADABLE, Exclusion.NO_READABLE_PATCH),
    "no_class": (Exclusion.NO_CLASS, Exclusion.NO_PATCH_WITH_CLASS),
    "filtered": (Exclusion.FILTERED, Exclusion.ALL_FILTERED),
    "left_out": (Exclusion.LEFT_OUT, Exclusion.LEFT_OUT),
    "damaged": (Exclusion.DAMAGED, Exclusion.ALL_DAMAGED),
}
"""Columns of patches that are not used: the reason, and that of a slide of which all patches are in such columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideEntry:
    """A slide in the table of slides.

    Attributes:
        slide: name as in `predictions.csv`.
        label_source: "labels file", "folder or import", "annotation" or ""; where its label comes from.
        reason: why it is excluded; None if it is used, or if that is not known yet.
        copy_of: first slide of its group of copies. All are used, in one subset.
        planned: patches of its grid; unreadable, no_class, filtered, left_out, damaged (found when they were read):
            those not used, by the first reason; train, validation, test, calibration: those in each subset.
        measured: columns `MEASURED`, without those that are unknown.
        cells: further columns of the labels file.
    """

    slide: str
    patient: str
    site: str = ""
    label: str = ""
    label_source: str = ""
    store: str = ""
    reason: Exclusion | None = None
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
    calibration: int = 0
    measured: Mapping[str, str] = field(default_factory=dict)
    cells: Mapping[str, str] = field(default_factory=dict)

    @property
    def subsets(self) -> tuple[Subset, ...]:
        """Subsets that its patches are in; empty if it is excluded."""
        return tuple(subset for subset in SUBSETS if getattr(self, subset))

    @property
    def status(self) -> str:
        """Its subsets, or "excluded", as text."""
        return subsets_text(self.subsets) or _EXCLUDED

    def value(self, column: str) -> str:
        """Return the text in a column of `slides.csv`, or else of the labels file; empty if it is missing."""
        if column not in COLUMNS or column in MEASURED:
            return (self.measured if column in MEASURED else self.cells).get(column, "")
        value = getattr(self, column)
        return "" if value is None else str(value)


_FIELDS = [attribute.name for attribute in fields(SlideEntry)][:-2]
COLUMNS = (*_FIELDS[:6], "status", *_FIELDS[6:], *MEASURED)
"""Columns of `slides.csv` that are not from the labels file."""
_COUNTS = ("planned", *_UNUSED, *SUBSETS)
_OF_LABELS = "labels:"
"""Prefix of columns of the labels file that are named like one of `COLUMNS`."""


def subsets_text(subsets: Iterable[Subset]) -> str:
    """Return subsets as text, such as "train and test"."""
    return " and ".join(subsets)


def table_of(
    sources: Sequence[SampleSource],
    labelling: Labelling,
    splits: Splits | None = None,
    *,
    from_file: bool = False,
) -> list[SlideEntry]:
    """Return all slides of the sources; without splits, all excluded, with a reason if they have no usable patches.

    `from_file`: the splits come from a file, which may lack slides.
    """
    in_split, names = (splits.by_place, splits.names) if splits else ({}, {})
    counts = Counter(record.id for source in sources for record in source.records.values())
    entries = []
    for ordinal, source in enumerate(sources):
        for number, record in source.records.items():
            slide, entry = in_split.get((ordinal, number)), _entry(source, number, labelling)
            name = f"{record.id}@{source.uuid[:8]}" if counts[record.id] > 1 else record.id
            if slide is not None:
                entry = _used(entry, source, number, slide, labelling)
                name = names[ordinal, number]
            elif splits is not None:
                entry = replace(
                    entry,
                    reason=entry.reason or missing_from(splits, entry, from_file=from_file),
                    unreadable=record.planned - record.stored,
                )
            elif entry.reason is None:
                name = record.id  # without splits, another slide of this name may be usable
            entries.append(replace(entry, slide=name))
    groups = copy_groups([record.scans for source in sources for record in source.records.values()])
    first = {
        group: entry.slide for group, entry in zip(groups[1][::-1], entries[::-1], strict=True)
    }
    return [
        replace(entry, copy_of="" if first[group] == entry.slide else first[group])
        for group, entry in zip(groups[1], entries, strict=True)
    ]


def missing_from(splits: Splits, slide: SlideEntry, *, from_file: bool) -> Exclusion:
    """Return why a slide with patches is not in the splits, which may be `from_file`."""
    if not slide.label and not splits.targets:
        return Exclusion.NO_LABEL
    if splits.column is not None and not slide.cells.get(splits.column):
        return Exclusion.NOT_IN_COLUMN
    unlabelled = Exclusion.NO_TARGET if splits.targets else Exclusion.NO_LABEL
    return Exclusion.NOT_IN_SPLIT if from_file else unlabelled


def _entry(source: SampleSource, number: int, labelling: Labelling) -> SlideEntry:
    """Return a slide that is not used yet, with the reason if it has no usable patches."""
    record = source.records[number]
    row = labelling.label_of(record)
    label_source = "folder or import" if labelling.labels is None else "labels file"
    unusable = Exclusion.NO_READABLE_PATCH if record.planned else Exclusion.NO_PATCHES
    reasons = {
        SlideState.COMPLETE: None if record.stored else unusable,
        SlideState.FAILED: Exclusion.INGEST_FAILED,
    }
    return SlideEntry(
        slide=record.id,
        patient=row.patient or record.id,
        site=row.site or "",
        label=row.label or "",
        label_source=label_source if row.label else "",
        store=source.path.name,
        reason=reasons.get(getattr(record, "state", SlideState.COMPLETE), Exclusion.NOT_INGESTED),
        planned=record.planned,
        cells=dict(row.cells),
        measured=_measured(source, number),
    )


def _used(
    entry: SlideEntry, source: SampleSource, number: int, split: SlideSplit, labelling: Labelling
) -> SlideEntry:
    """Return the slide with patient and label in a split, and its patches by subset or by the reason of exclusion."""
    counts: dict[str, Any] = {
        **dict.fromkeys(_COUNTS[1:], 0),
        **{subset: len(split.on(subset)) for subset in SUBSETS},
    }
    rest = split.subsets < 0
    if rest.any():
        reasons = unusable_patches(
            source, number, labelling.patch_filter, split.labels, where=f"slide {split.id}"
        )
        # By the first reason. Those without one were left out by the split.
        for name, rows in {**reasons, "left_out": rest}.items():
            counts[name], rest = int((rest & rows).sum()), rest & ~rows
    _, reason = _UNUSED[max(_UNUSED, key=counts.__getitem__)]
    return replace(
        entry,
        patient=split.patient,
        label=split.label,
        reason=None if any(map(counts.get, SUBSETS)) else reason,
        label_source=entry.label_source if split.labels is None else "annotation",
        **counts,
    )


def with_damaged(
    slides: Sequence[SlideEntry], damaged: Mapping[str, Mapping[Subset, int]]
) -> list[SlideEntry]:
    """Return the slides without patches that were damaged when they were read, counted by slide and subset."""
    return [
        _without(slide, damaged[slide.slide]) if damaged.get(slide.slide) else slide
        for slide in slides
    ]


def _without(slide: SlideEntry, lost: Mapping[Subset, int]) -> SlideEntry:
    left: dict[str, Any] = {name: getattr(slide, name) - lost.get(name, 0) for name in SUBSETS}
    return replace(
        slide,
        damaged=sum(lost.values()),
        reason=None if any(left.values()) else Exclusion.ALL_DAMAGED,
        **left,
    )


def _measured(source: SampleSource, number: int) -> dict[str, str]:
    """Return how a complete slide of a store was read, and the medians of its measures; nothing of others."""
    record = source.complete.get(number)
    if not isinstance(record, SlideRecord) or not isinstance(source, Store):
        return {}
    measured = {name: getattr(record, name) or "" for name in ("route", "reader", "vendor")}
    if record.route:
        again = record.route != "copy" and source.spec.get("codec") != "png"
        measured["jpeg_generations"] = "2" if again else "1"
    if record.mpp is not None:
        measured["mpp"] = f"{record.mpp:.4g}"
    index = source.index(number) if record.planned else {}
    finite = {name: index[name][np.isfinite(index[name])] for name in _MEASURES if name in index}
    medians = {name: np.median(values) for name, values in finite.items() if len(values)}
    return measured | {name: f"{float(median):.6g}" for name, median in medians.items()}


def write_slide_table(path: Path, slides: Collection[SlideEntry]) -> None:
    """Write `slides.csv` by one rename."""
    cells = list(dict.fromkeys(name for slide in slides for name in slide.cells))
    write_table(
        path,
        [*COLUMNS, *(f"{_OF_LABELS}{name}" if name in COLUMNS else name for name in cells)],
        (
            [*map(slide.value, COLUMNS), *(slide.cells.get(name, "") for name in cells)]
            for slide in slides
        ),
    )


def read_slide_table(path: Path) -> list[SlideEntry]:
    """Read `slides.csv`; empty if there is none, as in runs of earlier versions.

    Raises:
        DamagedStore: the file is damaged.
    """
    with suppress(FileNotFoundError), reading(path, todo="restore it from a backup, or remove it"):
        return [_from_row(row) for row in read_dicts(path)]
    return []


def _from_row(row: dict[str, str]) -> SlideEntry:
    # A file of another version may lack columns.
    values: dict[str, Any] = {name: row.pop(name) for name in COLUMNS if name in row}
    values |= {name: int(values[name]) for name in _COUNTS if name in values}
    values["reason"] = Exclusion(values["reason"]) if values.get("reason") else None
    values.pop("status", None)  # its patches show it
    values["measured"] = {name: values.pop(name) for name in MEASURED if name in values}
    values["cells"] = {name.removeprefix(_OF_LABELS): cell for name, cell in row.items()}
    return SlideEntry(**values)


@dataclass(frozen=True, slots=True)
class FlowLevel:
    """Numbers of slides, patients or patches: `total` is the sum of `excluded`, by reason, and `used`, by subsets."""

    total: int
    excluded: Mapping[Exclusion, int]
    used: Mapping[tuple[Subset, ...], int]

    def excluded_at(self, step: int) -> dict[Exclusion, int]:
        """Return the exclusions of a step, by reason."""
        return {reason: count for reason, count in self.excluded.items() if reason.step == step}


_PATCHES: Mapping[str, Exclusion | tuple[Subset, ...]] = {
    **{column: reason for column, (reason, _) in _UNUSED.items()},
    **{subset: (subset,) for subset in SUBSETS},
}
"""What the patches in each column of `slides.csv` are in the flow: excluded for a reason, or used in a subset."""
Flow = Mapping[str, FlowLevel]
"""Levels "slides", "patients" and "patches"."""


def flow_of(slides: Sequence[SlideEntry]) -> Flow:
    """Count slides, patients and patches.

    A patient is used in the subsets of its slides, and excluded if all its slides are, for the reason of the slide that
    came furthest.
    """
    by_patient = grouped(slides, lambda slide: slide.patient)
    patches: Counter[Exclusion | tuple[Subset, ...]] = Counter()
    for slide in slides:
        for column, key in _PATCHES.items():
            patches[key] += getattr(slide, column)
        if slide.reason and not sum(getattr(slide, name) for name in _COUNTS[2:]):
            patches[slide.reason] += slide.planned - slide.unreadable
    return {
        "slides": _level(len(slides), Counter(_status([slide]) for slide in slides)),
        "patients": _level(len(by_patient), Counter(map(_status, by_patient.values()))),
        "patches": _level(sum(slide.planned for slide in slides), patches),
    }


def _status(slides: Sequence[SlideEntry]) -> Exclusion | tuple[Subset, ...]:
    """Return the subsets that slides are in, or else the reason of the slide that came furthest."""
    subsets = tuple(name for name in SUBSETS if any(getattr(slide, name) for slide in slides))
    reasons = [slide.reason for slide in slides if slide.reason]
    return subsets or max(reasons, key=lambda reason: (reason.step, reason), default=())


def _level(total: int, counts: Mapping[Exclusion | tuple[Subset, ...], int]) -> FlowLevel:
    excluded = {key: n for key, n in counts.items() if isinstance(key, Exclusion) and n}
    used = {key: n for key, n in counts.items() if not isinstance(key, Exclusion) and n}
    return FlowLevel(
        total,
        dict(sorted(excluded.items(), key=lambda item: item[0].step)),
        dict(sorted(used.items(), key=lambda item: [SUBSETS.index(name) for name in item[0]])),
    )


def flow_to_json(flow: Flow) -> dict[str, Any]:
    """Return a JSON-ready dict."""
    return {
        name: {
            "found": level.total,
            "excluded": dict(level.excluded),
            "used": {subsets_text(subsets): count for subsets, count in level.used.items()},
        }
        for name, level in flow.items()
    }


def flow_from_json(value: Mapping[str, Any]) -> Flow:
    """Create the flow from the result of `flow_to_json`."""
    flow = {}
    for name, level in value.items():
        counts: Counter[Exclusion | tuple[Subset, ...]] = Counter()
        for reason, count in level["excluded"].items():
            counts[Exclusion(reason)] += count  # earlier versions had several texts for one
        for text, count in level["used"].items():
            counts[tuple(SUBSETS[SUBSETS.index(subset)] for subset in text.split(" and "))] = count
        flow[name] = _level(int(level["found"]), counts)
    return flow


def leaked_patients(splits: Splits) -> dict[Subset, set[str]]:
    """Return the patients in each subset who, or copies of whose slides, are also in an earlier subset."""
    leaked: dict[Subset, set[str]] = {}
    earlier: set[tuple[str, str]] = set()
    for subset in SUBSETS:
        names = {
            (slide.patient, name)
            for slide in splits.slides_on(subset)
            for name in (("patient", slide.patient), ("content", slide.content or slide.id))
        }
        leaked[subset] = {patient for patient, name in names if name in earlier}
        earlier |= {name for _, name in names}
    return leaked
