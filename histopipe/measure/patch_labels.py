"""The class of each patch that outlines cover.

Where outlines overlap, a point belongs to the outline that takes precedence, see `histopipe.annotations.regions`. Areas are
exact: polygons are clipped, not rasterized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import shapely
import shapely.geometry
from numpy.typing import NDArray

from histopipe.annotations.regions import MOST_NOTES, Outline, Regions, class_names, pieces

NO_CLASS = -1
NO_LABELS = "labels no patch"
"""Part of the note on a file that labels no patch."""
_ROUNDING = 1e-6
"""Tolerance of shares: the share of a completely covered patch may be slightly below 1."""
_MOST_PATCHES, _LEAST_PATCHES = 20_000, 64
_MOST_PAIRS = 1_000_000
"""Limits of a batch: patches, and pairs of a patch with a class or a piece. A pair takes some hundred bytes."""
_SAMPLED = 200
"""Number of squares from which the size of a batch is estimated."""


@dataclass(frozen=True, slots=True)
class PatchLabels:
    """Classes of a slide's patches.

    `classes` are sorted. Labels are (N,) indices in `classes`; -1 for none. `covered` is the largest share of the patch
    that one class covers, (N,) 0 to 1, also if it is below the threshold.
    """

    classes: tuple[str, ...]
    label: NDArray[np.int32]
    covered: NDArray[np.float32]

    def counts(self) -> dict[str, int]:
        """Return the number of patches by class, without classes that have none."""
        counts = np.bincount(self.label[self.label >= 0], minlength=len(self.classes)).tolist()
        return {name: count for name, count in zip(self.classes, counts, strict=True) if count}

    def numbered(self, numbers: Mapping[str, int]) -> NDArray[np.int32]:
        """Return the labels with the given class numbers, (N,) int32; -1 for no label, or a class without a number."""
        return np.array(
            [*(numbers.get(name, NO_CLASS) for name in self.classes), NO_CLASS], np.int32
        )[self.label]


def annotation_notes(path: Path, regions: Regions, labels: PatchLabels) -> list[str]:
    """Return the notes on a slide's annotation file for its record, first whether it labels no patch."""
    notes = []
    if (labels.classes or regions.roi is None) and len(labels.label) and not labels.counts():
        classes = ", ".join(labels.classes[:5])
        reason = (
            f"too little of them is covered by {classes}"
            if classes
            else "no outline on the slide has a class"
        )
        notes.append(f"{path.name} {NO_LABELS} of {len(labels.label)}: {reason}")
    if regions.notes:
        omitted, texts = len(regions.notes) - MOST_NOTES, "; ".join(regions.notes[:MOST_NOTES])
        notes.append(f"{path.name}: {texts}" + f" and {omitted} more" * (omitted > 0))
    return notes


def label_patches(
    outlines: Sequence[Outline],
    x_l0: NDArray[np.integer],
    y_l0: NDArray[np.integer],
    side_l0: float,
    *,
    threshold: float,
) -> PatchLabels:
    """Return the class that covers most of each patch, if its share is at least `threshold`, above 0 to 1.

    `outlines` are those of `Regions`, or only those of its region of interest. If two classes cover the same share, the
    first by name is used. `x_l0` and `y_l0` are (N,) top left corners.
    """
    classes = class_names(outlines)
    label = np.full(len(x_l0), NO_CLASS, np.int32)
    covered = np.zeros(len(x_l0), np.float32)
    if classes:
        # Batch by batch, since the shares of all classes of all patches may take gigabytes.
        best = [
            (shares.argmax(axis=1), shares.max(axis=1))
            for shares in Coverage(outlines, classes).shares(x_l0, y_l0, side_l0)
        ]
        label[:], covered[:] = map(np.concatenate, zip(*best, strict=True))
        label[covered < threshold - _ROUNDING] = NO_CLASS
    return PatchLabels(classes, label, covered)


class Coverage:
    """Shares of patches that each of `classes` covers. A point belongs to the first outline that contains it.

    It is computed in one thread: slides are labelled in parallel, by processes, and GEOS crashes if two threads use one
    prepared geometry.
    """

    def __init__(self, outlines: Sequence[Outline], classes: Sequence[str]) -> None:
        self._classes = len(classes)
        number = {name: i for i, name in enumerate(classes)}
        # Outlines of no class still hide those after them; their area is counted in an extra last column.
        self._class = np.array([number.get(o.name or "", len(classes)) for o in outlines], int)
        parts = [list(pieces(outline.area)) for outline in outlines]
        self._rank = np.repeat(np.arange(len(outlines)), [len(part) for part in parts])
        self._pieces = np.array(list(chain.from_iterable(parts)), object)
        shapely.prepare(self._pieces)
        self._tree = shapely.STRtree(self._pieces)

    def shares(
        self, x: NDArray[np.integer], y: NDArray[np.integer], side: float
    ) -> Iterator[NDArray[np.float64]]:
        """Yield the share of each square that each class covers, 0 to 1, as (n, C) per batch of squares.

        `x` and `y` are (N,) left and top edges. They and the side are in level-0 pixels. There is at least one batch:
        it is empty for a slide without patches.
        """
        # A batch has as many squares as fit into memory with the pieces that a sample of the squares meets.
        sample = np.unique(np.linspace(0, len(x) - 1, min(_SAMPLED, len(x))).astype(int))
        left, top = x[sample], y[sample]
        hits, _ = self._tree.query(shapely.box(left, top, left + side, top + side))
        pairs = self._classes + 1 + len(hits) / max(1, len(sample))
        batch = int(np.clip(_MOST_PAIRS / pairs, _LEAST_PATCHES, _MOST_PATCHES))
        for start in range(0, max(1, len(x)), batch):
            part = slice(start, start + batch)
            yield np.clip(
                self._areas(x[part], y[part], side)[:, : self._classes] / (side * side), 0, 1
            )

    def _areas(
        self, x: NDArray[np.integer], y: NDArray[np.integer], side: float
    ) -> NDArray[np.float64]:
        """Return the area of each class in each square, (n, C + 1) square pixels; the last column is for no class."""
        cells = shapely.box(x, y, x + side, y + side)
        pieces = self._pieces
        cell, piece = self._tree.query(cells)
        rank = self._rank[piece]
        inside = shapely.covers(pieces[piece], cells[cell])
        # An outline that covers a whole square hides all outlines after it there.
        none = len(self._class)
        whole = np.full(len(x), none)
        np.minimum.at(whole, cell[inside], rank[inside])
        cut = np.flatnonzero(~inside & (rank < whole[cell]))
        cut = cut[shapely.intersects(pieces[piece[cut]], cells[cell[cut]])]
        cut = cut[np.lexsort((rank[cut], cell[cut]))]
        parts = shapely.intersection(pieces[piece[cut]], cells[cell[cut]])
        areas = self._visible_areas(cell[cut], rank[cut], parts, len(x))
        covered = np.flatnonzero(whole < none)
        areas[covered, self._class[whole[covered]]] += side * side - areas[covered].sum(axis=1)
        return areas

    def _visible_areas(
        self,
        cell: NDArray[np.int64],
        rank: NDArray[np.int64],
        parts: NDArray[np.object_],
        count: int,
    ) -> NDArray[np.float64]:
        """Return the visible areas of parts by square and class, (count, C + 1); each part hides those after it.

        The parts are sorted by square and rank. The first part of all squares is processed at once, then the second.
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
            unfinished = sizes[sizes > turn] > turn + 1
            taken[where[unfinished]] = (
                part[unfinished]
                if turn == 0
                else shapely.union(taken[where[unfinished]], part[unfinished])
            )
        return areas
