"""Making a split: by patient, site or slide, by region of a slide, or by patch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.dealing import ByFolds, ByFractions, Dealing
from histopipe.dataset.labelling import Candidates, Labelling, candidates
from histopipe.dataset.samples import SampleSource
from histopipe.dataset.splits import DROPPED, SIDES, Side, SlideSplit, SplitBy, Splits
from histopipe.errors import NothingToDo, UsageError
from histopipe.geometry import Micrometres
from histopipe.store.record import SlideRecord

Group = TypeVar("Group", int, tuple[str, int, int])

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
        stores: what to train on.
        split_by: what stays together.
        seed: decides which goes where.
        labelling: where labels come from; what is recorded of slides, if not given.
        fractions: of train, validation and test; groups are counted, not patches.
        region: side of the squares for "region".

    Raises:
        NothingToDo: fewer than two classes, or a class too small to be on every side.
        UsageError: splitting by site without sites, or by region without a scale.
    """
    found = candidates(stores, labelling or Labelling())
    splits = divide(found, stores, ByFractions(fractions, seed), split_by=split_by, region=region)
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
        folds: how many.
        fractions: the first two say how what is not tested is shared between training and validation.

    Raises:
        NothingToDo: a class is too small to be trained on and tested.
        UsageError: there are fewer groups than folds.
    """
    found = candidates(stores, labelling or Labelling())
    made = []
    for fold in range(folds):
        dealing = ByFolds(fold, folds, fractions, seed)
        splits = divide(found, stores, dealing, split_by=split_by, region=region)
        _refuse_missing(splits, "train", splits.classes)
        for side in SIDES[1:]:
            if not splits.count()[side].total():
                _refuse_missing(splits, side, splits.classes)
        made.append(splits)
    return tuple(made)


def divide(
    found: Candidates,
    stores: Sequence[SampleSource],
    dealing: Dealing,
    *,
    split_by: SplitBy,
    region: Micrometres,
) -> Splits:
    """Deal slides, or parts of them, out to the sides."""
    if split_by == "region":
        divided = _by_region(found, stores, dealing, region)
    elif split_by == "patch":
        divided = _by_patch(found.slides, dealing)
    else:
        divided = _by_group(found.slides, found.classes, split_by, dealing)
    fit_only = (
        slide if fit.all() else replace(slide, sides=np.where(fit, slide.sides, DROPPED).astype(np.int8))
        for slide, fit in zip(divided, found.fit, strict=True)
    )  # fmt: skip
    uuids = tuple(store.uuid for store in stores)
    return Splits(split_by, dealing.seed, dealing.fractions, uuids, found.classes, tuple(fit_only))


def _refuse_missing(splits: Splits, side: Side, classes: Sequence[str]) -> None:
    """Groups were dealt to every side, but a group may bring no patch: few of them, or all too near another side's."""
    counts = splits.count()[side]
    for name in classes:
        if not counts[name]:
            raise NothingToDo(
                f"splitting by {splits.split_by} leaves no {name!r} patch for {side}",
                todo="add slides, take smaller patches, or split otherwise"
                + (" (a larger --region-um)" if splits.split_by == "region" else ""),
            )


