"""Curves of predictions: calibration of probabilities, net benefit, and survival.

Calibration has reliability, intercept and slope. Survival is that of groups of patients: Kaplan-Meier curves, follow-up,
calibration at a time, and proportional hazards.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads its parts when they are used: `scipy.stats` takes 0.6 s
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.intervals import (
    FEWEST_PATIENTS,
    Interval,
    mean_ranks,
    share_interval,
    t_quantile,
)

BINS = 10
"""Bins of equal width, as usual for reliability diagrams."""
_LIMIT = 1e-6
"""Probabilities are at least this far from 0 and 1, so that their log odds are finite."""
_PLACES, _FEWEST_SCORES, _MOST_SCORES = 50, 10, 5000
"""Points of a smooth curve; fewest scores that it needs, and most that it uses."""
_STEPS = 50
"""Steps of Newton's method, which needs about ten; without convergence, the outcomes are nearly separated."""
CALIBRATION = ("calibration_intercept", "calibration_slope")
"""Metrics of `recalibration`."""
_NET_BENEFIT_AT = tuple(round(0.02 * step, 2) for step in range(1, 50))
"""Probabilities of a decision curve: without 0 and 1, whose odds are not finite."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Scores with a probability from `low` to `high`, for a reliability diagram.

    `probability` is the mean probability, and `observed` the observed share with its 95 % interval; None if there is no score,
    or no interval. Of survival, `at_risk` patients are left at the time.
    """

    low: float
    high: float
    count: int
    probability: float | None
    observed: float | None
    interval: Interval | None = None
    at_risk: int | None = None


def reliability_of(
    probability: FloatArray, event: NDArray[np.bool_], patient: NDArray[np.int32]
) -> tuple[Bin, ...]:
    """Return the bins of (N,) probabilities of events of (N,) patients."""
    in_bins, bins = bin_numbers(probability), []
    for number in range(BINS):
        rows, ends = in_bins == number, (number / BINS, (number + 1) / BINS)
        if rows.any():
            means = float(probability[rows].mean()), float(event[rows].mean())
            interval = share_interval(event[rows], patient[rows])
            bins.append(Bin(*ends, int(rows.sum()), *means, interval))
        else:
            bins.append(Bin(*ends, 0, None, None))
    return tuple(bins)


Reliability = tuple[tuple[Bin, ...], tuple[FloatArray, FloatArray]]
"""Bins, and a smooth curve: (K,) probabilities and shares of events."""


def reliability_curve(
    probability: FloatArray, event: NDArray[np.bool_], patient: NDArray[np.int32]
) -> Reliability:
    """Return the bins of (N,) probabilities of events of (N,) patients, and a smooth curve; none of fewer than ten.

    Source:
        W. S. Cleveland, Robust locally weighted regression, JASA 74 (1979): lines through the nearest three quarters.
    """
    bins = reliability_of(probability, event, patient)
    chosen = np.linspace(0, len(event) - 1, min(len(event), _MOST_SCORES)).astype(np.intp)
    rows = np.argsort(probability, kind="stable")[chosen]
    probability, event = probability[rows], event[rows]
    if len(rows) < _FEWEST_SCORES:
        return bins, (np.empty(0), np.empty(0))
    places = np.quantile(probability, np.linspace(0, 1, _PLACES))
    apart = probability - places[:, None]
    reach = np.sort(np.abs(apart), axis=1)[:, round(0.75 * len(rows)) - 1]
    weight = np.clip(1 - (np.abs(apart) / np.maximum(reach, _LIMIT)[:, None]) ** 3, 0, None) ** 3
    mean = (weight @ probability) / weight.sum(axis=1)
    level = (weight @ event) / weight.sum(axis=1)
    centred = probability - mean[:, None]
    spread = (weight * centred**2).sum(axis=1)
    slope = (weight * centred) @ event / np.where(spread > _LIMIT**2, spread, np.inf)
    return bins, (places, np.clip(level + slope * (places - mean), 0, 1))


def bin_numbers(probability: FloatArray) -> NDArray[np.intp]:
    """Return the (N,) bins of probabilities, from 0."""
    return np.minimum((probability * BINS).astype(np.intp), BINS - 1)


