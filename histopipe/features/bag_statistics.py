"""Mean and variance of the features of bags."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import OnError
from histopipe.errors import DamagedStore
from histopipe.features.bags import BagSet, read_bag
from histopipe.system.output import default_progress

_BAGS, _ROWS = 1000, 4096
"""Most bags, and most patches of a bag, that are read: more would take as long as an epoch and change little."""
_ROUNDING, _SMALLEST = 1e-6, 1e-15
"""Deviations of a constant feature: relative to its mean, by the rounding of float32; and with a square of 0."""
_ONE_UNIT = 16
"""Effective number of features from which they have one unit, as those of an encoder. Columns of a table have fewer."""


def feature_moments(
    bags: BagSet, numbers: Sequence[int], *, on_error: OnError = "raise"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (D,) mean and variance of the features of some bags, computed in float64. Each bag has the same weight.

    All patches are read of up to 1,000 bags of 4,096 patches. Larger numbers are read at equal distances. With `on_error`
    "skip", damaged bags are left out.

    Raises:
        DamagedStore: a bag is damaged, or all are.
    """
    chosen = [numbers[place] for place in _spaced(len(numbers), _BAGS)]
    moments: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    with closing(default_progress().bar("feature scaling", unit="bags", total=len(chosen))) as bar:
        for number in chosen:
            bag = bags.bags[number]
            try:
                rows = _spaced(bag.rows, _ROWS) if bag.rows > _ROWS else None
                values = read_bag(bag, bag.dtype, rows).astype(np.float64)
            except DamagedStore:
                if on_error == "raise" or (number == chosen[-1] and not moments):
                    raise
                continue
            moments.append((values.mean(axis=0), values.var(axis=0)))
            bar.advance()
    means, variances = zip(*moments, strict=True)
    # The variance of all patches is that within the bags and that between them.
    return np.mean(means, axis=0), np.mean(variances, axis=0) + np.var(means, axis=0)


def scaling_variance(
    mean: NDArray[np.float64], variance: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return which features vary, (D,), and the variances by which they are scaled, (D,); 1 for constant features.

    If few features have almost all of the variance, each has its own unit, and is standardised. Otherwise, the mean of the
    variances is added to each of them: the outputs of an encoder that hardly vary are mostly noise.
    """
    varied = variance > np.maximum(_ROUNDING * np.abs(mean), _SMALLEST) ** 2
    shares = variance / max(variance.sum(), np.finfo(np.float64).tiny)
    added = variance.mean() if (shares**2).sum() * _ONE_UNIT < 1 else 0.0
    return varied, np.where(varied, variance + added, 1.0)


def _spaced(count: int, most: int) -> NDArray[np.int64]:
    """Return sorted numbers below a count, at equal distances: all of them, or as many as allowed."""
    used = min(count, most)
    return np.arange(used) * count // used
