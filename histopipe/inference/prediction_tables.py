"""Aggregate predictions of patches: tables of slides and patients, and metrics where labels are known."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from histopipe.evaluation.evaluate import (
    Evaluation,
    JudgeSettings,
    Thresholds,
    evaluate,
    name_of,
    positive_class,
)
from histopipe.evaluation.metrics import decide
from histopipe.evaluation.scores import Aggregation, Level, PatchScores, joined_scores, scores_of
from histopipe.inference.predictions_folder import PredictedSlide
from histopipe.system.files import appearing


def write_table(
    path: Path,
    parts: Sequence[PatchScores],
    slides: Sequence[PredictedSlide],
    level: Level,
    how: Aggregation,
    *,
    classes: Sequence[str],
    judging: JudgeSettings,
    thresholds: Thresholds,
) -> None:
    """Write a CSV file with a row per slide or patient: ids, label, patches, predicted and decided class, probabilities.

    Slides and patients without a patch, which have no `parts`, have no class and no probability.
    """
    aggregated = _aggregated(parts, level, how, judging, thresholds) if parts else {}
    labels = _labels(slides, level)
    patient = {it.slide: it.patient for it in slides}
    names = sorted({it.slide if level == "slide" else it.patient for it in slides})
    with appearing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        ids = ["slide", "patient"] if level == "slide" else ["patient"]
        probabilities = [f"p_{name}" for name in classes]
        writer.writerow([*ids, "label", "patches", "predicted", "decided", *probabilities])
        nothing: list[object] = [0, "", "", *("" for _ in classes)]
        for name in names:
            more = [patient[name]] if level == "slide" else []
            writer.writerow([name, *more, labels.get(name, ""), *aggregated.get(name, nothing)])


def _aggregated(
    parts: Sequence[PatchScores],
    level: Level,
    how: Aggregation,
    judging: JudgeSettings,
    thresholds: Thresholds,
) -> dict[str, list[object]]:
    """Return number of patches, predicted and decided class, and probabilities by slide or patient."""
    scores = joined_scores(parts)
    positive = positive_class(scores.classes, judging.positive)
    # All patches are aggregated, also where their labels differ.
    blank = replace(scores, label=np.full(len(scores.label), -1, np.int32))
    found = scores_of(blank, level, how, top_k=judging.top_k, positive=positive or 0)
    threshold, _ = thresholds.get(name_of(level, how), (None, None))
    decided = decide(found, positive, threshold)
    group, names = (
        (scores.slide, scores.slides) if level == "slide" else (scores.patient, scores.patients)
    )
    counts = np.bincount(group, minlength=len(names))
    classes = scores.classes
    return {
        names[item]: [
            int(counts[item]), classes[found.probability[i].argmax()], classes[decided[i]],
            *(f"{p:.9g}" for p in found.probability[i].tolist()),
        ]
        for i, item in enumerate(found.item.tolist())
    }  # fmt: skip


def _labels(slides: Sequence[PredictedSlide], level: Level) -> dict[str, str]:
    """Return labels by slide, or by patient where all slides of the patient have the same."""
    found: dict[str, set[str]] = {}
    for it in slides:
        if it.label is not None:
            found.setdefault(it.slide if level == "slide" else it.patient, set()).add(it.label)
    return {name: labels.pop() for name, labels in found.items() if len(labels) == 1}


def evaluate_labelled(
    parts: Sequence[PatchScores], judging: JudgeSettings, thresholds: Thresholds
) -> Evaluation | None:
    """Evaluate the patches whose labels are known; None if these are of fewer than two classes."""
    known = [_labelled(part) for part in parts if (part.label >= 0).any()]
    if not known:
        return None
    scores = joined_scores(known)
    if len(np.unique(scores.label)) < 2:
        return None
    return evaluate([(scores, thresholds)], judging)


def _labelled(part: PatchScores) -> PatchScores:
    rows = part.label >= 0
    return replace(
        part, slide=part.slide[rows], patient=part.patient[rows], x_l0=part.x_l0[rows],
        y_l0=part.y_l0[rows], label=part.label[rows], probability=part.probability[rows],
    )  # fmt: skip
