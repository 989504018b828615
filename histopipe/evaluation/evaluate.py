"""Evaluate predictions of patches, slides and patients, and choose decision thresholds on validation data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import Side
from histopipe.errors import UsageError
from histopipe.evaluation.levels import LEVELS, Aggregation, Level, levels_of, name_of
from histopipe.evaluation.metrics import Metrics, metrics_of
from histopipe.evaluation.predictions import PatchScores, Scores, scores_of
from histopipe.evaluation.statistics import bootstrap_draws
from histopipe.evaluation.target_metrics import (
    TargetMetrics,
    choose_target_thresholds,
    evaluate_target_parts,
)
from histopipe.evaluation.target_metrics import Thresholds as TargetThresholds
from histopipe.evaluation.target_scores import TargetScores
from histopipe.evaluation.thresholds import FALLBACK, choose_threshold
from histopipe.system.csv_files import nfc

AnyScores = PatchScores | TargetScores
AnyMetrics = Metrics | TargetMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """Settings of an evaluation.

    Attributes:
        positive: positive class of two; None for the last by name.
        threshold: rule that chooses the threshold; see `choose_threshold`.
        top_k: number of patches for the aggregation "top_k".
        resamples: number of bootstrap resamples of the patients; 0 for no intervals.
        seed: seed of the resamples.
    """

    positive: str | None = None
    threshold: str = "youden"
    top_k: int = 10
    resamples: int = 1000
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of patches (None if slides or patients were predicted), and of slides and patients by aggregation.

    `in_training` is the number of evaluated patients that were also used in the training; None if unknown.
    """

    patch: AnyMetrics | None
    slide: Mapping[Aggregation, AnyMetrics]
    patient: Mapping[Aggregation, AnyMetrics]
    in_training: int | None = None

    @property
    def finest(self) -> AnyMetrics:
        """Metrics of the lowest level: patches, slides or patients."""
        return self.patch or self.slide.get("mean") or self.patient["mean"]

    def named(self) -> Iterator[tuple[str, AnyMetrics]]:
        """Yield metrics by level: ("patch", …), ("slide_mean", …) and so on."""
        for level, how in LEVELS:
            metrics = self.at(level, how)
            if metrics is not None:
                yield name_of(level, how), metrics

    def at(self, level: Level, how: Aggregation) -> AnyMetrics | None:
        """Return the metrics of a level; None if it was not evaluated."""
        if level == "patch":
            return self.patch
        return (self.slide if level == "slide" else self.patient).get(how)

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
            {how: _from_json(metrics) for how, metrics in value[level].items()}
            for level in ("slide", "patient")
        )
        patch = _from_json(value["patch"]) if "patch" in value else None
        return cls(patch, slide, patient, value.get("in_training"))


def _from_json(value: Mapping[str, Any]) -> AnyMetrics:
    return TargetMetrics.from_json(value) if "figures" in value else Metrics.from_json(value)


ClassThresholds = Mapping[str, tuple[float | None, str | None]]
"""Threshold of the positive class, and note, by name of the level."""
Thresholds = ClassThresholds | TargetThresholds


def positive_class(classes: tuple[str, ...], positive: str | None) -> int | None:
    """Return the number of the positive class; None for more than two classes.

    Raises:
        UsageError: the class is unknown, or there are not exactly two classes.
    """
    names = [nfc(name) for name in classes]
    if positive is not None and (nfc(positive) not in names or len(classes) != 2):
        raise UsageError(
            "--positive", found=repr(positive),
            expected=" or ".join(classes) if len(classes) == 2 else "no positive class: "
            f"there are {len(classes)} classes, each evaluated against the rest",
        )  # fmt: skip
    if len(classes) != 2:
        return None
    return 1 if positive is None else names.index(nfc(positive))


def choose_thresholds(validation: PatchScores, settings: JudgeSettings) -> ClassThresholds:
    """Choose a threshold for every level on validation data. More than two classes have none."""
    positive = positive_class(validation.classes, settings.positive)
    if positive is None:
        return {}
    chosen: dict[str, tuple[float | None, str | None]] = {}
    for level, how in levels_of(validation.level):
        scores = scores_of(validation, level, how, top_k=settings.top_k, positive=positive)
        chosen[name_of(level, how)] = choose_threshold(scores, positive, settings.threshold)
    return chosen


def judge(
    scores: Mapping[Side, AnyScores],
    settings: JudgeSettings,
    leaked: Mapping[Side, Collection[str]] = MappingProxyType({}),
) -> dict[Side, Evaluation]:
    """Evaluate predictions of each side, with thresholds chosen on validation. `leaked` as for `evaluate`."""
    validation = scores["validation"]
    if isinstance(validation, PatchScores):
        thresholds: Thresholds = choose_thresholds(validation, settings)
    else:
        thresholds = choose_target_thresholds(validation, settings.threshold)
    return {
        side: evaluate([(own, thresholds)], settings, leaked.get(side, ()))
        for side, own in scores.items()
    }


