"""Selection: the stores, slides and patches of a dataset, and the class of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.sample_table import MAX_STORES, UNLABELLED, SampleRows
from histopipe.errors import UsageError
from histopipe.splits.labelling import PatchFilter
from histopipe.splits.sources import SampleGroup, SampleSource
from histopipe.splits.splits import Splits
from histopipe.splits.subsets import LabelsFrom, Subset
from histopipe.store.catalog import parts_of
from histopipe.system.csv_files import nfc

Classes = Sequence[str] | Mapping[str, int]
LabelById = Mapping[str, str | None]


def store_paths(path: Any) -> list[Path]:
    """Return the paths of the stores in one path or several. A folder of parts is replaced by its parts.

    Raises:
        UsageError: there is no store, or a store is given twice.
    """
    if isinstance(path, str | Path):
        return parts_of(Path(path))
    parts = list(path) if isinstance(path, Iterable) else [path]
    if not parts:
        raise UsageError("no store given")
    paths = [store for part in parts for store in parts_of(Path(part))]
    count = Counter(map(os.path.realpath, paths))
    twice = [real for real, times in count.items() if times > 1]
    if twice:
        raise UsageError("a store is given twice", found=", ".join(twice))
    return paths


def class_numbers(classes: Classes | None, labels: Iterable[str]) -> dict[str, int]:
    """Return the number of each class by name.

    `classes` are names in the order of their numbers, or numbers by name; several names may have the same number.
    Default: the sorted labels in `labels`.

    Raises:
        UsageError: a name is given twice, or numbers are not 0, 1, 2, ….
    """
    if classes is None:
        classes = sorted(set(labels))
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
        raise UsageError("classes: a name is given twice", found=", ".join(classes))
    return {name: number for number, name in enumerate(classes)}


def select(
    stores: Sequence[SampleSource],
    *,
    classes: Classes | None = None,
    labels: LabelById | None = None,
    splits: Splits | None = None,
    subset: Subset = "train",
    labelled_only: bool = False,
    labels_from: LabelsFrom = "slide",
    patch_filter: PatchFilter | None = None,
) -> list[SampleRows]:
    """Select the slides and rows of a dataset, in the order of the stores.

    A slide whose label is not in `classes` (see `class_numbers`) is unlabelled. `labels`, by slide id, replace the
    recorded ones; all other slides are unlabelled. With labels from annotations, the result has an item per slide and
    class. Splits select the patches in `subset`, and record the source of their labels.

    Raises:
        UsageError: there are too many stores, wrong classes, or labels of unknown slides.
    """
    if labels is not None and not (isinstance(labels, Mapping) and labels):
        raise UsageError("labels", found=repr(labels), expected="a CSV, or labels by slide id")
    if len(stores) > MAX_STORES:
        raise UsageError(
            "stores in one dataset", found=len(stores), expected=f"at most {MAX_STORES}"
        )
    complete = {(o, n): r for o, store in enumerate(stores) for n, r in store.complete.items()}
    if labels is not None:
        labels = {nfc(slide): label and nfc(label) for slide, label in labels.items()}
        _refuse_unknown(labels, stores)
    elif splits is not None and classes is None:
        classes = splits.classes
    parts = list(
        _parts(
            stores, complete, labels=labels, splits=splits, subset=subset, labels_from=labels_from
        )
    )
    numbers = class_numbers(classes, [name for _, _, name in parts if name])
    numbers = {**{nfc(name): number for name, number in numbers.items()}, **numbers}
    patients = {(s.store, s.slide): s.patient for s in splits.slides} if splits else {}
    chosen = []
    for key, rows, name in parts:
        label = numbers.get(name or "", numbers.get(nfc(name or ""), UNLABELLED))
        if label == UNLABELLED and labelled_only:
            continue
        store, record, selected = stores[key[0]], complete[key], rows
        if patch_filter is not None and patch_filter.active:
            fit = patch_filter.fit(store.index(key[1]), where=f"{store.path}, slide {record.id}")
            kept = np.flatnonzero(fit) if rows is None else rows[fit[rows]]
            selected = kept.astype(np.int32)
        count = record.stored if selected is None else len(selected)
        patient = patients.get(key) or record.patient or record.id
        chosen.append(SampleRows(*key, count, label, selected, patient))
    return chosen


_Key = tuple[int, int]
"""Position in the list of stores, and slide number."""


def _refuse_unknown(labels: LabelById, stores: Sequence[SampleSource]) -> None:
    ids = {nfc(record.id) for store in stores for record in store.records.values()}
    unknown = sorted(set(labels) - ids)
    if unknown:
        raise UsageError(
            "labels of slides that are not in the stores",
            found=", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if unknown[3:] else ""),
            expected="slide ids as `histopipe info` shows them",
        )  # fmt: skip


def _parts(
    stores: Sequence[SampleSource],
    complete: Mapping[_Key, SampleGroup],
    *,
    labels: LabelById | None,
    splits: Splits | None,
    subset: Subset,
    labels_from: LabelsFrom,
) -> Iterator[tuple[_Key, NDArray[np.int32] | None, str | None]]:
    """Yield key, rows and label of each slide, or of each class of a slide. To save memory, rows are None for all."""
    for slide in splits.slides if splits is not None else ():
        key = (slide.store, slide.slide)
        if splits is not None and slide.labels is not None:
            for name, rows in splits.by_class(slide, subset).items():
                yield key, rows, name
        else:
            in_subset = slide.on(subset)
            label = slide.label if labels is None else labels.get(nfc(complete[key].id))
            yield key, None if len(in_subset) == slide.count else in_subset, label
    for key, record in complete.items() if splits is None else ():
        store = stores[key[0]]
        if labels_from == "annotation":
            index = store.index(key[1])
            for number in np.unique(index["label"]).tolist():
                of_class = np.flatnonzero((index["label"] == number) & (index["length"] > 0))
                named = 0 <= number < len(store.classes)
                yield key, of_class.astype(np.int32), nfc(store.classes[number]) if named else None
            continue
        readable = None
        if record.stored < record.planned:  # otherwise the index is not needed
            readable = np.flatnonzero(store.index(key[1])["length"]).astype(np.int32)
        yield key, readable, record.label if labels is None else labels.get(nfc(record.id))
