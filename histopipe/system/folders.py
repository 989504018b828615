"""Folders that commands write: their kinds, recognized by the names of their files, and the right to write into one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.system.files import locked_alone, read_json, remove_parts
from histopipe.system.filesystems import is_full_disk

DATA = "data.mdb"
CATALOG = "histopipe-catalog.json"
_OLD_CATALOG = "catalog.json"
"""Name of the catalog up to version 0.1. Other tools, for example STAC, also use this name."""
CONFIG = "config.toml"
FOLD_SPLITS = "splits"
"""Subfolder of a cross-validation with the splits of each fold."""
STUDY_ID = "study.id"
PREDICT_SETTINGS = "predict.json"
ENCODER = "features.json"
"""Describes the encoder that computed all features of a folder."""


class FolderKind(StrEnum):
    """Kind of a folder. The value is its name in messages."""

    RUN = "run"
    CROSS_VALIDATION = "cross-validation"
    SEARCH = "search"
    PREDICTIONS = "predictions"
    STORE = "store"
    PARTS = "folder of parts"
    FEATURES = "features"


_KINDS = {
    DATA: FolderKind.STORE,
    CONFIG: FolderKind.RUN,
    STUDY_ID: FolderKind.SEARCH,
    PREDICT_SETTINGS: FolderKind.PREDICTIONS,
    ENCODER: FolderKind.FEATURES,
}
"""Kind of the folder in which a file is."""


def folder_kind(folder: Path) -> FolderKind | None:
    """Return the kind of a folder; None if it is of another kind, or does not exist."""
    kind = next((kind for name, kind in _KINDS.items() if (folder / name).exists()), None)
    if kind is FolderKind.RUN and (folder / FOLD_SPLITS).is_dir():
        return FolderKind.CROSS_VALIDATION
    return FolderKind.PARTS if kind is None and find_catalog(folder) is not None else kind


def find_catalog(folder: Path) -> Path | None:
    """Return the path of the catalog of a folder of parts; None if there is none, or another tool wrote it."""
    path, old = folder / CATALOG, folder / _OLD_CATALOG
    if path.is_file():
        return path
    try:
        content = read_json(old)
    except (OSError, ValueError):
        return None
    is_ours = isinstance(content, dict) and content.keys() == {"version", "uuid", "slides"}
    return old if is_ours else None


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Report a folder that cannot be created or written to as a usage error."""
    try:
        yield
    except OSError as error:
        if is_full_disk(error):
            raise
        raise UsageError(f"cannot create or write to {folder}", found=str(error)) from error


_UNLOCK_SECONDS = 5.0
"""Time for which a killed training may keep the lock on its folder."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and lock it.

    Raises:
        UsageError: it cannot be created, or another process has locked it.
    """
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    in_use = f"{folder} is in use by another process"
    todo = "wait until it ends, or choose another --out"
    with locked_alone(folder, in_use, todo, wait_seconds=_UNLOCK_SECONDS):
        remove_parts(folder)
        yield
