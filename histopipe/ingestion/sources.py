"""Sources of an ingest: paths and URLs of slides, lists of slides, and the folder where they are staged."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.tables import SlideNames, read_slide_list, urls_in_list
from histopipe.system.files import PathLike
from histopipe.system.urls import is_url, public_url


def sources(
    slides: PathLike | Sequence[PathLike], slide_list: PathLike | None
) -> tuple[list[Path], list[str]]:
    """Return the paths and the URLs of slides and folders, also the URLs in a slide list.

    Raises:
        UsageError: there is none, or the list is invalid.
    """
    arguments = [slides] if isinstance(slides, str | Path) else slides
    urls = [argument for argument in arguments if isinstance(argument, str) and is_url(argument)]
    paths = [Path(argument) for argument in arguments if argument not in urls]
    if slide_list is not None:
        urls += urls_in_list(Path(slide_list))
    if not paths and not urls:
        raise UsageError(
            "no slides", expected="files, folders or URLs, or a --slide-list with URLs"
        )
    return paths, urls


def stage_folder(folder: PathLike | None, slides: Sequence[SlideFile]) -> Path | None:
    """Return the folder to which slides are copied before they are read; None to read them in place.

    Slides at a URL are always copied: into the temporary folder if no folder is given.
    """
    if folder is None and not any(slide.remote for slide in slides):
        return None
    return Path(tempfile.gettempdir() if folder is None else folder).absolute()


def listed(
    slides: list[SlideFile], path: PathLike | None, names: SlideNames, *, allow_extra: bool
) -> list[SlideFile]:
    """Return the slides of a slide list; all slides if there is no list.

    Raises:
        UsageError: the list is invalid, or matches no slide.
    """
    if path is None:
        return slides
    names_listed = read_slide_list(Path(path), names, allow_extra=allow_extra)
    urls = [public_url(url) for url in urls_in_list(Path(path))]
    chosen = [
        slide
        for slide in slides
        if slide.id in names_listed or any(_is_behind(slide, url) for url in urls)
    ]
    if not chosen:
        raise UsageError(
            f"{path} matches none of the slides", found=f"{len(names_listed)} other names"
        )
    return chosen


def _is_behind(slide: SlideFile, url: str) -> bool:
    """Return whether a slide is the file at a URL, or below this prefix."""
    return bool(slide.remote) and f"{slide.location}/".startswith(url.rstrip("/") + "/")
