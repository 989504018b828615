"""Folders of feature files: their records, checks, and several opened together, whose features are joined for each slide."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, HistopipeError, NothingToDo, OnError, UsageError
from histopipe.features.feature_file import (
    SIDE,
    SLIDES,
    FeatureHeader,
    feature_files,
    read_coords,
    read_features,
    read_header,
)
from histopipe.geometry import Mpp, same_scale
from histopipe.splits.slide_table import read_slide_table
from histopipe.store.store import Store
from histopipe.system.files import read_record, write_atomically
from histopipe.system.folders import ENCODER, FolderKind, folder_kind
from histopipe.system.output import counted
from histopipe.system.shared_folders import ALL, Share, recorded_by_parts
from histopipe.system.table_cells import nfc
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
_CHECKED_ROWS = 256
"""Rows that are checked at once: a block that fits into the cache, since a bag may be a gigabyte."""


def covering(
    corners: NDArray[np.int64], side: float, other_corners: NDArray[np.int64], other_side: float
) -> NDArray[np.int64]:
    """Return for each patch the row of the other patch that contains its centre, (N,) int64, -1 for none.

    If several contain it, the one with the nearest centre is taken, and of these the first. Corners are (N, 2) and (M, 2).
    """
    # Late: only joined sets need it.
    from scipy.spatial import KDTree

    covering_rows = np.full(len(corners), -1, np.int64)
    if not len(corners) or not len(other_corners):
        return covering_rows
    centres, half = corners + side / 2, other_side / 2
    near = KDTree(other_corners + half).query_ball_point(centres, half + 1, p=np.inf)
    rows = np.repeat(np.arange(len(corners)), [len(each) for each in near])
    other = np.concatenate(near).astype(np.int64)
    offset = centres[rows] - other_corners[other]
    within = np.flatnonzero(((offset >= 0) & (offset < other_side)).all(axis=1))
    rows, other, away = rows[within], other[within], ((offset[within] - half) ** 2).sum(axis=1)
    order = np.lexsort((other, away, rows))
    covered, first = np.unique(rows[order], return_index=True)
    covering_rows[covered] = other[order[first]]
    return covering_rows


@dataclass(frozen=True, slots=True)
class SlideFeatures:
    """The features of a slide from one or several sets.

    `chosen` holds the (R,) rows of each set that are joined; None for a single set, whose rows are all used.
    """

    headers: tuple[FeatureHeader, ...]
    chosen: tuple[NDArray[np.int64], ...] | None = None

    @property
    def rows(self) -> int:
        """Number of patches."""
        return self.headers[0].rows if self.chosen is None else len(self.chosen[0])

    @property
    def fingerprint(self) -> object:
        """Value with a stable `repr`, which changes with the features."""
        files = [
            (h.rows, h.dimension, str(h.dtype), int(h.attributes.get("crc32", h.sample)))
            for h in self.headers
        ]
        if self.chosen is None:
            return files[0]
        return files, [zlib.crc32(rows.tobytes()) for rows in self.chosen]

    def read(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.floating]:
        """Return the (R, D) features of sorted rows, or of all, with the sets side by side.

        Raises:
            DamagedStore: a file is damaged, or a feature is NaN or infinite.
        """
        if self.chosen is None:
            return _finite(self.headers[0], read_features(self.headers[0], rows), rows)
        parts = []
        for header, chosen in zip(self.headers, self.chosen, strict=True):
            used = chosen if rows is None else chosen[rows]
            # All rows at once are read in sequence, which verifies their checksum.
            values = read_features(header)[used] if rows is None else read_features(header, used)
            parts.append(_finite(header, values, used))
        return np.concatenate(parts, axis=1)

    def corners(self) -> NDArray[np.int64] | None:
        """Return (R, 2) top left corners in level-0 pixels, those of the first set; None if unknown."""
        corners = read_coords(self.headers[0])
        return corners if corners is None or self.chosen is None else corners[self.chosen[0]]

    def positions(self) -> NDArray[np.float32]:
        """Return the (R, 2) positions in patches, from the first row and column with a patch.

        Raises:
            UsageError: the file has no coordinates, or not the side of its patches.
        """
        corners, first = self.corners(), self.headers[0]
        if corners is None or not first.side:
            raise UsageError(
                f"{first.path}: no positions",
                found=first.unplaced or f"no attribute {SIDE} of coords",
                expected="coords of the patches in level-0 pixels",
                todo="use features of `histopipe embed`, or another --pooling",
            )
        if not len(corners):
            return np.zeros((0, 2), np.float32)
        return np.asarray((corners - corners.min(axis=0)) / first.side, np.float32)


def _finite(
    header: FeatureHeader, values: NDArray[np.floating], rows: NDArray[np.int64] | None
) -> NDArray[np.floating]:
    """Return the features of rows, or of all, after a check that they are finite."""
    for begin in range(0, len(values), _CHECKED_ROWS):
        wrong = np.argwhere(~np.isfinite(values[begin : begin + _CHECKED_ROWS]))
        if len(wrong):
            place, column = wrong[0] + (begin, 0)
            raise DamagedStore(
                f"{header.path}: feature {column} of patch {place if rows is None else rows[place]} is not finite",
                found=f"{values[place, column]:g}",
                expected="a number",
                todo="compute the file again, or leave it out (--on-error skip)",
            )
    return values


def join(headers: Sequence[FeatureHeader]) -> SlideFeatures:
    """Join the feature sets of a slide. The patches are those of the first set that all others cover.

    Raises:
        UsageError: a file has no coordinates, or not the side of its patches.
        DamagedStore: a file cannot be read.
    """
    if len(headers) == 1:
        return SlideFeatures((headers[0],))
    first, *corners = map(_corners, headers)
    all_rows = np.arange(len(first))
    rows = [
        all_rows
        if np.array_equal(first, other)
        else covering(first, _side(headers[0]), other, _side(header))
        for header, other in zip(headers[1:], corners, strict=True)
    ]
    kept = np.flatnonzero(np.all([set_rows >= 0 for set_rows in rows], axis=0))
    return SlideFeatures(tuple(headers), tuple(set_rows[kept] for set_rows in (all_rows, *rows)))


def _corners(header: FeatureHeader) -> NDArray[np.int64]:
    corners = read_coords(header)
    if corners is None:
        raise UsageError(
            f"{header.path}: {header.unplaced}",
            expected="coords in level-0 pixels: feature sets are matched by position",
            todo="use one set, or features of `histopipe embed`",
        )
    return corners


def _side(header: FeatureHeader) -> float:
    if not header.recorded_side:
        raise UsageError(
            f"{header.path}: side of the patches",
            found=f"no attribute {SIDE} of coords",
            expected="the side in level-0 pixels, to match the patches of several sets",
        )
    return header.recorded_side


Headers = Mapping[str, FeatureHeader]
"""Headers of feature files by slide id."""


def join_feature_sets(
    folders: Sequence[Path], on_error: OnError = "raise"
) -> tuple[Headers, dict[str, SlideFeatures], dict[str, str], list[str]]:
    """Open the feature files of one folder, or of several, and join those of each slide. Raises as `BagSet`.

    Returns the headers of all files of the first folder, the features of slides that have some, why the header of a file
    cannot be read (only if damage is skipped), each by slide; and notes about what was left out.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError("--mil: a folder is given twice", found=", ".join(map(str, folders)))
    failed: dict[str, str] = {}
    (headers, filled), *other_sets = [_headers(folder, on_error, failed) for folder in folders]
    # An exact name has priority over one that is equal in NFC.
    names = {nfc(name): name for name in headers} | {name: name for name in headers}
    joined_sets = [
        {names.get(name, names.get(nfc(name), name)): header for name, header in other.items()}
        for _, other in other_sets
    ]
    parts, notes = _join_slides(filled, joined_sets, folders)
    return headers, parts, failed, [*notes, *(f"left out: {reason}" for reason in failed.values())]


