"""Cut a plan into chunks: one task and one transaction each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import PointL0, RegionLevel, Size
from histopipe.ingestion.route import RouteName
from histopipe.tiling.plan import TilingPlan

_STRIP = 8192
"""Width, in pixels of the level, of the strips that patches are made along. The tiles that two rows of patches share stay
decoded meanwhile: two rows of tiles of such a strip are 12 MB."""
_CHUNK_PIXELS = 1 << 25
"""Pixels of the level between two transactions: 512 patches of 256². Half of it costs copying a tenth more time, and decoding
the tiles along a chunk's edge more often."""
_MOST_PATCHES = 4096


@dataclass(frozen=True, slots=True)
class PatchPlace:
    """Position of one patch."""

    region: RegionLevel
    origin: PointL0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some patches of a plan, in the order in which they are best made.

    Attributes:
        rows: (N,) int64 their numbers.
        x_level, y_level, x_l0, y_l0: (N,) int64 their top left corners.
        side: of the square read for each, pixels of the level.
    """

    rows: NDArray[np.int64]
    x_level: NDArray[np.int64]
    y_level: NDArray[np.int64]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    side: int

    def __len__(self) -> int:
        return len(self.rows)

    def places(self) -> Iterator[PatchPlace]:
        """Yield the position of each patch."""
        size = Size(self.side, self.side)
        corners = (self.x_level, self.y_level, self.x_l0, self.y_l0)
        for x, y, x_l0, y_l0 in zip(*(axis.tolist() for axis in corners), strict=True):
            yield PatchPlace(RegionLevel(x, y, size), PointL0(x_l0, y_l0))


def chunk_of(plan: TilingPlan, rows: NDArray[np.int64]) -> Chunk:
    """Return some patches of a plan, by their numbers."""
    return Chunk(
        rows=rows,
        x_level=plan.x_level[rows],
        y_level=plan.y_level[rows],
        x_l0=plan.x_l0[rows],
        y_l0=plan.y_l0[rows],
        side=plan.choice.read_size,
    )


def chunks(plan: TilingPlan, route: RouteName, patch_size: int) -> Iterator[Chunk]:
    """Yield all patches of a plan in chunks.

    Copied ones go row by row, as tiles lie in a file. Others go along strips, so that tiles shared by
    neighbours are decoded once.
    """
    rows = np.arange(len(plan))
    side = max(patch_size, plan.choice.read_size)
    if route != "copy":
        rows = np.lexsort((plan.x_level, plan.y_level, plan.x_level // max(side, _STRIP)))
    size = max(1, min(_MOST_PATCHES, _CHUNK_PIXELS // side**2))
    count = -(-len(rows) // size)
    # Of equal length and, for two workers or four, an equal number each, so that they end together.
    for part in np.array_split(rows, max(1, count if count == 1 else -(-count // 4) * 4)):
        if len(part):
            yield chunk_of(plan, part)
