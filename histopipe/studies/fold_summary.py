"""What the folds of a cross-validation come to: each by itself, their mean and spread, and their predictions judged together."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.errors import HistopipeError
from histopipe.evaluation.evaluate import Evaluation, Part, Thresholds, evaluate
from histopipe.evaluation.metrics import FIGURES
from histopipe.evaluation.predictions_file import read_predictions, write_predictions
from histopipe.evaluation.scores import with_common_patients
from histopipe.evaluation.table import aligned, evaluation_lines, number
from histopipe.evaluation.thresholds import FALLBACK
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import TrainResult

SUMMARY_JSON, SUMMARY_CSV = "summary.json", "summary.csv"
_SHOWN = ("patch", "slide_mean", "patient_mean")
_MEGA = 1e6


@dataclass(frozen=True, slots=True)
class Fold:
    """One fold.

    Attributes:
        number, folder: from 1; its run's.
        result: of a fold that is finished.
        reason: why it is not.
        attempts, seconds, host_bytes: of the last time that it was tried.
        error: of which `reason` tells.
    """

    number: int
    folder: Path
    result: TrainResult | None
    reason: str | None
    attempts: int = 0
    seconds: float = 0.0
    host_bytes: int = 0
    error: HistopipeError | None = None

    def facts(self) -> dict[str, Any]:
        """What is known but its metrics."""
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


@dataclass(frozen=True, slots=True)
class CrossValidation:
    """A cross-validation.

    Attributes:
        folder: its folder.
        folds: each with its result or the reason why there is none.
        mean, deviation: over the folds that have it, of each figure of the test sets, by `LEVEL_FIGURE`; the deviation is
            that of a sample, and missing for fewer than two.
        pooled: all test sets judged together, each fold's predictions by its own thresholds; None if no fold is finished.
    """

    folder: Path
    folds: tuple[Fold, ...]
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    pooled: Evaluation | None

    @property
    def failed(self) -> tuple[Fold, ...]:
        """Folds without a result."""
        return tuple(fold for fold in self.folds if fold.result is None)

    def to_json(self) -> dict[str, Any]:
        """All of it, for `summary.json`."""
        return {
            "folds": [
                fold.facts() | ({"metrics": fold.result.to_json()} if fold.result else {})
                for fold in self.folds
            ],
            "mean": dict(self.mean),
            "deviation": dict(self.deviation),
            "pooled": self.pooled.to_json() if self.pooled else None,
        }

    def lines(self) -> list[str]:
        """A table with a line a fold, then the pooled figures."""
        shown = [name for name in _SHOWN if not self.mean or f"{name}_accuracy" in self.mean]
        rows = [["fold", "epochs", *(f"{name.replace('_', ' ')} AUC" for name in shown),
                 "bal. acc.", "s", "host MB", "GPU MB"]]  # fmt: skip
        columns = [*(f"{name}_auc" for name in shown), f"{shown[0]}_balanced_accuracy"]
        for fold in self.folds:
            facts, found = fold.facts(), _figures(fold)
            rows.append([
                str(fold.number), str(facts["epochs"] or facts["status"]),
                *(number(found.get(name)) for name in columns), f"{facts['seconds']:.0f}",
                f"{facts['host_mb']:.0f}", number(facts["gpu_mb"], 0),
            ])  # fmt: skip
        for title, values in (("mean", self.mean), ("sd", self.deviation)):
            figures = [number(values.get(name)) for name in columns]
            rows.append([title, "", *figures, "", "", ""])
        lines = aligned(rows)
        lines += [f"fold {fold.number}: {fold.reason}" for fold in self.failed]
        if self.pooled is not None:
            lines += evaluation_lines("all folds together", self.pooled)
        return lines


def summarise(config: TrainConfig, folder: Path, folds: Sequence[Fold]) -> CrossValidation:
    """Put the folds together."""
    found = [_figures(fold) for fold in folds]
    columns: dict[str, list[float]] = {}
    for figures in found:
        for name, value in figures.items():
            columns.setdefault(name, []).append(value)
    return CrossValidation(
        folder, tuple(folds),
        mean={name: statistics.fmean(values) for name, values in columns.items()},
        deviation={
            name: statistics.stdev(values) for name, values in columns.items() if len(values) > 1
        },
        pooled=_pooled(config, folder, folds),
    )  # fmt: skip


def write_summary(result: CrossValidation) -> None:
    """`summary.csv` and `summary.json`."""
    rows: list[dict[str, Any]] = [fold.facts() | _figures(fold) for fold in result.folds]
    rows += [{"fold": "mean", **result.mean}, {"fold": "sd", **result.deviation}]
    if result.pooled is not None:
        rows.append({"fold": "pooled", **figures_of(result.pooled)})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns)
    writer.writeheader()
    writer.writerows(rows)
    run_folder.write_text(result.folder / SUMMARY_CSV, buffer.getvalue())
    text = json.dumps(result.to_json(), indent=2, ensure_ascii=False)
    run_folder.write_text(result.folder / SUMMARY_JSON, text + "\n")


def figures_of(evaluation: Evaluation) -> dict[str, float]:
    """Figures by `LEVEL_FIGURE`, without those that are not defined."""
    named = {
        f"{level}_{figure}": getattr(metrics, figure)
        for level, metrics in evaluation.named()
        for figure in FIGURES
    }
    return {name: value for name, value in named.items() if value is not None}


def thresholds_of(evaluation: Evaluation) -> Thresholds:
    """The thresholds that predictions were judged by."""
    return {
        level: (metrics.threshold, next((n for n in metrics.notes if n.startswith(FALLBACK)), None))
        for level, metrics in evaluation.named()
    }


def _figures(fold: Fold) -> dict[str, float]:
    return figures_of(fold.result.metrics["test"]) if fold.result else {}


def read_parts(results: Sequence[TrainResult]) -> list[Part]:
    """Test predictions of finished runs, each with its thresholds.

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
