"""Classification, and multilabel classification: one of the classes, or several labels, each 0, 1 or missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.system.arrays import FloatArray
from histopipe.system.table_cells import nfc
from histopipe.tasks.choices import AGGREGATIONS, Aggregation
from histopipe.tasks.curves import CALIBRATION, decision_curve, recalibration, reliability_of
from histopipe.tasks.intervals import column_intervals, finite_or_none
from histopipe.tasks.metrics import ClassMetrics
from histopipe.tasks.predictions import (
    EVEN,
    NO_THRESHOLDS,
    EvaluationSettings,
    Predictions,
    Thresholds,
    choose_threshold,
    labels_of,
)
from histopipe.tasks.statistics import (
    ClassStatistics,
    ColumnStatistics,
    area_under_roc,
    confidence_of,
    sensitivity,
    specificity,
)
from histopipe.tasks.task import Target, Task, flag_cell, group_means


@dataclass(frozen=True, slots=True)
class Classification(Task):
    """One of several classes. `positive_class` is the positive one of two; None for the last."""

    name = "classification"
    stratum = "class"
    settings = ()
    aggregations = AGGREGATIONS
    main: ClassVar[Mapping[str, str]] = {"auc": "AUC", "balanced_accuracy": "bal. acc."}
    plain: ClassVar[Mapping[str, str]] = {
        "accuracy": "acc.",
        "sensitivity": "sens.",
        "specificity": "spec.",
        "f1": "F1",
        "brier": "Brier",
    }
    by_subgroup = ("auc", "average_precision", "sensitivity", "specificity", "calibration_error")
    compared = ("auc", "balanced_accuracy", "brier")
    target_names = ("label", "predicted")  # the true, and the most probable class
    of_classes = by_class = probabilities = True
    several = "labels"
    undefined = "lack a class"
    outcome_text = "The outcome is the class {}."
    predicted_text = "a probability for each class ({}); they sum to 1"
    columns: tuple[str, ...] = ("label",)
    classes: tuple[str, ...] = ()
    positive_class: str | None = None

    @property
    def positive(self) -> int | None:
        """Number of the positive class; None for more than two classes.

        Raises:
            UsageError: the class is unknown, or there are not exactly two classes.
        """
        names, positive = [nfc(name) for name in self.classes], self.positive_class
        two = len(names) == 2
        if positive is not None and (nfc(positive) not in names or not two):
            raise UsageError(
                "--positive",
                found=repr(positive),
                expected=" or ".join(self.classes)
                if two
                else "no positive class: "
                f"there are {len(names)} classes, each evaluated against the rest",
            )
        number = 1 if positive is None else names.index(nfc(positive))
        return number if two else None

    def with_settings(self, settings: EvaluationSettings) -> Self:
        """Return the task with the positive class of the settings."""
        return replace(self, positive_class=settings.positive)

    # Targets.

    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return the number of the class; None for an empty or unknown label."""
        label = cells["label"]
        return (float(self.classes.index(label)),) if label in self.classes else None

    def strata(self, targets: FloatArray) -> list[str]:
        """Return the classes."""
        return [self.classes[number] for number in labels_of(targets).tolist()]

    def names_to_balance(
        self, strata: Sequence[str], slides: Sequence[tuple[str, Target | None]]
    ) -> tuple[list[set[str]], tuple[str, ...], tuple[str, ...]]:
        """Return the class of each slide, and all classes."""
        return [{name} for name, _ in slides], tuple(strata), ()

    def check(self, targets: FloatArray, subset: str) -> None:
        """Check that there are two classes."""
        numbers = np.unique(targets[np.isfinite(targets)]).astype(int).tolist()
        if len(numbers) < 2:
            raise NothingToDo(
                f"classes cannot be learned: {subset}",
                found="".join(self.classes[number] for number in numbers) or "no label",
                expected="two or more classes",
                todo="add slides",
            )

    def subset_text(self, targets: FloatArray, counts: Mapping[str, int], unit: str) -> str:
        """Return the number of patches or bags of each class."""
        return ", ".join(f"{counts[name]} {name}" for name in self.classes)

    # Tables of predictions.

    @classmethod
    def of_header(cls, names: Sequence[str]) -> Self | None:
        """Return the task with the classes of the columns `p_CLASS` after label and prediction."""
        if tuple(names[:2]) != cls.target_names:
            return None
        return cls(classes=tuple(name.removeprefix(cls.prefix) for name in names[2:]))

    @property
    def names(self) -> tuple[str, ...]:
        """The classes."""
        return self.classes

    def target_cells(self, target: FloatArray, output: NDArray[np.floating]) -> list[list[str]]:
        """Return the true class, empty for none, and the most probable one, by row."""
        names = [*self.classes, ""]  # -1 is the last one
        both = zip(labels_of(target).tolist(), output.argmax(axis=1).tolist(), strict=True)
        return [[names[label], names[best]] for label, best in both]

    def read_target(self, cells: Sequence[str]) -> Iterable[float]:
        """Return the number of the class. Raise ValueError if it is none of the classes."""
        return (float(self.classes.index(cells[0])) if cells[0] else np.nan,)

    # Evaluation.

    def aggregate(
        self, output: FloatArray, starts: NDArray[np.intp], how: Aggregation, top_k: int
    ) -> FloatArray:
        """Return means, shares of the most probable class, or means of the highest probabilities."""
        match how:
            case "mean":
                return group_means(output, starts)
            case "majority":
                most_probable = output.argmax(axis=1)[:, None] == np.arange(output.shape[1])
                return group_means(most_probable.astype(np.float64), starts)
        top = np.array(
            [np.sort(group, axis=0)[-top_k:].mean(axis=0) for group in np.split(output, starts[1:])]
        )
        positive = self.positive
        if positive is not None:
            top[:, 1 - positive] = 1 - top[:, positive]
            return top
        return np.asarray(top / top.sum(axis=1, keepdims=True), np.float64)

    def statistics(self, scores: Predictions) -> ClassStatistics:
        """Return the metrics of classes."""
        return ClassStatistics(
            scores.label,
            scores.output,
            scores.patient,
            self.decide(scores.output, scores.limits),
            self.positive,
            fold=scores.folds,
        )

    def epoch_metrics(
        self, target: FloatArray, output: NDArray[np.float32]
    ) -> dict[str, float | None]:
        """Return accuracy and the mean area under the ROC curve."""
        label = labels_of(target)
        return {
            "accuracy": float((output.argmax(axis=1) == label).mean()),
            "auc": area_under_roc(label, output),
        }

    def thresholds(self, scores: Predictions, rule: str) -> Thresholds:
        """Return the threshold of the positive class. More than two classes have none."""
        positive = self.positive
        if positive is None:
            return NO_THRESHOLDS
        value, note = choose_threshold(scores.label == positive, scores.output[:, positive], rule)
        return Thresholds((value,), note)

    def details(self, scores: Predictions, statistics: ClassStatistics) -> dict[str, Any]:
        """Return confusion matrix, metrics of each class, reliability and calibration, and the decision curve."""
        label, positive = scores.label, self.positive
        weights = np.ones((1, statistics.patients))
        confusion = statistics.confusion(weights)
        counts = confusion[0].astype(int)
        calibrations = [
            recalibration(scores.output[:, number], label == number, scores.patient)
            for number in range(len(self.classes))
        ]
        areas, precisions = statistics.areas(weights)
        by_class = np.concatenate(
            [areas, sensitivity(confusion), specificity(confusion), precisions]
        )
        classes = {
            name: ClassMetrics(int(count), *map(finite_or_none, metrics), **calibration)
            for name, count, metrics, (calibration, _) in zip(
                self.classes, counts.sum(axis=1), by_class.T, calibrations, strict=True
            )
        }
        missing = [name for name, metrics in classes.items() if not metrics.count]
        note = [f"missing class{'es' if missing[1:] else ''}: {', '.join(missing)}"]
        details: dict[str, Any] = {
            "confusion": tuple(map(tuple, counts.tolist())),
            "classes": classes,
            "reliability": reliability_of(
                *confidence_of(label, scores.output, positive), scores.patient
            ),
            "values": dict.fromkeys(CALIBRATION),
            "notes": note if missing else [],
        }
        if positive is not None:
            details["values"], details["intervals"] = calibrations[positive]
        chance = finite_or_none(statistics.error_by_chance)
        details["values"] = {**details["values"], "calibration_error_by_chance": chance}
        if positive is not None:
            details["decision_curve"] = decision_curve(
                scores.output[:, positive], label == positive
            )
        return details


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
        """Return the rarest label of each slide; see `names_to_balance`, which uses all labels."""
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
