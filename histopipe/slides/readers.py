"""Open slides with the reader that supports their format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from histopipe.errors import SlideUnreadable
from histopipe.slides.fastslide_reader import FastSlideReader
from histopipe.slides.image_reader import ImageReader
from histopipe.slides.openslide_reader import OpenSlideReader, detected_format
from histopipe.slides.slide import Slide
from histopipe.slides.slide_files import (
    FASTSLIDE_SUFFIXES,
    TIFF_SUFFIXES,
    SlideFile,
    has_fastslide,
    has_image_name,
)
from histopipe.system.files import TIFF_SIGNS

_GENERIC = (None, "generic-tiff")
"""Formats by OpenSlide's detection of files that tifffile may read instead: it knows nothing else about them."""


def open_slide(path: Path, reader: str | None = "auto") -> Slide:
    """Open a slide.

    With "auto", Pillow opens images by the suffix of their names; OpenSlide opens the formats of scanners; tifffile
    opens OME-TIFF, and other TIFF files that OpenSlide refuses; fastslide, if it is installed, files that both refuse.
    `reader` may also be the `reader` of a slide's record, whose version is ignored; None is "openslide", the only one
    of earlier versions.

    Raises:
        SlideUnreadable: the file is not a slide, or is damaged.
    """
    chosen = (reader or "openslide").partition(" ")[0]
    errors: dict[str, SlideUnreadable] = {}
    for name in _readers_for(path) if chosen == "auto" else (chosen,):
        try:
            return _READERS.get(name, _open_with_openslide)(path)
        except SlideUnreadable as error:
            errors[name] = error
    first, *later = errors.values()
    reasons = [f"{name}: {error}" for name, error in errors.items() if str(error) != str(first)]
    if not reasons:
        raise first
    # The advice of the last reader is the best: it knows more about the file than that it is no slide.
    reasons.insert(0, str(SlideUnreadable(first.what, found=first.found)))
    todo = None if any(error.todo for error in later) else first.todo
    raise SlideUnreadable("; ".join(reasons), todo=todo) from first


def _readers_for(path: Path) -> tuple[str, ...]:
    """Return the readers to try, in order."""
    if path.suffix.lower() in FASTSLIDE_SUFFIXES:
        return ("fastslide",)
    if has_image_name(path):
        return ("pillow",)
    if _is_tiff(path) and detected_format(path) in _GENERIC:
        from histopipe.slides.tiles.tiff import try_tiff  # late: it takes 0.1 s

        return ("tifffile",) if try_tiff(path, attrgetter("is_ome")) else ("openslide", "tifffile")
    # Of the formats of OpenSlide, fastslide reads more files of only this one.
    is_czi = path.suffix.lower() == ".czi" and has_fastslide()
    return ("openslide", "fastslide") if is_czi else ("openslide",)


def is_image(slide: SlideFile) -> bool | None:
    """Return whether a slide is one image and not a scan: by its name, or a TIFF file of one image without tiles.

    None if a TIFF file cannot be read. One at a URL counts as a scan, since only its name is known.
    """
    path = slide.path
    if path.suffix.lower() not in TIFF_SUFFIXES or slide.remote:
        return has_image_name(path)
    from histopipe.slides.tiles.tiff import has_one_image, try_tiff  # late: it takes 0.1 s

    return try_tiff(path, has_one_image)


def _open_with_tifffile(path: Path) -> Slide:
    from histopipe.slides.tiff_reader import TiffReader  # late: it takes 0.1 s

    return TiffReader(path)


_READERS: Mapping[str, Callable[[Path], Slide]] = {
    "pillow": ImageReader,
    "fastslide": FastSlideReader,
    "tifffile": _open_with_tifffile,
}
"""Readers by name. Any other name is OpenSlide's."""


def _open_with_openslide(path: Path) -> Slide:
    notes: tuple[str, ...] = ()
    if _is_tiff(path):
        from histopipe.slides.tiff_reader import check_openslide_pages  # late: as above
        from histopipe.slides.tiles.tiff import try_tiff

        # A file that tifffile cannot read is left to OpenSlide.
        notes = try_tiff(path, partial(check_openslide_pages, path)) or ()
    slide = OpenSlideReader(path)
    slide.info = replace(slide.info, notes=notes if slide.info.vendor in _GENERIC else ())
    return slide


def _is_tiff(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) in TIFF_SIGNS
    return False
