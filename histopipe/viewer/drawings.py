"""Read and save the annotations of a slide as GeoJSON of QuPath, for drawing in the viewer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from histopipe.annotations.annotation_files import (
    GEOJSON,
    annotation_files,
    file_bytes,
    match_files,
    read_annotations,
    read_features,
    read_geojson,
)
from histopipe.annotations.regions import geojson_features
from histopipe.errors import UsageError
from histopipe.slides.slide_files import SlideNames
from histopipe.system.files import path_within, write_atomically
from histopipe.system.shared_folders import locked

PREVIOUS = ".previous"
"""Suffix of the previous version of a file. No command reads files with it."""
_LOCK_SECONDS = 5.0
"""Time to wait for another viewer that saves into the folder."""
_MOST_NESTED = 100
"""Most levels of nested objects; deeper ones cannot be sent again."""


class ChangedMeanwhile(UsageError):
    """The file was changed after it was loaded."""


def read_drawing(
    folder: Path, slide: str, names: SlideNames, bounds: Sequence[int]
) -> dict[str, Any]:
    """Read the annotations of a slide.

    Args:
        folder: folder of the annotations.
        slide: id of the slide.
        names: names of all slides: a file with the exact name of one of them belongs to no other.
        bounds: x, y, width and height of its scanned area, level-0 pixels.

    Returns:
        `features`: GeoJSON features as in the file; those that are not areas are kept, but not shown. `version` identifies
        the content of the file; it is empty if there is none. `file`: name of the file, or of the file that is written
        first. `origin`: level-0 pixel of the coordinates' origin.

    Raises:
        UsageError: the file cannot be read, or there are two.
    """
    path, _ = _existing(folder, slide, names)
    features: Sequence[Mapping[str, Any]] = []
    version, name = "", f"{slide}{GEOJSON[0]}"
    if path is not None:
        outlines = read_annotations(path)  # checks the content
        data = file_bytes(path)
        version, name = _version(data), path.relative_to(folder).as_posix()
        if path.suffix.lower() in GEOJSON:
            features = list(read_features(data))
            _check_depth(features)
        else:
            features = geojson_features(outlines, (bounds[0], bounds[1]))
    return {"features": features, "version": version, "file": name, "origin": bounds[:2]}


def save_drawing(
    folder: Path, slide: str, names: SlideNames, body: bytes | bytearray
) -> dict[str, str]:
    """Write the annotations of a slide by one rename, and return their version and the name of the file.

    They are written to the file that has them, else to SLIDE.geojson. The previous file is kept with the suffix
    `.previous`. An XML file with the name of the slide is replaced, since two files of one slide are an error.

    Args:
        folder: folder of the annotations.
        slide: id of the slide.
        names: names of all slides; see `read_drawing`.
        body: JSON with the GeoJSON features, and the version of the file that was loaded.

    Raises:
        UsageError: the features are not valid GeoJSON.
        ChangedMeanwhile: the file has another version.
        OSError: the file cannot be written.
    """
    try:
        value = json.loads(body)
        features, version = value["features"], str(value["version"])
        collection = {"type": "FeatureCollection", "features": features}
        _check_depth(collection)
        data = json.dumps(collection, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError("the request is not a drawing", found=repr(error)[:100]) from error
    read_geojson(data)
    target = path_within(folder, f"{slide}{GEOJSON[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, wait_seconds=_LOCK_SECONDS):
        existing, exact = _existing(folder, slide, names)
        if existing and existing.suffix.lower() in GEOJSON:
            target = existing
        current = _version(file_bytes(existing)) if existing else ""
        if current != version:
            raise ChangedMeanwhile(
                f"the annotations of {slide} were changed meanwhile, in another tab or program"
            )
        if existing:
            write_atomically(existing.with_name(existing.name + PREVIOUS), file_bytes(existing))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)
        if existing and existing != target and exact:
            existing.unlink()  # kept with the suffix
    return {"version": _version(data), "file": target.relative_to(folder).as_posix()}


def _existing(folder: Path, slide: str, names: SlideNames) -> tuple[Path | None, bool]:
    """Return the annotation file that `annotate` uses for a slide, and whether it has the exact name of the slide.

    Raises:
        UsageError: there are two.
    """
    if not folder.is_dir():
        return None, False
    exact, loose, _ = match_files(annotation_files(folder), folder, names)
    return (exact[slide], True) if slide in exact else (loose.get(slide), False)


def _check_depth(value: Any, left: int = _MOST_NESTED) -> None:
    if not left:
        raise UsageError("the drawing is nested too deep", expected="GeoJSON")
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            _check_depth(part, left - 1)


def _version(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}-{len(data)}"
