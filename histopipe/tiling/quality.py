"""What makes a patch unfit: out of focus, pen, folds and black. Pure functions of pixels; `focus-1`, `pen-1`, `dark-1`.

Colours are judged by their optical densities, -log10((value + 1) / 256), on pixels of about 8 µm: pen lines are far wider,
and neither JPEG's noise nor single nuclei show there. Focus is judged at 1 µm a pixel, where nuclei have edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import Mpp

COLOUR_MPP = Mpp(8.0)
FOCUS_MPP = Mpp(1.0)
ALGORITHMS: Mapping[str, str] = {"focus": "focus-1", "pen": "pen-1", "dark": "dark-1"}

_LEAST_DENSITY = 0.6
"""Of the three channels together. Ink is denser; glass has 0.1, pale eosin 0.3."""
_BRIGHT = 256 * 10 ** (-_LEAST_DENSITY / 3)
"""Three channels that are all brighter than this are not so dense together."""
_FOLD_DENSITY = 2.4
"""Of the three channels together, at 8 µm. Well-stained tissue of one layer has 0.6 to 1.8; two layers have the sum of both."""
_DENSITY: NDArray[np.float32] = -np.log10((np.arange(256) + 1) / 256).astype(np.float32)


def pen_mask(rgb: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Where felt-tip ink is: blue, green or red. Black ink is dark: see `dark_mask`.

    Haematoxylin takes red and green light and leaves blue; eosin takes green; their mixtures and blood lie between. Blue ink
    takes red light far more than green, green ink takes green least of all, red ink takes blue as much as green and hardly any red. A lake of bright blood may pass for red ink.

    Args:
        rgb: (H, W, 3) uint8, about 8 µm a pixel.

    Returns:
        (H, W) bool.
    """
    found = np.zeros(rgb.shape[:2], np.bool_)
    # Where all is bright there is no ink, and on most of a thumbnail all is.
    darker = np.minimum(np.minimum(rgb[..., 0], rgb[..., 1]), rgb[..., 2]) < _BRIGHT
    pixels = rgb[darker]
    red, green, blue = (_DENSITY[pixels[:, channel]] for channel in range(3))
    strong = red + green + blue > _LEAST_DENSITY
    is_blue = (red > 1.3 * green) & (red > 1.5 * blue)
    is_green = (red > 1.3 * green) & (blue > 1.15 * green)
    is_red = (green > 4 * red) & (blue > 0.8 * green)
    found[darker] = strong & (is_blue | is_green | is_red)
    return found


def dark_mask(rgb: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Where tissue lies folded on itself, or where black is: ink, edges of coverslips, unscanned areas.

    Args:
        rgb: (H, W, 3) uint8, about 8 µm a pixel.

    Returns:
        (H, W) bool.
    """
    return np.asarray(_DENSITY[rgb].sum(axis=2) > _FOLD_DENSITY)


def focus_of(grey: NDArray[Any]) -> float:
    """How sharp a picture is: the variance of its Laplacian, in squared grey levels of 255.

    Args:
        grey: (H, W) luma, 0 to 255, about 1 µm a pixel, at least 3 by 3.

    Source:
        J. L. Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
    """
    pixels = grey.astype(np.float32)
    inner = pixels[1:-1, 1:-1]
    laplacian = (
        pixels[:-2, 1:-1] + pixels[2:, 1:-1] + pixels[1:-1, :-2] + pixels[1:-1, 2:] - 4 * inner
    )
    return float(laplacian.var())


def reduction_to(wanted: Mpp, mpp: float | None, side: int) -> int:
    """By how much a picture is to be reduced: a whole number; 1 where its scale is unknown.

    Args:
        wanted: the scale to come as near to as a whole number can.
        mpp: the picture's.
        side: in pixels; four are always left.
    """
    return 1 if mpp is None else max(1, min(round(wanted / mpp), side // 4))
