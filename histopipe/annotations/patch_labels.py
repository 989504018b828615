"""The class of each patch, by what is drawn over it. Exact: polygons are cut, not rasterized."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local

import numpy as np
import shapely
from numpy.typing import NDArray

from histopipe.annotations.outline import Outline
from histopipe.annotations.regions import Regions

NO_CLASS = -1
_HAIR = 1e-6
"""A patch that lies wholly in a class may come out a hair less than whole."""
_MOST_POINTS = 256
"""Of a piece that patches are cut with: cutting takes time by the points of both."""
_MOST_AT_ONCE, _LEAST_AT_ONCE = 20_000, 64
_MOST_MEETINGS = 1_000_000
"""Patches at a time, and classes and pieces that they may meet together: each takes some hundred bytes."""
_SAMPLED = 200


@dataclass(frozen=True, slots=True)
class PatchLabels:
    """Classes of a slide's patches.

    Labels are (N,) places in `classes`, which are sorted; -1 for none. `covered` is the largest share of the patch that one
    class covers, (N,) 0 to 1, whether that is enough or not.
    """

    classes: tuple[str, ...]
    label: NDArray[np.int32]
    covered: NDArray[np.float32]

    def counts(self) -> dict[str, int]:
        """Count the patches by class, of those classes that have any."""
        found = np.bincount(self.label[self.label >= 0], minlength=len(self.classes)).tolist()
        return {name: count for name, count in zip(self.classes, found, strict=True) if count}

    def numbered(self, numbers: Mapping[str, int]) -> NDArray[np.int32]:
        """Return the labels by other numbers of the classes, (N,) int32; -1 for none, and for a class that has none."""
        found = [numbers.get(name, NO_CLASS) for name in self.classes]
        return np.array([*found, NO_CLASS], np.int32)[self.label]


def label_patches(
    regions: Regions,
    x_l0: NDArray[np.integer],
    y_l0: NDArray[np.integer],
    side_l0: float,
    *,
    threshold: float,
) -> PatchLabels:
    """Return the class that covers most of each patch, where that is at least `threshold` of it, above 0 to 1.

    Of two that cover equally much, it is the first by name. `x_l0` and `y_l0` are (N,) top left corners.
    """
    classes = regions.classes
    label = np.full(len(x_l0), NO_CLASS, np.int32)
    covered = np.zeros(len(x_l0), np.float32)
    if not classes:
        return PatchLabels(classes, label, covered)
    found = [
        (shares.argmax(axis=1), shares.max(axis=1))
        for shares in Coverage(regions.outlines, classes).shares(x_l0, y_l0, side_l0)
    ]
    label[:] = np.concatenate([it[0] for it in found])
    covered[:] = np.concatenate([it[1] for it in found])
    label[covered < threshold - _HAIR] = NO_CLASS
    return PatchLabels(classes, label, covered)


def roi_shares(
    regions: Regions, x_l0: NDArray[np.integer], y_l0: NDArray[np.integer], side_l0: float
) -> NDArray[np.float32]:
    """Return the share of each patch, (N,) 0 to 1, that lies in the region of interest."""
    outlines = regions.roi or ()
    names = sorted({it.name for it in outlines if it.name is not None})
    if not names:
        return np.zeros(len(x_l0), np.float32)
    shares = [it[:, 0] for it in Coverage(outlines, names).shares(x_l0, y_l0, side_l0)]
    return np.concatenate(shares).astype(np.float32)


class Coverage:
    """Shares of patches that belong to `classes`. A place belongs to the first outline that holds it."""

    def __init__(self, outlines: Sequence[Outline], classes: Sequence[str]) -> None:
        self._classes = len(classes)
        number = {name: i for i, name in enumerate(classes)}
        # What belongs to none of the classes takes its place all the same; it is counted behind them.
        self._class = np.array([number.get(it.name or "", len(classes)) for it in outlines], int)
        pieces = [(rank, piece) for rank, it in enumerate(outlines) for piece in _pieces(it.area)]
        self._rank = np.array([rank for rank, _ in pieces], np.int64)
        self._stored = shapely.to_wkb(np.array([piece for _, piece in pieces], object))
        self._own = local()

    def shares(
        self, x: NDArray[np.integer], y: NDArray[np.integer], side: float
    ) -> Iterator[NDArray[np.float64]]:
        """Yield the share of each square that belongs to each class, 0 to 1, as (n, C) for some squares after the others.

        `x` and `y` are (N,) left and top edges, in level-0 pixels as the side.
        """
        at_once = self._at_once(x, y, side)

        def some(start: int) -> NDArray[np.float64]:
            here = slice(start, start + at_once)
            areas = self._areas(x[here], y[here], side)[:, : self._classes]
            return np.clip(areas / (side * side), 0, 1)

        starts = range(0, len(x), at_once)
        # shapely lets go of Python's lock in all that takes time.
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), max(1, len(starts)))) as pool:
            yield from pool.map(some, starts)

    def _at_once(self, x: NDArray[np.integer], y: NDArray[np.integer], side: float) -> int:
        """Return how many squares to look at together, by how many pieces some of them meet."""
        some = np.unique(np.linspace(0, len(x) - 1, min(_SAMPLED, len(x))).astype(int))
        left, top = x[some], y[some]
        met, _ = self._prepared()[1].query(shapely.box(left, top, left + side, top + side))
        each = self._classes + 1 + len(met) / max(1, len(some))
        return int(np.clip(_MOST_MEETINGS / each, _LEAST_AT_ONCE, _MOST_AT_ONCE))

    def _prepared(self) -> tuple[NDArray[np.object_], shapely.STRtree]:
        """Return this thread's own pieces and their index: GEOS prepares a geometry at the first query, and two threads crash."""
        if not hasattr(self._own, "pieces"):
            self._own.pieces = shapely.from_wkb(self._stored)
            shapely.prepare(self._own.pieces)
            self._own.tree = shapely.STRtree(self._own.pieces)
        return self._own.pieces, self._own.tree

    def _areas(
        self, x: NDArray[np.integer], y: NDArray[np.integer], side: float
    ) -> NDArray[np.float64]:
        """Return (n, C + 1) square pixels."""
        cells = shapely.box(x, y, x + side, y + side)
        pieces, tree = self._prepared()
        cell, piece = tree.query(cells)
        rank = self._rank[piece]
        inside = shapely.covers(pieces[piece], cells[cell])
        # What covers a square whole hides all that comes after it there.
        nothing = len(self._class)
        whole = np.full(len(x), nothing)
        np.minimum.at(whole, cell[inside], rank[inside])
        cut = np.flatnonzero(~inside & (rank < whole[cell]))
        cut = cut[shapely.intersects(pieces[piece[cut]], cells[cell[cut]])]
        cut = cut[np.lexsort((rank[cut], cell[cut]))]
        parts = shapely.intersection(pieces[piece[cut]], cells[cell[cut]])
        areas = self._painted(cell[cut], rank[cut], parts, len(x))
        under = np.flatnonzero(whole < nothing)
        areas[under, self._class[whole[under]]] += side * side - areas[under].sum(axis=1)
        return areas

    def _painted(
        self,
        cell: NDArray[np.int64],
        rank: NDArray[np.int64],
        parts: NDArray[np.object_],
        count: int,
    ) -> NDArray[np.float64]:
        """Return (count, C + 1) areas of parts, sorted by square and rank; each has what those before it left.

        All squares at once: the first part of each, then the second, and so on.
        """
        areas = np.zeros((count, self._classes + 1))
        first = np.flatnonzero(np.diff(cell, prepend=-1))
        taken = np.full(count, None, object)
        sizes = np.diff(first, append=len(cell))
        for turn in range(sizes.max(initial=0)):
            now = first[sizes > turn] + turn
            where, part = cell[now], parts[now]
            left = part if turn == 0 else shapely.difference(part, taken[where])
            areas[where, self._class[rank[now]]] += shapely.area(left)
            more = sizes[sizes > turn] > turn + 1
            taken[where[more]] = (
                part[more] if turn == 0 else shapely.union(taken[where[more]], part[more])
            )
        return areas


def _pieces(area: shapely.Geometry) -> Iterator[shapely.Geometry]:
    """Yield pieces of few points that together are the area."""
    waiting = list(shapely.get_parts(area))
    while waiting:
        part = waiting.pop()
        if part.is_empty or not isinstance(part, shapely.Polygon):
            continue  # cutting leaves lines where pieces only touch
        if shapely.get_num_coordinates(part) <= _MOST_POINTS:
            yield part
            continue
        left, top, right, bottom = part.bounds
        across = right - left >= bottom - top
        middle = (left + right) / 2 if across else (top + bottom) / 2
        low = (middle, bottom) if across else (right, middle)
        high = (middle, top) if across else (left, middle)
        for half in (shapely.box(left, top, *low), shapely.box(*high, right, bottom)):
            waiting.extend(shapely.get_parts(shapely.intersection(part, half)))
