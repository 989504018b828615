"""Annotation files of QuPath (GeoJSON), ASAP, Aperio ImageScope and HALO (XML): find them by slide, and read them."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import defusedxml
import defusedxml.ElementTree
import numpy as np
import shapely
import shapely.affinity
import shapely.geometry

from histopipe.annotations.regions import (
    IGNORED,
    Outlines,
    Point,
    Regions,
    Ring,
    polygonal,
    regions_of,
    turned,
)
from histopipe.annotations.rules import AnnotationRules, OutlineOptions
from histopipe.errors import UsageError
from histopipe.geometry import RegionL0, Size
from histopipe.slides.slide import Turn
from histopipe.slides.slide_files import SlideNames

_CLASS = "classification"
_NOT_CLASSES = ("objectType", "object_type", "color", "id")
# Detections, cells and tiles are results of QuPath, not outlines that a person drew.
_OLD_RESULTS = ("PathCellObject", "PathDetectionObject", "PathTileObject")
_OLD_ANNOTATION = "PathAnnotationObject"
"""Value of `id` in files of QuPath 0.2, which have no ids and no object types."""


def read_geojson(data: bytes, class_property: str | None = None) -> Outlines:
    """Return the outlines in the content of a file. The class is the value of `class_property`, if given.

    Raises:
        UsageError: the content is not GeoJSON of this form.
    """
    outlines = Outlines("bounds")
    left_out = 0
    for number, feature in enumerate(read_features(data), 1):
        properties, name = feature.get("properties"), feature.get("id", number)
        properties = properties if isinstance(properties, Mapping) else {}
        kind = properties.get("objectType", properties.get("object_type"))
        if name in _OLD_RESULTS or (isinstance(kind, str) and kind.lower() != "annotation"):
            left_out += 1
            continue
        name = f"feature {number if name == _OLD_ANNOTATION else name}"
        class_name = _class_name(properties, class_property or _CLASS)
        if class_name is None:
            outlines.properties |= {
                key
                for key in properties
                if key not in _NOT_CLASSES and _class_name(properties, key)
            }
        excluded = IGNORED in (class_name, _class_name(properties, _CLASS))
        _add(outlines, name, class_name, feature.get("geometry"), excluded=excluded)
    if left_out:
        outlines.notes.append(
            f"{left_out} detections, cells or tiles left out: only annotations are read"
        )
    return outlines


def _class_name(properties: Mapping[str, Any], key: str) -> str | None:
    """Return the class in a property: a text, a whole number, or the name of a QuPath class."""
    value = properties.get(key)
    if isinstance(value, Mapping):
        names = value.get("names")
        value = value.get("name") or (isinstance(names, list) and ": ".join(map(str, names)))
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return value.strip() or None if isinstance(value, str) else None


def feature_class(feature: Mapping[str, Any]) -> str | None:
    """Return the class of a feature of QuPath; None if there is none."""
    properties = feature.get("properties")
    return _class_name(properties, _CLASS) if isinstance(properties, Mapping) else None


def read_features(data: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the features in the content of a GeoJSON file.

    Raises:
        UsageError: the content is not GeoJSON.
    """
    try:
        # QuPath has written NaN as a measurement, and later the text "NaN". As a coordinate, both are refused.
        value = json.loads(data.decode("utf-8-sig"), parse_constant=str)
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8, which JSON requires", found=str(error)) from error
    except RecursionError as error:
        raise UsageError("not GeoJSON: brackets are nested too deep") from error
    except ValueError as error:
        raise UsageError("not JSON", found=str(error)) from error
    if isinstance(value, Mapping):
        value = value.get("features") if value.get("type") == "FeatureCollection" else [value]
    if not isinstance(value, list):
        raise UsageError(
            "not GeoJSON",
            found=type(value).__name__,
            expected="a FeatureCollection, an array of features, or a Feature",
        )
    for number, feature in enumerate(value, 1):
        if not isinstance(feature, Mapping) or feature.get("type") != "Feature":
            raise UsageError(
                f"not GeoJSON: entry {number}", found=repr(feature)[:60], expected="a Feature"
            )
        yield feature


