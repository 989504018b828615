"""Outlines of a file as valid polygons, the regions of a slide, and the class of each patch that they cover.

Regions are outlines in the slide's frame, ordered by precedence. Areas are exact: polygons are clipped, not rasterized.

Where outlines overlap, a point belongs to the class of the smallest outline that contains it: a gland inside a tumour
inside tissue is labelled gland. If two have the same size, the later one in the file takes precedence. Excluded areas
belong to no class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import shapely
import shapely.geometry
from numpy.typing import NDArray
from shapely.affinity import translate
from shapely.geometry.base import BaseGeometry

from histopipe.annotations.rules import AnnotationRules
from histopipe.errors import UsageError
from histopipe.geometry import RegionL0, Size
from histopipe.slides.slide import Turn
from histopipe.system.files import shown
from histopipe.system.table_files import nfc

Point = tuple[float, float]
Ring = Sequence[Point]

IGNORED = "Ignore*"
"""QuPath's class for areas that are excluded from every analysis."""
MOST_COORDINATE = 1e8
"""Largest coordinate, in pixels. Slides are smaller, and areas of larger coordinates lose precision."""
_LEAST_POINTS = 3
_SEGMENTS, _MOST_CROSSINGS = 100, 50
"""Number of segments of an outline that are checked, and how many other segments each may meet on average."""
MOST_NOTES = 10
"""Maximum number of notes on a file in a slide's record, and of properties in a note."""
_PART = 10
"""Outlines that are all inside the first tenth of the slide's width and height were probably drawn at another level."""
NO_CLASS = -1
NO_LABELS = "labels no patch"
"""Part of the note on a file that labels no patch."""
_ROUNDING = 1e-6
"""Tolerance of shares: the share of a completely covered patch may be slightly below 1."""
_MOST_POINTS = 256
"""Most points of a piece of an outline. The time to clip a patch grows with the points."""
_MOST_PATCHES, _LEAST_PATCHES = 20_000, 64
_MOST_PAIRS = 1_000_000
"""Limits of a batch: patches, and pairs of a patch with a class or a piece. A pair takes some hundred bytes."""
_SAMPLED = 200
"""Number of squares from which the size of a batch is estimated."""


@dataclass(frozen=True, slots=True)
class Outline:
    """One outlined area: its name in the file (for messages), its class, and a valid area in the file's level-0 frame.

    An excluded area belongs to no class, even where other outlines cover it.
    """

    feature: str
    name: str | None
    area: shapely.Polygon | shapely.MultiPolygon
    excluded: bool = False


@dataclass(slots=True)
class Outlines:
    """Outlines of a file, in file order, and notes on what was repaired or left out.

    `frame` is the origin of the file's coordinates: the corner of the scanned area ("bounds", as in QuPath), or of level
    0 ("slide").
    `invalid` are the notes on outlines that cross themselves or have no area. `properties` are the names of properties
    that may be the class of outlines without a class.
    """

    frame: Literal["bounds", "slide"]
    entries: list[Outline] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    properties: set[str] = field(default_factory=set)

    def add(
        self,
        feature: str,
        name: str | None,
        polygons: Iterable[Sequence[Ring]],
        *,
        excluded: bool = False,
    ) -> None:
        """Add polygons, each an outer ring and its holes. An invalid outline is repaired or left out, with a note.

        An excluded outline gets no class.

        Raises:
            UsageError: a coordinate is not finite, or too large.
        """
        feature, name = plain(feature), None if excluded or name is None else plain(name)
        parts = []
        for rings in polygons:
            shell, *holes = rings or [()]
            _check_numbers(rings, feature)
            if len(set(shell)) >= _LEAST_POINTS:
                parts.append(
                    shapely.Polygon(shell, [h for h in holes if len(set(h)) >= _LEAST_POINTS])
                )
        drawn = parts[0] if len(parts) == 1 else shapely.MultiPolygon(parts)
        tangled = not drawn.is_valid and any(_crosses_too_often(part) for part in parts)
        area = drawn if tangled else polygonal(drawn)
        if tangled or area.is_empty:
            why = "its outline crosses itself too often" if tangled else "it has no area"
            self.leave_out(feature, why)
            self.invalid.append(self.notes[-1])
            return
        if not drawn.is_valid:
            reason = shapely.is_valid_reason(drawn).split("[")[0].lower()
            self.notes.append(
                f"{feature} repaired ({reason}): {area.area:,.0f} square pixels of level 0"
            )
            self.invalid.append(self.notes[-1])
        self.entries.append(Outline(feature, name, area, excluded))

    def leave_out(self, feature: str, why: str) -> None:
        """Add a note that a feature is left out."""
        self.notes.append(f"{plain(feature)} left out: {why}")


