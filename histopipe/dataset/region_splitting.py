"""Splitting by region: squares of a slide are assigned to sides, with a gap between the sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.assignment import Assignment, copies_note, merge_small_strata
from histopipe.dataset.labelling import Candidates
from histopipe.dataset.samples import SampleSource
from histopipe.dataset.splits import DROPPED, SlideSplit
from histopipe.errors import UsageError
from histopipe.geometry import Micrometres
from histopipe.store.record import SlideRecord


def split_by_region(
    found: Candidates,
    stores: Sequence[SampleSource],
    assignment: Assignment,
    region: Micrometres,
) -> list[SlideSplit]:
    """Assign squares of slides to the sides; patches within a patch width of another side are left out.

    Raises:
        UsageError: a slide has no scale, or bags are split.
        HistopipeError: a class has too few squares.
    """
    slides = found.slides
    squares = [_squares(slide, stores[slide.store], region) for slide in slides]
    strata: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    for slide, fit, (place, _) in zip(slides, found.fit, squares, strict=True):
        for name, x, y in _labelled_squares(slide, place, fit, found.classes):
            strata[name].add((_slide_key(slide), x, y))
    merged = merge_small_strata(strata, slides)
    notes = {}
    for name, units in merged.items():
        keys = {key for key, _, _ in units}
        notes[name] = copies_note([s for s in slides if _slide_key(s) in keys], slides)
    sides = assignment.assign(merged, "region", notes)
    divided = []
    for slide, (place, near) in zip(slides, squares, strict=True):
        key = _slide_key(slide)
        own = _sides_of(place, key, sides)
        others = [_sides_of(points, key, sides) for points in near]
        # A square without patches is on no side, and no neighbour to keep away from.
        mixed = np.any([(other != own) & (other != DROPPED) for other in others], axis=0)
        divided.append(replace(slide, sides=np.where(mixed, DROPPED, own).astype(np.int8)))
    return divided


def _labelled_squares(
    slide: SlideSplit, place: NDArray[np.int64], fit: NDArray[np.bool_], classes: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    """Yield the class and the coordinates of each square that has patches; the class is that of most of them."""
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
    squares: NDArray[np.int64], key: str, sides: Mapping[tuple[str, int, int], int]
) -> NDArray[np.int8]:
    """Return the side of each of (N, 2) squares: (N,) int8, `DROPPED` for those without patches."""
    return np.array([sides.get((key, x, y), DROPPED) for x, y in squares.tolist()], np.int8)


def _slide_key(slide: SlideSplit) -> str:
    """Return what identifies the squares of a slide: copies of one slide share them."""
    return slide.content or f"{slide.store}/{slide.id}"


def _squares(
    slide: SlideSplit, store: SampleSource, region: Micrometres
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return the square of each patch's centre, (N, 2), and the squares of points within a patch width of the patch.

    A patch and its margin are three patch widths wide. A grid of points over it, a patch width apart or closer where squares
    are smaller, meets every square that it touches.
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
