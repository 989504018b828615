"""Find slides in files and folders, assign their ids, and detect changed files."""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from histopipe.errors import NothingToDo, SlideUnreadable, UsageError

SUFFIXES = frozenset(
    (".bif", ".czi", ".dcm", ".mrxs", ".ndpi", ".scn", ".svs", ".svslide", ".tif", ".tiff", ".vms", ".vmu")
)  # fmt: skip
"""File name suffixes of the formats that OpenSlide reads."""


@dataclass(frozen=True, slots=True)
class SlideFile:
    """A slide on disk: its id, the path that OpenSlide opens, and all of its files.

    `subfolder` is the first folder below the user's argument, which may be the name of its class. `problem` is a
    problem of the file name that prevents the ingest, if any.
    """

    id: str
    path: Path
    files: tuple[Path, ...]
    subfolder: str | None = None
    problem: str | None = None


def discover(arguments: Iterable[Path]) -> list[SlideFile]:
    """Return the slides in files and folders, sorted by id, without duplicates.

    Raises:
        UsageError: an argument does not exist, or two slides would have the same id.
        NothingToDo: there is no slide.
    """
    roots = list(dict.fromkeys(arguments))
    for root in roots:
        try:
            root.stat()
        except OSError as error:
            raise UsageError(
                f"{root} cannot be read",
                found=error.strerror,
                todo="check the path, and that its disk is mounted",
            ) from error
    folders = [root for root in roots if root.is_dir()]
    slides: list[SlideFile] = []
    for root in roots:
        prefix = f"{_folder_name(root)}/" if len(folders) > 1 and root.is_dir() else ""
        slides += [replace(slide, id=prefix + slide.id) for slide in _slides_of(root)]
    by_path: dict[str, SlideFile] = {}
    for slide in sorted(slides, key=lambda slide: slide.id):
        by_path.setdefault(os.path.realpath(slide.path), slide)
    slides = _distinct(list(by_path.values()))
    if not slides:
        raise NothingToDo(
            f"no slide in {', '.join(map(str, roots))}",
            found=_contents(roots),
            expected="files ending in " + " ".join(sorted(SUFFIXES)),
            todo="pass the folder that contains the slides",
        )
    return sorted(slides, key=lambda slide: slide.id)


def _slides_of(root: Path) -> Iterator[SlideFile]:
    paths = sorted(_walk(root)) if root.is_dir() else [root]
    candidates = [path for path in paths if _is_candidate(path)]
    if root.is_file() and not candidates:
        candidates = [root]  # the user chose this file: try it with any suffix
    base = root if root.is_dir() else root.parent
    dicom = [path for path in candidates if path.suffix.lower() == ".dcm"]
    for path in candidates:
        if path.suffix.lower() != ".dcm":
            yield _slide(path, base, (path, *_companions(path)))
    yield from _dicom_slides(dicom, base)


def _walk(root: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for folder, names, files in os.walk(root, followlinks=True, onerror=_refuse):
        real = os.path.realpath(folder)
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        names[:] = sorted(name for name in names if not name.startswith("."))
        yield from (Path(folder, name) for name in files)


def _refuse(error: OSError) -> None:
    raise UsageError(
        f"{error.filename} cannot be listed",
        found=error.strerror,
        todo="make it readable, or pass the other folders one by one",
    ) from error


def _is_candidate(path: Path) -> bool:
    if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)  # reading a named pipe would never end
    except OSError:
        return True  # for example a broken link, which the ingest reports


def _companions(path: Path) -> tuple[Path, ...]:
    """Return the other files of a MIRAX slide, which are in a folder of the same name."""
    if path.suffix.lower() != ".mrxs":
        return ()
    folder = path.with_suffix("")
    return tuple(sorted(folder.iterdir())) if folder.is_dir() else ()


def _dicom_slides(paths: list[Path], base: Path) -> Iterator[SlideFile]:
    """Yield one slide per DICOM series and folder, which is what OpenSlide opens."""
    if not paths:
        return
    from histopipe.slides.tiles.dicom import read_text  # late: most folders have no DICOM files

    series: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for path in paths:
        # If a header is damaged, opening the slide reports the reason.
        series[path.parent, read_text(path, "SeriesInstanceUID") or path.name].append(path)
    large = Counter(folder for (folder, _), files in series.items() if len(files) > 1)
    for (folder, _), files in series.items():
        slide = _slide(files[0], base, tuple(files))
        if len(files) > 1 and large[folder] == 1:
            name = folder.name if folder == base else folder.relative_to(base).as_posix()
            slide = replace(slide, id=_text(name or folder.resolve().name)[0])
        yield slide


def _slide(path: Path, base: Path, files: tuple[Path, ...]) -> SlideFile:
    relative = PurePosixPath(path.relative_to(base).as_posix())
    name, problem = _text(relative.with_suffix("").as_posix())
    subfolder = _text(relative.parts[0])[0] if len(relative.parts) > 1 else None
    return SlideFile(name, path, files, subfolder, problem)


def _text(name: str) -> tuple[str, str | None]:
    """Return a name that can be stored, and its problem, if any: Unicode NFC, with undecodable bytes escaped."""
    try:
        name.encode()
    except UnicodeEncodeError:
        escaped = os.fsencode(name).decode("utf-8", "backslashreplace")
        return escaped, f"its file name is not UTF-8 ({escaped}); rename it"
    return unicodedata.normalize("NFC", name), None


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
    return _text(folder.name or folder.resolve().name)[0]


def _contents(roots: list[Path]) -> str:
    names = [path for root in roots if root.is_dir() for path in _walk(root)]
    if not names:
        return "nothing" if any(root.is_dir() for root in roots) else "no folder"
    kinds = Counter(path.suffix.lower() or "no suffix" for path in names)
    listed = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(5))
    return f"{len(names)} other files ({listed})"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Total size and newest modification time of all files of a slide."""

    size_bytes: int
    mtime_ns: int


def fingerprint(slide: SlideFile) -> Fingerprint:
    """Return the fingerprint of a slide's files.

    Raises:
        SlideUnreadable: a file is missing.
    """
    try:
        stats = [path.stat() for path in slide.files]
    except OSError as error:
        raise SlideUnreadable(f"{slide.path} cannot be read", found=str(error)) from error
    return Fingerprint(sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats))


def tile_hash(path: Path) -> str | None:
    """Return a hash of a TIFF file for which OpenSlide computes no quickhash; None if it has no tiles.

    It covers the lengths of all native tiles and the bytes of 64 tiles spread over the largest image. Whole slides are
    too large to read twice, and the tile lengths of two scans are never all equal.
    """
    import tifffile  # late: few slides need it

    digest = hashlib.sha256()
    try:
        with tifffile.TiffFile(path) as tiff:
            page = tiff.pages.first
            counts = np.asarray(page.databytecounts, dtype="<u8")
            offsets = np.asarray(page.dataoffsets, dtype="<u8")
            digest.update(counts.tobytes())
            chosen = np.unique(np.linspace(0, len(counts) - 1, 64).astype(int))
            for index in chosen:
                tiff.filehandle.seek(int(offsets[index]))
                digest.update(tiff.filehandle.read(int(counts[index])))
    except Exception:  # noqa: BLE001 - on a damaged header, tifffile may raise any exception
        return None
    return digest.hexdigest()
