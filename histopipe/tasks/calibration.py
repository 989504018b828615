"""Calibration of probabilities: reliability, intercept and slope; and their net benefit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.intervals import FEWEST_PATIENTS, Interval, t_quantile

BINS = 10
_LIMIT = 1e-6
"""Probabilities are at least this far from 0 and 1, so that their log odds are finite."""
_STEPS = 50
_NET_BENEFIT_AT = tuple(round(0.02 * step, 2) for step in range(1, 50))


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
    number_of = bin_numbers(probability)
    bins = []
    for number in range(BINS):
        in_bin = number_of == number
        count = int(in_bin.sum())
        means = (
            (float(probability[in_bin].mean()), float(event[in_bin].mean()))
            if count
            else (None, None)
        )
        bins.append(Bin(number / BINS, (number + 1) / BINS, count, *means))
    return tuple(bins)


def bin_numbers(probability: FloatArray) -> NDArray[np.intp]:
    """Return the (N,) bins of probabilities, from 0."""
    return np.minimum((probability * BINS).astype(np.intp), BINS - 1)


@dataclass(frozen=True, slots=True)
class Recalibration:
    """Intercept and slope of the log odds of an event against those of its probability; None if undefined.

    Attributes:
        intercept: with a slope of 1: above 0 if the probabilities are too low ("calibration in the large").
        slope: below 1 if the probabilities are too extreme.
        intervals: 95 % confidence intervals, with the variance between patients.
    """

    intercept: float | None
    slope: float | None
    intervals: dict[str, Interval]


def recalibration(
    probability: FloatArray, event: NDArray[np.bool_], patient: NDArray[np.int32]
) -> Recalibration:
    """Return intercept and slope for (N,) probabilities, events and patients.

    Both are undefined with one outcome only; the slope also if probabilities separate the outcomes, or are all equal.

    Source:
        B. Van Calster et al., Calibration: the Achilles heel of predictive analytics, BMC Medicine 17 (2019).
    """
    kept = np.clip(probability, _LIMIT, 1 - _LIMIT)
    odds = np.log(kept / (1 - kept))
    if event.all() or not event.any():
        return Recalibration(None, None, {})
    ones = np.ones((len(odds), 1))
    large = _logistic(ones, odds, event, patient)
    separated = odds[event].min() >= odds[~event].max() or odds[event].max() <= odds[~event].min()
    both = None
    if not separated:
        both = _logistic(np.column_stack([ones, odds]), np.zeros(len(odds)), event, patient)
    fits = {"calibration_intercept": (large, 0), "calibration_slope": (both, 1)}
    patients = len(np.unique(patient))
    intervals = {}
    for name, (fit, place) in fits.items():
        if fit is not None and patients >= FEWEST_PATIENTS:
            value, error = fit[0][place], fit[1][place]
            half = t_quantile(patients - 1) * error
            intervals[name] = (float(value - half), float(value + half))
    return Recalibration(
        None if large is None else float(large[0][0]), None if both is None else float(both[0][1]),
        intervals,
    )  # fmt: skip


def _logistic(
    inputs: FloatArray, offset: FloatArray, event: NDArray[np.bool_], patient: NDArray[np.int32]
) -> tuple[FloatArray, FloatArray] | None:
    """Return the (K,) coefficients of a logistic regression and their standard errors; None if there are none.

    The errors are those of the sandwich estimator with patients as clusters.
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
    return weights, np.sqrt(np.maximum(np.diag(variance), 0.0))


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
    model, treat_all = [], []
    for limit in _NET_BENEFIT_AT:
        odds, treated = limit / (1 - limit), probability >= limit
        model.append(float((treated & event).mean() - (treated & ~event).mean() * odds))
        treat_all.append(float(event.mean() - (~event).mean() * odds))
    return DecisionCurve(_NET_BENEFIT_AT, tuple(model), tuple(treat_all))
