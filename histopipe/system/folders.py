"""Kinds of the folders that commands write, and the names of the files that show them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

DATA = "data.mdb"
CATALOG = "histopipe-catalog.json"
_OLD_CATALOG = "catalog.json"
"""Name of the catalog up to version 0.1. Other tools, for example STAC, also use this name."""
CONFIG = "config.toml"
FOLD_SPLITS = "splits"
"""Subfolder of a cross-validation with the splits of each fold."""
SHARE = "share-"
"""In the name of a run of a learning curve, before the percentage of the training patients."""
STUDY_ID = "study.id"
PREDICT_SETTINGS = "predict.json"
ENCODER = "features.json"
PROBE = "probe.json"
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
    PROBES = "probes"


_KINDS = {
    DATA: FolderKind.STORE,
    CONFIG: FolderKind.RUN,
    STUDY_ID: FolderKind.SEARCH,
    PREDICT_SETTINGS: FolderKind.PREDICTIONS,
    ENCODER: FolderKind.FEATURES,
    PROBE: FolderKind.PROBES,
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
    # Imported late: `--help` lists kinds of folders.
    from histopipe.system.files import read_json

    try:
        content = read_json(old)
    except (OSError, ValueError):
        return None
    is_ours = isinstance(content, dict) and content.keys() == {"version", "uuid", "slides"}
    return old if is_ours else None
