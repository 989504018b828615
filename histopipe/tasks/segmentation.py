"""Segmentation: a class for each pixel. A row of predictions is a patch with counts of its annotated pixels.

The counts can be summed: those of a slide are the sums of those of its patches, and metrics of patients are computed from
the sums of their slides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.rules import BACKGROUND
from histopipe.system.arrays import FloatArray
from histopipe.tasks.choices import LEVELS_OF, Aggregation, EvaluationLevel
from histopipe.tasks.curves import BINS, Bin
from histopipe.tasks.intervals import Interval, error_interval
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.statistics import Statistics
from histopipe.tasks.task import Target, Task

_PIXELS = "pixels: {} as {}"
"""Column of the annotated pixels of a class that were predicted as a class."""
_BIN = ("pixels", "confidence", "correct")
"""Columns of a bin of the largest probability of a pixel: pixels, sum of the probabilities, and correctly predicted pixels."""
_BOUNDARY = ("boundary_um: {}", "boundaries: {}")
"""Columns of a class: the 95th percentile of the distances between true and predicted boundary, in µm, and 1; both are 0 if
the patch has only one of these boundaries, or none."""


class SegmentationStatistics(Statistics):
    """Metrics of slides or patients as functions of (R, P) weights of the patients.

    Dice and intersection over union of a class are means over the rows, of those with the class in annotations or
    predictions; without a class, they are means over the classes that occur, but the background.

    Args:
        classes: names of the K classes.
        counts: (N, C) counts in the form of `Segmentation.output_names`.
        patient: (N,) numbers of the patients.

    Source:
        L. Maier-Hein et al., Metrics reloaded, Nature Methods 21 (2024): aggregation by patient.
    """

    def __init__(
        self, classes: Sequence[str], counts: FloatArray, patient: NDArray[np.int32]
    ) -> None:
        self.patients, self._classes, self._patient = int(patient.max()) + 1, classes, patient
        self.confusion, self.bins, boundary = divide_counts(counts, len(classes))
        right = np.diagonal(self.confusion, axis1=1, axis2=2)
        both = self.confusion.sum(axis=1) + self.confusion.sum(axis=2)
        with np.errstate(invalid="ignore"):
            self.of_rows = {
                "dice": 2 * right / both,
                "iou": right / (both - right),
                "boundary_um": boundary[:, 0] / boundary[:, 1],
            }
        self.absent = (both == 0).sum(axis=0)
        """(K,) rows with a class in neither annotations nor predictions."""
        self._excess, self._count = (
            np.stack(
                [np.bincount(patient, column, self.patients) for column in columns.T],
                axis=1,
                dtype=np.float64,
            )
            for columns in (
                self.bins[:, 1] - self.bins[:, 2],
                self.bins[:, 0].sum(axis=1, keepdims=True),
            )
        )

    def compute(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return (R,) values of each metric; NaN if undefined."""
        rows, values = weights[:, self._patient], {}
        drawn = [name != BACKGROUND for name in self._classes]
        with np.errstate(divide="ignore", invalid="ignore"):
            for metric, of_rows in self.of_rows.items():
                is_defined = np.isfinite(of_rows)
                means = rows @ np.where(is_defined, of_rows, 0) / (rows @ is_defined)
                # A class that occurs nowhere has no part in the means over the classes.
                has_value = np.isfinite(means[:, drawn])
                values[metric] = np.nansum(means[:, drawn], axis=1) / has_value.sum(axis=1)
                values |= {
                    f"{metric}:{name}": of_class
                    for name, of_class in zip(self._classes, means.T, strict=True)
                }
            error = np.abs(weights @ self._excess).sum(axis=1) / (weights @ self._count)[:, 0]
        return {**values, "calibration_error": error}

    def better_intervals(
        self, weights: FloatArray, values: Mapping[str, FloatArray]
    ) -> dict[str, Interval]:
        """Return the interval of the calibration error."""
        ends = error_interval(self._excess, self._count[:, 0], weights)
        return {} if ends is None else {"calibration_error": ends}


def divide_counts(counts: NDArray[Any], classes: int) -> tuple[NDArray[Any], ...]:
    """Return (N, K, K) confusion, (N, 3, B) sums of bins and (N, 2, K) sums of boundaries of (N, C) counts."""
    ends = np.cumsum([classes**2, len(_BIN) * BINS])
    confusion, bins, boundary = np.split(counts, ends, axis=1)
    return (
        confusion.reshape(-1, classes, classes),
        bins.reshape(-1, len(_BIN), BINS),
        boundary.reshape(-1, len(_BOUNDARY), classes),
    )


