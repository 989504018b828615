"""Find slides in files, folders and object storage, assign their ids, and detect changed files."""

from __future__ import annotations

import os
import stat
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from histopipe.errors import NothingToDo, RemoteRefused, UsageError, reported_as, strerror
from histopipe.slides.slide_files import SlideFile, is_image
from histopipe.slides.slide_formats import (
    FOLDER_SUFFIX,
    IMAGE_FORMATS,
    IMAGE_SUFFIXES,
    SUFFIXES,
    TIFF_SUFFIXES,
    has_image_name,
    has_slide_name,
    is_slide_folder,
)
from histopipe.system.grouping import grouped
from histopipe.system.object_storage import RemoteFile, list_files, open_remote, read_range
from histopipe.system.output import Progress, counted, message, to_storable_text
from histopipe.system.table_cells import nfc
from histopipe.system.urls import is_url, is_web, public_url

_UNREAD = IMAGE_SUFFIXES | {".avif", ".gif", ".heic", ".j2k", ".jp2", ".jpx", ".jxl"}
"""Suffixes of images that are not read, at least next to slides."""
_LARGEST_INDEX = 1 << 20
"""Most bytes that are read of a VMS file, which has a few kB."""


_Listing = Mapping[Path, RemoteFile] | None
"""The files at a URL by their paths; None for files on a disk."""


def _inside(folder: Path, listing: _Listing) -> Sequence[Path]:
    """Return the files in a folder; an empty sequence if there is no such folder."""
    if listing is not None:
        return sorted(path for path in listing if path.parent == folder)
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _read_index(path: Path, listing: _Listing) -> bytes:
    """Return the content of a small file. Raise OSError if it cannot be read."""
    if listing is not None:
        return read_range(listing[path].url, 0, min(_LARGEST_INDEX, listing[path].size_bytes))
    with path.open("rb") as file:
        return file.read(_LARGEST_INDEX)


def read_series(path: Path, listing: _Listing = None) -> str | None:
    """Return the series of a DICOM file; None if its header cannot be read."""
    from histopipe.slides.dicom_tiles import read_header  # late: most folders have no DICOM files

    with (
        suppress(OSError, ValueError),
        warnings.catch_warnings(action="ignore"),  # of damaged values
        path.open("rb") if listing is None else open_remote(listing[path].url) as file,
    ):
        return str(read_header(file, "SeriesInstanceUID").get("SeriesInstanceUID", "")) or None
    return None


def _assemble_slides(paths: Iterable[Path], base: Path, listing: _Listing) -> Iterator[SlideFile]:
    """Yield the slides of slide files, with all files of each. Ids are relative to `base`.

    A DICOM series in a folder is one slide, which is what OpenSlide opens.
    """
    series: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for path in paths:
        if path.suffix.lower() == ".dcm":
            # If a header is damaged, opening the slide reports the reason.
            series[path.parent, read_series(path, listing) or path.name].append(path)
        else:
            yield _slide(path, base, _files_of(path, listing))
    large = Counter(folder for (folder, _), files in series.items() if len(files) > 1)
    for (folder, _), files in series.items():
        slide = _slide(files[0], base, tuple(files))
        if len(files) > 1 and large[folder] == 1:
            name = folder.name if folder == base else folder.relative_to(base).as_posix()
            slide = replace(slide, id=storable_name(name or folder.resolve().name)[0])
        yield slide


def _files_of(path: Path, listing: _Listing) -> tuple[Path, ...]:
    """Return the files of a slide: also those in the folder of a MIRAX slide, and those that a VMS file names."""
    kind = path.suffix.lower()
    if kind == ".mrxs":
        return (path, *_inside(path.with_suffix(""), listing))
    if kind == FOLDER_SUFFIX:
        files = (
            (file for file in path.rglob("*") if file.is_file())
            if listing is None
            else (file for file in listing if path in file.parents)
        )
        return tuple(sorted(files))
    if kind == ".vsi":
        folders = _inside(path.with_name(f"_{path.stem}_"), listing)
        return (path, *(file for folder in folders for file in _inside(folder, listing)))
    if kind in (".vms", ".vmu"):
        with suppress(OSError):  # opening the slide reports the reason
            text = _read_index(path, listing).decode("utf-8", "replace")
            names = {line.partition("=")[2].strip() for line in text.splitlines()} - {path.name}
            return (path, *(file for file in _inside(path.parent, listing) if file.name in names))
    return (path,)


