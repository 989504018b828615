"""Metrics of scores: values with confidence intervals, confusion matrix, calibration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.predictions import Scores
from histopipe.evaluation.statistics import Statistics, Values, sensitivity, specificity
from histopipe.system.result import counted

FIGURES = (
    "auc", "balanced_accuracy", "accuracy", "f1", "sensitivity", "specificity", "brier", "log_loss",
)  # fmt: skip
BINS = 10
_TAIL = 0.025
_MIN_PATIENTS = 10
_MAX_UNDEFINED = 0.05


class WeightedStatistics(Protocol):
    """Metrics of predictions as functions of weights of the patients."""

    patients: int

    def figures(self, weights: Values) -> Mapping[str, Values]:
        """Return (R,) values of each metric for (R, P) weights; NaN if undefined."""


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """Metrics of one class against the rest; None if undefined."""

    count: int
    auc: float | None
    sensitivity: float | None
    specificity: float | None


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


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of patches, slides or patients. None if a metric is undefined, such as the AUC of one class.

    Attributes:
        count: number of patches, slides or patients.
        patients: number of patients.
        auc: area under the ROC curve; for more than two classes, the mean of each class against the rest.
        balanced_accuracy: mean sensitivity of the classes that occur.
        accuracy: share of correct decisions.
        f1, sensitivity, specificity: of the positive class; for more than two classes, the mean of those that occur.
        brier: mean squared error of the probability of the positive class; for more than two classes, summed over classes.
        log_loss: mean of -ln of the probability of the true class.
        calibration_error: mean difference between probability and observed share, over the bins of `reliability`.
        threshold: lowest probability for which the positive class of two is decided; None if the most probable class is
            decided, or if several thresholds were used.
        intervals: 95 % confidence intervals by metric, from resampling patients; only where defined.
        confusion: rows are labels, columns decisions.
        classes: metrics by class name.
        reliability: bins of the probability of the positive class; for more than two classes, of the most probable one.
        notes: remarks on the metrics.
    """

    count: int
    patients: int
    auc: float | None
    balanced_accuracy: float | None
    accuracy: float | None
    f1: float | None
    sensitivity: float | None
    specificity: float | None
    brier: float | None
    log_loss: float | None
    calibration_error: float | None
    threshold: float | None
    intervals: Mapping[str, tuple[float, float]]
    confusion: tuple[tuple[int, ...], ...]
    classes: Mapping[str, ClassMetrics]
    reliability: tuple[Bin, ...]
    notes: tuple[str, ...]

    @property
    def figures(self) -> dict[str, float | None]:
        """The metrics that have intervals, by name."""
        return {name: getattr(self, name) for name in FIGURES}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Metrics:
        """Create the metrics from the result of `to_json`.

        Raises:
            KeyError, TypeError: the value has the wrong form.
        """
        parts = {
            "intervals": {name: tuple(ends) for name, ends in value["intervals"].items()},
            "confusion": tuple(map(tuple, value["confusion"])),
            "classes": {name: ClassMetrics(**fields) for name, fields in value["classes"].items()},
            "reliability": tuple(Bin(**fields) for fields in value["reliability"]),
            "notes": tuple(value["notes"]),
        }
        return cls(**{**value, **parts})


def decide(
    scores: Scores, positive: int | None, threshold: float | NDArray[np.float64] | None
) -> NDArray[np.intp]:
    """Return (N,) decided class numbers, by the threshold of the positive class, or else the most probable class."""
    if positive is None or threshold is None:
        return np.asarray(np.argmax(scores.probability, axis=1), np.intp)
    return np.where(scores.probability[:, positive] >= threshold, positive, 1 - positive)


def metrics_of(
    scores: Scores,
    classes: tuple[str, ...],
    *,
    positive: int | None,
    threshold: float | NDArray[np.float64] | None,
    draws: NDArray[np.float64],
    notes: tuple[str, ...] = (),
) -> Metrics:
    """Compute all metrics of at least one score.

    `positive` is None for more than two classes. `threshold` is one for all scores, or one per score. `draws` are from
    `bootstrap_draws`.
    """
    statistics = Statistics(scores, decide(scores, positive, threshold), positive)
    weights = np.ones((1, statistics.patients))
    figures = {name: _known(values[0]) for name, values in statistics.figures(weights).items()}
    patients = len(np.unique(scores.patient))
    intervals, undefined = intervals_of(statistics, draws[:, : statistics.patients], patients)
    reliability = _reliability(scores, positive)
    remarks = [*notes, *_notes(scores, classes, patients if len(draws) else None, undefined)]
    return Metrics(
        count=len(scores.label), patients=patients, **figures,
        calibration_error=_calibration_error(reliability),
        threshold=float(threshold) if isinstance(threshold, int | float) else None,
        intervals={name: ends for name, ends in intervals.items() if figures[name] is not None},
        confusion=tuple(map(tuple, statistics.confusion(weights)[0].astype(int).tolist())),
        classes=_by_class(statistics, classes, weights), reliability=reliability, notes=tuple(remarks),
    )  # fmt: skip


