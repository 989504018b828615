"""Measure the stain of a slide on a sample of its patches, in numpy, for the normalization in `transforms`.

Both fits use tissue only: pixels whose optical density is above 0.15 in every channel.
"""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, SlideError, UsageError
from histopipe.store.record import StainFit
from histopipe.store.store import Store
from histopipe.system.hashing import combine, permuted

PATCHES = 64
PIXELS_A_PATCH = 4096
"""Maximum size of the sample of a slide."""

_MIN_PIXELS = 1000
_TISSUE_DENSITY = 0.15
_PERCENTILE = 1.0
_SEED = 301

RGB_TO_LMS = np.array(
    [[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]]
)
LMS_TO_LAB = np.diag([1 / np.sqrt(3), 1 / np.sqrt(6), 1 / np.sqrt(2)]) @ np.array(
    [[1.0, 1, 1], [1, 1, -2], [1, -1, 0]]
)
"""Both matrices are from E. Reinhard et al., "Color transfer between images" (2001), with logarithms to base 10."""


class TooLittleTissue(SlideError):
    """The sample of a slide has too little stained tissue to measure the stain."""


def fit_slide(store: Store, slide: int) -> StainFit:
    """Measure the stain of a slide on a fixed random sample of its patches. Damaged patches are skipped.

    Raises:
        TooLittleTissue: fewer than 1,000 pixels of the sample are tissue.
        DamagedStore: the slide's index is damaged.
    """
    record = store.records[slide]
    rows = permuted(
        np.arange(min(PATCHES, record.planned)), max(1, record.planned), combine(_SEED, slide)
    )
    samples = [np.empty((0, 3), np.uint8)]
    for row in np.sort(rows).tolist():
        with contextlib.suppress(DamagedStore, UsageError):  # damaged, or unreadable at ingest
            pixels = store.read(record.id, row).reshape(-1, 3)
            samples.append(pixels[:: max(1, len(pixels) // PIXELS_A_PATCH)])
    return fit_pixels(np.concatenate(samples), where=f"{store.path}, slide {record.id}")


def fit_pixels(pixels: NDArray[np.uint8], *, where: str) -> StainFit:
    """Measure the stain of pixels, (N, 3) uint8 RGB. Background is ignored.

    Raises:
        TooLittleTissue: fewer than 1,000 of them are tissue.

    Source:
        Reinhard et al., "Color transfer between images" (2001); M. Macenko et al., "A method for normalizing histology
        slides for quantitative analysis" (2009), with its α of 1 % and β of 0.15.
    """
    density = -np.log((pixels.astype(np.float64) + 1) / 256)
    tissue = (density > _TISSUE_DENSITY).all(axis=1)
    if tissue.sum() < _MIN_PIXELS:
        raise TooLittleTissue(
            f"{where}: pixels of stained tissue",
            found=int(tissue.sum()),
            expected=f"at least {_MIN_PIXELS:,}",
        )
    lab = np.log10((pixels[tissue].astype(np.float64) + 1) @ RGB_TO_LMS.T) @ LMS_TO_LAB.T
    stains, maximum = _macenko(density[tissue])
    return StainFit(
        int(tissue.sum()),
        lab.mean(axis=0).astype(np.float32),
        lab.std(axis=0).astype(np.float32),
        stains.astype(np.float32),
        maximum.astype(np.float32),
    )


def _macenko(density: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return stain vectors (2, 3), and the 99th percentile of the amount of each stain (2,)."""
    _, vectors = np.linalg.eigh(np.cov(density.T))
    plane = vectors[:, 1:]  # of the two largest eigenvalues
    plane = plane * np.where(plane.sum(axis=0) < 0, -1, 1)  # so that angles do not wrap
    angles = np.arctan2(density @ plane[:, 0], density @ plane[:, 1])
    low, high = np.percentile(angles, [_PERCENTILE, 100 - _PERCENTILE])
    stains = np.array([[np.sin(angle), np.cos(angle)] for angle in (low, high)]) @ plane.T
    stains = stains[np.argsort(-stains[:, 0])]  # haematoxylin absorbs more red
    return stains, np.percentile(density @ np.linalg.pinv(stains), 100 - _PERCENTILE, axis=0)
