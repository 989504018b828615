"""Heatmap files: PNG over an image of the slide; pyramidal TIFF with the slide's scale and GeoJSON, for QuPath.

Source:
    GeoJSON as QuPath writes it: `objectType`, `classification` with a colour, `measurements` by name. Positions are
    relative to the corner of the scanned area.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import shapely
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffWriter

from histopipe.reports.charts import default_style
from histopipe.reports.heatmap_values import NamedPatchValues
from histopipe.system.files import atomic_write

Objects = Literal["cells", "contours"]

COLOURS = "viridis"
"""Colour map: perceptually uniform, also for colour-blind readers, and different from the colours of tissue."""
ALPHA = 0.55

_CONTRAST = 0.7
"""Contrast of the image under a heatmap: dark tissue would make high values look low."""

_DPI = 150
_LONGER_SIDE = 8.0
"""Longer side of the image in inches, without title and colour bar."""
_MAX_SIDE = 1200
"""Maximum longer side of the raster in pixels."""
_MARGIN, _MARGIN_OF_SIGNED = 1.1, 1.35
"""Space for the colour bar in inches: numbers with a sign are longer."""
_SIGNED = "coolwarm"
"""Colours of values with a sign."""
_TILE = 256
_PATCH_PIXELS = 16
"""Side of a patch in a TIFF file, in pixels."""
_MIN_TIFF_SIDE, _MAX_TIFF_SIDE = 1_024, 8_192
_GAP = 1.0
"""Maximum gap between neighbouring patches from rounding, in level-0 pixels."""


def write_heatmap_png(
    values: NamedPatchValues, background: NDArray[np.uint8] | None, path: Path
) -> None:
    """Write a PNG file with colour bar and scale bar over a (H, W, 3) uint8 image of the bounds in grey, or over plain grey."""
    with (
        atomic_write(path) as part,
        # matplotlib warns about characters of a slide id that are not in the font.
        warnings.catch_warnings(action="ignore", category=UserWarning),
        default_style({}),
    ):
        figure = _figure(values, background)
        figure.savefig(part, dpi=_DPI, format="png", metadata={"Software": None})
        figure.clear()


def _figure(values: NamedPatchValues, background: NDArray[np.uint8] | None) -> Figure:
    _, _, width, height = values.bounds
    inch = _LONGER_SIDE / max(width, height)
    # With space for the colour bar on the right and the title above.
    margin = _MARGIN if values.scale is None else _MARGIN_OF_SIGNED
    figure = Figure(figsize=(max(3.2, width * inch) + margin, max(2.4, height * inch) + 0.7))
    across, down = figure.get_size_inches()
    axes = figure.add_axes((0.02, 0.02, 1 - (margin + 0.05) / across, 1 - 0.55 / down))
    extent = (0, width, height, 0)
    if background is not None:
        small = max(background.shape) < _LONGER_SIDE * _DPI
        axes.imshow(
            pale_grey(background),
            extent=extent,
            interpolation="bicubic" if small else "antialiased",
        )
    pixel = max(values.side_l0 / 8, max(width, height) / _MAX_SIDE)
    raster = np.ma.masked_invalid(values.raster(pixel))
    overlay = axes.imshow(
        raster, extent=extent, cmap=COLOURS if values.scale is None else _SIGNED, vmin=0, vmax=1, interpolation="nearest",
        alpha=ALPHA if background is not None else 1.0,
    )  # fmt: skip
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], facecolor="#e8e8e8")
    axes.set_title(values.slide, fontsize=10, loc="left", parse_math=False)
    area = axes.get_position()
    bar = figure.add_axes((area.x1 + 0.12 / across, area.y0, 0.16 / across, area.height))
    colours = figure.colorbar(overlay, cax=bar)
    colours.set_label(values.name, fontsize=9, parse_math=False)
    bar.tick_params(labelsize=8)
    if values.scale is not None:
        bar.set_yticks([0, 0.5, 1], [f"−{values.scale:.2g}", "0", f"+{values.scale:.2g}"])
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
    """Return the largest of 1, 2 and 5 times a power of ten that is at most `most`."""
    power = 10.0 ** math.floor(math.log10(most))
    return max(step * power for step in (1, 2, 5) if step * power <= most * (1 + 1e-9))


def write_heatmap_tiff(values: NamedPatchValues, path: Path) -> float:
    """Write a pyramidal TIFF file of the scanned area, white without patches. Return level-0 pixels per pixel."""
    _, _, width, height = values.bounds
    longer = max(width, height)
    pixel = min(values.side_l0 / _PATCH_PIXELS, longer / _MIN_TIFF_SIDE)
    pixel = max(1.0, pixel, longer / _MAX_TIFF_SIDE)
    image = coloured(values.raster(pixel), COLOURS if values.scale is None else _SIGNED)
    with atomic_write(path) as part, TiffWriter(part, bigtiff=True) as file:
        for number, level in enumerate(_levels(image)):
            per_centimetre = None if values.mpp is None else 1e4 / (values.mpp * pixel * 2**number)
            file.write(
                level, tile=(_TILE, _TILE), photometric="rgb", compression="zlib", metadata=None,
                subfiletype=1 if number else 0,
                resolution=None if per_centimetre is None else (per_centimetre, per_centimetre),
                resolutionunit=None if per_centimetre is None else "CENTIMETER",
            )  # fmt: skip
    return pixel


def pale_grey(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a (H, W, 3) uint8 image in pale grey: over the colours of a stain, those of values would look different."""
    grey = np.asarray(Image.fromarray(image).convert("L"), np.float32)
    pale = np.rint(255 - _CONTRAST * (255 - grey)).astype(np.uint8)
    return np.repeat(pale[..., None], 3, axis=2)


