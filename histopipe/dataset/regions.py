"""Sides of patches by region: the squares of a slide are assigned to sides, and patches near another side are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.assignment import mark_patches
from histopipe.dataset.sample_table import SampleSource
from histopipe.dataset.splits import DROPPED, SlideSplit
from histopipe.errors import UsageError
from histopipe.geometry import Micrometres
from histopipe.store.record import SlideRecord


def sides_by_region(
    slides: Sequence[SlideSplit],
    marks: NDArray[np.bool_],
    stores: Sequence[SampleSource],
    region: Micrometres,
    assign: Callable[[NDArray[np.int64]], NDArray[np.int8]],
) -> list[list[NDArray[np.int8]]]:
    """Return the sides of the patches of each slide, for each fold, by the square that contains their centre.

    Patches within a patch width of another side are left out. `marks` are (N, Q) of the slides; `assign` returns the
    sides of (U, Q) patches of squares, (U,) for each fold.
    """
    squares = [_squares(slide, stores[slide.store], region) for slide in slides]
    # Copies of one slide have the same squares.
    keys = [slide.content or f"{slide.store}/{slide.id}" for slide in slides]
    patches: dict[tuple[str, int, int], NDArray[np.int64]] = {}
    for slide, key, (position, _), row in zip(slides, keys, squares, marks, strict=True):
        fit = slide.sides != DROPPED
        places, place_of = np.unique(position[fit], axis=0, return_inverse=True)
        counts = np.zeros((len(places), len(row)), np.int64)
        np.add.at(counts, place_of.ravel(), mark_patches(slide, row)[fit])
        for (x, y), count in zip(places.tolist(), counts, strict=True):
            patches[key, x, y] = patches.get((key, x, y), 0) + count
    folds = []
    for assigned in assign(np.array(list(patches.values()))):
        sides = dict(zip(patches, assigned.tolist(), strict=True))
        folds.append(
            [
                _sides_apart(key, position, nearby, sides)
                for key, (position, nearby) in zip(keys, squares, strict=True)
            ]
        )
    return folds


def _sides_apart(
    key: str,
    position: NDArray[np.int64],
    nearby: Sequence[NDArray[np.int64]],
    sides: Mapping[tuple[str, int, int], int],
) -> NDArray[np.int8]:
    """Return the sides of the patches of a slide, `DROPPED` for those near another side."""
    own_sides = _sides_of(position, key, sides)
    nearby_sides = [_sides_of(points, key, sides) for points in nearby]
    # A square without patches is on no side, so patches need no distance from it.
    mixed = np.any([(other != own_sides) & (other != DROPPED) for other in nearby_sides], axis=0)
    return np.where(mixed, DROPPED, own_sides).astype(np.int8)


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
