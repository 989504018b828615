"""95 % confidence intervals: from resampled patients, and score intervals of shares and of the area under the ROC curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray

Interval = tuple[float, float]

FEWEST_PATIENTS = 5
"""Fewer patients have no intervals: for two, the interval of an AUC of 1 would be [0.12, 1.00]."""
TOO_FEW = "too few patients for an interval"
RELIABLE_PATIENTS = 10
"""With fewer patients, the intervals are narrower than 95 %: percentiles of so few values are too close together."""
_TAIL = 0.025
"""Share of the resamples below, and above, a 95 % interval."""
NORMAL = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
_HALVINGS = 60
"""Bisections of [0, 1] after which the ends of an interval are exact to rounding: float64 has 53 bits."""
_INFORMATIVE = 10.0
"""Patients count in full as evidence of the variance between them from one error in this number of decisions."""
_FACTORS = np.concatenate([np.linspace(0, 1, 41), np.linspace(1.05, 4, 60)])
"""Errors that `error_interval` tries, relative to the measured one. Noise only makes an error larger, so that most
plausible ones are smaller: the steps are finer below 1."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a metric between two runs on the same patients, or between a group of patients and all others.

    Attributes:
        value: the difference; None if one of the two metrics is not defined.
        interval: 95 % confidence interval, from resampling the same patients for both.
    """

    value: float | None
    interval: Interval | None


def read_differences(value: Mapping[str, Any]) -> dict[str, Difference]:
    """Return differences by metric from JSON."""
    return {
        name: Difference(each["value"], each["interval"] and tuple(each["interval"]))
        for name, each in value.items()
    }


def finite_or_none(value: float) -> float | None:
    """Return a metric; None if it is not finite, and so undefined."""
    return float(value) if math.isfinite(value) else None


def patients_notes(patients: int) -> list[str]:
    """Return why intervals of this number of patients are missing or unreliable; empty if they are neither."""
    if patients < FEWEST_PATIENTS:
        return [f"{TOO_FEW}: {patients}, expected at least {FEWEST_PATIENTS}"]
    if patients < RELIABLE_PATIENTS:
        return [f"confidence intervals are unreliable: only {patients} patients"]
    return []


def interval_of(values: FloatArray, patients: int) -> Interval | None:
    """Return the 95 % confidence interval from values of resamples; None if fewer than half of them are defined.

    Plain percentiles are too narrow for few patients, so they are expanded as a t interval expands a normal one.
    Undefined values are NaN. There must be at least two patients.

    Source:
        T. Hesterberg, What teachers should know about the bootstrap, The American Statistician 69 (2015), "expanded
        percentile".
    """
    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or not len(defined):
        return None
    width = math.sqrt(patients / (patients - 1)) * t_quantile(patients - 1)
    low, high = np.quantile(defined, scipy.special.ndtr([-width, width]))
    return float(low), float(high)


def mean_interval(each: Sequence[Interval | None]) -> Interval | None:
    """Return the means of the ends, an interval of the mean that is wide enough if the values depend on each other.

    None if an interval is unknown.
    """
    intervals = [interval for interval in each if interval is not None]
    if not intervals or len(intervals) < len(each):
        return None
    low, high = np.mean(intervals, axis=0)
    return float(low), float(high)


def column_intervals(
    metrics: Sequence[str], columns: Mapping[str, Mapping[str, Interval]]
) -> dict[str, Interval]:
    """Return the intervals of the means of metrics over the columns, and of each column, as `metric:column`."""
    intervals: dict[str, Interval | None] = {}
    for metric in metrics:
        of_columns = {name: of_column.get(metric) for name, of_column in columns.items()}
        intervals[metric] = mean_interval(list(of_columns.values()))
        intervals |= {f"{metric}:{name}": ends for name, ends in of_columns.items()}
    return {name: ends for name, ends in intervals.items() if ends is not None}


def t_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    # `scipy.stats` has the same functions, but takes 0.6 s to load.
    return float(scipy.special.stdtrit(freedom, 1 - _TAIL))


def independent_mean_interval(
    each: Sequence[tuple[float, Interval | None]],
) -> Interval | None:
    """Return the interval of the mean of independent values, from their intervals; None if one is unknown.

    Source:
        G. Y. Zou and A. Donner, Construction of confidence limits about effect measures, Statistics in Medicine 27 (2008).
    """
    rows = np.array([(value, *ends) for value, ends in each if ends is not None])
    if not len(rows) or len(rows) < len(each):
        return None
    value, low, high = rows.T
    below, above = (
        math.sqrt(float((distance**2).sum())) / len(rows)
        for distance in (value - low, high - value)
    )
    return max(float(value.mean()) - below, 0.0), min(float(value.mean()) + above, 1.0)


def difference_interval(first: tuple[float, Interval], second: tuple[float, Interval]) -> Interval:
    """Return the interval of a difference of independent values, from their values and intervals.

    It is too wide for values that increase together.

    Source:
        R. G. Newcombe, Interval estimation for the difference between independent proportions, Statistics in Medicine 17
        (1998), method 10; Zou and Donner (2008) for other values.
    """
    (a, (low_a, high_a)), (b, (low_b, high_b)) = first, second
    return a - b - math.hypot(a - low_a, high_b - b), a - b + math.hypot(high_a - a, b - low_b)


def error_interval(excess: FloatArray, count: FloatArray, weights: FloatArray) -> Interval | None:
    """Return the interval of the expected calibration error, a sum of absolute values, which noise only makes larger.

    It holds the errors for which the measured error is plausible: those of `excess` times a factor, with the noise of the
    resamples added; and the measured one, which may be larger than all of these. None for fewer than two patients.

    Args:
        excess: (P, B) sum by patient and bin of what probabilities exceed outcomes by.
        count: (P,) number of items of each patient.
        weights: (R, P) of resamples.
    """
    patients = int((count > 0).sum())
    if patients < 2:
        return None
    mean = excess.sum(axis=0) / count.sum()
    totals = weights @ count
    drawn = totals > 0  # a resample may have no patient of a small group
    noise = (weights[drawn] @ excess) / totals[drawn, None] - mean
    # Resamples vary too little for few patients: as in `interval_of`.
    noise *= math.sqrt(patients / (patients - 1)) * t_quantile(patients - 1) / NORMAL
    ones = np.ones((1, len(count)))
    error = float((np.abs(ones @ excess).sum(axis=1) / (ones @ count))[0])
    ends = [
        np.quantile(np.abs(factor * mean + noise).sum(axis=1), [_TAIL, 1 - _TAIL])
        for factor in _FACTORS
    ]
    plausible = _FACTORS[[low <= error <= high for low, high in ends]] * error
    return (float(plausible[0]), max(float(plausible[-1]), error)) if len(plausible) else (0, error)


def error_by_chance(excess: FloatArray, count: FloatArray) -> float:
    """Return the mean calibration error of samples of these sizes if the probabilities are right, to a normal approximation.

    Arguments as for `error_interval`. NaN for fewer than two patients.
    """
    patients = int((count > 0).sum())
    if patients < 2:
        return math.nan
    apart = excess - excess.sum(axis=0) / count.sum() * count[:, None]
    variance = patients / (patients - 1) * (apart**2).sum(axis=0)
    return float(math.sqrt(2 / math.pi) * np.sqrt(variance).sum() / count.sum())


def share_interval(
    right: NDArray[np.bool_] | FloatArray, patient: NDArray[np.int32]
) -> Interval | None:
    """Return the interval of a share, such as a sensitivity, from (N,) decisions of (N,) patients; or of a mean of (N,) values.

    This is the score interval, with the number of patients, and the variance between patients if they have several
    items. It is informative if all decisions are right. Values are from 0 to 1, such as the squared errors of the Brier
    score: a share has the largest variance of such means, to which that of few patients is shrunk. The few large errors of a
    rare class are missing from most samples, and from all resamples of these.

    Source:
        E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    patients = len(np.unique(patient))
    if patients < 2:
        return None
    share = float(right.mean())
    error = np.bincount(patient, right - share)
    variance = patients / (patients - 1) * float((error**2).sum()) / len(right) ** 2
    several = len(right) > patients or right.dtype != np.bool_
    return bounded_interval(share, variance, patients, several=several)


