"""Annotations in XML by ASAP, Aperio ImageScope and HALO."""

from __future__ import annotations

import io
import math
import xml.etree.ElementTree as ET

import defusedxml
import defusedxml.ElementTree
import shapely

from histopipe.annotations.outline import Outline, Outlines, Point, polygonal
from histopipe.errors import UsageError

Element = ET.Element
_MOST_DEPTH = 32

_ASAP = "ASAP_Annotations"
_AREAS = ("polygon", "spline", "rectangle")
_CAMELYON = {"_0": "tumor", "_1": "tumor"}
_EXCLUDED = ("_2", "exclusion")
_NO_GROUP = ("", "none")

_LAYERS = "Annotations"
"""Root element of files of ImageScope and of HALO."""
_ELLIPSES, _RECTANGLES = ("2", "ellipse"), ("1", "rectangle")
_NO_AREA = ("3", "4", "arrow", "ruler", "pin")
"""Types of regions: numbers in ImageScope, names in HALO."""
_CORNERS = 2
_ELLIPSE_POINTS = 128


def read_xml(data: bytes, class_property: str | None = None) -> Outlines:
    """Return the outlines in the content of a file. Untrusted: entities, document types and deep nesting are refused.

    The class is the value of `class_property`, if given: an attribute of the outline or of its layer.

    Raises:
        UsageError: the content is not such XML, is truncated, or a coordinate is missing or not a number.
    """
    root = _root_of(data)
    if root.tag == _ASAP:
        return _read_asap(root, class_property)
    if root.tag == _LAYERS:
        return _read_layers(root, class_property)
    raise UsageError(
        "XML of an unknown tool", found=f"<{root.tag[:60]}>",
        expected=f"<{_ASAP}> (ASAP) or <{_LAYERS}> (Aperio ImageScope, HALO)",
    )  # fmt: skip


def _root_of(data: bytes) -> Element:
    depth = 0
    root: Element | None = None
    try:
        for event, element in defusedxml.ElementTree.iterparse(
            io.BytesIO(data), events=("start", "end"), forbid_dtd=True
        ):
            depth += 1 if event == "start" else -1
            root = element if root is None else root
            if depth > _MOST_DEPTH:
                raise UsageError(
                    "XML elements are nested too deep", found=f"more than {_MOST_DEPTH} levels",
                    expected=f"at most {_MOST_DEPTH}",
                )  # fmt: skip
    except ET.ParseError as error:
        raise UsageError("not XML, or truncated", found=str(error)) from error
    except defusedxml.DefusedXmlException as error:
        raise UsageError(
            "XML with a document type or entities, which annotations never need",
            found=type(error).__name__,
        ) from error
    if root is None:
        raise UsageError("the file is empty", expected="XML")
    return root