def _slide(path: Path, base: Path, files: tuple[Path, ...]) -> SlideFile:
    relative = PurePosixPath(path.relative_to(base).as_posix())
    name, problem = storable_name(relative.with_suffix("").as_posix())
    subfolder = storable_name(relative.parts[0])[0] if len(relative.parts) > 1 else None
    return SlideFile(name, path, files, subfolder, problem)


def storable_name(name: str) -> tuple[str, str | None]:
    """Return a name that can be stored, and its problem, if any: Unicode NFC, with undecodable bytes escaped."""
    escaped = to_storable_text(name)
    if escaped != name:
        return escaped, f"its file name is not UTF-8 ({escaped}); rename it"
    return nfc(name), None


def _slides_of_url(
    url: str, is_slide_name: Callable[[Path], bool]
) -> tuple[str | None, Iterable[SlideFile]]:
    """Return the name of the folder at a URL, None for a single file, and the slides behind it.

    Raises:
        UsageError: the URL does not exist, or the access is denied.
        RemoteError: the server cannot be reached.
    """
    try:
        files = list_files(url)
    except RemoteRefused as error:
        raise UsageError(
            error.what, found=error.found, expected=error.expected, todo=error.todo
        ) from None
    listing = {_path(file.url): file for file in files}
    single = len(files) == 1 and files[0].location.rstrip("/") == public_url(url).rstrip("/")
    base = _path(url).parent if single else _path(url)
    named = (
        path
        for path in sorted(listing)
        if single
        or (
            is_slide_name(path)
            and not any(part.startswith(".") for part in path.relative_to(base).parts)
        )
    )
    slides = _assemble_slides(named, base, listing)
    return None if single else base.name, [
        replace(slide, remote=tuple(listing[path] for path in slide.files)) for slide in slides
    ]


def _path(url: str) -> Path:
    """Return the path of a URL in its storage: bucket or host, then folders and name."""
    path = public_url(url).partition("://")[2]
    return Path(unquote(path) if is_web(url) else path)


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
        with reported_as(
            UsageError,
            f"{root} cannot be read",
            OSError,
            reason=strerror,
            todo="check the path, and that its disk is mounted",
        ):
            root.stat()
    listed = sorted(_slides_or_images(roots, urls, images=images), key=lambda slide: slide.id)
    slides = _with_distinct_ids(
        [
            replace(
                first,
                links=tuple(
                    other.path for other in copies if other.path.absolute() != first.path.absolute()
                ),
            )
            for first, *copies in grouped(listed, SlideFile.resolve).values()
        ]
    )
    _show_unread(roots, slides)
    if not slides:
        raise NothingToDo(
            f"no slide in {', '.join([*map(str, roots), *map(public_url, urls)])}",
            found=_contents(roots),
            expected="".join(
                [
                    f"files ending in {' '.join(sorted(SUFFIXES - IMAGE_SUFFIXES))}, or "
                    * (not images),
                    f"images: {' '.join(sorted(IMAGE_SUFFIXES))}",
                ]
            ),
            todo="pass the folder that contains the slides",
        )
    for root in roots:
        if root.is_dir() and not any(
            path.is_relative_to(root) for slide in slides for path in (slide.path, *slide.links)
        ):
            message(f"{root} has no slide: found {_contents([root])}")
    return sorted(slides, key=lambda slide: slide.id)


