"""XML from strangers: no entities, no document types, no depth, whatever the file's size."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import defusedxml
import defusedxml.ElementTree

from histopipe.errors import UsageError

Element = ET.Element
_MOST_DEPTH = 32


def read_xml(data: bytes) -> Element:
    """The root element of a file.

    Raises:
        UsageError: it is no XML, is cut off, brings entities or a document type, or nests more than 32 deep.
    """
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
                    "elements within elements", found=f"more than {_MOST_DEPTH} deep",
                    expected="annotations",
                )  # fmt: skip
    except ET.ParseError as error:
        raise UsageError("not XML, or cut off", found=str(error)) from error
    except defusedxml.DefusedXmlException as error:
        raise UsageError(
            "XML with a document type or entities, which annotations have no use for",
            found=type(error).__name__,
        ) from error
    if root is None:
        raise UsageError("an empty file", expected="XML")
    return root


def coordinate(element: Element, feature: str) -> tuple[float, float]:
    """The attributes X and Y, as numbers.

    Raises:
        UsageError: one is missing, or no number.
    """
    try:
        return float(element.attrib["X"]), float(element.attrib["Y"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{feature}: a coordinate", found=dict(element.attrib), expected="numbers X and Y"
        ) from error
