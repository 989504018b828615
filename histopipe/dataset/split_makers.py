"""Making a split: by patient, site or slide, by region of a slide, or by patch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.hashing import combine
from histopipe.dataset.splits import (
    DROPPED,
    SIDES,
    SlideSplit,
    SplitBy,
    Splits,
    patches_crc,
    too_few,
)
from histopipe.errors import NothingToDo, UsageError
from histopipe.geometry import Micrometres
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store

FRACTIONS = (0.7, 0.15, 0.15)
REGION = Micrometres(250.0)

Group = TypeVar("Group", bound=Hashable)


def make_splits(
    stores: Sequence[Store],
    *,
    split_by: SplitBy,
    seed: int,
    labels: Mapping[str, tuple[str | None, str | None, str | None]] | None = None,
    fractions: tuple[float, float, float] = FRACTIONS,
    region: Micrometres = REGION,
) -> Splits:
    """Split the labelled slides of stores, the same way for the same seed.

    Args:
        stores: what to train on.
        split_by: what stays together.
        seed: decides which goes where.
        labels: label, patient and site by slide id, instead of the recorded ones.
        fractions: of train, validation and test; groups are counted, not patches.
        region: side of the squares for "region".

    Raises:
        NothingToDo: fewer than two classes, or a class too small to be on every side.
        UsageError: splitting by site without sites, or by region without a scale.
    """
    slides = [_described(o, s, n, labels) for o, s in enumerate(stores) for n in s.complete]
    labelled = [slide for slide in slides if slide is not None]
    classes = class_names_of(labelled)
    if len(classes) < 2:
        raise NothingToDo(
            "nothing to tell apart", found=f"labels {', '.join(classes) or 'none'}",
            expected="labelled slides of two classes or more",
            todo="give a labels.csv (columns slide,label) with --labels, "
            "or put the slides of each class in a folder of its name and ingest again",
        )  # fmt: skip
    if split_by == "region":
        divided = _by_region(labelled, stores, fractions, seed, region)
    elif split_by == "patch":
        divided = _by_patch(labelled, fractions, seed)
    else:
        divided = _by_group(labelled, split_by, fractions, seed)
    divided = [_without_unreadable(slide, stores) for slide in divided]
    uuids = tuple(store.uuid for store in stores)
    splits = Splits(split_by, seed, fractions, uuids, tuple(classes), tuple(divided))
    _refuse_empty_sides(splits)
    return splits


def _refuse_empty_sides(splits: Splits) -> None:
    """Groups were dealt to every side, but a group may bring no patch: few of them, or all too near another side's."""
    counts = splits.count()
    for side, fraction in zip(SIDES, splits.fractions, strict=True):
        for name in splits.classes:
            if fraction and not counts[side][name]:
                raise NothingToDo(
                    f"splitting by {splits.split_by} leaves no {name!r} patch for {side}",
                    todo="add slides, take smaller patches, or split otherwise"
                    + (" (a larger --region-um)" if splits.split_by == "region" else ""),
                )


def class_names_of(slides: Sequence[SlideSplit]) -> list[str]:
    """The classes of slides that have patches, sorted."""
    return sorted({slide.label for slide in slides})


def _described(
    ordinal: int,
    store: Store,
    number: int,
    labels: Mapping[str, tuple[str | None, str | None, str | None]] | None,
) -> SlideSplit | None:
    """A slide with everything but its sides; None if it is unlabelled or empty."""
    record: SlideRecord = store.records[number]
    label, patient, site = (
        (record.label, record.patient, record.site)
        if labels is None
        else labels.get(record.id, (None, None, None))
    )
    if not label or not record.stored:
        return None
    return SlideSplit(
        ordinal, number, record.id, label, patient or record.patient or record.id, site or record.site,
        record.content, record.planned, patches_crc(store, number),
        np.full(record.planned, DROPPED, np.int8),
    )  # fmt: skip


