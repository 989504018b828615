"""Several labels, each 0 or 1 or missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from histopipe.errors import NothingToDo
from histopipe.system.arrays import FloatArray
from histopipe.tasks.calibration import CALIBRATION, recalibration
from histopipe.tasks.classification import Classification
from histopipe.tasks.intervals import column_intervals
from histopipe.tasks.predictions import EVEN, Predictions, Thresholds
from histopipe.tasks.statistics import ColumnStatistics
from histopipe.tasks.task import Target, Task, flag_cell

METRICS = (
    "auc",
    "average_precision",
    "balanced_accuracy",
    "sensitivity",
    "specificity",
    "f1",
    "brier",
    "calibration_error",
)
_BINARY = Classification(classes=("0", "1"))
"""The task of a single label."""


@dataclass(frozen=True, slots=True)
class Multilabel(Task):
    """Several labels, each 0 or 1 or missing."""

    name = "multilabel"
    stratum = "label"
    read_cell = staticmethod(flag_cell)
    probabilities = True
    outcome_text = "The outcomes are the labels {}."
    predicted_text = "a probability for each label ({})"
    main: ClassVar[Mapping[str, str]] = {"auc": "AUC", "balanced_accuracy": "bal. acc."}
    plain: ClassVar[Mapping[str, str]] = {
        "sensitivity": "sens.",
        "specificity": "spec.",
        "f1": "F1",
        "brier": "Brier",
    }
    by_subgroup = ("auc", "average_precision", "calibration_error")
    compared = ("auc", "balanced_accuracy", "brier")
    has_thresholds = True

    @property
    def flags(self) -> tuple[str, ...]:
        """All columns."""
        return self.columns

    def strata(self, targets: FloatArray) -> list[str]:
        """Return the rarest label of each slide; see `assignment.assign_labels`, which uses all labels."""
        order = np.argsort(np.nansum(targets, axis=0), kind="stable").tolist()
        return [
            next((self.columns[i] for i in order if row[i] == 1), "none of the labels")
            for row in targets
        ]

    def names_to_balance(
        self, strata: Sequence[str], slides: Sequence[tuple[str, Target | None]]
    ) -> tuple[list[set[str]], tuple[str, ...], tuple[str, ...]]:
        """Return the values of the labels of each slide, and all values of all labels."""
        names = [
            {
                f"{column} {value:g}"
                for column, value in zip(self.columns, target or (), strict=True)
            }
            for _, target in slides
        ]
        return names, tuple(f"{column} {value}" for column in self.columns for value in (0, 1)), ()

    def check(self, targets: FloatArray, subset: str) -> None:
        """Check that each label has both values."""
        for name, values in self.finite_targets(targets).items():
            if not ((values == 0).any() and (values == 1).any()):
                raise NothingToDo(
                    f"column {name} cannot be learned: {subset}",
                    found=f"{int(values.sum())} of {len(values)} with 1",
                    expected="both 0 and 1",
                    todo="leave the column out, or add slides",
                )

    def summary(self, targets: FloatArray) -> str:
        """Return the number of slides with each label."""
        return ", ".join(
            f"{name} {int(values.sum())} of {len(values)}"
            for name, values in self.finite_targets(targets).items()
        )

    def classifications(self, predictions: Predictions) -> Iterator[tuple[str, Predictions]]:
        """Yield each label with its predictions, as those of the classes 0 and 1."""
        for name, column in predictions.by_column():
            output = np.hstack([1 - column.output, column.output])
            # Without a threshold, a probability of 0.5 decides for 1: the first of equal classes would be 0.
            limits = column.limits if column.limits.shape[1] else np.full((len(column), 1), EVEN)
            yield name, replace(column, task=_BINARY, output=output, limits=limits)

    def statistics(self, scores: Predictions) -> ColumnStatistics:
        """Return the metrics of labels."""
        labels = {
            name: _BINARY.statistics(label) if len(label) else None
            for name, label in self.classifications(scores)
        }
        return ColumnStatistics(labels, METRICS, METRICS, int(scores.patient.max()) + 1)

    def thresholds(self, scores: Predictions, rule: str) -> Thresholds:
        """Return a threshold for each label."""
        labels = self.classifications(scores)
        return Thresholds(tuple(_BINARY.thresholds(label, rule).values[0] for _, label in labels))

    def details(self, scores: Predictions, statistics: ColumnStatistics) -> dict[str, Any]:
        """Return calibration intercept and slope of each label, and their means; undefined if the value of a label is."""
        values: dict[str, float | None] = {}
        calibrations = {
            name: recalibration(label.output[:, 1], label.label == 1, label.patient)
            for name, label in self.classifications(scores)
        }
        for metric in CALIBRATION:
            by_label = {name: of_label[metric] for name, (of_label, _) in calibrations.items()}
            defined = [value for value in by_label.values() if value is not None]
            values[metric] = float(np.mean(defined)) if len(defined) == len(by_label) else None
            values |= {f"{metric}:{name}": value for name, value in by_label.items()}
        return {
            "values": values,
            "intervals": column_intervals(
                CALIBRATION, {name: ends for name, (_, ends) in calibrations.items()}
            ),
        }