@dataclass(frozen=True, slots=True)
class Segmentation(Task):
    """One of several classes for each pixel."""

    name = "segmentation"
    settings = ()
    main: ClassVar[Mapping[str, str]] = {"dice": "Dice", "iou": "IoU"}
    plain: ClassVar[Mapping[str, str]] = {"boundary_um": "HD95 µm", "calibration_error": "ECE"}
    ranked: ClassVar[str] = "dice"
    by_subgroup = ("dice", "iou", "calibration_error")
    compared = ("dice", "iou")
    by_class = True
    has_sets = of_values = has_mean = ranks = False
    stratum = "class"
    target_names = ()
    outcome_text = "The outcome is the class of each pixel, {}."
    predicted_text = "a probability for each class of each pixel ({}); they sum to 1"
    columns: tuple[str, ...] = ("annotated",)
    classes: tuple[str, ...] = ()

    # Targets.

    def strata(self, targets: FloatArray) -> list[str]:
        """Return one stratum: patches are divided by the class of their slide."""
        return ["annotated"] * len(targets)

    def names_to_balance(
        self, strata: Sequence[str], slides: Sequence[tuple[str, Target | None]]
    ) -> tuple[list[set[str]], tuple[str, ...], tuple[str, ...]]:
        """Return the class of each slide, and all classes."""
        return [{name} for name, _ in slides], tuple(strata), ()

    def label_targets(self, labels: NDArray[np.int32]) -> FloatArray:
        """Return (N, 1) ones: each sample has annotated pixels."""
        return np.ones((len(labels), 1))

    def check(self, targets: FloatArray, subset: str) -> None:
        """Check nothing: there are at least two classes of pixels."""

    def subset_text(self, targets: FloatArray, counts: Mapping[str, int], unit: str) -> str:
        """Return the number of patches, and of those with each class, by their rarest class."""
        by_class = ", ".join(f"{counts[name]} {name}" for name in self.classes if counts[name])
        return f"{sum(counts.values())} {unit}; by their rarest class: {by_class or 'none'}"

    # Tables of predictions.

    @classmethod
    def of_header(cls, names: Sequence[str]) -> Self | None:
        """Return the task with the classes of the last columns, those of boundaries."""
        begin = _BOUNDARY[1].format("")
        task = cls(
            classes=tuple(name.removeprefix(begin) for name in names if name.startswith(begin))
        )
        return task if task.classes and task.output_names == tuple(names) else None

    @property
    def names(self) -> tuple[str, ...]:
        """The classes."""
        return self.classes

    @property
    def output_names(self) -> tuple[str, ...]:
        """Columns of the counts: of pixels by true and predicted class, by bin of the probability, and of boundaries."""
        return (
            *(_PIXELS.format(true, other) for true in self.classes for other in self.classes),
            *(f"bin {number}: {name}" for name in _BIN for number in range(1, BINS + 1)),
            *(name.format(of_class) for name in _BOUNDARY for of_class in self.classes),
        )

    def target_cells(self, target: FloatArray, output: NDArray[np.floating]) -> list[list[str]]:
        """Return no cells: the counts have the annotated classes."""
        return [[] for _ in target]

    def read_target(self, cells: Sequence[str]) -> Iterable[float]:
        """Return 1."""
        return (1.0,)

    # What users see.

    @property
    def value_text(self) -> str:
        """Heatmaps show the share of a patch that has a class."""
        return "predicted share of"

    @property
    def value_names(self) -> tuple[str, ...]:
        """The predicted share of each class."""
        return tuple(f"predicted_{name}" for name in self.classes)

    def patch_values(self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the (N, K) shares of the annotated pixels that were predicted as each class."""
        predicted = divide_counts(output, len(self.classes))[0].sum(axis=1)
        return np.asarray(predicted / predicted.sum(axis=1, keepdims=True), np.float32)

    def item_values(self, scores: Predictions) -> dict[str, FloatArray]:
        """Return Dice, and the share of the annotated pixels, of each class in slides or patients."""
        statistics = self.statistics(scores)
        true = statistics.confusion.sum(axis=2)
        return {
            f"{title} {name}": values[:, number]
            for title, values in (
                ("Dice", statistics.of_rows["dice"]),
                ("share of", true / true.sum(axis=1, keepdims=True)),
            )
            for number, name in enumerate(self.classes)
        }

    # Evaluation.

    def levels(self, level: EvaluationLevel) -> list[tuple[EvaluationLevel, Aggregation]]:
        """Return slides and patients: patches are parts of them."""
        return [(at, how) for at, how in LEVELS_OF[level] if at != "patch" and how == "mean"]

    def aggregate(
        self, output: FloatArray, starts: NDArray[np.intp], how: Aggregation, top_k: int
    ) -> FloatArray:
        """Return (G, C) sums of the groups of (N, C) counts that begin at `starts`."""
        return np.asarray(np.add.reduceat(output, starts, axis=0), np.float64)

    def statistics(self, scores: Predictions) -> SegmentationStatistics:
        """Return the metrics of pixels."""
        return SegmentationStatistics(self.classes, scores.output, scores.patient)

    def epoch_metrics(
        self, target: FloatArray, output: NDArray[np.float32]
    ) -> dict[str, float | None]:
        """Return Dice and intersection over union of all pixels together."""
        counts = output.sum(axis=0, dtype=np.float64, keepdims=True)
        values = SegmentationStatistics(self.classes, counts, np.zeros(1, np.int32)).values()
        return {name: values[name] for name in self.main}

    def details(self, scores: Predictions, statistics: SegmentationStatistics) -> dict[str, Any]:
        """Return the confusion of pixels, the reliability of their probabilities, and rows without a class."""
        bins = [
            Bin(n / BINS, (n + 1) / BINS, int(count), p / count, right / count)
            if count
            else Bin(n / BINS, (n + 1) / BINS, 0, None, None)
            for n, (count, p, right) in enumerate(statistics.bins.sum(axis=0).T.tolist())
        ]
        confusion = statistics.confusion.sum(axis=0).astype(np.int64)
        return {
            "confusion": tuple(map(tuple, confusion.tolist())),
            "reliability": tuple(bins),
            "notes": [
                f"{name}: in neither annotations nor predictions of {count} of {len(scores)} {scores.level}s, which its "
                "metrics leave out"
                for name, count in zip(self.classes, statistics.absent.tolist(), strict=True)
                if count
            ],
        }
