"""The plan of a slide: which cells become patches, decided before their pixels are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import frozen_array
from histopipe.slides.slide import SlideInfo
from histopipe.slides.thumbnail import Thumbnail
from histopipe.tiling.grid import Grid, covered_fractions, covered_squares, lay_grid
from histopipe.tiling.level import LevelChoice
from histopipe.tiling.mask import TissueMask
from histopipe.tiling.spec import TilingSpec

_DARK = 0.5


@dataclass(frozen=True, slots=True)
class TilingPlan:
    """Top left corners of a slide's patches, (N,) each, row by row.

    `x_level` and `y_level` are pixels of the level that is read. `tissue` is a share, 0 to 1, and NaN if not measured.
    """

    choice: LevelChoice
    x_level: NDArray[np.int64]
    y_level: NDArray[np.int64]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    tissue: NDArray[np.float32]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.x_level)

    @property
    def side_l0(self) -> float:
        """Side of a cell in level-0 pixels."""
        return self.choice.read_size * self.choice.level.downsample

    def only(self, chosen: NDArray[np.bool_], note: str) -> TilingPlan:
        """Return the plan of some of its cells, (N,) bool; add the note if none of them is chosen."""
        kept: dict[str, Any] = {}
        for name in ("x_level", "y_level", "x_l0", "y_l0", "tissue"):
            column = getattr(self, name)
            kept[name] = frozen_array(column[chosen], column.dtype)
        notes = (*self.notes, note) if len(self) and not chosen.any() else self.notes
        return replace(self, **kept, notes=notes)


def plan_tiles(
    info: SlideInfo,
    choice: LevelChoice,
    spec: TilingSpec,
    thumbnail: Thumbnail,
    mask: TissueMask | None,
) -> TilingPlan:
    """Plan the patches of one slide, by a mask of the thumbnail; None takes every cell."""
    grid = lay_grid(choice.level.inside(info.bounds), choice.read_size, choice.stride)
    if mask is None:
        tissue = np.full(grid.shape, np.nan, np.float32)
        rows, columns = (index.ravel() for index in np.indices(grid.shape))
    else:
        frame = _Frame(thumbnail, choice)
        # What could not be read may be tissue: it is planned, and recorded as unreadable if its pixels are, too.
        covered = mask.pixels if thumbnail.lost is None else mask.pixels | thumbnail.lost
        side = grid.cell / frame.scale
        tissue = covered_fractions(covered, frame.x(grid.xs), frame.y(grid.ys), side)
        rows, columns = np.nonzero(tissue >= spec.tissue_threshold)
    x_level, y_level = grid.xs[columns], grid.ys[rows]
    return TilingPlan(
        choice=choice,
        x_level=frozen_array(x_level, np.int64),
        y_level=frozen_array(y_level, np.int64),
        x_l0=frozen_array(choice.level.to_l0(x_level), np.int64),
        y_l0=frozen_array(choice.level.to_l0(y_level), np.int64),
        tissue=frozen_array(tissue[rows, columns], np.float32),
        notes=_notes(info, choice, grid, mask, len(rows)),
    )


def cell_shares(
    plan: TilingPlan, thumbnail: Thumbnail, mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the share, 0 to 1, of each cell of a plan that a mask of the thumbnail covers, (N,)."""
    frame = _Frame(thumbnail, plan.choice)
    x, y = frame.x(plan.x_level), frame.y(plan.y_level)
    return covered_squares(mask, x, y, plan.choice.read_size / frame.scale)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Converts pixels of the level that patches are read from to pixels of the thumbnail."""

    thumbnail: Thumbnail
    choice: LevelChoice

    @property
    def scale(self) -> float:
        """Pixels of the level per pixel of the thumbnail."""
        return self._step * self.thumbnail.reduction

    def x(self, level: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray((level - self.thumbnail.x_level * self._step) / self.scale)

    def y(self, level: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray((level - self.thumbnail.y_level * self._step) / self.scale)

    @property
    def _step(self) -> float:
        return self.thumbnail.level.downsample / self.choice.level.downsample


def _notes(
    info: SlideInfo, choice: LevelChoice, grid: Grid, mask: TissueMask | None, patches: int
) -> tuple[str, ...]:
    if patches:
        return ()
    if 0 in grid.shape:
        size = choice.level.inside(info.bounds).size
        return (f"no patch fits: the slide is {size} where one reads {choice.read_size} pixels",)
    if mask is not None and mask.black_fraction > _DARK:
        return ("no tissue found on a dark background, use --tissue none",)
    return ("no tissue found",)