def _by_group(
    slides: list[SlideSplit], classes: Sequence[str], split_by: SplitBy, dealing: Dealing
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
    groups = _joined(slides, [keys[split_by]] + ([keys["patient"]] if split_by == "site" else []))
    members: dict[int, list[SlideSplit]] = defaultdict(list)
    for slide, group in zip(slides, groups, strict=True):
        members[group].append(slide)
    strata: dict[str, list[int]] = defaultdict(list)
    for group, inside in members.items():
        strata[_stratum(inside, classes)].append(group)
    sides = dealing.groups(_large_enough(strata, slides), split_by)
    return [
        replace(slide, sides=np.full(slide.count, sides[group], np.int8))
        for slide, group in zip(slides, groups, strict=True)
    ]


def _stratum(slides: Sequence[SlideSplit], classes: Sequence[str]) -> str:
    """What a group is dealt with: others of the label that most of its slides have, or whose patches have the same classes."""
    if slides[0].labels is None:
        return Counter(slide.label for slide in slides).most_common(1)[0][0]
    found = {int(code) for slide in slides if slide.labels is not None for code in slide.labels}
    return " and\n".join(classes[code] for code in sorted(found - {-1}))


def _large_enough(
    strata: Mapping[str, Collection[Group]], slides: Sequence[SlideSplit]
) -> dict[str, list[Group]]:
    """Strata, sorted; where patches have classes of their own, those too small for every side are dealt together.

    A class of slides that is as small cannot be on every side. A class of patches may be in many groups and the most frequent
    one in few: whether each side has some is seen when they are dealt.
    """
    ordered = {name: sorted(strata[name]) for name in sorted(strata)}
    small = [name for name, groups in ordered.items() if len(groups) < len(SIDES)]
    if not small or all(slide.labels is None for slide in slides):
        return ordered
    together = [group for name in small for group in ordered.pop(name)]
    if ordered and len(together) < len(SIDES):
        largest = max(ordered, key=lambda name: len(ordered[name]))
        together += ordered.pop(largest)
        small.append(largest)
    # Between the names what no class's name has, so that this is none of them.
    return {**ordered, " or\n".join(sorted(small)): sorted(together)}


def _joined(
    slides: list[SlideSplit], keys: Sequence[Callable[[SlideSplit], str | None]]
) -> list[int]:
    """A group number for each slide: slides of one key belong together, and so do copies of one scan."""
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


def _by_patch(slides: list[SlideSplit], dealing: Dealing) -> list[SlideSplit]:
    """Every slide on every side, patches dealt out at random; copies of a scan are dealt alike."""
    divided = []
    for slide in slides:
        name = slide.content or slide.id
        rng = np.random.default_rng([dealing.seed, *name.encode()])
        divided.append(replace(slide, sides=dealing.places(rng.permutation(slide.count))))
    return divided


def _by_region(
    found: Candidates,
    stores: Sequence[SampleSource],
    dealing: Dealing,
    region: Micrometres,
) -> list[SlideSplit]:
    """Whole squares of a slide go to one side; patches within a patch width of another side are left out."""
    slides = found.slides
    squares = [_squares(slide, stores[slide.store], region) for slide in slides]
    strata: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    for slide, fit, (place, _) in zip(slides, found.fit, squares, strict=True):
        for name, x, y in _labelled_squares(slide, place, fit, found.classes):
            strata[name].add((_scan(slide), x, y))
    sides = dealing.groups(_large_enough(strata, slides), "region")
    divided = []
    for slide, (place, near) in zip(slides, squares, strict=True):
        scan = _scan(slide)
        own = _sides_of(place, scan, sides)
        others = [_sides_of(points, scan, sides) for points in near]
        # A square without patches is on no side, and no neighbour to keep away from.
        mixed = np.any([(other != own) & (other != DROPPED) for other in others], axis=0)
        divided.append(replace(slide, sides=np.where(mixed, DROPPED, own).astype(np.int8)))
    return divided


def _labelled_squares(
    slide: SlideSplit, place: NDArray[np.int64], fit: NDArray[np.bool_], classes: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    """The squares that patches lie in, (N, 2), each with the class that most of its patches have."""
    squares, square = np.unique(place[fit], axis=0, return_inverse=True)
    if slide.labels is None:
        names = [slide.label] * len(squares)
    else:
        votes = np.zeros((len(squares), len(classes)), np.int64)
        np.add.at(votes, (square.ravel(), slide.labels[fit]), 1)
        names = [classes[n] for n in votes.argmax(axis=1).tolist()]
    for name, (x, y) in zip(names, squares.tolist(), strict=True):
        yield name, x, y


def _sides_of(
    squares: NDArray[np.int64], scan: str, sides: Mapping[tuple[str, int, int], int]
) -> NDArray[np.int8]:
    """(N,) the side of each of (N, 2) squares, `DROPPED` for those without patches."""
    return np.array([sides.get((scan, x, y), DROPPED) for x, y in squares.tolist()], np.int8)


def _scan(slide: SlideSplit) -> str:
    """Copies of one scan share their squares."""
    return slide.content or f"{slide.store}/{slide.id}"


def _squares(
    slide: SlideSplit, store: SampleSource, region: Micrometres
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """The square of each patch's centre, (N, 2), and the squares of every point within a patch width of the patch.

    A patch and its margin are three patch widths wide. Points a patch width apart over that, or closer where squares are
    smaller, meet every square that it touches.
    """
    record = store.records[slide.slide]
    if (
        not isinstance(record, SlideRecord)  # bags have no place on a slide
        or not record.mpp
        or not record.read_size
        or not record.downsample
    ):
        raise UsageError(
            f"slide {slide.id} has no mpp", todo="ingest it with one, or split by something else"
        )
    index = store.index(slide.slide)
    side = region / record.mpp  # level-0 pixels
    width = record.read_size * record.downsample
    corners = np.stack([index["x_l0"], index["y_l0"]], axis=1).astype(np.float64)
    place = np.floor((corners + width / 2) / side).astype(np.int64)
    points = max(4, int(np.ceil(3 * width / side)) + 1)
    offsets = np.linspace(-width, 2 * width, points)
    near = [
        np.floor((corners + np.array([dx, dy])) / side).astype(np.int64)
        for dx in offsets
        for dy in offsets
    ]
    return place, near
