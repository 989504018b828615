"""Which file of a folder is of which slide."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from histopipe.annotations.read import SUFFIXES
from histopipe.errors import UsageError
from histopipe.slides.tables import SlideNames


@dataclass(frozen=True, slots=True)
class AnnotationFiles:
    """Files by the slides that they name.

    Attributes:
        by_slide: a file for each slide id.
        notes: on files that name no slide, or are not taken.
    """

    by_slide: dict[str, Path]
    notes: tuple[str, ...]


def find_annotations(place: Path, names: SlideNames) -> AnnotationFiles:
    """The files `SLIDE.geojson`, `SLIDE.json` and `SLIDE.xml` of a folder, or of one file.

    `SLIDE.more.xml` is taken where there is no `SLIDE.xml` and the like.

    Raises:
        UsageError: there is none, none names a slide, or two name the same.
    """
    if not place.exists():
        raise UsageError(f"{place} does not exist", expected="a folder of annotations, or a file")
    paths = [place] if place.is_file() else sorted(p for p in place.rglob("*") if _is_one(p))
    if not paths:
        raise UsageError(
            f"{place} holds no annotations", expected=f"files {', '.join('SLIDE' + s for s in SUFFIXES)}"
        )  # fmt: skip
    root = place.parent if place.is_file() else place
    exact: dict[str, Path] = {}
    loose: dict[str, Path] = {}
    unmatched, notes = [], []
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
    if unmatched:
        listed = ", ".join(unmatched[:3]) + (", …" if unmatched[3:] else "")
        notes.append(f"{len(unmatched)} files of annotations name no slide: {listed}")
    notes += [
        f"{path.name} is not taken: {exact[slide].name} has the name of the slide"
        for slide, path in loose.items()
        if slide in exact
    ]
    return AnnotationFiles(loose | exact, tuple(notes))


def _is_one(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
