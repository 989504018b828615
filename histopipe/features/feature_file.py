"""One slide's features as an HDF5 file, laid out as CLAM and TRIDENT read it.

`features` (N, D) float32 or float16, `coords` (N, 2) int64: the patches' top left corners in level-0 pixels. What TRIDENT says of
coordinates stands in the attributes of `coords`; what is ours, in those of the file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.patch_batches import aligned_empty
from histopipe.errors import DamagedStore, MachineShort, UsageError
from histopipe.system.files import appearing
from histopipe.system.filesystems import is_full_disk

FORMAT = "histopipe-features version 1"
FEATURES, COORDS = "features", "coords"
Precision = Literal["float32", "float16"]
_CRC = "crc32"
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


@dataclass(frozen=True, slots=True)
class FeatureHeader:
    """What a feature file says of itself.

    Attributes:
        path: the file.
        rows, dimension: patches, and features of each.
        dtype: float32 or float16.
        offset: where the features begin in the file if they lie in one piece, as ours do; None otherwise.
        facts: the file's own attributes; empty in files that other tools wrote.
        coords: the attributes of the coordinates.
        sample: a checksum of its first, middle and last row, for files without one of all.
    """

    path: Path
    rows: int
    dimension: int
    dtype: np.dtype[Any]
    offset: int | None
    facts: Mapping[str, Any]
    coords: Mapping[str, Any]
    sample: int = 0


class FeatureWriter:
    """Fills a feature file from its first row on.

    Args:
        file: open for writing.
        rows, dimension, precision: how large, of which type.
    """

    def __init__(self, file: h5py.File, rows: int, dimension: int, precision: Precision) -> None:
        self._file, self._next, self._crc = file, 0, 0
        # In one piece: read at the disk's speed, and any rows without the others.
        self._features = file.create_dataset(FEATURES, (rows, dimension), precision)
        self._coords = file.create_dataset(COORDS, (rows, 2), np.int64)

    def append(self, features: NDArray[np.floating], coords: NDArray[np.integer]) -> None:
        """(B, D) features of the next patches, and their (B, 2) corners."""
        place = slice(self._next, self._next + len(features))
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(features, self._features.dtype)
        if np.isinf(values).any() and np.isfinite(features).all():
            raise UsageError(
                "--precision float16", found=f"a feature of {np.abs(features).max():g}",
                expected="at most 65504", todo="take float32",
            )  # fmt: skip
        self._features[place], self._coords[place] = values, coords
        self._crc = zlib.crc32(values.data, self._crc)
        self._next = place.stop

    def finish(self, facts: Mapping[str, Any], coords: Mapping[str, Any]) -> None:
        """Write the attributes; rows that were not filled, because their patches are damaged, are left out."""
        if self._next < len(self._features):
            for name in (FEATURES, COORDS):
                kept = self._file[name][: self._next]
                del self._file[name]
                self._file.create_dataset(name, data=kept)
        name = str(coords.get("name", ""))
        self._file[FEATURES].attrs.update({"name": name, "savetodir": ""})
        self._file[COORDS].attrs.update(dict(coords))
        given = {key: value for key, value in facts.items() if value is not None}
        self._file.attrs.update({"format": FORMAT, **given, _CRC: self._crc})


@contextmanager
def writing(path: Path, rows: int, dimension: int, precision: Precision) -> Iterator[FeatureWriter]:
    """A feature file that appears when it is whole.

    Raises:
        MachineShort: the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path, hidden=True) as part:
            with h5py.File(part, "w") as file:
                yield FeatureWriter(file, rows, dimension, precision)
            with part.open("rb") as written:
                os.fsync(written.fileno())
    except (OSError, RuntimeError) as error:
        if is_full_disk(error):
            raise MachineShort(
                f"the disk that holds {path.parent} is full",
                todo="make room; the same command goes on with the slides that are missing",
            ) from error
        raise


