"""Files of annotations: which is of which slide, and what each holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import shapely

from histopipe.annotations.geojson import read_geojson
from histopipe.annotations.outline import Outlines
from histopipe.annotations.xml_formats import read_xml
from histopipe.errors import UsageError
from histopipe.slides.tables import SlideNames

GEOJSON, XML = (".geojson", ".json"), (".xml",)
SUFFIXES = (*GEOJSON, *XML)
MOST_BYTES = 128 << 20
"""Outlines of a whole slide's glands are some megabytes. What is parsed takes 20 to 40 times its size in memory."""
_PARSER_ERRORS = (
    ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError, shapely.errors.ShapelyError,
)  # fmt: skip
"""Errors of parsers for unusual files: unknown encodings, numbers with too many digits."""


@dataclass(frozen=True, slots=True)
class AnnotationFiles:
    """Files by the id of the slide that they name, and notes on files that name none, or are not taken."""

    by_slide: dict[str, Path]
    notes: tuple[str, ...]


def find_annotations(place: Path, names: SlideNames) -> AnnotationFiles:
    """Find the files `SLIDE.geojson`, `SLIDE.json` and `SLIDE.xml` of a folder, or of one file.

    `SLIDE.more.xml` is taken where there is no `SLIDE.xml` and the like.

    Raises:
        UsageError: there is none, none names a slide, or two name the same.
    """
    if not place.exists():
        raise UsageError(f"{place} does not exist", expected="a folder of annotations, or a file")
    paths = [place] if place.is_file() else sorted(filter(_is_annotation, place.rglob("*")))
    if not paths:
        raise UsageError(
            f"{place} holds no annotations", expected=f"files {', '.join('SLIDE' + s for s in SUFFIXES)}"
        )  # fmt: skip
    root = place.parent if place.is_file() else place
    exact: dict[str, Path] = {}
    loose: dict[str, Path] = {}
    unmatched = []
    for path in paths:
        written = path.relative_to(root).with_suffix("").as_posix()
        shorter = PurePosixPath(written).with_suffix("").as_posix()
        for found, name in ((exact, written), (loose, shorter)):
            slide = names.find(name, where=str(path))
            if slide is None:
                continue
            if slide in found:
                raise UsageError(
                    f"two files of annotations for slide {slide}", found=f"{found[slide]} and {path}",
                    todo="keep one, or give it with its own folder",
                )  # fmt: skip
            found[slide] = path
            break
        else:
            unmatched.append(path.name)
    if not exact and not loose:
        raise UsageError(
            f"{place}: no file of annotations has the name of a slide", found=unmatched[0],
            expected=f"such as {names.nearest(PurePosixPath(unmatched[0]).stem)}{SUFFIXES[0]}",
        )  # fmt: skip
    notes = []
    if unmatched:
        listed = ", ".join(unmatched[:3]) + (", …" if unmatched[3:] else "")
        notes.append(f"{len(unmatched)} files of annotations name no slide: {listed}")
    notes += [
        f"{path.name} is not taken: {exact[slide].name} has the name of the slide"
        for slide, path in loose.items()
        if slide in exact
    ]
    return AnnotationFiles(loose | exact, tuple(notes))


def read_annotations(path: Path) -> Outlines:
    """Read the outlines of a file: QuPath's GeoJSON, or the XML of ASAP or Aperio ImageScope.

    Raises:
        UsageError: it cannot be read, or is none of these; the file is named.
    """
    try:
        data = file_bytes(path)
        return read_geojson(data) if path.suffix.lower() in GEOJSON else read_xml(data)
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
    """Read a file; raise a `UsageError` if it is too large, or an `OSError`."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UsageError(
            "too large", found=f"{size / 1e6:,.0f} MB", expected=f"at most {MOST_BYTES >> 20} MiB",
            todo="export annotations without detections and cells",
        )  # fmt: skip
    return path.read_bytes()


def _is_annotation(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
