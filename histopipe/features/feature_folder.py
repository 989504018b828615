"""A folder of feature files, one per slide, all computed by the same encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.system.files import path_within, record_or_check

SUFFIX = ".h5"
ENCODER = "features.json"


def feature_path(folder: Path, slide_id: str) -> Path:
    """Return the path of a slide's feature file.

    Raises:
        DamagedStore: the id leads out of the folder.
    """
    return path_within(folder, f"{slide_id}{SUFFIX}")


def feature_files(folder: Path) -> dict[str, Path]:
    """Return the feature files of a folder by slide id, sorted by id.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", expected="a folder of feature files")
    found = {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in folder.rglob(f"*{SUFFIX}")
        if path.is_file() and not path.name.startswith(".")
    }
    return dict(sorted(found.items()))


def record_encoder(folder: Path, encoder: Mapping[str, Any]) -> None:
    """Record all that features depend on, as JSON values, in their folder, or check that it is what is recorded.

    Raises:
        UsageError: the features in the folder were computed by another encoder or another tool.
        DamagedStore: the record cannot be read.
    """
    foreign = {} if (folder / ENCODER).exists() else feature_files(folder)
    if foreign:
        raise UsageError(
            f"{folder} holds files that were not made by `histopipe embed`",
            found=", ".join(list(foreign)[:3]), todo="choose another --out",
        )  # fmt: skip
    # The file name of an encoder may change: its weights are compared.
    record_or_check(folder / ENCODER, encoder, ignored=("encoder",), contents="features")
