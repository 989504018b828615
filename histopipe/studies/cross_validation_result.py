"""Result of a cross-validation: metrics of each fold, their mean and standard deviation, and pooled predictions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from histopipe.errors import HistopipeError
from histopipe.evaluation.breakdown import (
    Breakdown,
    break_down,
    break_down_subsets,
    breakdown_lines,
)
from histopipe.evaluation.evaluate import Evaluation, evaluate, evaluate_subsets
from histopipe.evaluation.table import (
    aligned,
    evaluation_lines,
    number,
)
from histopipe.predictions.tables import PREDICTIONS, read_predictions, write_predictions
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, TrainResult, read_result, read_slides
from histopipe.runs.task_config import load_config
from histopipe.splits.slide_table import Flow, SlideEntry, flow_of, flow_to_json, leaked_patients
from histopipe.splits.splits import SPLITS, load_splits
from histopipe.system.csv_files import write_dicts
from histopipe.system.files import read_json, write_atomically, write_json
from histopipe.system.settings import to_toml
from histopipe.tasks.predictions import ModelPredictions, with_common_patients
from histopipe.tasks.registry import TASKS

_SHOWN = ("patch", "slide_mean", "patient_mean")


@dataclass(frozen=True, slots=True)
class Fold:
    """One fold.

    Attributes:
        number: from 1.
        folder: folder of its run.
        result: result of a finished fold.
        attempts, seconds, host_bytes: attempts, duration and peak memory of the last command that trained it.
        error: why it failed.
    """

    number: int
    folder: Path
    result: TrainResult | None
    attempts: int = 0
    seconds: float = 0.0
    host_bytes: int = 0
    error: HistopipeError | None = None

    @property
    def reason(self) -> str | None:
        """Reason why the fold is not finished."""
        return None if self.result else str(self.error or "not done")

    @property
    def metrics(self) -> dict[str, float]:
        """Defined metrics of the test set, by `LEVEL_METRIC`."""
        return _defined_metrics(self.result.metrics["test"]) if self.result else {}

    def summary(self) -> dict[str, Any]:
        """Return the status, duration and memory use of the fold."""
        done = self.result
        return {
            "fold": self.number,
            "status": "done" if done else ("failed" if self.error else "not done"),
            "reason": self.reason,
            "attempts": self.attempts or None,
            "epochs": done.epochs if done else None,
            "best_epoch": done.best_epoch if done else None,
            "seconds": done.seconds if done else self.seconds,
            "host_mb": (done.host_bytes if done else self.host_bytes) / 1e6,
            "gpu_mb": done.gpu_bytes / 1e6 if done and done.gpu_bytes is not None else None,
        }


@dataclass(frozen=True, slots=True, repr=False)
class CrossValidationResult:
    """Result of `cross_validate`.

    Attributes:
        folder: folder of the cross-validation.
        folds: the folds, each with its result or error.
        mean, deviation: mean and sample standard deviation over the folds, of each metric of the test sets, by
            `LEVEL_METRIC`.
        pooled: evaluation of all test sets together, each fold with its own thresholds; None if no fold is finished.
        breakdown: of `pooled`: metrics by subgroup, and the check for shortcuts.
        flow: numbers of slides, patients and patches; those tested by a finished fold are "test".
    """

    folder: Path
    folds: tuple[Fold, ...]
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    pooled: Evaluation | None
    breakdown: Breakdown = field(default_factory=Breakdown)
    flow: Flow = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Fold, ...]:
        """Folds without result."""
        return tuple(fold for fold in self.folds if fold.result is None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict, as in `summary.json`."""
        return {
            "folds": [
                fold.summary() | ({"metrics": fold.result.to_json()} if fold.result else {})
                for fold in self.folds
            ],
            "mean": dict(self.mean),
            "deviation": dict(self.deviation),
            "pooled": self.pooled.to_json() if self.pooled else None,
            "breakdown": self.breakdown.to_json(),
            "flow": flow_to_json(self.flow),
        }

    def __repr__(self) -> str:
        task = self.pooled.finest.task if self.pooled else "classification"
        (main, title), (second, second_title) = list(TASKS[task].main.items())[:2]
        levels = [name for name in _SHOWN if not self.mean or f"{name}_{main}" in self.mean]
        rows = [["fold", "epochs", *(f"{name.replace('_', ' ')} {title}" for name in levels),
                 second_title, "s", "host MB", "GPU MB"]]  # fmt: skip
        columns = [*(f"{name}_{main}" for name in levels), f"{levels[0]}_{second}"]
        for fold in self.folds:
            summary, metrics = fold.summary(), fold.metrics
            rows.append([
                str(fold.number), str(summary["epochs"] or summary["status"]),
                *(number(metrics.get(name)) for name in columns), f"{summary['seconds']:.0f}",
                f"{summary['host_mb']:.0f}", number(summary["gpu_mb"], 0),
            ])  # fmt: skip
        for title, values in (("mean", self.mean), ("sd", self.deviation)):
            cells = [number(values.get(name)) for name in columns]
            rows.append([title, "", *cells, "", "", ""])
        lines = aligned(rows)
        lines += [f"fold {fold.number}: {fold.reason}" for fold in self.failed]
        if self.pooled is not None:
            lines += evaluation_lines("all folds together", self.pooled)
        lines += breakdown_lines(self.breakdown, task)
        return "\n".join(lines)


