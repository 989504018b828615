"""The grid of a mask: where its pixels are on the slide. Masks become outlines and outlines become masks exactly."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import shapely
from shapely.geometry.base import BaseGeometry

from histopipe.geometry import Size
from histopipe.slides.thumbnail import Thumbnail
from histopipe.tissue_masks.mask import Mask


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of square pixels of `side` level-0 pixels, with its top left corner at (`x`, `y`) of level 0.

    `slide` is the size of level 0: a mask for a slide of another size is recognised by it.
    """

    x: float
    y: float
    side: float
    size: Size
    slide: Size

    @classmethod
    def of(cls, thumbnail: Thumbnail, slide: Size) -> Grid:
        """Return the grid of a slide's thumbnail."""
        height, width = thumbnail.pixels.shape[:2]
        scale = thumbnail.level.downsample
        x, y = thumbnail.x_level * scale, thumbnail.y_level * scale
        return cls(x, y, thumbnail.reduction * scale, Size(width, height), slide)

    def to_text(self) -> str:
        """Return the grid as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Grid:
        """Return the grid from `to_text`; ValueError, KeyError or TypeError if the text is another."""
        value = json.loads(text)
        x, y, side = (float(value[name]) for name in ("x", "y", "side"))
        size, slide = (
            Size(int(value[name]["width"]), int(value[name]["height"]))
            for name in ("size", "slide")
        )
        return cls(x, y, side, size, slide)

    def outlines(self, mask: Mask) -> list[shapely.Polygon]:
        """Return the outlines of a mask, (H, W) bool, in level-0 pixels: they follow the edges of its pixels."""
        edges = np.diff(np.pad(mask.view(np.int8), ((0, 0), (1, 1))), axis=1)
        rows, starts = np.nonzero(edges == 1)
        _, ends = np.nonzero(edges == -1)
        runs = shapely.box(starts, rows, ends, rows + 1)
        joined = shapely.simplify(shapely.union_all(runs), 0)  # without points on straight edges
        placed = shapely.transform(joined, lambda points: points * self.side + (self.x, self.y))
        return [part for part in shapely.get_parts(placed) if isinstance(part, shapely.Polygon)]

    def covered(self, areas: Iterable[BaseGeometry]) -> Mask:
        """Return which pixels have their centre in one of the areas, (H, W) bool. Areas are polygons of level 0."""
        mask = np.zeros((self.size.height, self.size.width), np.bool_)
        for area in areas:
            for polygon in shapely.get_parts(area):
                mask |= self._inside(polygon)
        return mask

    def _inside(self, polygon: shapely.Polygon) -> Mask:
        """Return the pixels with their centre in a polygon: those with an odd number of edges on their left."""
        crossings = np.zeros((self.size.height, self.size.width + 1), np.bool_)
        for ring in (polygon.exterior, *polygon.interiors):
            # In units of pixels, with the centres at whole numbers.
            points = (shapely.get_coordinates(ring) - (self.x, self.y)) / self.side - 0.5
            points = np.round(points, 6)  # edges of pixels of another grid are slightly off
            (x0, y0), (x1, y1) = points[:-1].T, points[1:].T
            first = np.clip(np.ceil(np.minimum(y0, y1)), 0, self.size.height).astype(np.int64)
            last = np.clip(np.ceil(np.maximum(y0, y1)), 0, self.size.height).astype(np.int64)
            count = np.maximum(last - first, 0)
            edge = np.repeat(np.arange(len(count)), count)
            row = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count) + first[edge]
            x = x0[edge] + (row - y0[edge]) * (x1 - x0)[edge] / (y1 - y0)[edge]
            column = np.clip(np.ceil(x), 0, self.size.width).astype(np.int64)
            np.logical_xor.at(crossings, (row, column), True)
        return np.logical_xor.accumulate(crossings, axis=1)[:, :-1]

    def resampled(self, mask: Mask, source: Grid) -> Mask:
        """Return a mask of another grid on this grid: the value at the centre of each pixel; false outside."""
        if source == self:
            return mask
        columns, rows = (
            np.floor((first + self.side * (np.arange(count) + 0.5) - start) / source.side)
            for first, count, start in (
                (self.x, self.size.width, source.x),
                (self.y, self.size.height, source.y),
            )
        )
        pixels = np.zeros((self.size.height, self.size.width), np.bool_)
        height, width = mask.shape
        ok_rows, ok_columns = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
        part = mask[np.ix_(rows[ok_rows].astype(int), columns[ok_columns].astype(int))]
        pixels[np.ix_(ok_rows, ok_columns)] = part
        return pixels
