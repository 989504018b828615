"""A run: the folder of a training or of a cross-validation, what its files record, and the result of a training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, HistopipeError, UsageError
from histopipe.evaluation.breakdown import Breakdown, EvaluatedPredictions, breakdown_lines
from histopipe.evaluation.evaluate import (
    Calibration,
    Evaluation,
    evaluation_lines,
    main_metric,
    number,
    split_lines,
    tempered,
    with_ends,
)
from histopipe.evaluation.prediction_sets import PredictionSets
from histopipe.evaluation.unusual import TrainingRange, read_range
from histopipe.features.feature_sets import paths_of_stores
from histopipe.predictions.prediction_tables import PREDICTIONS, read_predictions
from histopipe.predictions.sources import READING, PredictionsFolder, PredictionSource, class_names
from histopipe.runs.config import TrainConfig
from histopipe.runs.folder import SLIDES, is_cross_validation, runs_of
from histopipe.runs.task_config import load_config, read_config
from histopipe.splits.slide_table import (
    Flow,
    SlideEntry,
    flow_from_json,
    flow_to_json,
    leaked_patients,
    read_slide_table,
)
from histopipe.splits.splits import DROPPED, SPLITS, SlideSplit, Splits, load_splits, patches_crc
from histopipe.store.store import Store, parts_of
from histopipe.system.files import read_json, reading
from histopipe.system.folders import CONFIG
from histopipe.system.forecast import bottleneck
from histopipe.system.output import message, plural
from histopipe.system.table_cells import nfc
from histopipe.system.table_files import read_columns
from histopipe.tasks.choices import EVALUATED, SUBSETS, Subset
from histopipe.tasks.intervals import Difference, read_differences
from histopipe.tasks.predictions import Predictions, ThresholdsByLevel, joined_predictions
from histopipe.tasks.registry import TASKS, make_task
from histopipe.tasks.task import Task

METRICS = "metrics.json"
_PLAIN = ("epochs", "best_epoch", "seconds", "host_bytes", "gpu_bytes")
"""Fields of a result that are plain values in `metrics.json`."""
_BASELINE, _CALIBRATION, _SETS = "covariates_only", "calibration", "prediction_sets"
_ADDED = "slides_add"


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult:
    """The result of a finished training. `str()` of it is a table of metrics.

    Attributes:
        folder: folder of the run.
        epochs: number of epochs.
        best_epoch: epoch of the model in `model.keras`, from 1; 0 for the start from the covariates alone. The last
            one without validation.
        metrics: metrics of that model, by subset; without "validation" or "test" if these have no patches.
        seconds: duration of the epochs and of the evaluation.
        host_bytes: peak memory of the process.
        gpu_bytes: peak memory on all its GPUs; None without a GPU.
        sets: calibration and coverage of prediction sets; None without `conformal`.
        shares: share of each stage in the time of the epochs, the largest first; see `Stages`. Of a resumed training, since
            then.
        covariates_only: metrics of a model of the covariates alone, by subset; empty without covariates.
        slides_add: metrics minus those of `covariates_only`, on the same patients, by subset and level.
        calibration: temperature of the probabilities; None without `calibrate`.
        breakdown: metrics of the test set, or else of validation, by subgroup; and the check for shortcuts.
        flow: numbers of slides, patients and patches; empty in runs of earlier versions.
    """

    folder: Path
    epochs: int
    best_epoch: int
    metrics: Mapping[Subset, Evaluation]
    seconds: float
    host_bytes: int
    gpu_bytes: int | None
    covariates_only: Mapping[Subset, Evaluation] = field(default_factory=dict)
    calibration: Calibration | None = None
    breakdown: Breakdown = field(default_factory=Breakdown)
    flow: Flow = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    sets: PredictionSets | None = None
    slides_add: Mapping[Subset, Mapping[str, Mapping[str, Difference]]] = field(
        default_factory=dict
    )

    def added_text(self, subset: Subset) -> str:
        """Return what the slides add to the covariates alone; empty without covariates, or in runs of earlier versions."""
        if not self.best_epoch:
            return (
                "slides have no part in the predictions: the model of epoch 0, which predicts from the covariates alone, had the "
                "best validation result"
            )
        for level, metrics in islice(self.slides_add.get(subset, {}).items(), 1):
            name, title = next(iter(TASKS[self.metrics[subset].finest.task].main.items()))
            text = with_ends(metrics[name].value, metrics[name].interval, signed=True)
            return f"{title} of {plural(level.partition('_')[0])} minus that of the covariates alone: {text}"
        return ""

    @property
    def thresholds(self) -> ThresholdsByLevel:
        """Decision thresholds of the model, by level."""
        return next(iter(self.metrics.values())).thresholds

    def __repr__(self) -> str:
        main = {
            subset: main_metric(evaluation.finest) for subset, evaluation in self.metrics.items()
        }
        values = (f", {subset} {title} {number(value)}" for subset, (title, value) in main.items())
        return f"<TrainResult {self.folder}: epoch {self.best_epoch} of {self.epochs}{''.join(values)}>"

    def __str__(self) -> str:
        lines = split_lines(self.metrics)
        for subset, evaluation in self.covariates_only.items():
            lines += evaluation_lines(f"covariates alone, {subset}", evaluation)
            lines.append(f"  {self.added_text(subset)}")
        if self.calibration is not None:
            values = (number(temperature, 2) for temperature in self.calibration.temperature)
            lines.append(f"probabilities calibrated on validation: temperature {', '.join(values)}")
        lines += breakdown_lines(self.breakdown, next(iter(self.metrics.values())).finest.task)
        lines += [] if self.sets is None else self.sets.lines
        lines += [f"training was {bottleneck(self.shares)}"] if self.shares else []
        lines.append(f"model of epoch {self.best_epoch}, predictions and metrics: {self.folder}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the result in the form of `metrics.json`."""
        baseline = {
            subset: evaluation.to_json() for subset, evaluation in self.covariates_only.items()
        }
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            **{subset: evaluation.to_json() for subset, evaluation in self.metrics.items()},
            **({_BASELINE: baseline, _ADDED: _plain(self.slides_add)} if baseline else {}),
            "breakdown": self.breakdown.to_json(),
            "flow": flow_to_json(self.flow),
            "shares": dict(self.shares),
            **({_CALIBRATION: asdict(self.calibration)} if self.calibration else {}),
            **({_SETS: asdict(self.sets)} if self.sets else {}),
        }

    @classmethod
    def from_json(cls, folder: Path, value: Mapping[str, Any]) -> TrainResult:
        """Return the result in the form of `metrics.json`, in the folder of its run."""
        fitted = value.get(_CALIBRATION)
        return cls(
            folder=folder,
            metrics=_read_evaluations(value),
            covariates_only=_read_evaluations(value.get(_BASELINE, {})),
            slides_add={
                subset: {level: read_differences(metrics) for level, metrics in levels.items()}
                for subset, levels in value.get(_ADDED, {}).items()
            },
            breakdown=Breakdown.from_json(value["breakdown"])
            if "breakdown" in value
            else Breakdown(),
            flow=flow_from_json(value.get("flow", {})),
            shares=value.get("shares", {}),
            calibration=fitted
            and Calibration(tuple(map(float, fitted["temperature"])), fitted["before"]),
            sets=PredictionSets(**value[_SETS]) if _SETS in value else None,
            **{name: value[name] for name in _PLAIN},
        )


