"""The class of each patch, by what is drawn over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.coverage import Coverage
from histopipe.annotations.regions import Regions

NO_CLASS = -1
_HAIR = 1e-6
"""A patch that lies wholly in a class may come out a hair less than whole."""


@dataclass(frozen=True, slots=True)
class PatchLabels:
    """Classes of a slide's patches.

    Attributes:
        classes: names, sorted.
        label: (N,) int32, a place in `classes`; -1 for none.
        covered: (N,) float32, the largest share of the patch that one class covers, 0 to 1, whether that is enough or not.
    """

    classes: tuple[str, ...]
    label: NDArray[np.int32]
    covered: NDArray[np.float32]

    def counts(self) -> dict[str, int]:
        """Patches by class, of those classes that have any."""
        found = np.bincount(self.label[self.label >= 0], minlength=len(self.classes)).tolist()
        return {name: count for name, count in zip(self.classes, found, strict=True) if count}

    def numbered(self, numbers: Mapping[str, int]) -> NDArray[np.int32]:
        """(N,) int32 other numbers in place of `label`; -1 for none, and for a class that has none."""
        table = np.array(
            [*(numbers.get(name, NO_CLASS) for name in self.classes), NO_CLASS], np.int32
        )
        return table[self.label]


def label_patches(
    regions: Regions,
    x_l0: NDArray[np.integer],
    y_l0: NDArray[np.integer],
    side_l0: float,
    *,
    threshold: float,
) -> PatchLabels:
    """The class that covers most of each patch, where that is at least `threshold` of it; of two that cover equally much,
    the first by name.

    Args:
        regions: of the slide.
        x_l0, y_l0: (N,) top left corners.
        side_l0: side of every patch.
        threshold: least share, above 0 to 1.
    """
    classes = regions.classes
    label = np.full(len(x_l0), NO_CLASS, np.int32)
    covered = np.zeros(len(x_l0), np.float32)
    if not classes:
        return PatchLabels(classes, label, covered)
    found = [
        (shares.argmax(axis=1), shares.max(axis=1))
        for shares in Coverage(regions.outlines, classes).shares(x_l0, y_l0, side_l0)
    ]
    label[:] = np.concatenate([it[0] for it in found])
    covered[:] = np.concatenate([it[1] for it in found])
    label[covered < threshold - _HAIR] = NO_CLASS
    return PatchLabels(classes, label, covered)


def roi_shares(
    regions: Regions, x_l0: NDArray[np.integer], y_l0: NDArray[np.integer], side_l0: float
) -> NDArray[np.float32]:
    """(N,) share of each patch, 0 to 1, that lies in the region of interest."""
    outlines = regions.roi or ()
    names = sorted({it.name for it in outlines if it.name is not None})
    if not names:
        return np.zeros(len(x_l0), np.float32)
    shares = [it[:, 0] for it in Coverage(outlines, names).shares(x_l0, y_l0, side_l0)]
    return np.concatenate(shares).astype(np.float32)
