"""Folders of features: the record of their encoder and stores, and checks of their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, HistopipeError, UsageError
from histopipe.features.feature_file import (
    SLIDES,
    feature_files,
    read_coords,
    read_features,
    read_header,
)
from histopipe.geometry import Mpp, same_scale
from histopipe.ingestion import coords
from histopipe.splits.slide_table import read_slide_table
from histopipe.store.store import Store
from histopipe.system.files import (
    ENCODER,
    FolderKind,
    folder_kind,
    read_record,
    write_atomically,
)
from histopipe.system.parts import ALL, Share, recorded_by_parts
from histopipe.system.worker_pool import WorkerPool

_IGNORED = (
    "encoder",
    "weights",
    "file",
    "libraries",
    "mismatch",
    "given",
    "patches",
    "batches",
    "stores",
    "features",
    "of",
)
"""Fields of the record of an encoder that may change while features are added: they do not change the features."""
COMPARED = ("encoder", "sha256", "dimension", "patch_size", "precision")
"""Names in the record of an encoder that are compared, and shown if features of two encoders meet."""


def record_encoder(folder: Path, encoder: Mapping[str, Any], share: Share = ALL) -> None:
    """Record the settings that features depend on in their folder, or check that they match the records.

    Raises:
        UsageError: the features in the folder were computed by another encoder or another tool.
        DamagedStore: the record cannot be read.
    """
    path = folder / ENCODER
    unknown_files = {} if path.exists() or recorded_by_parts(path) else feature_files(folder)
    if unknown_files:
        raise UsageError(
            f"{folder} contains files that were not written by `histopipe embed`",
            found=", ".join(list(unknown_files)[:3]),
            todo="choose another --out",
        )
    # The file name of an encoder may change, since the weights are compared; versions of libraries change often.
    share.record(path, encoder, ignored=_IGNORED, contents="features")


def record_stores(folder: Path, stores: Iterable[Store]) -> None:
    """Add the paths of stores to the record of a folder, so that heatmaps find the slides of its features."""
    record = read_record(folder / ENCODER) or {}
    record["stores"] = list(
        dict.fromkeys(
            [*record.get("stores", ()), *(str(store.path.absolute()) for store in stores)]
        )
    )
    write_atomically(folder / ENCODER, json.dumps(record, indent=2) + "\n")


def stores_of_features(folders: Iterable[str | Path]) -> list[Path]:
    """Return the stores that features were computed from, at their recorded paths or next to the folder of features.

    Earlier versions recorded names only: their stores are left out if they are not next to the folder.

    Raises:
        UsageError: a folder or a recorded store has moved.
        DamagedStore: a record cannot be read.
    """
    stores: list[Path] = []
    for folder in map(Path, folders):
        names = [entry.store for entry in read_slide_table(folder / SLIDES) if entry.store]
        recorded = (read_record(folder / ENCODER) or {}).get("stores")
        for text in dict.fromkeys(names) if recorded is None else recorded:
            places = (Path(text), folder.parent / Path(text).name)
            existing = [path for path in places if folder_kind(path) is FolderKind.STORE]
            if recorded and not existing:
                raise UsageError(
                    f"the store of the features {folder} has moved",
                    found=f"no store at {text}",
                    todo="name it with --store",
                )
            stores += existing[:1]
        if not folder.is_dir():
            raise UsageError(
                f"the features {folder} of the run are missing",
                found=f"no folder at {folder.absolute()}",
                todo="run this in the folder of the training, or name the store of their patches with --store",
            )
    return list(dict.fromkeys(stores))


def paths_of_stores(settings: Mapping[str, Any]) -> list[Path]:
    """Return the stores in the settings of a run, or those of the features that it was trained on; for errors, see there."""
    return [*map(Path, settings.get("stores", ())), *stores_of_features(settings.get("mil", ()))]


def check_features(folder: Path, *, seconds: float = 60.0) -> None:
    """Read each feature file of a folder in a separate process, with a limit of `seconds` per file.

    Raises:
        UsageError: the folder does not exist, or a file contains no features.
        DamagedStore: a file is damaged, or makes HDF5 hang or crash.
    """
    _check(feature_files(folder).values(), _read_all_features, seconds)


def check_coords(folder: Path, *, seconds: float = 60.0) -> None:
    """Check the coordinate files of a folder as `check_features` does."""
    _check(sorted(folder.rglob(f"*{coords.SUFFIX}")), _read_all_coords, seconds)


def _check(paths: Iterable[Path], read: Callable[[Path], None], seconds: float) -> None:
    with WorkerPool(1) as pool:
        for path in paths:
            try:
                pool.submit_within(seconds, read, path).result()
            except HistopipeError:
                raise
            except Exception as error:  # h5py raises many types
                raise DamagedStore(
                    f"{path} cannot be read safely",
                    found=f"HDF5: {error}",
                    expected="a file that HDF5 can read",
                    todo="remove it from the folder",
                ) from error


def _read_all_features(path: Path) -> None:
    header = read_header(path)
    claimed = header.rows * header.dimension * header.dtype.itemsize
    if claimed > 1000 * path.stat().st_size:  # no compression is that good
        raise DamagedStore(
            f"{path}: features", found=f"{claimed} bytes in a file of {path.stat().st_size}"
        )
    read_features(header)
    read_coords(header)


def _read_all_coords(path: Path) -> None:
    coords.read_header(path)
    coords.read_corners(path)


def check_encoder(actual: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Check that features are of the encoder, and the scale, of a training. `where` names them in a message.

    Raises:
        UsageError: they are not.
    """
    pairs = {
        name: (actual.get(name), expected.get(name))
        for name in (*COMPARED, "stain_norm", "level", "of_sha256")
    }
    mpp, mpp_of_training = (
        (record.get("patches") or {}).get("patch_mpp") for record in (actual, expected)
    )
    if mpp and mpp_of_training and not same_scale(Mpp(mpp), Mpp(mpp_of_training)):
        pairs["µm per pixel"] = mpp, mpp_of_training
    differing = [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    if any(name != "encoder" for name, *_ in differing):  # the same weights may have another name
        raise UsageError(
            f"{where}: other features than in the training",
            found=", ".join(f"{name} {_short(value)}" for name, value, _ in differing),
            expected=", ".join(f"{name} {_short(required)}" for name, _, required in differing),
            todo="embed the slides with the encoder and the patches of the training",
        )


def _short(value: Any) -> str:
    """Return a value for a message: checksums are long."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]