def geojson_features(outlines: Outlines, corner: tuple[int, int]) -> list[dict[str, Any]]:
    """Return outlines as features of QuPath. `corner` is the level-0 pixel of the scanned area's top left corner."""
    left, top = corner if outlines.frame == "slide" else (0, 0)
    named = [
        (IGNORED if outline.excluded else outline.name, outline.area)
        for outline in outlines.entries
    ]
    return [
        {
            "type": "Feature",
            "geometry": shapely.geometry.mapping(translate(area, -left, -top)),
            "properties": {
                "objectType": "annotation",
                **({"classification": {"name": name}} if name else {}),
            },
        }
        for name, area in named
    ]


def turned(outlines: Iterable[Outline], turn: Turn) -> list[Outline]:
    """Return outlines of the stored frame at level 0."""
    return [replace(o, area=shapely.transform(o.area, turn.turned)) for o in outlines]


def polygonal(geometry: BaseGeometry) -> shapely.Polygon | shapely.MultiPolygon:
    """Return the polygons of a geometry, made valid; lines and points are dropped."""
    if not geometry.is_valid:
        # "structure": a line that crosses itself encloses all of its loops, which is what hand-drawn outlines mean.
        geometry = shapely.make_valid(geometry, method="structure", keep_collapsed=False)
    parts = [p for p in shapely.get_parts(geometry) if isinstance(p, shapely.Polygon) and p.area]
    return parts[0] if len(parts) == 1 else shapely.MultiPolygon(parts)


def plain(text: str) -> str:
    """Return a text in NFC that can be encoded and printed: lone surrogates, which JSON allows, are replaced."""
    return nfc(shown(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))


def _crosses_too_often(polygon: shapely.Polygon) -> bool:
    """Return whether a polygon crosses itself so often that repairing it would take quadratic memory and time."""
    for ring in (polygon.exterior, *polygon.interiors):
        points = shapely.get_coordinates(ring)
        lines = np.asarray(shapely.linestrings(np.stack([points[:-1], points[1:]], axis=1)), object)
        tree = shapely.STRtree(lines)
        sample = np.unique(np.linspace(0, len(lines) - 1, _SEGMENTS).astype(int))
        if sum(len(tree.query(line)) for line in lines[sample]) > _MOST_CROSSINGS * len(sample):
            return True
    return False


def _check_numbers(rings: Iterable[Ring], feature: str) -> None:
    for point in chain.from_iterable(rings):
        if not all(math.isfinite(value) and abs(value) <= MOST_COORDINATE for value in point):
            raise UsageError(
                f"{feature}: invalid coordinate", found=point, expected="pixels of level 0"
            )


@dataclass(frozen=True, slots=True)
class Regions:
    """Outlines on a slide, in its level-0 pixels, and notes on what was repaired or left out.

    Outlines are in order of precedence: excluded areas first, then the smaller before the larger.
    `roi` has the outlines of the region of interest; None if there is no such setting.
    """

    outlines: tuple[Outline, ...]
    roi: tuple[Outline, ...] | None
    notes: tuple[str, ...]


def class_names(outlines: Iterable[Outline]) -> tuple[str, ...]:
    """Return the names of the classes of outlines, sorted."""
    return tuple(sorted({outline.name for outline in outlines if outline.name is not None}))


def regions_of(
    outlines: Outlines, rules: AnnotationRules, *, size: Size, bounds: RegionL0
) -> Regions:
    """Return the regions of a slide from outlines; see `read_regions`."""
    notes = list(outlines.notes)
    origin = outlines.frame if rules.annotation_origin == "auto" else rules.annotation_origin
    shift = (bounds.origin.x, bounds.origin.y) if origin == "bounds" else (0, 0)
    named = _named(outlines, rules.unclassified, notes)
    placed = _placed(named, shift, size, notes)
    notes = [*_frame_notes(len(named), placed, size, bounds), *notes]
    placed.reverse()  # the sort is stable: of equal sizes, the later one comes first
    ordered = sorted(placed, key=lambda o: (not o.excluded, o.area.area))
    # Without a region of interest, no name equals it: outlines that are not excluded have a name.
    rest = tuple(outline for outline in ordered if outline.excluded or outline.name != rules.roi)
    of_roi = tuple(outline for outline in ordered if outline.excluded or outline.name == rules.roi)
    return Regions(rest, None if rules.roi is None else of_roi, tuple(notes))


