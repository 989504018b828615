"""Tissue masks as outlines to edit: those of a file, and the area of outlines that were drawn.

Outlines count in their order: tissue is added, an excluded outline cuts what was before. So the area is what the page of
the viewer shows, and an outline that is added over a cut is tissue again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import shapely
from shapely.affinity import translate
from shapely.geometry.base import BaseGeometry

from histopipe.annotations.annotation_files import (
    feature_class,
    file_bytes,
    read_features,
    read_geojson,
)
from histopipe.annotations.regions import IGNORED, Outline, polygonal
from histopipe.errors import UsageError
from histopipe.geometry import RegionL0, Size
from histopipe.tiling.mask import Grid
from histopipe.tiling.mask_files import TISSUE, check_frame, read_outlines, tissue_features


def read_mask_features(path: Path, slide: str, bounds: RegionL0) -> list[dict[str, Any]]:
    """Return the features of a mask in GeoJSON: its tissue as `read_mask_file` reads it, and what is no tissue.

    Raises:
        MaskUnfit: the file cannot be read, or an outline crosses itself or has no area.
    """
    outlines = sorted(read_outlines(path, slide, bounds), key=lambda outline: outline.excluded)
    edits = [outline for outline in outlines if outline.excluded or _is_edit(outline.name)]
    # Without the class of tissue, all classes are tissue.
    is_named = any(not outline.excluded for outline in edits)
    area = _combined(edits if is_named else outlines)
    return [
        *tissue_features(shapely.get_parts(area), (bounds.origin.x, bounds.origin.y)),
        *(
            dict(feature)
            for feature in read_features(file_bytes(path))
            if is_named and not _is_edit(feature_class(feature))
        ),
    ]


def merge_edits(
    features: list[dict[str, Any]], slide: str, bounds: RegionL0, size: Size
) -> list[dict[str, Any]]:
    """Return features with the area of those of tissue and of those that cut it, merged; features of other classes follow.

    Args:
        features: GeoJSON features in the order in which they were drawn, from the corner of the scanned area.
        slide, bounds, size: id of the slide, its scanned part, and the size of level 0.

    Raises:
        UsageError: an outline has no area, or no tissue is left.
        MaskUnfit: `ingest` would refuse the area, since it is not in pixels of this slide.
    """
    edits = [feature for feature in features if _is_edit(feature_class(feature))]
    outlines = read_geojson(json.dumps(edits).encode())
    if len(outlines.entries) < len(edits):
        raise UsageError(
            f"{slide}: an outline cannot be used", found=outlines.notes[-1], todo="remove it"
        )
    area = _combined(outlines.entries)
    if area.is_empty:
        raise UsageError(
            f"{slide}: the mask has no tissue, which ingest refuses",
            todo="leave the slide out of the ingest (--slide-list) if it has none",
        )
    check_frame(
        Path(f"{slide}.geojson"),
        slide,
        [translate(area, bounds.origin.x, bounds.origin.y)],
        # The last pixel of a mask may be partly outside; of small images, by a part of their side. `ingest` checks it
        # exactly.
        Grid(0, 0, max(size.width, size.height) / 4, size, size),
    )
    return [
        *tissue_features(shapely.get_parts(area), (0, 0)),
        *(f for f in features if not _is_edit(feature_class(f))),
    ]


def _is_edit(name: str | None) -> bool:
    return name == IGNORED or (name or "").casefold() == TISSUE.casefold()


def _combined(outlines: Iterable[Outline]) -> shapely.Polygon | shapely.MultiPolygon:
    """Return the area of outlines that are added and cut in their order."""
    area: BaseGeometry = shapely.MultiPolygon()
    for is_cut, group in groupby(outlines, key=lambda outline: outline.excluded):
        areas = shapely.union_all([outline.area for outline in group])
        area = area - areas if is_cut else area | areas
    # As many digits as a file has, and one order of points: the same area is the same text.
    return polygonal(shapely.normalize(shapely.set_precision(area, 0.01)))
