"""An outlined area as a file has it, made valid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import shapely
from shapely.geometry.base import BaseGeometry

from histopipe.errors import UsageError
from histopipe.system.files import shown

Frame = Literal["bounds", "slide"]
"""Where a file's coordinates begin: at the scanned area's corner, as in QuPath, or at level 0's."""

Point = tuple[float, float]
Ring = Sequence[Point]

MOST_COORDINATE = 1e8
"""Pixels. No slide is as large, and areas of larger numbers lose their decimals."""
_LEAST_POINTS = 3
_SAMPLED, _MOST_MET = 100, 50
"""Lines of an outline that are looked at, and how many others each may meet, about."""


@dataclass(frozen=True, slots=True)
class Outline:
    """One outlined area: its name in the file (for messages), its class, and a valid area in level-0 pixels of the file's frame.

    What lies in an excluded area belongs to no class, whatever else it lies in.
    """

    feature: str
    name: str | None
    area: shapely.Polygon | shapely.MultiPolygon
    excluded: bool = False


@dataclass(slots=True)
class Outlines:
    """Outlines of a file, in its order, and notes on what was repaired or left out."""

    frame: Frame
    found: list[Outline] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        feature: str,
        name: str | None,
        polygons: Iterable[Sequence[Ring]],
        *,
        excluded: bool = False,
    ) -> None:
        """Take in polygons, each an outer ring and its holes; an invalid one is repaired, an empty one left out, and noted.

        Raises:
            UsageError: a coordinate is no number that could be a pixel.
        """
        feature, name = plain(feature), None if name is None else plain(name)
        parts = []
        for rings in polygons:
            shell, *holes = rings or [()]
            for ring in rings:
                _check_numbers(ring, feature)
            if len(set(shell)) >= _LEAST_POINTS:
                parts.append(
                    shapely.Polygon(shell, [h for h in holes if len(set(h)) >= _LEAST_POINTS])
                )
        drawn = parts[0] if len(parts) == 1 else shapely.MultiPolygon(parts)
        if not drawn.is_valid and any(_is_tangled(part) for part in parts):
            self.leave_out(feature, "it crosses itself too often to enclose anything")
            return
        area = polygonal(drawn)
        if area.is_empty:
            self.leave_out(feature, "it has no area")
            return
        if not drawn.is_valid:
            reason = shapely.is_valid_reason(drawn).split("[")[0].lower()
            self.notes.append(
                f"{feature} repaired ({reason}): {area.area:,.0f} square pixels of level 0"
            )
        self.found.append(Outline(feature, name, area, excluded))

    def leave_out(self, feature: str, why: str) -> None:
        """Note something that is no area."""
        self.notes.append(f"{plain(feature)} left out: {why}")


def polygonal(geometry: BaseGeometry) -> shapely.Polygon | shapely.MultiPolygon:
    """Return a geometry made valid, without what of it is a line or a point."""
    if not geometry.is_valid:
        # "structure": a line that crosses itself encloses both of its loops, as people who draw by hand mean it.
        geometry = shapely.make_valid(geometry, method="structure", keep_collapsed=False)
    parts = [p for p in shapely.get_parts(geometry) if isinstance(p, shapely.Polygon) and p.area]
    return parts[0] if len(parts) == 1 else shapely.MultiPolygon(parts)


def plain(text: str) -> str:
    """Return a text that can be written and shown: halves of characters, which JSON may have, are replaced."""
    return shown(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _is_tangled(polygon: shapely.Polygon) -> bool:
    """Return whether lines cross so often that repairing would take memory and time by their square, as no one draws."""
    for ring in (polygon.exterior, *polygon.interiors):
        points = shapely.get_coordinates(ring)
        lines = np.asarray(shapely.linestrings(np.stack([points[:-1], points[1:]], axis=1)), object)
        tree = shapely.STRtree(lines)
        some = np.unique(np.linspace(0, len(lines) - 1, _SAMPLED).astype(int))
        met = [len(tree.query(lines[i])) for i in some.tolist()]
        if np.mean(met) > _MOST_MET:
            return True
    return False


def _check_numbers(ring: Ring, feature: str) -> None:
    for point in ring:
        if not all(math.isfinite(value) and abs(value) <= MOST_COORDINATE for value in point):
            raise UsageError(f"{feature}: a coordinate", found=point, expected="pixels of level 0")
