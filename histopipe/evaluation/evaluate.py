"""Evaluate predictions of patches, slides and patients, and choose decision thresholds on validation data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from histopipe.splits.subsets import Subset
from histopipe.tasks.choices import LEVELS, Aggregation, EvaluationLevel, name_of
from histopipe.tasks.metrics import Metrics, metrics_of
from histopipe.tasks.predictions import (
    ModelPredictions,
    Predictions,
    ThresholdsByLevel,
    joined_scores,
    scores_of,
)
from histopipe.tasks.statistics import bootstrap_draws
from histopipe.tasks.task import NO_THRESHOLDS, EvaluationSettings, Thresholds


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of patches (None if slides or patients were predicted), and of slides and patients by aggregation.

    `in_training` is the number of evaluated patients that were also used in the training; None if unknown.
    """

    patch: Metrics | None
    slide: Mapping[Aggregation, Metrics]
    patient: Mapping[Aggregation, Metrics]
    in_training: int | None = None

    @property
    def finest(self) -> Metrics:
        """Metrics of the lowest level: patches, slides or patients."""
        return self.patch or self.slide.get("mean") or self.patient["mean"]

    def named(self) -> Iterator[tuple[str, Metrics]]:
        """Yield metrics by level: ("patch", …), ("slide_mean", …) and so on."""
        for level, how in LEVELS:
            metrics = self.at(level, how)
            if metrics is not None:
                yield name_of(level, how), metrics

    def at(self, level: EvaluationLevel, how: Aggregation) -> Metrics | None:
        """Return the metrics of a level; None if it was not evaluated."""
        if level == "patch":
            return self.patch
        return (self.slide if level == "slide" else self.patient).get(how)

    @property
    def thresholds(self) -> ThresholdsByLevel:
        """The thresholds that were used."""
        return {level: metrics.thresholds for level, metrics in self.named()}

    @property
    def notes(self) -> list[str]:
        """Notes on the metrics of all levels, each once."""
        return list(dict.fromkeys(note for _, metrics in self.named() for note in metrics.notes))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            **({"patch": self.patch.to_json()} if self.patch else {}),
            "slide": {how: metrics.to_json() for how, metrics in self.slide.items()},
            "patient": {how: metrics.to_json() for how, metrics in self.patient.items()},
            "in_training": self.in_training,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """Create the evaluation from the result of `to_json`."""
        slide, patient = (
            {how: Metrics.from_json(metrics) for how, metrics in value[level].items()}
            for level in ("slide", "patient")
        )
        patch = Metrics.from_json(value["patch"]) if "patch" in value else None
        return cls(patch, slide, patient, value.get("in_training"))


def choose_thresholds(validation: Predictions, settings: EvaluationSettings) -> ThresholdsByLevel:
    """Choose thresholds for every level on validation data."""
    task = validation.task.with_settings(settings)
    return {
        name_of(level, how): task.thresholds(
            scores_of(validation, level, how, settings), settings.threshold
        )
        for level, how in task.levels(validation.level)
    }


def evaluate_subsets(
    predictions: Mapping[Subset, Predictions],
    settings: EvaluationSettings,
    leaked: Mapping[Subset, Collection[str]] = MappingProxyType({}),
) -> dict[Subset, Evaluation]:
    """Evaluate predictions of each subset, with thresholds chosen on validation. `leaked` as for `evaluate`."""
    thresholds = choose_thresholds(predictions["validation"], settings)
    return {
        subset: evaluate([(of_subset, thresholds)], settings, leaked.get(subset, ()))
        for subset, of_subset in predictions.items()
    }


def evaluate(
    parts: Sequence[ModelPredictions], settings: EvaluationSettings, leaked: Collection[str] = ()
) -> Evaluation:
    """Evaluate the predictions of one or several models together, at every level.

    Each part has at least one row. All parts have the same task and numbering of patients. `leaked` are patients that
    were also used in the training.
    """
    (first, thresholds), *rest = parts
    draws = bootstrap_draws(len(first.patients), settings.resamples, settings.seed)
    levels: dict[EvaluationLevel, dict[Aggregation, Metrics]] = {
        "patch": {},
        "slide": {},
        "patient": {},
    }
    for level, how in first.task.levels(first.level):
        scores, notes = joined_scores(parts, level, how, settings)
        if len(scores.target):
            used = NO_THRESHOLDS if rest else thresholds.get(name_of(level, how), NO_THRESHOLDS)
            levels[level][how] = metrics_of(scores, draws=draws, notes=notes, thresholds=used)
    patients = {
        part.patients[number] for part, _ in parts for number in np.unique(part.patient).tolist()
    }
    return Evaluation(
        levels["patch"].get("mean"),
        levels["slide"],
        levels["patient"],
        len(patients.intersection(leaked)),
    )


def mean_thresholds(models: Sequence[ThresholdsByLevel]) -> ThresholdsByLevel:
    """Return the means of the thresholds of several models, by level; none where a model has none."""
    means = {}
    for level in models[0]:
        values = [model[level].values for model in models if level in model]
        same = len({len(limits) for limits in values}) == 1 and len(values) == len(models)
        means[level] = Thresholds(tuple(np.mean(values, axis=0).tolist()) if same else ())
    return means
