"""Find slides in object storage and on web servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from histopipe.errors import RemoteError, RemoteRefused, UsageError
from histopipe.slides.slide_files import LARGEST_INDEX, SlideFile, assembled, has_slide_name
from histopipe.system.object_storage import RemoteFile, list_files, open_remote, read_range
from histopipe.system.urls import public_url


def slides_of_urls(
    urls: Sequence[str], is_slide_name: Callable[[Path], bool] = has_slide_name
) -> Iterator[tuple[str | None, list[SlideFile]]]:
    """Yield for each URL the name of its folder, None for a single file, and the slides behind it.

    Raises:
        UsageError: the URL does not exist, or the access is denied.
        RemoteError: the server cannot be reached.
    """
    for url in urls:
        try:
            files = list_files(url)
        except RemoteRefused as error:
            raise UsageError(
                error.what, found=error.found, expected=error.expected, todo=error.todo
            ) from None
        listing = {_path(file.url): file for file in files}
        single = len(files) == 1 and files[0].location.rstrip("/") == public_url(url).rstrip("/")
        base = _path(url).parent if single else _path(url)
        named = [
            path
            for path in sorted(listing)
            if single or (is_slide_name(path) and not _is_hidden(path, base))
        ]
        slides = [
            replace(slide, remote=tuple(listing[path] for path in slide.files))
            for slide in assembled(named, base, _RemoteFiles(listing))
        ]
        yield None if single else base.name, slides


class _RemoteFiles:
    """Access to the listed files, as a `FileReader`."""

    def __init__(self, listing: dict[Path, RemoteFile]) -> None:
        self._listing = listing

    def inside(self, folder: Path) -> Sequence[Path]:
        return sorted(path for path in self._listing if path.parent == folder)

    def below(self, folder: Path) -> Sequence[Path]:
        return sorted(path for path in self._listing if folder in path.parents)

    def read(self, path: Path) -> bytes:
        file = self._listing[path]
        return read_range(file, 0, min(LARGEST_INDEX, file.size_bytes))

    def series(self, path: Path) -> str | None:
        from histopipe.slides.tiles.dicom import read_text  # late: few slides are DICOM files

        try:
            with open_remote(self._listing[path]) as file:
                return read_text(file, "SeriesInstanceUID")
        except RemoteError:
            return None


def _is_hidden(path: Path, base: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(base).parts)


def _path(url: str) -> Path:
    """Return the path of a URL in its storage: bucket or host, then folders and name."""
    place = public_url(url)
    path = place.partition("://")[2]
    return Path(unquote(path) if place.startswith("http") else path)
