"""A run: the folder of a training or of a cross-validation, and what its files record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, HistopipeError, UsageError
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.evaluation.evaluate import tempered
from histopipe.evaluation.unusual import TrainingRange, read_range
from histopipe.features.feature_sets import paths_of_stores
from histopipe.predictions.prediction_tables import PREDICTIONS, read_predictions
from histopipe.predictions.sources import READING, PredictionsFolder, PredictionSource, class_names
from histopipe.runs.config import TrainConfig
from histopipe.runs.folder import CONFIG, SLIDES, is_cross_validation, runs_of
from histopipe.runs.result import METRICS, TrainResult
from histopipe.runs.task_config import load_config, read_config
from histopipe.splits.slide_table import SlideEntry, leaked_patients, read_slide_table
from histopipe.splits.splits import DROPPED, SPLITS, SlideSplit, Splits, load_splits, patches_crc
from histopipe.splits.subsets import SUBSETS, Subset
from histopipe.store.catalog import parts_of
from histopipe.store.store import Store
from histopipe.system.files import read_json, reading
from histopipe.system.output import message
from histopipe.system.table_files import nfc, read_columns
from histopipe.tasks.predictions import joined_predictions
from histopipe.tasks.registry import make_task
from histopipe.tasks.task import Predictions, Task

_FORMERLY_MISSING = {"na", "n/a", "nan", "null", "none"}
"""Cells that versions without the setting `na` took for missing values in subgroups, in lower case."""


class Run(PredictionSource):
    """A run, by its folder. Each file is read when it is first asked for.

    As a source of predictions, it has the validation and test patches: training patches have no predictions.

    Raises, where a file is read:
        UsageError: the run is not finished.
        DamagedStore: the file cannot be read.
    """

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

    @property
    def store_paths(self) -> list[Path]:
        """The stores of the training, or those of the features that it was trained on; for errors, see there."""
        return [
            part
            for path in paths_of_stores(read_config(self.folder / CONFIG))
            for part in parts_of(path)
        ]

    @cached_property
    def predictions(self) -> dict[Subset, Predictions]:
        """Predictions of patches or bags by subset."""
        return read_predictions(self.folder / PREDICTIONS)

    @property
    def of_patches(self) -> bool:
        """Whether patches are predicted, and not bags."""
        return "x_l0" in read_columns(self.folder / PREDICTIONS)

    @cached_property
    def classes(self) -> Sequence[str]:  # noqa: D102
        return class_names(self.folder / PREDICTIONS)

    @cached_property
    def _rows(self) -> dict[str, list[tuple[Subset, NDArray[np.intp]]]]:
        """Subsets of each slide, sorted by name, with the rows of the slide in their predictions."""
        rows: dict[str, list[tuple[Subset, NDArray[np.intp]]]] = defaultdict(list)
        for subset, predictions in self.predictions.items():
            order = np.argsort(predictions.slide, kind="stable")
            numbers, starts = np.unique(predictions.slide[order], return_index=True)
            for number, of_slide in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
                rows[predictions.slides[number]].append((subset, of_slide))
        return dict(sorted(rows.items()))

    def slide_ids(self) -> Collection[str]:  # noqa: D102
        with READING:
            return self._rows.keys() if self.of_patches else ()

    def of_slide(self, slide: str) -> Predictions | None:  # noqa: D102
        return self._joined(slide) if slide in self.slide_ids() else None

    def _joined(self, slide: str) -> Predictions:
        return joined_predictions(
            [self.predictions[subset].rows(rows) for subset, rows in self._rows[slide]]
        )

    def by_slide(self) -> dict[str, dict[str, float | str]]:  # noqa: D102
        with READING:
            slides = [*self._rows]
        values = {}
        for slide in slides:
            predictions = self._joined(slide)
            mean = predictions.output.mean(axis=0, dtype=np.float64)
            names = (name.removeprefix("p_") for name in predictions.task.output_names)
            of_slide: dict[str, float | str] = dict(zip(names, mean.tolist(), strict=True))
            if self.classes:
                label = predictions.label
                of_slide["predicted"] = self.classes[int(mean.argmax())]
                if (label >= 0).any():
                    right = predictions.output.argmax(axis=1) == label
                    of_slide["correct"] = float(right[label >= 0].mean())
            values[slide] = of_slide
        return values

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

    @cached_property
    def _split_slides(self) -> dict[tuple[str, int], SlideSplit]:
        """Slides of the split by store and number; empty if there is none, or the file is damaged."""
        with suppress(UsageError, DamagedStore):
            uuids = self.splits.uuids
            return {(uuids[slide.store], slide.slide): slide for slide in self.splits.slides}
        return {}

    def split(self, store: Store, slide: int) -> NDArray[np.int8] | None:  # noqa: D102
        entry = self._split_slides.get((store.uuid, slide))
        return entry.subsets if entry and entry.crc == patches_crc(store, slide) else None

    def split_by_slide(self) -> dict[str, str]:  # noqa: D102
        names = {}
        for slide in self._split_slides.values():
            subsets = set(slide.subsets.tolist()) - {DROPPED}
            names[slide.id] = SUBSETS[subsets.pop()] if len(subsets) == 1 else "several"
        return names

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


def open_source(folder: Path, name: str = "") -> PredictionSource:
    """Open a folder of predictions, or a run.

    Raises:
        UsageError: it is neither, or the run has no predictions, for example because it has not finished.
    """
    predictions, run = PredictionsFolder(folder, name), Run(folder, name)
    if predictions.exists:
        return predictions
    if run.of_bags or (folder / PREDICTIONS).exists():
        return run
    if (folder / CONFIG).exists():
        raise UsageError(
            f"{folder} has no predictions",
            expected="a finished run",
            todo=f"finish it: histopipe train --resume --out {folder}",
        )
    raise UsageError(
        f"{folder} holds no predictions",
        expected="a folder of `histopipe predict`, or of a finished run",
    )


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
