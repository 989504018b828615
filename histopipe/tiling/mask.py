"""Tissue masks of thumbnails, and what the algorithms that find tissue have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

import cv2
import numpy as np
import shapely
from numpy.typing import NDArray
from shapely.geometry.base import BaseGeometry

from histopipe.geometry import Mpp, Size, SquareMicrometres
from histopipe.slides.thumbnail import Thumbnail

SMALLEST_OBJECT = SquareMicrometres(10_000.0)
"""A square of 0.1 mm. Smaller objects are dust or single cells; the core of a needle biopsy is 100 times larger."""
LARGEST_HOLE = SquareMicrometres(5_000.0)
"""Smaller holes (fat cells, gland lumina) count as tissue. The area is well below that of a usual patch (0.128 mm
wide), so that a patch of bare glass does not count as tissue."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TissueMask:
    """Tissue on a thumbnail: (H, W) bool, and notes on how it was found.

    `threshold` is in the unit of the algorithm; None if the mask was not found by a threshold.
    """

    pixels: Mask
    threshold: float | None = None
    notes: tuple[str, ...] = ()


def with_lost_areas(mask: TissueMask, thumbnail: Thumbnail) -> TissueMask:
    """Return a mask with the areas of its thumbnail that could not be read.

    They may be tissue, and count as such: their patches are recorded as unreadable if reading fails again.
    """
    return mask if thumbnail.lost is None else replace(mask, pixels=mask.pixels | thumbnail.lost)


def otsu_threshold(counts: NDArray[Any]) -> int:
    """Return the bin that separates a histogram, (N,), into two classes: it is the last one of the lower class.

    The result is 0 if fewer than two bins are used.

    Source:
        N. Otsu, "A threshold selection method from gray-level histograms", IEEE Trans. SMC 9 (1979).
    """
    if np.count_nonzero(counts) < 2:
        return 0
    below = np.cumsum(counts, dtype=np.float64)
    sums = np.cumsum(counts * np.arange(len(counts)), dtype=np.float64)
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = sums / below - (sums[-1] - sums) / above
        return int(np.nanargmax(below * above * distance**2))