def interval_of(values: Values, patients: int) -> tuple[float, float] | None:
    """Return the 95 % confidence interval from values of resamples; None if fewer than half of them are defined.

    Plain percentiles are too narrow for few patients, so they are expanded as a t interval expands a normal one.
    Undefined values are NaN. There must be at least two patients.

    Source:
        T. Hesterberg, What teachers should know about the bootstrap, The American Statistician 69 (2015), "expanded percentile".
    """
    # Imported late, so that `--help` is fast. `scipy.stats` has the same functions, but takes 0.6 s to load.
    from scipy.special import ndtr, stdtrit

    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or not len(defined):
        return None
    width = math.sqrt(patients / (patients - 1)) * stdtrit(patients - 1, 1 - _TAIL)
    low, high = np.quantile(defined, [ndtr(-width), ndtr(width)])
    return float(low), float(high)


def intervals_of(
    statistics: WeightedStatistics, draws: NDArray[np.float64], patients: int
) -> tuple[dict[str, tuple[float, float]], float]:
    """Return intervals by metric, and the largest share of resamples for which a metric is undefined."""
    if not len(draws) or patients < 2:
        return {}, 0.0
    figures = statistics.figures(draws)
    ends = {name: interval_of(values, patients) for name, values in figures.items()}
    undefined = max(float(np.isnan(values).mean()) for values in figures.values())
    return {name: interval for name, interval in ends.items() if interval is not None}, undefined


def _notes(
    scores: Scores, classes: tuple[str, ...], patients: int | None, undefined: float
) -> list[str]:
    missing = [name for number, name in enumerate(classes) if number not in scores.label]
    notes = []
    if missing:
        notes.append(f"missing class{'es' if missing[1:] else ''}: {', '.join(missing)}")
    if scores.left_out:
        notes.append(f"{scores.left_out} excluded, because their patches have several labels")
    if patients is not None and patients < _MIN_PATIENTS:
        notes.append(f"confidence intervals are unreliable: only {counted(patients, 'patient')}")
    if not missing and undefined > _MAX_UNDEFINED:
        notes.append(f"{undefined:.0%} of the resamples lack a class: excluded from the intervals")
    return notes


def _by_class(
    statistics: Statistics, classes: tuple[str, ...], weights: Values
) -> dict[str, ClassMetrics]:
    confusion, areas = statistics.confusion(weights), statistics.areas(weights)[0]
    sensitivities, specificities = sensitivity(confusion)[0], specificity(confusion)[0]
    counts = confusion[0].sum(axis=1).astype(int).tolist()
    return {
        name: ClassMetrics(
            counts[i], _known(areas[i]), _known(sensitivities[i]), _known(specificities[i])
        )
        for i, name in enumerate(classes)
    }


def _reliability(scores: Scores, positive: int | None) -> tuple[Bin, ...]:
    if positive is None:
        probability = scores.probability.max(axis=1)
        positives = scores.probability.argmax(axis=1) == scores.label
    else:
        probability, positives = scores.probability[:, positive], scores.label == positive
    bin_number = np.minimum((probability * BINS).astype(int), BINS - 1)
    bins = []
    for number in range(BINS):
        in_bin = bin_number == number
        count = int(in_bin.sum())
        means = (
            (float(probability[in_bin].mean()), float(positives[in_bin].mean()))
            if count
            else (None, None)
        )
        bins.append(Bin(number / BINS, (number + 1) / BINS, count, *means))
    return tuple(bins)


def _calibration_error(reliability: tuple[Bin, ...]) -> float:
    total = sum(bin_.count for bin_ in reliability)
    return sum(
        bin_.count * abs(bin_.probability - bin_.observed) / total
        for bin_ in reliability
        if bin_.probability is not None and bin_.observed is not None
    )


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
