"""The class of each pixel of a patch, by outlines or by a label image.

A pixel belongs to an outline if its centre is inside. Where outlines overlap, precedence is that of
`histopipe.annotations.regions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from histopipe.annotations.annotation_files import read_regions
from histopipe.annotations.regions import IGNORED, Outline, class_names, pieces
from histopipe.annotations.rules import BACKGROUND, NOT_ANNOTATED, PixelOptions
from histopipe.errors import UsageError
from histopipe.geometry import Mpp, PointL0, RegionL0, Size
from histopipe.slides.slide import Turn

_MOST_PIXELS = 400_000_000
_MODES = ("1", "L", "P", "I", "I;16")


class PixelClasses(Protocol):
    """The classes of the pixels of one slide: `classes` in the order of their numbers, and notes on the file."""

    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def mask(self, x: float, y: float, side: float, size: int) -> NDArray[np.uint8]:
        """Return the class numbers of the pixels of a square, (size, size); `NOT_ANNOTATED` where there is none.

        Left and top edge and side are in level-0 pixels.
        """


def read_pixel_classes(
    path: Path,
    rules: PixelOptions,
    *,
    size: Size,
    bounds: RegionL0,
    mpp: Mpp | None,
    orientation: int = 1,
) -> PixelClasses:
    """Read the classes of the pixels of a slide. Sizes, orientation and scale are those of level 0.

    Raises:
        UsageError: the file cannot be used, is of another slide, or a distance in µm needs a scale.
    """
    margin = rules.margin_um
    if 0 < margin < math.inf:
        if mpp is None:
            raise UsageError(
                f"--annotated-area {rules.annotated_area}",
                found=f"a slide without a scale, of {path}",
                expected="outlines or all",
            )
        margin /= mpp
    if rules.mask_values:
        turn = Turn(1 if rules.frame == "turned" else orientation, size)
        return LabelImage(path, rules.value_names, margin, turn=turn, bounds=bounds)
    regions = read_regions(path, rules, size=size, bounds=bounds, orientation=orientation)
    outside = next((note for note in regions.notes if " are outside the slide" in note), None)
    if outside is not None:
        raise UsageError(
            f"{path} seems to be of another slide",
            found=outside,
            todo="check the name of the file, --annotation-origin and --frame",
        )
    outlines = [*regions.outlines]
    drawn = [outline.area for outline in outlines if not outline.excluded]
    if margin == math.inf:
        outlines.append(Outline("", BACKGROUND, shapely.box(0, 0, size.width, size.height)))
    elif margin:
        outlines.append(Outline("", BACKGROUND, shapely.union_all(drawn).buffer(margin)))
    return OutlinePixels(outlines, regions.notes)


class OutlinePixels(PixelClasses):
    """Classes by outlines, the first of which takes precedence."""

    def __init__(self, outlines: Sequence[Outline], notes: tuple[str, ...] = ()) -> None:
        self.classes, self.notes = checked_classes(class_names(outlines)), notes
        self._numbers = [
            NOT_ANNOTATED if outline.name is None else self.classes.index(outline.name)
            for outline in outlines
        ]
        parts = [list(pieces(outline.area)) for outline in outlines]
        self._rank = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        self._pieces = np.array(list(chain.from_iterable(parts)), object)
        self._tree = shapely.STRtree(self._pieces)

    def mask(self, x: float, y: float, side: float, size: int) -> NDArray[np.uint8]:
        """Return the class numbers of the pixels of a square; see `PixelClasses`."""
        mask = np.full((size, size), NOT_ANNOTATED, np.uint8)
        # The last outlines are covered by those before them.
        for piece in sorted(self._tree.query(shapely.box(x, y, x + side, y + side)).tolist())[::-1]:
            number = self._numbers[self._rank[piece]]
            paint(mask, self._pieces[piece], number, (x, y), side / size)
        return mask


def checked_classes(classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return classes. Raise a UsageError if they are more than a mask has numbers for."""
    if len(classes) > NOT_ANNOTATED:
        raise UsageError(
            "classes of a slide", found=len(classes), expected=f"at most {NOT_ANNOTATED}"
        )
    return classes