def _frame_notes(count: int, placed: Sequence[Outline], size: Size, bounds: RegionL0) -> list[str]:
    """Return a note if `count` outlines, of which `placed` meet the slide, seem to be in other units than its pixels."""
    advice = f"level 0 has {size} pixels; check the unit of the outlines, and the level at which they were drawn"
    if 2 * len(placed) < count:
        return [f"{count - len(placed)} of {count} outlines are outside the slide: {advice}"]
    if not placed:
        return []
    _, _, right, bottom = shapely.total_bounds([outline.area for outline in placed])
    origin, scanned = bounds.origin, bounds.size
    small = right < origin.x + scanned.width / _PART and bottom < origin.y + scanned.height / _PART
    return [
        f"all outlines are in the first tenth of the slide's width and height: {advice}"
    ] * bool(small)


def _named(outlines: Outlines, unclassified: str | None, notes: list[str]) -> list[Outline]:
    """Return the outlines that have a class or are excluded; the others get the class `unclassified`, if given."""
    nameless = [o for o in outlines.entries if o.name is None and not o.excluded]
    properties = " or ".join(map(plain, sorted(outlines.properties)[:MOST_NOTES]))
    if nameless and unclassified is None:
        notes.append(
            f"{len(nameless)} outlines without a class left out, such as {nameless[0].feature}; "
            "use --unclassified NAME to give them one"
            + (f", or --class-property with {properties}" if properties else "")
        )
    return [
        outline if outline.excluded else replace(outline, name=outline.name or unclassified)
        for outline in outlines.entries
        if outline.name or outline.excluded or unclassified is not None
    ]


def _placed(
    outlines: Sequence[Outline], shift: tuple[int, int], size: Size, notes: list[str]
) -> list[Outline]:
    """Return outlines in the slide's frame; leave out those outside the slide."""
    slide = shapely.box(0, 0, size.width, size.height)
    placed = []
    for outline in outlines:
        area = translate(outline.area, *shift) if any(shift) else outline.area
        if not shapely.intersects(slide, area):
            left, top, right, bottom = area.bounds
            notes.append(
                f"{outline.feature} left out: it is outside the slide of {size} pixels, "
                f"at x {left:.0f} to {right:.0f}, y {top:.0f} to {bottom:.0f}"
            )
            continue
        if not shapely.covers(slide, area):
            notes.append(f"{outline.feature} is partly outside the slide of {size} pixels")
        placed.append(replace(outline, area=area))
    return placed


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
        class_numbers = [numbers.get(name, NO_CLASS) for name in self.classes]
        return np.array([*class_numbers, NO_CLASS], np.int32)[self.label]


def annotation_notes(path: Path, regions: Regions, labels: PatchLabels) -> list[str]:
    """Return the notes on a slide's annotation file for its record, first whether it labels no patch."""
    notes = []
    if (labels.classes or regions.roi is None) and len(labels.label) and not labels.counts():
        classes = ", ".join(labels.classes[:5])
        reason = (
            f"too little of them is covered by {classes}" if classes else "no outline has a class"
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
        pieces = [list(_pieces(outline.area)) for outline in outlines]
        self._rank = np.repeat(np.arange(len(outlines)), [len(part) for part in pieces])
        self._pieces = np.array(list(chain.from_iterable(pieces)), object)
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


def _pieces(areas: Any) -> Iterator[shapely.Geometry]:
    """Split one or several areas into pieces of few points.

    The last part comes first. The order decides how sums of areas are rounded, so another one would change labels.
    """
    for part in reversed(shapely.get_parts(areas)):
        if part.is_empty or not isinstance(part, shapely.Polygon):
            continue  # clipping returns lines where pieces only touch
        if shapely.get_num_coordinates(part) <= _MOST_POINTS:
            yield part
            continue
        left, top, right, bottom = part.bounds
        x, y = (left + right) / 2, (top + bottom) / 2
        halves = (
            [shapely.box(left, top, x, bottom), shapely.box(x, top, right, bottom)]
            if right - left >= bottom - top
            else [shapely.box(left, top, right, y), shapely.box(left, y, right, bottom)]
        )
        yield from _pieces(shapely.intersection(part, halves))
