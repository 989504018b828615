"""Check untrusted HDF5 files in a separate process: damaged files can hang or crash the HDF5 library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from histopipe.errors import DamagedStore, HistopipeError
from histopipe.features.feature_file import feature_files, read_coords, read_features, read_header
from histopipe.ingestion import coords
from histopipe.system.worker_pool import WorkerPool

_SECONDS = 60.0
_MAX_EXPANSION = 1000
"""Largest ratio of a dataset's size to the size of its file."""


def check_features(folder: Path, *, seconds: float = _SECONDS) -> None:
    """Read each feature file of a folder in a separate process, with a limit of `seconds` per file.

    Raises:
        UsageError: the folder does not exist, or a file contains no features.
        DamagedStore: a file is damaged, or makes HDF5 hang or crash.
    """
    _check(feature_files(folder).values(), _read_all_features, seconds)


def check_coords(folder: Path, *, seconds: float = _SECONDS) -> None:
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
                    f"{path} cannot be read safely", found=f"HDF5: {error}", expected="a file that HDF5 can read",
                    todo="remove it from the folder",
                ) from error  # fmt: skip


def _read_all_features(path: Path) -> None:
    header = read_header(path)
    claimed = header.rows * header.dimension * header.dtype.itemsize
    if claimed > _MAX_EXPANSION * path.stat().st_size:
        raise DamagedStore(
            f"{path}: features", found=f"{claimed} bytes in a file of {path.stat().st_size}"
        )
    read_features(header)
    read_coords(header)


def _read_all_coords(path: Path) -> None:
    coords.read_header(path)
    coords.read_corners(path)