def _add(
    outlines: Outlines, feature: str, kind: str | None, geometry: Any, *, excluded: bool
) -> None:
    shape = geometry.get("type") if isinstance(geometry, Mapping) else None
    try:
        match shape:
            case "Polygon":
                polygons = [_rings(geometry["coordinates"])]
            case "MultiPolygon":
                polygons = [_rings(part) for part in geometry["coordinates"]]
            case "GeometryCollection":
                for part in geometry["geometries"]:
                    _add(outlines, feature, kind, part, excluded=excluded)
                return
            case _:
                outlines.leave_out(feature, f"{shape or 'no geometry'} has no area")
                return
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise UsageError(
            f"{feature}: invalid coordinates of its {shape}",
            found=str(error)[:80],
            expected="rings of [x, y]",
        ) from error
    outlines.add(feature, kind, polygons, excluded=excluded)


def _rings(value: Sequence[Any]) -> list[Ring]:
    # A third number, which RFC 7946 allows, is a height.
    return [[(float(point[0]), float(point[1])) for point in ring] for ring in value]


_MOST_DEPTH = 32
_ASAP = "ASAP_Annotations"
_GROUPS = {"": None, "none": None, "_0": "tumor", "_1": "tumor"}
"""Classes of the groups of ASAP, in lower case, whose name is not that of a class."""
_LAYERS = "Annotations"
"""Root element of files of ImageScope and of HALO."""
_ELLIPSES, _RECTANGLES = ("2", "ellipse"), ("1", "rectangle")
_NO_AREA = ("3", "4", "arrow", "ruler", "pin")
"""Types of regions: numbers in ImageScope, names in HALO."""
_ELLIPSE_POINTS = 128


def read_xml(data: bytes, class_property: str | None = None) -> Outlines:
    """Return the outlines in the content of a file. Untrusted: entities, document types and deep nesting are refused.

    The class is the value of `class_property`, if given: an attribute of the outline or of its layer.

    Raises:
        UsageError: the content is not such XML, is truncated, or a coordinate is missing or not a number.
    """
    root = _read_root(data)
    readers = {_ASAP: _read_asap, _LAYERS: _read_layers}
    if root.tag not in readers:
        raise UsageError(
            "XML of an unknown tool",
            found=f"<{root.tag[:60]}>",
            expected=f"<{_ASAP}> (ASAP) or <{_LAYERS}> (Aperio ImageScope, HALO)",
        )
    return readers[root.tag](root, class_property)


def _read_root(data: bytes) -> ET.Element:
    """Return the root element; the parser stops at an element that is nested too deep."""
    depth = 0
    parser: Any = defusedxml.ElementTree.iterparse(
        io.BytesIO(data), events=("start", "end"), forbid_dtd=True
    )
    try:
        for event, _ in parser:
            depth += 1 if event == "start" else -1
            if depth > _MOST_DEPTH:
                raise UsageError(
                    "XML elements are nested too deep",
                    found=f"more than {_MOST_DEPTH} levels",
                    expected=f"at most {_MOST_DEPTH}",
                )
    except ET.ParseError as error:
        raise UsageError("not XML, or truncated", found=str(error)) from error
    except defusedxml.DefusedXmlException as error:
        raise UsageError(
            "XML with a document type or entities, which annotations never need",
            found=type(error).__name__,
        ) from error
    root: ET.Element = parser.root
    return root


