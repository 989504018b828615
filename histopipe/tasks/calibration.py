"""Calibration of probabilities: reliability, intercept and slope; and their net benefit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.intervals import FEWEST_PATIENTS, Interval, t_quantile

BINS = 10
"""Bins of equal width, as usual for reliability diagrams."""
_LIMIT = 1e-6
"""Probabilities are at least this far from 0 and 1, so that their log odds are finite."""
_STEPS = 50
"""Steps of Newton's method, which needs about ten; without convergence, the outcomes are nearly separated."""
CALIBRATION = ("calibration_intercept", "calibration_slope")
"""Metrics of `recalibration`."""
_NET_BENEFIT_AT = tuple(round(0.02 * step, 2) for step in range(1, 50))
"""Probabilities of a decision curve: without 0 and 1, whose odds are not finite."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Scores with a probability from `low` to `high`, for a reliability diagram.

    `probability` is the mean probability, and `observed` the observed share; None if there is no score.
    """

    low: float
    high: float
    count: int
    probability: float | None
    observed: float | None


def reliability_of(probability: FloatArray, event: NDArray[np.bool_]) -> tuple[Bin, ...]:
    """Return the bins of (N,) probabilities of events."""
    in_bins = bin_numbers(probability) == np.arange(BINS)[:, None]
    return tuple(
        Bin(
            number / BINS,
            (number + 1) / BINS,
            int(rows.sum()),
            *(
                float(values[rows].mean()) if rows.any() else None
                for values in (probability, event)
            ),
        )
        for number, rows in enumerate(in_bins)
    )


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
