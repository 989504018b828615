"""Small pictures for a page, as data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.reports.heat import SlideHeat
from histopipe.reports.heat_png import ALPHA
from histopipe.reports.heat_tiff import coloured

Pixels = NDArray[np.uint8]

_QUALITY = 72
_GRID, _OUTSIDE = (20, 110, 60), 0.45
SIDE = 420
"""Longer side of a slide's picture."""


def data_uri(pixels: Pixels) -> str:
    """A picture as the text that an image's source may be."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "WEBP", quality=_QUALITY, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def fitted(pixels: Pixels, side: int = SIDE) -> Pixels:
    """A picture whose longer side is `side`; small ones are enlarged, so that what is drawn on them can be seen."""
    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    filtering = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(pixels).resize(size, filtering, reducing_gap=2.0))


def plan_picture(
    thumbnail: Pixels,
    mask: Pixels | None,
    corners: NDArray[np.floating],
    side: float,
    bounds: Sequence[float],
) -> Pixels:
    """A thumbnail, pale where the mask has no tissue, with the patches' edges.

    Args:
        thumbnail: (H, W, 3) of the bounds.
        mask: (H, W) tissue, not 0; None where it was not looked for.
        corners: (N, 2) of the patches, level-0 pixels.
        side: of the patches, level-0 pixels.
        bounds: x, y, width and height, level-0 pixels.
    """
    picture = fitted(thumbnail)
    height, width = picture.shape[:2]
    if mask is not None:
        tissue = np.asarray(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST))
        pale = (255 - _OUTSIDE * (255 - picture.astype(np.float32))).astype(np.uint8)
        picture = np.where((tissue > 0)[..., None], picture, pale)
    picture = picture.copy()
    left, top, full_width, full_height = bounds
    x = (corners[:, 0] - left) * width / full_width
    y = (corners[:, 1] - top) * height / full_height
    across, down = side * width / full_width, side * height / full_height
    for x0, y0 in zip(x.tolist(), y.tolist(), strict=True):
        _frame(picture, x0, y0, x0 + across, y0 + down)
    return picture


def _frame(picture: Pixels, left: float, top: float, right: float, bottom: float) -> None:
    """The edges of a rectangle, a pixel wide."""
    height, width = picture.shape[:2]
    x0, x1 = (min(max(round(v), 0), width - 1) for v in (left, right))
    y0, y1 = (min(max(round(v), 0), height - 1) for v in (top, bottom))
    for rows, columns in (
        (y0, slice(x0, x1 + 1)), (y1, slice(x0, x1 + 1)), (slice(y0, y1 + 1), x0), (slice(y0, y1 + 1), x1),
    ):  # fmt: skip
        picture[rows, columns] = _GRID


def heat_picture(heat: SlideHeat, background: Pixels | None) -> Pixels:
    """A heatmap over a picture of the slide's bounds, without axes."""
    _, _, width, height = heat.bounds
    if background is None:
        scale = SIDE / max(width, height)
        size = max(1, round(height * scale)), max(1, round(width * scale))
        background = np.full((*size, 3), 235, np.uint8)
    picture = fitted(background)
    raster = heat.raster(max(width / picture.shape[1], height / picture.shape[0]))
    place = [
        np.minimum(np.arange(n) * m // n, m - 1)
        for n, m in zip(picture.shape, raster.shape, strict=False)
    ]
    values = raster[np.ix_(*place)]
    mixed = (1 - ALPHA) * picture + ALPHA * coloured(values)
    return np.where(np.isnan(values)[..., None], picture, mixed).astype(np.uint8)


def strip(patches: Sequence[Pixels], side: int = 84, gap: int = 4) -> Pixels:
    """Patches side by side."""
    row = np.full((side, max(1, len(patches) * (side + gap) - gap), 3), 255, np.uint8)
    for i, patch in enumerate(patches):
        small = np.asarray(
            Image.fromarray(patch).resize((side, side), Image.Resampling.BICUBIC, reducing_gap=2.0)
        )
        row[:, i * (side + gap) : i * (side + gap) + side] = small
    return row
