"""Selection: the stores, slides and patches of a dataset, and the class of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import LabelsFrom, Side
from histopipe.dataset.patch_filter import PatchFilter
from histopipe.dataset.sample_table import MAX_STORES, UNLABELLED, SampleRows
from histopipe.dataset.samples import SampleGroup, SampleSource
from histopipe.dataset.splits import SlideSplit, Splits
from histopipe.errors import UsageError
from histopipe.store.catalog import parts_of

Classes = Sequence[str] | Mapping[str, int]
LabelById = Mapping[str, str | None]


def store_paths(path: Any) -> list[Path]:
    """Return the paths of the stores in one path or several; a folder of parts stands for its parts.

    Raises:
        UsageError: no store, or a store twice.
    """
    if isinstance(path, str | Path):
        return parts_of(Path(path))
    parts = list(path) if isinstance(path, Iterable) else []
    if not isinstance(path, Iterable) or not all(isinstance(part, str | Path) for part in parts):
        raise UsageError("path", found=repr(path)[:80], expected="a path, or a list of paths")
    if not parts:
        raise UsageError("no store given")
    paths = [store for part in parts for store in parts_of(Path(part))]
    count = Counter(map(os.path.realpath, paths))
    twice = [real for real, times in count.items() if times > 1]
    if twice:
        raise UsageError("a store is given twice", found=", ".join(twice))
    return paths


def class_numbers(classes: Classes | None, found: Iterable[str]) -> dict[str, int]:
    """Return the number of each class by name.

    Args:
        classes: names in the order of their numbers, or numbers by name, where several names may share one; the labels
            found, sorted, if not given.
        found: labels of the slides.

    Raises:
        UsageError: a name comes twice, or numbers are not 0, 1, 2, ….
    """
    if classes is None:
        classes = sorted(set(found))
    elif (
        not classes
        or not isinstance(classes, list | tuple | Mapping)
        or not all(isinstance(name, str) for name in classes)
    ):
        raise UsageError(
            "classes", found=repr(classes), expected="a list of names, or a mapping of them"
        )
    if isinstance(classes, Mapping):
        numbers = dict(classes)
        used = sorted(set(numbers.values()))
        if used != list(range(len(used))):
            raise UsageError("classes: the numbers", found=used, expected="0, 1, 2, … without gaps")
        return numbers
    if len(set(classes)) != len(classes):
        raise UsageError("classes: a name comes twice", found=", ".join(classes))
    return {name: number for number, name in enumerate(classes)}


def select(
    stores: Sequence[SampleSource],
    *,
    classes: Classes | None = None,
    labels: LabelById | None = None,
    splits: Splits | None = None,
    side: Side = "train",
    labelled_only: bool = False,
    labels_from: LabelsFrom = "slide",
    patch_filter: PatchFilter | None = None,
) -> list[SampleRows]:
    """Select the slides and rows of a dataset, in the order of the stores.

    Args:
        stores: the stores.
        classes: see `class_numbers`. A slide whose label is none of them counts as unlabelled.
        labels: by slide id, in place of the recorded ones; slides not named here are unlabelled.
        splits: select only the patches on `side`, not all of every complete slide.
        side: side of the splits.
        labelled_only: leave out slides, or patches, without a label.
        labels_from: "annotation" takes the annotated classes of patches; a slide is then returned once per class. Splits
            record where their labels come from.
        patch_filter: bounds for the patches.

    Raises:
        UsageError: too many stores, wrong classes, or labels of unknown slides.
    """
    if labels is not None and not (isinstance(labels, Mapping) and labels):
        raise UsageError("labels", found=repr(labels), expected="a CSV, or labels by slide id")
    if len(stores) > MAX_STORES:
        raise UsageError(
            "stores in one dataset", found=len(stores), expected=f"at most {MAX_STORES}"
        )
    held = {(o, n): r for o, store in enumerate(stores) for n, r in store.complete.items()}
    if splits is not None:
        parts = _of_splits(splits, side)
    elif labels_from == "annotation":
        parts = _by_annotation(stores, held)
    else:
        parts = _whole(stores, held)
    if splits is not None and classes is None and labels is None:
        classes = splits.classes
    named = _labels(stores, labels, splits, held)
    patients = {(s.store, s.slide): s.patient for s in splits.slides} if splits else {}
    names = (named.get(key) if drawn is None else drawn for key, _, drawn in parts)
    numbers = class_numbers(classes, filter(None, names))
    chosen = []
    for key, rows, drawn in parts:
        record = held[key]
        name = named.get(key) if drawn is None else drawn
        label = numbers.get(name or "", UNLABELLED)
        if label == UNLABELLED and labelled_only:
            continue
        fit = _fit(stores[key[0]], key[1], rows, patch_filter)
        count = record.stored if fit is None else len(fit)
        patient = patients.get(key) or record.patient or record.id
        chosen.append(SampleRows(*key, count, label, fit, patient))
    return chosen


_Held = Mapping[tuple[int, int], SampleGroup]
_Part = tuple[tuple[int, int], NDArray[np.int32] | None, str | None]
"""Store and slide; rows, or None for all readable ones; and their annotated class: None to take the label of the slide, empty for
no class."""


def _labels(
    stores: Sequence[SampleSource], labels: LabelById | None, splits: Splits | None, held: _Held
) -> dict[tuple[int, int], str | None]:
    """Return the label of each slide by store and number."""
    if labels is not None:
        known = {record.id for store in stores for record in store.slides}
        unknown = sorted(set(labels) - known)
        if unknown:
            raise UsageError(
                "labels name slides that no store holds",
                found=", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if unknown[3:] else ""),
                expected="slide ids as `histopipe info` shows them",
            )  # fmt: skip
        return {key: labels.get(record.id) for key, record in held.items()}
    if splits is not None:
        return {(slide.store, slide.slide): slide.label for slide in splits.slides}
    return {key: record.label for key, record in held.items()}


def _whole(stores: Sequence[SampleSource], held: _Held) -> list[_Part]:
    return [(key, _readable(stores[key[0]], key[1]), None) for key in held]


def _readable(store: SampleSource, slide: int) -> NDArray[np.int32] | None:
    """Return the rows that can be read, or None if all can. Reads the index of slides with unreadable patches only."""
    record = store.records[slide]
    if record.stored == record.planned:
        return None
    return np.flatnonzero(store.index(slide)["length"]).astype(np.int32)


def _by_annotation(stores: Sequence[SampleSource], held: _Held) -> list[_Part]:
    """Return a part for each annotated class of each slide."""
    parts: list[_Part] = []
    for key in held:
        store = stores[key[0]]
        index = store.index(key[1])
        for number in np.unique(index["label"]).tolist():
            rows = np.flatnonzero((index["label"] == number) & (index["length"] > 0))
            name = store.classes[number] if 0 <= number < len(store.classes) else ""
            parts.append((key, rows.astype(np.int32), name))
    return parts


def _fit(
    store: SampleSource,
    slide: int,
    rows: NDArray[np.int32] | None,
    patch_filter: PatchFilter | None,
) -> NDArray[np.int32] | None:
    """Return the rows of a slide that are within the bounds."""
    if patch_filter is None or not patch_filter.active:
        return rows
    fit = patch_filter.fit(
        store.index(slide), where=f"{store.path}, slide {store.records[slide].id}"
    )
    kept = np.flatnonzero(fit) if rows is None else rows[fit[rows]]
    return kept.astype(np.int32)


def _of_splits(splits: Splits, side: Side) -> list[_Part]:
    parts: list[_Part] = []
    for slide in splits.slides:
        key = (slide.store, slide.slide)
        if slide.labels is None:
            parts.append((key, _on(slide, side), None))
        else:
            parts += [(key, rows, name) for name, rows in splits.by_class(slide, side).items()]
    return parts


def _on(slide: SlideSplit, side: Side) -> NDArray[np.int32] | None:
    """Return the rows on one side; None if all are, which needs no memory."""
    rows = slide.on(side)
    return None if len(rows) == slide.count else rows
