"""Files of folders of results, to compare what two commands have written."""

from __future__ import annotations

import re
from pathlib import Path

from histopipe.system.shared_folders import PARTS

_MADE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC")
"""When a page was made."""


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a folder, without what parts have recorded, and when pages were made."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {
        name: _MADE.sub(b"", content) if name.endswith(".html") else content
        for name, content in contents.items()
        if PARTS not in name.split("/")
    }
