"""Types and functions of arrays that many modules use."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
PixelArray = NDArray[np.uint8]
"""(H, W, 3) RGB pixels, 0 to 255."""


_ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return a new uint8 array, aligned to 64 bytes so that TensorFlow uses it without a copy."""
    size = math.prod(shape)
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].reshape(shape)


def neighbour_distance(places: NDArray[Any]) -> float:
    """Return the smallest distance of a tenth of the neighbours in a row or column, two at least; 0 if there is none."""
    gaps = []
    for across, down in ((0, 1), (1, 0)):
        ordered = places[np.lexsort((places[:, across], places[:, down]))]
        steps = np.round(np.diff(ordered, axis=0), 3)
        gaps.append(steps[(steps[:, down] == 0) & (steps[:, across] > 0), across])
    distances, counts = np.unique(np.concatenate(gaps), return_counts=True)
    frequent = distances[counts >= max(2, counts.sum() / 10)]
    return float(frequent[0]) if len(frequent) else 0.0