def bounded_interval(
    share: float, variance: float, patients: int, *, several: bool = True
) -> Interval:
    """Return the score interval of a mean of values from 0 to 1 with a variance between patients; see `share_interval`."""
    return _score_interval(
        share,
        lambda value: value * (1 - value) / patients,  # the variance of a binomial share
        variance,
        patients,
        patients,
        several=several,
    )


def root_interval(squares: FloatArray, patient: NDArray[np.int32]) -> Interval | None:
    """Return the interval of the root of the mean of (N,) squared errors of (N,) patients; None if all are 0.

    This is Student's interval of the logarithm. Its variance is that between patients, and at least that of one normal
    error per patient: few patients seldom have one of the large errors, and then all resamples lack them.

    Source:
        D. G. Bonett, Approximate confidence interval for standard deviation of nonnormal distributions, Computational
        Statistics and Data Analysis 50 (2006), which takes the kurtosis of the errors.
    """
    patients, mean = len(np.unique(patient)), float(squares.mean())
    if patients < 2 or not mean:
        return None
    error = np.bincount(patient, squares / mean - 1)
    variance = patients / (patients - 1) * float((error**2).sum()) / len(squares) ** 2
    reach = t_quantile(patients - 1) * math.sqrt(max(variance, 2 / patients)) / 2
    return math.sqrt(mean) * math.exp(-reach), math.sqrt(mean) * math.exp(reach)


