"""Fixtures of the tests of `embed` and `predict`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import histopipe
from helpers.networks import replace_networks
from helpers.paths import GOLDEN
from helpers.runs import without_training
from histopipe.system.tensorflow import load_quietly


@pytest.fixture
def numpy_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace networks by those of NumPy, and worker processes by this one."""
    replace_networks(monkeypatch)


@pytest.fixture(scope="session")
def tensorflow() -> None:
    """Load TensorFlow and Keras in the process of the tests that use them, which takes several seconds."""
    load_quietly("histopipe.inference.networks")


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store, features, runs and slides of an earlier version. A copy, because a store that is read gets a lock file."""
    folder = tmp_path_factory.mktemp("earlier") / "results"
    shutil.copytree(GOLDEN / "2026-11-25", folder)
    shutil.copytree(GOLDEN / "slides", folder / "slides")
    return folder


@pytest.fixture(scope="session")
def slide_model(earlier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of eight slides by a network of NumPy, and a calibrated run on them, without a training."""
    folder = tmp_path_factory.mktemp("slide-model")
    with pytest.MonkeyPatch.context() as patch, without_training():
        replace_networks(patch)
        histopipe.embed(earlier / "store.lmdb", out=folder / "features", model="small-cnn")
        histopipe.train(
            mil=folder / "features",
            labels=earlier / "labels.csv",
            allow_extra_rows=True,
            split_by="slide",
            fractions=(0.5, 0.25, 0.25),
            resamples=20,
            calibrate=True,
            out=folder / "run",
        )
    return folder
