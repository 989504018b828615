"""Find the annotation files of slides, and read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import shapely

from histopipe.annotations.geojson import read_geojson
from histopipe.annotations.outline import Outlines
from histopipe.annotations.xml_formats import read_xml
from histopipe.errors import UsageError
from histopipe.slides.tables import SlideNames

GEOJSON, XML = (".geojson", ".json"), (".xml", ".annotations")
SUFFIXES = (*GEOJSON, *XML)
MOST_BYTES = 128 << 20
"""Largest file. Outlines of all glands of a slide take a few megabytes; parsing needs 20 to 40 times the file size."""
_PARSER_ERRORS = (
    ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError, shapely.errors.ShapelyError,
)  # fmt: skip
"""Errors of parsers for unusual files: unknown encodings, numbers with too many digits."""


@dataclass(frozen=True, slots=True)
class AnnotationFiles:
    """Annotation files by slide id, and notes on files that are not used."""

    by_slide: dict[str, Path]
    notes: tuple[str, ...]


def find_annotations(path: Path, names: SlideNames) -> AnnotationFiles:
    """Find the files of `SUFFIXES` in a folder, such as `SLIDE.geojson`, or match one file with its slide.

    `SLIDE.more.xml` is used if there is no `SLIDE.xml`; likewise for the other suffixes.

    Raises:
        UsageError: there is no file, no file matches a slide, or two match the same slide.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist", expected="a folder of annotations, or a file")
    files = [path] if path.is_file() else annotation_files(path)
    if not files:
        raise UsageError(
            f"{path} contains no annotations", expected=f"files {', '.join('SLIDE' + s for s in SUFFIXES)}"
        )  # fmt: skip
    exact, loose, unmatched = match_files(files, path.parent if path.is_file() else path, names)
    if not exact and not loose:
        raise UsageError(
            f"{path}: no annotation file has the name of a slide", found=unmatched[0],
            expected=f"a name such as {names.nearest(PurePosixPath(unmatched[0]).stem)}{SUFFIXES[0]}",
        )  # fmt: skip
    notes = []
    if unmatched:
        listed = ", ".join(unmatched[:3]) + (", …" if unmatched[3:] else "")
        notes.append(f"{len(unmatched)} annotation files match no slide: {listed}")
    notes += [
        f"{file.name} is not used: {exact[slide].name} has the exact name of the slide"
        for slide, file in loose.items()
        if slide in exact
    ]
    return AnnotationFiles(loose | exact, tuple(notes))


def annotation_files(folder: Path) -> list[Path]:
    """Return all annotation files of a folder, sorted."""
    return sorted(filter(_is_annotation, folder.rglob("*")))


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
        stem = file.relative_to(root).with_suffix("").as_posix()
        shorter = PurePosixPath(stem).with_suffix("").as_posix()
        for matches, name in ((exact, stem), (loose, shorter)):
            slide = names.find(name, where=str(file))
            if slide is None:
                continue
            if slide in matches:
                raise UsageError(
                    f"two annotation files for slide {slide}", found=f"{matches[slide]} and {file}",
                    todo="keep one, or move one to another folder",
                )  # fmt: skip
            matches[slide] = file
            break
        else:
            unmatched.append(file.name)
    return exact, loose, unmatched


def read_annotations(path: Path, class_property: str | None = None) -> Outlines:
    """Read the outlines of a file: GeoJSON of QuPath, or XML of ASAP, Aperio ImageScope or HALO.

    `class_property` is the property with the class; None for the usual one of each tool.

    Raises:
        UsageError: the file cannot be read, or has another format. The message contains the path.
    """
    try:
        data = file_bytes(path)
        read = read_geojson if path.suffix.lower() in GEOJSON else read_xml
        return read(data, class_property)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    except UsageError as error:
        raise UsageError(
            f"{path}: {error.what}", found=error.found, expected=error.expected, todo=error.todo
        ) from error
    except _PARSER_ERRORS as error:
        raise UsageError(
            f"{path} cannot be read", found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="annotations of QuPath, ASAP, ImageScope or HALO",
        ) from error  # fmt: skip


def file_bytes(path: Path) -> bytes:
    """Read a file; raise a `UsageError` if it is too large, or an `OSError`."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UsageError(
            "the file is too large", found=f"{size / 1e6:,.0f} MB", expected=f"at most {MOST_BYTES >> 20} MiB",
            todo="export annotations without detections and cells",
        )  # fmt: skip
    return path.read_bytes()


def _is_annotation(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
