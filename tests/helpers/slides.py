"""Synthetic slides, and the names of real ones."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from pathlib import Path

from make_slides import main as write_slides  # of tools/, which is on the path of the tests

from helpers.budget import FOLDER as RUN_FOLDER
from histopipe.system.locks import locked

CMU, TCGA = "CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1"
"""Names of the real slides in HISTOPIPE_TEST_DATA that most tests use."""


def make_slides(out: Path, *arguments: str) -> list[Path]:
    """Write synthetic slides with tools/make_slides.py. Equal slides are created only once for all tests."""
    shutil.copytree(
        _slide_folder(arguments), out, dirs_exist_ok=True, copy_function=shutil.copyfile
    )
    return sorted(path for path in out.iterdir() if path.suffix in (".svs", ".tiff", ".scn"))


def _slide_folder(arguments: tuple[str, ...]) -> Path:
    """Return a folder of synthetic slides. It is created once for all workers of a test run: drawing slides is slow."""
    name = hashlib.sha256("\0".join(arguments).encode()).hexdigest()
    folder = Path(os.environ[RUN_FOLDER]) / name
    with locked(folder.with_suffix(".lock"), wait_seconds=500) as has_lock:
        assert has_lock, f"slides {arguments}: another worker has not drawn them within 500 s"
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            with contextlib.redirect_stderr(io.StringIO()):
                write_slides([str(part), *arguments])
            part.rename(folder)
    return folder
