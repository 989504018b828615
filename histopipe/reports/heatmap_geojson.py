"""Heatmaps as objects for QuPath: patches with their value as a measurement, or outlines of areas with high values.

Source:
    GeoJSON as QuPath writes it: `objectType`, `classification` with a colour, `measurements` by name; positions relative to the
    corner of the scanned area.
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

from histopipe.reports.heatmap_images import COLOURS
from histopipe.reports.patch_values import PatchValues
from histopipe.system.files import appearing

Objects = Literal["cells", "contours"]
_GAP = 1.0
"""Level-0 pixels that rounding may leave between neighbours."""


def write_heatmap_geojson(
    values: PatchValues, path: Path, *, objects: Objects, threshold: float
) -> int:
    """Write a FeatureCollection.

    Args:
        values: values of the patches.
        path: the file.
        objects: "cells": one tile per patch; "contours": one annotation around each group of patches from `threshold` on.
        threshold: of the values.

    Returns:
        Number of objects.
    """
    features = _cells(values) if objects == "cells" else _contours(values, threshold)
    count = 0
    with appearing(path, hidden=True) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"type":"FeatureCollection","features":[')
        for feature in features:
            file.write((",\n" if count else "\n") + json.dumps(feature, separators=(",", ":")))
            count += 1
        file.write("\n]}\n")
    return count


def _cells(patches: PatchValues) -> Iterator[dict[str, Any]]:
    left, top, _, _ = patches.bounds
    side = patches.side_l0
    colours = (mpl.colormaps[COLOURS](patches.values)[:, :3] * 255).round().astype(int)
    for i, (x, y) in enumerate(
        zip((patches.x_l0 - left).tolist(), (patches.y_l0 - top).tolist(), strict=True)
    ):
        ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
        name = patches.name if patches.predicted is None else str(patches.predicted[i])
        yield _feature(
            {"type": "Polygon", "coordinates": [ring]}, "tile", name, colours[i].tolist(),
            {patches.name: float(patches.values[i])},
        )  # fmt: skip


def _contours(patches: PatchValues, threshold: float) -> Iterator[dict[str, Any]]:
    left, top, _, _ = patches.bounds
    high = patches.values >= threshold
    x, y = patches.x_l0[high] - left, patches.y_l0[high] - top
    squares = shapely.box(
        x - _GAP, y - _GAP, x + patches.side_l0 + _GAP, y + patches.side_l0 + _GAP
    )
    groups = shapely.get_parts(shapely.union_all(squares))
    tree = shapely.STRtree(_points(x + patches.side_l0 / 2, y + patches.side_l0 / 2))
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