def auc_interval(
    positive: NDArray[np.bool_],
    score: FloatArray,
    patient: NDArray[np.int32],
    fold: NDArray[np.int32],
) -> Interval | None:
    """Return the interval of the area under the ROC curve within folds, for (N,) labels, scores, patients and folds.

    This is a score interval: it holds the areas whose own variance, for these numbers of patients, makes the found area
    plausible. So it is informative for an area of 1. If patients have several items, the variance is scaled to that of
    DeLong's method for clusters. Few patients, and few errors, cannot show that their items are independent, so the
    scale is shrunk towards 1, and is 1 for an area of 0 or 1. The own variance of several folds is that of the mean of
    their areas, weighted by pairs.

    Source:
        R. G. Newcombe, Confidence intervals for an effect size measure based on the Mann-Whitney statistic, part 2,
        Statistics in Medicine 25 (2006), method 5; N. A. Obuchowski, Nonparametric analysis of clustered ROC curve data,
        Biometrics 53 (1997).
    """
    folds = [fold == number for number in np.unique(fold)]
    of_folds = np.array(
        [[len(np.unique(patient[f & rows])) for rows in (positive, ~positive)] for f in folds]
    )
    of_folds = of_folds[of_folds.min(axis=1) > 0]
    if not len(of_folds):
        return None
    of_class = [len(np.unique(patient[rows])) for rows in (positive, ~positive)]
    fewest, total = min(of_class), sum(of_class)
    if fewest < 2:
        return None
    area, variance = delong(positive, score, patient, fold)
    variance_at = partial(_variance_of_area, of_folds)
    return _score_interval(
        area, variance_at, variance, fewest, total - 1, several=len(positive) > total
    )


def _variance_of_area(of_folds: NDArray[np.integer], value: float) -> float:
    """Return the variance of an area within folds, for (F, 2) numbers of patients with each label."""
    pairs = of_folds.prod(axis=1)
    # The mean of both numbers of patients makes the interval that of the exchanged classes, mirrored.
    other_patients = of_folds.sum(axis=1) / 2 - 1
    spread = 1 + other_patients * ((1 - value) / (2 - value) + value / (1 + value))
    return float(value * (1 - value) * (pairs * spread).sum() / pairs.sum() ** 2)


