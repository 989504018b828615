"""Predictions and scores for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.splits.slide_table import Flow
from histopipe.tasks.choices import Aggregation, EvaluationLevel
from histopipe.tasks.classification import Classification
from histopipe.tasks.metrics import Metrics, metrics_of
from histopipe.tasks.predictions import (
    NO_THRESHOLDS,
    EvaluationSettings,
    Predictions,
    Thresholds,
    scores_of,
)
from histopipe.tasks.task import Task

NAMES = tuple("abcdefgh")


def adds_up(flow: Flow) -> bool:
    """Return whether all slides, patients and patches are used or excluded."""
    return all(
        level.total == sum(level.excluded.values()) + sum(level.used.values())
        for level in flow.values()
    )


def target_of(label: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return (N, 1) targets of (N,) class numbers, of which -1 is unknown."""
    return np.where(label < 0, np.nan, label).astype(np.float64)[:, None]


def class_scores(
    label: Sequence[int] | NDArray[np.integer],
    probability: Any,
    patient: Sequence[int] | NDArray[np.integer] | None = None,
) -> Predictions:
    """Return scores of classes; each item is a patient by default."""
    count, output = len(label), np.array(probability, np.float64)
    patients = range(count) if patient is None else patient
    task = Classification(classes=NAMES[: output.shape[1]])
    return task_scores(task, target_of(np.array(label)), output, patients)


def task_scores(
    task: Task, target: Any, output: Any, patient: Any, limits: Sequence[float] = ()
) -> Predictions:
    """Return scores of a task, with the same thresholds for all items."""
    count, patients = len(target), np.array(patient, np.int32)
    names, numbers = tuple(map(str, range(count))), np.arange(count, dtype=np.int32)
    return Predictions(
        task,
        names,
        names,
        numbers,
        patients,
        numbers.astype(np.int64),
        numbers.astype(np.int64),
        target,
        output,
        limits=np.tile(limits, (count, 1)),
    )


def class_metrics(
    scores: Predictions,
    classes: tuple[str, ...],
    *,
    positive: int | None,
    threshold: float | None,
    draws: NDArray[np.float64],
) -> Metrics:
    """Return the metrics of scores of classes, decided by one threshold."""
    name = None if positive is None else classes[positive]
    limits = () if threshold is None or positive is None else (float(threshold),)
    decided_scores = replace(
        scores,
        task=Classification(classes=classes, positive_class=name),
        limits=np.tile(limits, (len(scores.target), 1)),
    )
    thresholds = Thresholds(limits) if limits else NO_THRESHOLDS
    return metrics_of(decided_scores, draws=draws, thresholds=thresholds)


def class_predictions(
    classes: tuple[str, ...],
    slides: tuple[str, ...],
    patients: tuple[str, ...],
    slide: Any,
    patient: Any,
    x_l0: Any,
    y_l0: Any,
    label: Any,
    probability: Any,
    level: EvaluationLevel = "patch",
) -> Predictions:
    """Return predictions of classes."""
    return Predictions(
        Classification(classes=classes),
        slides,
        patients,
        slide,
        patient,
        x_l0,
        y_l0,
        target_of(np.asarray(label)),
        probability,
        level,
    )


def aggregated(
    predictions: Predictions,
    level: EvaluationLevel,
    how: Aggregation = "mean",
    *,
    top_k: int = 1,
    positive: int | None = None,
) -> Predictions:
    """Return the scores at a level."""
    name = None if positive is None else predictions.task.classes[positive]
    if len(predictions.task.classes) != 2:
        name = None
    return scores_of(predictions, level, how, EvaluationSettings(top_k=top_k, positive=name))
