"""The plan: which cells of a slide become patches, decided before a pixel of them is read."""

from __future__ import annotations

from dataclasses import dataclass

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
    """A slide's patches, row by row from the top left. It holds no pixels.

    Attributes:
        choice: the level and how it is read.
        x_level, y_level: (N,) int64 top left corners, pixels of the level read.
        x_l0, y_l0: (N,) int64 the same corners in level 0.
        tissue: (N,) float32 share of tissue, 0 to 1; NaN where it was not looked for.
        notes: what a person should know about it.
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
        """Side of a cell, level-0 pixels."""
        return self.choice.read_size * self.choice.level.downsample

    def only(self, chosen: NDArray[np.bool_], note: str) -> TilingPlan:
        """The plan of some of its cells, (N,) bool, with a note if these are none of many."""
        if not len(self):
            return self
        return TilingPlan(
            choice=self.choice,
            x_level=frozen_array(self.x_level[chosen], np.int64),
            y_level=frozen_array(self.y_level[chosen], np.int64),
            x_l0=frozen_array(self.x_l0[chosen], np.int64),
            y_l0=frozen_array(self.y_l0[chosen], np.int64),
            tissue=frozen_array(self.tissue[chosen], np.float32),
            notes=self.notes if chosen.any() else (*self.notes, note),
        )


def plan_tiles(
    info: SlideInfo,
    choice: LevelChoice,
    spec: TilingSpec,
    thumbnail: Thumbnail,
    mask: TissueMask | None,
) -> TilingPlan:
    """The patches of one slide.

    Args:
        info: the slide's header.
        choice: the level to read.
        spec: what the user asked for.
        thumbnail: the picture that `mask` lies on.
        mask: where the tissue is; None takes every cell.
    """
    grid = lay_grid(choice.level.inside(info.bounds), choice.read_size, choice.stride)
    if mask is None:
        tissue = np.full(grid.shape, np.nan, np.float32)
        rows, columns = (index.ravel() for index in np.indices(grid.shape))
    else:
        tissue = _tissue_of(grid, choice, thumbnail, mask)
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
    """(N,) share of each of a plan's cells that a mask on the thumbnail covers, 0 to 1."""
    frame = _Frame(thumbnail, plan.choice)
    x, y = frame.x(plan.x_level), frame.y(plan.y_level)
    return covered_squares(mask, x, y, plan.choice.read_size / frame.scale)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A thumbnail's pixels, seen from the level that patches are read from."""

    thumbnail: Thumbnail
    choice: LevelChoice

    @property
    def scale(self) -> float:
        """Pixels of that level per pixel of the thumbnail."""
        return self._step * self.thumbnail.reduction

    def x(self, level: NDArray[np.int64]) -> NDArray[np.float64]:
        """Columns of that level, in pixels of the thumbnail."""
        return np.asarray((level - self.thumbnail.x_level * self._step) / self.scale)

    def y(self, level: NDArray[np.int64]) -> NDArray[np.float64]:
        """Rows of that level, in pixels of the thumbnail."""
        return np.asarray((level - self.thumbnail.y_level * self._step) / self.scale)

    @property
    def _step(self) -> float:
        return self.thumbnail.level.downsample / self.choice.level.downsample


def _tissue_of(
    grid: Grid, choice: LevelChoice, thumbnail: Thumbnail, mask: TissueMask
) -> NDArray[np.float32]:
    """Tissue share of every cell: the grid's edges taken into the mask's frame."""
    frame = _Frame(thumbnail, choice)
    return covered_fractions(
        # What could not be seen may be tissue: it is planned, and recorded as unreadable if it is so there too.
        mask.pixels if thumbnail.lost is None else mask.pixels | thumbnail.lost,
        frame.x(grid.xs), frame.y(grid.ys), grid.cell / frame.scale,
    )  # fmt: skip


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
