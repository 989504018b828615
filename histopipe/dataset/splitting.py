"""Making splits: by patient, site or slide, by region of a slide, or by patch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from histopipe.dataset.assignment import (
    AssignByFolds,
    AssignByFractions,
    Assignment,
    copies_note,
    merge_small_strata,
)
from histopipe.dataset.labelling import Candidates, Labelling, candidates
from histopipe.dataset.options import SIDES, Side, SplitBy
from histopipe.dataset.region_splitting import split_by_region
from histopipe.dataset.samples import SampleSource
from histopipe.dataset.splits import DROPPED, SlideSplit, Splits
from histopipe.errors import NothingToDo, UsageError
from histopipe.geometry import Micrometres

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
    """Split the labelled slides of stores, the same way for the same seed.

    Args:
        stores: stores of the slides.
        split_by: unit that stays together.
        seed: seed of the random assignment.
        labelling: where labels come from; the recorded labels, if not given.
        fractions: fractions of train, validation and test, in units, not patches.
        region: side of the squares for "region".

    Raises:
        NothingToDo: fewer than two classes, or a class too small to be on every side.
        UsageError: splitting by site without sites, or by region without a scale.
    """
    found = candidates(stores, labelling or Labelling())
    splits = divide(
        found, stores, AssignByFractions(fractions, seed), split_by=split_by, region=region
    )
    for side, fraction in zip(SIDES, fractions, strict=True):
        if fraction:
            _refuse_missing(splits, side, splits.classes)
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
    """Split as `make_splits`, once for each fold of a cross-validation: every patch that is not left out is in one test set.

    Args:
        stores, split_by, seed, labelling, region: as for `make_splits`.
        folds: number of folds.
        fractions: the first two are the shares of training and validation in what is not tested.

    Raises:
        NothingToDo: a class is too small to be trained on and tested.
        UsageError: there are fewer units than folds.
    """
    found = candidates(stores, labelling or Labelling())
    made = []
    for fold in range(folds):
        assignment = AssignByFolds(fold, folds, fractions, seed)
        splits = divide(found, stores, assignment, split_by=split_by, region=region)
        _refuse_missing(splits, "train", splits.classes)
        for side in SIDES[1:]:
            if not splits.count()[side].total():
                _refuse_missing(splits, side, splits.classes)
        made.append(splits)
    return tuple(made)


def divide(
    found: Candidates,
    stores: Sequence[SampleSource],
    assignment: Assignment,
    *,
    split_by: SplitBy,
    region: Micrometres,
) -> Splits:
    """Assign the patches of candidates to the sides."""
    if split_by == "region":
        divided = split_by_region(found, stores, assignment, region)
    elif split_by == "patch":
        divided = _by_patch(found.slides, assignment)
    else:
        divided = _by_group(found.slides, found.classes, split_by, assignment)
    fit_only = (
        slide if fit.all() else replace(slide, sides=np.where(fit, slide.sides, DROPPED).astype(np.int8))
        for slide, fit in zip(divided, found.fit, strict=True)
    )  # fmt: skip
    uuids = tuple(store.uuid for store in stores)
    return Splits(
        split_by, assignment.seed, assignment.fractions, uuids, found.classes, tuple(fit_only)
    )


def _refuse_missing(splits: Splits, side: Side, classes: Sequence[str]) -> None:
    """Check that a side has patches of every class: a unit may have too few, or all too near another side's.

    Raises:
        NothingToDo: a class is missing.
    """
    counts = splits.count()[side]
    for name in classes:
        if not counts[name]:
            own = [slide for slide in splits.slides if slide.label == name]
            raise NothingToDo(
                f"splitting by {splits.split_by} leaves no {name!r} patch for {side}{copies_note(own, splits.slides)}",
                todo="add slides, take smaller patches, or split otherwise"
                + (" (a larger --region-um)" if splits.split_by == "region" else ""),
            )


def _by_group(
    slides: list[SlideSplit], classes: Sequence[str], split_by: SplitBy, assignment: Assignment
) -> list[SlideSplit]:
    keys: dict[SplitBy, Callable[[SlideSplit], str | None]] = {
        "patient": lambda slide: slide.patient,
        "site": lambda slide: slide.site,
        "slide": lambda slide: f"{slide.store}/{slide.id}",
    }
    missing = [slide.id for slide in slides if keys[split_by](slide) is None]
    if missing:
        raise UsageError(
            f"--split-by {split_by}", found=f"{len(missing)} slides without one, such as {missing[0]}",
            expected=f"a {split_by} for every slide",
            todo=f"give the labels file a column {split_by}",
        )  # fmt: skip
    units = _units(slides, [keys[split_by]] + ([keys["patient"]] if split_by == "site" else []))
    members: dict[int, list[SlideSplit]] = defaultdict(list)
    for slide, unit in zip(slides, units, strict=True):
        members[unit].append(slide)
    strata: dict[str, list[int]] = defaultdict(list)
    joined: dict[int, list[SlideSplit]] = {}
    for unit, inside in members.items():
        strata[_stratum(inside, classes)].append(unit)
        if len({keys[split_by](slide) for slide in inside}) > 1:
            joined[unit] = inside
    merged = merge_small_strata(strata, slides)
    notes = {
        label: copies_note([slide for unit in found for slide in joined.get(unit, ())], slides)
        for label, found in merged.items()
    }
    sides = assignment.assign(merged, split_by, notes)
    return [
        replace(slide, sides=np.full(slide.count, sides[unit], np.int8))
        for slide, unit in zip(slides, units, strict=True)
    ]


def _stratum(slides: Sequence[SlideSplit], classes: Sequence[str]) -> str:
    """Return the stratum of a unit: the most frequent label of its slides, or the classes of its patches."""
    if slides[0].labels is None:
        return Counter(slide.label for slide in slides).most_common(1)[0][0]
    found = {int(code) for slide in slides if slide.labels is not None for code in slide.labels}
    return " and\n".join(classes[code] for code in sorted(found - {-1}))


def _units(
    slides: list[SlideSplit], keys: Sequence[Callable[[SlideSplit], str | None]]
) -> list[int]:
    """Return a unit number for each slide: slides that share a key are one unit, and so are copies of one slide."""
    parent = list(range(len(slides)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def content(slide: SlideSplit) -> str | None:
        return slide.content

    for key in (*keys, content):
        first: dict[str, int] = {}
        for i, slide in enumerate(slides):
            value = key(slide)
            if value is not None:
                parent[root(i)] = root(first.setdefault(value, i))
    return [root(i) for i in range(len(slides))]


def _by_patch(slides: list[SlideSplit], assignment: Assignment) -> list[SlideSplit]:
    """Assign the patches of each slide at random; copies of one slide are assigned alike."""
    divided = []
    for slide in slides:
        name = slide.content or slide.id
        rng = np.random.default_rng([assignment.seed, *name.encode()])
        divided.append(
            replace(slide, sides=assignment.assign_patches(rng.permutation(slide.count)))
        )
    return divided
