"""Maps of the classes of a slide: blended from overlapping patches, and written as OME-TIFF and GeoJSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import shapely
import shapely.geometry
from numpy.typing import NDArray
from tifffile import TiffWriter

from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.slides.slide import Turn
from histopipe.system.files import atomic_write
from histopipe.tiling.mask import Grid

_TILE = 256
_MOST_PIXELS = 30_000_000
"""Most pixels of the level from which outlines are traced."""
COLOURS = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (213, 94, 0),
    (86, 180, 233),
)
"""Colours of classes, which colour-blind readers distinguish.

Source:
    M. Okabe and K. Ito, Color universal design (2008).
"""


class ClassMap:
    """The class of each pixel of a slide, from the probabilities of overlapping patches that come row by row.

    Overlapping patches are weighted by the distance from their edges. Only a band of rows, as high as a patch, is in memory.

    Args:
        file: file of the map, which is created: uint8, 0 without a prediction, else the number of the class plus 1. It is
            sparse: areas without patches take no space.
        size: of the map.
        side: of the patches, in pixels of the map.
        classes: number of classes, K.

    Attributes:
        values: (H, W) map, complete after `close`.
        counts: (K,) pixels of each class.
    """

    def __init__(self, file: Path, size: Size, *, side: int, classes: int) -> None:
        shape = size.height, size.width
        self.values = np.memmap(file, np.uint8, "w+", shape=shape)
        self.counts = np.zeros(classes, np.int64)
        # Weights are in the last plane.
        self._band = np.zeros((classes + 1, side, size.width), np.float32)
        self._top, self._side = 0, side
        ramp = np.minimum(np.arange(1, side + 1), np.arange(side, 0, -1)).astype(np.float32)
        self._weight = np.minimum.outer(ramp, ramp)

    def add(self, probabilities: NDArray[np.float32], x: int, y: int) -> None:
        """Add the (side, side, K) probabilities of a patch with this corner, which may be in part outside of the map.

        Raises:
            ValueError: it is above an earlier one.
        """
        inside = slice(max(0, -y), None), slice(max(0, -x), max(0, self.values.shape[1] - x))
        x, y = max(0, x), max(0, y)
        if y < self._top:
            raise ValueError("patches are not sorted by row")
        self._advance(y)
        weight = self._weight[inside]
        part = self._band[:, : weight.shape[0], x : x + weight.shape[1]]
        part[:-1] += (probabilities[inside] * weight[..., None]).transpose(2, 0, 1)
        part[-1] += weight

    def _advance(self, y: int) -> None:
        """Decide the rows above `y`, which no further patch covers."""
        rows = min(y - self._top, self._side)
        if rows > 0:
            done = self._band[:, :rows]
            height = min(rows, self.values.shape[0] - self._top)
            best = np.where(done[-1] > 0, done[:-1].argmax(axis=0) + 1, 0)[:height].astype(np.uint8)
            if best.any():  # else the file stays sparse
                self.values[self._top : self._top + height] = best
                self.counts += np.bincount(best.ravel(), minlength=len(self.counts) + 1)[1:]
            self._band[:, : self._side - rows] = self._band[:, rows:].copy()
            self._band[:, self._side - rows :] = 0
        self._top = max(self._top, y)

    def close(self) -> None:
        """Decide the last rows."""
        self._advance(self._top + self._side)
        self.values.flush()


def pooled(probabilities: NDArray[np.float32], factor: int) -> NDArray[np.float32]:
    """Return the means of squares of pixels of (S, S, K) probabilities. S is a multiple of the factor."""
    side = len(probabilities) // factor
    parts = probabilities.reshape(side, factor, side, factor, -1)
    return np.asarray(parts.mean(axis=(1, 3), dtype=np.float32))


def write_class_tiff(
    values: NDArray[np.uint8], path: Path, *, mpp: float | None, classes: Sequence[str]
) -> None:
    """Write a (H, W) map of classes as a pyramidal OME-TIFF by one rename. `mpp` is that of its pixels."""
    levels = [values]
    while max(levels[-1].shape) > 2 * _TILE:
        levels.append(levels[-1][::2, ::2])
    metadata: dict[str, Any] = {
        "axes": "YX",
        "Name": path.name.partition(".")[0],
        "Description": "; ".join(
            f"{n}: {name}" for n, name in enumerate(("no prediction", *classes))
        ),
    }
    if mpp is not None:
        for axis in "XY":
            metadata |= {f"PhysicalSize{axis}": mpp, f"PhysicalSize{axis}Unit": "µm"}
    with atomic_write(path) as part, TiffWriter(part, bigtiff=True, ome=True) as file:
        for number, level in enumerate(levels):
            file.write(
                _tiles(level),
                shape=level.shape,
                dtype=np.uint8,
                tile=(_TILE, _TILE),
                compression="zlib",
                photometric="minisblack",
                **(
                    {"subfiletype": 1}
                    if number
                    else {"subifds": len(levels) - 1, "metadata": metadata}
                ),
            )


def _tiles(level: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    for y in range(0, level.shape[0], _TILE):
        for x in range(0, level.shape[1], _TILE):
            tile = np.zeros((_TILE, _TILE), np.uint8)
            part = level[y : y + _TILE, x : x + _TILE]
            tile[: part.shape[0], : part.shape[1]] = part
            yield tile


def write_class_outlines(
    values: NDArray[np.uint8],
    path: Path,
    *,
    scale: float,
    classes: Sequence[str],
    bounds: RegionL0,
    corner: PointL0 | None = None,
    turn: Turn,
    tolerance: float,
) -> None:
    """Write the outlines of a (H, W) map of the scanned area, `bounds`, as GeoJSON of QuPath by one rename.

    `scale` is the side of its pixels and `tolerance` the most that outlines may be moved, in level-0 pixels. They are traced
    at a scale of half of the tolerance, and areas below its square are left out. Coordinates are those of QuPath: from the
    corner of the scanned area, in the frame of the file. Of a core, `bounds` is its region, and `corner` that of the area.
    """
    (left, top), (x, y) = ((at.x, at.y) for at in (bounds.origin, corner or bounds.origin))
    step = max(1, int(tolerance / 2 / scale))
    while values.size / step**2 > _MOST_PIXELS:
        step += 1
    coarse = np.asarray(values[step // 2 :: step, step // 2 :: step])
    size = Size(coarse.shape[1], coarse.shape[0])
    grid = Grid(left, top, scale * step, size, turn.size)
    features = []
    for number, name in enumerate(classes):
        outlines = shapely.simplify(grid.outlines(coarse == number + 1), tolerance / 2)
        for area in outlines[shapely.area(outlines) >= tolerance**2].tolist():
            placed = shapely.transform(
                area, lambda points: np.round(turn.stored(points) - (x, y), 2)
            )
            colour = COLOURS[number % len(COLOURS)]
            properties = {
                "objectType": "annotation",
                "classification": {"name": name, "color": colour},
            }
            geometry = shapely.geometry.mapping(placed)
            features.append({"type": "Feature", "geometry": geometry, "properties": properties})
    text = json.dumps({"type": "FeatureCollection", "features": features}, separators=(",", ":"))
    with atomic_write(path) as part:
        part.write_text(text)
