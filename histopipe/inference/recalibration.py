"""Calibration of predictions, and thresholds, on slides that no model has used: `predict --calibrate-with`.

The mean of several models is less extreme than each of them, and nothing in their trainings can calibrate it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import choose_thresholds, fit_temperature, tempered
from histopipe.inference.options import PredictOptions
from histopipe.inference.stored_slides import read_current_labels
from histopipe.system.output import Progress, counted, listed
from histopipe.tasks.predictions import ThresholdsByLevel, joined_predictions
from histopipe.tasks.task import EvaluationSettings, Predictions


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
