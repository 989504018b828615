"""What the files of finished runs record of their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import tempered
from histopipe.evaluation.prediction_sets import PredictionSets
from histopipe.evaluation.unusual import TrainingRange, read_range
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, is_finished, read_result
from histopipe.runs.task_config import load_config
from histopipe.system.files import read_json
from histopipe.system.output import message
from histopipe.system.table_files import nfc
from histopipe.tasks.predictions import ThresholdsByLevel
from histopipe.tasks.registry import make_task
from histopipe.tasks.task import Task


def run_folders(folder: Path) -> list[Path]:
    """Return the folder of a run, or the folders of the finished folds of a cross-validation.

    Raises:
        UsageError: no fold is finished.
    """
    if not run_folder.is_cross_validation(folder):
        return [folder]
    folds = run_folder.runs_of(folder)
    done = [path for path in folds if is_finished(path)]
    if not done:
        raise UsageError(
            f"{folder} has no finished fold", todo="continue it with `histopipe train --resume`"
        )
    if len(done) < len(folds):
        message(f"warning: {len(folds) - len(done)} of {len(folds)} folds are not finished")
    return done


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What the files of a finished run record of its model. `metrics` is the content of `metrics.json`."""

    folder: Path
    config: TrainConfig
    metrics: Mapping[str, Any]
    thresholds: ThresholdsByLevel
    """Chosen on the validation data."""
    temperature: tuple[float, ...]
    """Of the probabilities; empty if they are not calibrated."""
    sets: PredictionSets | None
    """Calibration of prediction sets; None without."""
    training_range: TrainingRange | None
    """Range of the training's features; None in runs of earlier versions."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; none for other tasks."""
        return tuple(map(nfc, self.metrics["classes"]))

    @property
    def task(self) -> Task:
        """What the model predicts, with its classes or the columns of its targets."""
        return make_task(self.config.task, self.metrics.get("targets", ()), self.classes)

    @property
    def targets(self) -> tuple[str, ...]:
        """Columns of the labels file with the target; none for classification."""
        return () if self.task.of_classes else self.task.columns

    def calibrated(self, probability: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (..., C) outputs of the model with its temperature."""
        return (
            tempered(probability, self.temperature).astype(np.float32)
            if self.temperature
            else probability
        )


def read_run(folder: Path) -> FinishedRun:
    """Read the files of a finished run.

    Raises:
        UsageError: there is no finished run.
        DamagedStore: the run cannot be read.
    """
    result, config = read_result(folder), load_config(folder / run_folder.CONFIG)
    return FinishedRun(
        folder,
        config,
        read_json(folder / METRICS),
        result.thresholds,
        result.calibration.temperature if result.calibration else (),
        result.sets,
        read_range(folder),
    )


def describe_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the run, or the cross-validation and the number of its models, as settings of a folder of predictions."""
    several = {"models": len(folders)} if len(folders) > 1 else {}
    return {"run": str(folders[0].parent if several else folders[0]), **several}


def mean_text(models: int) -> str:
    """Return what the predictions of several models are, as text."""
    return (
        f"means of {models} models. Thresholds are the means of theirs, and nobody has validated them for the mean of models; nothing "
        "in the trainings can calibrate this mean, which is less extreme than each of them: see --calibrate-with"
    )


def check_same(values_of_runs: Mapping[Path, Mapping[str, object]]) -> None:
    """Raise a UsageError if a named value differs between runs, given by the folder of each run."""
    first, values = next(iter(values_of_runs.items()))
    for folder, of_run in values_of_runs.items():
        for name, value in of_run.items():
            if value != values[name]:
                raise UsageError(
                    f"{folder}: {name}", found=value, expected=f"{values[name]}, as in {first}"
                )