def _headers(folder: Path, on_error: OnError, failed: dict[str, str]) -> tuple[Headers, Headers]:
    """Return the headers of a folder, and those of files with patches, which have the same number of features.

    If damage is skipped, `failed` gets why a header cannot be read.
    """
    headers = {}
    for name, path in feature_files(folder).items():
        try:
            headers[name] = read_header(path)
        except DamagedStore as error:
            if on_error == "raise":
                raise
            failed[name] = str(error)
    if not headers:
        raise NothingToDo(
            f"{folder} contains no features", expected="files SLIDE.h5 from `histopipe embed`"
        )
    filled = {name: header for name, header in headers.items() if header.rows}
    if not filled:
        raise NothingToDo(
            f"no slide in {folder} has patches",
            found=", ".join(list(headers)[:3]),
            todo="check the slides: `histopipe ingest SLIDES --plan` lists why slides have no patches",
        )
    first = next(iter(filled.values()))
    for header in filled.values():
        if header.dimension != first.dimension:
            raise UsageError(
                f"{header.path}: features per patch",
                found=header.dimension,
                expected=f"{first.dimension}, as in {first.path}",
                todo="use one folder per encoder",
            )
    return headers, filled


def _join_slides(
    headers: Headers, other_sets: Sequence[Headers], folders: Sequence[Path]
) -> tuple[dict[str, SlideFeatures], list[str]]:
    """Join the sets of each slide. Return the features of slides that have some, and notes about what is left out."""
    parts = {
        name: join([header, *(other[name] for other in other_sets)])
        for name, header in headers.items()
        if all(name in other for other in other_sets)
    }
    parts = {name: part for name, part in parts.items() if part.rows}
    lost = [name for name in headers if name not in parts]
    names = " and ".join(map(str, folders))
    if not parts:
        raise NothingToDo(
            f"no slide has patches in all of {names}",
            found=f"such as {lost[0]}",
            expected="features of the same slides, with overlapping patches",
        )
    patches = sum(part.headers[0].rows - part.rows for part in parts.values())
    notes = {
        f"{counted(len(lost), 'slide')} without common patches in {names} left out: {', '.join(lost[:3])}": lost,
        f"{counted(patches, 'patch')} of {folders[0]} left out: another set does not cover them": patches,
    }
    return parts, [note for note, is_true in notes.items() if is_true]


