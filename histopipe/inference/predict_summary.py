"""Predictions of patches put together: a line for each slide and patient, and how good they are where labels are known."""

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
from histopipe.inference.slide_info import SlideFacts
from histopipe.system.files import appearing


def write_summary(
    path: Path,
    parts: Sequence[PatchScores],
    facts: Sequence[SlideFacts],
    level: Level,
    how: Aggregation,
    *,
    classes: Sequence[str],
    judging: JudgeSettings,
    thresholds: Thresholds,
) -> None:
    """A CSV with a line for each slide or patient: who, label, patches, likeliest class, the class decided for, probabilities.

    Those without a patch have no class and no probability.

    Args:
        path: the file.
        parts: of all patches, slide by slide.
        facts: of all slides.
        level: "slide" or "patient".
        how: patches are put together.
        classes: names, by number.
        judging: which class is positive, and what "top_k" takes.
        thresholds: from which probability on it is decided for.
    """
    told = _told(parts, level, how, judging, thresholds) if parts else {}
    labels = _labels_by(facts, level)
    patient = {it.slide: it.patient for it in facts}
    names = sorted({it.slide if level == "slide" else it.patient for it in facts})
    with appearing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        who = ["slide", "patient"] if level == "slide" else ["patient"]
        writer.writerow(
            [*who, "label", "patches", "predicted", "decided", *(f"p_{c}" for c in classes)]
        )
        nothing: list[object] = [0, "", "", *("" for _ in classes)]
        for name in names:
            whose = [patient[name]] if level == "slide" else []
            writer.writerow([name, *whose, labels.get(name, ""), *told.get(name, nothing)])


def _told(
    parts: Sequence[PatchScores],
    level: Level,
    how: Aggregation,
    judging: JudgeSettings,
    thresholds: Thresholds,
) -> dict[str, list[object]]:
    """By slide or patient: patches, likeliest class, the class decided for, probabilities."""
    scores = joined_scores(parts)
    positive = positive_class(scores.classes, judging.positive)
    # Whatever their patches' labels are, they all are put together.
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


def _labels_by(facts: Sequence[SlideFacts], level: Level) -> dict[str, str]:
    """Labels of slides; or of patients, where all of a patient's slides have one."""
    found: dict[str, set[str]] = {}
    for it in facts:
        if it.label is not None:
            found.setdefault(it.slide if level == "slide" else it.patient, set()).add(it.label)
    return {name: labels.pop() for name, labels in found.items() if len(labels) == 1}


def judged(
    parts: Sequence[PatchScores], judging: JudgeSettings, thresholds: Thresholds
) -> Evaluation | None:
    """How good predictions are, of the patches whose labels are known; None where no two classes are.

    Args:
        parts: of all slides.
        judging: what a run is judged by.
        thresholds: as chosen on validation.
    """
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
