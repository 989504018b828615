"""Matrices that resize one dimension of an image, as PIL or PyTorch does; and resized position embeddings."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Interpolation = Literal["bilinear", "bicubic"]
_RADIUS = {"bilinear": 1, "bicubic": 2}


def resampling_matrix(
    source: int, target: int, interpolation: Interpolation, *, antialiased: bool = True
) -> NDArray[np.float64]:
    """Return the (source, target) weights that resize one dimension.

    Antialiased: the kernel is widened when reducing, and cut off at the edges, as in PIL and timm; bicubic with a = -0.5.
    Otherwise: edges are repeated, and a = -0.75, as in PyTorch's `interpolate`.
    """
    scale, radius = source / target, _RADIUS[interpolation]
    width = max(scale, 1.0) if antialiased else 1.0
    centres = (np.arange(target) + 0.5) * scale - 0.5
    first = np.floor(centres - radius * width).astype(int)
    places = first[:, None] + np.arange(int(np.ceil(2 * radius * width)) + 2)[None, :]
    distances = np.abs(places - centres[:, None]) / width
    if interpolation == "bilinear":
        weights = np.maximum(1 - distances, 0)
    else:
        weights = _cubic(distances, -0.5 if antialiased else -0.75)
    if antialiased:
        weights = np.where((places >= 0) & (places < source), weights, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((source, target))
    np.add.at(matrix, (places.clip(0, source - 1), np.arange(target)[:, None]), weights)
    return matrix


def resize_positions(
    values: NDArray[np.float32], side: int, *, antialiased: bool
) -> NDArray[np.float32]:
    """Resize (G * G, D) position embeddings to (side * side, D), bicubic.

    timm's are antialiased. Hugging Face's ViT and Dinov2 without registers are not.
    """
    grid = round(len(values) ** 0.5)
    if grid == side:
        return values
    matrix = resampling_matrix(grid, side, "bicubic", antialiased=antialiased)
    image = values.reshape(grid, grid, -1).astype(np.float64)
    resized = np.einsum("iy,jx,ijd->yxd", matrix, matrix, image).reshape(side * side, -1)
    return np.asarray(resized, np.float32)


def _cubic(x: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
