"""The figures of a set of scores, for any number of weightings of its patients at once: all 1 for the figures themselves, how often each was drawn for a bootstrap.

Equal to scikit-learn's, which would take a sort for each of a thousand resamples: here everything but the ROC curve is summed up by patient
first, and the scores are sorted once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.scores import Scores

Weights = NDArray[np.float64]
Values = NDArray[np.float64]

_SMALLEST = np.finfo(np.float64).eps


@dataclass(frozen=True, slots=True)
class _Curve:
    """One class against the rest, sorted by its probability.

    Attributes:
        patient: (N,) of the sorted scores.
        positive: (N,) bool.
        ties: where each run of equal scores begins.
    """

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
        """Area under the ROC curve for (P,) weights: how often a positive is above a negative; ties count half."""
        weight = weights[self.patient]
        ours = np.add.reduceat(weight * self.positive, self.ties)
        others = np.add.reduceat(weight * ~self.positive, self.ties)
        pairs = ours.sum() * others.sum()
        return float(ours @ (np.cumsum(others) - others / 2) / pairs) if pairs else np.nan


@dataclass(slots=True)
class Statistics:
    """Figures of scores as functions of (R, P) weights of the patients.

    Args:
        scores: of patches, slides or patients.
        decided: (N,) class numbers that were decided for.
        positive: number of the positive class where there are two; None averages over the classes that are there.
    """

    scores: Scores
    decided: NDArray[np.intp]
    positive: int | None
    patients: int = field(init=False)
    _confusion: NDArray[np.float64] = field(init=False)
    _sums: NDArray[np.float64] = field(init=False)
    _curves: dict[int, _Curve] = field(init=False)

    def __post_init__(self) -> None:
        scores = self.scores
        count, classes = scores.probability.shape
        self.patients = int(scores.patient.max()) + 1
        cell = (scores.patient * classes + scores.label) * classes + self.decided
        cells = np.bincount(cell, minlength=self.patients * classes**2)
        self._confusion = cells.reshape(self.patients, classes, classes).astype(np.float64)
        truth = scores.label[:, None] == np.arange(classes)
        squares = (scores.probability - truth) ** 2
        brier = squares.sum(axis=1) if self.positive is None else squares[:, self.positive]
        likelihood = scores.probability[np.arange(count), scores.label]
        surprise = -np.log(np.clip(likelihood, _SMALLEST, None))
        self._sums = np.stack(
            [np.bincount(scores.patient, values, self.patients) for values in (brier, surprise)]
        )
        present = self._confusion.sum(axis=(0, 2))
        self._curves = {
            number: _Curve.of(scores, number)
            for number in np.flatnonzero((present > 0) & (present < count)).tolist()
        }

    def confusion(self, weights: Weights) -> Values:
        """(R, C, C): rows are labels, columns decisions."""
        return np.asarray(np.einsum("rp,pld->rld", weights, self._confusion), np.float64)

    def areas(self, weights: Weights) -> Values:
        """(R, C) areas under the ROC curve of each class against the rest; NaN where there is none."""
        areas = np.full((len(weights), self._confusion.shape[1]), np.nan)
        for number, curve in self._curves.items():
            areas[:, number] = [curve.area(row) for row in weights]
        return areas

    def figures(self, weights: Weights) -> dict[str, Values]:
        """(R,) of each figure; NaN where it is not defined."""
        confusion = self.confusion(weights)
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "auc": self._auc(weights),
                "accuracy": _correct(confusion).sum(axis=1) / confusion.sum(axis=(1, 2)),
                # A class that is not there at all is not counted; one that a resample lacks makes it NaN.
                "balanced_accuracy": sensitivity(confusion)[:, self._present].mean(axis=1),
                "f1": self._of_positive(_f1(confusion)),
                "sensitivity": self._of_positive(sensitivity(confusion)),
                "specificity": self._of_positive(specificity(confusion)),
                "brier": self._mean(0, weights),
                "log_loss": self._mean(1, weights),
            }

    @property
    def _present(self) -> NDArray[np.bool_]:
        """(C,) which classes are there."""
        return np.asarray(self._confusion.sum(axis=(0, 2)) > 0, np.bool_)

    def _auc(self, weights: Weights) -> Values:
        if not self._curves:
            return np.full(len(weights), np.nan)
        if self.positive is not None:
            return np.array([self._curves[self.positive].area(row) for row in weights])
        return np.asarray(self.areas(weights)[:, list(self._curves)].mean(axis=1), np.float64)

    def _of_positive(self, by_class: Values) -> Values:
        """Of the positive class; of several, the mean over those that are there."""
        if self.positive is not None:
            return by_class[:, self.positive]
        return np.asarray(by_class[:, self._present].mean(axis=1), np.float64)

    def _mean(self, which: int, weights: Weights) -> Values:
        counts = self._confusion.sum(axis=(1, 2))
        return np.asarray(weights @ self._sums[which] / (weights @ counts), np.float64)


def _correct(confusion: Values) -> Values:
    """(R, C) the diagonal."""
    return np.asarray(np.diagonal(confusion, axis1=1, axis2=2), np.float64)


def sensitivity(confusion: Values) -> Values:
    """(R, C) share of each class that was decided for; NaN where it is not there."""
    with np.errstate(invalid="ignore"):
        return np.asarray(_correct(confusion) / confusion.sum(axis=2), np.float64)


def specificity(confusion: Values) -> Values:
    """(R, C) share of the others that was not taken for each class; NaN where there are no others."""
    others = confusion.sum(axis=(1, 2))[:, None] - confusion.sum(axis=2)
    taken = confusion.sum(axis=1) - _correct(confusion)
    with np.errstate(invalid="ignore"):
        return np.asarray(1 - taken / others, np.float64)


def _f1(confusion: Values) -> Values:
    """(R, C) harmonic mean of precision and sensitivity; NaN where a class neither is there nor was decided for."""
    return np.asarray(
        2 * _correct(confusion) / (confusion.sum(axis=1) + confusion.sum(axis=2)), np.float64
    )


def area_under_roc(label: NDArray[np.int32], probability: NDArray[np.float32]) -> float | None:
    """Area under the ROC curve, averaged over the classes that are there and are not all; None where there are not two.

    Args:
        label: (N,) int32 class numbers.
        probability: (N, C) float32.
    """
    if not np.isfinite(probability).all():
        return None
    one = np.zeros(len(label), np.int32)
    scores = Scores(label, probability.astype(np.float64), one, one.astype(np.int64))
    areas = Statistics(scores, one.astype(np.intp), None).areas(np.ones((1, 1)))[0]
    areas = areas[np.isfinite(areas)]
    return float(areas.mean()) if len(areas) >= 2 else None
