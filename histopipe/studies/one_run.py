"""Telling the folder of a run from that of a cross-validation."""

from __future__ import annotations

from pathlib import Path

from histopipe.errors import UsageError
from histopipe.studies.cross_validation import is_cross_validation


def check_one_run(folder: Path) -> None:
    """Refuse the folder of a cross-validation where that of a run is wanted.

    Raises:
        UsageError: it is one.
    """
    if is_cross_validation(folder):
        raise UsageError(
            f"{folder} is a cross-validation", expected="one of its runs",
            todo="name the folder of one fold; summary.csv has them side by side",
        )  # fmt: skip
