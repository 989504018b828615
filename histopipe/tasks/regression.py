"""One or several numbers: the task, and metrics for many weightings of the patients at once, for the bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.system.arrays import FloatArray
from histopipe.tasks.choices import TaskName
from histopipe.tasks.intervals import Interval, root_interval
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.statistics import ColumnStatistics, Statistics
from histopipe.tasks.task import Task, rank_parts, relative_ranks

_ROUNDING = 64
"""Values are equal if they vary by at most this number of units in the last place of their mean."""
_QUARTERS = 4
"""Parts of the targets that splits balance."""
_LEAST_SPREAD, _SMALLEST = 1e-4, 1e-30
"""Smallest difference of targets, as a share of the largest, and smallest target: networks compute in float32."""
_HEAVY = 0.4
"""Share of the largest twentieth in the sum of squares: with normal errors a quarter, and in 1 of 50 samples of 20 more."""
METRICS = ("r2", "pearson", "spearman", "mae", "rmse")


class RegressionStatistics(Statistics):
    """Metrics of one column as functions of (R, P) weights of the patients.

    Args:
        target, output: (N,) true and predicted values.
        patient, fold: (N,) numbers of the patients and folds. Correlations are means over folds, weighted by items.
    """

    def __init__(
        self,
        target: FloatArray,
        output: FloatArray,
        patient: NDArray[np.int32],
        *,
        fold: NDArray[np.int32],
    ) -> None:
        self.patients = int(patient.max()) + 1
        self._target, self._output, self._patient = target, output, patient
        self._folds = [np.flatnonzero(fold == number) for number in np.unique(fold)]
        self._ranked = [
            [_ranked(values[rows]) for values in (target, output)] for rows in self._folds
        ]
        self.folds_without_pairs = sum(len(np.unique(target[rows])) < 2 for rows in self._folds)

    def compute(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return (R,) values of each metric; NaN if undefined."""
        rows = weights[:, self._patient]
        error = self._output - self._target
        squares = _mean(rows, error**2)
        with np.errstate(invalid="ignore"):
            return {
                "r2": 1 - squares / _centred(rows, self._target[None])[1],
                **dict(zip(("pearson", "spearman"), self._correlations(rows), strict=True)),
                "mae": _mean(rows, np.abs(error)),
                "rmse": np.sqrt(squares),
            }

    def _correlations(self, rows: FloatArray) -> FloatArray:
        """Return (2, R) correlations of values and of ranks; without the folds in which they are undefined."""
        total, weight = np.zeros((2, len(rows))), np.zeros((2, len(rows)))
        for members, ranked in zip(self._folds, self._ranked, strict=True):
            inside = rows[:, members]
            each = np.stack(
                [
                    _correlation(inside, self._target[None, members], self._output[None, members]),
                    _correlation(inside, *(ranks(inside) for ranks in ranked)),
                ]
            )
            of_fold = inside.sum(axis=1) * np.isfinite(each)
            total, weight = total + np.nan_to_num(each) * of_fold, weight + of_fold
        return np.asarray(total / np.where(weight > 0, weight, np.nan), np.float64)

    def better_intervals(
        self, weights: FloatArray, values: Mapping[str, FloatArray]
    ) -> Mapping[str, Interval]:
        """Return the interval of the root mean square error."""
        ends = root_interval((self._output - self._target) ** 2, self._patient)
        return {} if ends is None else {"rmse": ends}


