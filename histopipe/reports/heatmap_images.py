"""Heatmaps as images: PNG over an image of the slide, and pyramidal TIFF that opens in QuPath with the slide's scale."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffWriter

from histopipe.reports.patch_values import PatchValues
from histopipe.system.files import appearing

COLOURS = "viridis"
"""Perceptually uniform, also for colour-blind readers, and unlike the colours of tissue."""
ALPHA = 0.55

_DPI = 150
_LONGER_SIDE = 8.0
"""Inches of the image, without title and colour bar."""
_MAX_SIDE = 1200
"""Pixels of the raster, at most."""
_STEPS = (1, 2, 5)
_TILE = 256
_PATCH_PIXELS = 16
"""Pixels across a patch in a TIFF file."""
_MAX_TIFF_SIDE = 8_192
_WHITE = (255, 255, 255)


def write_heatmap_png(
    values: PatchValues, background: NDArray[np.uint8] | None, path: Path
) -> None:
    """Write a PNG file with colour bar and scale bar.

    Args:
        values: values of the patches.
        background: (H, W, 3) uint8 image of the slide's bounds; grey if None.
        path: the file.
    """
    figure = _figure(values, background)
    FigureCanvasAgg(figure)
    with (
        appearing(path, hidden=True) as part,
        # A slide id may have letters that the font lacks.
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        figure.savefig(part, dpi=_DPI, format="png", metadata={"Software": None})
    figure.clear()


def _figure(values: PatchValues, background: NDArray[np.uint8] | None) -> Figure:
    _, _, width, height = values.bounds
    inch = _LONGER_SIDE / max(width, height)
    # Room for the colour bar on the right, for the title above.
    figure = Figure(figsize=(max(3.2, width * inch) + 1.1, max(2.4, height * inch) + 0.7))
    axes = figure.add_axes(
        (0.02, 0.02, 1 - 1.15 / figure.get_figwidth(), 1 - 0.55 / figure.get_figheight())
    )
    extent = (0, width, height, 0)
    if background is not None:
        axes.imshow(background, extent=extent, interpolation="antialiased")
    pixel = max(values.side_l0 / 8, max(width, height) / _MAX_SIDE)
    raster = np.ma.masked_invalid(values.raster(pixel))
    shown = axes.imshow(
        raster, extent=extent, cmap=COLOURS, vmin=0, vmax=1, interpolation="nearest",
        alpha=ALPHA if background is not None else 1.0,
    )  # fmt: skip
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], facecolor="#e8e8e8")
    axes.set_title(values.slide, fontsize=10, loc="left", parse_math=False)
    place = axes.get_position()
    bar = figure.add_axes(
        (
            place.x1 + 0.12 / figure.get_figwidth(),
            place.y0,
            0.16 / figure.get_figwidth(),
            place.height,
        )
    )
    colours = figure.colorbar(shown, cax=bar)
    colours.set_label(values.name, fontsize=9, parse_math=False)
    colours.solids.set(alpha=1)  # type: ignore[union-attr]  # a filled colour bar has them
    bar.tick_params(labelsize=8)
    if values.mpp is not None:
        _scale_bar(axes, values.mpp, width, height)
    return figure


def _scale_bar(axes: Axes, mpp: float, width: float, height: float) -> None:
    micrometres = scale_bar_um(width * mpp / 4)
    length = micrometres / mpp
    x, y = 0.03 * width, height - 0.04 * max(width, height)
    thick = 0.012 * max(width, height)
    text = f"{micrometres:g} µm" if micrometres < 1000 else f"{micrometres / 1000:g} mm"
    axes.add_patch(
        Rectangle((x, y), length, thick, facecolor="black", edgecolor="white", linewidth=1)
    )
    axes.text(
        x + length / 2, y - thick / 2, text, ha="center", va="bottom", fontsize=9, color="black",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5},
    )  # fmt: skip


def scale_bar_um(most: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is at most `most`.

    Example:
        >>> scale_bar_um(330.0)
        200.0
    """
    power = 10.0 ** math.floor(math.log10(most))
    return max(step * power for step in _STEPS if step * power <= most * (1 + 1e-9))


def write_heatmap_tiff(values: PatchValues, path: Path) -> float:
    """Write a pyramidal TIFF file of the scanned area; white where there is no patch.

    Args:
        values: values of the patches.
        path: the file.

    Returns:
        Level-0 pixels per pixel.
    """
    _, _, width, height = values.bounds
    pixel = max(1.0, values.side_l0 / _PATCH_PIXELS, max(width, height) / _MAX_TIFF_SIDE)
    image = coloured(values.raster(pixel))
    mpp = None if values.mpp is None else values.mpp * pixel
    with appearing(path, hidden=True) as part, TiffWriter(part, bigtiff=True) as file:
        for number, level in enumerate(_levels(image)):
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
    """Return (H, W, 3) uint8 RGB of (H, W) values from 0 to 1; white for NaN."""
    table = (mpl.colormaps[COLOURS](np.linspace(0, 1, 256))[:, :3] * 255).round().astype(np.uint8)
    missing = np.isnan(raster)
    image = table[np.where(missing, 0, np.rint(raster * 255)).astype(np.uint8)]
    image[missing] = _WHITE
    return image


def _levels(image: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    levels = [image]
    while max(levels[-1].shape[:2]) > _TILE:
        levels.append(np.asarray(Image.fromarray(levels[-1]).reduce(2)))
    return levels
