"""Which formats the OpenSlide that is installed opens."""

from __future__ import annotations

import re
from pathlib import Path

_KNOWN = (
    "aperio", "argos", "dicom", "generic-tiff", "hamamatsu", "leica", "mirax", "philips", "sakura", "trestle", "ventana",
    "zeiss",
)  # fmt: skip


def openslide_formats() -> tuple[str, list[str]]:
    """OpenSlide's version, and the vendors whose formats it opens, by the names that stand in its library: it lists none.

    Raises:
        ImportError, OSError: it cannot be loaded.
    """
    import openslide  # late: a broken library is told, and ends nothing

    library = _library()
    if library is None:
        return openslide.__library_version__, []
    content = library.read_bytes()
    there = [name for name in _KNOWN if b"\0" + name.encode() + b"\0" in content]
    return openslide.__library_version__, there


def _library() -> Path | None:
    """The file of the library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    found = re.search(r"(/\S*libopenslide\S*)$", maps, re.MULTILINE)
    return Path(found[1]) if found else None
