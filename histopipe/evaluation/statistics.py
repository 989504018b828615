"""Metrics of scores for many weightings of the patients at once, as a bootstrap needs them; and ROC curves.

Results are equal to those of scikit-learn, which would sort the scores for each resample. Here everything but the ROC curve is
summed by patient first, and scores are sorted once. Weights of 1 give the metrics themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.predictions import Scores

Weights = NDArray[np.float64]
Values = NDArray[np.float64]

_SMALLEST = np.finfo(np.float64).eps


@dataclass(frozen=True, slots=True)
class _Curve:
    """(N,) patients and labels of scores, sorted by the probability of one class; and the starts of equal scores."""

    patient: NDArray[np.int32]
    positive: NDArray[np.bool_]
    ties: NDArray[np.intp]

    @classmethod
    def of(cls, scores: Scores, number: int) -> _Curve:
        values = scores.probability[:, number]
        order = np.argsort(values, kind="stable")
        values = values[order]
        ties = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
        return cls(scores.patient[order], (scores.label == number)[order], ties)

    def area(self, weights: NDArray[np.float64]) -> float:
        """Return the area under the ROC curve for (P,) weights; ties count half."""
        weight = weights[self.patient]
        ours = np.add.reduceat(weight * self.positive, self.ties)
        others = np.add.reduceat(weight * ~self.positive, self.ties)
        pairs = ours.sum() * others.sum()
        return float(ours @ (np.cumsum(others) - others / 2) / pairs) if pairs else np.nan


class Statistics:
    """Metrics of scores as functions of (R, P) weights of the patients.

    `decided` are (N,) class numbers. `positive` is the positive class of two; None averages over the classes that occur.
    """

    def __init__(self, scores: Scores, decided: NDArray[np.intp], positive: int | None) -> None:
        self.positive = positive
        count, classes = scores.probability.shape
        self.patients = int(scores.patient.max()) + 1
        cell = (scores.patient * classes + scores.label) * classes + decided
        cells = np.bincount(cell, minlength=self.patients * classes**2)
        self._confusion = cells.reshape(self.patients, classes, classes).astype(np.float64)
        truth = scores.label[:, None] == np.arange(classes)
        squares = (scores.probability - truth) ** 2
        brier = squares.sum(axis=1) if positive is None else squares[:, positive]
        likelihood = scores.probability[np.arange(count), scores.label]
        surprise = -np.log(np.clip(likelihood, _SMALLEST, None))
        self._sums = np.stack(
            [np.bincount(scores.patient, values, self.patients) for values in (brier, surprise)]
        )
        occurs = self._confusion.sum(axis=(0, 2))
        self._present = occurs > 0  # (C,) bool
        against_others = np.flatnonzero(self._present & (occurs < count))
        self._curves = {number: _Curve.of(scores, number) for number in against_others.tolist()}

    def confusion(self, weights: Weights) -> Values:
        """Return (R, C, C) confusion matrices: rows are labels, columns decisions."""
        return np.asarray(np.einsum("rp,pld->rld", weights, self._confusion), np.float64)

    def areas(self, weights: Weights) -> Values:
        """Return (R, C) areas under the ROC curve of each class against the rest; NaN if undefined."""
        areas = np.full((len(weights), self._confusion.shape[1]), np.nan)
        for number, curve in self._curves.items():
            areas[:, number] = [curve.area(row) for row in weights]
        return areas

    def figures(self, weights: Weights) -> dict[str, Values]:
        """Return (R,) values of each metric; NaN if undefined."""
        confusion = self.confusion(weights)
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "auc": self._auc(weights),
                "accuracy": _correct(confusion).sum(axis=1) / confusion.sum(axis=(1, 2)),
                # A class that never occurs is not counted; a class that a resample lacks makes it NaN.
                "balanced_accuracy": sensitivity(confusion)[:, self._present].mean(axis=1),
                "f1": self._of_positive(_f1(confusion)),
                "sensitivity": self._of_positive(sensitivity(confusion)),
                "specificity": self._of_positive(specificity(confusion)),
                "brier": self._mean(0, weights),
                "log_loss": self._mean(1, weights),
            }

    def _auc(self, weights: Weights) -> Values:
        if not self._curves:
            return np.full(len(weights), np.nan)
        if self.positive is not None:
            return np.array([self._curves[self.positive].area(row) for row in weights])
        return np.asarray(self.areas(weights)[:, list(self._curves)].mean(axis=1), np.float64)

    def _of_positive(self, by_class: Values) -> Values:
        """Return values of the positive class; for more than two classes, the mean over those that occur."""
        if self.positive is not None:
            return by_class[:, self.positive]
        return np.asarray(by_class[:, self._present].mean(axis=1), np.float64)

    def _mean(self, which: int, weights: Weights) -> Values:
        counts = self._confusion.sum(axis=(1, 2))
        return np.asarray(weights @ self._sums[which] / (weights @ counts), np.float64)


def _correct(confusion: Values) -> Values:
    return np.asarray(np.diagonal(confusion, axis1=1, axis2=2), np.float64)


def sensitivity(confusion: Values) -> Values:
    """Return (R, C) sensitivity of each class; NaN if the class does not occur."""
    with np.errstate(invalid="ignore"):
        return np.asarray(_correct(confusion) / confusion.sum(axis=2), np.float64)


def specificity(confusion: Values) -> Values:
    """Return (R, C) specificity of each class; NaN if there is no other class."""
    others = confusion.sum(axis=(1, 2))[:, None] - confusion.sum(axis=2)
    taken = confusion.sum(axis=1) - _correct(confusion)
    with np.errstate(invalid="ignore"):
        return np.asarray(1 - taken / others, np.float64)


def _f1(confusion: Values) -> Values:
    """Return (R, C) F1 scores; NaN if a class neither occurs nor was decided."""
    both = confusion.sum(axis=1) + confusion.sum(axis=2)
    return np.asarray(2 * _correct(confusion) / both, np.float64)


def area_under_roc(label: NDArray[np.int32], probability: NDArray[np.float32]) -> float | None:
    """Return the area under the ROC curve, averaged over the classes that occur; None if there are fewer than two."""
    if not np.isfinite(probability).all():
        return None
    one = np.zeros(len(label), np.int32)
    scores = Scores(label, probability.astype(np.float64), one, one.astype(np.int64))
    areas = Statistics(scores, one.astype(np.intp), None).areas(np.ones((1, 1)))[0]
    areas = areas[np.isfinite(areas)]
    return float(areas.mean()) if len(areas) >= 2 else None


_BAND = (2.5, 97.5)
_RESAMPLES = 200
_GRID = np.linspace(0, 1, 101)


def bootstrap_draws(patients: int, resamples: int, seed: int) -> NDArray[np.float64]:
    """Return (R, P) how often each patient is drawn in a bootstrap: as many draws as patients, with replacement."""
    rng = np.random.default_rng(seed)
    share = np.full(patients, 1 / patients)
    return rng.multinomial(patients, share, size=resamples).astype(np.float64)


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
