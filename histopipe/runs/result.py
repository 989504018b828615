"""The result of a training, and the metrics of its epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from histopipe.evaluation.breakdown import Breakdown, breakdown_lines
from histopipe.evaluation.evaluate import (
    Calibration,
    Evaluation,
    evaluation_lines,
    main_metric,
    number,
    split_lines,
    with_ends,
)
from histopipe.evaluation.prediction_sets import PredictionSets
from histopipe.splits.slide_table import (
    Flow,
    flow_from_json,
    flow_to_json,
)
from histopipe.splits.subsets import EVALUATED, Subset
from histopipe.system.forecast import bottleneck
from histopipe.system.output import plural
from histopipe.tasks.intervals import Difference, read_differences
from histopipe.tasks.predictions import ThresholdsByLevel
from histopipe.tasks.registry import TASKS

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


_TITLES = {"accuracy": ("acc", 3), "auc": ("auc", 4), "r2": ("R²", 4), "c_index": ("C-index", 4)}


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
