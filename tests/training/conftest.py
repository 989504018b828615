"""A run with which the runs of several modules are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.commands import Once, succeed
from helpers.trainings import ARGUMENTS


@pytest.fixture(scope="session")
def uninterrupted(small_store: Path, once: Once) -> Path:
    """Run with `ARGUMENTS`, on one device and without interruption."""

    def train(folder: Path) -> None:
        succeed("train", small_store, "--out", folder / "run", *ARGUMENTS)

    return once("uninterrupted", train) / "run"