def _ranked(values: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Return a function from (R, N) weights to the (R, N) ranks of (N,) values: the mean rank of equal values."""
    place = np.unique(values, return_inverse=True)[1]
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(place[order]) > 0))

    def ranks(rows: FloatArray) -> FloatArray:
        sums = np.add.reduceat(rows[:, order], starts, axis=1)
        return np.asarray((np.cumsum(sums, axis=1) - sums / 2)[:, place], np.float64)

    return ranks


def _correlation(rows: FloatArray, a: FloatArray, b: FloatArray) -> FloatArray:
    """Return (R,) weighted correlations of (R or 1, N) values; NaN if one of them is constant."""
    (a, of_a), (b, of_b) = _centred(rows, a), _centred(rows, b)
    return np.asarray(_mean(rows, a * b) / np.sqrt(of_a) / np.sqrt(of_b), np.float64)


def _centred(rows: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (R, N) values minus their weighted means, and their (R,) variances; NaN if values are equal to rounding."""
    mean = _mean(rows, values)
    centred = values - mean[:, None]
    variance = _mean(rows, centred**2)
    with np.errstate(invalid="ignore"):
        rounding = (_ROUNDING * np.spacing(np.abs(mean))) ** 2
        return centred, np.where(variance > rounding, variance, np.nan)


def _mean(rows: FloatArray, values: FloatArray) -> FloatArray:
    """Return (R,) weighted means of (R or 1, N) or (N,) values; NaN without weight."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((rows * values).sum(axis=1) / rows.sum(axis=1), np.float64)


@dataclass(frozen=True, slots=True)
class Regression(Task):
    """One or several numbers."""

    name: ClassVar[TaskName] = "regression"
    prefix = "predicted_"
    outcome_text = "The outcomes are the numbers {}."
    predicted_text = "a number for each column ({})"
    main: ClassVar[Mapping[str, str]] = {"r2": "R²", "pearson": "Pearson"}
    ranked: ClassVar[str] = "pearson"
    plain: ClassVar[Mapping[str, str]] = {"spearman": "Spearman", "mae": "MAE", "rmse": "RMSE"}
    by_subgroup = ("r2", "mae")
    compared = ("r2", "pearson", "rmse")

    def strata(self, targets: FloatArray) -> list[str]:
        """Return the quarter of each slide, by the mean rank over the columns."""
        ranks = np.stack([relative_ranks(column) for column in targets.T], axis=1)
        return [f"quarter {number}" for number in rank_parts(np.nanmean(ranks, axis=1), _QUARTERS)]

    def check(self, targets: FloatArray, subset: str) -> None:
        """Check that each column has several values."""
        for name, values in self.finite_targets(targets).items():
            if len(np.unique(values)) < 2:
                raise NothingToDo(
                    f"column {name} cannot be learned: {subset}",
                    found=f"{len(values)} slides with {'one value' if len(values) else 'no value'}",
                    expected="several values",
                    todo="leave the column out, or add slides",
                )
            spread, largest = float(np.ptp(values)), float(np.abs(values).max())
            if spread < _LEAST_SPREAD * largest or not _SMALLEST < largest < 1 / _SMALLEST:
                raise UsageError(
                    f"column {name} cannot be learned: {subset}",
                    found=f"values that differ by {spread:.3g}, up to {largest:.10g}",
                    expected=f"differences above {_LEAST_SPREAD * largest:.3g}, which single precision distinguishes",
                    todo="subtract a constant from the column, or use another unit",
                )

    def summary(self, targets: FloatArray) -> str:
        """Return mean and standard deviation of each column."""
        return ", ".join(
            f"{name} {values.mean():.4g} ± {values.std():.3g}"
            for name, values in self.finite_targets(targets).items()
            if len(values)
        )

    def cautions(self, scores: Predictions) -> list[str]:
        """Return the columns of which a twentieth of the errors makes most of the sum of squares: heavy tails."""
        texts = []
        for name, column in scores.by_column():
            _, patient = np.unique(column.patient, return_inverse=True)
            squares = np.sort(np.bincount(patient, (column.output - column.target)[:, 0] ** 2))
            largest = squares[-max(1, len(squares) // 20) :].sum()
            if largest > _HEAVY * squares.sum():
                texts.append(
                    f"{name}: the twentieth of the patients with the largest errors makes {largest / squares.sum():.0%} of the sum of squares: "
                    "intervals of RMSE and R² may be too narrow"
                )
        return texts

    def statistics(self, scores: Predictions) -> Statistics:
        """Return the metrics of numbers. Errors in different units have no mean."""
        columns = {
            name: RegressionStatistics(
                column.target[:, 0], column.output[:, 0], column.patient, fold=column.folds
            )
            if len(column)
            else None
            for name, column in scores.by_column()
        }
        first, *further = columns.values()
        if first is not None and not further:
            return first
        return ColumnStatistics(columns, METRICS, METRICS[:3], int(scores.patient.max()) + 1)
