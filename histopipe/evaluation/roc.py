"""ROC curves with confidence bands from resampling patients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.metrics import bootstrap_draws
from histopipe.evaluation.scores import Scores

_BAND = (2.5, 97.5)
_RESAMPLES = 200
_GRID = np.linspace(0, 1, 101)


@dataclass(frozen=True, slots=True)
class Roc:
    """ROC curve of one class against the rest.

    Attributes:
        false_positive, true_positive: (K,) rates at decreasing thresholds, from (0, 0) to (1, 1).
        grid: (G,) false positive rates of the band.
        low, high: (G,) 95 % band of the true positive rate; None for a single patient, or if most resamples lack a class.
    """

    false_positive: NDArray[np.float64]
    true_positive: NDArray[np.float64]
    grid: NDArray[np.float64]
    low: NDArray[np.float64] | None
    high: NDArray[np.float64] | None


def roc_of(scores: Scores, number: int, *, patients: int, seed: int) -> Roc | None:
    """Return the curve of the class with this number; None if all scores, or none, are of this class."""
    positive = scores.label == number
    if positive.all() or not positive.any():
        return None
    order = np.argsort(-scores.probability[:, number], kind="stable")
    positive, patient = positive[order], scores.patient[order]
    values = scores.probability[order, number]
    # Equal scores form one step of the curve.
    ends = np.append(np.flatnonzero(values[1:] != values[:-1]), len(values) - 1)
    everyone = _rates(positive, ends, np.ones(len(values)))
    low = high = None
    if len(np.unique(patient)) > 1:
        found = []
        for draw in bootstrap_draws(patients, _RESAMPLES, seed):
            weight = draw[patient]
            if weight[positive].any() and weight[~positive].any():
                false_rate, true_rate = _rates(positive, ends, weight)
                found.append(_at(_GRID, false_rate, true_rate))
        if len(found) > _RESAMPLES // 2:
            low, high = np.percentile(found, _BAND, axis=0)
    return Roc(*everyone, _GRID, low, high)


def _rates(
    positive: NDArray[np.bool_], ends: NDArray[np.intp], weight: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    ours, others = np.cumsum(weight * positive)[ends], np.cumsum(weight * ~positive)[ends]
    return np.append(0.0, others / others[-1]), np.append(0.0, ours / ours[-1])


def _at(
    grid: NDArray[np.float64], false_rate: NDArray[np.float64], true_rate: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return true positive rates at false positive rates; the upper end of vertical steps."""
    last = np.searchsorted(false_rate, grid, side="right") - 1
    following = np.minimum(last + 1, len(false_rate) - 1)
    width = false_rate[following] - false_rate[last]
    share = np.divide(grid - false_rate[last], width, out=np.zeros_like(grid), where=width > 0)
    return np.asarray(true_rate[last] + share * (true_rate[following] - true_rate[last]))
