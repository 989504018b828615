"""The result of `predict`, the evaluation of slides with known labels, and the calibration by `--calibrate-with`.

The mean of several models is less extreme than each of them, and nothing in their trainings can calibrate it: slides that
no model has used can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.evaluation.breakdown import (
    Breakdown,
    EvaluatedPredictions,
    break_down,
    breakdown_lines,
)
from histopipe.evaluation.evaluate import (
    Evaluation,
    choose_thresholds,
    evaluate,
    evaluation_lines,
    fit_temperature,
    tempered,
)
from histopipe.evaluation.prediction_sets import NamedSets, PredictionSets
from histopipe.inference.options import PredictOptions
from histopipe.inference.slide_run import SlideRunResult
from histopipe.inference.stored_slides import read_current_labels
from histopipe.predictions.prediction_tables import write_predictions
from histopipe.predictions.sources import labelled_patches
from histopipe.runs.run import Run
from histopipe.splits.slide_table import (
    Exclusion,
    Flow,
    SlideEntry,
    flow_from_json,
    flow_of,
    flow_to_json,
    write_slide_table,
)
from histopipe.splits.splits import SPLITS, names_of, trained_on
from histopipe.system.files import read_json, reading, write_json
from histopipe.system.output import Progress, counted, listed, message
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.predictions import (
    EvaluationSettings,
    ModelPredictions,
    Predictions,
    ThresholdsByLevel,
    joined_predictions,
)

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
    sets: PredictionSets | None = None
    """What prediction sets reached; None without these."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict, in the form of the metrics of a run."""
        return {
            "test": self.evaluation.to_json(),
            "breakdown": self.breakdown.to_json(),
            "flow": flow_to_json(self.flow),
            "positive": self.positive,
            "in_training": list(self.in_training),
            "prediction_sets": self.sets and asdict(self.sets),
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class PredictResult(SlideRunResult):
    """Result of `predict`.

    Attributes:
        evaluated: metrics of all predictions in the folder, also by subgroup; None unless enough labels are known.
        unit: what was predicted: "slide", or "patient" if the model takes all slides of a patient together.
    """

    evaluated: ExternalEvaluation | None = None
    unit: EvaluationLevel = "slide"

    @property
    def metrics(self) -> Evaluation | None:
        """Metrics of all predictions in the folder; None unless enough labels are known."""
        return None if self.evaluated is None else self.evaluated.evaluation

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        values = SlideRunResult.to_json(
            replace(self, evaluated=None)
        )  # it has a form without tuples
        del values["evaluated"]
        if self.evaluated is not None:
            values["metrics"] = self.evaluated.evaluation.to_json()
            values["breakdown"] = self.evaluated.breakdown.to_json()
            values["prediction_sets"] = self.evaluated.sets and asdict(self.evaluated.sets)
        return values

    def __str__(self) -> str:
        text, evaluated = self.summary("predicted", "patches", self.unit), self.evaluated
        lines = (
            []
            if evaluated is None
            else [
                *evaluation_lines("labelled", evaluated.evaluation),
                *breakdown_lines(evaluated.breakdown, evaluated.evaluation.finest.task),
                *(evaluated.sets.lines if evaluated.sets else []),
            ]
        )
        return "\n".join([*lines, text])


@dataclass(frozen=True, slots=True)
class Recalibration:
    """Temperature and thresholds of the predictions of a folder, and the patients whose slides they were fitted to."""

    temperature: tuple[float, ...] = ()
    thresholds: ThresholdsByLevel = field(default_factory=dict)
    patients: frozenset[str] = frozenset()

    def applied(self, output: NDArray[Any]) -> NDArray[Any]:
        """Return (N, C) outputs with the temperature."""
        return (
            tempered(output, self.temperature).astype(output.dtype) if self.temperature else output
        )

    def kept(self, parts: Sequence[Predictions]) -> list[Predictions]:
        """Return the rows of patients that have fitted nothing."""
        rows = [~np.isin(part.ids("patient"), [*self.patients]) for part in parts]
        each = (
            part.rows(np.flatnonzero(of_part)) for part, of_part in zip(parts, rows, strict=True)
        )
        return [part for part in each if len(part)]


def recalibration(
    parts: Sequence[Predictions],
    options: PredictOptions,
    used: Collection[str],
    settings: EvaluationSettings,
    progress: Progress,
) -> Recalibration:
    """Fit temperature and thresholds to the slides of `--calibrate-with`; nothing without it.

    Args:
        parts: all predictions, means over the models.
        options: options of the command.
        used: slides, or patients, that a training has used: they are left out.
        settings: of the evaluation.
        progress: shows what was fitted.

    Raises:
        UsageError: the predictions are no probabilities, or no slide of two classes is left.
    """
    path = options.calibrate_with
    if path is None or not parts:
        return Recalibration()
    scores, flag = joined_predictions(parts), f"--calibrate-with {path}"
    task, unit = scores.task, scores.unit
    if not task.probabilities:
        raise UsageError(flag, found=f"a model of {task.name}", expected="one with probabilities")
    targets = () if task.of_classes else task.columns
    of_file = replace(options, labels=Path(path), subgroup=())
    rows = read_current_labels(of_file, sorted({*scores.ids(unit)}), targets) or {}
    patient_of = dict(zip(scores.ids(unit), scores.ids("patient"), strict=True))
    for name, row in rows.items():
        if row.patient and row.patient != patient_of[name]:
            raise UsageError(
                f"{flag}: {name}",
                found=f"patient {row.patient}",
                expected=f"{patient_of[name]}, as in the predictions",
                todo="pass --labels with the same column patient",
            )
    cells = {name: {**row.cells, "label": row.label or ""} for name, row in rows.items()}
    targets_of = {
        name: task.target(each, f"{flag}: {name}")
        for name, each in cells.items()
        if name not in used
    }
    blank = (np.nan,) * len(task.columns)
    target = np.array([targets_of.get(name) or blank for name in scores.ids(unit)], np.float64)
    fitted = replace(scores, target=target).labelled()
    classes = [np.unique(part.label) for _, part in task.classifications(fitted)]
    if min(map(len, classes)) < 2:
        raise UsageError(
            flag,
            found=f"{counted(len({*fitted.ids(unit)}), unit)} that no training has used, not of two classes",
            expected="slides of each class, that are also predicted, and that no fold has used",
        )
    temperature = fit_temperature(fitted)
    fitted = replace(fitted, output=tempered(fitted.output, temperature))
    patients = frozenset({*fitted.ids("patient")})
    progress.message(
        f"calibrated on {counted(len({*fitted.ids(unit)}), unit)} of {counted(len(patients), 'patient')} that no training has used: "
        f"temperature {listed([f'{value:.3f}' for value in temperature])}, and thresholds; metrics are of other patients"
    )
    return Recalibration(temperature, choose_thresholds(fitted, settings), patients)


def find_in_training(
    patients: Mapping[str, str | None],
    runs: Iterable[Path],
    unit: EvaluationLevel,
    progress: Progress,
) -> dict[str, str]:
    """Return the slides or patients that the training used, with their patients, and warn of them.

    Args:
        patients: patient of each slide, or of each patient; None if unknown.
        runs: folders of the runs.
        unit: what the names in `patients` are.
        progress: shows the warning.
    """
    used = set().union(*(trained_on(run / SPLITS) for run in runs))
    common = {
        name: patient or name
        for name, patient in patients.items()
        if names_of(name, patient) & used
    }
    if common:
        names = ", ".join(sorted(common)[:3]) + (", …" if len(common) > 3 else "")
        progress.message(
            f"warning: the training used {len(common)} of these {unit}s, or slides of patients of the same name ("
            f"{names}): metrics on them are not valid for new slides"
        )
    return common


def evaluated_slides(
    table: Sequence[SlideEntry],
    predicted: Mapping[str, tuple[int, int]],
    labelled: Collection[str],
    failed: Mapping[str, str],
    classes: Sequence[str],
    *,
    calibrating: Collection[str] = (),
) -> list[SlideEntry]:
    """Return the slides, each as evaluated ("test") or with the reason of its exclusion.

    Args:
        table: all slides, excluded with a reason if they have no patches.
        predicted: number of predicted and of skipped patches, by slide.
        labelled: slides with a known label or target.
        failed: reasons by slide.
        classes: of the model; empty for other tasks.
        calibrating: patients whose slides have calibrated the predictions.
    """
    return [
        replace(entry, reason=Exclusion.PREDICTION_FAILED)
        if entry.slide in failed
        else replace(entry, reason=Exclusion.CALIBRATES)
        if entry.patient in calibrating
        else _evaluated_slide(
            entry, predicted.get(entry.slide), classes, is_labelled=entry.slide in labelled
        )
        for entry in table
    ]


def _evaluated_slide(
    entry: SlideEntry,
    predicted: tuple[int, int] | None,
    classes: Sequence[str],
    *,
    is_labelled: bool,
) -> SlideEntry:
    if predicted is None:
        return replace(entry, reason=entry.reason or Exclusion.NO_PATCHES)
    patches, skipped = predicted
    planned = max(entry.planned, patches + skipped)
    entry = replace(entry, planned=planned, unreadable=planned - patches)
    if not patches:
        return replace(
            entry, reason=Exclusion.NO_READABLE_PATCH if planned else Exclusion.NO_PATCHES
        )
    if is_labelled:
        return replace(entry, reason=None, test=patches)
    is_other = entry.label and classes and entry.label not in classes
    return replace(entry, reason=Exclusion.NOT_A_CLASS if is_other else Exclusion.NO_LABEL)


def evaluate_labelled(
    parts: Sequence[Predictions],
    evaluation_settings: EvaluationSettings,
    thresholds: ThresholdsByLevel,
    leaked: Collection[str],
) -> tuple[ModelPredictions, Evaluation] | None:
    """Return the predictions with known targets, with the thresholds, and their evaluation.

    Return None if they cannot be evaluated, as with one class. `leaked` as for `evaluate`.
    """
    labelled = labelled_patches(parts)
    if not labelled:
        return None
    scores = joined_predictions(labelled)
    try:
        scores.task.check(scores.target, "predicted")
    except NothingToDo:
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
    sets: NamedSets,
) -> ExternalEvaluation | None:
    """Write all slides, and `evaluation.json` and its table, or remove old ones if there is no evaluation.

    `evaluated` are the evaluated predictions, with their evaluation; None if too few labels are known. `sets` are those
    of all predictions. For `in_training` see `ExternalEvaluation`, for the other arguments `break_down`.
    """
    unknown = sorted({slide.label for slide in slides if slide.reason is Exclusion.NOT_A_CLASS})
    if unknown:
        message(f"warning: labels that are no class of the model are ignored: {', '.join(unknown)}")
    for name in (EVALUATION, EVALUATED):
        (folder / name).unlink(missing_ok=True)
    write_slide_table(folder / PARTICIPANTS, slides)
    if evaluated is None:
        if any(slide.label for slide in slides):
            message(
                "no metrics: slides of two classes of the model, or with several known targets, are needed"
            )
        return None
    part, evaluation = evaluated
    if part[0].level != "patch":
        write_predictions(folder / EVALUATED, [({"split": "test"}, part[0])])
    tested = {name for slide in slides if slide.test for name in (slide.slide, slide.patient)}
    result = ExternalEvaluation(
        evaluation,
        break_down(
            EvaluatedPredictions({"test": evaluation}, {"test": part[0]}, settings),
            slides,
            subgroups,
        ),
        flow_of(slides),
        settings.positive,
        tuple(sorted(tested.intersection(in_training))),
        sets.cover(part[0], slides, subgroups, settings),
    )
    write_json(folder / EVALUATION, result.to_json())
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
            Evaluation.from_json(value["test"]),
            Breakdown.from_json(value["breakdown"]),
            flow_from_json(value["flow"]),
            value["positive"],
            tuple(value.get("in_training", ())),
            PredictionSets(**value["prediction_sets"]) if value.get("prediction_sets") else None,
        )
    return None


def describe_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the run, or the cross-validation and the number of its models, as settings of a folder of predictions."""
    several, folder = {"models": len(runs)} if len(runs) > 1 else {}, runs[0].folder
    return {"run": str(folder.parent if several else folder), **several}


def mean_text(models: int) -> str:
    """Return what the predictions of several models are, as text."""
    return (
        f"means of {models} models. Thresholds are the means of theirs, and nobody has validated them for the mean of models; nothing "
        "in the trainings can calibrate this mean, which is less extreme than each of them: see --calibrate-with"
    )