def coloured(raster: NDArray[np.float32], colours: str = COLOURS) -> NDArray[np.uint8]:
    """Return (H, W, 3) uint8 RGB of (H, W) values from 0 to 1; white for NaN."""
    table = (mpl.colormaps[colours](np.linspace(0, 1, 256))[:, :3] * 255).round().astype(np.uint8)
    missing = np.isnan(raster)
    image = table[np.where(missing, 0, np.rint(raster * 255)).astype(np.uint8)]
    image[missing] = 255
    return image


def _levels(image: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    levels = [image]
    while max(levels[-1].shape[:2]) > _TILE:
        levels.append(np.asarray(Image.fromarray(levels[-1]).reduce(2)))
    return levels


def write_heatmap_geojson(
    values: NamedPatchValues, path: Path, *, objects: Objects, threshold: float
) -> int:
    """Write a FeatureCollection, and return its number of objects.

    "cells" are one tile per patch; "contours", one annotation per group of patches with values of at least `threshold`.
    """
    features = _cells(values) if objects == "cells" else _contours(values, threshold)
    count = 0
    with atomic_write(path) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"type":"FeatureCollection","features":[')
        for feature in features:
            file.write((",\n" if count else "\n") + json.dumps(feature, separators=(",", ":")))
            count += 1
        file.write("\n]}\n")
    return count


def _cells(patches: NamedPatchValues) -> Iterator[dict[str, Any]]:
    left, top, _, _ = patches.bounds
    side = patches.side_l0
    colours = (mpl.colormaps[COLOURS](patches.values)[:, :3] * 255).round().astype(int)
    corners = np.stack([patches.x_l0 - left, patches.y_l0 - top], axis=1).tolist()
    for i, (x, y) in enumerate(corners):
        ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
        name = patches.name if patches.predicted is None else str(patches.predicted[i])
        yield _feature(
            {"type": "Polygon", "coordinates": [ring]}, "tile", name, colours[i].tolist(),
            {patches.name: float(patches.values[i])},
        )  # fmt: skip


def _contours(patches: NamedPatchValues, threshold: float) -> Iterator[dict[str, Any]]:
    left, top, _, _ = patches.bounds
    high = patches.values >= threshold
    x, y = patches.x_l0[high] - left, patches.y_l0[high] - top
    squares = shapely.box(
        x - _GAP, y - _GAP, x + patches.side_l0 + _GAP, y + patches.side_l0 + _GAP
    )
    groups = shapely.get_parts(shapely.union_all(squares))
    half = patches.side_l0 / 2
    tree = shapely.STRtree(np.asarray(shapely.points(x + half, y + half), object))
    for group in groups:
        inside = patches.values[high][tree.query(group, predicate="contains")]
        shrunk = group.buffer(-_GAP, join_style="mitre")
        if shrunk.is_empty:
            continue
        mean = float(np.mean(inside)) if len(inside) else threshold
        colour = [round(255 * c) for c in mpl.colormaps[COLOURS](mean)[:3]]
        measures = {f"mean {patches.name}": mean, "patches": len(inside)}
        name = f"{patches.name} ≥ {threshold:g}"
        yield _feature(json.loads(shapely.to_geojson(shrunk)), "annotation", name, colour, measures)


def _feature(
    geometry: dict[str, Any], kind: str, name: str, colour: list[int], measures: dict[str, float]
) -> dict[str, Any]:
    classification = {"name": name, "color": colour}
    properties = {"objectType": kind, "classification": classification, "measurements": measures}
    return {"type": "Feature", "geometry": geometry, "properties": properties}
