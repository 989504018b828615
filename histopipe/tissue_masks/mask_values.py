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
_NOISE, _AWAY = 2, 8
"""Grey values that differ by so much are one value with noise, as after compression by JPEG; near edges, by so many times."""
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
        noise = 0 if is_coloured else _NOISE
        levels, rest = _areas(values, noise)
        has_zero = len(levels) == 1 or (len(levels) == 2 and 20 * min(levels) <= max(levels))
        if not has_zero or rest > _MOST_OTHERS:
            between = f", and {rest:.0%} of other values" * (rest > _MOST_OTHERS)
            raise ValueError(
                f"areas of the values {_listed(sorted(levels), text) or 'none'}{between}"
            )
        # Half of it: edges may be smooth, and there may be noise.
        return np.asarray(values > (max(levels) or values.max()) / 2)
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
    channels = image.convert("RGB").split()
    red, green, blue = (np.asarray(channel, np.int32) for channel in channels)
    if (red == green).all() and (red == blue).all():
        return red, False
    return red << 16 | green << 8 | blue, True


def _areas(values: NDArray[Any], noise: int) -> tuple[list[int], float]:
    """Return the values of areas of at least 3 × 3 equal pixels, the most frequent first, and the share of other pixels.

    Values that differ by up to `noise` are one. Pixels count as others if all of 5 × 5 pixels are away from these values.
    """
    step = math.ceil(math.sqrt(values.size / _SAMPLED))
    some = np.ascontiguousarray(values[::step, ::step], np.float32)  # exact for 24 bits
    square, levels = np.ones((3, 3), np.uint8), list[int]()
    flat = some[cv2.erode(some, square) == cv2.dilate(some, square)]
    has_noise = len(np.unique(some)) > _FEW
    noise, least = (noise, _LEAST_SHARE * some.size) if has_noise else (0, 1)
    unique, counts = np.unique(flat, return_counts=True)
    for count, level in sorted(zip(counts.tolist(), unique.tolist(), strict=True), reverse=True):
        if count >= least and all(abs(level - one) > noise for one in levels):
            levels.append(int(level))
    away = np.min([abs(some - level) for level in levels] or [some + 1], axis=0) > _AWAY * noise
    inner = cv2.erode(away.view(np.uint8), np.ones((5, 5), np.uint8), borderValue=0)
    return levels, float(inner.mean())
