"""A heatmap over a slide's thumbnail, with a colour bar and a scale bar."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from histopipe.reports.heat import SlideHeat
from histopipe.system.files import appearing

COLOURS = "viridis"
"""Even steps to the eye, also to one that confuses red and green, and none of its colours is that of tissue."""
ALPHA = 0.55

_DPI = 150
_LONGER_SIDE = 8.0
"""Inches of the picture itself."""
_MOST_CELLS = 1200
_STEPS = (1, 2, 5)


def draw_heat(heat: SlideHeat, background: NDArray[np.uint8] | None, path: Path) -> None:
    """Write a PNG.

    Args:
        heat: the values.
        background: (H, W, 3) uint8 picture of the slide's bounds; grey where there is none.
        path: the file.
    """
    figure = heat_figure(heat, background)
    FigureCanvasAgg(figure)
    with (
        appearing(path, hidden=True) as part,
        # Of letters that the font lacks: a slide may be called anything.
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        figure.savefig(part, dpi=_DPI, format="png", metadata={"Software": None})
    figure.clear()


def heat_figure(heat: SlideHeat, background: NDArray[np.uint8] | None) -> Figure:
    """The figure that `draw_heat` writes."""
    _, _, width, height = heat.bounds
    inch = _LONGER_SIDE / max(width, height)
    # Room for the colour bar on the right, for the title above.
    figure = Figure(figsize=(max(3.2, width * inch) + 1.1, max(2.4, height * inch) + 0.7))
    axes = figure.add_axes(
        (0.02, 0.02, 1 - 1.15 / figure.get_figwidth(), 1 - 0.55 / figure.get_figheight())
    )
    extent = (0, width, height, 0)
    if background is not None:
        axes.imshow(background, extent=extent, interpolation="antialiased")
    pixel = max(heat.side_l0 / 8, max(width, height) / _MOST_CELLS)
    values = np.ma.masked_invalid(heat.raster(pixel))
    shown = axes.imshow(
        values, extent=extent, cmap=COLOURS, vmin=0, vmax=1, interpolation="nearest",
        alpha=ALPHA if background is not None else 1.0,
    )  # fmt: skip
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], facecolor="#e8e8e8")
    axes.set_title(heat.slide, fontsize=10, loc="left", parse_math=False)
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
    colours.set_label(heat.what, fontsize=9, parse_math=False)
    colours.solids.set(alpha=1)  # type: ignore[union-attr]  # there are some
    bar.tick_params(labelsize=8)
    if heat.mpp is not None:
        _scale_bar(axes, heat.mpp, width, height)
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
    """The largest of 1, 2 and 5 times a power of ten that is not larger.

    Example:
        >>> scale_bar_um(330.0)
        200.0
    """
    power = 10.0 ** math.floor(math.log10(most))
    return max(step * power for step in _STEPS if step * power <= most * (1 + 1e-9))
