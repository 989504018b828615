"""Survival of groups of patients: Kaplan-Meier curves, follow-up, calibration at a time, and proportional hazards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads its parts when they are used: `scipy.stats` takes 0.6 s
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.calibration import Bin
from histopipe.tasks.intervals import mean_ranks

_GROUPS, _IN_GROUP = 5, 10
"""Most groups of predicted risk, and fewest patients of a group."""
_STEPS, _SMALLEST = 50, 1e-10
"""Steps of Newton's method, and largest last one, relative to the coefficient; and least information."""
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
