"""Resize position embeddings to another grid of patches, as timm or Hugging Face does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def resize_positions(values: NDArray[np.float32], side: int, *, antialiased: bool) -> NDArray[np.float32]:
    """Resize (G * G, D) positions to (side * side, D), bicubic.

    Antialiased: the kernel of Keys with a = -0.5, widened when reducing, as PIL and timm. Otherwise: a = -0.75 and edges
    repeated, as PyTorch's `interpolate` and Hugging Face's ViT and Dinov2.
    """
    grid = round(len(values) ** 0.5)
    if grid == side:
        return values
    matrix = _matrix(grid, side, antialiased=antialiased)
    image = values.reshape(grid, grid, -1).astype(np.float64)
    return np.einsum("yi,xj,ijd->yxd", matrix, matrix, image).reshape(side * side, -1).astype(np.float32)


def _matrix(grid: int, side: int, *, antialiased: bool) -> NDArray[np.float64]:
    """Return the (side, grid) weights of one dimension."""
    scale = grid / side
    width = max(scale, 1.0) if antialiased else 1.0
    centres = (np.arange(side) + 0.5) * scale - 0.5
    first = np.floor(centres - 2 * width).astype(int)
    places = first[:, None] + np.arange(int(np.ceil(4 * width)) + 2)[None, :]
    weights = _cubic((places - centres[:, None]) / width, -0.5 if antialiased else -0.75)
    if antialiased:
        weights = np.where((places >= 0) & (places < grid), weights, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((side, grid))
    np.add.at(matrix, (np.arange(side)[:, None], places.clip(0, grid - 1)), weights)
    return matrix


def _cubic(x: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
