"""Metrics of several labels, each 0 or 1, for many weightings of the patients at once, for the bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.calibration import Recalibration, recalibration
from histopipe.evaluation.intervals import Interval, mean_interval
from histopipe.evaluation.predictions import Scores
from histopipe.evaluation.statistics import Statistics

Weights = NDArray[np.float64]
Values = NDArray[np.float64]
FIGURES = (
    "auc", "average_precision", "balanced_accuracy", "sensitivity", "specificity", "f1", "brier", "calibration_error",
)  # fmt: skip


class MultilabelStatistics:
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
            known = np.isfinite(target[:, number])
            scores = label_scores(target[known, number], output[known, number], patient[known])
            decided = (output[known, number] >= limits[known, number]).astype(np.intp)
            self._labels.append(Statistics(scores, decided, 1) if known.any() else None)

    def figures(self, weights: Weights) -> dict[str, Values]:
        """Return (R,) means of each metric over the labels, and of each label as `metric:label`; NaN if undefined."""
        undefined = dict.fromkeys(FIGURES, np.full(len(weights), np.nan))
        each = [
            undefined if label is None else label.figures(weights[:, : label.patients])
            for label in self._labels
        ]
        found = {name: np.mean([it[name] for it in each], axis=0) for name in FIGURES}
        for name, values in zip(self._names, each, strict=True):
            found |= {f"{figure}:{name}": values[figure] for figure in FIGURES}
        return found

    def better_intervals(
        self, weights: Weights, figures: Mapping[str, Values]
    ) -> dict[str, Interval]:
        """Return intervals of each label, and of the means over the labels; see `Statistics.better_intervals`."""
        each: list[Mapping[str, Interval]] = []
        for name, label in zip(self._names, self._labels, strict=True):
            own = {figure: figures[f"{figure}:{name}"] for figure in FIGURES}
            each.append(
                {} if label is None else label.better_intervals(weights[:, : label.patients], own)
            )
        found = {}
        for figure in FIGURES:
            mean = mean_interval([it.get(figure) for it in each])
            if mean is not None:
                found[figure] = mean
            for name, intervals in zip(self._names, each, strict=True):
                if figure in intervals:
                    found[f"{figure}:{name}"] = intervals[figure]
        return found


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
        known = np.isfinite(target[:, number])
        if known.any():
            each[name] = recalibration(
                output[known, number], target[known, number] == 1, patient[known]
            )
    figures: dict[str, float | None] = {}
    intervals: dict[str, Interval] = {}
    for figure in ("calibration_intercept", "calibration_slope"):
        own = {name: getattr(it, figure.removeprefix("calibration_")) for name, it in each.items()}
        values = [own.get(name) for name in columns]
        figures[figure] = None if None in values else float(np.mean(values))  # type: ignore[arg-type]
        mean = mean_interval([it.intervals.get(figure) for it in each.values()])
        if mean is not None and figures[figure] is not None:
            intervals[figure] = mean
        for name in columns:
            figures[f"{figure}:{name}"] = own.get(name)
            if name in each and figure in each[name].intervals:
                intervals[f"{figure}:{name}"] = each[name].intervals[figure]
    return figures, intervals


def label_scores(
    target: NDArray[np.float64], probability: NDArray[np.float64], patient: NDArray[np.int32]
) -> Scores:
    """Return (N,) values of one label as scores of two classes."""
    both = np.stack([1 - probability, probability], axis=1).astype(np.float64)
    return Scores(target.astype(np.int32), both, patient, np.arange(len(target)))
