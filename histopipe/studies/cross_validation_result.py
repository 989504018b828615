"""Result of a cross-validation: metrics of each fold, their mean and standard deviation, and pooled predictions."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from histopipe.errors import HistopipeError
from histopipe.evaluation.evaluate import Evaluation, Part, Thresholds, evaluate, judge
from histopipe.evaluation.metrics import FIGURES
from histopipe.evaluation.predictions_file import read_predictions, write_predictions
from histopipe.evaluation.scores import with_common_patients
from histopipe.evaluation.table import aligned, evaluation_lines, number
from histopipe.evaluation.thresholds import FALLBACK
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, TrainResult, read_result
from histopipe.runs.settings import to_toml
from histopipe.runs.task_config import load_config
from histopipe.system.files import read_json

SUMMARY_JSON, SUMMARY_CSV = "summary.json", "summary.csv"
_SHOWN = ("patch", "slide_mean", "patient_mean")
_MEGA = 1e6


@dataclass(frozen=True, slots=True)
class Fold:
    """One fold.

    Attributes:
        number: from 1.
        folder: folder of its run.
        result: result of a finished fold.
        reason: why it is not finished.
        attempts, seconds, host_bytes: of the last command that trained it.
        error: the error of `reason`.
    """

    number: int
    folder: Path
    result: TrainResult | None
    reason: str | None
    attempts: int = 0
    seconds: float = 0.0
    host_bytes: int = 0
    error: HistopipeError | None = None

    def summary(self) -> dict[str, Any]:
        """Return status and costs of the fold."""
        done = self.result
        return {
            "fold": self.number,
            "status": "done" if done else ("failed" if self.error else "not done"),
            "reason": self.reason,
            "attempts": self.attempts or None,
            "epochs": done.epochs if done else None,
            "best_epoch": done.best_epoch if done else None,
            "seconds": done.seconds if done else self.seconds,
            "host_mb": (done.host_bytes if done else self.host_bytes) / _MEGA,
            "gpu_mb": done.gpu_bytes / _MEGA if done and done.gpu_bytes is not None else None,
        }


@dataclass(frozen=True, slots=True, repr=False)
class CrossValidationResult:
    """Result of `cross_validate`.

    Attributes:
        folder: folder of the cross-validation.
        folds: each with its result, or the reason why there is none.
        mean, deviation: mean and sample standard deviation over the folds, of each metric of the test sets, by
            `LEVEL_METRIC`.
        pooled: evaluation of all test sets together, each fold with its own thresholds; None if no fold is finished.
    """

    folder: Path
    folds: tuple[Fold, ...]
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    pooled: Evaluation | None

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
        }

    def __repr__(self) -> str:
        shown = [name for name in _SHOWN if not self.mean or f"{name}_accuracy" in self.mean]
        rows = [["fold", "epochs", *(f"{name.replace('_', ' ')} AUC" for name in shown),
                 "bal. acc.", "s", "host MB", "GPU MB"]]  # fmt: skip
        columns = [*(f"{name}_auc" for name in shown), f"{shown[0]}_balanced_accuracy"]
        for fold in self.folds:
            summary, found = fold.summary(), _metrics(fold)
            rows.append([
                str(fold.number), str(summary["epochs"] or summary["status"]),
                *(number(found.get(name)) for name in columns), f"{summary['seconds']:.0f}",
                f"{summary['host_mb']:.0f}", number(summary["gpu_mb"], 0),
            ])  # fmt: skip
        for title, values in (("mean", self.mean), ("sd", self.deviation)):
            cells = [number(values.get(name)) for name in columns]
            rows.append([title, "", *cells, "", "", ""])
        lines = aligned(rows)
        lines += [f"fold {fold.number}: {fold.reason}" for fold in self.failed]
        if self.pooled is not None:
            lines += evaluation_lines("all folds together", self.pooled)
        return "\n".join(lines)


def summarize(config: TrainConfig, folder: Path, folds: Sequence[Fold]) -> CrossValidationResult:
    """Summarize the folds, and write their pooled predictions."""
    found = [_metrics(fold) for fold in folds]
    columns: dict[str, list[float]] = {}
    for metrics in found:
        for name, value in metrics.items():
            columns.setdefault(name, []).append(value)
    return CrossValidationResult(
        folder, tuple(folds),
        mean={name: statistics.fmean(values) for name, values in columns.items()},
        deviation={
            name: statistics.stdev(values) for name, values in columns.items() if len(values) > 1
        },
        pooled=_pooled(config, folder, folds),
    )  # fmt: skip


def write_summary(result: CrossValidationResult) -> None:
    """Write `summary.csv` and `summary.json`."""
    rows: list[dict[str, Any]] = [fold.summary() | _metrics(fold) for fold in result.folds]
    rows += [{"fold": "mean", **result.mean}, {"fold": "sd", **result.deviation}]
    if result.pooled is not None:
        rows.append({"fold": "pooled", **defined_metrics(result.pooled)})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns)
    writer.writeheader()
    writer.writerows(rows)
    run_folder.write_text(result.folder / SUMMARY_CSV, buffer.getvalue())
    text = json.dumps(result.to_json(), indent=2, ensure_ascii=False)
    run_folder.write_text(result.folder / SUMMARY_JSON, text + "\n")


def defined_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics that are defined by `LEVEL_METRIC`."""
    named = {
        f"{level}_{figure}": getattr(metrics, figure)
        for level, metrics in evaluation.named()
        for figure in FIGURES
    }
    return {name: value for name, value in named.items() if value is not None}


