"""Feature files: HDF5 files with the features of one slide, in the layout of CLAM and TRIDENT; and folders of them.

`features` (N, D) float32 or float16; `coords` (N, 2) int64, top left corners of the patches in level-0 pixels. The
attributes of `coords` are those of TRIDENT. The attributes of the file are specific to histopipe.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.patch_batches import aligned_empty
from histopipe.errors import DamagedStore, HistopipeError, SlideError, UsageError
from histopipe.features import StoredType
from histopipe.geometry import Mpp, same_scale
from histopipe.ingestion import coords
from histopipe.splits.slide_table import read_slide_table
from histopipe.store.store import Store
from histopipe.system.files import (
    ENCODER,
    FolderKind,
    RecordingFile,
    atomic_write,
    folder_kind,
    path_within,
    read_record,
    write_atomically,
)
from histopipe.system.filesystems import reading_error, roomy
from histopipe.system.parts import ALL, Share, recorded_by_parts
from histopipe.system.table_files import cell_number, nfc
from histopipe.system.worker_pool import WorkerPool

FORMAT = "histopipe-features version 1"
FEATURES, COORDS = "features", "coords"
SUFFIX = ".h5"
SLIDES = "slides.csv"
"""File with all slides of which features were to be computed, next to `ENCODER`."""
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
SIDE = "patch_size_level0"
"""Attribute of the coordinates, as TRIDENT names it."""
SOURCE_CRC = "patches_crc"
"""Attribute with the checksum of what features were computed from."""
LEVEL = "feat_type"
"""Attribute of vectors of a slide or patient, as STAMP names it."""
VECTOR = "feats"
"""The vector once more, where STAMP reads it."""
_CRC = "crc32"
"""Attribute with the checksum of all features."""


@dataclass(frozen=True, slots=True)
class FeatureHeader:
    """Shape and type of the features of a file, and attributes of the file (`attributes`) and of its coordinates (`coords`).

    `offset` is the position of the features in the file if they are contiguous, as in our files; else None. `sample` is
    a checksum of the first, middle and last row, for files without a checksum of all rows.
    """

    path: Path
    rows: int
    dimension: int
    dtype: np.dtype[Any]
    offset: int | None
    attributes: Mapping[str, Any]
    coords: Mapping[str, Any]
    sample: int = 0

    @property
    def side(self) -> float:
        """Side of the patches in level-0 pixels; 0 if unknown."""
        return float(self.coords.get(SIDE, 0))

    @property
    def side_um(self) -> float:
        """Side of the patches in µm, as STAMP and TRIDENT write it; 0 if unknown."""
        names = ("patch_size", "target_magnification")
        side, magnification = (cell_number(str(self.coords.get(name))) for name in names)
        written = cell_number(str(self.attributes.get("tile_size_um")))
        number = 10 * side / magnification if math.isnan(written) and magnification else written
        return number if math.isfinite(number) and number > 0 else 0.0

    @property
    def level(self) -> str:
        """Level of a row: "patch", "slide" or "patient"."""
        return self.text(LEVEL) or "patch"

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
        features = file.get(FEATURES)
        if not isinstance(features, h5py.Dataset):
            raise UsageError(
                f"{path} contains no features",
                found=", ".join(file) or "nothing",
                expected=f"a dataset {FEATURES!r} of shape (patches, features)",
            )
        # Some tools write (1, N, D).
        shape = features.shape[1:] if features.shape[:-2] == (1,) else features.shape
        is_vector = len(shape) == 1  # of a slide, as TRIDENT writes it
        shape = (1, *shape) if is_vector else shape
        if len(shape) != 2 or shape[1] == 0 or features.dtype not in (np.float32, np.float16):
            raise UsageError(
                f"{path}: features",
                found=f"{features.shape} {features.dtype}",
                expected="(patches, features) float32 or float16",
            )
        coords = file.get(COORDS)
        corners = getattr(coords, "shape", None)
        if coords is not None and corners not in ((shape[0], 2), (1, shape[0], 2)):
            raise UsageError(
                f"{path}: coords", found=corners or type(coords).__name__, expected=(shape[0], 2)
            )
        sample = 0
        if shape[0] and _CRC not in file.attrs:
            sampled = sorted({0, shape[0] // 2, shape[0] - 1})
            rows = np.reshape(features, shape) if is_vector else features
            values = rows[0, sampled] if features.ndim == 3 else rows[sampled]
            sample = zlib.crc32(np.ascontiguousarray(values).data)
        return FeatureHeader(
            path,
            shape[0],
            shape[1],
            features.dtype,
            features.id.get_offset(),
            {**({LEVEL: "slide"} if is_vector else {}), **file.attrs},
            {} if coords is None else dict(coords.attrs),
            sample,
        )


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
            file[FEATURES].read_direct(values.reshape(file[FEATURES].shape))
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
    """Read (N, 2) int64 top left corners in level-0 pixels; None if the file has none.

    Raises:
        DamagedStore: the file cannot be read.
    """
    with _opened(header.path) as file:
        coords = file.get(COORDS)
        return None if coords is None else np.asarray(coords[...], np.int64).reshape(-1, 2)


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
            found=str(error).split("\n")[0][:200],
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
