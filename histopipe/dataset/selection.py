"""Which slides of some stores a dataset takes, which of their patches, and under which class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.slide_source import SlideSource
from histopipe.dataset.splits import Side, SlideSplit, Splits
from histopipe.dataset.table import MAX_STORES, UNLABELLED, SlideRows
from histopipe.errors import UsageError
from histopipe.store.record import SlideRecord

Classes = Sequence[str] | Mapping[str, int]
Labels = Mapping[str, str | None]


def class_numbers(classes: Classes | None, found: Iterable[str]) -> dict[str, int]:
    """The number of each class by name.

    Args:
        classes: names in the order of their numbers, or numbers by name, where several names may share one; the labels
            found, sorted, if not given.
        found: the labels of the slides.

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
    stores: Sequence[SlideSource],
    *,
    classes: Classes | None = None,
    labels: Labels | None = None,
    splits: Splits | None = None,
    side: Side = "train",
    labelled_only: bool = False,
) -> list[SlideRows]:
    """The slides of a dataset, in the stores' order.

    Args:
        stores: in the order of their ordinals.
        classes: see `class_numbers`. A slide whose label is none of them counts as unlabelled.
        labels: by slide id, in place of the recorded ones; slides not named here are unlabelled.
        splits: take only the patches on `side` of these, in place of all of every complete slide.
        side: which side of the splits.
        labelled_only: leave out slides without a label.

    Raises:
        UsageError: more stores than a key can tell apart, classes that make no sense, or labels that name no slide.
    """
    if labels is not None and not (isinstance(labels, Mapping) and labels):
        raise UsageError("labels", found=repr(labels), expected="a CSV, or labels by slide id")
    if len(stores) > MAX_STORES:
        raise UsageError(
            "stores in one dataset", found=len(stores), expected=f"at most {MAX_STORES}"
        )
    held = {(o, n): r for o, store in enumerate(stores) for n, r in store.complete.items()}
    parts = _of_splits(splits, side) if splits is not None else _whole(stores, held)
    if splits is not None and classes is None and labels is None:
        classes = splits.classes
    named = _labels(stores, labels, splits, held)
    patients = {(s.store, s.slide): s.patient for s in splits.slides} if splits else {}
    numbers = class_numbers(classes, filter(None, named.values()))
    chosen = []
    for key, rows in parts:
        record = held[key]
        label = numbers.get(named.get(key) or "", UNLABELLED)
        if label == UNLABELLED and labelled_only:
            continue
        count = record.stored if rows is None else len(rows)
        patient = patients.get(key) or record.patient or record.id
        chosen.append(SlideRows(*key, count, label, rows, patient))
    return chosen


_Held = Mapping[tuple[int, int], SlideRecord]
_Part = tuple[tuple[int, int], NDArray[np.int32] | None]


def _labels(
    stores: Sequence[SlideSource], labels: Labels | None, splits: Splits | None, held: _Held
) -> dict[tuple[int, int], str | None]:
    """The label of each slide by store and number."""
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


def _whole(stores: Sequence[SlideSource], held: _Held) -> list[_Part]:
    return [(key, _readable(stores[key[0]], key[1])) for key in held]


def _readable(store: SlideSource, slide: int) -> NDArray[np.int32] | None:
    """Rows that hold a patch, or None if all do. Only a slide with damage has its index read for that."""
    if not store.records[slide].unreadable:
        return None
    return np.flatnonzero(store.index(slide)["length"]).astype(np.int32)


def _of_splits(splits: Splits, side: Side) -> list[_Part]:
    return [((s.store, s.slide), _on(s, side)) for s in splits.slides]


def _on(slide: SlideSplit, side: Side) -> NDArray[np.int32] | None:
    """Rows on one side; None if all are, which costs no memory."""
    rows = slide.on(side)
    return None if len(rows) == slide.count else rows
