"""Made-up patches of a slide, for slide encoders. Only NumPy: `tools/make_slide_twins.py` runs without TensorFlow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SIDE = 512
"""Side of the patches in level-0 pixels."""
TWIN_ROWS = (50, 1000, 9000)
"""Numbers of patches of the twins."""


def grid_side(rows: int) -> int:
    """Columns and rows of the grid, a third of which has no tissue."""
    return int(np.ceil((1.5 * rows) ** 0.5))


def slide_patches(rows: int, dimension: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(rows, dimension) features, and (rows, 2) corners of different places of a grid, in any order."""
    random, side = np.random.default_rng(rows), grid_side(rows)
    features = random.standard_normal((rows, dimension)).astype(np.float32)
    cells = random.permutation(side * side)[:rows]
    cells[:2] = 0, side * side - 1  # the corners of the grid, at most once
    cells = np.unique(cells)
    free = np.setdiff1d(np.arange(side * side), cells)
    cells = random.permutation(np.concatenate([cells, free[: rows - len(cells)]]))
    return features, np.stack(np.divmod(cells, side), axis=1) * SIDE