def _show_unread(roots: Iterable[Path], slides: Iterable[SlideFile]) -> None:
    """Show which images, and DICOM files without suffix, are left out of folders."""
    taken = {path for slide in slides for path in (*slide.files, *slide.links)}
    every = [path for root in roots if root.is_dir() for path in _walk(root) if path not in taken]
    counts = Counter(path.suffix.lower() for path in every if path.suffix.lower() in _UNREAD)
    unnamed = (path for path in every if not path.suffix.strip(".0123456789"))
    if dicom := sum(map(_is_dicom, unnamed)):
        message(f"{counted(dicom, 'DICOM file')} not read: name them *.dcm")
    if counts:
        listed = ", ".join(f"{count} × {kind}" for kind, count in sorted(counts.items()))
        message(
            f"images not read: {listed}; next to slides, ingest and predict take {IMAGE_FORMATS} with --images, view "
            "those that are named; convert others"
        )


def _is_dicom(path: Path) -> bool:
    with suppress(OSError):
        return _is_readable(path) and _read_index(path, None)[128:132] == b"DICM"
    return False


def _slides_or_images(
    roots: Sequence[Path], urls: Sequence[str], *, images: bool
) -> list[SlideFile]:
    slides = _named(roots, urls, images=False)
    scans = [slide for slide in slides if not has_image_name(slide.path)]
    if not images and scans:
        problem = (
            "it is an image, and the other files are slides; pass --images to take images only"
        )
        return [
            replace(slide, problem=problem) if has_image_name(slide.path) else slide
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
        if (other := locations.setdefault(slide.id, slide.location)) != slide.location:
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
    is_slide_name: Callable[[Path], bool] = (
        (
            lambda path: (
                has_image_name(path)
                or (path.suffix.lower() in TIFF_SUFFIXES and has_slide_name(path))
            )
        )
        if images
        else has_slide_name
    )
    by_root = [
        *(_slides_of(root, is_slide_name, images=images) for root in roots),
        *(_slides_of_url(url, is_slide_name) for url in urls),
    ]
    several = sum(name is not None for name, _ in by_root) > 1
    return [
        replace(slide, id=f"{name}/{slide.id}") if several and name is not None else slide
        for name, of_root in by_root
        for slide in of_root
    ]


def _slides_of(
    root: Path, is_slide_name: Callable[[Path], bool], *, images: bool
) -> tuple[str | None, Iterable[SlideFile]]:
    """Return the name of a folder, None for a single slide, and the slides in it."""
    if root.is_dir() and (images or not is_slide_folder(root)):
        paths = [path for path in sorted(_walk(root)) if is_slide_name(path) and _is_readable(path)]
        name = None if is_slide_folder(root) else storable_name(root.name or root.resolve().name)[0]
        return name, _assemble_slides(paths, root, None)
    # The user chose this file: it is taken with any suffix, unless only images are.
    taken = _is_readable(root) and (not images or is_slide_name(root))
    return None, _assemble_slides([root] * taken, root.parent, None)


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


def _is_readable(path: Path) -> bool:
    """Return False for files such as named pipes, whose reading would never end."""
    with suppress(OSError):  # for example a broken link, which the ingest reports
        return is_slide_folder(path) or stat.S_ISREG(path.stat().st_mode)
    return True


def _with_distinct_ids(slides: list[SlideFile]) -> list[SlideFile]:
    count = Counter(slide.id for slide in slides)
    slides = [
        replace(slide, id=slide.id + slide.path.suffix) if count[slide.id] > 1 else slide
        for slide in slides
    ]
    paths: dict[str, Path] = {}
    for slide in slides:
        if (first := paths.setdefault(slide.id, slide.path)) is not slide.path:
            raise UsageError(
                f"two slides would have the same id {slide.id!r}",
                found=f"{first} and {slide.path}",
                todo="pass their common parent folder instead, or rename one",
            )
    return slides


def _contents(roots: list[Path]) -> str:
    names = [path for root in roots if root.is_dir() for path in _walk(root)]
    if not names:
        return "nothing" if any(root.is_dir() for root in roots) else "no folder"
    suffixes = Counter(path.suffix.lower() or "no suffix" for path in names)
    listed = ", ".join(f"{count} × {kind}" for kind, count in suffixes.most_common(5))
    return f"{len(names)} other files ({listed})"