def recalibration(
    probability: FloatArray, event: NDArray[np.bool_], patient: NDArray[np.int32]
) -> tuple[dict[str, float | None], dict[str, Interval]]:
    """Return intercept and slope of the log odds of (N,) events against those of their probabilities, and intervals.

    The calibration intercept, with a slope of 1, is above 0 if the probabilities are too low ("calibration in the large").
    The slope is below 1 if the probabilities are too extreme. Both are None with one outcome only; the slope also if
    probabilities separate the outcomes, or are all equal. The 95 % confidence intervals have the variance between patients.

    Source:
        B. Van Calster et al., Calibration: the Achilles heel of predictive analytics, BMC Medicine 17 (2019).
    """
    if event.all() or not event.any():
        return dict.fromkeys(CALIBRATION), {}
    kept = np.clip(probability, _LIMIT, 1 - _LIMIT)
    odds = np.log(kept / (1 - kept))
    ones = np.ones((len(odds), 1))
    overlap = odds[event].min() < odds[~event].max() and odds[event].max() > odds[~event].min()
    fits = {
        "calibration_intercept": _logistic(ones, odds, event, patient),
        "calibration_slope": _logistic(
            np.column_stack([ones, odds]), np.zeros(len(odds)), event, patient
        )
        if overlap
        else None,
    }
    values = {name: None if fit is None else fit[0] for name, fit in fits.items()}
    patients = len(np.unique(patient))
    if patients < FEWEST_PATIENTS:
        return values, {}
    t, estimates = t_quantile(patients - 1), {name: fit for name, fit in fits.items() if fit}
    return values, {name: (v - t * error, v + t * error) for name, (v, error) in estimates.items()}


def _logistic(
    inputs: FloatArray, offset: FloatArray, event: NDArray[np.bool_], patient: NDArray[np.int32]
) -> tuple[float, float] | None:
    """Return the last coefficient of a logistic regression and its standard error; None if there are none.

    The error is that of the sandwich estimator with patients as clusters.
    """
    weights = np.zeros(inputs.shape[1])
    for _ in range(_STEPS):
        fitted = 1 / (1 + np.exp(-(inputs @ weights + offset)))
        information = inputs.T @ (inputs * (fitted * (1 - fitted))[:, None])
        try:
            inverse = np.linalg.inv(information)
        except np.linalg.LinAlgError:
            return None
        step = inverse @ (inputs.T @ (event - fitted))
        # Long steps of Newton's method diverge.
        weights = weights + step * min(1.0, 5 / max(np.abs(step).max(), 1e-300))
        if np.abs(step).max() < 1e-10 * (1 + np.abs(weights).max()):
            break
    else:
        return None
    slopes = inputs * (event - fitted)[:, None]
    by_patient = np.stack([np.bincount(patient, column) for column in slopes.T], axis=1)
    count = len(np.unique(patient))
    variance = inverse @ (by_patient.T @ by_patient) @ inverse * count / max(count - 1, 1)
    return float(weights[-1]), math.sqrt(max(variance[-1, -1], 0.0))


@dataclass(frozen=True, slots=True)
class DecisionCurve:
    """Net benefit of deciding for the positive class above a probability, and of doing so for everyone.

    To decide for no one has the net benefit 0.
    """

    probability: tuple[float, ...]
    model: tuple[float, ...]
    treat_all: tuple[float, ...]


def decision_curve(probability: FloatArray, event: NDArray[np.bool_]) -> DecisionCurve:
    """Return the net benefit for (N,) probabilities of events.

    Source:
        A. J. Vickers and E. B. Elkin, Decision curve analysis, Medical Decision Making 26 (2006).
    """

    def net_benefit(limit: float, treated: NDArray[np.bool_]) -> float:
        odds = limit / (1 - limit)
        return float((treated & event).mean() - (treated & ~event).mean() * odds)

    everyone = np.ones(len(event), np.bool_)
    return DecisionCurve(
        _NET_BENEFIT_AT,
        tuple(net_benefit(limit, probability >= limit) for limit in _NET_BENEFIT_AT),
        tuple(net_benefit(limit, everyone) for limit in _NET_BENEFIT_AT),
    )


_GROUPS, _IN_GROUP = 5, 10
"""Most groups of predicted risk, and fewest patients of a group."""
_SMALLEST = 1e-10
"""Largest last step of Newton's method, relative to the coefficient; and least information."""
_HALF_TOLERANCE = 1e-8
"""Rounding of a curve that is exactly one half: then the median survival is the first time of that step."""


