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

from histopipe.tissue_masks import ranges_of_values
from histopipe.tissue_masks.mask import Mask

_SAMPLED = 4_000_000
"""Most pixels whose values are counted. A larger mask is counted in rows and columns at equal distances."""
_NOISE = 0.04
"""Values that differ by less than this share of the highest are one value with noise, as after compression by JPEG."""
_FEW = 8
"""Masks of at most so many values have no noise."""
_LEAST_SHARE = 1e-4
"""Least share of the areas of one value in masks with noise."""


def find_tissue_values(image: Image.Image, asked: str | None) -> Mask:
    """Return which pixels of a PNG image are tissue, (H, W) bool. `asked` is the setting `tissue_values`.

    Raises:
        ValueError: the values have no single meaning, or none of them is asked for.
    """
    values, text = _values_of(image)
    if asked is None:
        levels = _levels(values)
        has_zero = len(levels) == 1 or (len(levels) == 2 and min(levels) <= _NOISE * max(levels))
        if not has_zero:
            raise ValueError(f"areas of the values {_listed(sorted(levels), text) or 'none'}")
        # Half of it: edges may be smooth, and there may be noise.
        return np.asarray(values > (max(levels) or values.max()) / 2)
    ranges = [(values >= low) & (values <= high) for low, high in ranges_of_values(asked)]
    mask = np.asarray(np.logical_or.reduce(ranges))
    if not mask.any():
        actual = _listed(np.unique(values).tolist(), text)
        raise ValueError(f"no pixel of --tissue-values {asked}, but {actual}")
    return mask


def _listed(values: Sequence[int], text: str) -> str:
    return ", ".join(map(text.format, values[:6])) + ", …" * (len(values) > 6)


def _values_of(image: Image.Image) -> tuple[NDArray[Any], str]:
    """Return grey values, or colours as 0xRRGGBB, (H, W), and the format of one as text.

    Raises:
        ValueError: pixels are transparent.
    """
    if image.has_transparency_data and not np.asarray(image.convert("RGBA").getchannel("A")).all():
        raise ValueError("transparent pixels")
    if image.mode not in ("P", "RGB", "RGBA"):
        return np.asarray(image.convert("L") if image.mode in ("1", "LA") else image), "{}"
    channels = image.convert("RGB").split()
    red, green, blue = (np.asarray(channel, np.int32) for channel in channels)
    if (red == green).all() and (red == blue).all():
        return red, "{}"
    return red << 16 | green << 8 | blue, "#{:06x}"


def _levels(values: NDArray[Any]) -> list[int]:
    """Return the values of areas of at least 3 × 3 equal pixels, the most frequent first."""
    step = math.ceil(math.sqrt(values.size / _SAMPLED))
    some = np.ascontiguousarray(values[::step, ::step], np.float32)  # exact for 24 bits
    square, levels = np.ones((3, 3), np.uint8), list[int]()
    flat = some[cv2.erode(some, square) == cv2.dilate(some, square)]
    has_noise = len(np.unique(some)) > _FEW
    noise, least = (_NOISE * some.max(), _LEAST_SHARE * some.size) if has_noise else (0, 1)
    unique, counts = np.unique(flat, return_counts=True)
    for count, level in sorted(zip(counts.tolist(), unique.tolist(), strict=True), reverse=True):
        if count >= least and all(abs(level - one) > noise for one in levels):
            levels.append(int(level))
    return levels