def expected_interval(positive: int, negative: int, area: float = 0.8) -> Interval | None:
    """Return the interval that an AUC would have with these numbers of patients; None for fewer than two."""
    if min(positive, negative) < 2:
        return None
    variance_at = partial(_variance_of_area, np.array([[positive, negative]]))
    return _score_interval(area, variance_at, 0.0, 2, positive + negative, several=False)


def _score_interval(
    estimate: float,
    variance_at: Callable[[float], float],
    variance: float,
    fewest: int,
    patients: int,
    *,
    several: bool,
) -> Interval:
    """Return the values v for which |v - estimate| is at most a quantile times the standard error at v.

    If patients have several items, the variance is scaled to the found `variance`; see `auc_interval`.
    """
    quantile, scale = NORMAL, 1.0
    if several:
        quantile = t_quantile(patients - 1)
        expected = variance_at(estimate)
        ratio = variance / expected if expected > 0 else 0.0
        # Without errors, and without hits, nothing shows whether those of a patient come together.
        informative = min(1.0, _INFORMATIVE * estimate, _INFORMATIVE * (1 - estimate))
        scale = ratio + max(0.0, 1 - ratio) / (1 + (fewest - 1) * informative)

    def end(limit: float) -> float:
        inside, outside = estimate, limit
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            if (middle - estimate) ** 2 <= quantile**2 * scale * variance_at(middle):
                inside = middle
            else:
                outside = middle
        return inside

    return end(0.0) if estimate > 0 else 0.0, end(1.0) if estimate < 1 else 1.0


def precision_interval(
    estimate: float, resampled: FloatArray, positives: int, *, several: bool
) -> Interval | None:
    """Return the interval of an average precision, as that of a share of the positive patients; None for fewer than two.

    `several`: patients have several items. Then the variance is scaled to that of the (R,) `resampled` values.

    Source:
        K. Boyd et al., Area under the precision-recall curve: point estimates and confidence intervals, ECML PKDD (2013),
        with a score interval instead of a logit interval, which does not exist at 1.
    """
    if positives < 2 or not math.isfinite(estimate):
        return None
    variance = float(resampled[np.isfinite(resampled)].var())
    return bounded_interval(estimate, variance, positives, several=several)


def delong(
    positive: NDArray[np.bool_],
    score: FloatArray,
    patient: NDArray[np.int32],
    fold: NDArray[np.int32],
) -> tuple[float, float]:
    """Return the area under the ROC curve within folds and its variance between patients, of at least two with each label.

    The areas of folds have the weight of their pairs.

    Source:
        E. R. DeLong et al., Comparing the areas under two or more correlated ROC curves, Biometrics 44 (1988), with the
        variance of clusters of N. A. Obuchowski (1997).
    """
    right, pairs = np.empty(len(score)), np.empty(len(score))
    for number in np.unique(fold):
        both = [np.flatnonzero((fold == number) & rows) for rows in (positive, ~positive)]
        ranks = mean_ranks(score[np.concatenate(both)])
        for rows, other, of_rows in zip(
            both, both[::-1], np.split(ranks, [len(both[0])]), strict=True
        ):
            # The items of the other label that an item is above, and then on the right side of.
            above = of_rows - mean_ranks(score[rows])
            right[rows] = above if rows is both[0] else len(other) - above
            pairs[rows] = len(other)
    total = pairs[positive].sum()
    area = float(right[positive].sum() / total)
    sums = [
        np.bincount(patient[rows], (right - area * pairs)[rows], int(patient.max()) + 1) / total
        for rows in (positive, ~positive)
    ]
    counts = [len(np.unique(patient[rows])) for rows in (positive, ~positive, slice(None))]
    products = [sums[0] @ sums[0], sums[1] @ sums[1], 2 * sums[0] @ sums[1]]
    variance = sum(
        n / (n - 1) * float(product) for n, product in zip(counts, products, strict=True)
    )
    return area, max(variance, 0.0)


def mean_ranks(values: FloatArray) -> FloatArray:
    """Return ranks from 1; equal values have their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place], np.float64)
