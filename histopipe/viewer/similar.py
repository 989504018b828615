"""Patches with the most similar features. These functions run in worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.features.feature_file import read_coords, read_features, read_header

_BLOCK_BYTES = 64 << 20
"""Bytes of features that are read at once."""


def feature_of(path: str, x: int, y: int) -> NDArray[np.float32]:
    """Return the features (D,) of the patch at a corner in level-0 pixels.

    Raises:
        UsageError: the file has no such patch.
        DamagedStore: the file cannot be read.
    """
    header = read_header(Path(path))
    coords = read_coords(header)
    rows = np.flatnonzero((coords == (x, y)).all(axis=1)) if coords is not None else np.array([])
    if not len(rows):
        raise UsageError(
            f"{path} has no features of the patch at x {x}, y {y}",
            todo="embed this store: the features are those of other patches",
        )
    return np.asarray(read_features(header, rows[:1])[0], np.float32)


def most_similar(path: str, feature: NDArray[np.float32], count: int) -> list[dict[str, Any]]:
    """Return corner and cosine similarity of the patches in a file with the most similar features, best first.

    Raises:
        UsageError: the features have another length.
        DamagedStore: the file cannot be read.
    """
    header = read_header(Path(path))
    if header.dimension != len(feature):
        raise UsageError(
            f"{path}: the length of its features", found=header.dimension, expected=len(feature)
        )
    coords = read_coords(header)
    if coords is None or not header.rows:
        return []
    if not np.isfinite(feature).all():
        raise UsageError("the features of this patch are not finite", todo="embed the slide again")
    direction = feature / max(float(np.linalg.norm(feature)), 1e-12)
    # A file that is not contiguous is read at once.
    block = header.rows if header.offset is None else max(1, _BLOCK_BYTES // (4 * header.dimension))
    cosine = np.empty(header.rows, np.float32)
    for start in range(0, header.rows, block):
        rows = np.arange(start, min(start + block, header.rows))
        part = np.asarray(read_features(header, rows), np.float32)
        cosine[rows] = part @ direction / np.maximum(np.linalg.norm(part, axis=1), 1e-12)
    cosine[~np.isfinite(cosine)] = -1  # features that are not finite
    best = np.argsort(-cosine, kind="stable")[:count]
    return [
        {"x": int(coords[row, 0]), "y": int(coords[row, 1]), "cosine": round(float(cosine[row]), 4)}
        for row in best.tolist()
    ]
