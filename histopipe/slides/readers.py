"""Open slides with the reader that supports their format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from histopipe.errors import SlideUnreadable
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
    name = (reader or "openslide").partition(" ")[0]
    if name != "auto":
        return _opener(name)(path)
    if path.suffix.lower() in FASTSLIDE_SUFFIXES:
        return _opener("fastslide")(path)
    if has_image_name(path):
        return _opener("pillow")(path)
    generic = _is_tiff(path) and detected_format(path) in _GENERIC
    if generic and _is_ome(path):
        return _opener("tifffile")(path)
    try:
        return _opener("openslide")(path)
    except SlideUnreadable as error:
        first = error
    # The advice of the last reader is the best: it knows more about the file than that it is no slide.
    reasons, todo = [str(SlideUnreadable(first.what, found=first.found))], first.todo
    # Of the formats of OpenSlide, fastslide reads more files of only this one.
    is_czi = path.suffix.lower() == ".czi" and has_fastslide()
    for other, fits in (("tifffile", generic), ("fastslide", is_czi)):
        if fits:
            try:
                return _opener(other)(path)
            except SlideUnreadable as error:
                reasons += [f"{other}: {error}"] if str(error) != str(first) else []
                todo = None if error.todo else todo
    if len(reasons) == 1:
        raise first
    raise SlideUnreadable("; ".join(reasons), todo=todo) from first


def is_image(slide: SlideFile) -> bool | None:
    """Return whether a slide is one image and not a scan: by its name, or a TIFF file of one image without tiles.

    None if a TIFF file cannot be read. One at a URL counts as a scan, since only its name is known.
    """
    path = slide.path
    if path.suffix.lower() not in TIFF_SUFFIXES or slide.remote:
        return has_image_name(path)
    import tifffile  # late: as above

    # On a damaged header, tifffile may raise any exception.
    with suppress(Exception), tifffile.TiffFile(path) as tiff:
        scan = tiff.is_ome or tiff.is_svs or tiff.pages.first.is_tiled
        return not scan and len(tiff.pages) == 1
    return None


def _opener(name: str) -> Callable[[Path], Slide]:
    # Late: most slides need only OpenSlide.
    if name == "tifffile":
        from histopipe.slides.tiff_reader import TiffReader

        return TiffReader
    if name == "pillow":
        from histopipe.slides.image_reader import ImageReader

        return ImageReader
    if name == "fastslide":
        from histopipe.slides.fastslide_reader import FastSlideReader

        return FastSlideReader
    return _open_with_openslide


def _open_with_openslide(path: Path) -> Slide:
    notes: tuple[str, ...] = ()
    if _is_tiff(path):
        from histopipe.slides.tiff_pyramid import check_openslide_pages

        notes = check_openslide_pages(path)
    slide = OpenSlideReader(path)
    slide.info = replace(slide.info, notes=notes if slide.info.vendor in _GENERIC else ())
    return slide


def _is_tiff(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) in TIFF_SIGNS
    return False


def _is_ome(path: Path) -> bool:
    """Return whether the description of the first image is OME-XML."""
    import tifffile  # late: as above

    # On a damaged header, tifffile may raise any exception.
    with suppress(Exception), tifffile.TiffFile(path) as tiff:
        return bool(tiff.is_ome)
    return False
