"""Identity of slides: whether two are the same, and whether files have changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from histopipe.errors import SlideUnreadable
from histopipe.slides.discovery import SlideFile


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Bytes and newest modification time of all of a slide's files."""

    size_bytes: int
    mtime_ns: int


def fingerprint(slide: SlideFile) -> Fingerprint:
    """Return size and time of a slide's files.

    Raises:
        SlideUnreadable: a file is gone.
    """
    try:
        stats = [path.stat() for path in slide.files]
    except OSError as error:
        raise SlideUnreadable(f"{slide.path} cannot be read", found=str(error)) from error
    return Fingerprint(sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats))


def tile_hash(path: Path) -> str | None:
    """Return a hash of a TIFF file for which OpenSlide makes no quickhash; None if it has no tiles.

    It covers the lengths of all native tiles and the bytes of 64 tiles all over the largest image: whole slides are too large
    to read twice, and two scans never agree in the length of every tile.
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
    except Exception:  # noqa: BLE001 - a damaged header makes tifffile raise anything
        return None
    return digest.hexdigest()