class Components:
    """Connected parts of a mask, (H, W), numbered from 1. Number 0 is not a part: its area and means are 0.

    Attributes:
        areas: number of pixels of each part, (N,).
    """

    def __init__(self, mask: Mask, connectivity: int = 8) -> None:
        _, self._labels, measures, _ = cv2.connectedComponentsWithStats(
            mask.view(np.uint8), connectivity=connectivity
        )
        measures[0] = 0, 0, 1, 1, 0
        self._mask, self._measures = mask, measures.astype(np.int64)
        self.areas = self._measures[:, cv2.CC_STAT_AREA]

    def means(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the mean of values, (H, W), over each part, (N,)."""
        sums = np.bincount(self._labels.ravel(), (values * self._mask).ravel(), len(self.areas))
        return np.asarray(sums / np.maximum(self.areas, 1))

    def boxes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the top left corners of the parts and their extents, (N, 2) each, y first."""
        corners = self._measures[:, [cv2.CC_STAT_TOP, cv2.CC_STAT_LEFT]]
        return corners, self._measures[:, [cv2.CC_STAT_HEIGHT, cv2.CC_STAT_WIDTH]]

    def pixels_of(self, kept: Mask) -> Mask:
        """Return the mask, (H, W), of the parts that `kept`, (N,), chooses."""
        return np.asarray(self._mask & kept[self._labels], np.bool_)


def larger_than(mask: Mask, area: SquareMicrometres, mpp: Mpp, connectivity: int = 8) -> Mask:
    """Return the connected parts of a mask that are larger than an area."""
    parts = Components(mask, connectivity)
    return parts.pixels_of(parts.areas > int(area / (mpp * mpp)))


def cleaned(mask: Mask, mpp: Mpp, connectivity: int = 8) -> Mask:
    """Return a mask without small objects and small holes."""
    objects = larger_than(mask, SMALLEST_OBJECT, mpp, connectivity)
    return ~larger_than(~objects, LARGEST_HOLE, mpp, connectivity)


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
        return cls(
            x=thumbnail.x_level * scale,
            y=thumbnail.y_level * scale,
            side=thumbnail.reduction * scale,
            size=Size(width, height),
            slide=slide,
        )

    def to_text(self) -> str:
        """Return the grid as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: Any) -> Grid | None:
        """Return the grid from `to_text`; None if the text is another, or none."""
        with suppress(ValueError, KeyError, TypeError):
            value = json.loads(text)
            x, y, side = (float(value[name]) for name in ("x", "y", "side"))
            sizes = ((value[name]["width"], value[name]["height"]) for name in ("size", "slide"))
            return cls(x, y, side, *(Size(int(width), int(height)) for width, height in sizes))
        return None

    def outlines(self, mask: Mask) -> list[shapely.Polygon]:
        """Return the outlines of a mask, (H, W) bool, in level-0 pixels: they follow the edges of its pixels."""
        edges = np.diff(np.pad(mask.view(np.int8), ((0, 0), (1, 1))), axis=1)
        rows, starts = np.nonzero(edges == 1)
        _, ends = np.nonzero(edges == -1)
        # Without points on straight edges.
        joined = shapely.simplify(shapely.union_all(shapely.box(starts, rows, ends, rows + 1)), 0)
        placed = shapely.transform(joined, lambda points: points * self.side + (self.x, self.y))
        return [part for part in shapely.get_parts(placed) if isinstance(part, shapely.Polygon)]

    def covered(self, areas: Iterable[BaseGeometry]) -> Mask:
        """Return which pixels have their centre in one of the areas, (H, W) bool. Areas are polygons of level 0."""
        mask = np.zeros((self.size.height, self.size.width), np.bool_)
        for polygon in shapely.get_parts(list(areas)):
            mask |= self._inside(polygon)
        return mask

    def _inside(self, polygon: shapely.Polygon) -> Mask:
        """Return the pixels with their centre in a polygon: those with an odd number of edges on their left."""
        crossings = np.zeros((self.size.height, self.size.width + 1), np.bool_)
        for ring in (polygon.exterior, *polygon.interiors):
            # In units of pixels, with the centres at whole numbers. Edges of pixels of another grid are slightly off.
            points = (shapely.get_coordinates(ring) - (self.x, self.y)) / self.side - 0.5
            points = np.round(points, 6)
            (x0, y0), (x1, y1) = points[:-1].T, points[1:].T
            first, last = (
                np.clip(np.ceil(ends), 0, self.size.height).astype(np.int64)
                for ends in (np.minimum(y0, y1), np.maximum(y0, y1))
            )
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
        pixels[np.ix_(ok_rows, ok_columns)] = mask[
            np.ix_(rows[ok_rows].astype(int), columns[ok_columns].astype(int))
        ]
        return pixels


BRIGHT, WHITE = 100, 254
"""Brightest channel of glass; darkest channel of areas that were not scanned."""
_SMOOTH = 0.007
"""Largest relative deviation of the brightness of glass over 3 × 3 pixels. The medians of slides are 0 to 0.003 on glass,
and 0.012 and more on pale tissue."""
_TINT = 0.08
"""Chroma of the most tinted glass, relative to white. Stained tissue has 0.03 to 0.4."""
_NEAR = 0.05
"""Relative difference of brightness between pixels of glass and its colour."""
_WHITISH = 225
"""Darkest channel of a colour that is nearly white."""
_LEAST_PIXELS, _LEAST_SHARE, _LEAST_WHITISH_SHARE = 5, 0.003, 0.0005
"""Least number and share of connected smooth pixels of glass. Pale tissue is smooth on up to 0.0015 of a large region, and
white fat cells and lumina of glands on fewer pixels than glass."""


def find_glass(coarse: NDArray[np.uint8]) -> NDArray[np.float64] | None:
    """Return the colour of the glass, (3,), on a picture of 32 µm per pixel, (H, W, 3); None if there is no glass."""
    grey = np.asarray(cv2.transform(coarse.astype(np.float32), np.full((1, 3), 1 / 3)))
    # Every other row and column is enough of a whole slide, 250 mm² and more.
    sampled = np.s_[::2, ::2] if grey.size > 250_000 else np.s_[:, :]
    mean = np.asarray(cv2.blur(grey, (3, 3)), np.float32)[sampled]
    square = np.asarray(cv2.sqrBoxFilter(grey, -1, (3, 3)), np.float32)[sampled]
    smooth = square < (1 + _SMOOTH**2) * mean**2
    glass = glass_colour(coarse)
    if _is_glass(glass, mean, smooth):
        return glass
    # There may be little glass: less than pale tissue, or white as areas that were not scanned.
    neutral = coarse[sampled][smooth & (np.ptp(np.log10(coarse[sampled] + 1.0), axis=2) < _TINT)]
    if not neutral.size:
        return None
    glass = glass_colour(neutral[None])
    return glass if _is_glass(glass, mean, smooth) else None


def _is_glass(glass: NDArray[np.float64], mean: NDArray[np.float32], smooth: Mask) -> bool:
    """Return whether a colour is that of glass, and there is a smooth area of about its brightness."""
    if np.ptp(np.log10(glass + 1)) > _TINT:
        return False
    near = smooth & (abs(mean - glass.mean()) < _NEAR * glass.mean())
    share = _LEAST_WHITISH_SHARE if glass.min() >= _WHITISH else _LEAST_SHARE
    least = max(share * near.size, min(_LEAST_PIXELS, near.size / 4))
    return bool(Components(near).areas.max() >= least)


def glass_colour(coarse: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the colour of the glass, (3,): the most frequent one of the brightest pixels that were scanned."""
    coarse = np.ascontiguousarray(coarse[::2, ::2])  # enough for the most frequent colour
    value = brightest(coarse)
    bright = value >= BRIGHT
    scanned = bright & (darkest(coarse) < WHITE)
    bright = scanned if scanned.mean() > 0.02 else bright
    counts = np.bincount(value[bright], minlength=256).astype(np.float64)
    if not counts.any():
        return np.full(3, 255.0)
    low = max(0, int(np.searchsorted(counts.cumsum(), 0.95 * counts.sum())) - 25)
    most = low + int(np.convolve(counts, np.ones(5), "same")[low:].argmax())
    near = bright & cv2.inRange(value, most - 4, most + 4).view(np.bool_)
    return np.asarray(np.median(coarse[near], axis=0))


def densities(rgb: NDArray[np.uint8], glass: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return optical densities relative to glass, (H, W, 3) float32."""
    table = -np.log10((np.arange(256)[None, :, None] + 1) / (glass + 1))
    return np.asarray(cv2.LUT(rgb, table.astype(np.float32)))


def mean_and_chroma(
    colours: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the mean of the three densities, and the largest minus the smallest, (H, W) each."""
    red, green, blue = cv2.split(colours)
    spread = cv2.max(cv2.max(red, green), blue) - cv2.min(cv2.min(red, green), blue)
    return np.asarray((red + green + blue) / 3), np.asarray(spread)


def brightest(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the brightest channel of each pixel. NumPy takes ten times as long for such short axes."""
    return np.asarray(reduce(cv2.max, cv2.split(pixels)), np.uint8)


def darkest(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the darkest channel of each pixel."""
    return np.asarray(reduce(cv2.min, cv2.split(pixels)), np.uint8)


LEAST_INK = 0.6
"""Least density of ink, as the sum of the three channels. Glass has 0.1, pale eosin 0.3."""


def coloured_ink(colours: NDArray[np.float32]) -> Mask:
    """Return blue, green and red ink, (H, W) bool, from optical densities, (H, W, 3).

    Haematoxylin absorbs red and green light, eosin green; mixtures and blood are between these. Blue ink absorbs far
    more red than green. Green ink absorbs green least. Red ink absorbs blue as much as green, and almost no red.
    """
    red, green, blue = cv2.split(colours)
    is_blue = (red > 1.3 * green) & (red > 1.5 * blue)
    is_green = (red > 1.3 * green) & (blue > 1.15 * green)
    is_red = (green > 4 * red) & (blue > 0.8 * green)
    return np.asarray((red + green + blue > LEAST_INK) & (is_blue | is_green | is_red))
