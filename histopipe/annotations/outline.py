"""Outlines of annotations: valid polygons in the coordinate frame of their file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import shapely
from shapely.geometry.base import BaseGeometry

from histopipe.errors import UsageError
from histopipe.system.csv_files import nfc
from histopipe.system.files import shown

Point = tuple[float, float]
Ring = Sequence[Point]

MOST_COORDINATE = 1e8
"""Largest coordinate, in pixels. Slides are smaller, and areas of larger coordinates lose precision."""
_LEAST_POINTS = 3
_SAMPLED, _MOST_CROSSINGS = 100, 50
"""Number of segments of an outline that are checked, and how many other segments each may meet on average."""


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
        sample = np.unique(np.linspace(0, len(lines) - 1, _SAMPLED).astype(int))
        if sum(len(tree.query(line)) for line in lines[sample]) > _MOST_CROSSINGS * len(sample):
            return True
    return False


def _check_numbers(rings: Iterable[Ring], feature: str) -> None:
    for point in chain.from_iterable(rings):
        if not all(math.isfinite(value) and abs(value) <= MOST_COORDINATE for value in point):
            raise UsageError(
                f"{feature}: invalid coordinate", found=point, expected="pixels of level 0"
            )
