"""Metrics of predictions as functions of weights of the patients, for the bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.intervals import (
    FEWEST_PATIENTS,
    Interval,
    column_intervals,
    finite_or_none,
    interval_of,
)


class Statistics(Protocol):
    """Metrics of predictions as functions of weights of the patients."""

    patients: int
    folds_without_pairs: int = 0
    """Folds left out of the metrics that rank items within folds; of several classes or columns, the most of one."""

    def compute(self, weights: FloatArray) -> Mapping[str, FloatArray]:
        """Return (R,) values of each metric for (R, P) weights; NaN if undefined."""

    def better_intervals(
        self, weights: FloatArray, values: Mapping[str, FloatArray]
    ) -> Mapping[str, Interval]:
        """Return the intervals of metrics for which there are better ones than the quantiles of their resamples.

        `values` is the result of `compute(weights)`.
        """

    def values(self) -> dict[str, float | None]:
        """Return the metrics without weights; None if undefined."""
        unweighted = np.ones((1, self.patients))
        return {name: finite_or_none(value) for name, (value,) in self.compute(unweighted).items()}


class ColumnStatistics(Statistics):
    """Metrics of several columns as `metric:column`, and their means over the columns, as functions of weights.

    Args:
        columns: statistics by column; None for a column without values, whose metrics are undefined.
        metrics: metrics of each column.
        means: those that also have a mean.
        patients: number of patients. The last ones may have no values of a column.
    """

    def __init__(
        self,
        columns: Mapping[str, Statistics | None],
        metrics: Sequence[str],
        means: Sequence[str],
        patients: int,
    ) -> None:
        self._columns, self._metrics, self._means = columns, metrics, means
        self.patients = patients
        counts = (column.folds_without_pairs for column in columns.values() if column)
        self.folds_without_pairs = max(counts, default=0)

    def compute(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return (R,) means of metrics over the columns, and the metrics of each column; NaN if undefined."""
        undefined = dict.fromkeys(self._metrics, np.full(len(weights), np.nan))
        each = {
            name: undefined if column is None else column.compute(weights[:, : column.patients])
            for name, column in self._columns.items()
        }
        return {
            **{
                metric: np.mean([values[metric] for values in each.values()], axis=0)
                for metric in self._means
            },
            **{
                f"{metric}:{name}": values[metric]
                for name, values in each.items()
                for metric in self._metrics
            },
        }

    def better_intervals(
        self, weights: FloatArray, values: Mapping[str, FloatArray]
    ) -> dict[str, Interval]:
        """Return intervals of each column, and of the means over the columns; see `Statistics.better_intervals`."""
        each = {
            name: column.better_intervals(
                weights[:, : column.patients],
                {metric: values[f"{metric}:{name}"] for metric in self._metrics},
            )
            if column is not None
            else {}
            for name, column in self._columns.items()
        }
        intervals = column_intervals(self._metrics, each)
        # Some metrics have no mean over the columns.
        return {name: ends for name, ends in intervals.items() if name in values}


def bootstrap_draws(
    patients: int, resamples: int, seed: int, stratum: NDArray[np.int32] | None = None
) -> NDArray[np.float64]:
    """Return how often each patient is drawn per resample, (R, P): as many draws as patients, with replacement.

    With a (P,) `stratum`, such as the fold, as many are drawn of each stratum as it has.
    """
    rng, draws = np.random.default_rng(seed), np.empty((resamples, patients))
    strata = np.zeros(patients, np.int32) if stratum is None else stratum
    for number in np.unique(strata).tolist():
        members = np.flatnonzero(strata == number)
        share = np.full(len(members), 1 / len(members))
        draws[:, members] = rng.multinomial(len(members), share, size=resamples)
    return draws


def intervals_of(
    statistics: Statistics,
    draws: FloatArray,
    patients: int,
    resampled: Mapping[str, FloatArray] | None = None,
) -> tuple[dict[str, Interval], float]:
    """Return intervals by metric, and the largest share of resamples for which a metric is undefined.

    `resampled` is `statistics.compute(draws)` if that is known.

    There are none of fewer than `FEWEST_PATIENTS`. A metric that is the same in all resamples has none, because it would
    not show its uncertainty.
    """
    if not len(draws) or patients < FEWEST_PATIENTS:
        return {}, 0.0
    metric_values = statistics.compute(draws) if resampled is None else resampled
    intervals = {name: interval_of(values, patients) for name, values in metric_values.items()}
    undefined = max(float(np.isnan(values).mean()) for values in metric_values.values())
    varied = {
        name: ends for name, ends in intervals.items() if ends is not None and ends[0] < ends[1]
    }
    # Better intervals come last, to replace those of the resamples. They exist also for metrics without variation.
    return varied | dict(statistics.better_intervals(draws, metric_values)), undefined
