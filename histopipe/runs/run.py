"""A run: the folder of a training or of a cross-validation, and what its files record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import HistopipeError, UsageError
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.evaluation.evaluate import tempered
from histopipe.evaluation.unusual import TrainingRange, read_range
from histopipe.predictions.prediction_tables import PREDICTIONS, read_predictions
from histopipe.runs.config import TrainConfig
from histopipe.runs.folder import CONFIG, SLIDES, is_cross_validation, runs_of
from histopipe.runs.result import METRICS, TrainResult
from histopipe.runs.task_config import load_config
from histopipe.splits.slide_table import SlideEntry, leaked_patients, read_slide_table
from histopipe.splits.splits import SPLITS, Splits, load_splits
from histopipe.splits.subsets import Subset
from histopipe.system.files import read_json, reading
from histopipe.system.output import message
from histopipe.system.table_files import nfc
from histopipe.tasks.registry import make_task
from histopipe.tasks.task import Predictions, Task

_FORMERLY_MISSING = {"na", "n/a", "nan", "null", "none"}
"""Cells that versions without the setting `na` took for missing values in subgroups, in lower case."""


@dataclass(frozen=True)
class Run:
    """A run, by its folder. Each file is read when it is first asked for.

    Raises, where a file is read:
        UsageError: the run is not finished.
        DamagedStore: the file cannot be read.
    """

    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished: its metrics are written last."""
        return (self.folder / METRICS).exists()

    @property
    def models(self) -> list[Run]:
        """The finished folds of a cross-validation, or the run.

        Raises:
            UsageError: the run is not finished, or none of its folds.
        """
        if not is_cross_validation(self.folder):
            self.metrics_file  # noqa: B018 - raises without it
            return [self]
        folds = [Run(folder) for folder in runs_of(self.folder)]
        done = [fold for fold in folds if fold.is_finished]
        if not done:
            raise UsageError(
                f"{self.folder} has no finished fold",
                todo="continue it with `histopipe train --resume`",
            )
        if len(done) < len(folds):
            message(f"warning: {len(folds) - len(done)} of {len(folds)} folds are not finished")
        return done

    @cached_property
    def config(self) -> TrainConfig:
        """Settings of the training."""
        return load_config(self.folder / CONFIG)

    @cached_property
    def splits(self) -> Splits:
        """Its split."""
        return load_splits(self.folder / SPLITS)

    @cached_property
    def _read(self) -> tuple[Mapping[str, Any], TrainResult]:
        resume = f"`histopipe train --resume --out {self.folder}`"
        missing = UsageError(
            f"no finished run in {self.folder}",
            expected=f"a {METRICS} in it",
            todo=f"finish it with {resume}" if self.folder.is_dir() else "check the path",
        )
        path, todo = self.folder / METRICS, f"evaluate the model again with {resume}"
        with reading(path, missing=missing, todo=todo):
            value = read_json(path)
            result = TrainResult.from_json(self.folder, value)
            if any(evaluation.in_training is None for evaluation in result.metrics.values()):
                with suppress(
                    HistopipeError
                ):  # unknown in runs of earlier versions without a readable split
                    leaked = leaked_patients(self.splits)
                    metrics = {
                        subset: replace(evaluation, in_training=len(leaked[subset]))
                        for subset, evaluation in result.metrics.items()
                    }
                    result = replace(result, metrics=metrics)
            return value, result

    @property
    def metrics_file(self) -> Mapping[str, Any]:
        """The content of `metrics.json`."""
        return self._read[0]

    @property
    def result(self) -> TrainResult:
        """The result of the training."""
        return self._read[1]

    @cached_property
    def slides(self) -> list[SlideEntry]:
        """The rows of `slides.csv`. Missing values of the labels file are empty, also in runs of earlier versions."""
        empty = dict.fromkeys(() if self.config.na else _FORMERLY_MISSING, "")
        return [
            replace(
                slide,
                site=empty.get(slide.site.strip().lower(), slide.site),
                cells={
                    name: empty.get(cell.strip().lower(), cell)
                    for name, cell in slide.cells.items()
                },
            )
            for slide in read_slide_table(self.folder / SLIDES)
        ]

    @cached_property
    def predictions(self) -> dict[Subset, Predictions]:
        """Predictions of patches or bags by subset."""
        return read_predictions(self.folder / PREDICTIONS)

    @cached_property
    def evaluated(self) -> EvaluatedPredictions:
        """The evaluation, with the predictions."""
        result = self.result
        return EvaluatedPredictions(
            result.metrics,
            {name: part for name, part in self.predictions.items() if name in result.metrics},
            self.config.evaluation_settings,
            result.breakdown,
            result.flow,
            result.calibration,
            sets=result.sets,
        )

    @property
    def task(self) -> Task:
        """What the model predicts, with its classes or the columns of its targets."""
        classes = tuple(map(nfc, self.metrics_file["classes"]))
        return make_task(self.config.task, self.metrics_file.get("targets", ()), classes)

    @property
    def targets(self) -> tuple[str, ...]:
        """Columns of the labels file with the target; none for classification."""
        return () if self.task.of_classes else self.task.columns

    @property
    def temperature(self) -> tuple[float, ...]:
        """Temperature of the probabilities; empty if they are not calibrated."""
        return self.result.calibration.temperature if self.result.calibration else ()

    @cached_property
    def training_range(self) -> TrainingRange | None:
        """Range of the training's features; None in runs of earlier versions."""
        return read_range(self.folder)

    def calibrated(self, probability: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (..., C) outputs of the model with its temperature."""
        temperature = self.temperature
        return tempered(probability, temperature).astype(np.float32) if temperature else probability


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


def check_same(values_of_runs: Mapping[Path, Mapping[str, object]]) -> None:
    """Raise a UsageError if a named value differs between runs, given by the folder of each run."""
    first, values = next(iter(values_of_runs.items()))
    for folder, of_run in values_of_runs.items():
        for name, value in of_run.items():
            if value != values[name]:
                raise UsageError(
                    f"{folder}: {name}", found=value, expected=f"{values[name]}, as in {first}"
                )
