"""ASAP's XML, the format of CAMELYON16 and 17.

Source:
    ASAP's own files; the README of CAMELYON16: groups "_0" and "_1" outline tumour, "_2" what is cut out of these.
"""

from __future__ import annotations

from histopipe.annotations.outline import Outlines
from histopipe.annotations.xml_file import Element, coordinate

ROOT = "ASAP_Annotations"
_AREAS = ("polygon", "spline", "rectangle")
_CAMELYON = {"_0": "tumor", "_1": "tumor"}
_EXCLUDED = ("_2", "exclusion")
_NO_GROUP = ("", "none")


def read_asap(root: Element) -> Outlines:
    """The outlines below a root element. A spline is taken as the polygon of its points.

    Raises:
        UsageError: a coordinate is missing or no number.
    """
    outlines = Outlines("slide")
    for number, annotation in enumerate(root.iter("Annotation"), 1):
        group = annotation.get("PartOfGroup", "").strip()
        feature = annotation.get("Name") or f"annotation {number}"
        kind = annotation.get("Type", "").lower()
        if kind not in _AREAS:
            outlines.leave_out(feature, f"{kind or 'no type'} has no area")
            continue
        points = [coordinate(it, feature) for it in _in_order(annotation)]
        excluded = group.lower() in _EXCLUDED
        name = None if excluded or group.lower() in _NO_GROUP else _CAMELYON.get(group, group)
        outlines.add(feature, name, [[points]], excluded=excluded)
    return outlines


def _in_order(annotation: Element) -> list[Element]:
    found = list(annotation.iter("Coordinate"))
    try:
        return sorted(found, key=lambda it: int(float(it.attrib["Order"])))
    except (KeyError, ValueError, OverflowError):
        return found  # as they stand
