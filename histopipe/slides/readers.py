"""Open slides with the reader that supports their format."""

from __future__ import annotations

import pkgutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from histopipe.errors import SlideUnreadable
from histopipe.slides.openslide_reader import OpenSlideReader, detected_format
from histopipe.slides.slide import Slide
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.slide_formats import READERS, TIFF_SUFFIXES, has_image_name, readers_of
from histopipe.system.files import TIFF_SIGNS

_GENERIC = (None, "generic-tiff")
"""Formats by OpenSlide's detection of files that tifffile may read instead: it knows nothing else about them."""


def open_slide(path: Path, reader: str | None = "auto") -> Slide:
    """Open a slide.

    With "auto", the suffix decides, see `READERS`; of generic TIFF files, the content. `reader` may also be the `reader`
    of a slide's record, whose version is ignored; None is "openslide", the only one of earlier versions.

    Raises:
        SlideUnreadable: the file is not a slide, or is damaged.
    """
    chosen = (reader or "openslide").partition(" ")[0]
    errors: dict[str, SlideUnreadable] = {}
    for name in _readers_for(path) if chosen == "auto" else (chosen,):
        try:
            slide: Slide = pkgutil.resolve_name(READERS.get(name, READERS["openslide"]).opener)(
                path
            )
        except SlideUnreadable as error:
            errors[name] = error
        else:
            return slide
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
    readers = readers_of(path)
    if readers[0] == "openslide" and _is_tiff(path) and detected_format(path) in _GENERIC:
        from histopipe.slides.tiff_tiles import try_tiff  # late: it takes 0.1 s

        return ("tifffile",) if try_tiff(path, attrgetter("is_ome")) else ("openslide", "tifffile")
    return readers


def is_image(slide: SlideFile) -> bool | None:
    """Return whether a slide is one image and not a scan: by its name, or a TIFF file of one image without tiles.

    None if a TIFF file cannot be read. One at a URL counts as a scan, since only its name is known.
    """
    path = slide.path
    if path.suffix.lower() not in TIFF_SUFFIXES or slide.remote:
        return has_image_name(path)
    from histopipe.slides.tiff_tiles import has_one_image, try_tiff  # late: it takes 0.1 s

    return try_tiff(path, has_one_image)


def open_with_openslide(path: Path) -> Slide:
    """Open a slide with OpenSlide, with notes on the pages of a TIFF file that it does not read."""
    notes: tuple[str, ...] = ()
    if _is_tiff(path):
        from histopipe.slides.tiff_reader import check_openslide_pages  # late: as above
        from histopipe.slides.tiff_tiles import try_tiff

        # A file that tifffile cannot read is left to OpenSlide.
        notes = try_tiff(path, partial(check_openslide_pages, path)) or ()
    slide = OpenSlideReader(path)
    slide.info = replace(slide.info, notes=notes if slide.info.vendor in _GENERIC else ())
    return slide


def _is_tiff(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) in TIFF_SIGNS
    return False