def _coordinate(element: ET.Element, feature: str) -> Point:
    try:
        return float(element.attrib["X"]), float(element.attrib["Y"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{feature}: invalid coordinate", found=dict(element.attrib), expected="numbers X and Y"
        ) from error


def _first_text(texts: Iterable[str | None]) -> str | None:
    """Return the first text that is not blank, without blanks around it; None if there is none."""
    return next((text.strip() for text in texts if text and text.strip()), None)


def _property(name: str, *elements: ET.Element) -> str | None:
    """Return the value of an attribute, or of an entry of <Attributes>, of the first element that has it."""
    return _first_text(
        value
        for element in elements
        for key, value in [*element.items(), *_entries(element)]
        if key == name
    )


def _entries(element: ET.Element) -> list[tuple[str | None, str | None]]:
    """Return names and values of the entries of <Attributes>."""
    return [(e.get("Name"), e.get("Value")) for e in element.iterfind("Attributes/Attribute")]


def _read_asap(root: ET.Element, class_property: str | None) -> Outlines:
    """Return the outlines of an ASAP file, the format of CAMELYON16 and 17. A spline becomes the polygon of its points.

    Source:
        ASAP's files; the README of CAMELYON16: groups "_0" and "_1" are tumour, "_2" is excluded from them.
    """
    outlines = Outlines("slide")
    for number, annotation in enumerate(root.iter("Annotation"), 1):
        group = annotation.get("PartOfGroup", "").strip()
        feature = annotation.get("Name") or f"annotation {number}"
        kind = annotation.get("Type", "").lower()
        if kind not in ("polygon", "spline", "rectangle"):
            outlines.leave_out(feature, f"{kind or 'no type'} has no area")
            continue
        points = [_coordinate(element, feature) for element in _coordinates_in_order(annotation)]
        name = (
            _GROUPS.get(group.lower(), group)
            if class_property is None
            else _property(class_property, annotation)
        )
        if name is None and annotation.get("Name"):
            outlines.properties.add("Name")
        outlines.add(feature, name, [[points]], excluded=group.lower() in ("_2", "exclusion"))
    return outlines


def _coordinates_in_order(annotation: ET.Element) -> list[ET.Element]:
    coordinates = list(annotation.iter("Coordinate"))
    try:
        return sorted(coordinates, key=lambda coordinate: int(float(coordinate.attrib["Order"])))
    except (KeyError, ValueError, OverflowError):
        return coordinates  # in the order of the file


def _read_layers(root: ET.Element, class_property: str | None) -> Outlines:
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
            kind = region.get("Type", "").lower()
            points = [_coordinate(v, feature) for v in region.iter() if v.tag in ("Vertex", "V")]
            if kind in _NO_AREA:
                into.leave_out(feature, "an arrow, a ruler or a pin has no area")
                continue
            if kind in _ELLIPSES and len(points) == 2:
                points = _ellipse(*points)
            elif kind in _RECTANGLES and len(points) == 2:
                (x0, y0), (x1, y1) = points
                points = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
            name = (
                _class_of(layer)
                if class_property is None
                else _property(class_property, region, layer)
            )
            if name is None and _property("Text", region):
                outlines.properties.add("Text")
            into.add(feature, name, [[points]])
        outlines.notes += positive.notes + negative.notes
        hole = shapely.union_all([outline.area for outline in negative.entries])
        cut = [
            replace(outline, area=polygonal(shapely.difference(outline.area, hole)))
            for outline in positive.entries
        ]
        left = [outline for outline in cut if not outline.area.is_empty]
        for feature in sorted({o.feature for o in cut} - {o.feature for o in left}):
            outlines.leave_out(feature, "negative regions cover it completely")
        outlines.entries += left
    return outlines


def _class_of(layer: ET.Element) -> str | None:
    entries = sorted(_entries(layer), key=lambda entry: entry[0] != "Description")
    texts = (value if name == "Description" else name for name, value in entries)
    return _first_text([layer.get("Name"), *texts])


def _ellipse(first: Point, second: Point) -> list[Point]:
    """Return points of an ellipse from two opposite corners of its bounding rectangle."""
    centre, half = np.add(first, second) / 2, np.subtract(second, first) / 2
    turns = 2 * np.pi * np.arange(_ELLIPSE_POINTS) / _ELLIPSE_POINTS
    points = centre + half * np.stack([np.cos(turns), np.sin(turns)], axis=1)
    return [(x, y) for x, y in points.tolist()]


GEOJSON, XML = (".geojson", ".json"), (".xml", ".annotations")
SUFFIXES = (*GEOJSON, *XML)
MOST_BYTES = 128 << 20
"""Largest file. Outlines of all glands of a slide take a few megabytes; parsing needs 20 to 40 times the file size."""
_PARSER_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    shapely.errors.ShapelyError,
)
"""Errors of parsers for unusual files: unknown encodings, numbers with too many digits."""


def find_annotations(
    path: Path, names: SlideNames, suffixes: Sequence[str] = SUFFIXES
) -> tuple[dict[str, Path], list[str]]:
    """Find the files with some suffixes in a folder, such as `SLIDE.geojson`, or match one file with its slide.

    `SLIDE.more.xml` is used if there is no `SLIDE.xml`; likewise for the other suffixes.

    Returns:
        The files by slide id, and notes on files that are not used.

    Raises:
        UsageError: there is no file, no file matches a slide, or two match the same slide.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist", expected="a folder of annotations, or a file")
    files = [path] if path.is_file() else annotation_files(path, suffixes)
    if not files:
        raise UsageError(
            f"{path} contains no annotations",
            expected=f"files {', '.join('SLIDE' + s for s in suffixes)}",
        )
    exact, loose, unmatched = match_files(files, path.parent if path.is_file() else path, names)
    if not exact and not loose:
        raise UsageError(
            f"{path}: no annotation file has the name of a slide",
            found=unmatched[0],
            expected=f"a name such as {names.nearest(PurePosixPath(unmatched[0]).stem)}{suffixes[0]}",
        )
    listed = ", ".join(unmatched[:3]) + ", …" * (len(unmatched) > 3)
    return names.with_cores(loose | exact), [
        *[f"{len(unmatched)} annotation files match no slide: {listed}"] * bool(unmatched),
        *(
            f"{file.name} is not used: {exact[slide].name} has the exact name of the slide"
            for slide, file in loose.items()
            if slide in exact
        ),
    ]


def annotation_files(folder: Path, suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """Return all annotation files of a folder, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes and not path.name.startswith(".") and path.is_file()
    )