Part = tuple[AnyScores, Thresholds]
"""Predictions of one model, with its thresholds. A cross-validation has several."""
ClassPart = tuple[PatchScores, ClassThresholds]
TargetPart = tuple[TargetScores, TargetThresholds]


def class_parts(parts: Sequence[Part]) -> list[ClassPart]:
    """Return the parts as those of a classification."""
    return [(scores, limits) for scores, limits in parts if isinstance(scores, PatchScores)]  # type: ignore[misc]


def target_parts(parts: Sequence[Part]) -> list[TargetPart]:
    """Return the parts as those of another task."""
    return [(scores, limits) for scores, limits in parts if isinstance(scores, TargetScores)]  # type: ignore[misc]


def evaluate(
    parts: Sequence[Part], settings: JudgeSettings, leaked: Collection[str] = ()
) -> Evaluation:
    """Evaluate the predictions of one or several models together, at every level.

    Each part has at least one row. All parts have the same classes or targets, and the same numbering of patients.
    `leaked` are patients that were also used in the training.
    """
    scores = parts[0][0]
    draws = bootstrap_draws(len(scores.patients), settings.resamples, settings.seed)
    names = {it.patients[number] for it, _ in parts for number in np.unique(it.patient).tolist()}
    if isinstance(scores, TargetScores):
        levels: Mapping[Level, Any] = evaluate_target_parts(target_parts(parts), draws)
    else:
        levels = _evaluate_classes(class_parts(parts), settings, draws)
    return Evaluation(
        levels["patch"].get("mean"),
        levels["slide"],
        levels["patient"],
        len(names.intersection(leaked)),
    )


def _evaluate_classes(
    parts: Sequence[ClassPart], settings: JudgeSettings, draws: NDArray[np.float64]
) -> dict[Level, dict[Aggregation, Metrics]]:
    first, _ = parts[0]
    positive = positive_class(first.classes, settings.positive)
    found: dict[Level, dict[Aggregation, Metrics]] = {"patch": {}, "slide": {}, "patient": {}}
    for level, how in levels_of(first.level):
        scores, threshold, notes = joined(parts, level, how, settings)
        if len(scores.label):
            found[level][how] = metrics_of(
                scores, first.classes, positive=positive, threshold=threshold, draws=draws, notes=notes
            )  # fmt: skip
    return found


def joined(
    parts: Sequence[ClassPart], level: Level, how: Aggregation, settings: JudgeSettings
) -> tuple[Scores, float | NDArray[np.float64] | None, tuple[str, ...]]:
    """Return the scores of all parts at one level, thresholds, and notes. Items are numbered part << 32 | item."""
    positive = positive_class(parts[0][0].classes, settings.positive) or 0
    each = [scores_of(p, level, how, top_k=settings.top_k, positive=positive) for p, _ in parts]
    chosen = [thresholds.get(name_of(level, how), (None, None)) for _, thresholds in parts]
    scores = Scores(
        np.concatenate([part.label for part in each]),
        np.concatenate([part.probability for part in each]),
        np.concatenate([part.patient for part in each]),
        np.concatenate([part.item + (number << 32) for number, part in enumerate(each)]),
        sum(part.left_out for part in each),
    )
    notes = tuple(sorted({note for _, note in chosen if note}))
    values = [value for value, _ in chosen if value is not None]
    if len(values) < len(parts):
        return scores, None, notes
    if len(parts) == 1:
        return scores, values[0], notes
    return scores, np.repeat(values, [len(part.label) for part in each]), notes


def thresholds_of(evaluation: Evaluation) -> Thresholds:
    """Return the thresholds that an evaluation used."""
    judged = dict(evaluation.named())
    of_targets = {
        level: metrics.thresholds
        for level, metrics in judged.items()
        if isinstance(metrics, TargetMetrics)
    }
    if of_targets:
        return of_targets
    return {
        level: (metrics.threshold, next((n for n in metrics.notes if n.startswith(FALLBACK)), None))
        for level, metrics in judged.items()
        if isinstance(metrics, Metrics)
    }


def mean_thresholds(models: Sequence[Thresholds]) -> Thresholds:
    """Return the means of the thresholds of several models, by level."""
    found: dict[str, Any] = {}
    for level, first in models[0].items():
        values = [model[level] for model in models if level in model]
        if not first or isinstance(first[-1], float):  # of targets, which have no notes
            found[level] = tuple(np.mean(np.array(values, np.float64), axis=0).tolist())
            continue
        limits = [limit for limit, _ in values]
        known = None not in limits and len(limits) == len(models)
        found[level] = (float(np.mean(np.array(limits, np.float64))) if known else None, None)
    return found
