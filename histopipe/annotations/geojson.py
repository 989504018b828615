"""Annotations in GeoJSON by QuPath: a FeatureCollection, an array of features, or one feature.

Source:
    RFC 7946; QuPath's documentation, "Exporting annotations". QuPath adds `classification`, `name` and `objectType` to
    a feature's properties, and counts pixels from the corner of the scanned area.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import shapely
import shapely.affinity
import shapely.geometry

from histopipe.annotations.outline import Outlines, Ring
from histopipe.errors import UsageError

_IGNORED = "Ignore*"
"""QuPath's class for areas that are excluded from every analysis."""
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
    for number, feature in enumerate(_features(_parsed(data)), 1):
        properties = feature.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        name = feature.get("id", number)
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
        excluded = _IGNORED in (class_name, _class_name(properties, _CLASS))
        _add(outlines, name, class_name, feature.get("geometry"), excluded=excluded)
    if left_out:
        outlines.notes.append(
            f"{left_out} detections, cells or tiles left out: only annotations are read"
        )
    return outlines


def geojson_features(outlines: Outlines, corner: tuple[int, int]) -> list[dict[str, Any]]:
    """Return outlines as features of QuPath. `corner` is the level-0 pixel of the scanned area's top left corner."""
    left, top = corner if outlines.frame == "slide" else (0, 0)
    features = []
    for outline in outlines.entries:
        name = _IGNORED if outline.excluded else outline.name
        properties: dict[str, Any] = {"objectType": "annotation"}
        if name:
            properties["classification"] = {"name": name}
        area = shapely.affinity.translate(outline.area, -left, -top)
        geometry = shapely.geometry.mapping(area)
        features.append({"type": "Feature", "geometry": geometry, "properties": properties})
    return features


def _class_name(properties: Mapping[str, Any], key: str) -> str | None:
    """Return the class in a property: a text, a whole number, or the name of a QuPath class."""
    value = properties.get(key)
    if isinstance(value, Mapping):
        names = value.get("names")
        several = ": ".join(map(str, names)) if isinstance(names, list) else None
        value = value.get("name") or several
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return value.strip() or None if isinstance(value, str) else None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8, which JSON requires", found=str(error)) from error
    except RecursionError as error:
        raise UsageError("not GeoJSON: brackets are nested too deep") from error
    except ValueError as error:
        raise UsageError("not JSON", found=str(error)) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which is not a JSON number")


def _features(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping) and value.get("type") == "FeatureCollection":
        value = value.get("features")
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise UsageError(
            "not GeoJSON", found=type(value).__name__,
            expected="a FeatureCollection, an array of features, or a Feature",
        )  # fmt: skip
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
            f"{feature}: invalid coordinates of its {shape}", found=str(error)[:80],
            expected="rings of [x, y]",
        ) from error  # fmt: skip
    outlines.add(feature, None if excluded else kind, polygons, excluded=excluded)


def _rings(value: Sequence[Any]) -> list[Ring]:
    # A third number, which RFC 7946 allows, is a height.
    return [[(float(point[0]), float(point[1])) for point in ring] for ring in value]
