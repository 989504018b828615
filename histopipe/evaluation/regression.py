"""Metrics of predicted numbers for many weightings of the patients at once, for the bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]
Values = NDArray[np.float64]
FIGURES = ("r2", "pearson", "spearman", "mae", "rmse")


class RegressionStatistics:
    """Metrics as functions of (R, P) weights of the patients, for each column and their mean.

    Args:
        target, output: (N, T) true and predicted values; NaN targets are left out.
        columns: names of the columns.
        patient: (N,) numbers of the patients.
    """

    def __init__(
        self,
        target: NDArray[np.float64],
        output: NDArray[np.float64],
        columns: Sequence[str],
        patient: NDArray[np.int32],
    ) -> None:
        self.patients = int(patient.max()) + 1
        known = np.isfinite(target)
        self._columns = [
            _Column(target[rows, i], output[rows, i], patient[rows])
            for i, rows in enumerate(known.T)
        ]
        self._names = tuple(columns)

    def figures(self, weights: Weights) -> dict[str, Values]:
        """Return (R,) values of each metric; NaN if undefined. With several columns, also of each, as `metric:column`."""
        each = [column.figures(weights) for column in self._columns]
        if len(each) == 1:
            return each[0]
        # Errors in different units have no mean.
        found = {name: np.mean([it[name] for it in each], axis=0) for name in FIGURES[:3]}
        for name, values in zip(self._names, each, strict=True):
            found |= {f"{figure}:{name}": value for figure, value in values.items()}
        return found

    def better_intervals(
        self, weights: Weights, figures: Mapping[str, Values]
    ) -> dict[str, tuple[float, float]]:
        """Return nothing: all intervals are those of resamples."""
        return {}


class _Column:
    def __init__(self, target: Values, output: Values, patient: NDArray[np.int32]) -> None:
        self._target, self._output, self._patient = target, output, patient
        self._orders = [_Ranks(values) for values in (target, output)]

    def figures(self, weights: Weights) -> dict[str, Values]:
        rows = weights[:, self._patient]
        total = rows.sum(axis=1)
        error = self._output - self._target
        with np.errstate(divide="ignore", invalid="ignore"):
            squares = rows @ error**2 / total
            mean = rows @ self._target / total
            spread = rows @ self._target**2 / total - mean**2
            return {
                "r2": np.where(spread > 1e-12 * (1 + mean**2), 1 - squares / spread, np.nan),
                "pearson": _correlation(rows, self._target[None], self._output[None]),
                "spearman": _correlation(rows, *(it.of(rows) for it in self._orders)),
                "mae": rows @ np.abs(error) / total,
                "rmse": np.sqrt(squares),
            }


class _Ranks:
    """Ranks of values, as functions of weights: the mean rank of equal values."""

    def __init__(self, values: Values) -> None:
        _, self._place = np.unique(values, return_inverse=True)
        self._order = np.argsort(self._place, kind="stable")
        ordered = self._place[self._order]
        self._starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))[: len(values)]

    def of(self, rows: Weights) -> Values:
        """Return the (R, N) ranks for (R, N) weights."""
        if not len(self._place):
            return rows
        sums = np.add.reduceat(rows[:, self._order], self._starts, axis=1)
        return np.asarray((np.cumsum(sums, axis=1) - sums / 2)[:, self._place], np.float64)


def _correlation(rows: Weights, a: Values, b: Values) -> Values:
    """Return (R,) weighted correlations of (R or 1, N) values; NaN if one of them is constant."""
    total = rows.sum(axis=1)

    def mean(values: Values) -> Values:
        return np.asarray((rows * values).sum(axis=1) / total, np.float64)

    a, b = a - mean(a)[:, None], b - mean(b)[:, None]
    product, of_a, of_b = mean(a * b), mean(a * a), mean(b * b)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = product / np.sqrt(of_a * of_b)
    return np.where((of_a > 1e-24) & (of_b > 1e-24), found, np.nan)