def _coordinate(element: Element, feature: str) -> Point:
    try:
        return float(element.attrib["X"]), float(element.attrib["Y"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{feature}: invalid coordinate", found=dict(element.attrib), expected="numbers X and Y"
        ) from error


def _property(name: str, *elements: Element) -> str | None:
    """Return the value of an attribute, or of an entry of <Attributes>, of the first element that has it."""
    for element in elements:
        entries = element.iterfind("Attributes/Attribute")
        values = [entry.get("Value") for entry in entries if entry.get("Name") == name]
        for value in (element.get(name), *values):
            if value and value.strip():
                return value.strip()
    return None


def _read_asap(root: Element, class_property: str | None) -> Outlines:
    """Return the outlines of an ASAP file, the format of CAMELYON16 and 17. A spline becomes the polygon of its points.

    Source:
        ASAP's files; the README of CAMELYON16: groups "_0" and "_1" are tumour, "_2" is excluded from them.
    """
    outlines = Outlines("slide")
    for number, annotation in enumerate(root.iter("Annotation"), 1):
        group = annotation.get("PartOfGroup", "").strip()
        feature = annotation.get("Name") or f"annotation {number}"
        kind = annotation.get("Type", "").lower()
        if kind not in _AREAS:
            outlines.leave_out(feature, f"{kind or 'no type'} has no area")
            continue
        points = [
            _coordinate(coordinate, feature) for coordinate in _coordinates_in_order(annotation)
        ]
        excluded = group.lower() in _EXCLUDED
        name = None if excluded or group.lower() in _NO_GROUP else _CAMELYON.get(group, group)
        if class_property is not None and not excluded:
            name = _property(class_property, annotation)
        if name is None and annotation.get("Name"):
            outlines.properties.add("Name")
        outlines.add(feature, name, [[points]], excluded=excluded)
    return outlines


def _coordinates_in_order(annotation: Element) -> list[Element]:
    coordinates = list(annotation.iter("Coordinate"))
    try:
        return sorted(coordinates, key=lambda coordinate: int(float(coordinate.attrib["Order"])))
    except (KeyError, ValueError, OverflowError):
        return coordinates  # in the order of the file


def _read_layers(root: Element, class_property: str | None) -> Outlines:
    """Return the outlines of a file of Aperio ImageScope or HALO.

    The class of a layer (`Annotation`) is its name; else the value of its attribute "Description", which ImageScope
    creates for each layer; else the name of its first other attribute. Regions with `NegativeROA="1"` are subtracted
    from the other regions of their layer. Ellipses and rectangles may have two opposite corners only.

    Source:
        ImageScope's files; HALO's files, which have `V` in place of `Vertex` and names in place of numbers of types.
    """
    outlines = Outlines("slide")
    for number, layer in enumerate(root.iter("Annotation"), 1):
        positive, negative = Outlines("slide"), Outlines("slide")
        for region in layer.iter("Region"):
            feature = f"layer {layer.get('Id', number)}, region {region.get('Id', '?')}"
            into = negative if region.get("NegativeROA") == "1" else positive
            kind, name = region.get("Type", "").lower(), _class_of(layer)
            points = [
                _coordinate(vertex, feature)
                for vertex in region.iter()
                if vertex.tag in ("Vertex", "V")
            ]
            if kind in _NO_AREA:
                into.leave_out(feature, "an arrow, a ruler or a pin has no area")
                continue
            if kind in _ELLIPSES and len(points) == _CORNERS:
                points = _ellipse(*points)
            elif kind in _RECTANGLES and len(points) == _CORNERS:
                (x0, y0), (x1, y1) = points
                points = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
            if class_property is not None:
                name = _property(class_property, region, layer)
            if name is None and _property("Text", region):
                outlines.properties.add("Text")
            into.add(feature, name, [[points]])
        outlines.notes += positive.notes + negative.notes
        left = _without(positive.entries, [outline.area for outline in negative.entries])
        removed = {outline.feature for outline in positive.entries} - {
            outline.feature for outline in left
        }
        for feature in sorted(removed):
            outlines.leave_out(feature, "negative regions cover it completely")
        outlines.entries += left
    return outlines


def _without(outlines: list[Outline], holes: list[shapely.Geometry]) -> list[Outline]:
    hole = shapely.union_all(holes)
    cut = ((outline, polygonal(shapely.difference(outline.area, hole))) for outline in outlines)
    return [
        Outline(outline.feature, outline.name, area) for outline, area in cut if not area.is_empty
    ]


def _class_of(layer: Element) -> str | None:
    attributes = [
        attribute for attribute in layer.iterfind("Attributes/Attribute") if attribute.get("Name")
    ]
    described = [
        attribute.get("Value") for attribute in attributes if attribute.get("Name") == "Description"
    ]
    other_names = [
        attribute.get("Name") for attribute in attributes if attribute.get("Name") != "Description"
    ]
    for name in (layer.get("Name"), *described, *other_names):
        if name and name.strip():
            return name.strip()
    return None


def _ellipse(first: Point, second: Point) -> list[Point]:
    """Return points of an ellipse from two opposite corners of its bounding rectangle."""
    (left, top), (right, bottom) = first, second
    x, y = (left + right) / 2, (top + bottom) / 2
    half_width, half_height = (right - left) / 2, (bottom - top) / 2
    turns = (2 * math.pi * i / _ELLIPSE_POINTS for i in range(_ELLIPSE_POINTS))
    return [(x + half_width * math.cos(t), y + half_height * math.sin(t)) for t in turns]
