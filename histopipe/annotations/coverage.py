"""How much of each patch belongs to each class, exactly: polygons are cut, not rasterised."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local

import numpy as np
import shapely
from numpy.typing import NDArray

from histopipe.annotations.outline import Outline

_MOST_POINTS = 256
"""Of a piece that patches are cut with: cutting takes time by the points of both."""
_MOST_AT_ONCE, _LEAST_AT_ONCE = 20_000, 64
_MOST_MEETINGS = 1_000_000
"""Patches at a time, and classes and pieces that they may meet together: each takes some hundred bytes."""
_SAMPLED = 200


class Coverage:
    """Outlines, ready to be laid over patches.

    A place belongs to the first outline that holds it.

    Args:
        outlines: in the order in which places are given to them.
        classes: whose shares are wanted.
    """

    def __init__(self, outlines: Sequence[Outline], classes: Sequence[str]) -> None:
        number = {name: i for i, name in enumerate(classes)}
        self._classes = len(classes)
        # What belongs to none of the classes takes its place all the same; it is counted behind them.
        self._class = np.array(
            [number.get(it.name or "", len(classes)) for it in outlines], np.int64
        )
        pieces = [(rank, piece) for rank, it in enumerate(outlines) for piece in _pieces(it.area)]
        self._rank = np.array([rank for rank, _ in pieces], np.int64)
        self._stored = shapely.to_wkb(np.array([piece for _, piece in pieces], object))
        self._own = local()

    def shares(
        self, x: NDArray[np.integer], y: NDArray[np.integer], side: float
    ) -> Iterator[NDArray[np.float64]]:
        """Share of every square that belongs to each class, 0 to 1: (n, C) for some squares after the others.

        Args:
            x, y: (N,) left and top edges of the squares, level-0 pixels.
            side: of every square.
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
        """How many squares to look at together, by how many pieces some of them meet."""
        some = np.unique(np.linspace(0, len(x) - 1, min(_SAMPLED, len(x))).astype(int))
        _, tree = self._prepared()
        met = sum(
            len(tree.query(shapely.box(x[i], y[i], x[i] + side, y[i] + side)))
            for i in some.tolist()
        )
        each = self._classes + 1 + met / max(1, len(some))
        return int(np.clip(_MOST_MEETINGS / each, _LEAST_AT_ONCE, _MOST_AT_ONCE))

    def _prepared(self) -> tuple[NDArray[np.object_], shapely.STRtree]:
        """The pieces and their index, this thread's own: GEOS prepares a geometry as it is first asked, and two threads at one
        crash.
        """
        if not hasattr(self._own, "pieces"):
            self._own.pieces = shapely.from_wkb(self._stored)
            shapely.prepare(self._own.pieces)
            self._own.tree = shapely.STRtree(self._own.pieces)
        return self._own.pieces, self._own.tree

    def _areas(
        self, x: NDArray[np.integer], y: NDArray[np.integer], side: float
    ) -> NDArray[np.float64]:
        """(n, C + 1) square pixels."""
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
        """(count, C + 1) areas of parts, sorted by square and rank, of which each has what those before it left.

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
    """An area cut into pieces of few points, which together are the area."""
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
        halves = (
            (shapely.box(left, top, middle, bottom), shapely.box(middle, top, right, bottom))
            if across
            else (shapely.box(left, top, right, middle), shapely.box(left, middle, right, bottom))
        )
        for half in halves:
            waiting.extend(shapely.get_parts(shapely.intersection(part, half)))
