"""Metrics of scores: values with confidence intervals, confusion matrix, calibration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.calibration import (
    Bin,
    DecisionCurve,
    Recalibration,
    decision_curve,
    recalibration,
    reliability_of,
)
from histopipe.evaluation.intervals import intervals_of, patients_notes, stored_intervals
from histopipe.evaluation.predictions import Scores
from histopipe.evaluation.statistics import (
    Statistics,
    Values,
    certainty,
    sensitivity,
    specificity,
)

FIGURES = (
    "auc", "average_precision", "balanced_accuracy", "accuracy", "f1", "sensitivity", "specificity", "brier", "log_loss",
    "calibration_error", "calibration_intercept", "calibration_slope",
)  # fmt: skip
_MAX_UNDEFINED = 0.05


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """Metrics of one class against the rest; None if undefined."""

    count: int
    auc: float | None
    sensitivity: float | None
    specificity: float | None
    average_precision: float | None = None
    calibration_intercept: float | None = None
    calibration_slope: float | None = None


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
        calibration_error: expected calibration error: mean difference between probability and observed share, over the
            bins of `reliability`.
        threshold: lowest probability for which the positive class of two is decided; None if the most probable class is
            decided, or if several thresholds were used.
        intervals: 95 % confidence intervals by metric, from resampling patients; only where defined.
        confusion: rows are labels, columns decisions.
        classes: metrics by class name.
        reliability: bins of the probability of the positive class; for more than two classes, of the most probable one.
        notes: remarks on the metrics.
        average_precision: area under the precision-recall curve, as a sum over its steps; for more than two classes,
            the mean of each class against the rest.
        calibration_intercept, calibration_slope: see `Recalibration`; of the positive class of two.
        decision_curve: net benefit of the positive class of two.
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
    # Not in metrics of earlier versions.
    average_precision: float | None = None
    calibration_intercept: float | None = None
    calibration_slope: float | None = None
    decision_curve: DecisionCurve | None = None

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
        parts: dict[str, Any] = {
            **stored_intervals(value),
            "confusion": tuple(map(tuple, value["confusion"])),
            "classes": {name: ClassMetrics(**fields) for name, fields in value["classes"].items()},
            "reliability": tuple(Bin(**fields) for fields in value["reliability"]),
        }
        curve = value.get("decision_curve")
        if curve is not None:
            parts["decision_curve"] = DecisionCurve(
                **{name: tuple(it) for name, it in curve.items()}
            )
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
    decided = decide(scores, positive, threshold)
    statistics = Statistics(scores, decided, positive)
    weights = np.ones((1, statistics.patients))
    figures = {name: _known(values[0]) for name, values in statistics.figures(weights).items()}
    patients = len(np.unique(scores.patient))
    intervals, undefined = intervals_of(statistics, draws[:, : statistics.patients], patients)
    recalibrated = [recalibration_of(scores, number) for number in range(len(classes))]
    curve = None
    if positive is not None:
        own = recalibrated[positive]
        figures |= {"calibration_intercept": own.intercept, "calibration_slope": own.slope}
        if intervals:
            intervals |= own.intervals
        curve = decision_curve(scores.probability[:, positive], scores.label == positive)
    remarks = [*notes, *_notes(scores, classes, undefined)]
    remarks += patients_notes(patients) if len(draws) else []
    return Metrics(
        count=len(scores.label), patients=patients, **figures,
        threshold=float(threshold) if isinstance(threshold, int | float) else None,
        intervals={name: ends for name, ends in intervals.items() if figures[name] is not None},
        confusion=tuple(map(tuple, statistics.confusion(weights)[0].astype(int).tolist())),
        classes=_by_class(statistics, classes, weights, recalibrated),
        reliability=reliability_of(*certainty(scores, positive)), notes=tuple(remarks),
        decision_curve=curve,
    )  # fmt: skip


def recalibration_of(scores: Scores, number: int) -> Recalibration:
    """Return intercept and slope of the probability of a class."""
    return recalibration(scores.probability[:, number], scores.label == number, scores.patient)


def _notes(scores: Scores, classes: tuple[str, ...], undefined: float) -> list[str]:
    missing = [name for number, name in enumerate(classes) if number not in scores.label]
    notes = []
    if missing:
        notes.append(f"missing class{'es' if missing[1:] else ''}: {', '.join(missing)}")
    if scores.left_out:
        notes.append(f"{scores.left_out} excluded, because they have several labels")
    if not missing and undefined > _MAX_UNDEFINED:
        notes.append(f"{undefined:.0%} of the resamples lack a class: excluded from the intervals")
    return notes


def _by_class(
    statistics: Statistics,
    classes: tuple[str, ...],
    weights: Values,
    recalibrated: Sequence[Recalibration],
) -> dict[str, ClassMetrics]:
    confusion = statistics.confusion(weights)
    areas, precisions = (it[0] for it in statistics.areas(weights))
    sensitivities, specificities = sensitivity(confusion)[0], specificity(confusion)[0]
    counts = confusion[0].sum(axis=1).astype(int).tolist()
    found = {}
    for i, name in enumerate(classes):
        found[name] = ClassMetrics(
            counts[i], _known(areas[i]), _known(sensitivities[i]), _known(specificities[i]),
            _known(precisions[i]), recalibrated[i].intercept, recalibrated[i].slope,
        )  # fmt: skip
    return found


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