def thresholds_of(evaluation: Evaluation) -> Thresholds:
    """Return the thresholds that an evaluation used."""
    return {
        level: (metrics.threshold, next((n for n in metrics.notes if n.startswith(FALLBACK)), None))
        for level, metrics in evaluation.named()
    }


def _metrics(fold: Fold) -> dict[str, float]:
    return defined_metrics(fold.result.metrics["test"]) if fold.result else {}


def read_parts(results: Sequence[TrainResult]) -> list[Part]:
    """Read the test predictions of finished runs, each with its thresholds.

    Raises:
        DamagedStore: they cannot be read.
    """
    read = [read_predictions(result.folder / run_folder.PREDICTIONS)["test"] for result in results]
    common = with_common_patients(read)
    return [
        (scores, thresholds_of(result.metrics["test"]))
        for scores, result in zip(common, results, strict=True)
    ]


def _pooled(config: TrainConfig, folder: Path, folds: Sequence[Fold]) -> Evaluation | None:
    done = [(fold.number, fold.result) for fold in folds if fold.result is not None]
    if not done:
        return None
    parts = read_parts([result for _, result in done])
    write_predictions(
        folder / run_folder.PREDICTIONS,
        [
            ({"split": "test", "fold": fold}, scores)
            for (fold, _), (scores, _) in zip(done, parts, strict=True)
        ],
    )
    return evaluate(parts, config.judging)


def reevaluate(folder: Path, wanted: TrainConfig) -> TrainResult:
    """Evaluate a finished run again if the evaluation settings have changed, from its predictions.

    Args:
        folder: folder of the run.
        wanted: its positive class, threshold, top k and resamples are used.

    Raises:
        UsageError, DamagedStore: the files of the run cannot be read.
    """
    result = read_result(folder)
    scores = read_predictions(folder / run_folder.PREDICTIONS)
    own = load_config(folder / run_folder.CONFIG)
    if own.judging == wanted.judging:
        return result
    changed = replace(result, metrics=judge(scores, wanted.judging))
    config = replace(
        own, positive=wanted.positive, threshold=wanted.threshold, top_k=wanted.top_k,
        resamples=wanted.resamples,
    )  # fmt: skip
    recorded = read_json(folder / METRICS)
    run_folder.write_metrics(folder, {**recorded, **changed.to_json()})
    # The configuration last: until it is written, the run is evaluated again.
    run_folder.write_text(folder / run_folder.CONFIG, to_toml(config))
    return changed
