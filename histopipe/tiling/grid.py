"""Regular cells over a level, and the share of each that a mask covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import RegionLevel


@dataclass(frozen=True, slots=True)
class Grid:
    """Left edges (columns,) int64, top edges (rows,) int64, and side of cells, all in pixels of the level."""

    xs: NDArray[np.int64]
    ys: NDArray[np.int64]
    cell: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.ys), len(self.xs)


def lay_grid(area: RegionLevel, cell: int, stride: int) -> Grid:
    """Return the grid of all cells that are inside an area, from its top left corner."""
    return Grid(
        _starts(area.x, area.size.width, cell, stride),
        _starts(area.y, area.size.height, cell, stride),
        cell,
    )


def _starts(first: int, extent: int, cell: int, stride: int) -> NDArray[np.int64]:
    count = (extent - cell) // stride + 1 if extent >= cell else 0
    return first + stride * np.arange(count, dtype=np.int64)


def covered_fractions(
    mask: NDArray[np.bool_], xs: NDArray[np.floating], ys: NDArray[np.floating], cell: float
) -> NDArray[np.float32]:
    """Return the share, 0 to 1, of every cell that a mask covers, (rows, columns) float32.

    Cells are given by left edges, top edges and side in pixels of the (H, W) mask. Linear interpolation of cumulative
    sums is exact also for edges inside a pixel.
    """
    # Along the rows (counts of pixels fit into 32 bits), then, only at the cells' edges, down the columns.
    along = np.zeros((mask.shape[0], mask.shape[1] + 1), np.int32)
    np.cumsum(mask, axis=1, dtype=np.int32, out=along[:, 1:])
    strips = _interpolated(along.T, xs + cell) - _interpolated(along.T, xs)  # (columns, H)
    down = np.zeros((mask.shape[0] + 1, len(strips)))
    np.cumsum(strips.T, axis=0, out=down[1:])
    sums = _interpolated(down, ys + cell) - _interpolated(down, ys)
    return np.clip(sums / (cell * cell), 0, 1).astype(np.float32)


def covered_squares(
    mask: NDArray[np.bool_], x: NDArray[np.floating], y: NDArray[np.floating], side: float
) -> NDArray[np.float32]:
    """Return the share, 0 to 1, of every square that a mask covers, (N,) float32, for squares at any (N,) left and top edges."""
    if not mask.any():
        return np.zeros(len(x), np.float32)
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1), np.int32)
    np.cumsum(np.cumsum(mask, axis=0, dtype=np.int32), axis=1, out=sums[1:, 1:])

    def up_to(column: NDArray[np.floating], row: NDArray[np.floating]) -> NDArray[np.float64]:
        """Count the pixels of the mask above and to the left of points."""
        column, row = np.clip(column, 0, mask.shape[1]), np.clip(row, 0, mask.shape[0])
        left = np.minimum(column.astype(np.int64), mask.shape[1] - 1)
        top = np.minimum(row.astype(np.int64), mask.shape[0] - 1)
        right_share, low_share = column - left, row - top
        upper = sums[top, left] * (1 - right_share) + sums[top, left + 1] * right_share
        lower = sums[top + 1, left] * (1 - right_share) + sums[top + 1, left + 1] * right_share
        return np.asarray(upper * (1 - low_share) + lower * low_share)

    found = up_to(x + side, y + side) - up_to(x, y + side) - up_to(x + side, y) + up_to(x, y)
    return np.clip(found / (side * side), 0, 1).astype(np.float32)


def _interpolated(table: NDArray[Any], rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Interpolate rows of a table at fractional positions; positions outside take the edge row."""
    rows = np.clip(rows, 0, len(table) - 1)
    low = np.minimum(rows.astype(np.int64), len(table) - 2) if len(table) > 1 else rows.astype(int)
    share = (rows - low)[:, None]
    high = np.minimum(low + 1, len(table) - 1)
    return np.asarray(table[low] * (1 - share) + table[high] * share)
