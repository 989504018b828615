"""Tissue masks: on thumbnails, on grids of level-0 pixels, and as values of PNG pictures.

Tools disagree on the values of PNG masks: tissue is 255, 1 or 0, one of several classes, a colour, or a probability.
Without the setting `tissue_values`, a mask must have at most two areas of constant values, of which one is 0: the other
is tissue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import cv2
import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image
from shapely.geometry.base import BaseGeometry

from histopipe.annotations.pixel_masks import paint
from histopipe.geometry import Mpp, RegionL0, Size, SquareMicrometres
from histopipe.slides.thumbnail import Thumbnail
from histopipe.tiling.spec import ranges_of_values

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

    @classmethod
    def estimated(cls, mask: Mask, bounds: RegionL0, slide: Size) -> Grid:
        """Return the grid of a stored mask, (H, W), from its size: older stores do not record it."""
        size = Size(mask.shape[1], mask.shape[0])
        width, height = bounds.size.width, bounds.size.height
        longer, count = max(width, height), max(*mask.shape, 1)
        # Usually a whole number: the last pixel is only in part inside the slide.
        sides = range(max(1, longer // count), math.ceil(longer / max(1, count - 1)) + 1)
        exact = (side for side in sides if Size(-(-width // side), -(-height // side)) == size)
        return cls(bounds.origin.x, bounds.origin.y, next(exact, longer / count), size, slide)

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
            paint(mask, polygon, True, (self.x, self.y), self.side)
        return mask

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


_SAMPLED = 4_000_000
"""Most pixels whose values are counted. A larger mask is counted in rows and columns at equal distances."""
_NOISE, _AWAY, _LARGE = 2, 8, 0.01
"""Grey values of 8 bits that differ by so much are one value with noise, as after compression by JPEG, if the area of one is
smaller than this share of the other; near edges, they differ by so many times as much."""
_FEW = 8
"""Masks of at most so many values have no noise."""
_LEAST_SHARE = 1e-4
"""Least share of the areas of one value in masks with noise."""
_MOST_OTHERS = 0.02
"""Largest share of pixels of other values, as at smooth edges. Probabilities and pictures have more."""


def find_tissue_values(image: Image.Image, asked: str | None) -> Mask:
    """Return which pixels of a PNG image are tissue, (H, W) bool. `asked` is the setting `tissue_values`.

    Raises:
        ValueError: the values have no single meaning, or none of them is asked for.
    """
    values, is_coloured = _values_of(image)
    text = "#{:06x}" if is_coloured else "{}"
    if asked is None:
        levels, rest = _areas(values, is_coloured=is_coloured)
        has_zero = len(levels) == 1 or (len(levels) == 2 and 0 in levels)
        if not has_zero or rest > _MOST_OTHERS:
            between = f", and {rest:.0%} of other values" * (rest > _MOST_OTHERS)
            raise ValueError(
                f"areas of the values {_listed(sorted(levels), text) or 'none'}{between}"
            )
        # Half of it: edges may be smooth, and there may be noise.
        tissue = max(levels) or int(values.max())
        if is_coloured:
            values, tissue = _brightest(values), int(_brightest(np.array(tissue)))
        return np.asarray(values > tissue / 2)
    mask = np.zeros(values.shape, np.bool_)
    for of_colour, low, high in ranges_of_values(asked):
        mask |= (values >= low) & (values <= high) & (of_colour == is_coloured)
    if not mask.any():
        actual = _listed(np.unique(values).tolist(), text)
        raise ValueError(f"no pixel of --tissue-values {asked}, but {actual}")
    return mask


def _listed(values: Sequence[int], text: str) -> str:
    return ", ".join(map(text.format, values[:6])) + ", …" * (len(values) > 6)


def _values_of(image: Image.Image) -> tuple[NDArray[Any], bool]:
    """Return grey values, or colours as 0xRRGGBB, (H, W), and whether they are colours.

    Raises:
        ValueError: pixels are transparent.
    """
    if image.has_transparency_data and not np.asarray(image.convert("RGBA").getchannel("A")).all():
        raise ValueError("transparent pixels")
    if image.mode not in ("P", "RGB", "RGBA"):
        return np.asarray(image.convert("L") if image.mode in ("1", "LA") else image), False
    red, green, blue = (np.asarray(channel, np.int32) for channel in image.convert("RGB").split())
    if (red == green).all() and (red == blue).all():
        return red, False
    return red << 16 | green << 8 | blue, True


def _areas(values: NDArray[Any], *, is_coloured: bool) -> tuple[list[int], float]:
    """Return the values of areas of at least 3 × 3 equal pixels, the most frequent first, and the share of other pixels.

    Grey values with noise are one. Pixels count as others if all of 5 × 5 pixels are away from these values; all do if the
    only area is 0, and there is more than one other value.
    """
    step = math.ceil(math.sqrt(values.size / _SAMPLED))
    some = np.ascontiguousarray(values[::step, ::step], np.float32)  # exact for 24 bits
    square, levels = np.ones((3, 3), np.uint8), dict[int, int]()
    flat = some[cv2.erode(some, square) == cv2.dilate(some, square)]
    different = len(np.unique(some))
    noise, least = 0.0, 1.0
    if different > _FEW:
        noise = 0.0 if is_coloured else _NOISE * max(1.0, float(some.max()) / 255)
        least = _LEAST_SHARE * some.size
    unique, counts = np.unique(flat, return_counts=True)
    for count, level in sorted(zip(counts.tolist(), unique.tolist(), strict=True), reverse=True):
        near = [area for one, area in levels.items() if abs(level - one) <= noise]
        if count >= least and all(count > _LARGE * area for area in near):
            levels[int(level)] = count
    if not any(levels) and different > 2:
        return [*levels], 1.0
    away = np.min([abs(some - level) for level in levels] or [some + 1], axis=0) > _AWAY * noise
    inner = cv2.erode(away.view(np.uint8), np.ones((5, 5), np.uint8), borderValue=0)
    lowest = min(levels, default=0)
    darkest = {lowest: 0} if lowest <= noise else {}
    return [darkest.get(level, level) for level in levels], float(inner.mean())


def _brightest(values: NDArray[Any]) -> NDArray[Any]:
    """Return the brightest channel of colours 0xRRGGBB."""
    return np.asarray(np.maximum(np.maximum(values >> 16, values >> 8 & 255), values & 255))
