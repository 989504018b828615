"""Create splits: by patient, site or slide, by region of a slide, or by patch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.assignment import (
    AssignByFolds,
    AssignByFractions,
    Assignment,
    copies_note,
    merge_small_strata,
)
from histopipe.dataset.labelling import Labelling, candidates
from histopipe.dataset.options import SIDES, Side, SplitBy
from histopipe.dataset.sample_table import SampleSource
from histopipe.dataset.splits import DROPPED, SlideSplit, Splits
from histopipe.errors import NothingToDo, UsageError
from histopipe.geometry import Micrometres
from histopipe.store.record import SlideRecord
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
    splits = _divide(classes, slides, stores, assignment, split_by=split_by, region=region)
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
        splits = _divide(classes, slides, stores, assignment, split_by=split_by, region=region)
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
) -> Splits:
    if split_by == "region":
        sides = _by_region(slides, classes, stores, assignment, region)
    elif split_by == "patch":
        sides = _by_patch(slides, assignment)
    else:
        sides = _by_group(slides, classes, split_by, assignment)
    divided = tuple(
        replace(slide, sides=np.where(slide.sides == DROPPED, DROPPED, side).astype(np.int8))
        for slide, side in zip(slides, sides, strict=True)
    )
    uuids = tuple(store.uuid for store in stores)
    return Splits(split_by, assignment.seed, assignment.fractions, uuids, classes, divided)


def _refuse_missing(splits: Splits, side: Side) -> None:
    """Check that a side has patches of every class. Patches near another side may have been left out."""
    counts = splits.count()[side]
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
    slides: Sequence[SlideSplit], classes: Sequence[str], split_by: SplitBy, assignment: Assignment
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
    units = _units(names, *([patients] if split_by == "site" else []), contents)
    members: dict[int, list[int]] = defaultdict(list)
    for i, unit in enumerate(units):
        members[unit].append(i)
    strata: dict[str, list[int]] = defaultdict(list)
    for unit, inside in members.items():
        strata[_stratum([slides[i] for i in inside], classes)].append(unit)
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


def _units(*names: Sequence[str | None]) -> list[int]:
    """Return a unit number for each slide: slides that share a name in any of the lists are one unit."""
    parent = list(range(len(names[0])))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for column in names:
        first: dict[str, int] = {}
        for i, name in enumerate(column):
            if name is not None:
                parent[root(i)] = root(first.setdefault(name, i))
    return [root(i) for i in range(len(parent))]


def _by_patch(slides: Sequence[SlideSplit], assignment: Assignment) -> list[NDArray[np.int8]]:
    """Return random sides of the patches of each slide. Copies of one slide get the same sides."""
    sides = []
    for slide in slides:
        name = slide.content or slide.id
        rng = np.random.default_rng([assignment.seed, *name.encode()])
        sides.append(assignment.assign_patches(rng.permutation(slide.count)))
    return sides


def _by_region(
    slides: Sequence[SlideSplit],
    classes: Sequence[str],
    stores: Sequence[SampleSource],
    assignment: Assignment,
    region: Micrometres,
) -> list[NDArray[np.int8]]:
    """Return the sides of the patches of each slide by the square that contains their centre.

    Patches within a patch width of another side are left out.
    """
    squares = [_squares(slide, stores[slide.store], region) for slide in slides]
    # Copies of one slide have the same squares.
    keys = [slide.content or f"{slide.store}/{slide.id}" for slide in slides]
    strata: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    for slide, key, (position, _) in zip(slides, keys, squares, strict=True):
        for name, x, y in _labelled_squares(slide, position, classes):
            strata[name].add((key, x, y))
    merged = merge_small_strata(strata, slides)
    notes = {}
    for name, units in merged.items():
        used = {key for key, _, _ in units}
        own = [slide for slide, key in zip(slides, keys, strict=True) if key in used]
        notes[name] = copies_note(own, slides)
    sides = assignment.assign(merged, "region", notes)
    found_sides = []
    for key, (position, nearby) in zip(keys, squares, strict=True):
        own_sides = _sides_of(position, key, sides)
        others = [_sides_of(points, key, sides) for points in nearby]
        # A square without patches is on no side, so patches need no distance from it.
        mixed = np.any([(other != own_sides) & (other != DROPPED) for other in others], axis=0)
        found_sides.append(np.where(mixed, DROPPED, own_sides).astype(np.int8))
    return found_sides


def _labelled_squares(
    slide: SlideSplit, position: NDArray[np.int64], classes: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    """Yield the most frequent class and the coordinates of each square that has patches."""
    fit = slide.sides != DROPPED
    squares, square = np.unique(position[fit], axis=0, return_inverse=True)
    if slide.labels is None:
        names = [slide.label] * len(squares)
    else:
        votes = np.zeros((len(squares), len(classes)), np.int64)
        np.add.at(votes, (square.ravel(), slide.labels[fit]), 1)
        names = [classes[n] for n in votes.argmax(axis=1).tolist()]
    for name, (x, y) in zip(names, squares.tolist(), strict=True):
        yield name, x, y


def _sides_of(
    squares: NDArray[np.int64], key: str, sides: Mapping[tuple[str, int, int], int]
) -> NDArray[np.int8]:
    """Return the side of each of (N, 2) squares: (N,) int8, `DROPPED` for those without patches."""
    return np.array([sides.get((key, x, y), DROPPED) for x, y in squares.tolist()], np.int8)


def _squares(
    slide: SlideSplit, store: SampleSource, region: Micrometres
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return the square of each patch's centre, (N, 2), and the squares of points within a patch width of the patch.

    A patch with its margin is three patch widths wide. It is covered with a grid of points that are close enough to
    meet every square that it touches.
    """
    record = store.records[slide.slide]
    if (
        not isinstance(record, SlideRecord)  # bags have no position on a slide
        or not record.mpp
        or not record.read_size
        or not record.downsample
    ):
        raise UsageError(
            f"slide {slide.id} has no mpp",
            todo="ingest it with --default-mpp, or use another --split-by",
        )
    index = store.index(slide.slide)
    side = region / record.mpp  # level-0 pixels
    width = record.read_size * record.downsample
    corners = np.stack([index["x_l0"], index["y_l0"]], axis=1).astype(np.float64)
    position = np.floor((corners + width / 2) / side).astype(np.int64)
    points = max(4, int(np.ceil(3 * width / side)) + 1)
    offsets = np.linspace(-width, 2 * width, points)
    nearby = [
        np.floor((corners + np.array([dx, dy])) / side).astype(np.int64)
        for dx in offsets
        for dy in offsets
    ]
    return position, nearby
