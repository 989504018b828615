"""Outlines of a file as valid polygons, the regions of a slide, and the class of each patch that they cover.

Regions are outlines in the slide's frame, ordered by precedence. Areas are exact: polygons are clipped, not rasterized.

Where outlines overlap, a point belongs to the class of the smallest outline that contains it: a gland inside a tumour
inside tissue is labelled gland. If two have the same size, the later one in the file takes precedence. Excluded areas
belong to no class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import shapely
import shapely.geometry
from numpy.typing import NDArray
from shapely.affinity import translate
from shapely.geometry.base import BaseGeometry

from histopipe.annotations.rules import OutlineOptions
from histopipe.errors import UsageError
from histopipe.geometry import RegionL0, Size
from histopipe.slides.slide import Turn
from histopipe.system.output import shown
from histopipe.system.table_cells import nfc

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
_PIECE_POINTS = 256
"""Most points of a piece of an outline. The time to clip it, or to fill its pixels, grows with the points."""
_PART = 10
"""Outlines that are all inside the first tenth of the slide's width and height were probably drawn at another level."""


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


_GAP = 1.0
"""Maximum gap between neighbouring patches from rounding, in level-0 pixels."""


def merged_squares(x: NDArray[Any], y: NDArray[Any], side: float) -> list[BaseGeometry]:
    """Return the outlines of groups of neighbouring squares with these (N,) top left corners."""
    far = side + _GAP
    merged = shapely.union_all(shapely.box(x - _GAP, y - _GAP, x + far, y + far))
    return [part.buffer(-_GAP, join_style="mitre") for part in shapely.get_parts(merged)]


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
    outlines: Outlines, rules: OutlineOptions, *, size: Size, bounds: RegionL0
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


def pieces(areas: Any) -> Iterator[shapely.Geometry]:
    """Split one or several areas into pieces of few points.

    The last part comes first. The order decides how sums of areas are rounded, so another one would change labels.
    """
    for part in reversed(shapely.get_parts(areas)):
        if part.is_empty or not isinstance(part, shapely.Polygon):
            continue  # clipping returns lines where pieces only touch
        if shapely.get_num_coordinates(part) <= _PIECE_POINTS:
            yield part
            continue
        left, top, right, bottom = part.bounds
        x, y = (left + right) / 2, (top + bottom) / 2
        halves = (
            [shapely.box(left, top, x, bottom), shapely.box(x, top, right, bottom)]
            if right - left >= bottom - top
            else [shapely.box(left, top, right, y), shapely.box(left, y, right, bottom)]
        )
        yield from pieces(shapely.intersection(part, halves))


def find_fault(values: NDArray[Any], unit: object) -> str:
    """Return why places of a file are no whole level-0 pixels, and must not be cut to these; "" if they are."""
    name = unit.decode() if isinstance(unit, bytes) else str(unit)
    if name.lower() not in ("px", "pixel", "pixels"):
        return f"coords in {name}"
    parts = values[~((values == np.rint(values)) & (abs(values) <= MOST_COORDINATE))]
    return f"coords such as {parts[0]:g}" if len(parts) else ""
