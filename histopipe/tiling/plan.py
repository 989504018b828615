"""Plan a slide: its level, its grid, and the cells that become patches, before their pixels are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import ScaleError
from histopipe.geometry import SCALE_TOLERANCE, Level, Mpp, same_scale
from histopipe.slides.slide import SlideInfo
from histopipe.slides.thumbnail import Thumbnail
from histopipe.system.output import counted
from histopipe.tiling.mask import TissueMask
from histopipe.tiling.spec import Edge, TilingSpec

Resampling = Literal["none", "area", "lanczos"]


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """Level and grid of the patches: squares of `read_size` pixels of a level, `stride` pixels apart.

    `resampling` reduces them to the patch size. `mpp` is the scale of the stored patches; None if unknown.
    """

    level: Level
    read_size: int
    stride: int
    resampling: Resampling
    mpp: Mpp | None


def choose_level(
    name: str, levels: tuple[Level, ...], mpp: Mpp | None, spec: TilingSpec
) -> LevelChoice:
    """Choose the level of the spec, or the coarsest level that is fine enough for its scale. Patches are not enlarged.

    `name` is for messages. `mpp` is the level-0 scale; None if unknown, which only `--level` allows.

    Raises:
        ScaleError: every level is coarser than the scale of the spec, or the slide does not have its level.
    """
    if spec.level is not None:
        if spec.level >= len(levels):
            raise ScaleError(
                f"{name} has no level {spec.level}",
                found=f"{counted(len(levels), 'level')}, 0 to {len(levels) - 1}",
                todo="use --mpp instead, which chooses the level of each slide",
            )
        level = levels[spec.level]
        return _unscaled(level, None if mpp is None else Mpp(mpp * level.downsample), spec)
    if mpp is None or spec.mpp is None:
        raise ScaleError(
            f"{name} has no mpp", todo="give one with --mpp-csv or --default-mpp, or use --level"
        )
    coarsest = spec.mpp * (1 + SCALE_TOLERANCE)
    fine = [level for level in levels if mpp * level.downsample <= coarsest]
    if not fine:
        finest = mpp * levels[0].downsample
        raise ScaleError(
            f"{name} is too coarse",
            found=f"{finest:g} mpp at its finest",
            expected=f"at most {spec.mpp:g}",
            todo=f"leave it out, or use a larger --mpp, such as {finest:.3g} (patches are never enlarged)",
        )
    level = max(fine, key=lambda level: level.downsample)
    level_mpp = mpp * level.downsample
    reduction = spec.mpp / level_mpp
    if reduction <= 1 + SCALE_TOLERANCE:
        return _unscaled(level, Mpp(level_mpp), spec)
    # The same tolerance applies to whole reductions: a "40×" scan of 0.252 mpp needs no filter, and its tiles can be
    # decoded at half size.
    whole = round(reduction)
    if same_scale(Mpp(level_mpp * whole), spec.mpp):
        reduction = whole
    read_size = round(spec.patch_size * reduction)
    return LevelChoice(
        level=level,
        read_size=read_size,
        stride=max(1, round(read_size * (spec.patch_size - spec.overlap) / spec.patch_size)),
        # A mean over a whole number of pixels is exact; other reductions need a filter.
        resampling="area" if read_size % spec.patch_size == 0 else "lanczos",
        mpp=Mpp(level_mpp * read_size / spec.patch_size),
    )


def _unscaled(level: Level, mpp: Mpp | None, spec: TilingSpec) -> LevelChoice:
    return LevelChoice(level, spec.patch_size, spec.patch_size - spec.overlap, "none", mpp)


_COLUMNS = {
    "x_level": np.int64,
    "y_level": np.int64,
    "x_l0": np.int64,
    "y_l0": np.int64,
    "tissue": np.float32,
}


@dataclass(frozen=True, slots=True)
class TilingPlan:
    """Top left corners of a slide's patches, (N,) each, row by row. The arrays are read-only copies.

    `x_level` and `y_level` are pixels of the level that is read. `tissue` is a share, 0 to 1; NaN if not measured.
    """

    choice: LevelChoice
    x_level: NDArray[np.int64]
    y_level: NDArray[np.int64]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    tissue: NDArray[np.float32] = field(default_factory=lambda: np.array(np.nan, np.float32))
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            column = np.array(np.broadcast_to(getattr(self, name), len(self.x_level)), dtype)
            column.setflags(write=False)
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.x_level)

    @property
    def side_l0(self) -> float:
        """Side of a cell in level-0 pixels."""
        return self.choice.read_size * self.choice.level.downsample

    def take(self, cells: NDArray[np.bool_] | NDArray[np.int64]) -> TilingPlan:
        """Return a plan of some of the cells: a mask, (N,) bool, or indices in the wanted order."""
        columns: dict[str, Any] = {name: getattr(self, name)[cells] for name in _COLUMNS}
        return replace(self, **columns)

    def only(self, chosen: NDArray[np.bool_], note: str) -> TilingPlan:
        """Return a plan of the chosen cells, (N,) bool; add the note if no cell is chosen."""
        notes = (*self.notes, note) if len(self) and not chosen.any() else self.notes
        return replace(self.take(chosen), notes=notes)


def plan_tiles(
    info: SlideInfo,
    choice: LevelChoice,
    spec: TilingSpec,
    thumbnail: Thumbnail,
    mask: TissueMask | None,
) -> TilingPlan:
    """Plan the patches of one slide from a tissue mask of its thumbnail; without a mask, use every cell."""
    area = choice.level.inside(info.bounds)
    starts = (
        cell_starts(first, extent, choice.read_size, choice.stride, spec.edge)
        for first, extent in ((area.x, area.size.width), (area.y, area.size.height))
    )
    x_level, y_level = (axis.ravel() for axis in np.meshgrid(*starts))
    x_l0, y_l0 = choice.level.to_l0(x_level), choice.level.to_l0(y_level)
    plan = TilingPlan(choice, x_level, y_level, x_l0, y_l0)
    if not len(plan):
        return replace(
            plan,
            notes=(
                f"no patch fits: level {choice.level.number} has {area.size} scanned pixels, a patch needs "
                f"{choice.read_size}×{choice.read_size}",
            ),
        )
    if mask is None:
        return plan
    tissue = cell_shares(plan, thumbnail, mask.pixels)
    plan = replace(plan, tissue=tissue).only(
        tissue >= spec.tissue_threshold, "; ".join(["no tissue found", *mask.notes])
    )
    return plan if plan.notes else replace(plan, notes=mask.notes)


def cell_starts(
    first: int, extent: int, cell: int, stride: int, edge: Edge = "drop"
) -> NDArray[np.int64]:
    """Return the left or top edges of the cells of an extent.

    They are all cells that are completely inside. If they leave a rest, "shift" adds the last one inside, which overlaps
    its neighbour, and "pad" one that extends beyond the end.
    """
    count = (extent - cell) // stride + 1 if extent >= cell else 0
    starts = first + stride * np.arange(count, dtype=np.int64)
    rest = extent - ((count - 1) * stride + cell if count else 0)
    if rest <= 0 or edge == "drop" or (edge == "shift" and not count):
        return starts
    last = first + (extent - cell if edge == "shift" else count * stride)
    return np.append(starts, np.int64(last))


def cell_shares(
    plan: TilingPlan, thumbnail: Thumbnail, mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the share of each cell of a plan that a mask of the thumbnail covers, (N,) 0 to 1."""
    # Pixels of the plan's level per pixel of the thumbnail's level, and per pixel of the thumbnail.
    step = thumbnail.level.downsample / plan.choice.level.downsample
    scale = step * thumbnail.reduction
    x, y = (
        (starts - first * step) / scale
        for starts, first in ((plan.x_level, thumbnail.x_level), (plan.y_level, thumbnail.y_level))
    )
    return covered_squares(mask, x, y, plan.choice.read_size / scale)


