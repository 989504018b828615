"""Finished runs without a training: outputs of numpy, written by the functions that write those of trainings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.evaluation.breakdown import EvaluatedPredictions, break_down
from histopipe.evaluation.evaluate import calibrated, evaluate_subsets
from histopipe.evaluation.prediction_sets import calibrate_sets
from histopipe.predictions.prediction_tables import PREDICTIONS, write_predictions
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import METRICS, EpochMetrics, TrainResult
from histopipe.runs.supervision import Supervision
from histopipe.runs.task_config import BagTrainConfig
from histopipe.runs.training_data import opened_sources, splits_and_slides
from histopipe.splits.slide_table import flow_of, leaked_patients, write_slide_table
from histopipe.splits.splits import SPLITS, SampleSource, Splits
from histopipe.system.files import write_json
from histopipe.system.table_files import write_dicts
from histopipe.tasks.choices import SUBSETS, Subset
from histopipe.tasks.classification import Multilabel
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.regression import Regression
from histopipe.tasks.survival import Survival, time_grid
from histopipe.tasks.task import Task

SKILL = 1.5
"""Distance of the outputs of the classes, in deviations of their noise: an AUC of about 0.85."""


@contextmanager
def without_training(truth: Mapping[str, int] | None = None) -> Iterator[None]:
    """Write the results of all trainings that this process starts by `write_run`.

    `truth` are class numbers by slide that the outputs follow in place of the labels, without noise.
    """
    write = partial(write_run, truth=truth or {})
    with (
        mock.patch("histopipe.runs.train.supervise", write),
        mock.patch("histopipe.runs.supervision.supervise", write),
    ):
        yield


def write_run(
    config: TrainConfig,
    folder: Path,
    *,
    watch: Supervision | None = None,
    resume: bool = False,
    truth: Mapping[str, int] = MappingProxyType({}),
) -> TrainResult:
    """Write a finished run, like `supervise`, without a model.

    Splits, tables, metrics and subgroups are computed as in a training. Outputs are the target, with noise that depends on
    the seed, the slide and the row.
    """
    run_folder.check(folder, resume=resume)
    splits_file = folder / SPLITS if resume else config.splits
    with opened_sources(config, splits_file) as sources:
        splits, slides = splits_and_slides(config, sources, folder, resume=resume)
        with run_folder.opened(folder, {SPLITS: splits}, config, resume=resume):
            write_slide_table(folder / run_folder.SLIDES, slides)
            predicted = {
                subset: predictions_of(config, sources, splits, subset, truth)
                for subset in SUBSETS[1:]
                if splits.slides_on(subset)
            }
            settings, calibration = config.evaluation_settings, None
            if config.calibrate:
                predicted, calibration = calibrated(predicted, settings)
            evaluations = evaluate_subsets(predicted, settings, leaked_patients(splits))
            history = _history(config, splits, predicted)
            write_dicts(folder / run_folder.HISTORY, history)
            if watch is not None:
                for row in history:
                    watch.epoch(row)
            result = TrainResult(
                folder,
                config.epochs,
                config.epochs,
                evaluations,
                seconds=1.0,
                host_bytes=1 << 30,
                gpu_bytes=None,
                calibration=calibration,
                sets=calibrate_sets(predicted, slides, config.subgroup, settings, config.conformal),
                flow=flow_of(slides),
                shares={"the device": 1.0},
                breakdown=break_down(
                    EvaluatedPredictions(evaluations, predicted, settings), slides, config.subgroup
                ),
            )
            write_predictions(
                folder / PREDICTIONS,
                [({"split": subset}, part) for subset, part in predicted.items()],
            )
            write_json(
                folder / METRICS,
                {"histopipe": __version__, **_description(config, sources, splits)}
                | result.to_json(),
            )
    return result


def _description(
    config: TrainConfig, sources: Sequence[SampleSource], splits: Splits
) -> dict[str, Any]:
    task = {"task": splits.task_name, "targets": splits.targets}
    store: Any = sources[0]
    return {
        "tensorflow": "none",
        "keras": "none",
        "classes": splits.classes,
        **({} if splits.task.of_classes else task),
        "split_by": splits.split_by,
        config.unit: splits.count(),
        **({} if isinstance(config, BagTrainConfig) else {"spec": dict(store.spec)}),
    }


def predictions_of(
    config: TrainConfig,
    sources: Sequence[SampleSource],
    splits: Splits,
    subset: Subset,
    truth: Mapping[str, int] = MappingProxyType({}),
) -> Predictions:
    """Return the predictions of the patches or bags of a subset."""
    slides, names, task = splits.slides_on(subset), splits.names, splits.task
    if isinstance(task, Survival):
        task = replace(task, grid=tuple(time_grid(*splits.targets_on("train").T)))
    patients = list(dict.fromkeys(slide.patient for slide in slides))
    parts: list[tuple[Any, ...]] = []
    for number, slide in enumerate(slides):
        rows = slide.on(subset)
        target = np.repeat([splits.target(slide)], len(rows), axis=0).astype(np.float64)
        if slide.labels is not None:
            target = slide.labels[rows, None].astype(np.float64)
        corners = np.zeros((len(rows), 2), np.int64)
        if not isinstance(config, BagTrainConfig):
            index = cast(Any, sources[slide.store]).index(slide.slide)
            corners = np.stack([index[name][rows] for name in ("x_l0", "y_l0")], axis=1)
        followed = np.full_like(target, truth[slide.id]) if slide.id in truth else target
        noise = np.random.default_rng([config.seed, *slide.id.encode()])
        parts.append(
            (
                np.full(len(rows), number, np.int32),
                np.full(len(rows), patients.index(slide.patient), np.int32),
                *corners.T,
                target,
                _outputs(task, followed, noise, 0.0 if slide.id in truth else 1.0),
            )
        )
    slide_numbers, patient, x_l0, y_l0, target, output = map(
        np.concatenate, zip(*parts, strict=True)
    )
    return Predictions(
        task,
        tuple(names[slide.store, slide.slide] for slide in slides),
        tuple(patients),
        slide_numbers,
        patient,
        x_l0,
        y_l0,
        target,
        output,
        level=config.bag if isinstance(config, BagTrainConfig) else "patch",
    )


def _outputs(
    task: Task, target: NDArray[np.float64], noise: np.random.Generator, deviation: float
) -> NDArray[np.float32]:
    """Return the (N, C) outputs for (N, T) targets, with noise: probabilities, numbers, or risk and survival."""
    if isinstance(task, Survival):
        risk = noise.normal(scale=deviation, size=(len(target), 1))
        risk -= SKILL * np.log(target[:, :1] + 0.01)
        survival = np.exp(-np.exp(risk) * np.array(task.grid))
        return np.hstack([risk, survival]).astype(np.float32)
    if isinstance(task, Regression):
        return np.asarray(target + noise.normal(scale=deviation, size=target.shape), np.float32)
    if isinstance(task, Multilabel):
        logits = SKILL * (2 * np.nan_to_num(target) - 1)
        logits += noise.normal(scale=deviation, size=target.shape)
        return (1 / (1 + np.exp(-logits))).astype(np.float32)
    classes = len(task.classes)
    logits = SKILL * (target == np.arange(classes))
    logits += noise.normal(scale=deviation, size=(len(target), classes))
    each = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(each / each.sum(axis=1, keepdims=True), np.float32)


def _history(
    config: TrainConfig, splits: Splits, predicted: dict[Subset, Predictions]
) -> list[dict[str, Any]]:
    """Return the rows of `history.csv`: losses fall from epoch to epoch."""
    task, validation = splits.task, predicted.get("validation")
    rows = []
    for epoch in range(1, config.epochs + 1):
        training = EpochMetrics(10, 1 / epoch, dict.fromkeys(task.main, 0.9), 0.9)
        row: dict[str, Any] = {"epoch": epoch, **training.row()}
        if validation is not None:
            values = task.epoch_metrics(validation.target, validation.output)
            row |= EpochMetrics(len(validation), 1.1 / epoch, values, None).row("val_")
        row |= {"learning_rate": 1e-3, f"{config.unit}_per_s": 100.0, "input_wait": 0.1}
        rows.append({**row, "seconds": 0.1})
    return rows
