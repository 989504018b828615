"""Files of slides: which files form a slide, the slide's id, and changes of its files."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np

from histopipe.errors import SlideUnreadable
from histopipe.system.files import to_storable_text
from histopipe.system.object_storage import RemoteFile

SUFFIXES = frozenset(
    (".bif", ".czi", ".dcm", ".mrxs", ".ndpi", ".scn", ".svs", ".svslide", ".tif", ".tiff", ".vms", ".vmu")
)  # fmt: skip
"""File name suffixes of the formats that OpenSlide reads."""
FASTSLIDE_SUFFIXES = frozenset((".i2syntax", ".isyntax", ".qptiff", ".vsi", ".zarr"))
"""File name suffixes of further formats, which only fastslide reads."""
IMAGE_SUFFIXES = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".webp"))
"""File name suffixes of images that Pillow reads. Next to slides, they are masks, thumbnails, or parts of a slide."""
TIFF_SUFFIXES = (".tif", ".tiff")
"""A TIFF file may be a slide, or one image."""
_FOLDER_SUFFIX = ".zarr"
LARGEST_INDEX = 1 << 20
"""Most bytes that are read of a VMS file, which has a few kB."""


@dataclass(frozen=True, slots=True)
class SlideFile:
    """A slide: its id, the path that OpenSlide opens, and all of its files.

    `subfolder` is the first folder below the user's argument, which may be the name of its class. `problem` is a
    problem of the file name that prevents the ingest, if any. A slide in object storage or on a web server has the
    `remote` files, in the order of `files`; its paths are those in the storage, and exist only after staging. `links`
    are other names of the same file that were found.
    """

    id: str
    path: Path
    files: tuple[Path, ...]
    subfolder: str | None = None
    problem: str | None = None
    remote: tuple[RemoteFile, ...] = ()
    links: tuple[Path, ...] = ()

    @property
    def location(self) -> str:
        """Path or URL of the file that OpenSlide opens, for messages and records. It contains no secret."""
        return self.remote[0].location if self.remote else str(self.path)

    def resolve(self) -> str:
        """Return the path of the slide without symbolic links, or its URL, in the form used in records."""
        return self.location if self.remote else to_storable_text(os.path.realpath(self.path))


def has_slide_name(path: Path) -> bool:
    """Return whether a file name is that of a slide, in a format that an installed library reads."""
    kind = path.suffix.lower()
    is_readable = kind in SUFFIXES or (kind in FASTSLIDE_SUFFIXES and has_fastslide())
    return is_readable and not path.name.startswith(".")


def has_image_name(path: Path) -> bool:
    """Return whether a file name is that of an image in a format that is not one of slides."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def is_slide_folder(path: Path) -> bool:
    """Return whether a folder is one slide, in a format that an installed library reads: OME-Zarr."""
    return path.suffix.lower() == _FOLDER_SUFFIX and has_slide_name(path) and path.is_dir()


@functools.cache
def has_fastslide() -> bool:
    """Return whether fastslide is installed."""
    return importlib.util.find_spec("fastslide") is not None


class FileReader(Protocol):
    """Access to files on a disk or in object storage."""

    def inside(self, folder: Path) -> Sequence[Path]:
        """Return the files in a folder; an empty sequence if there is no such folder."""

    def below(self, folder: Path) -> Sequence[Path]:
        """Return all files in a folder and its sub-folders."""

    def read(self, path: Path) -> bytes:
        """Return the content of a small file. Raise OSError if it cannot be read."""

    def series(self, path: Path) -> str | None:
        """Return the series of a DICOM file; None if its header cannot be read."""


def assembled(paths: Sequence[Path], base: Path, reader: FileReader) -> Iterator[SlideFile]:
    """Yield the slides of slide files, with all files of each. Ids are relative to `base`."""
    for path in paths:
        if path.suffix.lower() != ".dcm":
            files = () if path.suffix.lower() == _FOLDER_SUFFIX else (path,)
            yield _slide(path, base, (*files, *_companions(path, reader)))
    yield from _dicom_slides(
        [file for file in paths if file.suffix.lower() == ".dcm"], base, reader
    )


def _companions(path: Path, reader: FileReader) -> tuple[Path, ...]:
    """Return the other files of a slide: those in the folder of a MIRAX slide, and those that a VMS file names."""
    kind = path.suffix.lower()
    if kind == ".mrxs":
        return tuple(reader.inside(path.with_suffix("")))
    if kind == _FOLDER_SUFFIX:
        return tuple(reader.below(path))
    if kind == ".vsi":
        folders = reader.inside(path.with_name(f"_{path.stem}_"))
        return tuple(file for folder in folders for file in reader.inside(folder))
    if kind not in (".vms", ".vmu"):
        return ()
    try:
        text = reader.read(path).decode("utf-8", "replace")
    except OSError:
        return ()  # opening the slide reports the reason
    values = {line.partition("=")[2].strip() for line in text.splitlines()}
    return tuple(
        file for file in reader.inside(path.parent) if file.name in values and file != path
    )


def _dicom_slides(paths: list[Path], base: Path, reader: FileReader) -> Iterator[SlideFile]:
    """Yield one slide per DICOM series and folder, which is what OpenSlide opens."""
    series: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for path in paths:
        # If a header is damaged, opening the slide reports the reason.
        series[path.parent, reader.series(path) or path.name].append(path)
    large = Counter(folder for (folder, _), files in series.items() if len(files) > 1)
    for (folder, _), files in series.items():
        slide = _slide(files[0], base, tuple(files))
        if len(files) > 1 and large[folder] == 1:
            name = folder.name if folder == base else folder.relative_to(base).as_posix()
            slide = replace(slide, id=storable_name(name or folder.resolve().name)[0])
        yield slide


def _slide(path: Path, base: Path, files: tuple[Path, ...]) -> SlideFile:
    relative = PurePosixPath(path.relative_to(base).as_posix())
    name, problem = storable_name(relative.with_suffix("").as_posix())
    subfolder = storable_name(relative.parts[0])[0] if len(relative.parts) > 1 else None
    return SlideFile(name, path, files, subfolder, problem)


def storable_name(name: str) -> tuple[str, str | None]:
    """Return a name that can be stored, and its problem, if any: Unicode NFC, with undecodable bytes escaped."""
    try:
        name.encode()
    except UnicodeEncodeError:
        escaped = os.fsencode(name).decode("utf-8", "backslashreplace")
        return escaped, f"its file name is not UTF-8 ({escaped}); rename it"
    return unicodedata.normalize("NFC", name), None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Total size and newest modification time of all files of a slide; in object storage also their ETags."""

    size_bytes: int
    mtime_ns: int
    etag: str | None = None


def fingerprint(slide: SlideFile) -> Fingerprint:
    """Return the fingerprint of a slide's files: of files in object storage, when they were listed.

    Raises:
        SlideUnreadable: a file is missing.
    """
    if slide.remote:
        return Fingerprint(
            sum(file.size_bytes for file in slide.remote),
            max(file.mtime_ns for file in slide.remote),
            " ".join(file.etag or "" for file in slide.remote).strip() or None,
        )
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
