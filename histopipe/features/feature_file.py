"""Feature files: HDF5 files with the features of one slide, in the layout of CLAM and TRIDENT; and folders of them.

`features` (N, D) float32 or float16; `coords` (N, 2) int64, top left corners of the patches in level-0 pixels. The
attributes of `coords` are those of TRIDENT. The attributes of the file are specific to histopipe.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.regions import find_fault
from histopipe.errors import DamagedStore, HistopipeError, SlideError, UsageError, first_line
from histopipe.features import StoredType
from histopipe.system.arrays import aligned_empty, neighbour_distance
from histopipe.system.files import atomic_write, path_within, reading_error, roomy
from histopipe.system.table_cells import cell_number, nfc

FORMAT = "histopipe-features version 1"
FEATURES, COORDS = "features", "coords"
SUFFIX = ".h5"
SLIDES = "slides.csv"
"""File with all slides of which features were to be computed, next to `ENCODER`."""
SIDE = "patch_size_level0"
"""Attribute of the coordinates, as TRIDENT names it."""
SOURCE_CRC = "patches_crc"
"""Attribute with the checksum of what features were computed from."""
LEVEL = "feat_type"
"""Attribute of vectors of a slide or patient, as STAMP names it."""
VECTOR = "feats"
"""The vector once more, where STAMP reads it."""
_ATLAS = 5
"""Columns of the coordinates of AtlasPatch: x, y, width, height and level."""
_CRC = "crc32"
"""Attribute with the checksum of all features."""


@dataclass(frozen=True, slots=True)
class FeatureHeader:
    """Shape and type of the features of a file, and attributes of the file (`attributes`) and of its coordinates (`coords`).

    `offset` is the position of the features in the file if they are contiguous, as in our files; else None. `sample` is
    a checksum of the first, middle and last row, for files without a checksum of all rows. `dataset` has the features;
    those in float64 are read as float32.

    `side` is that of the patches in level-0 pixels: as recorded, else the distance of neighbours; 0 if unknown. If there
    are no places in level-0 pixels, `unplaced` has the reason, and `side` is in the unit of the places.
    """

    path: Path
    rows: int
    dimension: int
    dtype: np.dtype[Any]
    offset: int | None
    attributes: Mapping[str, Any]
    coords: Mapping[str, Any]
    sample: int = 0
    dataset: str = FEATURES
    side: float = 0.0
    unplaced: str = ""

    def _number(self, name: str) -> float:
        """Return the first number of an attribute of the file or its coordinates; NaN if there is none."""
        value = {**self.attributes, **self.coords}.get(name, "")
        return cell_number(str(next(iter(np.ravel(value).tolist()), "")))

    @property
    def recorded_side(self) -> float:
        """Side of the patches as the file records it, in the unit of its places; 0 if it does not.

        Source:
            the attributes that TRIDENT, AtlasPatch, CLAM and STAMP write.
        """
        names = (
            SIDE,
            "patch_size",
            "downsample",
            "level0_magnification",
            "target_magnification",
            "tile_size_um",
        )
        side, size, downsample, fine, coarse, micrometres = map(self._number, names)
        of_unit = micrometres if self.unplaced.endswith(" um") else math.nan
        ratio = fine / coarse if coarse else math.nan
        sides = (side, size * downsample, size * ratio, of_unit)
        return next((float(number) for number in sides if number > 0), 0.0)

    @property
    def side_um(self) -> float:
        """Side of the patches in µm, as STAMP and TRIDENT write it; 0 if unknown."""
        names = ("patch_size", "target_magnification", "tile_size_um")
        side, magnification, written = map(self._number, names)
        number = 10 * side / magnification if math.isnan(written) and magnification else written
        return number if math.isfinite(number) and number > 0 else 0.0

    @property
    def level(self) -> str:
        """Level of a row: "patch", "slide" or "patient"."""
        level = self.text(LEVEL) or "patch"
        return "patch" if level == "tile" else level  # as STAMP writes it

    def text(self, name: str) -> str | None:
        """Return an attribute of the file as text in NFC, None if it is missing; writers use several types."""
        value = self.attributes.get(name)
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        return None if value is None else nfc(text)


class FeatureWriter:
    """Writer of the features and coordinates of at most `rows` patches to a file."""

    def __init__(self, file: h5py.File, rows: int, dimension: int, dtype: StoredType) -> None:
        self._file, self._next, self._crc = file, 0, 0
        # Contiguous, so that reading is as fast as the disk, and single rows can be read.
        self._features = file.create_dataset(FEATURES, (rows, dimension), dtype)
        self._coords = file.create_dataset(COORDS, (rows, 2), np.int64)

    def append(self, features: NDArray[np.floating], coords: NDArray[np.integer]) -> None:
        """Append (B, D) features of patches, and their (B, 2) corners."""
        rows = slice(self._next, self._next + len(features))
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(features, self._features.dtype)
        if np.isinf(values).any() and np.isfinite(features).all():
            raise SlideError(
                "--dtype float16",
                found=f"a feature of {np.abs(features).max():g}",
                expected="at most 65504",
                todo="use float32",
            )
        self._features[rows], self._coords[rows] = values, coords
        self._crc = zlib.crc32(values.data, self._crc)
        self._next = rows.stop

    def finish(self, attributes: Mapping[str, Any], coords: Mapping[str, Any]) -> None:
        """Write the attributes that are not None, and remove unwritten rows of damaged patches."""
        if self._next < len(self._features):
            for name in (FEATURES, COORDS):
                kept = self._file[name][: self._next]
                del self._file[name]
                self._file.create_dataset(name, data=kept)
        for place, values in (
            (self._file[FEATURES], {"name": str(coords.get("name", "")), "savetodir": ""}),
            (self._file[COORDS], coords),
            (self._file, {"format": FORMAT, **attributes, _CRC: self._crc}),
        ):
            place.attrs.update({key: value for key, value in values.items() if value is not None})

    def without_coords(self, vector: NDArray[np.float32]) -> None:
        """Replace the coordinates by the vector of a slide."""
        del self._file[COORDS]
        self._file[VECTOR] = vector


class RecordingFile(io.FileIO):
    """A file that records its first failure to write instead of raising it.

    HDF5 leaves a file half open if it cannot write while it closes the file, and crashes the process later.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes, unless a write has failed."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view and self.failure is None:  # Linux writes at most 2 GiB at once
                view = view[super().write(view) :]
        except OSError as error:
            self.failure = error
        return size

    def truncate(self, size: int | None = None) -> int:
        """Change the size of the file."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return size or 0


@contextmanager
def writing(path: Path, rows: int, dimension: int, dtype: StoredType) -> Iterator[FeatureWriter]:
    """Write a feature file that becomes visible when it is complete.

    Raises:
        MachineShort: the disk is full.
    """
    with roomy(path.parent, "run the same command again to embed the missing slides"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part, RecordingFile(part, "w+") as raw:
            with h5py.File(raw, "w") as file:
                yield FeatureWriter(file, rows, dimension, dtype)
            if raw.failure is not None:
                raise raw.failure
            os.fsync(raw.fileno())


def write_vector(
    path: Path, vector: NDArray[np.float32], level: str, attributes: Mapping[str, Any]
) -> None:
    """Write the (W,) vector of a slide or patient: `features` (1, W), and `feats` (W,) for STAMP. No coordinates.

    Raises:
        MachineShort: the disk is full.
    """
    with writing(path, 1, len(vector), "float32") as writer:
        writer.append(vector[None], np.zeros((1, 2), np.int64))
        writer.finish({**attributes, LEVEL: level}, {})
        writer.without_coords(vector)


def read_header(path: Path) -> FeatureHeader:
    """Read shape, type and attributes of a feature file.

    Raises:
        DamagedStore: the file is damaged, or is not an HDF5 file.
        UsageError: the file contains no features.
    """
    with _opened(path) as file:
        features = file.get(FEATURES, file.get(VECTOR))
        sets = [*features] if isinstance(features, h5py.Group) else []
        features = features[sets[0]] if len(sets) == 1 else features
        if not isinstance(features, h5py.Dataset):
            raise UsageError(
                f"{path} contains {'several sets of' if sets else 'no'} features",
                found=", ".join(f"{FEATURES}/{name}" for name in sets)
                or ", ".join(file)
                or "nothing",
                expected=f"a dataset {FEATURES!r} of shape (patches, features)",
            )
        # Some tools write (1, N, D).
        shape = features.shape[1:] if features.shape[:-2] == (1,) else features.shape
        is_vector = len(shape) == 1  # of a slide, as TRIDENT writes it
        shape = (1, *shape) if is_vector else shape
        if len(shape) != 2 or shape[1] == 0 or features.dtype.kind != "f":
            raise UsageError(
                f"{path}: features",
                found=f"{features.shape} {features.dtype}",
                expected="(patches, features) float32 or float16",
            )
        coords = file.get(COORDS)
        corners = getattr(coords, "shape", None)
        expected = {(*one, shape[0], columns) for one in ((), (1,)) for columns in (2, _ATLAS)}
        if coords is not None and (corners not in expected or coords.dtype.kind not in "iuf"):
            raise UsageError(
                f"{path}: coords", found=corners or type(coords).__name__, expected=(shape[0], 2)
            )
        sample = 0
        if shape[0] and _CRC not in file.attrs:
            sampled = sorted({0, shape[0] // 2, shape[0] - 1})
            rows = np.reshape(features, shape) if is_vector else features
            values = rows[0, sampled] if features.ndim == 3 else rows[sampled]
            sample = zlib.crc32(np.ascontiguousarray(values).data)
        is_wide = features.dtype.itemsize > 4
        header = FeatureHeader(
            path,
            shape[0],
            shape[1],
            np.dtype(np.float32) if is_wide else features.dtype,
            None if is_wide else features.id.get_offset(),
            {**({LEVEL: "slide"} if is_vector else {}), **file.attrs},
            {} if coords is None else dict(coords.attrs),
            sample,
            features.name,
            unplaced="no coords" if coords is None else "",
        )
        if coords is None:
            return header
        of_stamp = "um" if "tile_size_um" in file.attrs else "px"  # also without a unit
        unit = {**file.attrs, **coords.attrs}.get("unit", of_stamp)
        is_needed = coords.dtype.kind == "f" or unit != "px" or not header.recorded_side
        places = np.reshape(coords[..., :2], (-1, 2)) if is_needed else None
        if places is not None:
            header = replace(header, unplaced=find_fault(places, unit))
        side = header.recorded_side or (0.0 if places is None else neighbour_distance(places))
        return replace(header, side=side)


def read_features(
    header: FeatureHeader, rows: NDArray[np.integer] | None = None
) -> NDArray[np.floating]:
    """Read the (B, D) features of (B,) sorted rows, or of all rows. With all rows, verify the checksum if there is one.

    Raises:
        DamagedStore: the features do not match their checksum, or the file cannot be read.
    """
    if rows is not None and header.offset is not None:
        return _read_rows(header, header.offset, rows)
    count = header.rows * header.dimension * header.dtype.itemsize
    values = aligned_empty((count,)).view(header.dtype).reshape(header.rows, header.dimension)
    if header.offset is None or not header.rows:
        with _opened(header.path) as file:
            file[header.dataset].read_direct(values.reshape(file[header.dataset].shape))
    else:
        with _with_path(header.path), header.path.open("rb") as file:
            file.seek(header.offset)
            if file.readinto(values.data.cast("B")) < count:
                raise ValueError("the file is truncated")
    if rows is not None:
        return np.asarray(values[rows])
    expected = header.attributes.get(_CRC)
    if expected is not None and zlib.crc32(values.data) != int(expected):
        raise DamagedStore(
            f"{header.path}: the features do not match their checksum",
            todo="remove the file, and run `histopipe embed` again",
        )
    return values


def _read_rows(
    header: FeatureHeader, offset: int, rows: NDArray[np.integer]
) -> NDArray[np.floating]:
    """Read single rows, without a memory map: it would crash the process if the file became shorter."""
    values = np.empty((len(rows), header.dimension), header.dtype)
    width = header.dimension * header.dtype.itemsize
    with _with_path(header.path), header.path.open("rb", buffering=0) as file:
        for value, row in zip(values, rows.tolist(), strict=True):
            if os.preadv(file.fileno(), [value], offset + row * width) < width:
                raise ValueError(f"the file is truncated before row {row}")
    return values


def read_coords(header: FeatureHeader) -> NDArray[np.int64] | None:
    """Read (N, 2) int64 top left corners in level-0 pixels; None if the file has none, see `unplaced`.

    Raises:
        DamagedStore: the file cannot be read.
    """
    return None if header.unplaced else read_places(header).astype(np.int64)


def features_at(path: Path, corners: NDArray[np.integer]) -> NDArray[np.float32]:
    """Read the (M, D) features of the patches at (M, 2) corners in level-0 pixels; NaN where the file has none.

    Raises:
        DamagedStore: the file cannot be read.
    """
    header = read_header(path)
    values = np.full((len(corners), header.dimension), np.nan, np.float32)
    coords = read_coords(header)
    if coords is not None:
        row_of = {corner: row for row, corner in enumerate(map(tuple, coords.tolist()))}
        rows = np.array([row_of.get(corner, -1) for corner in map(tuple, corners.tolist())], int)
        at = np.flatnonzero(rows >= 0)
        at = at[np.argsort(rows[at])]
        values[at] = read_features(header, rows[at])
    return values


def read_places(header: FeatureHeader) -> NDArray[Any]:
    """Read (N, 2) top left corners as the file has them, in any unit.

    Raises:
        DamagedStore: the file cannot be read, or has none.
    """
    with _opened(header.path) as file:
        return np.reshape(file[COORDS][..., :2], (-1, 2))


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    # Without locks: many network filesystems have none, and complete files never change.
    with _with_path(path), h5py.File(path, "r", locking=False) as file:
        yield file


@contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Raise errors of reading a file with its path: as DamagedStore, unless the operating system cannot read it."""
    try:
        yield
    except HistopipeError:
        raise
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise reading_error(error, path) or DamagedStore(
            f"{path} cannot be read",
            found=first_line(error),
            todo="compute it again with `histopipe embed`",
        ) from error


def feature_path(folder: Path, slide_id: str) -> Path:
    """Return the path of a slide's feature file.

    Raises:
        DamagedStore: the path would be outside of the folder.
    """
    return path_within(folder, f"{slide_id}{SUFFIX}")


def feature_files(folder: Path) -> dict[str, Path]:
    """Return the feature files of a folder by slide id, sorted by id.

    Raises:
        UsageError: the folder does not exist.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", expected="a folder of feature files")
    files = {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in folder.rglob(f"*{SUFFIX}")
        if path.is_file() and not path.name.startswith(".")
    }
    return dict(sorted(files.items()))
