"""Evaluate predictions of patches, slides and patients, and choose decision thresholds on validation data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import Side
from histopipe.errors import UsageError
from histopipe.evaluation.metrics import Metrics, metrics_of
from histopipe.evaluation.predictions import (
    AGGREGATIONS,
    Aggregation,
    Level,
    PatchScores,
    Scores,
    scores_of,
)
from histopipe.evaluation.statistics import bootstrap_draws

LEVELS: tuple[tuple[Level, Aggregation], ...] = (
    ("patch", "mean"),
    *(("slide", how) for how in AGGREGATIONS),
    *(("patient", how) for how in AGGREGATIONS),
)
"""Levels and aggregations of an evaluation; patches are not aggregated."""


def levels_of(level: Level) -> tuple[tuple[Level, Aggregation], ...]:
    """Return the levels at which predictions can be evaluated. Slides are aggregated to patients by their mean only."""
    if level == "patch":
        return LEVELS
    return (("slide", "mean"), ("patient", "mean")) if level == "slide" else (("patient", "mean"),)


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
    """Metrics of patches (None if slides or patients were predicted), and of slides and patients by aggregation."""

    patch: Metrics | None
    slide: Mapping[Aggregation, Metrics]
    patient: Mapping[Aggregation, Metrics]

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

    def at(self, level: Level, how: Aggregation) -> Metrics | None:
        """Return the metrics of a level; None if it was not evaluated."""
        if level == "patch":
            return self.patch
        return (self.slide if level == "slide" else self.patient).get(how)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            **({"patch": self.patch.to_json()} if self.patch else {}),
            "slide": {how: metrics.to_json() for how, metrics in self.slide.items()},
            "patient": {how: metrics.to_json() for how, metrics in self.patient.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """Create the evaluation from the result of `to_json`."""
        slide, patient = (
            {how: Metrics.from_json(metrics) for how, metrics in value[level].items()}
            for level in ("slide", "patient")
        )
        patch = Metrics.from_json(value["patch"]) if "patch" in value else None
        return cls(patch, slide, patient)


Thresholds = Mapping[str, tuple[float | None, str | None]]
"""Threshold and note by name of the level."""


def name_of(level: Level, how: Aggregation) -> str:
    """Return the name of a level: `patch`, `slide_mean`, …"""
    return level if level == "patch" else f"{level}_{how}"


def positive_class(classes: tuple[str, ...], positive: str | None) -> int | None:
    """Return the number of the positive class; None for more than two classes.

    Raises:
        UsageError: the class is unknown, or there are not exactly two classes.
    """
    if positive is not None and (positive not in classes or len(classes) != 2):
        raise UsageError(
            "--positive", found=repr(positive),
            expected=" or ".join(classes) if len(classes) == 2 else "no positive class: "
            f"there are {len(classes)} classes, each evaluated against the rest",
        )  # fmt: skip
    if len(classes) != 2:
        return None
    return 1 if positive is None else classes.index(positive)


def choose_thresholds(validation: PatchScores, settings: JudgeSettings) -> Thresholds:
    """Choose a threshold for every level on validation data. More than two classes have none."""
    positive = positive_class(validation.classes, settings.positive)
    if positive is None:
        return {}
    chosen: dict[str, tuple[float | None, str | None]] = {}
    for level, how in levels_of(validation.level):
        scores = scores_of(validation, level, how, top_k=settings.top_k, positive=positive)
        chosen[name_of(level, how)] = choose_threshold(scores, positive, settings.threshold)
    return chosen


def judge(scores: Mapping[Side, PatchScores], settings: JudgeSettings) -> dict[Side, Evaluation]:
    """Evaluate predictions of each side, with thresholds chosen on validation."""
    thresholds = choose_thresholds(scores["validation"], settings)
    return {side: evaluate([(patches, thresholds)], settings) for side, patches in scores.items()}


Part = tuple[PatchScores, Thresholds]
"""Predictions of one model, with its thresholds. A cross-validation has several."""


def evaluate(parts: Sequence[Part], settings: JudgeSettings) -> Evaluation:
    """Evaluate the predictions of one or several models together, at every level.

    Each part has at least one patch. All parts have the same classes and numbering of patients.
    """
    first, _ = parts[0]
    positive = positive_class(first.classes, settings.positive)
    draws = bootstrap_draws(len(first.patients), settings.resamples, settings.seed)
    found: dict[Level, dict[Aggregation, Metrics]] = {"patch": {}, "slide": {}, "patient": {}}
    for level, how in levels_of(first.level):
        scores, threshold, notes = joined(parts, level, how, settings)
        if len(scores.label):
            found[level][how] = metrics_of(
                scores, first.classes, positive=positive, threshold=threshold, draws=draws, notes=notes
            )  # fmt: skip
    return Evaluation(found["patch"].get("mean"), found["slide"], found["patient"])


def joined(
    parts: Sequence[Part], level: Level, how: Aggregation, settings: JudgeSettings
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


RULE = re.compile(
    r"youden|(?P<of>sensitivity|specificity)[:=](?P<least>0?\.\d+|1(\.0*)?)|(?P<fixed>0?\.\d+)"
)
"""Values of `--threshold`."""
EVEN = 0.5
FALLBACK = f"threshold {EVEN}"
"""Start of a note on why no threshold was chosen."""


def check_rule(rule: str) -> re.Match[str]:
    """Return the match of a rule. Raise UsageError if the text is not a rule."""
    match = RULE.fullmatch(rule)
    if match is None:
        raise UsageError(
            "--threshold", found=repr(rule),
            expected="youden, sensitivity:0.95, specificity:0.95, or a probability such as 0.5",
        )  # fmt: skip
    return match


def choose_threshold(scores: Scores, positive: int, rule: str) -> tuple[float, str | None]:
    """Return the threshold that a rule chooses, with a note or None.

    "youden": highest sensitivity + specificity. "sensitivity:S": highest threshold with at least this sensitivity. "specificity:S":
    lowest threshold with at least this specificity. The threshold is half way between the last positive score and the
    next score, since scores of other data may be close to either of them.

    Source:
        W. J. Youden, Index for rating diagnostic tests, Cancer 3 (1950).
    """
    match = check_rule(rule)
    if match["fixed"]:
        return float(match["fixed"]), None
    truth = scores.label == positive
    if truth.all() or not truth.any():
        return EVEN, f"{FALLBACK} used: validation has only one class"
    thresholds, score_number = np.unique(-scores.probability[:, positive], return_inverse=True)
    # The ROC curve: false and true positive rates at decreasing scores.
    false_positive, true_positive = (
        np.append(0, np.cumsum(np.bincount(score_number[members], minlength=len(thresholds))))
        / members.sum()
        for members in (~truth, truth)
    )
    if match["of"] is None:
        place = int(np.argmax(true_positive - false_positive))
    elif match["of"] == "sensitivity":
        place = int(np.argmax(true_positive >= float(match["least"])))
    else:
        place = int(np.flatnonzero(1 - false_positive >= float(match["least"]))[-1])
    return _half_way(-thresholds.astype(np.float64), place), None


def _half_way(scores: NDArray[np.float64], positives: int) -> float:
    """Return a threshold for which the first `positives` of the decreasing scores are positive."""
    if positives == 0:
        return float(np.nextafter(scores[0], np.inf))
    last, after = scores[positives - 1], scores[positives] if positives < len(scores) else 0.0
    middle = (last + after) / 2
    return float(middle if middle > after else last)
