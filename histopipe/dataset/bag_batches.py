"""Batches of bags in numpy, as a pure function of the step, and the moments of their features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.bags import BagSet, joined_rows, read_bag, read_positions
from histopipe.dataset.sampling import BatchSampler, Field, Order
from histopipe.dataset.selection import SampleTable, SlideValues
from histopipe.errors import DamagedStore, OnError
from histopipe.system.hashing import combine, permuted
from histopipe.system.output import default_progress
from histopipe.system.worker_pool import available_memory

_CACHED_SHARE = 8
"""The bags of all subsets take at most an eighth of the available memory: other folds may run at the same time."""
_DRAW = 301
"""Purpose of a random number, different from those in `dataset.sampling`."""


class BagBatches(BatchSampler):
    """Batches of bags, in a given order.

    With `on_error="skip"`, a damaged bag gets weight 0. `most` limits the patches of a bag per epoch; 0 is no limit.
    Each epoch draws different patches, by `seed`. Bags that are read whole stay in memory if all fit. With `positions`,
    batches also have the positions of the patches.
    """

    # A bag may be a gigabyte, so only the next one is loaded in advance.
    parallel_calls = 1
    prefetch = 0
    read_ahead = 0

    def __init__(
        self,
        bags: BagSet,
        table: SampleTable,
        *,
        batch_size: int,
        order: Order,
        replicas: int = 1,
        on_error: OnError = "raise",
        most: int = 0,
        seed: int = 0,
        by_slide: Mapping[str, SlideValues] | None = None,
        positions: bool = False,
    ) -> None:
        super().__init__(
            table, batch_size=batch_size, order=order, replicas=replicas, by_slide=by_slide
        )
        self.bags, self._skip, self._most, self._seed = bags, on_error == "skip", most, seed
        self._positions = positions
        self.dtype = np.result_type(*(bag.dtype for bag in bags))
        size = sum(bag.rows for bag in bags) * bags.dimension * self.dtype.itemsize
        self._cached = size * _CACHED_SHARE <= available_memory()
        self._cache: dict[int, NDArray[np.floating]] = {}
        self.fields = (
            Field("features", self.dtype, (bags.dimension,), ragged=True),
            Field("end", np.int64),
            Field("label", np.int32),
            Field("weight", np.float32),
            Field("key", np.int64),
            *self._slide_fields(),
            *([Field("position", np.float32, (2,), ragged=True)] if positions else []),
        )

    def load(self, step: int, replica: int = 0) -> dict[str, NDArray[Any]]:
        """Load a replica's part of a step: (R, D) features, and for each bag its end row and so on; see `fields`.

        Raises:
            DamagedStore: a bag is damaged, and damaged bags are not skipped.
        """
        located, weights = self.locate(step, replica)
        keys = located.keys
        parts, positions = [], []
        for i, number in enumerate(located.slides.tolist()):
            rows = self._draw_rows(number, step // self.steps_per_epoch)
            features = self._read(number, rows, keys[i]) if weights[i] else None
            if features is None:  # a bag of weight 0 is not read
                weights[i] = 0
                features = np.zeros((1, self.bags.dimension), self.dtype)
                positions.append(np.zeros((1, 2), np.float32))
            elif self._positions:
                positions.append(read_positions(self.bags.complete[number], rows))
            parts.append(features)
        return {
            "features": joined_rows(parts),
            "end": np.cumsum([len(part) for part in parts], dtype=np.int64),
            "label": located.labels,
            "weight": weights,
            "key": keys,
            **{name: located.values(values) for name, values in self.by_slide.items()},
            **({"position": joined_rows(positions)} if self._positions else {}),
        }

    def _read(
        self, number: int, rows: NDArray[np.int64] | None, key: int
    ) -> NDArray[np.floating] | None:
        if number in self._cache:
            return self._cache[number]
        try:
            features = read_bag(self.bags.complete[number], self.dtype, rows)
        except DamagedStore as error:
            if not self._skip:
                raise
            self._note_skipped(int(key), str(error))
            return None
        if self._cached and rows is None:
            self._cache[number] = features
        return features

    def _draw_rows(self, number: int, epoch: int) -> NDArray[np.int64] | None:
        """Return the rows of a bag in an epoch, sorted; None for all."""
        size = self.bags.complete[number].rows
        if not 0 < self._most < size:
            return None
        # Consecutive epochs go through one permutation, so that the fewest epochs cover all rows.
        rounds, begin = divmod(epoch, -(-size // self._most))
        positions = (begin * self._most + np.arange(self._most)) % size
        return np.sort(permuted(positions, size, combine(self._seed, _DRAW, number, rounds)))


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
    with default_progress().bar("feature scaling", unit="bags", total=len(chosen)) as bar:
        for number in chosen:
            bag = bags.complete[number]
            try:
                values = read_bag(
                    bag, bag.dtype, _spaced(bag.rows, _ROWS) if bag.rows > _ROWS else None
                ).astype(np.float64)
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
