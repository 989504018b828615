"""Algorithms that find tissue on a thumbnail, by pure functions.

`otsu-1`, of older stores, is Otsu's threshold of the saturation (of HSV). Black pixels (pen, coverslip edges, unscanned
areas) are excluded, since JPEG may give them a high saturation.

`otsu-2` and `otsu-3`: tissue is what absorbs more light than the glass of the same slide. `otsu-3` first decides
whether there is glass. If there is none, the slide is full of tissue.

Bright-field slides:

1. The colour of the glass is measured, and each pixel becomes an optical density relative to it. A tinted or dark slide
   is then as easy as a white one.
2. Strong tissue is denser than a threshold on pixels of 32 µm: half of Otsu's, within limits that follow from the noise
   of the glass.
3. Weak areas next to it (fat, pale stroma) are added if they are slightly dense and have a colour, on average over 50 µm.
4. Artefacts are removed: thin grey objects (edges of coverslips, bubbles, dust), uniform grey areas at the border of the
   scan, black areas, and ink.
5. The outline is drawn at full resolution, where the density is 40 % of that of the tissue nearby.

Fluorescence, bright on black: Otsu's threshold of the logarithm of the brightness.

The first steps are a coarse detection and the last is a refinement; two passes were also found better than one by the
source, which uses two thresholds of the grey value.

Source:
    Double-Pass: Cancers 2025, 17, 2918.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import Mpp, SquareMicrometres
from histopipe.slides.thumbnail import Thumbnail
from histopipe.tiling.mask import (
    LARGEST_HOLE,
    Components,
    Mask,
    TissueMask,
    cleaned,
    larger_than,
    otsu_threshold,
    with_lost_areas,
)
from histopipe.tiling.spec import NEWEST

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


SATURATION_BOUNDS = (15, 27)
"""Limits of the threshold (0 to 255). Below, the tinted glass of a blank slide would count as tissue (glass has 0 to
5). Above, a slide with dark stain would lose pale eosin, which starts near 28. Between the limits, the tissue found on
the H&E test slides changes by 5 % and 1 %."""
_BLACK_BELOW = 45
"""A pixel whose brightest channel is below this (0 to 255) is black."""
_COARSE_MPP = 32.0
"""Scale of the detection, in µm per pixel: with 16 µm, the masks are the same and take four times as long."""
_THIN = 120.0
"""Grey objects thinner than this, in µm, are not tissue."""
_LARGEST_DUST = SquareMicrometres(200_000.0)
"""Grey objects smaller than this are not tissue."""
_LONG = 1000.0
"""Grey lines longer than this, in µm, are not tissue, even if they touch it."""
_GAP = 40.0
"""Gaps up to twice this width, in µm, are closed: the fat in fat cells."""
_WEAK_RADIUS = 32.0
"""Standard deviation, in µm, of the average for weak tissue."""
_NEIGHBOURHOOD = 64.0
"""Radius, in µm, of the tissue that determines where an outline is drawn."""
_LIMITS = (0.02, 0.06)
"""Limits of the threshold of density. Pale eosin has 0.05 to 0.15, a shadow of the illumination 0.01."""
_SHADOW = 0.04
"""Grey areas up to this density are uneven light."""
_STRONG, _WEAK, _FINE = 3.5, 2.5, 2.5
"""Densities above these multiples of the noise are not noise."""
_LEAST_WEAK, _LEAST_COLOUR, _LEAST_FINE = 0.012, 0.008, 0.015
"""Least density and least chroma of weak tissue, and least density inside the outline."""
_OUTLINE = 0.4
"""An outline is drawn at this share of the density of the tissue nearby."""
_DARK_BELOW, _DARK_SHARE = 60, 0.5


def find_by_saturation(rgb: NDArray[np.uint8], mpp: Mpp) -> TissueMask:
    """Find the tissue on a thumbnail, (H, W, 3) uint8 RGB, by `otsu-1`. The threshold is a saturation, 0 to 255."""
    # The median removes single pixels of JPEG noise.
    saturation, value = saturation_and_value(np.asarray(cv2.medianBlur(rgb, 3), np.uint8))
    black = value < _BLACK_BELOW
    counts = np.bincount(saturation[~black], minlength=256)
    threshold = int(np.clip(otsu_threshold(counts), *SATURATION_BOUNDS))
    tissue = cleaned((saturation > threshold) & ~black, mpp, connectivity=4)
    notes = ("dark background: try --tissue otsu-3 or none",) if black.mean() > _DARK_SHARE else ()
    # Filling holes may have added pen marks and coverslip edges.
    return TissueMask(tissue & ~black, threshold, notes)


def saturation_and_value(rgb: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return S and V of HSV, (H, W) uint8 each, rounded down. OpenCV rounds to the nearest number."""
    value = brightest(rgb)
    levels = np.arange(256, dtype=np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        table = np.nan_to_num(levels[None, :] / levels[:, None] * np.float32(255), posinf=0)
    return table.clip(0, 255).astype(np.uint8)[value, value - darkest(rgb)], value


def find_by_density(rgb: NDArray[np.uint8], mpp: Mpp, *, requires_glass: bool = True) -> TissueMask:
    """Find the tissue on a thumbnail, (H, W, 3) uint8 RGB, by `otsu-2` or `otsu-3`.

    The threshold is an optical density; for fluorescence, a brightness, 0 to 255. `requires_glass` takes the most
    frequent bright colour for that of glass (`otsu-2`); otherwise, everything is tissue if there is no glass.
    """
    if not rgb.size:
        return TissueMask(np.zeros(rgb.shape[:2], np.bool_))
    factor = max(1, round(_COARSE_MPP / mpp))
    height, width = rgb.shape[:2]
    whole = cv2.copyMakeBorder(rgb, 0, -height % factor, 0, -width % factor, cv2.BORDER_REPLICATE)
    smooth = np.asarray(cv2.medianBlur(whole, 3), np.uint8)
    size = (smooth.shape[1] // factor, smooth.shape[0] // factor)
    coarse = np.asarray(cv2.resize(smooth, size, interpolation=cv2.INTER_AREA), np.uint8)
    if _is_fluorescence(coarse):
        tissue = _fluorescence(smooth, mpp)
    elif (glass := glass_colour(coarse) if requires_glass else find_glass(coarse)) is None:
        black = larger_than(brightest(smooth) < _BLACK_BELOW, LARGEST_HOLE, mpp)
        tissue = TissueMask(~black, notes=("no glass found: all of it counts as tissue",))
    else:
        tissue = _bright_field(smooth, coarse, glass, mpp, Mpp(mpp * factor))
    return replace(tissue, pixels=tissue.pixels[:height, :width].copy())


def _bright_field(
    smooth: NDArray[np.uint8],
    coarse: NDArray[np.uint8],
    glass: NDArray[np.float64],
    mpp: Mpp,
    coarse_mpp: Mpp,
) -> TissueMask:
    colours = densities(coarse, glass)
    density, chroma = mean_and_chroma(colours)
    noise = _noise(density[darkest(coarse) < WHITE])
    counts = np.bincount(np.clip(density * 400, 0, 255).astype(np.uint8).ravel(), minlength=256)
    low, high = (max(limit, _STRONG * noise) for limit in _LIMITS)
    threshold = float(np.clip(otsu_threshold(counts) / 800, low, high))
    dense = (density > threshold) & ((density > _SHADOW) | (chroma > _LEAST_COLOUR))
    nothing = TissueMask(np.zeros(smooth.shape[:2], np.bool_), threshold)
    if not dense.any():
        return nothing
    artefacts = _artefacts(colours, density, chroma, threshold, coarse_mpp)
    artefacts |= (brightest(coarse) < _BLACK_BELOW) & (chroma < 0.3 * density)
    strong = larger_than(dense & ~artefacts, SquareMicrometres(5_000.0), coarse_mpp)
    if not strong.any():
        return nothing
    colours[artefacts] = 0  # their blur is not weak tissue
    weak_density, weak_chroma = mean_and_chroma(
        np.asarray(cv2.GaussianBlur(colours.clip(-0.05, 0.6), (0, 0), _WEAK_RADIUS / coarse_mpp))
    )
    weak = (weak_density > max(_LEAST_WEAK, _WEAK * noise)) & (weak_chroma > _LEAST_COLOUR)

    parts = Components(strong | (weak & ~artefacts))
    region = _dilated(parts.pixels_of(parts.means(strong) > 0), 1) & ~artefacts
    # The outline, at full resolution: as brightness, since a table of densities for all pixels takes longer.
    least = np.maximum(
        max(_LEAST_FINE, _FINE * noise), _OUTLINE * _local_mean(density, strong, coarse_mpp)
    )
    brightness = ((glass.mean() + 1) * 10**-least - 1).clip(0, 255).astype(np.uint8)
    tissue = np.zeros(smooth.shape[:2], np.bool_)
    factor = len(smooth) // len(coarse)
    left, top, width, height = cv2.boundingRect(region.view(np.uint8))
    part = np.s_[top : top + height, left : left + width]
    whole = tuple(slice(span.start * factor, span.stop * factor) for span in part)
    size = (width * factor, height * factor)
    grey = np.asarray(cv2.transform(smooth[whole], np.full((1, 3), 1 / 3)), np.uint8)
    darker = grey < cv2.resize(brightness[part], size)
    inside, outside = (
        cv2.resize(mask[part].view(np.uint8), size, interpolation=cv2.INTER_NEAREST).view(np.bool_)
        for mask in (region, artefacts)
    )
    # Narrow gaps are closed. There is nothing beyond the border.
    radius = max(1, round(_GAP / mpp))
    closed = _morphed(np.pad((darker & inside).view(np.uint8), radius), cv2.MORPH_CLOSE, radius)
    tissue[whole] = cleaned(closed & inside, mpp) & ~outside
    return TissueMask(tissue, threshold)


def _artefacts(
    colours: NDArray[np.float32],
    density: NDArray[np.float32],
    chroma: NDArray[np.float32],
    threshold: float,
    mpp: Mpp,
) -> Mask:
    """Return ink, thin grey objects, and grey areas that are black or uniform and touch the border."""
    dense = density > threshold / 2
    grey = (chroma < 0.12 * density + 0.004) & dense
    radius = max(1, round(_THIN / 2 / mpp))
    narrow = dense & ~_opened(dense, radius)

    small = Components(dense)
    is_dust = (small.areas < _LARGEST_DUST / mpp**2) & (small.means(grey) > 0.8)
    thin = Components(narrow)
    # The edge of a coverslip may touch tissue, and its shadow is wider than the edge.
    core = density > threshold
    lines = Components(core & grey & ~_opened(core, radius))
    longer = lines.boxes()[1].max(axis=1) * mpp
    is_line = (longer > _LONG) & (lines.areas * mpp * mpp / longer < _THIN + 6 * mpp)
    drawn_lines = _dilated(lines.pixels_of(is_line), 2) & (grey | ~core)
    uniform = Components(grey & ~narrow)
    return (
        small.pixels_of(is_dust)
        | thin.pixels_of(thin.means(grey) > 0.5)
        | drawn_lines
        | uniform.pixels_of(_is_frame(uniform, density))
        | _dilated(_ink(colours), 1)
    )


def _is_frame(parts: Components, density: NDArray[np.float32]) -> Mask:
    """Return which parts are black, or dark or uniform and at the border of the scan, (N,)."""
    mean, square = parts.means(density), parts.means(density**2)
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    start, extent = parts.boxes()
    size = np.array(density.shape)
    touches = ((start == 0) | (start + extent == size)).any(axis=1)
    frame = (extent >= 0.9 * size).any(axis=1) & (deviation < 0.25 * mean)
    return np.asarray((touches & (frame | (mean > 0.2))) | (mean > 0.8))


def _ink(colours: NDArray[np.float32]) -> Mask:
    """Return blue, green, red and yellow ink. Purple ink has the colour of tissue, and is not found."""
    red, green, blue = cv2.split(colours)
    is_yellow = (blue > 1.6 * green) & (green > 3 * red) & (red + green + blue > LEAST_INK)
    return np.asarray(coloured_ink(colours) | is_yellow)


def _noise(density: NDArray[np.float32]) -> float:
    """Return the standard deviation of the density of glass, from the pixels that are brighter than glass."""
    brighter = density[density < 0]
    return 1.4826 * float(np.median(-brighter)) if len(brighter) > 100 else 0.005


def _local_mean(density: NDArray[np.float32], tissue: Mask, mpp: Mpp) -> NDArray[np.float32]:
    """Return the mean density of the tissue near each pixel; 0 where there is none."""
    side = 2 * max(1, round(_NEIGHBOURHOOD / mpp)) + 1
    weight = tissue.astype(np.float32)
    share = np.maximum(cv2.blur(weight, (side, side)), 1e-3)
    return np.asarray(cv2.blur(density * weight, (side, side)) / share)


def _is_fluorescence(coarse: NDArray[np.uint8]) -> bool:
    """Return whether most of a slide is black and there is no glass: many bright pixels of one brightness."""
    value = brightest(coarse)
    if (value < _DARK_BELOW).mean() < _DARK_SHARE:
        return False
    counts = np.bincount(value[value >= _DARK_BELOW], minlength=256)
    most = int(counts.argmax())
    near = counts[max(0, most - 6) : most + 7].sum()
    return most < BRIGHT or bool(near <= max(0.3 * counts.sum(), 0.01 * value.size))


def _fluorescence(smooth: NDArray[np.uint8], mpp: Mpp) -> TissueMask:
    value = cv2.GaussianBlur(brightest(smooth), (0, 0), 12 / mpp)
    steps = (np.log2(np.arange(256) + 4.0) * 25).astype(np.uint8)  # 25 steps per doubling
    levels = np.asarray(cv2.LUT(value, steps))
    counts = np.bincount(levels.ravel(), minlength=256)
    # At least 1.4 times as bright as the background: on a blank slide, Otsu's threshold separates noise.
    threshold = max(otsu_threshold(counts), int(counts.argmax()) + 12)
    brightness = round(2 ** (threshold / 25) - 4, 1)
    return TissueMask(cleaned(levels > threshold, mpp), brightness, ("fluorescence",))


def _dilated(mask: Mask, radius: int) -> Mask:
    return _morphed(np.pad(mask.view(np.uint8), radius), cv2.MORPH_DILATE, radius)


def _opened(mask: Mask, radius: int) -> Mask:
    """Return a mask without parts that a disk does not fit into. Beyond the border, it continues as at the border."""
    return _morphed(np.pad(mask.view(np.uint8), radius, mode="edge"), cv2.MORPH_OPEN, radius)


def _morphed(padded: NDArray[np.uint8], operation: int, radius: int) -> Mask:
    disk = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * radius + 1, 2 * radius + 1))
    return cv2.morphologyEx(padded, operation, disk)[radius:-radius, radius:-radius].view(np.bool_)


FINDERS: Mapping[str, Callable[[NDArray[np.uint8], Mpp], TissueMask]] = {
    "otsu-1": find_by_saturation,
    "otsu-2": find_by_density,
    "otsu-3": partial(find_by_density, requires_glass=False),
}
"""Algorithms by name."""


def find_on_thumbnail(thumbnail: Thumbnail, algorithm: str = NEWEST) -> TissueMask:
    """Find the tissue on a thumbnail; see also `with_lost_areas`."""
    return with_lost_areas(FINDERS[algorithm](thumbnail.pixels, thumbnail.mpp), thumbnail)