def covered_squares(
    mask: NDArray[np.bool_], x: NDArray[np.floating], y: NDArray[np.floating], side: float
) -> NDArray[np.float32]:
    """Return the share of each square that a mask covers, (N,) float32; `x`, `y` are (N,) left and top edges."""
    if not mask.any():
        return np.zeros(len(x), np.float32)
    sums = np.asarray(cv2.integral(mask.view(np.uint8)), np.int32)

    def up_to(column: NDArray[np.floating], row: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the area of the mask above and to the left of points."""
        column, row = np.clip(column, 0, mask.shape[1]), np.clip(row, 0, mask.shape[0])
        left = np.minimum(column.astype(np.int64), mask.shape[1] - 1)
        top = np.minimum(row.astype(np.int64), mask.shape[0] - 1)
        right_share, low_share = column - left, row - top
        upper, lower = (
            sums[line, left] * (1 - right_share) + sums[line, left + 1] * right_share
            for line in (top, top + 1)
        )
        return np.asarray(upper * (1 - low_share) + lower * low_share)

    areas = up_to(x + side, y + side) - up_to(x, y + side) - up_to(x + side, y) + up_to(x, y)
    # Rounded: the error of the sums depends on tissue elsewhere, and must not decide whether a cell is planned.
    return np.round(np.clip(areas / (side * side), 0, 1), 6).astype(np.float32)
