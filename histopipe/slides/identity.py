"""Whether two slides are the same slide, and whether a file is still what it was."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from histopipe.errors import SlideUnreadable
from histopipe.slides.discovery import SlideFile

SAMPLED_TILES = 64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Bytes and newest modification time of all of a slide's files."""

    size_bytes: int
    mtime_ns: int


def fingerprint(slide: SlideFile) -> Fingerprint:
    """Size and time of a slide's files.

    Raises:
        SlideUnreadable: a file is gone.
    """
    try:
        stats = [path.stat() for path in slide.files]
    except OSError as error:
        raise SlideUnreadable(f"{slide.path} cannot be read", found=str(error)) from error
    return Fingerprint(sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats))


def tile_hash(path: Path) -> str | None:
    """A hash for a TIFF that OpenSlide makes no quickhash of, or None where there are no tiles to hash.

    Over all native tiles' byte counts and the bytes of 64 tiles spread over the largest image: whole slides are too large
    to read twice, and two scans never agree in the length of every tile.
    """
    # Late: few slides need it.
    import tifffile

    digest = hashlib.sha256()
    try:
        with tifffile.TiffFile(path) as tiff:
            page = tiff.pages.first
            counts = np.asarray(page.databytecounts, dtype="<u8")
            offsets = np.asarray(page.dataoffsets, dtype="<u8")
            digest.update(counts.tobytes())
            chosen = np.unique(np.linspace(0, len(counts) - 1, SAMPLED_TILES).astype(int))
            for index in chosen:
                tiff.filehandle.seek(int(offsets[index]))
                digest.update(tiff.filehandle.read(int(counts[index])))
    except Exception:  # noqa: BLE001 - a damaged header makes tifffile stumble in ways of all kinds
        return None
    return digest.hexdigest()
