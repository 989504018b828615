"""Glass: whether a slide has any, its colour, and densities relative to it.

Glass is smooth, and its colour is bright and nearly neutral. Tissue has texture, which remains on pixels of 32 µm, and a
stain has a stronger colour. The limits follow from measurements on synthetic and real slides: docs/design/tissue.md.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.tissue_masks.mask import Components, Mask

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
    if scanned.mean() > 0.02:
        bright = scanned
    counts = np.bincount(value[bright], minlength=256).astype(np.float64)
    if not counts.any():
        return np.full(3, 255.0)
    lightest = int(np.searchsorted(counts.cumsum(), 0.95 * counts.sum()))
    low = max(0, lightest - 25)
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
    red, green, blue = cv2.split(pixels)
    return np.asarray(cv2.max(cv2.max(red, green), blue), np.uint8)


def darkest(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the darkest channel of each pixel."""
    red, green, blue = cv2.split(pixels)
    return np.asarray(cv2.min(cv2.min(red, green), blue), np.uint8)