@dataclass(frozen=True, slots=True)
class RiskGroup:
    """Patients with a risk above or below the threshold, and their Kaplan-Meier curve.

    Attributes:
        name: "high risk" or "low risk".
        count, events: number of patients, and of their events.
        median: median survival, the first time when survival is at most one half; None if it is not reached.
        times, survival: steps of the curve, from time 0.
        low, high: its 95 % confidence band.
        at_risk: number at risk at each of `at_risk_times`.
    """

    name: str
    count: int
    events: int
    median: float | None
    times: tuple[float, ...]
    survival: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    at_risk_times: tuple[float, ...]
    at_risk: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SurvivalChecks:
    """What reviewers ask of predicted survival, of patients.

    Attributes:
        follow_up: median time of observation, by the reverse Kaplan-Meier curve, in which censoring is the event; None if
            it is not reached.
        horizon: time at which predicted and observed survival are compared.
        calibration: groups of equal size by the predicted probability of an event until the horizon, with that observed by
            Kaplan-Meier, and the number of patients at risk.
        slope: coefficient of the risk in a Cox model of these patients, stratified by fold: below 1 if risks are too extreme.
            None unless risks are the logarithms of hazards.
        hazards_p: p value of its change with the rank of the time: small if hazards are not proportional.

    Source:
        M. Schemper and T. L. Smith, A note on quantifying follow-up in studies of failure time, Controlled Clinical Trials 17
        (1996); P. M. Grambsch and T. M. Therneau, Proportional hazards tests and diagnostics based on weighted residuals,
        Biometrika 81 (1994).
    """

    follow_up: float | None
    horizon: float
    calibration: tuple[Bin, ...]
    slope: float | None = None
    hazards_p: float | None = None


