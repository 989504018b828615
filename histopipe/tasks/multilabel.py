"""Several labels, each 0 or 1 or missing: the task, and metrics for many weightings of the patients at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo
from histopipe.system.arrays import FloatArray
from histopipe.system.output import listed
from histopipe.tasks.calibration import Recalibration, recalibration
from histopipe.tasks.intervals import Interval, WeightedStatistics, mean_interval
from histopipe.tasks.predictions import choose_threshold
from histopipe.tasks.statistics import Statistics
from histopipe.tasks.task import (
    ColumnTask,
    Details,
    Scores,
    Target,
    Thresholds,
    few_patients,
    flag_cell,
)

METRICS = (
    "auc", "average_precision", "balanced_accuracy", "sensitivity", "specificity", "f1", "brier", "calibration_error",
)  # fmt: skip


class MultilabelStatistics(WeightedStatistics):
    """Metrics as functions of (R, P) weights of the patients, for each label and their mean.

    Args:
        target: (N, T) 0, 1, or NaN, which is left out.
        output: (N, T) probabilities.
        columns: names of the labels.
        thresholds: (N, T) or (T,) lowest probabilities for which a label is decided.
        patient: (N,) numbers of the patients.
    """

    def __init__(
        self,
        target: NDArray[np.float64],
        output: NDArray[np.float64],
        columns: Sequence[str],
        thresholds: NDArray[np.float64],
        patient: NDArray[np.int32],
    ) -> None:
        self.patients = int(patient.max()) + 1
        self._names = tuple(columns)
        limits = np.broadcast_to(thresholds, output.shape)
        self._labels: list[Statistics | None] = []
        for number in range(len(columns)):
            labelled = np.isfinite(target[:, number])
            label, probability = target[labelled, number].astype(np.int32), output[labelled, number]
            both = np.stack([1 - probability, probability], axis=1).astype(np.float64)
            decided = (probability >= limits[labelled, number]).astype(np.intp)
            self._labels.append(
                Statistics(label, both, patient[labelled], decided, 1) if labelled.any() else None
            )

    def compute(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return (R,) means of each metric over the labels, and of each label as `metric:label`; NaN if undefined."""
        undefined = dict.fromkeys(METRICS, np.full(len(weights), np.nan))
        each = [
            undefined if label is None else label.compute(weights[:, : label.patients])
            for label in self._labels
        ]
        metric_values = {
            name: np.mean([label_values[name] for label_values in each], axis=0) for name in METRICS
        }
        for name, values in zip(self._names, each, strict=True):
            metric_values |= {f"{metric}:{name}": values[metric] for metric in METRICS}
        return metric_values

    def better_intervals(
        self, weights: FloatArray, values: Mapping[str, FloatArray]
    ) -> dict[str, Interval]:
        """Return intervals of each label, and of the means over the labels; see `Statistics.better_intervals`."""
        each: list[Mapping[str, Interval]] = []
        for name, label in zip(self._names, self._labels, strict=True):
            label_values = {title: values[f"{title}:{name}"] for title in METRICS}
            each.append(
                {}
                if label is None
                else label.better_intervals(weights[:, : label.patients], label_values)
            )
        all_intervals = {}
        for metric in METRICS:
            mean = mean_interval([intervals.get(metric) for intervals in each])
            if mean is not None:
                all_intervals[metric] = mean
            for name, intervals in zip(self._names, each, strict=True):
                if metric in intervals:
                    all_intervals[f"{metric}:{name}"] = intervals[metric]
        return all_intervals