def paint(
    mask: NDArray[Any],
    area: shapely.Geometry,
    value: int,
    corner: tuple[float, float],
    scale: float,
) -> None:
    """Set the pixels of a mask whose centres are inside valid polygons to a value.

    `corner` is that of the mask, and `scale` the side of its pixels, both in the unit of the polygons. A centre on an edge
    is inside if the area is right of it, or below.
    """
    points, ring = shapely.get_coordinates(
        shapely.get_rings(shapely.get_parts(area)), return_index=True
    )
    # Whole numbers are centres. Edges of pixels of another grid are slightly off.
    points = np.round((points - corner) / scale - 0.5, 6)
    # Only a window of the mask: most outlines are small.
    shape = np.array(mask.shape[::-1])
    begin, end = (
        np.clip(np.ceil(ends), 0, shape).astype(int)
        for ends in (points.min(axis=0), points.max(axis=0))
    )
    (left, top), (width, height) = begin, end - begin
    if min(width, height) < 1:
        return
    is_edge = ring[1:] == ring[:-1]
    start, stop = points[:-1][is_edge] - begin, points[1:][is_edge] - begin
    # The rows whose centres an edge crosses.
    ends = np.clip(np.ceil(np.sort([start[:, 1], stop[:, 1]], axis=0)), 0, height).astype(int)
    counts = ends[1] - ends[0]
    edge = np.repeat(np.arange(len(counts)), counts)
    row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + ends[0][edge]
    slope = (stop - start)[edge]
    crossing = start[edge, 0] + (row - start[edge, 1]) / slope[:, 1] * slope[:, 0]
    column = np.clip(np.ceil(crossing), 0, width).astype(int)
    crossings = np.bincount(row * (width + 1) + column, minlength=height * (width + 1))
    # Right of an odd number of edges is inside, also of polygons with holes.
    inside = np.cumsum(crossings.reshape(height, width + 1), axis=1)[:, :width] % 2 == 1
    mask[top : top + height, left : left + width][inside] = value


class LabelImage(PixelClasses):
    """Classes by a PNG file of the whole slide, or of its scanned part, at any scale: the value of the nearest pixel.

    `names` are the classes of its values. `margin` is the distance in level-0 pixels up to which other pixels are annotated.

    Raises:
        UsageError: the file is no image of one channel, or has another shape than the slide.
    """

    def __init__(
        self,
        path: Path,
        names: Mapping[int, str],
        margin: float,
        *,
        turn: Turn,
        bounds: RegionL0,
    ) -> None:
        try:
            # Not Image.open, which refuses images of more than 179 megapixels.
            with PngImagePlugin.PngImageFile(path) as image:
                _check_label_image(path, image)
                values = turn.pixels(np.asarray(image))
                values = values.astype(np.uint8) if values.dtype == np.bool_ else values
        except (OSError, SyntaxError, ValueError) as error:
            raise UsageError(
                f"{path} cannot be read", found=str(error), expected="a PNG file"
            ) from error
        height, width = values.shape
        whole = RegionL0(PointL0(0, 0), turn.size)
        for region in (whole, bounds):
            self._scale = region.size.width / width
            # The tool that reduced the slide may have rounded both sides.
            if abs(region.size.height / self._scale - height) <= 1.5 + height / width:
                self._origin = region.origin.x, region.origin.y
                break
        else:
            raise UsageError(
                f"{path} is of another slide",
                found=f"{width}×{height} pixels",
                expected=f"the shape of the slide, which has {turn.size}",
            )
        used = {name for name in names.values() if name != IGNORED}
        self.classes = checked_classes(tuple(sorted(used | ({BACKGROUND} if margin else set()))))
        # Values that are not named are outside of all classes.
        codes = np.full(int(values.max(initial=0)) + 1, -1, np.int16)
        for value, name in names.items():
            if value < len(codes):
                codes[value] = NOT_ANNOTATED if name == IGNORED else self.classes.index(name)
        placed = codes[values]
        outside = placed == -1
        if 0 < margin < math.inf:
            from scipy.ndimage import distance_transform_edt

            drawn = ~outside & (placed != NOT_ANNOTATED)
            near = drawn.any() and distance_transform_edt(~drawn) - 0.5 <= margin / self._scale
            placed[outside & np.logical_not(near)] = NOT_ANNOTATED
        placed[placed == -1] = self.classes.index(BACKGROUND) if margin else NOT_ANNOTATED
        # One more row and column, for what is outside of the image.
        self._codes = np.pad(
            placed.astype(np.uint8), ((0, 1), (0, 1)), constant_values=NOT_ANNOTATED
        )

    def mask(self, x: float, y: float, side: float, size: int) -> NDArray[np.uint8]:
        """Return the class numbers of the pixels of a square; see `PixelClasses`."""
        places = [
            np.floor((start - origin + (np.arange(size) + 0.5) * side / size) / self._scale)
            for start, origin in zip((x, y), self._origin, strict=True)
        ]
        columns, rows = (
            np.where((place >= 0) & (place < length), place, length).astype(int)
            for place, length in zip(places, np.array(self._codes.shape[::-1]) - 1, strict=True)
        )
        return self._codes[np.ix_(rows, columns)]


def _check_label_image(path: Path, image: Image.Image) -> None:
    if image.mode not in _MODES or image.width * image.height > _MOST_PIXELS:
        raise UsageError(
            f"{path} is no label image",
            found=f"{image.width}×{image.height} pixels, mode {image.mode}",
            expected=f"a number per pixel (gray levels or a palette), at most {_MOST_PIXELS:,} pixels",
        )
