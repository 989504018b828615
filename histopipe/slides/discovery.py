"""Find slides in files, folders and object storage, assign their ids, and detect changed files."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from histopipe.errors import NothingToDo, RemoteError, RemoteRefused, UsageError
from histopipe.slides.readers import is_image
from histopipe.slides.slide_files import (
    IMAGE_SUFFIXES,
    LARGEST_INDEX,
    SUFFIXES,
    TIFF_SUFFIXES,
    SlideFile,
    assembled,
    has_image_name,
    has_slide_name,
    is_slide_folder,
    storable_name,
)
from histopipe.system.object_storage import (
    RemoteFile,
    is_url,
    list_files,
    open_remote,
    public_url,
    read_range,
)
from histopipe.system.output import Progress, counted, message


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


_NOT_BOTH = "it is an image, and the other files are slides; pass --images to take images only"


def discover(arguments: Iterable[Path | str], *, images: bool = False) -> list[SlideFile]:
    """Return the slides in files, folders and URLs, sorted by id, without duplicates.

    If none has the name of a slide format, images are the slides. With `images`, only images are, and TIFF files of one
    image without tiles; files that belong to a slide are left out. An image that is named together with slides has a
    `problem`, so that it fails as it would without support of images.

    Raises:
        UsageError: an argument does not exist, or two slides would have the same id.
        RemoteError: a URL cannot be listed.
        NothingToDo: there is no slide.
    """
    paths = list(dict.fromkeys(arguments))
    urls = [path for path in paths if isinstance(path, str) and is_url(path)]
    roots = [Path(path) for path in paths if path not in urls]
    for root in roots:
        try:
            root.stat()
        except OSError as error:
            raise UsageError(
                f"{root} cannot be read",
                found=error.strerror,
                todo="check the path, and that its disk is mounted",
            ) from error
    slides = _slides_or_images(roots, urls, images=images)
    by_path: dict[str, list[SlideFile]] = {}
    for slide in sorted(slides, key=lambda slide: slide.id):
        by_path.setdefault(slide.resolve(), []).append(slide)
    slides = _distinct(
        [
            replace(
                first,
                links=tuple(
                    other.path for other in copies if other.path.absolute() != first.path.absolute()
                ),
            )
            for first, *copies in by_path.values()
        ]
    )
    if not slides:
        raise NothingToDo(
            f"no slide in {', '.join([*map(str, roots), *map(public_url, urls)])}",
            found=_contents(roots),
            expected="".join(
                [
                    f"files ending in {' '.join(sorted(SUFFIXES))}, or " * (not images),
                    f"images: {' '.join(sorted(IMAGE_SUFFIXES))}",
                ]
            ),
            todo="pass the folder that contains the slides",
        )
    for root in roots:
        names = (path for slide in slides for path in (slide.path, *slide.links))
        if root.is_dir() and not any(path.is_relative_to(root) for path in names):
            message(f"{root} has no slide: found {_contents([root])}")
    return sorted(slides, key=lambda slide: slide.id)


def _slides_or_images(
    roots: Sequence[Path], urls: Sequence[str], *, images: bool
) -> list[SlideFile]:
    slides = _named(roots, urls, images=False)
    scans = [slide for slide in slides if not has_image_name(slide.path)]
    if not images and scans:
        return [
            replace(slide, problem=_NOT_BOTH) if has_image_name(slide.path) else slide
            for slide in slides
        ]
    parts = {file for slide in scans for file in slide.files if file != slide.path}
    named = [slide for slide in _named(roots, urls, images=True) if slide.path not in parts]
    kept = [slide for slide in named if is_image(slide) is not False]
    if images and len(kept) < len(named):
        message(f"{counted(len(named) - len(kept), 'slide')} left out, because of --images")
    return kept


def with_recorded_ids(slides: Sequence[SlideFile], ids: Mapping[str, str]) -> list[SlideFile]:
    """Return the slides sorted by id. Slides that are in a store get their id in the store.

    `ids` are the ids in the store by the resolved path or URL of the slide.

    Raises:
        UsageError: a slide of another file has that id.
    """
    named = [replace(slide, id=ids.get(slide.resolve(), slide.id)) for slide in slides]
    locations: dict[str, str] = {}
    for slide in named:
        other = locations.setdefault(slide.id, slide.location)
        if other != slide.location:
            raise UsageError(
                f"two slides would both have the id {slide.id!r}",
                found=f"{other}, which has this id in the store, and {slide.location}",
                todo="rename one, or use another --out",
            )
    return sorted(named, key=lambda slide: slide.id)


def show_links(slides: Iterable[SlideFile], progress: Progress) -> None:
    """Show each name of a file that is not used, because the file has another name."""
    for slide in slides:
        for link in slide.links:
            progress.message(f"{link} is not used: it is the same file as {slide.path}")


def _named(roots: Sequence[Path], urls: Sequence[str], *, images: bool) -> list[SlideFile]:
    """Return the files with names of slides, or of images and TIFF files. Ids in several folders begin with its name."""
    by_root: list[tuple[str | None, Iterable[SlideFile]]] = [
        (
            _folder_name(root) if root.is_dir() and not is_slide_folder(root) else None,
            _slides_of(root, images=images),
        )
        for root in roots
    ]
    if urls:
        by_root += slides_of_urls(urls, _is_image_name if images else has_slide_name)
    several = sum(name is not None for name, _ in by_root) > 1
    return [
        replace(slide, id=f"{name}/{slide.id}") if several and name is not None else slide
        for name, of_root in by_root
        for slide in of_root
    ]


def _is_image_name(path: Path) -> bool:
    is_tiff = path.suffix.lower() in TIFF_SUFFIXES and has_slide_name(path)
    return is_tiff or has_image_name(path)


def _slides_of(root: Path, *, images: bool) -> Iterator[SlideFile]:
    if is_slide_folder(root) and not images:
        yield from assembled([root], root.parent, _LocalFiles())
        return
    paths = sorted(_walk(root)) if root.is_dir() else [root]
    candidates = [path for path in paths if _is_candidate(path, images=images)]
    if root.is_file() and not candidates and not images:
        candidates = [root]  # the user chose this file: try it with any suffix
    base = root if root.is_dir() else root.parent
    yield from assembled(candidates, base, _LocalFiles())


class _LocalFiles:
    def inside(self, folder: Path) -> Sequence[Path]:
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def below(self, folder: Path) -> Sequence[Path]:
        return sorted(path for path in folder.rglob("*") if path.is_file())

    def read(self, path: Path) -> bytes:
        with path.open("rb") as file:
            return file.read(LARGEST_INDEX)

    def series(self, path: Path) -> str | None:
        from histopipe.slides.tiles.dicom import read_text  # late: most folders have no DICOM files

        return read_text(path, "SeriesInstanceUID")


def _walk(root: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for folder, names, files in os.walk(root, followlinks=True, onerror=_refuse):
        real = os.path.realpath(folder)
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        names[:] = sorted(name for name in names if not name.startswith("."))
        slides = [name for name in names if is_slide_folder(Path(folder, name))]
        names[:] = [name for name in names if name not in slides]
        yield from (Path(folder, name) for name in [*files, *slides])


def _refuse(error: OSError) -> None:
    raise UsageError(
        f"{error.filename} cannot be listed",
        found=error.strerror,
        todo="make it readable, or pass the other folders one by one",
    ) from error


def _is_candidate(path: Path, *, images: bool) -> bool:
    if not (_is_image_name(path) if images else has_slide_name(path)):
        return False
    try:
        if is_slide_folder(path):
            return True
        return stat.S_ISREG(path.stat().st_mode)  # reading a named pipe would never end
    except OSError:
        return True  # for example a broken link, which the ingest reports


def _distinct(slides: list[SlideFile]) -> list[SlideFile]:
    count = Counter(slide.id for slide in slides)
    slides = [
        replace(slide, id=slide.id + slide.path.suffix) if count[slide.id] > 1 else slide
        for slide in slides
    ]
    paths: dict[str, Path] = {}
    for slide in slides:
        if slide.id in paths:
            raise UsageError(
                f"two slides would have the same id {slide.id!r}",
                found=f"{paths[slide.id]} and {slide.path}",
                todo="pass their common parent folder instead, or rename one",
            )
        paths[slide.id] = slide.path
    return slides


def _folder_name(folder: Path) -> str:
    return storable_name(folder.name or folder.resolve().name)[0]


def _contents(roots: list[Path]) -> str:
    names = [path for root in roots if root.is_dir() for path in _walk(root)]
    if not names:
        return "nothing" if any(root.is_dir() for root in roots) else "no folder"
    kinds = Counter(path.suffix.lower() or "no suffix" for path in names)
    listed = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(5))
    return f"{len(names)} other files ({listed})"
