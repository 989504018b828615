"""Synthetic slides, and the names of real ones."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
from make_slides import main as write_slides  # of tools/, which is on the path of the tests

from histopipe.demo import synthetic_slides
from histopipe.demo.synthetic_slides import synthetic_texture
from histopipe.system.arrays import PixelArray
from histopipe.system.files import atomic_write, locked

RUN_FOLDER = "HISTOPIPE_TEST_RUN"
"""Environment variable: folder of files that all workers of a test run use."""
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
            with (
                contextlib.redirect_stderr(io.StringIO()),
                mock.patch.object(synthetic_slides, "synthetic_texture", _texture),
            ):
                write_slides([str(part), *arguments])
            part.rename(folder)
    return folder


def _texture(rng: np.random.Generator, kind: str, mpp: float) -> PixelArray:
    """Return what `synthetic_texture` returns, and leave the generator in the same state.

    Each texture is drawn once for all slides and workers of a test run: it takes longer than the rest of a slide.
    """
    before = json.dumps([rng.bit_generator.state, kind, mpp], sort_keys=True)
    name = hashlib.sha256(before.encode()).hexdigest()
    path = Path(os.environ[RUN_FOLDER]) / f"{name}.npz"
    if not path.exists():
        texture = synthetic_texture(rng, kind, mpp)
        with atomic_write(path) as part, part.open("wb") as file:
            np.savez(file, texture=texture, state=json.dumps(rng.bit_generator.state))
        return texture
    with np.load(path) as saved:
        rng.bit_generator.state = json.loads(str(saved["state"]))
        return np.asarray(saved["texture"])