def summarize(config: TrainConfig, folder: Path, folds: Sequence[Fold]) -> CrossValidationResult:
    """Summarize the folds, and write `summary.csv`, `summary.json` and their pooled predictions."""
    columns: dict[str, list[float]] = {}
    for fold in folds:
        for name, value in fold.metrics.items():
            columns.setdefault(name, []).append(value)
    mean = {name: statistics.fmean(values) for name, values in columns.items()}
    deviation = {
        name: statistics.stdev(values) for name, values in columns.items() if len(values) > 1
    }
    parts = _pooled_parts(folder, folds)
    done = [fold.result for fold in folds if fold.result is not None]
    pooled = evaluate(parts, config.evaluation_settings, leaked_from(done)) if parts else None
    slides = tested_slides(done)
    breakdown = Breakdown()
    if pooled is not None:
        breakdown = break_down(parts, pooled, slides, config.subgroup, config.evaluation_settings)
    result = CrossValidationResult(
        folder, tuple(folds), mean, deviation, pooled, breakdown, flow_of(slides)
    )
    rows: list[dict[str, Any]] = [fold.summary() | fold.metrics for fold in folds]
    rows += [{"fold": "mean", **mean}, {"fold": "sd", **deviation}]
    if pooled is not None:
        rows.append({"fold": "pooled", **_defined_metrics(pooled)})
    write_dicts(folder / "summary.csv", rows)
    write_json(folder / "summary.json", result.to_json())
    return result


def _defined_metrics(evaluation: Evaluation) -> dict[str, float]:
    named = {
        f"{level}_{name}": value
        for level, metrics in evaluation.named()
        for name, value in metrics.values.items()
    }
    return {name: value for name, value in named.items() if value is not None}


def read_parts(results: Sequence[TrainResult]) -> list[ModelPredictions]:
    """Read the test predictions of finished runs, each with its thresholds.

    Raises:
        DamagedStore: the predictions cannot be read.
    """
    read = [read_predictions(result.folder / PREDICTIONS)["test"] for result in results]
    common = with_common_patients(read)
    return [
        (scores, result.metrics["test"].thresholds)
        for scores, result in zip(common, results, strict=True)
    ]


def leaked_from(results: Sequence[TrainResult]) -> set[str]:
    """Return the test patients of finished runs that were also used in the training."""
    leaking = [result.folder / SPLITS for result in results if result.metrics["test"].in_training]
    return set().union(*(leaked_patients(load_splits(path))["test"] for path in leaking))


def tested_slides(folds: Sequence[TrainResult]) -> list[SlideEntry]:
    """Return all slides, each as in the fold that tests it, or else as in the last fold."""
    by_id: dict[str, SlideEntry] = {}
    for fold in folds:
        for slide in read_slides(fold.folder):
            if "test" not in getattr(by_id.get(slide.slide), "status", ""):
                by_id[slide.slide] = slide
    return list(by_id.values())


def _pooled_parts(folder: Path, folds: Sequence[Fold]) -> list[ModelPredictions]:
    """Write the test predictions of all folds, and return them with the thresholds of each."""
    done = {fold.number: fold.result for fold in folds if fold.result is not None}
    if not done:
        return []
    parts = read_parts(list(done.values()))
    tables = [
        ({"split": "test", "fold": number}, scores)
        for number, (scores, _) in zip(done, parts, strict=True)
    ]
    write_predictions(folder / PREDICTIONS, tables)
    return parts


def reevaluate(folder: Path, requested: TrainConfig) -> TrainResult:
    """Evaluate a finished run again from its predictions, if the evaluation settings have changed.

    Raises:
        UsageError, DamagedStore: the files of the run cannot be read.
    """
    result = read_result(folder)
    scores = read_predictions(folder / PREDICTIONS)
    recorded_config = load_config(folder / run_folder.CONFIG)
    if recorded_config.evaluation_settings == requested.evaluation_settings:
        return result
    leaked = leaked_patients(load_splits(folder / SPLITS))
    evaluations, slides = (
        evaluate_subsets(scores, requested.evaluation_settings, leaked),
        read_slides(folder),
    )
    breakdown = break_down_subsets(
        scores, evaluations, slides, recorded_config.subgroup, requested.evaluation_settings
    )
    changed = replace(result, metrics=evaluations, breakdown=breakdown)
    config = replace(
        recorded_config, positive=requested.positive, threshold=requested.threshold, top_k=requested.top_k,
        resamples=requested.resamples,
    )  # fmt: skip
    recorded = read_json(folder / METRICS)
    write_json(folder / METRICS, {**recorded, **changed.to_json()})
    # The configuration is written last: if this process dies before, the run is evaluated again.
    write_atomically(folder / run_folder.CONFIG, to_toml(config))
    return changed
