"""Predictions of patches, slides and patients as arrays: joined, and aggregated to scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.tasks.choices import Aggregation, EvaluationLevel, name_of
from histopipe.tasks.task import (
    NO_THRESHOLDS,
    EvaluationSettings,
    Scores,
    Task,
    Thresholds,
    labels_of,
)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of patches; of slides or patients if the model takes bags.

    Attributes:
        task: what is predicted.
        slides, patients: slide ids and patients, by number.
        slide, patient: (N,) int32, slide and patient of each row.
        x_l0, y_l0: (N,) int64, top left corner, level-0 pixels; 0 if a row is not a patch.
        target: (N, T) float64, NaN for missing values.
        output: (N, C) float32.
        level: level of the rows; in rows of patients, `slide` is the patient.
    """

    task: Task
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    slide: NDArray[np.int32]
    patient: NDArray[np.int32]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    target: NDArray[np.float64]
    output: NDArray[np.float32]
    level: EvaluationLevel = "patch"

    @property
    def label(self) -> NDArray[np.int32]:
        """(N,) class numbers of a classification; -1 for none."""
        return labels_of(self.target)

    def __len__(self) -> int:
        return len(self.target)

    def rows(self, rows: NDArray[Any]) -> Predictions:
        """Return some of the rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _ARRAYS})

    def known(self) -> Predictions:
        """Return the rows of which a target is known."""
        return self.rows(np.flatnonzero(np.isfinite(self.target).any(axis=1)))

    def without_targets(self) -> Predictions:
        """Return the same predictions as of unknown targets, so that none is left out when they are aggregated."""
        return replace(self, target=np.full_like(self.target, np.nan))

    def owner(self, level: EvaluationLevel) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Return the (N,) slide or patient of each row, and their names."""
        return (self.patient, self.patients) if level == "patient" else (self.slide, self.slides)

    @property
    def unit(self) -> EvaluationLevel:
        """The level of a table of slides: patients if these were predicted."""
        return "patient" if self.level == "patient" else "slide"


_ARRAYS = ("slide", "patient", "x_l0", "y_l0", "target", "output")
ThresholdsByLevel = Mapping[str, Thresholds]
"""Thresholds by name of the level, such as "slide_mean"."""
ModelPredictions = tuple[Predictions, ThresholdsByLevel]
"""Predictions of one model, with its thresholds. A cross-validation has several."""


def with_common_patients(parts: Sequence[Predictions]) -> list[Predictions]:
    """Return the same predictions, with common patient numbers, and outputs in the form of the first ones."""
    names = tuple(sorted({name for part in parts for name in part.patients}))
    number = {name: i for i, name in enumerate(names)}
    renumbered = []
    for part in parts:
        new = np.array([number[name] for name in part.patients], np.int32)
        first = parts[0].task
        same = type(part.task) is type(first)
        renumbered.append(
            replace(
                part, patients=names, patient=new[part.patient], task=first if same else part.task,
                output=first.converted(part.task, part.output) if same else part.output,
            )
        )  # fmt: skip
    return renumbered


def joined_predictions(parts: Sequence[Predictions]) -> Predictions:
    """Concatenate predictions, at least one, of the same task and level."""
    slides = sorted({name for part in parts for name in part.slides})
    number = {name: i for i, name in enumerate(slides)}
    renumbered = [
        replace(part, slide=np.array([number[name] for name in part.slides], np.int32)[part.slide])
        for part in with_common_patients(parts)
    ]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in renumbered]) for name in _ARRAYS
    }
    return replace(renumbered[0], slides=tuple(slides), **arrays)


def scores_of(
    predictions: Predictions,
    level: EvaluationLevel,
    how: Aggregation,
    settings: EvaluationSettings,
    thresholds: ThresholdsByLevel = MappingProxyType({}),
) -> Scores:
    """Return the scores of predictions, or aggregate them to slides or patients with one target.

    "mean": mean output. "top_k": for two classes, the mean of the `top_k` highest probabilities of the positive class; for
    more, the same for each class, scaled to a sum of 1. "majority": share of patches for which a class is the most probable.
    """
    task, target = predictions.task.with_settings(settings), predictions.target
    output, patient = predictions.output.astype(np.float64), predictions.patient
    limits = np.array(thresholds.get(name_of(level, how), NO_THRESHOLDS).values)
    if level == "patch":
        items = np.arange(len(target))
        return Scores(task, target, output, patient, items, np.tile(limits, (len(target), 1)))
    group, _ = predictions.owner(level)
    order = np.argsort(group, kind="stable")
    items, starts = np.unique(group[order], return_index=True)
    # NaN is the same target as NaN.
    ordered = np.nan_to_num(target[order], nan=np.inf)
    lowest, highest = (
        reduction.reduceat(ordered, starts, axis=0) for reduction in (np.minimum, np.maximum)
    )
    one = (lowest == highest).all(axis=1)
    return Scores(
        task, np.where(np.isinf(lowest), np.nan, lowest)[one],
        task.aggregate(output[order], starts, how, settings.top_k)[one], patient[order][starts][one],
        items[one].astype(np.int64), np.tile(limits, (int(one.sum()), 1)), int((~one).sum()),
    )  # fmt: skip


def joined_scores(
    parts: Sequence[ModelPredictions],
    level: EvaluationLevel,
    how: Aggregation,
    settings: EvaluationSettings,
) -> tuple[Scores, tuple[str, ...]]:
    """Return the scores of all parts at one level, and notes on their thresholds. Items are numbered part << 32 | item."""
    each = [scores_of(part, level, how, settings, thresholds) for part, thresholds in parts]
    chosen = [thresholds.get(name_of(level, how), NO_THRESHOLDS) for _, thresholds in parts]
    width = min(scores.limits.shape[1] for scores in each)  # 0 if a model has no threshold
    joined = Scores(
        each[0].task,
        np.concatenate([scores.target for scores in each]),
        np.concatenate([scores.output for scores in each]),
        np.concatenate([scores.patient for scores in each]),
        np.concatenate([scores.item + (number << 32) for number, scores in enumerate(each)]),
        np.concatenate([scores.limits[:, :width] for scores in each]),
        sum(scores.left_out for scores in each),
    )
    return joined, tuple(sorted({limits.note for limits in chosen if limits.note}))
