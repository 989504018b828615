"""Aperio ImageScope's XML.

Source:
    ImageScope's own files. A layer (`Annotation`) is a class: by its name; else by the value of its attribute "Description",
    which ImageScope makes for each; else by the name of its first attribute. Regions with `NegativeROA="1"` are cut out
    of the other regions of their layer.
"""

from __future__ import annotations

import math

import shapely

from histopipe.annotations.outline import Outline, Outlines, Point, polygonal
from histopipe.annotations.xml_file import Element, coordinate

ROOT = "Annotations"
_ELLIPSE, _ARROW, _RULER = "2", "3", "4"
_CORNERS = 2
_ELLIPSE_POINTS = 128


def read_imagescope(root: Element) -> Outlines:
    """The outlines below a root element.

    Raises:
        UsageError: a coordinate is missing or no number.
    """
    outlines = Outlines("slide")
    for number, layer in enumerate(root.iter("Annotation"), 1):
        positive, negative = Outlines("slide"), Outlines("slide")
        for region in layer.iter("Region"):
            feature = f"layer {layer.get('Id', number)}, region {region.get('Id', '?')}"
            into = negative if region.get("NegativeROA") == "1" else positive
            points = [coordinate(it, feature) for it in region.iter("Vertex")]
            if region.get("Type") in (_ARROW, _RULER):
                into.leave_out(feature, "an arrow or a ruler has no area")
                continue
            if region.get("Type") == _ELLIPSE and len(points) == _CORNERS:
                points = _ellipse(*points)
            into.add(feature, _class_of(layer), [[points]])
        outlines.notes += positive.notes + negative.notes
        left = _without(positive.found, [it.area for it in negative.found])
        gone = {it.feature for it in positive.found} - {it.feature for it in left}
        for feature in sorted(gone):
            outlines.leave_out(feature, "negative regions cover it")
        outlines.found += left
    return outlines


def _without(found: list[Outline], holes: list[shapely.Geometry]) -> list[Outline]:
    hole = shapely.union_all(holes)
    cut = ((it, polygonal(shapely.difference(it.area, hole))) for it in found)
    return [Outline(it.feature, it.name, area) for it, area in cut if not area.is_empty]


def _class_of(layer: Element) -> str | None:
    attributes = [it for it in layer.iterfind("Attributes/Attribute") if it.get("Name")]
    described = [it.get("Value") for it in attributes if it.get("Name") == "Description"]
    others = [it.get("Name") for it in attributes if it.get("Name") != "Description"]
    for name in (layer.get("Name"), *described, *others):
        if name and name.strip():
            return name.strip()
    return None


def _ellipse(first: Point, second: Point) -> list[Point]:
    """An ellipse by two opposite corners of the rectangle around it."""
    (left, top), (right, bottom) = first, second
    turns = (2 * math.pi * i / _ELLIPSE_POINTS for i in range(_ELLIPSE_POINTS))
    return [
        (
            (left + right) / 2 + (right - left) / 2 * math.cos(turn),
            (top + bottom) / 2 + (bottom - top) / 2 * math.sin(turn),
        )
        for turn in turns
    ]
