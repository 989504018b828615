"""Read a file of annotations: GeoJSON or XML."""

from __future__ import annotations

from pathlib import Path

import shapely

from histopipe.annotations.geojson import read_geojson
from histopipe.annotations.outline import Outlines
from histopipe.annotations.xml_formats import ASAP, IMAGESCOPE, read_asap, read_imagescope, read_xml
from histopipe.errors import UsageError

GEOJSON, XML = (".geojson", ".json"), (".xml",)
SUFFIXES = (*GEOJSON, *XML)
MOST_BYTES = 128 << 20
"""Outlines of a whole slide's glands are some megabytes. What is parsed takes 20 to 40 times its size in memory."""
_PARSER_ERRORS = (
    ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError, shapely.errors.ShapelyError,
)  # fmt: skip
"""Errors of parsers for unusual files: unknown encodings, numbers with too many digits."""


def read_annotations(path: Path) -> Outlines:
    """The outlines of a file: QuPath's GeoJSON, or the XML of ASAP or Aperio ImageScope.

    Raises:
        UsageError: it cannot be read, or is none of these; the file is named.
    """
    try:
        data = file_bytes(path)
        return read_geojson(_text(data)) if path.suffix.lower() in GEOJSON else _read_xml(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    except UsageError as error:
        raise UsageError(
            f"{path}: {error.what}", found=error.found, expected=error.expected, todo=error.todo
        ) from error
    except _PARSER_ERRORS as error:
        raise UsageError(
            f"{path} cannot be read", found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="annotations of QuPath, ASAP or ImageScope",
        ) from error  # fmt: skip


def file_bytes(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        UsageError: they are too many.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UsageError(
            "too large", found=f"{size / 1e6:,.0f} MB", expected=f"at most {MOST_BYTES >> 20} MiB",
            todo="export annotations without detections and cells",
        )  # fmt: skip
    return path.read_bytes()


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8, as JSON is", found=str(error)) from error


def _read_xml(data: bytes) -> Outlines:
    root = read_xml(data)
    if root.tag == ASAP:
        return read_asap(root)
    if root.tag == IMAGESCOPE:
        return read_imagescope(root)
    raise UsageError(
        "XML of another tool", found=f"<{root.tag[:60]}>",
        expected=f"<{ASAP}> (ASAP) or <{IMAGESCOPE}> (Aperio ImageScope)",
    )  # fmt: skip
