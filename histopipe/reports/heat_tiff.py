"""A heatmap as a pyramidal TIFF of the slide's scanned area: it opens in QuPath, with the slide's own scale."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffWriter

from histopipe.reports.heat import SlideHeat
from histopipe.reports.heat_png import COLOURS
from histopipe.system.files import appearing

_TILE = 256
_CELL = 16
"""Pixels across a patch."""
_MOST_SIDE = 8_192
_NOTHING = (255, 255, 255)


def write_heat_tiff(heat: SlideHeat, path: Path) -> float:
    """Write tiles of 256 pixels, deflated, each level half the one before; white where no patch is.

    Args:
        heat: the values.
        path: the file.

    Returns:
        Level-0 pixels per pixel.
    """
    _, _, width, height = heat.bounds
    pixel = max(1.0, heat.side_l0 / _CELL, max(width, height) / _MOST_SIDE)
    picture = coloured(heat.raster(pixel))
    mpp = None if heat.mpp is None else heat.mpp * pixel
    with appearing(path, hidden=True) as part, TiffWriter(part, bigtiff=True) as file:
        for number, level in enumerate(_levels(picture)):
            scale = 2**number
            file.write(
                level, tile=(_TILE, _TILE), photometric="rgb", compression="zlib", metadata=None,
                subfiletype=1 if number else 0,
                # Pixels per centimetre.
                resolution=None if mpp is None else (1e4 / (mpp * scale),) * 2,
                resolutionunit=None if mpp is None else 3,
            )  # fmt: skip
    return pixel


def coloured(raster: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 RGB of (H, W) values from 0 to 1; white for NaN."""
    table = (mpl.colormaps[COLOURS](np.linspace(0, 1, 256))[:, :3] * 255).round().astype(np.uint8)
    missing = np.isnan(raster)
    picture = table[np.where(missing, 0, np.rint(raster * 255)).astype(np.uint8)]
    picture[missing] = _NOTHING
    return picture


def _levels(picture: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    levels = [picture]
    while max(levels[-1].shape[:2]) > _TILE:
        levels.append(np.asarray(Image.fromarray(levels[-1]).reduce(2)))
    return levels
