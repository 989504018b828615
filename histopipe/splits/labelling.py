"""Labelled slides and their usable patches: the input of splits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.slides.slide_files import SlideNames, copy_names
from histopipe.slides.tables import SUBSET_SPELLINGS, SlideLabel, read_labels
from histopipe.splits.splits import DROPPED, SampleGroup, SampleSource, SlideSplit, patches_crc
from histopipe.system.grouping import grouped_values
from histopipe.system.output import counted, message
from histopipe.system.settings import flag, has_type
from histopipe.system.table_cells import cell_number, is_number, nfc
from histopipe.tasks.choices import LabelsFrom
from histopipe.tasks.classification import Classification
from histopipe.tasks.task import Task

_MOST_CATEGORIES = 50
"""With more, a column is probably an identifier."""


@dataclass(frozen=True, slots=True)
class Covariate:
    """A column, as in the training set: a number if all cells are numbers, else a category.

    Attributes:
        name: name of the column.
        categories: sorted categories; empty for a number.
        mean, deviation: of the known numbers.
    """

    name: str
    categories: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, name: str, cells: Sequence[str]) -> Covariate:
        """Return the covariate with the cells of the training set.

        Raises:
            UsageError: there is one value only, or too many categories.
        """
        entries = [cell for cell in cells if cell]
        values = sorted(set(entries))
        if len(values) < 2:
            raise UsageError(
                f"--covariates: column {name}",
                found=f"only {values[0]!r} in training" if values else "no value in training",
                expected="several values",
                todo="leave the column out",
            )
        numbers = [cell_number(cell) for cell in entries]
        if all(map(math.isfinite, numbers)):
            return cls(name, mean=float(np.mean(numbers)), deviation=float(np.std(numbers)) or 1.0)
        if len(values) > _MOST_CATEGORIES:
            raise UsageError(
                f"--covariates: column {name}",
                found=f"{len(values)} categories, such as {values[0]!r}",
                expected=f"numbers, or at most {_MOST_CATEGORIES} categories",
            )
        return cls(name, tuple(values))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the numbers that a model gets; the last is 1 if the value is missing."""
        values = [f"{self.name}={category}" for category in self.categories] or [self.name]
        return (*values, f"{self.name} missing")

    def accepts(self, cell: str) -> bool:
        """Return whether a cell has a value that the training set could have."""
        return cell in self.categories if self.categories else is_number(cell)

    def encode(self, cell: str) -> list[float]:
        """Return the `inputs` of a cell. Unknown categories are missing."""
        if not self.accepts(cell):
            return [0.0] * (len(self.inputs) - 1) + [1.0]
        values = [float(cell == category) for category in self.categories]
        return [*(values or [(cell_number(cell) - self.mean) / self.deviation]), 0.0]