def _plain(added: Mapping[Subset, Mapping[str, Mapping[str, Difference]]]) -> dict[str, Any]:
    return {
        subset: {
            level: {name: asdict(difference) for name, difference in metrics.items()}
            for level, metrics in levels.items()
        }
        for subset, levels in added.items()
    }


def _read_evaluations(value: Mapping[str, Any]) -> dict[Subset, Evaluation]:
    return {subset: Evaluation.from_json(value[subset]) for subset in EVALUATED if subset in value}


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """Metrics of the predictions of one epoch.

    Attributes:
        count: number of samples.
        loss: mean loss, weighted as in training.
        values: metrics by name; None if undefined. For several classes, `auc` is the mean one-vs-rest AUC.
        score: the metric by which the best epoch is chosen; higher is better.
    """

    count: int
    loss: float
    values: Mapping[str, float | None]
    score: float | None

    def row(self, prefix: str = "") -> dict[str, float | None]:
        """Return the columns of `history.csv`."""
        return {
            f"{prefix}{name}": value for name, value in {"loss": self.loss, **self.values}.items()
        }


_TITLES = {
    **{"accuracy": ("acc", 3), "auc": ("auc", 4), "r2": ("R²", 4)},
    **{"c_index": ("C-index", 4), "dice": ("Dice", 4)},
}


def epoch_line(row: Mapping[str, Any], epochs: int, *, better: bool) -> str:
    """Return the row of an epoch as one line of text."""
    unit = "patches" if "patches_per_s" in row else "bags"
    speed = f"{row[f'{unit}_per_s']:.{0 if unit == 'patches' else 1}f} {unit}/s"
    parts = [f"epoch {row['epoch']}/{epochs}"]
    for title, prefix in [("", ""), ("val ", "val_")][: 1 + ("val_loss" in row)]:
        parts.append(f"{title}loss {row[f'{prefix}loss']:.4f}")
        parts += [
            f"{name} {number(row[prefix + key], digits)}"
            for key, (name, digits) in _TITLES.items()
            if key in row
        ]
    parts.append(f"{speed}, {row['input_wait']:.0%} waiting for input{'  *best' if better else ''}")
    return "  ".join(parts)


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
                # Unknown in runs of earlier versions without a readable split.
                with suppress(HistopipeError):
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
            names = [predictions.slides[n] for n in numbers.tolist()]
            for name, of_slide in zip(names, np.split(order, starts[1:]), strict=True):
                rows[name].append((subset, of_slide))
        return dict(sorted(rows.items()))

    def slide_ids(self) -> Collection[str]:  # noqa: D102
        with READING:
            return self._rows.keys() if self.of_patches else ()

    def of_slide(self, slide: str) -> Predictions | None:  # noqa: D102
        return self._joined(slide) if slide in self.slide_ids() else None

    def _joined(self, slide: str) -> Predictions:
        parts = []
        for subset, rows in self._rows[slide]:
            part = self.predictions[subset].rows(rows)
            numbers, patient = np.unique(part.patient, return_inverse=True)
            # Only its own names: those of all slides would be joined anew for each slide.
            parts.append(
                replace(
                    part,
                    slides=(slide,),
                    slide=np.zeros(len(rows), np.int32),
                    patients=tuple(part.patients[n] for n in numbers.tolist()),
                    patient=patient.astype(np.int32),
                )
            )
        return joined_predictions(parts)

    def by_slide(self) -> dict[str, dict[str, float | str]]:  # noqa: D102
        with READING:
            slides = [*self._rows]
        values = {}
        for slide in slides:
            predictions = self._joined(slide)
            pooled = predictions.output.mean(axis=0, keepdims=True, dtype=np.float64)
            (mean,) = predictions.task.patch_values(pooled)
            names = (name.removeprefix("p_") for name in predictions.task.value_names)
            of_slide: dict[str, float | str] = dict(zip(names, mean.tolist(), strict=True))
            if self.classes:
                of_slide["predicted"] = self.classes[int(mean.argmax())]
                if ((label := predictions.label) >= 0).any():
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
