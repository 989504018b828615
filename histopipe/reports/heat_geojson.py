"""A heatmap as objects for QuPath: each patch with its value as a measurement, or outlines around where it is high.

Source:
    QuPath's own GeoJSON: `objectType`, `classification` with a colour, `measurements` by name; pixels counted from the corner of
    the scanned area.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import shapely
from numpy.typing import NDArray

from histopipe.reports.heat import SlideHeat
from histopipe.reports.heat_png import COLOURS
from histopipe.system.files import appearing

Objects = Literal["cells", "contours"]
_GAP = 1.0
"""Level-0 pixels between neighbours that rounding may have left."""


def write_heat_geojson(heat: SlideHeat, path: Path, *, objects: Objects, threshold: float) -> int:
    """Write a FeatureCollection.

    Args:
        heat: the values.
        path: the file.
        objects: "cells": a tile for each patch; "contours": an annotation around each group of patches from `threshold` on.
        threshold: of the values.

    Returns:
        How many objects.
    """
    made = _cells(heat) if objects == "cells" else _contours(heat, threshold)
    count = 0
    with appearing(path, hidden=True) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"type":"FeatureCollection","features":[')
        for feature in made:
            file.write((",\n" if count else "\n") + json.dumps(feature, separators=(",", ":")))
            count += 1
        file.write("\n]}\n")
    return count


def _cells(heat: SlideHeat) -> Iterator[dict[str, Any]]:
    left, top, _, _ = heat.bounds
    side = heat.side_l0
    colours = (mpl.colormaps[COLOURS](heat.values)[:, :3] * 255).round().astype(int)
    for i, (x, y) in enumerate(
        zip((heat.x_l0 - left).tolist(), (heat.y_l0 - top).tolist(), strict=True)
    ):
        ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
        name = heat.what if heat.predicted is None else str(heat.predicted[i])
        yield _feature(
            {"type": "Polygon", "coordinates": [ring]}, "tile", name, colours[i].tolist(),
            {heat.what: float(heat.values[i])},
        )  # fmt: skip


def _contours(heat: SlideHeat, threshold: float) -> Iterator[dict[str, Any]]:
    left, top, _, _ = heat.bounds
    high = heat.values >= threshold
    x, y = heat.x_l0[high] - left, heat.y_l0[high] - top
    squares = shapely.box(x - _GAP, y - _GAP, x + heat.side_l0 + _GAP, y + heat.side_l0 + _GAP)
    groups = shapely.get_parts(shapely.union_all(squares))
    tree = shapely.STRtree(_points(x + heat.side_l0 / 2, y + heat.side_l0 / 2))
    for group in groups:
        inside = heat.values[high][tree.query(group, predicate="contains")]
        shrunk = group.buffer(-_GAP, join_style="mitre")
        if shrunk.is_empty:
            continue
        mean = float(np.mean(inside)) if len(inside) else threshold
        colour = [round(255 * c) for c in mpl.colormaps[COLOURS](mean)[:3]]
        measures = {f"mean {heat.what}": mean, "patches": len(inside)}
        name = f"{heat.what} ≥ {threshold:g}"
        yield _feature(json.loads(shapely.to_geojson(shrunk)), "annotation", name, colour, measures)


def _points(x: NDArray[np.floating], y: NDArray[np.floating]) -> NDArray[np.object_]:
    return np.asarray(shapely.points(x, y), object)


def _feature(
    geometry: dict[str, Any],
    kind: str,
    name: str,
    colour: list[int],
    measurements: dict[str, float],
) -> dict[str, Any]:
    return {
        "type": "Feature",
        "geometry": geometry,
        "properties": {
            "objectType": kind,
            "classification": {"name": name, "color": colour},
            "measurements": measurements,
        },
    }
