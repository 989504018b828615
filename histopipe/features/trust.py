"""HDF5 files from strangers, looked at by a process that may hang or die of them: HDF5's library can."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from histopipe.errors import DamagedStore, HistopipeError
from histopipe.features.feature_file import read_coords, read_features, read_header
from histopipe.features.folder import feature_files
from histopipe.ingest import coords
from histopipe.system.worker_pool import WorkerPool

_SECONDS = 60.0
_MOST_EXPANSION = 1000
"""How much larger than its file a dataset may say that it is."""


def check_features(folder: Path, *, seconds: float = _SECONDS) -> None:
    """Refuse feature files that cannot be read through, each within some seconds.

    Raises:
        UsageError: there is no such folder, or a file of something else in it.
        DamagedStore: a file is damaged, or HDF5 hangs or dies of it.
    """
    _check(feature_files(folder).values(), _read_through_features, seconds)


def check_coords(folder: Path, *, seconds: float = _SECONDS) -> None:
    """As `check_features`, of files of coordinates."""
    _check(sorted(folder.rglob(f"*{coords.SUFFIX}")), _read_through_coords, seconds)


def _check(paths: Iterable[Path], read: Callable[[Path], None], seconds: float) -> None:
    pool = WorkerPool(1)
    try:
        for path in paths:
            try:
                pool.submit_within(seconds, read, path).result()
            except HistopipeError:
                raise
            except Exception as error:  # HDF5 hangs or dies of some, and h5py raises anything
                raise DamagedStore(
                    f"{path} is not to be trusted", found=f"HDF5: {error}", expected="a file that can be read through",
                    todo="leave it out",
                ) from error  # fmt: skip
    finally:
        pool.shutdown(cancel_futures=True)


def _read_through_features(path: Path) -> None:
    header = read_header(path)
    claimed = header.rows * header.dimension * header.dtype.itemsize
    if claimed > _MOST_EXPANSION * path.stat().st_size:
        raise DamagedStore(
            f"{path}: features", found=f"{claimed} bytes in a file of {path.stat().st_size}"
        )
    read_features(header)
    read_coords(header)


def _read_through_coords(path: Path) -> None:
    coords.read_header(path)
    coords.read_corners(path)
