"""Predictions of patches put together: a line for each slide and patient, and how good they are where labels are known."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
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
from histopipe.files import appearing


def write_summary(
    path: Path,
    scores: PatchScores,
    level: Level,
    how: Aggregation,
    *,
    labels: Mapping[str, str],
    judging: JudgeSettings,
    thresholds: Thresholds,
) -> None:
    """A CSV with a line for each slide or patient: who, label, patches, likeliest class, the class decided for, probabilities.

    Args:
        path: the file.
        scores: of all patches.
        level: "slide" or "patient".
        how: patches are put together.
        labels: of slides or patients by name, where they are known.
        judging: which class is positive, and what "top_k" takes.
        thresholds: from which probability on it is decided for.
    """
    positive = positive_class(scores.classes, judging.positive)
    # Whatever their patches' labels are, they all are put together.
    blank = replace(scores, label=np.full(len(scores.label), -1, np.int32))
    found = scores_of(blank, level, how, top_k=judging.top_k, positive=positive or 0)
    threshold, _ = thresholds.get(name_of(level, how), (None, None))
    decided = decide(found, positive, threshold)
    group = scores.slide if level == "slide" else scores.patient
    counts = np.bincount(group, minlength=len(scores.slides))
    whose = dict(zip(scores.slide.tolist(), scores.patient.tolist(), strict=True))
    names = scores.slides if level == "slide" else scores.patients
    with appearing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        who = ["slide", "patient"] if level == "slide" else ["patient"]
        classes = scores.classes
        writer.writerow(
            [*who, "label", "patches", "predicted", "decided", *(f"p_{c}" for c in classes)]
        )
        for i, item in enumerate(found.item.tolist()):
            name = names[item]
            writer.writerow([
                name, *([scores.patients[whose[item]]] if level == "slide" else []),
                labels.get(name, ""), counts[item], classes[found.probability[i].argmax()],
                classes[decided[i]], *(f"{p:.9g}" for p in found.probability[i].tolist()),
            ])  # fmt: skip


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