def recalibrated_labels(
    target: NDArray[np.float64],
    output: NDArray[np.float64],
    columns: Sequence[str],
    patient: NDArray[np.int32],
) -> tuple[dict[str, float | None], dict[str, Interval]]:
    """Return calibration intercept and slope of each label and their means, and intervals; see `recalibration`.

    Means are undefined if the value of a label is. For the arguments see `MultilabelStatistics`.
    """
    each: dict[str, Recalibration] = {}
    for number, name in enumerate(columns):
        labelled = np.isfinite(target[:, number])
        if labelled.any():
            each[name] = recalibration(
                output[labelled, number], target[labelled, number] == 1, patient[labelled]
            )
    metric_values: dict[str, float | None] = {}
    intervals: dict[str, Interval] = {}
    for metric in ("calibration_intercept", "calibration_slope"):
        by_label = {
            name: getattr(fit, metric.removeprefix("calibration_")) for name, fit in each.items()
        }
        values = [by_label.get(name) for name in columns]
        metric_values[metric] = None if None in values else float(np.mean(values))  # type: ignore[arg-type]
        mean = mean_interval([fit.intervals.get(metric) for fit in each.values()])
        if mean is not None and metric_values[metric] is not None:
            intervals[metric] = mean
        for name in columns:
            metric_values[f"{metric}:{name}"] = by_label.get(name)
            if name in each and metric in each[name].intervals:
                intervals[f"{metric}:{name}"] = each[name].intervals[metric]
    return metric_values, intervals


@dataclass(frozen=True, slots=True)
class Multilabel(ColumnTask):
    """Several labels, each 0 or 1 or missing."""

    name = "multilabel"
    prefix = "p_"
    main: ClassVar[Mapping[str, str]] = {"auc": "AUC", "balanced_accuracy": "bal. acc."}
    plain: ClassVar[Mapping[str, str]] = {
        "sensitivity": "sens.",
        "specificity": "spec.",
        "f1": "F1",
        "brier": "Brier",
    }
    by_subgroup = ("auc", "average_precision", "calibration_error")
    compared = ("auc", "balanced_accuracy", "brier")

    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return 0, 1 or NaN for each label; None if all are missing."""
        values = tuple(flag_cell(cells[name], f"{where}: {name}") for name in self.columns)
        return None if all(map(math.isnan, values)) else values

    def strata(self, targets: FloatArray) -> list[str]:
        """Return the rarest label of each slide; see `assignment.assign_labels`, which uses all labels."""
        count = np.nansum(targets, axis=0)
        order = np.argsort(count, kind="stable").tolist()
        return [
            next((self.columns[i] for i in order if row[i] == 1), "none of the labels")
            for row in targets
        ]

    def check(self, targets: FloatArray, subset: str) -> None:
        """Check that each label has both values."""
        for number, name in enumerate(self.columns):
            values = targets[:, number]
            finite_values = values[np.isfinite(values)]
            if not ((finite_values == 0).any() and (finite_values == 1).any()):
                raise NothingToDo(
                    f"column {name} cannot be learned: {subset}",
                    found=f"{int(finite_values.sum())} of {len(finite_values)} with 1", expected="both 0 and 1",
                    todo="leave the column out, or add slides",
                )  # fmt: skip

    def summary(self, targets: FloatArray) -> str:
        """Return the number of slides with each label."""
        labelled = np.isfinite(targets).sum(axis=0)
        positives = np.nansum(targets, axis=0).astype(int)
        return ", ".join(
            f"{name} {a} of {b}"
            for name, a, b in zip(self.columns, positives, labelled, strict=True)
        )

    @property
    def outcome(self) -> str:
        """A sentence on what is predicted."""
        return f"The outcomes are the labels {listed(self.columns)}."

    @property
    def predicted(self) -> str:
        """What the model returns."""
        return f"a probability for each label ({listed(self.columns)})"

    def statistics(self, scores: Scores) -> WeightedStatistics:
        """Return the metrics of labels."""
        limits = scores.limits if scores.limits.shape[1] else np.full(len(self.columns), 0.5)
        return MultilabelStatistics(
            scores.target, scores.output, self.columns, limits, scores.patient
        )

    def thresholds(self, scores: Scores, rule: str) -> Thresholds:
        """Return a threshold for each label."""
        return Thresholds(tuple(
            choose_threshold(label[rows] == 1, output[rows], rule)[0]
            for label, output in zip(scores.target.T, scores.output.T, strict=True)
            for rows in (np.isfinite(label),)
        ))  # fmt: skip

    def details(self, scores: Scores, statistics: WeightedStatistics) -> Details:
        """Return calibration intercepts and slopes."""
        values, intervals = recalibrated_labels(
            scores.target, scores.output, self.columns, scores.patient
        )
        return Details(values, intervals, few=few_patients(self.columns, scores))
