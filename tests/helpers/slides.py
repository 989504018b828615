"""Synthetic slides, and the names of real ones."""

from __future__ import annotations

import atexit
import contextlib
import io
import shutil
import tempfile
from functools import cache
from pathlib import Path

from make_slides import main as write_slides  # of tools/, which is on the path of the tests

CMU, TCGA = "CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1"
"""Names of the real slides in HISTOPIPE_TEST_DATA that most tests use."""


def make_slides(out: Path, *arguments: str) -> list[Path]:
    """Write synthetic slides with tools/make_slides.py. Equal slides are created only once for all tests."""
    shutil.copytree(
        _slide_folder(arguments), out, dirs_exist_ok=True, copy_function=shutil.copyfile
    )
    return sorted(path for path in out.iterdir() if path.suffix in (".svs", ".tiff", ".scn"))


@cache
def _slide_folder(arguments: tuple[str, ...]) -> Path:
    """Create a folder of synthetic slides, which is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="synthetic-"))
    atexit.register(shutil.rmtree, folder)
    with contextlib.redirect_stderr(io.StringIO()):
        write_slides([str(folder), *arguments])
    return folder
