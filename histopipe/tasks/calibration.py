"""Calibration of probabilities: reliability, intercept and slope; and their net benefit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.intervals import FEWEST_PATIENTS, Interval, share_interval, t_quantile

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
