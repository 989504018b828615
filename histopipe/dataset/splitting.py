"""Create splits: by patient, site or slide, by region of a slide, or by patch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.assignment import (
    AssignByFolds,
    AssignByFractions,
    Assignment,
    copies_note,
    merge_ranges,
    merge_small_strata,
)
from histopipe.dataset.labelling import Labelling, candidates
from histopipe.dataset.options import SIDES, Side, SplitBy
from histopipe.dataset.regions import sides_by_region
from histopipe.dataset.sample_table import SampleSource
from histopipe.dataset.splits import DROPPED, SlideSplit, Splits
from histopipe.dataset.targets import Multilabel
from histopipe.errors import NothingToDo, UsageError
from histopipe.geometry import Micrometres
from histopipe.slides.slide_hashes import connected
from histopipe.system.result import counted

FRACTIONS = (0.7, 0.15, 0.15)
REGION = Micrometres(250.0)


def make_splits(
    stores: Sequence[SampleSource],
    *,
    split_by: SplitBy,
    seed: int,
    labelling: Labelling | None = None,
    fractions: tuple[float, float, float] = FRACTIONS,
    region: Micrometres = REGION,
) -> Splits:
    """Split the labelled slides of stores. The same seed gives the same split.

    The fractions are of units, not of patches. `region` is the side of the squares for split_by="region".

    Raises:
        NothingToDo: there are fewer than two classes, or a class is too small to be on every side.
        UsageError: a slide has no site, for "site", or no mpp, for "region".
    """
    classes, slides = candidates(stores, labelling or Labelling())
    assignment = AssignByFractions(fractions, seed)
    splits = _divide(
        classes,
        slides,
        stores,
        assignment,
        split_by=split_by,
        region=region,
        labelling=labelling or Labelling(),
    )
    for side, fraction in zip(SIDES, fractions, strict=True):
        if fraction:
            _refuse_missing(splits, side)
    return splits


def make_folds(
    stores: Sequence[SampleSource],
    folds: int,
    *,
    split_by: SplitBy,
    seed: int,
    labelling: Labelling | None = None,
    fractions: tuple[float, float, float] = FRACTIONS,
    region: Micrometres = REGION,
) -> tuple[Splits, ...]:
    """Return a split for each fold of a cross-validation. Every patch that is not left out is in exactly one test set.

    The first two fractions divide the units that are not in the test set into training and validation.

    Raises:
        NothingToDo: a class is too small to be in training and test.
        UsageError: there are fewer units than folds.
    """
    classes, slides = candidates(stores, labelling or Labelling())
    all_splits = []
    for fold in range(folds):
        assignment = AssignByFolds(fold, folds, fractions, seed)
        splits = _divide(
            classes,
            slides,
            stores,
            assignment,
            split_by=split_by,
            region=region,
            labelling=labelling or Labelling(),
        )
        _refuse_missing(splits, "train")
        for side in SIDES[1:]:
            if not splits.count()[side].total():
                _refuse_missing(splits, side)
        all_splits.append(splits)
    return tuple(all_splits)


def _divide(
    classes: tuple[str, ...],
    slides: Sequence[SlideSplit],
    stores: Sequence[SampleSource],
    assignment: Assignment,
    *,
    split_by: SplitBy,
    region: Micrometres,
    labelling: Labelling,
) -> Splits:
    task = labelling.task
    if split_by == "region":
        sides = sides_by_region(slides, classes, stores, assignment, region)
    elif split_by == "patch":
        sides = _by_patch(slides, assignment)
    else:
        several = isinstance(task, Multilabel)
        sides = _by_group(slides, classes, split_by, assignment, several_labels=several)
    divided = tuple(
        replace(slide, sides=np.where(slide.sides == DROPPED, DROPPED, side).astype(np.int8))
        for slide, side in zip(slides, sides, strict=True)
    )
    uuids = tuple(store.uuid for store in stores)
    return Splits(
        split_by, assignment.seed, assignment.fractions, uuids, classes, divided,
        task="classification" if task is None else task.name,
        targets=() if task is None else task.columns, covariates=labelling.covariates,
    )  # fmt: skip


def _refuse_missing(splits: Splits, side: Side) -> None:
    """Check that a side has patches of every class. Patches near another side may have been left out."""
    counts = splits.count()[side]
    task = splits.kind
    if task is not None:
        if not counts.total():
            raise NothingToDo(
                f"splitting by {splits.split_by} leaves no slide for {side}",
                todo="add slides, or change --split-by",
            )
        if side != "test":
            task.check(splits.targets_on(side), f"split by {splits.split_by}, {side}")
        return
    for name in splits.classes:
        if not counts[name]:
            own = [slide for slide in splits.slides if slide.label == name]
            note = copies_note(own, splits.slides)
            raise NothingToDo(
                f"splitting by {splits.split_by} leaves no {name!r} patch for {side}{note}",
                todo="add slides, use smaller patches, or change --split-by"
                + (" or increase --region-um" if splits.split_by == "region" else ""),
            )


def _by_group(
    slides: Sequence[SlideSplit],
    classes: Sequence[str],
    split_by: SplitBy,
    assignment: Assignment,
    *,
    several_labels: bool,
) -> list[NDArray[np.int8]]:
    """Return the sides of the patches of each slide: all on the side of its patient, site or slide."""
    patients = [slide.patient for slide in slides]
    if split_by == "patient":
        names = patients
    elif split_by == "slide":
        names = [f"{slide.store}/{slide.id}" for slide in slides]
    else:
        missing = [slide.id for slide in slides if slide.site is None]
        if missing:
            raise UsageError(
                "--split-by site", found=f"{counted(len(missing), 'slide')} without a site, such as {missing[0]}",
                expected="a site for every slide", todo="add a column site to the labels file",
            )  # fmt: skip
        names = [str(slide.site) for slide in slides]
    contents = [slide.content for slide in slides]
    units = connected(names, *([patients] if split_by == "site" else []), contents)
    members: dict[int, list[int]] = defaultdict(list)
    for i, unit in enumerate(units):
        members[unit].append(i)
    if several_labels:
        found = np.array([slide.target for slide in slides]) == 1
        own = list(members)
        labels = np.array([found[members[unit]].any(axis=0) for unit in own])
        side_of = dict(zip(own, assignment.assign_labels(labels).tolist(), strict=True))
        return [
            np.full(slide.count, side_of[unit], np.int8)
            for slide, unit in zip(slides, units, strict=True)
        ]
    strata: dict[str, list[int]] = defaultdict(list)
    for unit, inside in members.items():
        strata[_stratum([slides[i] for i in inside], classes)].append(unit)
    if slides and slides[0].target:
        strata = merge_ranges(strata, min(filter(None, assignment.fractions)))
    merged = merge_small_strata(strata, slides)
    notes = {}
    for label, found in merged.items():
        joined = [members[unit] for unit in found if len({names[i] for i in members[unit]}) > 1]
        notes[label] = copies_note([slides[i] for inside in joined for i in inside], slides)
    sides = assignment.assign(merged, split_by, notes)
    return [
        np.full(slide.count, sides[unit], np.int8)
        for slide, unit in zip(slides, units, strict=True)
    ]


def _stratum(slides: Sequence[SlideSplit], classes: Sequence[str]) -> str:
    """Return the stratum of a unit: the most frequent label of its slides, or the classes of its patches."""
    if slides[0].labels is None:
        return Counter(slide.label for slide in slides).most_common(1)[0][0]
    found = {int(code) for slide in slides if slide.labels is not None for code in slide.labels}
    return " and\n".join(classes[code] for code in sorted(found - {-1}))


def _by_patch(slides: Sequence[SlideSplit], assignment: Assignment) -> list[NDArray[np.int8]]:
    """Return random sides of the patches of each slide. Copies of one slide get the same sides."""
    sides = []
    for slide in slides:
        name = slide.content or slide.id
        rng = np.random.default_rng([assignment.seed, *name.encode()])
        sides.append(assignment.assign_patches(rng.permutation(slide.count)))
    return sides
