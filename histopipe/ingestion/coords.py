"""Read the patch coordinates of CLAM and TRIDENT, and plan slides with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.regions import find_fault
from histopipe.annotations.rules import Frame
from histopipe.errors import MachineShort, ScaleError, SlideUnreadable, UsageError, first_line
from histopipe.geometry import SCALE_TOLERANCE, Level, Mpp
from histopipe.slides.slide import SlideInfo, Turn
from histopipe.slides.slide_files import SlideNames
from histopipe.system.files import reading_error
from histopipe.system.output import Progress
from histopipe.tiling.plan import LevelChoice, Resampling, TilingPlan
from histopipe.tiling.spec import TilingSpec, magnification_to_mpp

SUFFIX = ".h5"
_TRIDENT_SUFFIX = "_patches"
_MOST_EXPANSION = 1000
"""Maximum number of coordinates per byte of the file. A damaged header may state any number."""


@dataclass(frozen=True, slots=True)
class CoordsFile:
    """Attributes of a coordinate file: the patches of one slide. `patch_size` and `overlap` are in pixels as stored.

    TRIDENT files have `side_l0`, the side of a patch in level-0 pixels, and the magnification. CLAM files have the level,
    which is read without resampling.
    """

    path: Path
    patch_size: int
    side_l0: int | None
    level: int | None
    magnification: float | None
    overlap: int


def find_coords(
    folder: Path, names: SlideNames, progress: Progress, *, allow_extra: bool
) -> dict[str, CoordsFile]:
    """Return the coordinate files of a folder by slide id, and show how many slides and files are skipped.

    Raises:
        UsageError: there is no file, a file matches no slide, none does, two match the same slide, or a file has no
            coordinates.
    """
    paths = sorted(folder.rglob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise UsageError(
            f"{folder} has no coordinate files",
            expected=f"files SLIDE{SUFFIX} or SLIDE{_TRIDENT_SUFFIX}{SUFFIX}",
        )
    files: dict[str, CoordsFile] = {}
    unmatched = []
    for path in paths:
        name = path.relative_to(folder).with_suffix("").as_posix()
        slide = names.find(name, where=str(path)) or names.find(
            name.removesuffix(_TRIDENT_SUFFIX), where=str(path)
        )
        if slide is None:
            unmatched.append(path.name)
        elif slide in files:
            raise UsageError(
                f"two coordinate files for slide {slide}", found=f"{files[slide].path} and {path}"
            )
        else:
            files[slide] = read_header(path)
    if unmatched and not allow_extra:
        raise UsageError(
            "coordinate files match no slide",
            found=", ".join(unmatched[:3]) + ("…" if unmatched[3:] else ""),
            todo="pass all slides, or --allow-extra-rows",
        )
    for count, what in (
        (len(names.ids) - len(files), "slides have no coordinates"),
        (len(unmatched), "coordinate files match no slide"),
    ):
        if count:
            progress.message(f"{count} {what}: skipped")
    if not files:
        raise UsageError(f"{folder} has no coordinates for any of the slides")
    return files


def spec_of(files: Iterable[CoordsFile], **encoding: Any) -> TilingSpec:
    """Return the spec of a store for coordinate files, with settings for the encoding.

    Raises:
        UsageError: the files have several sizes or scales, which cannot be in one store.
    """
    suffixes = {
        (file.patch_size, file.magnification, file.level, file.overlap): file.path for file in files
    }
    if len(suffixes) > 1:
        kinds_text = [
            f"{path.name}: {size} pixels, "
            + (f"{magnification:g}×" if magnification else f"level {level}")
            + (f", overlap {overlap}" if overlap else "")
            for (size, magnification, level, overlap), path in suffixes.items()
        ]
        raise UsageError(
            "coordinates with several sizes or scales",
            found="; ".join(kinds_text[:3]),
            expected="one patch size and scale",
            todo="import each into a separate store",
        )
    ((size, magnification, level, overlap),) = suffixes
    return TilingSpec(
        patch_size=size,
        overlap=overlap,
        level=level,
        tissue="none",
        grid="imported",
        mpp=None if magnification is None else magnification_to_mpp(magnification),
        **encoding,
    )


def read_header(path: Path) -> CoordsFile:
    """Read the attributes of a coordinate file, without its coordinates.

    Raises:
        UsageError: it has no coordinates, or no patch size.
    """
    import h5py  # late: only coordinate files need it

    try:
        with h5py.File(path, "r", locking=False) as file:
            attributes = dict(file["coords"].attrs)
    except (OSError, KeyError, RuntimeError, AttributeError) as error:
        unread = reading_error(error, path)
        if unread is not None:
            raise unread from error
        raise UsageError(
            f"{path} has no coordinates",
            found=first_line(error),
            expected="a dataset 'coords' (patches, 2), as CLAM and TRIDENT write it",
        ) from error
    try:
        size = int(attributes["patch_size"])
        if {"level0_magnification", "target_magnification"} <= set(attributes):
            magnification = float(attributes["target_magnification"])
            side_l0 = round(size * (float(attributes["level0_magnification"]) / magnification))
            return CoordsFile(
                path,
                size,
                side_l0=int(attributes.get("patch_size_level0", side_l0)),
                level=None,
                magnification=magnification,
                overlap=int(attributes.get("overlap", 0)),
            )
        if int(attributes.get("custom_downsample", 1)) != 1:
            raise UsageError(
                f"{path}: custom_downsample", found=attributes["custom_downsample"], expected="none"
            )
        return CoordsFile(path, size, None, int(attributes["patch_level"]), None, 0)
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{path}: attributes of the dataset 'coords'",
            found=", ".join(sorted(map(str, attributes))) or "none",
            expected="patch_size with patch_level (CLAM), or with level0_magnification and target_magnification (TRIDENT)",
        ) from error


def read_corners(path: Path) -> NDArray[np.int64]:
    """Read the top left corners, (N, 2) int64 in level-0 pixels.

    Raises:
        SlideUnreadable: the file cannot be read.
    """
    import h5py  # late: as above

    try:
        with h5py.File(path, "r", locking=False) as file:
            dataset = file["coords"]
            if dataset.size > _MOST_EXPANSION * path.stat().st_size:
                raise ValueError(f"shape {dataset.shape}, too large for the file size")  # noqa: TRY301
            corners = dataset[...]
            unit = {**file.attrs, **dataset.attrs}.get("unit", "px")
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        unread = reading_error(error, path)
        if isinstance(unread, MachineShort):
            raise unread from error
        raise SlideUnreadable(f"{path} cannot be read", found=str(error)[:200]) from error
    if not corners.size:
        return np.zeros((0, 2), np.int64)
    if corners.ndim != 2 or corners.shape[1] != 2 or corners.dtype.kind not in "iuf":
        actual = f"{corners.shape} {corners.dtype}"
        raise SlideUnreadable(f"{path}: coords", found=actual, expected="numbers (patches, 2)")
    fault = find_fault(corners, unit)
    if fault:
        raise SlideUnreadable(f"{path}", found=fault, expected="whole level-0 pixels")
    return np.asarray(corners, np.int64)


def plan_imported(
    name: str, info: SlideInfo, mpp: Mpp | None, coords: CoordsFile, *, frame: Frame = "auto"
) -> TilingPlan:
    """Return the plan for the coordinates of a slide; `mpp` is its level-0 scale, `frame` the setting of this name.

    Raises:
        ScaleError: the coordinates are outside the slide, or their scale is too fine for it.
        SlideUnreadable: the coordinate file cannot be read.
    """
    choice = _choice(name, info.levels, mpp, coords)
    corners = read_corners(coords.path)
    side = choice.read_size * choice.level.downsample
    if frame != "turned":  # images have whole sides: they have one level
        turn = Turn(info.orientation, info.size)
        corners = turn.turned(corners, int(side) if info.orientation > 1 else 0)
    outside = (corners + side <= 0) | (corners >= (info.size.width, info.size.height))
    if outside.any():
        raise ScaleError(
            f"{name}: coordinates of {coords.path.name} are outside the slide",
            found=f"{corners[outside.any(axis=1)][0].tolist()}, patches of {side:.0f} level-0 pixels",
            expected=f"within {info.size}",
            todo="check that the file belongs to this slide",
        )
    x_l0, y_l0 = corners.T
    x_level, y_level = np.rint(corners.T / choice.level.downsample).astype(np.int64)
    return TilingPlan(
        choice, x_level, y_level, x_l0, y_l0, notes=(f"coordinates from {coords.path.name}",)
    )


def count_outside(plan: TilingPlan, info: SlideInfo) -> int:
    """Return the number of patches that extend beyond the scanned area: native tiles do not have all of their pixels."""
    area, side = plan.choice.level.inside(info.bounds), plan.choice.read_size
    outside = (
        (plan.x_l0 < 0)
        | (plan.y_l0 < 0)
        | (plan.x_l0 + plan.side_l0 > info.size.width)
        | (plan.y_l0 + plan.side_l0 > info.size.height)
        | (plan.x_level < area.x)
        | (plan.y_level < area.y)
        | (plan.x_level + side > area.x + area.size.width)
        | (plan.y_level + side > area.y + area.size.height)
    )
    return int(outside.sum())


def _choice(
    name: str, levels: tuple[Level, ...], mpp: Mpp | None, coords: CoordsFile
) -> LevelChoice:
    """Return the level to read: the level in the CLAM file, or the coarsest one that needs no upsampling."""
    size = coords.patch_size
    if coords.side_l0 is None:
        number = coords.level or 0
        if number >= len(levels):
            raise ScaleError(f"{name} has no level {number}", found=f"{len(levels)} levels")
        level = levels[number]
        scale = None if mpp is None else Mpp(mpp * level.downsample)
        return LevelChoice(level, size, size, "none", scale)
    coarsest = coords.side_l0 / size * (1 + SCALE_TOLERANCE)
    fine = [level for level in levels if level.downsample <= coarsest]
    if not fine:
        raise ScaleError(
            f"{name}: patches of {coords.side_l0} level-0 pixels",
            expected=f"at least {size}: patches are never upsampled",
        )
    level = max(fine, key=lambda level: level.downsample)
    scale = None if mpp is None else Mpp(mpp * coords.side_l0 / size)
    read_size = round(coords.side_l0 / level.downsample)
    if abs(read_size - size) <= SCALE_TOLERANCE * size:
        return LevelChoice(level, size, size, "none", scale)
    resampling: Resampling = "area" if read_size % size == 0 else "lanczos"
    return LevelChoice(level, read_size, read_size, resampling, scale)


def check_coords(folder: Path, *, seconds: float = 60.0) -> None:
    """Check the coordinate files of a folder as `check_features` does."""
    from histopipe.features.feature_sets import (
        check_files,  # late: ingest of slides does not need HDF5
    )

    check_files(sorted(folder.rglob(f"*{SUFFIX}")), _read_all_coords, seconds)


def _read_all_coords(path: Path) -> None:
    read_header(path)
    read_corners(path)
