"""Values of PNG masks: which of them are tissue.

Tools disagree: tissue is 255, 1 or 0, one of several classes, a colour, or a probability. Without the setting
`tissue_values`, a mask must have at most two areas of constant values, of which one is 0: the other is tissue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.tiling.mask import Mask
from histopipe.tiling.spec import ranges_of_values

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