def allocate(
    strata: Mapping[str, Sequence[Group]],
    fractions: tuple[float, float, float],
    seed: int,
    unit: str,
) -> dict[Group, int]:
    """Give each group a side, each stratum on its own, so that every class is on every side.

    Raises:
        NothingToDo: a stratum has fewer groups than sides.
    """
    # Late: a third of a second that only making a split needs.
    from sklearn.model_selection import train_test_split

    sides: dict[Group, int] = {}
    wanted = [number for number, fraction in enumerate(fractions) if fraction > 0]
    for label in sorted(strata):
        rest = list(strata[label])
        total = len(rest)
        if total < len(wanted):
            raise too_few(label, total, unit, len(wanted))
        # Test first, then validation; what is left trains. One group at least for each.
        for number in wanted[:0:-1]:
            size = max(1, round(fractions[number] * total))
            size = min(size, len(rest) - wanted.index(number))
            state = int(combine(seed, number)) & 0x7FFFFFFF
            rest, chosen = train_test_split(rest, test_size=size, random_state=state)
            sides |= dict.fromkeys(chosen, number)
        sides |= dict.fromkeys(rest, wanted[0])
    return sides


def _by_group(
    slides: list[SlideSplit], split_by: SplitBy, fractions: tuple[float, float, float], seed: int
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
        strata[Counter(slide.label for slide in inside).most_common(1)[0][0]].append(group)
    sides = allocate(strata, fractions, seed, split_by)
    return [
        replace(slide, sides=np.full(slide.count, sides[group], np.int8))
        for slide, group in zip(slides, groups, strict=True)
    ]


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


def _by_patch(
    slides: list[SlideSplit], fractions: tuple[float, float, float], seed: int
) -> list[SlideSplit]:
    """Every slide on every side, patches dealt out at random; copies of a scan are dealt alike."""
    divided = []
    for slide in slides:
        name = slide.content or slide.id
        rng = np.random.default_rng([seed, *name.encode()])
        ends = np.round(np.cumsum(fractions) * slide.count).astype(int)
        place = rng.permutation(slide.count)
        sides = np.searchsorted(ends, place, side="right").astype(np.int8)
        divided.append(replace(slide, sides=np.minimum(sides, len(SIDES) - 1).astype(np.int8)))
    return divided


def _by_region(
    slides: list[SlideSplit],
    stores: Sequence[Store],
    fractions: tuple[float, float, float],
    seed: int,
    region: Micrometres,
) -> list[SlideSplit]:
    """Whole squares of a slide go to one side; patches within a patch width of another side are left out."""
    squares = [_squares(slide, stores[slide.store], region) for slide in slides]
    strata: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    for slide, (place, _) in zip(slides, squares, strict=True):
        strata[slide.label] |= {(_scan(slide), x, y) for x, y in np.unique(place, axis=0).tolist()}
    sides = allocate({k: sorted(v) for k, v in strata.items()}, fractions, seed, "region")
    divided = []
    for slide, (place, near) in zip(slides, squares, strict=True):
        scan = _scan(slide)
        own = _sides_of(place, scan, sides)
        others = [_sides_of(points, scan, sides) for points in near]
        # A square without patches is on no side, and no neighbour to keep away from.
        mixed = np.any([(other != own) & (other != DROPPED) for other in others], axis=0)
        divided.append(replace(slide, sides=np.where(mixed, DROPPED, own).astype(np.int8)))
    return divided


def _sides_of(
    squares: NDArray[np.int64], scan: str, sides: Mapping[tuple[str, int, int], int]
) -> NDArray[np.int8]:
    """(N,) the side of each of (N, 2) squares, `DROPPED` for those without patches."""
    return np.array([sides.get((scan, x, y), DROPPED) for x, y in squares.tolist()], np.int8)


def _scan(slide: SlideSplit) -> str:
    """Copies of one scan share their squares."""
    return slide.content or f"{slide.store}/{slide.id}"


def _squares(
    slide: SlideSplit, store: Store, region: Micrometres
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """The square of each patch's centre, (N, 2), and the squares of every point within a patch width of the patch.

    A patch and its margin are three patch widths wide. Points a patch width apart over that, or closer where squares are
    smaller, meet every square that it touches.
    """
    record = store.records[slide.slide]
    if not record.mpp or not record.read_size or not record.downsample:
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


def _without_unreadable(slide: SlideSplit, stores: Sequence[Store]) -> SlideSplit:
    store = stores[slide.store]
    if not store.records[slide.slide].unreadable:
        return slide
    lost = store.index(slide.slide)["length"] == 0
    return replace(slide, sides=np.where(lost, DROPPED, slide.sides).astype(np.int8))