def match_files(
    files: Iterable[Path], root: Path, names: SlideNames
) -> tuple[dict[str, Path], dict[str, Path], list[str]]:
    """Match annotation files below `root` with slides.

    Returns:
        Files with the exact name of a slide, and those named `SLIDE.more`, by slide; and the names of all others.

    Raises:
        UsageError: two files match the same slide.
    """
    exact: dict[str, Path] = {}
    loose: dict[str, Path] = {}
    unmatched = []
    for file in files:
        stem = file.relative_to(root).with_suffix("")
        for matches, name in ((exact, stem), (loose, stem.with_suffix(""))):
            slide = names.find(name.as_posix(), where=str(file))
            if slide is None:
                continue
            if slide in matches:
                raise UsageError(
                    f"two annotation files for slide {slide}",
                    found=f"{matches[slide]} and {file}",
                    todo="keep one, or move one to another folder",
                )
            matches[slide] = file
            break
        else:
            # QuPath names the files of scenes "FILE - SCENE".
            with suppress(UsageError):  # the name may be that of several slides
                slide = names.find(stem.name.partition(" - ")[0], where=str(file))
            unmatched.append(f"{file.name} (of a scene of {slide}?)" if slide else file.name)
    return exact, loose, unmatched


def read_annotations(path: Path, class_property: str | None = None) -> Outlines:
    """Read the outlines of a file: GeoJSON of QuPath, or XML of ASAP, Aperio ImageScope or HALO.

    `class_property` is the property with the class; None for the usual one of each tool.

    Raises:
        UsageError: the file cannot be read, or has another format. The message contains the path.
    """
    read = read_geojson if path.suffix.lower() in GEOJSON else read_xml
    try:
        return read(file_bytes(path), class_property)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    except UsageError as error:
        raise UsageError(
            f"{path}: {error.what}", found=error.found, expected=error.expected, todo=error.todo
        ) from error
    except _PARSER_ERRORS as error:
        raise UsageError(
            f"{path} cannot be read",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="annotations of QuPath, ASAP, ImageScope or HALO",
        ) from error


def file_bytes(path: Path) -> bytes:
    """Read a file; raise a `UsageError` if it is too large, or an `OSError`."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UsageError(
            "the file is too large",
            found=f"{size / 1e6:,.0f} MB",
            expected=f"at most {MOST_BYTES >> 20} MiB",
            todo="export annotations without detections and cells",
        )
    return path.read_bytes()


def source_text(path: Path, rules: AnnotationRules) -> str:
    """Return the source of labels: file, CRC-32 and rules. Equal sources give equal labels. Raises as `file_bytes`."""
    settings = {
        "threshold": rules.annotation_threshold,
        "unclassified": rules.unclassified,
        "origin": rules.annotation_origin,
        "class_property": rules.class_property,
        "frame": rules.frame if rules.frame != "auto" else None,
    }
    rules_texts = (f"{name} {value}" for name, value in settings.items() if value)
    return ", ".join([path.name, f"crc32 {zlib.crc32(file_bytes(path)):08x}", *rules_texts])


def read_regions(
    path: Path, rules: OutlineOptions, *, size: Size, bounds: RegionL0, orientation: int = 1
) -> Regions:
    """Read the regions of a slide from a file. `size` and `orientation` are those of level 0; `bounds` is its scanned part.

    Raises:
        UsageError: the file cannot be used. The message contains the path.
    """
    outlines = read_annotations(path, rules.class_property)
    if rules.frame != "turned":
        outlines.entries = turned(outlines.entries, Turn(orientation, size))
    return regions_of(outlines, rules, size=size, bounds=bounds)