def check_level(slides: Iterable[SlideFeatures], *, vectors: bool) -> None:
    """Check that features are vectors of slides or patients, or else of patches.

    Raises:
        UsageError: they are not, or some are vectors and some are not.
    """
    files = {header.level: header.path for slide in slides for header in slide.headers}
    if len(files) > 1:
        raise UsageError(
            "mixed features",
            found=", ".join(f"{path} of a {level}" for level, path in files.items()),
            expected="features of patches, or vectors of a slide encoder",
            todo="put them into different folders",
        )
    level, path = next(iter(files.items()), ("slide" if vectors else "patch", Path()))
    if vectors != (level != "patch"):
        raise UsageError(
            f"{path.parent}: features",
            found="features of patches" if vectors else f"vectors of {level}s",
            expected="vectors of a slide encoder" if vectors else "features of patches",
            todo="use --pooling mean" if vectors else "use --pooling none",
        )


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
    before = read_record(path) or {}
    # Vectors of slide encoders have no `dtype`.
    if "dtype" in encoder and "precision" in before and "dtype" not in before:
        raise UsageError(
            f"{folder} cannot be continued",
            found="features of version 0.2",
            expected="those of version 0.3 or later",
            todo="choose another --out; `histopipe train --mil` reads the features",
        )
    # The file name of an encoder may change, since the weights are compared; versions of libraries change often.
    share.record(path, encoder, ignored=_IGNORED, contents="features")


def read_encoder(folder: Path) -> dict[str, Any] | None:
    """Return what `record_encoder` recorded; None in folders of other tools."""
    return read_record(folder / ENCODER)


def record_stores(folder: Path, stores: Iterable[Store]) -> None:
    """Add the paths of stores to the record of a folder, so that heatmaps find the slides of its features."""
    record = read_encoder(folder) or {}
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
        recorded = (read_encoder(folder) or {}).get("stores")
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
    check_files(feature_files(folder).values(), _read_all_features, seconds)


def check_files(paths: Iterable[Path], read: Callable[[Path], None], seconds: float) -> None:
    """Read each file in a separate process, see `check_features`."""
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