def read_header(path: Path) -> FeatureHeader:
    """What a feature file holds, without its features.

    Raises:
        DamagedStore: it is no HDF5 file, or a damaged one.
        UsageError: it is one of something else.
    """
    with _opened(path) as file:
        features = file.get(FEATURES)
        if not isinstance(features, h5py.Dataset):
            raise UsageError(
                f"{path} holds no features", found=", ".join(file) or "nothing",
                expected=f"a dataset {FEATURES!r} of shape (patches, features)",
            )  # fmt: skip
        shape = _plain_shape(features.shape)
        if shape is None or features.dtype not in _DTYPES:
            raise UsageError(
                f"{path}: features", found=f"{features.shape} {features.dtype}",
                expected="(patches, features) float32 or float16",
            )  # fmt: skip
        coords = file.get(COORDS)
        _check_coords(path, coords, shape[0])
        places = (
            sorted({0, shape[0] // 2, shape[0] - 1}) if shape[0] and _CRC not in file.attrs else []
        )
        sample = zlib.crc32(_rows_of(features, places).data) if places else 0
        return FeatureHeader(
            path, *shape, features.dtype, features.id.get_offset(), dict(file.attrs),
            {} if coords is None else dict(coords.attrs), sample,
        )  # fmt: skip


def read_features(
    header: FeatureHeader, rows: NDArray[np.integer] | None = None
) -> NDArray[np.floating]:
    """Features of a file.

    Args:
        header: from `read_header`.
        rows: (B,) rising numbers of the rows wanted; all if not given, and then held against the checksum that our own files have.

    Returns:
        (B, D) of the file's type.

    Raises:
        DamagedStore: they are not what was written, or cannot be read.
    """
    if rows is not None and header.offset is not None:
        return _read_rows(header, header.offset, rows)
    values = _empty(header)
    if header.offset is None or not header.rows:
        with _opened(header.path) as file:
            file[FEATURES].read_direct(values.reshape(file[FEATURES].shape))
    else:
        with _named(header.path), header.path.open("rb", buffering=0) as file:
            file.seek(header.offset)
            view = values.data.cast("B")
            while view:  # Linux reads at most 2 GiB at once
                read = file.readinto(view)
                if not read:
                    raise ValueError("it ends too early")
                view = view[read:]
    return _checked(values, header) if rows is None else values[rows]


def _read_rows(
    header: FeatureHeader, offset: int, rows: NDArray[np.integer]
) -> NDArray[np.floating]:
    """Single rows; by reads and no map, which would end the process where a file became shorter."""
    values = np.empty((len(rows), header.dimension), header.dtype)
    width = header.dimension * header.dtype.itemsize
    with _named(header.path), header.path.open("rb", buffering=0) as file:
        for value, row in zip(values, rows.tolist(), strict=True):
            if os.preadv(file.fileno(), [value], offset + row * width) < width:
                raise ValueError(f"it ends before row {row}")
    return values


def read_coords(header: FeatureHeader) -> NDArray[np.int64] | None:
    """(N, 2) int64 top left corners in level-0 pixels; None in a file without.

    Raises:
        DamagedStore: they cannot be read.
    """
    with _opened(header.path) as file:
        if COORDS not in file:
            return None
        return np.asarray(file[COORDS][...], np.int64).reshape(-1, 2)


def is_ours(header: FeatureHeader) -> bool:
    """Whether this project wrote the file."""
    return header.facts.get("format") == FORMAT


def _empty(header: FeatureHeader) -> NDArray[np.floating]:
    """Room for all features, at a multiple of 64 bytes: TensorFlow takes such an array without a copy."""
    count = header.rows * header.dimension * header.dtype.itemsize
    return aligned_empty((count,)).view(header.dtype).reshape(header.rows, header.dimension)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    with _named(path), h5py.File(path, "r") as file:
        yield file


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What goes wrong while a file is read, with its name."""
    try:
        yield
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, UsageError | DamagedStore):
            raise
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DamagedStore:
    return DamagedStore(
        f"{path} cannot be read", found=str(error).split("\n")[0][:200],
        todo="`histopipe embed` makes it again",
    )  # fmt: skip


def _rows_of(features: h5py.Dataset, places: list[int]) -> NDArray[np.floating]:
    """Some rows, without the others."""
    return np.ascontiguousarray(features[0, places] if features.ndim == 3 else features[places])


def _check_coords(path: Path, coords: Any, rows: int) -> None:
    """Coordinates, where there are any, must be as many as features."""
    if coords is None:
        return
    shape = getattr(coords, "shape", None)
    if shape not in ((rows, 2), (1, rows, 2)):
        raise UsageError(
            f"{path}: coords", found=shape or type(coords).__name__, expected=(rows, 2)
        )


def _plain_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(N, D), of which some tools write (1, N, D)."""
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    return (shape[0], shape[1]) if len(shape) == 2 and shape[1] > 0 else None


def _checked(values: NDArray[np.floating], header: FeatureHeader) -> NDArray[np.floating]:
    expected = header.facts.get(_CRC)
    if expected is not None and zlib.crc32(np.ascontiguousarray(values).data) != int(expected):
        raise DamagedStore(
            f"{header.path}: the features are not what was written",
            todo="remove it, and embed the slide again",
        )
    return values