@dataclass(frozen=True, slots=True)
class Covariates:
    """The covariates of a training."""

    columns: tuple[Covariate, ...]

    @classmethod
    def of(cls, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Covariates:
        """Return the covariates with the rows of cells of the training set. Raise as `Covariate.of`."""
        return cls(tuple(map(Covariate.of, names, zip(*rows, strict=True))))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the numbers that a model gets."""
        return tuple(name for column in self.columns for name in column.inputs)

    def encode(self, cells: Sequence[str]) -> list[float]:
        """Return the numbers for the cells of a slide."""
        return [
            value
            for column, cell in zip(self.columns, cells, strict=True)
            for value in column.encode(cell)
        ]

    def unknown(self, cells: Sequence[str]) -> list[str]:
        """Return a text for each cell with a value that training never saw, which counts as missing."""
        return [
            f"column {column.name}: {cell!r}"
            for column, cell in zip(self.columns, cells, strict=True)
            if cell and not column.accepts(cell)
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """Return a JSON-ready list."""
        return [asdict(column) for column in self.columns]

    @classmethod
    def from_json(cls, value: Sequence[Mapping[str, Any]]) -> Covariates:
        """Return covariates from the result of `to_json`."""
        return cls(
            tuple(
                Covariate(**{**entry, "categories": tuple(entry["categories"])}) for entry in value
            )
        )


NO_CLASS = -1
"""Class number of slides and patches without a class."""
_UNKNOWN = "unknown"
"""Label of a slide with a target, until the strata are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFilter:
    """Bounds on columns of a store's index: the shares of tissue, pen, and folds and black; and the measured focus.

    The defaults keep all patches.

    Raises:
        UsageError: a bound is out of range.
    """

    min_tissue: float = 0.0
    min_focus: float = 0.0
    exclude_pen: float = 1.0
    exclude_dark: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            largest = math.inf if name == "min_focus" else 1
            if not has_type(value, float) or not 0 <= value <= largest or value == math.inf:
                expected = "0 or more" if name == "min_focus" else "from 0 to 1"
                raise UsageError(flag(name), found=repr(value), expected=expected)

    @property
    def active(self) -> bool:
        """Whether any bound is set."""
        return self != PatchFilter()

    def fit(self, index: Mapping[str, NDArray[Any]], *, where: str) -> NDArray[np.bool_]:
        """Return a mask (N,) bool of the patches within the bounds, from the columns of a slide; messages name `where`.

        Raises:
            UsageError: a column with a bound has not been measured.
        """
        kept = np.ones(len(index["crc"]), np.bool_)
        for column, bound, off, command in (
            ("tissue", self.min_tissue, 0.0, "ingest it with --tissue otsu"),
            ("focus", self.min_focus, 0.0, "run `histopipe quality` on the store"),
            ("pen", self.exclude_pen, 1.0, "run `histopipe quality` on the store"),
            ("dark", self.exclude_dark, 1.0, "run `histopipe quality` on the store"),
        ):
            if bound == off:
                continue
            values = index.get(column)
            if values is None or (np.isnan(values).all() and (index["length"] > 0).any()):
                raise UsageError(f"{where}: {column} has not been measured", todo=command)
            # Damaged patches have NaN, which is outside of every bound.
            kept &= (values >= bound) if off == 0 else (values <= bound)
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """Source of the labels, and filter of the patches. `labels`, by slide id, replace the recorded ones.

    Targets of other tasks than classification are read from the cells of `labels`; `covariates` are further columns.
    Slides with an empty cell in `split_column`, which has their subsets or folds, are left out. Of each slide, at most
    `patches_per_slide` random patches are used, the same for all seeds; 0: all.
    """

    labels: Mapping[str, SlideLabel] | None = None
    labels_from: LabelsFrom = "slide"
    task: Task = field(default_factory=Classification)
    covariates: tuple[str, ...] = ()
    split_column: str | None = None
    patch_filter: PatchFilter = field(default_factory=PatchFilter)
    patches_per_slide: int = 0

    def label_of(self, record: SampleGroup) -> SlideLabel:
        """Return label, patient and site of a slide, and the cells of its further columns.

        Without a labels file, the label is the recorded one; so are a patient and a site that the file does not have.
        """
        row = (
            SlideLabel(record.label, cells=getattr(record, "cells", {}))
            if self.labels is None
            else self.labels.get(record.id, SlideLabel(None))
        )
        return replace(
            row,
            label=record.label if row.keeps_label else row.label,
            patient=row.patient or record.patient or record.id,
            site=row.site or record.site,
        )


def read_slide_labels(
    path: str | Path,
    sources: Sequence[SampleSource],
    *,
    allow_extra: bool = False,
    **options: Any,
) -> dict[str, SlideLabel]:
    """Return label, patient and site by slide id from a CSV file; `allow_extra` ignores rows of unknown slides.

    `options` are further ones of `read_labels`.

    Raises:
        UsageError: the file cannot be read or does not match the slides.
    """
    ids = (record.id for source in sources for record in source.records.values())
    return read_labels(Path(path), SlideNames(ids), allow_extra=allow_extra, **options)


def candidates(
    stores: Sequence[SampleSource], labelling: Labelling
) -> tuple[tuple[str, ...], list[SlideSplit]]:
    """Return the classes, in the order of their numbers, and all labelled slides that have patches.

    Patches without a class, unreadable patches and patches out of bounds are `DROPPED`. All others are in subset 0 until
    a split assigns them.

    Raises:
        NothingToDo: the labels have fewer than two classes, or there is no target.
        UsageError: a bound is on a column that has not been measured, or a target has a wrong value.
    """
    records = (record for store in stores for record in store.complete.values())
    classes = tuple(sorted({nfc(name) for record in records for name in record.patch_labels}))
    slides = [
        slide
        for ordinal, store in enumerate(stores)
        for number in store.complete
        if (slide := _candidate(ordinal, store, number, labelling, classes)) is not None
    ]
    names = copy_names([stores[slide.store].records[slide.slide].scans for slide in slides])
    slides = [replace(slide, content=name) for slide, name in zip(slides, names, strict=True)]
    if not labelling.task.by_class:
        slides = _with_strata(slides, labelling.task)
    if labelling.labels_from == "slide":
        classes = tuple(sorted({slide.label for slide in slides}))
    if len(classes) < 2 and labelling.task.by_class:
        annotated = labelling.labels_from == "annotation"
        raise NothingToDo(
            "cannot train with fewer than two classes",
            found=f"labels {', '.join(classes) or 'none'}",
            expected=f"{'annotated patches' if annotated else 'labelled slides'} of two or more classes",
            todo="run `histopipe annotate STORE ANNOTATIONS` first"
            if annotated
            else "pass --labels labels.csv (columns slide,label), or ingest again with the slides of each class in a "
            "folder with its name; for annotated classes, use --labels-from annotation",
        )
    if not any((slide.subsets != DROPPED).any() for slide in slides):
        raise NothingToDo(
            "no labelled patch is within the bounds",
            found=str(labelling.patch_filter),
            todo="relax the bounds; `histopipe report STORE` shows the measured values",
        )
    return classes, slides


def _with_strata(slides: Sequence[SlideSplit], task: Task) -> list[SlideSplit]:
    """Return the slides with the stratum of their target as label."""
    if not slides:
        raise NothingToDo(
            f"no slide has a value in {' and '.join(task.columns)}",
            todo="fill the columns of the labels file, or name others",
        )
    # Metrics of patients need one value.
    targets = grouped_values(
        (slide.patient, ", ".join(f"{value:.15g}" for value in slide.target or ()))
        for slide in slides
    )
    different = sorted(patient for patient, texts in targets.items() if len(set(texts)) > 1)
    if different:
        message(
            f"warning: {counted(len(different), 'patient')} with slides of different {', '.join(task.columns)}, such as "
            f"{different[0]}: {' and '.join(sorted(set(targets[different[0]])))}; each slide keeps its own; correct the "
            "labels file if all slides of a patient should have one value"
        )
    strata = task.strata(np.array([slide.target for slide in slides]))
    return [replace(slide, label=name) for slide, name in zip(slides, strata, strict=True)]


def class_codes(store: SampleSource, slide: int, classes: Sequence[str]) -> NDArray[np.int16]:
    """Return the annotated class of each patch of a slide, (N,) int16 index in `classes`; -1 if it has none of them."""
    number = {name: place for place, name in enumerate(classes)}
    numbers = [number.get(name, number.get(nfc(name), NO_CLASS)) for name in store.classes]
    label = store.index(slide)["label"]
    places = np.where((label >= 0) & (label < len(store.classes)), label, -1)
    return np.array([*numbers, NO_CLASS], np.int16)[places]


def given_parts(
    slides: Sequence[SlideSplit],
    stores: Sequence[SampleSource],
    labelling: Labelling,
    *,
    folds: bool,
) -> NDArray[np.int64]:
    """Return the subset of each slide in the split column, (N,), or the number of its fold.

    Raises:
        UsageError: a cell is no subset, or no whole number.
    """
    column = str(labelling.split_column)
    cells = [
        labelling.label_of(stores[slide.store].records[slide.slide]).cells[column]
        for slide in slides
    ]
    parts = [
        cell_number(cell) if folds else SUBSET_SPELLINGS.get(cell.lower(), math.nan)
        for cell in cells
    ]
    wrong = [number for number, part in enumerate(parts) if part % 1 != 0]
    if wrong:
        rest = f", and {counted(len(wrong) - 1, 'row')} more" if wrong[1:] else ""
        raise UsageError(
            f"row of slide {slides[wrong[0]].id}, column {column}",
            found=repr(cells[wrong[0]]) + rest,
            expected="the whole number of a fold; train, validation and test need no --folds"
            if folds
            else f"{', '.join(SUBSET_SPELLINGS)}, in any case; fold numbers need --folds column",
            todo="correct the cells; an empty cell leaves its slide out",
        )
    return np.array(parts, np.int64)


def unusable_patches(
    store: SampleSource,
    number: int,
    patch_filter: PatchFilter,
    labels: NDArray[np.int16] | None,
    *,
    where: str,
) -> dict[str, NDArray[np.bool_]]:
    """Return masks (N,) of the patches of a slide that cannot be used, by reason: "unreadable", "no_class" or "filtered".

    `labels` are (N,) annotated class numbers, or None; for the other arguments see `PatchFilter.fit`.
    """
    record, reasons = store.records[number], {}
    if record.stored < record.planned:
        reasons["unreadable"] = store.index(number)["length"] == 0
    if labels is not None:
        reasons["no_class"] = labels == NO_CLASS
    if patch_filter.active:
        reasons["filtered"] = ~patch_filter.fit(store.index(number), where=where)
    return reasons


def _candidate(
    ordinal: int, store: SampleSource, number: int, labelling: Labelling, classes: Sequence[str]
) -> SlideSplit | None:
    """Return a slide; None if it is unlabelled or empty."""
    record, task = store.records[number], labelling.task
    row = labelling.label_of(record)
    label, cells, codes, target = row.label, row.cells, None, None
    if labelling.labels_from == "annotation":
        # Slides without annotations are skipped before their index is read.
        label = nfc(max(record.patch_labels, key=record.patch_labels.__getitem__, default=""))
        codes = class_codes(store, number, classes) if label else None
    if not task.by_class:
        target = task.target(cells, f"slide {record.id}") if cells else None
        label = None if target is None else _UNKNOWN
    left_out = labelling.split_column is not None and not cells.get(labelling.split_column)
    if not label or not record.stored or left_out:
        return None
    reasons = unusable_patches(
        store, number, labelling.patch_filter, codes, where=f"{store.path}, slide {record.id}"
    )
    unusable = np.any([np.zeros(record.planned, np.bool_), *reasons.values()], axis=0)
    if labelling.patches_per_slide:
        drawn = np.random.default_rng(0).permutation(np.flatnonzero(~unusable))
        unusable[drawn[labelling.patches_per_slide :]] = True
    return SlideSplit(
        ordinal,
        number,
        record.id,
        label,
        row.patient or record.id,
        row.site,
        None,
        record.planned,
        patches_crc(store, number),
        np.where(unusable, DROPPED, 0).astype(np.int8),
        codes,
        target,
        tuple(cells[name] for name in labelling.covariates),
    )
