"""Metrics of predictions, and of classes, for many weightings of the patients at once, for the bootstrap; and ROC curves.

Those of classes equal those of scikit-learn, which would sort the scores for each resample. Here scores are sorted
once, and all metrics except the AUC are first summed by patient. Weights of 1 give the unweighted metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.curves import BINS, bin_numbers
from histopipe.tasks.intervals import (
    FEWEST_PATIENTS,
    Interval,
    auc_interval,
    column_intervals,
    error_by_chance,
    error_interval,
    finite_or_none,
    independent_mean_interval,
    interval_of,
    mean_interval,
    precision_interval,
    share_interval,
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


_SMALLEST = np.finfo(np.float64).eps
"""Lowest probability in the log loss, as in scikit-learn, so that it is finite."""


def _rank(values: FloatArray, fold: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the order of decreasing values, fold by fold, and the last places of equal values: the steps of a curve."""
    order = np.lexsort((-values, fold))
    differs = (np.diff(values[order]) != 0) | (np.diff(fold[order]) != 0)
    return order, np.append(np.flatnonzero(differs), len(values) - 1)


def _ranked_areas(
    event: NDArray[np.bool_],
    values: FloatArray,
    patient: NDArray[np.int32],
    fold: NDArray[np.int32],
) -> Callable[[FloatArray], tuple[float, float]]:
    """Return a function of (P,) weights that returns the areas under the curves of (N,) events and their probabilities.

    These are the area under the ROC curve, where ties count half, and the average precision. Both are formed within
    each fold: the area has the weight of its pairs, the precision that of its events. Folds without a pair are left
    out. Scores are sorted once.
    """
    order, ends = _rank(values, fold)
    patient, positive = patient[order], event[order].astype(np.float64)
    has_ties = len(ends) < len(values)
    of_step = np.unique(fold[order][ends], return_inverse=True)[1]  # fold of each step, from 0
    last = np.flatnonzero(np.diff(of_step, append=-1))

    def areas(weights: FloatArray) -> tuple[float, float]:
        weight = weights[patient]
        positives = weight * positive
        true, chosen = np.cumsum(positives), np.cumsum(weight)
        if has_ties:
            true, chosen = true[ends], chosen[ends]
            positives, weight = np.diff(true, prepend=0.0), np.diff(chosen, prepend=0.0)
        all_true, all_chosen = (np.diff(sums[last], prepend=0.0) for sums in (true, chosen))
        all_false = all_chosen - all_true
        pairs = float(all_true @ all_false)
        if not pairs:
            return np.nan, np.nan
        if len(last) > 1:
            true, chosen = (
                sums - (np.cumsum(of_fold) - of_fold)[of_step]
                for sums, of_fold in ((true, all_true), (chosen, all_chosen))
            )
        # Pairs with a lower score of another class; equal scores count half.
        lower = all_false[of_step] - (chosen - true) + (weight - positives) / 2
        precision = np.divide(true, chosen, out=np.zeros_like(true), where=chosen > 0)
        has_pairs = all_true * all_false > 0
        precise = positives @ (precision * has_pairs[of_step])
        return float(positives @ lower / pairs), float(precise / all_true[has_pairs].sum())

    return areas