def survival_checks(
    target: FloatArray,
    output: FloatArray,
    grid: Sequence[float],
    fold: NDArray[np.int32],
    horizon: float | None,
    *,
    log_hazards: bool,
) -> SurvivalChecks:
    """Return the checks of N patients from (N, 2) times and events, and (N, 1 + G) risks and survival by time of `grid`.

    The horizon is the median follow-up by default, and at most the last time of the model.
    """
    time, event = target[:, 0], target[:, 1] == 1
    times, curve, _ = _kaplan_meier(time, ~event)
    follow_up = _median(times, curve)
    at = min(horizon or follow_up or float(np.median(time)), grid[-1] if grid else math.inf)
    probability = np.array([1 - np.interp(at, (0, *grid), (1, *row)) for row in output[:, 1:]])
    order, groups = np.argsort(probability, kind="stable"), min(_GROUPS, len(time) // _IN_GROUP)
    parts = np.array_split(order, groups) if groups > 1 and grid else []
    slope, p = cox_check(output[:, 0], time, event, fold) if log_hazards else (None, None)
    bins = tuple(_group(time[rows], event[rows], probability[rows], at) for rows in parts)
    return SurvivalChecks(follow_up, at, bins, slope, p)


def _group(time: FloatArray, event: NDArray[np.bool_], probability: FloatArray, at: float) -> Bin:
    """Return predicted and observed events until a time; the latter is unknown if the last patient is censored before."""
    times, curve, (low, high) = _kaplan_meier(time, event)
    place = np.searchsorted(times, at, side="right") - 1
    is_known = time.max() >= at or event[time == time.max()].all()
    return Bin(
        float(probability.min()),
        float(probability.max()),
        len(time),
        float(probability.mean()),
        float(1 - curve[place]) if is_known else None,
        (float(1 - high[place]), float(1 - low[place])) if is_known else None,
        int((time >= at).sum()),
    )


def cox_check(
    risk: FloatArray, time: FloatArray, event: NDArray[np.bool_], fold: NDArray[np.int32]
) -> tuple[float | None, float | None]:
    """Return the coefficient of a Cox model of (N,) risks, stratified by fold, and the p value of proportional hazards.

    This is the test of scaled Schoenfeld residuals against the rank of the time, with Efron's method for ties. None if there
    is no coefficient.
    """
    strata = [np.flatnonzero(fold == number) for number in np.unique(fold)]
    slope = 0.0
    for _ in range(_STEPS):
        each = [_moments(risk[rows], time[rows], event[rows], slope) for rows in strata]
        residual, variance, times = (np.concatenate(parts) for parts in zip(*each, strict=True))
        information = float(variance.sum())
        if information < _SMALLEST:
            return None, None
        step = float(residual.sum()) / information
        slope += step
        if abs(step) < _SMALLEST * (1 + abs(slope)):
            break
    else:
        return None, None
    ranks = mean_ranks(times)
    ranks -= ranks.mean()
    spread = float(ranks @ ranks)
    if not spread:
        return slope, None
    statistic = len(times) * float(ranks @ residual) ** 2 / (information * spread)
    return slope, float(scipy.special.chdtrc(1, statistic))


def _moments(
    risk: FloatArray, time: FloatArray, event: NDArray[np.bool_], slope: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return Schoenfeld residual, variance of the risk among those at risk, and time of each event."""
    order = np.argsort(time, kind="stable")
    risk, time, events = risk[order], time[order], np.flatnonzero(event[order])
    hazard = np.exp(slope * (risk - risk.max(initial=0.0)))
    powers = np.stack([hazard, hazard * risk, hazard * risk**2])
    at_risk = np.cumsum(powers[:, ::-1], axis=1)[:, ::-1]
    _, first, tie, counts = np.unique(
        time[events], return_index=True, return_inverse=True, return_counts=True
    )
    tied = np.stack([np.bincount(tie, row, len(counts)) for row in powers[:, events]])
    # Of M events at one time, the one with number K leaves out K / M of the hazards of all M.
    share = (np.arange(len(events)) - first[tie]) / counts[tie]
    sums = at_risk[:, np.searchsorted(time, time[events])] - share * tied[:, tie]
    mean = sums[1] / sums[0]
    expected = np.bincount(tie, mean, len(counts)) / np.maximum(counts, 1)
    return risk[events] - expected[tie], sums[2] / sums[0] - mean**2, time[events]


def risk_groups(
    target: FloatArray, high: NDArray[np.bool_]
) -> tuple[tuple[RiskGroup, ...], float | None]:
    """Return the groups of high and low risk, and the p value of their difference by the log-rank test."""
    time, event = target.T
    at_risk_times = np.linspace(0, time.max(), 6)
    groups, samples = [], []
    for name, rows in (("high risk", high), ("low risk", ~high)):
        if not rows.any():
            continue
        happened = event[rows] == 1
        samples.append(scipy.stats.CensoredData(time[rows][happened], right=time[rows][~happened]))
        times, curve, (lows, highs) = _kaplan_meier(time[rows], happened)
        groups.append(
            RiskGroup(
                name,
                int(rows.sum()),
                int(happened.sum()),
                _median(times, curve),
                tuple(times.tolist()),
                tuple(curve.tolist()),
                tuple(lows.tolist()),
                tuple(highs.tolist()),
                tuple(at_risk_times.tolist()),
                tuple(int((time[rows] >= start).sum()) for start in at_risk_times),
            )
        )
    if len(groups) < 2 or not event.any():
        return tuple(groups), None
    # Undefined if no event happens while both groups have patients left; then SciPy divides by 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        test = scipy.stats.logrank(*samples)
    return tuple(groups), float(test.pvalue) if math.isfinite(test.statistic) else None


def _median(times: FloatArray, curve: FloatArray) -> float | None:
    return next(iter(times[curve <= 0.5 + _HALF_TOLERANCE].tolist()), None)


def _kaplan_meier(time: FloatArray, event: NDArray[np.bool_]) -> tuple[FloatArray, ...]:
    """Return the times of a Kaplan-Meier curve from 0, its survival, and (2, K) ends of its 95 % band."""
    curve = scipy.stats.ecdf(scipy.stats.CensoredData(time[event], right=time[~event])).sf
    with warnings.catch_warnings(action="ignore"):  # the band is undefined where survival is 0 or 1
        band = curve.confidence_interval(method="log-log")
    ends = np.stack([band.low.probabilities, band.high.probabilities])
    begin = (int(curve.quantiles[0] > 0), 0)
    return (
        np.pad(curve.quantiles, begin),
        np.pad(curve.probabilities, begin, constant_values=1.0),
        np.pad(
            np.where(np.isnan(ends), curve.probabilities, ends),
            ((0, 0), begin),
            constant_values=1.0,
        ),
    )
