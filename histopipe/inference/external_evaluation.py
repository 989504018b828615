"""Evaluation of predictions of slides with known labels: the file `evaluation.json` in the folder of the predictions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.evaluation.breakdown import Breakdown, break_down
from histopipe.evaluation.evaluate import Evaluation, evaluate
from histopipe.predictions.sources import PredictedSlide, labelled_patches
from histopipe.predictions.tables import write_predictions
from histopipe.slides.tables import SlideLabel
from histopipe.splits.slide_table import (
    Exclusion,
    Flow,
    SlideEntry,
    flow_from_json,
    flow_of,
    flow_to_json,
    write_slide_table,
)
from histopipe.system.files import read_json, reading, write_json
from histopipe.system.output import message
from histopipe.tasks.choices import TaskName
from histopipe.tasks.predictions import ModelPredictions, ThresholdsByLevel, joined_predictions
from histopipe.tasks.task import EvaluationSettings, Predictions

EVALUATION = "evaluation.json"
PARTICIPANTS = "participants.csv"
"""All slides, in the form of a run's `slides.csv`."""
EVALUATED = "evaluated.csv"
"""Evaluated predictions of a slide model, in the form of a run's `predictions.csv`. Those of patches are in `patches/`."""


@dataclass(frozen=True, slots=True)
class ExternalEvaluation:
    """Evaluation, metrics by subgroup, and flow of the predicted slides."""

    evaluation: Evaluation
    breakdown: Breakdown
    flow: Flow
    positive: str | None = None
    """Positive class, if it is not the last one."""
    in_training: tuple[str, ...] = ()
    """Slides, or patients, that were used in the training: they make metrics too good."""

    @property
    def task(self) -> TaskName:
        """The task that was evaluated."""
        return self.evaluation.finest.task

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict, in the form of the metrics of a run."""
        return {
            "test": self.evaluation.to_json(), "breakdown": self.breakdown.to_json(),
            "flow": flow_to_json(self.flow), "positive": self.positive,
            "in_training": list(self.in_training),
        }  # fmt: skip


def training_warning(names: Sequence[str], unit: str) -> str:
    """Return the warning that slides or patients, or other slides of their patients, were used in the training."""
    return (
        f"warning: the training used {len(names)} of these {unit}s, or slides of patients of the same name ("
        f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}): "
        "metrics on them are not valid for new slides"
    )


def slides_of_files(
    ids: Sequence[str], predicted: Iterable[PredictedSlide], labels: Mapping[str, SlideLabel]
) -> list[SlideEntry]:
    """Return the slides of slide files, and other predicted slides, excluded without a reason."""
    by_name = {slide.slide: slide for slide in predicted}
    slides = []
    for name in dict.fromkeys([*ids, *by_name]):
        slide, row = by_name.get(name), labels.get(name, SlideLabel(None))
        label = row.label or (slide.label if slide else None) or ""
        slides.append(
            SlideEntry(
                slide=name, patient=row.patient or (slide.patient if slide else None) or name,
                site=row.site or "", label=label, label_source="labels file" if label else "",
                measured={} if slide is None or slide.mpp is None else {"mpp": f"{slide.mpp:.4g}"},
                cells=dict(row.cells),
            )
        )  # fmt: skip
    return slides


def evaluated_slides(
    table: Sequence[SlideEntry],
    predicted: Mapping[str, tuple[int, int]],
    labelled: Sequence[str],
    failed: Mapping[str, str],
    classes: Sequence[str],
) -> list[SlideEntry]:
    """Return the slides, each as evaluated ("test") or with the reason of its exclusion.

    Args:
        table: all slides, excluded with a reason if they have no patches.
        predicted: number of predicted and of skipped patches, by slide.
        labelled: slides with a known label or target.
        failed: reasons by slide.
        classes: of the model; empty for other tasks.
    """
    labelled_ids = set(labelled)
    slides = []
    for entry in table:
        patches, skipped = predicted.get(entry.slide, (0, 0))
        planned = max(entry.planned, patches + skipped)
        if entry.slide in failed:
            slides.append(replace(entry, reason=Exclusion.PREDICTION_FAILED))
        elif entry.slide not in predicted:
            slides.append(replace(entry, reason=entry.reason or Exclusion.NO_PATCHES))
        elif patches and entry.slide in labelled_ids:
            counts: dict[str, Any] = {
                "planned": planned,
                "unreadable": planned - patches,
                "test": patches,
            }
            slides.append(replace(entry, reason=None, **counts))
        else:
            reason = Exclusion.NO_LABEL
            if not patches:
                reason = Exclusion.NO_READABLE_PATCH if planned else Exclusion.NO_PATCHES
            elif entry.label and classes and entry.label not in classes:
                reason = Exclusion.NOT_A_CLASS
            counts = {"planned": planned, "unreadable": planned - patches}
            slides.append(replace(entry, reason=reason, **counts))
    return slides


def evaluate_labelled(
    parts: Sequence[Predictions],
    evaluation_settings: EvaluationSettings,
    thresholds: ThresholdsByLevel,
    leaked: Collection[str],
) -> tuple[ModelPredictions, Evaluation] | None:
    """Return the patches with known labels, with the thresholds, and their evaluation; None if they have fewer than two classes.

    `leaked` as for `evaluate`.
    """
    labelled = labelled_patches(parts)
    if not labelled:
        return None
    scores = joined_predictions(labelled)
    if len(np.unique(scores.label)) < 2:
        return None
    part = scores, thresholds
    return part, evaluate([part], evaluation_settings, leaked)


def write_evaluation(
    folder: Path,
    evaluated: tuple[ModelPredictions, Evaluation] | None,
    slides: Sequence[SlideEntry],
    *,
    subgroups: Sequence[str],
    settings: EvaluationSettings,
    in_training: Iterable[str],
) -> ExternalEvaluation | None:
    """Write all slides, and `evaluation.json` and its table, or remove old ones if there is no evaluation.

    `evaluated` are the evaluated predictions, with their evaluation; None if too few labels are known. For `in_training` see
    `ExternalEvaluation`, for the other arguments `break_down`.
    """
    unknown = sorted({slide.label for slide in slides if slide.reason is Exclusion.NOT_A_CLASS})
    if unknown:
        message(f"warning: labels that are no class of the model are ignored: {', '.join(unknown)}")
    path = folder / EVALUATION
    for name in (EVALUATION, EVALUATED):
        (folder / name).unlink(missing_ok=True)
    write_slide_table(folder / PARTICIPANTS, slides)
    if evaluated is None:
        if any(slide.label for slide in slides):
            message("no metrics: slides with labels of two classes of the model are needed")
        return None
    part, evaluation = evaluated
    if part[0].level != "patch":
        write_predictions(folder / EVALUATED, [({"split": "test"}, part[0])])
    breakdown = break_down([part], evaluation, slides, subgroups, settings)
    result = ExternalEvaluation(
        evaluation,
        breakdown,
        flow_of(slides),
        settings.positive,
        tuple(
            sorted(
                {*in_training}
                & {name for slide in slides if slide.test for name in (slide.slide, slide.patient)}
            )
        ),
    )
    write_json(path, result.to_json())
    return result


def read_evaluation(folder: Path) -> ExternalEvaluation | None:
    """Read `evaluation.json`; None if no labels are known.

    Raises:
        DamagedStore: the file is damaged.
    """
    path = folder / EVALUATION
    with (
        suppress(FileNotFoundError),
        reading(path, todo="run the same `histopipe predict` again"),
    ):
        value = read_json(path)
        return ExternalEvaluation(
            Evaluation.from_json(value["test"]), Breakdown.from_json(value["breakdown"]),
            flow_from_json(value["flow"]), value["positive"], tuple(value.get("in_training", ())),
        )  # fmt: skip
    return None