def confidence_of(
    label: NDArray[np.int32], probability: FloatArray, positive: int | None
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Return (N,) probabilities, and whether they came true: of the positive class, or else of the most probable one."""
    number = probability.argmax(axis=1) if positive is None else np.full(len(label), positive)
    return probability[np.arange(len(label)), number], label == number


class ClassStatistics(Statistics):
    """Metrics of classes as functions of (R, P) weights of the patients.

    Args:
        label: (N,) class numbers.
        probability: (N, C).
        patient: (N,) numbers of the patients.
        decided: (N,) class numbers.
        positive: the positive class of two; None averages over the classes that occur.
        fold: (N,) numbers of folds, within which areas under curves are formed.
    """

    def __init__(
        self,
        label: NDArray[np.int32],
        probability: FloatArray,
        patient: NDArray[np.int32],
        decided: NDArray[np.intp],
        positive: int | None,
        *,
        fold: NDArray[np.int32],
    ) -> None:
        self.positive, self._fold = positive, fold
        self._label, self._probability, self._patient = label, probability, patient
        self._decided = decided
        count, classes = probability.shape
        self.patients = int(patient.max()) + 1
        cells = np.bincount(
            (patient * classes + label) * classes + decided, minlength=self.patients * classes**2
        )
        self._confusion = cells.reshape(self.patients, classes, classes).astype(np.float64)
        squares = (probability - (label[:, None] == np.arange(classes))) ** 2
        # The sum over more than two classes is at most 2.
        self._brier_scale = 2.0 if positive is None else 1.0
        brier = self._brier = squares.sum(axis=1) if positive is None else squares[:, positive]
        log_loss = -np.log(np.clip(probability[np.arange(count), label], _SMALLEST, None))
        self._sums = np.stack(
            [np.bincount(patient, values, self.patients) for values in (brier, log_loss)]
        )
        # (P, bins) number of scores, and sum of what probabilities exceed outcomes by.
        confidence, event = confidence_of(label, probability, positive)
        bins = patient * BINS + bin_numbers(confidence)
        excess = np.bincount(bins, confidence - event, self.patients * BINS)
        self._excess = excess.reshape(self.patients, BINS).astype(np.float64)
        occurs = self._confusion.sum(axis=(0, 2))
        self._present = occurs > 0  # (C,) bool
        self._curves = {
            n: _ranked_areas(label == n, probability[:, n], patient, fold)
            for n in np.flatnonzero(self._present & (occurs < count)).tolist()
        }
        folds, fold_numbers = np.unique(fold, return_inverse=True)
        of_folds = np.bincount(fold_numbers * classes + label, minlength=len(folds) * classes)
        shares = of_folds.reshape(-1, classes)
        has_pair = (shares > 0) & (shares < shares.sum(axis=1, keepdims=True))
        self.folds_without_pairs = int((~has_pair[:, self._present]).sum(axis=0).max())

    def confusion(self, weights: FloatArray) -> FloatArray:
        """Return (R, C, C) confusion matrices: rows are labels, columns decisions."""
        return np.asarray(np.einsum("rp,pld->rld", weights, self._confusion), np.float64)

    def areas(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return (R, C) areas under the ROC curve of each class against the rest, and average precision; NaN if undefined."""
        areas = np.full((2, len(weights), self._confusion.shape[1]), np.nan)
        for number, curve in self._curves.items():
            areas[:, :, number] = np.array([curve(row) for row in weights]).reshape(-1, 2).T
        return areas[0], areas[1]

    def compute(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return (R,) values of each metric; NaN if undefined."""
        confusion = self.confusion(weights)
        areas, precisions = map(self._of_positive, self.areas(weights))
        counts = weights @ self._confusion.sum(axis=(1, 2))
        labels_and_decisions = confusion.sum(axis=1) + confusion.sum(axis=2)
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "auc": areas,
                "average_precision": precisions,
                # Classes that never occur are not counted. A class that is missing only from a resample gives NaN.
                "balanced_accuracy": sensitivity(confusion)[:, self._present].mean(axis=1),
                "accuracy": _correct(confusion).sum(axis=1) / confusion.sum(axis=(1, 2)),
                # NaN if a class neither occurs nor is decided.
                "f1": self._of_positive(2 * _correct(confusion) / labels_and_decisions),
                "sensitivity": self._of_positive(sensitivity(confusion)),
                "specificity": self._of_positive(specificity(confusion)),
                "brier": weights @ self._sums[0] / counts,
                "log_loss": weights @ self._sums[1] / counts,
                "calibration_error": np.abs(weights @ self._excess).sum(axis=1) / counts,
            }

    def better_intervals(
        self, weights: FloatArray, values: Mapping[str, FloatArray]
    ) -> dict[str, Interval]:
        """Return intervals of shares, areas under curves, and the expected calibration error.

        Resamples are too much alike if nearly all decisions are right, or if there are few patients; those of the
        calibration error are biased.
        """
        label, decided, patient = self._label, self._decided, self._patient
        right, present = decided == label, np.flatnonzero(self._present).tolist()
        numbers = present if self.positive is None else [self.positive]
        shares = {n: share_interval(right[label == n], patient[label == n]) for n in present}
        by_metric = {
            "auc": mean_interval(
                [
                    auc_interval(label == n, self._probability[:, n], patient, self._fold)
                    for n in numbers
                ]
            ),
            "sensitivity": mean_interval([shares.get(n) for n in numbers]),
            "specificity": mean_interval(
                [share_interval(decided[label != n] != n, patient[label != n]) for n in numbers]
            ),
            "accuracy": share_interval(right, patient),
            "brier": self._brier_interval(),
            "balanced_accuracy": independent_mean_interval(
                [(float(right[label == n].mean()), share) for n, share in shares.items()]
            ),
        }
        if self.positive is not None and self.positive in self._curves:
            _, precision = self._curves[self.positive](np.ones(self.patients))
            by_metric["average_precision"] = precision_interval(
                precision,
                values["average_precision"],
                len(np.unique(patient[label == self.positive])),
                several=len(patient) > len(np.unique(patient)),
            )
        by_metric["calibration_error"] = error_interval(
            self._excess, self._confusion.sum(axis=(1, 2)), weights
        )
        return {name: interval for name, interval in by_metric.items() if interval is not None}

    @property
    def error_by_chance(self) -> float:
        """Mean calibration error of right probabilities in samples of this size."""
        return error_by_chance(self._excess, self._confusion.sum(axis=(1, 2)))

    def _brier_interval(self) -> Interval | None:
        ends = share_interval(self._brier / self._brier_scale, self._patient)
        return ends and (ends[0] * self._brier_scale, ends[1] * self._brier_scale)

    def _of_positive(self, by_class: FloatArray) -> FloatArray:
        """Return values of the positive class; for more than two classes, the mean over those that occur."""
        positive, present = self.positive, self._present
        return np.asarray(
            by_class[:, present].mean(axis=1) if positive is None else by_class[:, positive]
        )


def _correct(confusion: FloatArray) -> FloatArray:
    return np.asarray(np.diagonal(confusion, axis1=1, axis2=2), np.float64)


def sensitivity(confusion: FloatArray) -> FloatArray:
    """Return (R, C) sensitivity of each class; NaN if the class does not occur."""
    with np.errstate(invalid="ignore"):
        return np.asarray(_correct(confusion) / confusion.sum(axis=2), np.float64)


def specificity(confusion: FloatArray) -> FloatArray:
    """Return (R, C) specificity of each class; NaN if there is no other class."""
    negatives = confusion.sum(axis=(1, 2))[:, None] - confusion.sum(axis=2)
    false_positives = confusion.sum(axis=1) - _correct(confusion)
    with np.errstate(invalid="ignore"):
        return np.asarray(1 - false_positives / negatives, np.float64)


def area_under_roc(label: NDArray[np.int32], probability: NDArray[np.float32]) -> float | None:
    """Return the area under the ROC curve, averaged over the classes that occur; None if there are fewer than two."""
    present = np.unique(label).tolist()
    if len(present) < 2 or not np.isfinite(probability).all():
        return None
    one = np.zeros(len(label), np.int32)
    curves = [
        _ranked_areas(label == n, probability[:, n].astype(np.float64), one, one) for n in present
    ]
    return float(np.mean([curve(np.ones(1))[0] for curve in curves]))


_BAND = (2.5, 97.5)
"""Percentiles of the resamples."""
_RESAMPLES = 200
"""Resamples of a band, which is drawn only: fewer than for the intervals of metrics."""
_GRID = np.linspace(0, 1, 101)
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Roc:
    """ROC curve of one class against the rest, and precision. Of several folds, means of their curves.

    Attributes:
        false_positive, true_positive: (K,) rates at decreasing thresholds, from (0, 0) to (1, 1); of several folds at equal
            steps of the false positive rate.
        recall, precision: (L,) true positive rates, and precision from the second one on, (L - 1,).
        band: (3, G) false positive rates, and low and high ends of the 95 % band of the true positive rates; None for
            too few patients, or if most resamples lack a class.
        folds: rates of each of several folds.
    """

    false_positive: NDArray[np.float64]
    true_positive: NDArray[np.float64]
    recall: NDArray[np.float64]
    precision: NDArray[np.float64]
    band: NDArray[np.float64] | None = None
    folds: tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...] = ()


def roc_of(
    positive: NDArray[np.bool_],
    probability: FloatArray,
    patient: NDArray[np.int32],
    *,
    patients: int,
    seed: int,
    fold: NDArray[np.int32] | None = None,
) -> Roc | None:
    """Return the ROC curve of (N,) events by their probability; None if all items of each fold, or none, are events.

    The mean of the curves of several folds has their numbers of pairs as weights, so that its area is the AUC within
    folds; that of the precisions has their numbers of events. It has no band: the folds show the variation.
    """
    if fold is not None and len(np.unique(fold)) > 1:
        folds = [fold == number for number in np.unique(fold)]
        each = [
            roc_of(positive[rows], probability[rows], patient[rows], patients=patients, seed=seed)
            for rows in folds
        ]
        return _mean_of_folds(
            [
                (roc, positive[rows])
                for roc, rows in zip(each, folds, strict=True)
                if roc is not None
            ]
        )
    if positive.all() or not positive.any():
        return None
    order, ends = _rank(probability, np.zeros(len(probability), np.int32))
    positive, patient = positive[order], patient[order]
    rates = _rates(positive, ends, np.ones(len(positive)))
    roc = Roc(*rates, rates[1], np.cumsum(positive)[ends] / (ends + 1))
    if len(np.unique(patient)) >= FEWEST_PATIENTS:
        weights = (draw[patient] for draw in bootstrap_draws(patients, _RESAMPLES, seed))
        curves = [
            # At vertical steps, this is their upper end.
            np.interp(_GRID, *_rates(positive, ends, weight))
            for weight in weights
            if weight[positive].any() and weight[~positive].any()
        ]
        if len(curves) > _RESAMPLES // 2:
            return replace(roc, band=np.vstack([_GRID, np.percentile(curves, _BAND, axis=0)]))
    return roc


def _mean_of_folds(each: Sequence[tuple[Roc, NDArray[np.bool_]]]) -> Roc | None:
    """Return the mean of the curves of folds with their events, (N,) each; None without any."""
    if not each:
        return None
    events = [int(positive.sum()) for _, positive in each]
    pairs = [n * (len(positive) - n) for n, (_, positive) in zip(events, each, strict=True)]
    # At vertical steps, this is their upper end.
    curves = [np.interp(_GRID, roc.false_positive, roc.true_positive) for roc, _ in each]
    steps = [
        roc.precision[np.searchsorted(roc.recall[1:], _GRID[1:] - _ROUNDING)] for roc, _ in each
    ]
    return Roc(
        _GRID,
        np.average(curves, axis=0, weights=pairs),
        _GRID,
        np.average(steps, axis=0, weights=events),
        folds=tuple((roc.false_positive, roc.true_positive) for roc, _ in each),
    )


def _rates(
    positive: NDArray[np.bool_], ends: NDArray[np.intp], weight: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    positives, negatives = np.cumsum(weight * positive)[ends], np.cumsum(weight * ~positive)[ends]
    return np.append(0.0, negatives / negatives[-1]), np.append(0.0, positives / positives[-1])
