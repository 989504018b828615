"""Evaluate predictions of patches, slides and patients, and choose decision thresholds on validation data."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.subgroups import GroupMetrics
from histopipe.system.arrays import FloatArray
from histopipe.system.output import aligned, counted
from histopipe.tasks.choices import EVALUATED, LEVELS, Aggregation, Subset, TaskName, name_of
from histopipe.tasks.intervals import Interval
from histopipe.tasks.metrics import Metrics, metrics_of
from histopipe.tasks.predictions import (
    NO_THRESHOLDS,
    EvaluationSettings,
    ModelPredictions,
    Predictions,
    Thresholds,
    ThresholdsByLevel,
    fold_of_patients,
    joined_scores,
    scores_of,
)
from histopipe.tasks.registry import TASKS
from histopipe.tasks.statistics import bootstrap_draws


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of patches (None if slides or patients were predicted), and of slides and patients by aggregation.

    `in_training` is the number of evaluated patients that were also used in the training; None if unknown.
    """

    patch: Metrics | None
    slide: Mapping[Aggregation, Metrics]
    patient: Mapping[Aggregation, Metrics]
    in_training: int | None = None

    @property
    def finest(self) -> Metrics:
        """Metrics of the lowest level: patches, slides or patients."""
        return self.patch or self.slide.get("mean") or self.patient["mean"]

    def named(self) -> list[tuple[str, Metrics]]:
        """Return metrics by level: ("patch", …), ("slide_mean", …) and so on."""
        by_level: dict[str, Mapping[Aggregation, Metrics | None]] = {
            "patch": {"mean": self.patch},
            "slide": self.slide,
            "patient": self.patient,
        }
        levels = ((name_of(level, how), by_level[level].get(how)) for level, how in LEVELS)
        return [(name, metrics) for name, metrics in levels if metrics is not None]

    def changed(
        self, by_level: Mapping[str, tuple[Mapping[str, float | None], Mapping[str, Interval]]]
    ) -> Evaluation:
        """Return the evaluation with other values and intervals of some metrics, by level."""

        def metrics_at(level: str, metrics: Metrics) -> Metrics:
            values, intervals = by_level.get(level, ({}, {}))
            kept = {name: ends for name, ends in metrics.intervals.items() if name not in values}
            return replace(
                metrics, values={**metrics.values, **values}, intervals={**kept, **intervals}
            )

        return replace(
            self,
            patch=self.patch and metrics_at("patch", self.patch),
            slide={how: metrics_at(f"slide_{how}", each) for how, each in self.slide.items()},
            patient={how: metrics_at(f"patient_{how}", each) for how, each in self.patient.items()},
        )

    @property
    def thresholds(self) -> ThresholdsByLevel:
        """The thresholds that were used."""
        return {level: metrics.thresholds for level, metrics in self.named()}

    @property
    def notes(self) -> list[str]:
        """Notes on the metrics of all levels, each once."""
        return list(dict.fromkeys(note for _, metrics in self.named() for note in metrics.notes))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            **({"patch": self.patch.to_json()} if self.patch else {}),
            "slide": {how: metrics.to_json() for how, metrics in self.slide.items()},
            "patient": {how: metrics.to_json() for how, metrics in self.patient.items()},
            "in_training": self.in_training,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evaluation:
        """Create the evaluation from the result of `to_json`."""
        slide, patient = (
            {how: Metrics.from_json(metrics) for how, metrics in value[level].items()}
            for level in ("slide", "patient")
        )
        patch = value.get("patch")
        return cls(patch and Metrics.from_json(patch), slide, patient, value.get("in_training"))


def choose_thresholds(validation: Predictions, settings: EvaluationSettings) -> ThresholdsByLevel:
    """Choose thresholds for every level on validation data; the default ones if there is none."""
    task = validation.task.with_settings(settings)
    return {
        name_of(level, how): task.thresholds(
            scores_of(validation, level, how, settings), settings.threshold
        )
        for level, how in task.levels(validation.level)
    }


def evaluate_subsets(
    predictions: Mapping[Subset, Predictions],
    settings: EvaluationSettings,
    leaked: Mapping[Subset, Collection[str]] = MappingProxyType({}),
) -> dict[Subset, Evaluation]:
    """Evaluate predictions of each subset but calibration, with thresholds chosen on validation. `leaked` as for `evaluate`."""
    nothing = next(iter(predictions.values())).rows(np.empty(0, np.intp))
    thresholds = choose_thresholds(predictions.get("validation", nothing), settings)
    return {
        subset: evaluate([(of_subset, thresholds)], settings, leaked.get(subset, ()))
        for subset, of_subset in predictions.items()
        if subset in EVALUATED
    }


def evaluate(
    parts: Sequence[ModelPredictions],
    settings: EvaluationSettings,
    leaked: Collection[str] = (),
    *,
    within_folds: bool = False,
) -> Evaluation:
    """Evaluate the predictions of one or several models together, at every level.

    Each part has at least one row. All parts have the same task and numbering of patients. `leaked` are patients that
    were also used in the training. `within_folds`: metrics rank the items of each part alone, and patients are
    resampled within their part.
    """
    (first, thresholds), *rest = parts
    stratum = fold_of_patients([part for part, _ in parts]) if within_folds else None
    draws = bootstrap_draws(len(first.patients), settings.resamples, settings.seed, stratum)
    levels: dict[str, dict[Aggregation, Metrics]] = {"patch": {}, "slide": {}, "patient": {}}
    for level, how in first.task.levels(first.level):
        scores, notes = joined_scores(parts, level, how, settings, within_folds=within_folds)
        if len(scores):
            used = NO_THRESHOLDS if rest else thresholds.get(name_of(level, how), NO_THRESHOLDS)
            levels[level][how] = metrics_of(scores, draws=draws, notes=notes, thresholds=used)
    patients = {
        part.patients[number] for part, _ in parts for number in np.unique(part.patient).tolist()
    }
    return Evaluation(
        levels["patch"].get("mean"),
        levels["slide"],
        levels["patient"],
        len(patients.intersection(leaked)),
    )


def mean_thresholds(models: Sequence[ThresholdsByLevel]) -> ThresholdsByLevel:
    """Return the means of the thresholds of several models, by level; none where a model has none."""
    means = {}
    for level in models[0]:
        values = [model[level].values for model in models if level in model]
        same = len({len(limits) for limits in values}) == 1 and len(values) == len(models)
        means[level] = Thresholds(tuple(np.mean(values, axis=0).tolist()) if same else ())
    return means


METRIC_TITLES: Mapping[str, str] = {
    "auc": "AUC",
    "average_precision": "average precision",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "f1": "F1",
    "brier": "Brier score",
    "brier_km": "integrated Brier score of Kaplan-Meier",
    "log_loss": "log loss",
    "calibration_error": "calibration error",
    "calibration_error_by_chance": "calibration error by chance",
    "calibration_intercept": "calibration intercept",
    "calibration_slope": "calibration slope",
    "r2": "R²",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
    "mae": "MAE",
    "rmse": "RMSE",
    "dice": "Dice",
    "iou": "intersection over union",
    "boundary_um": "95 % boundary distance, µm",
    "c_index": "C-index (Harrell)",
    "c_index_uno": "C-index (Uno)",
}


def metric_title(name: str, task: TaskName) -> str:
    """Return the title of a metric, also of one column: `Brier score, age` of `brier:age`."""
    bare, _, column = name.partition(":")
    titles = {bare: bare.replace("_", " "), **METRIC_TITLES, **TASKS[task].titles}
    return titles[bare] + (f", {column}" if column else "")


def with_ends(
    value: float | None, ends: tuple[float, float] | None, *, signed: bool = False
) -> str:
    """Return a value with its interval, such as `0.912 [0.872, 0.951]`, or with signs; a hyphen for None."""
    if value is None:
        return "-"
    texts = [f"{end:{'+' if signed else ''}.3f}" for end in (value, *(ends or ()))]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if ends else texts[0]


def main_metric(metrics: Metrics) -> tuple[str, float | None]:
    """Return title and value of the main metric."""
    name, title = next(iter(TASKS[metrics.task].main.items()))
    return title, metrics.values[name]


NARROW_FOLDS = (
    "Without any signal, such intervals of cross-validated data sets held 0.5 in 81 to 91 %, since the training sets of folds "
    "depend on the patients that others test; several seeds (--seeds) also show the variation between trainings."
)


def fold_lines(within_folds: Evaluation, pooled: Evaluation) -> list[str]:
    """Return the table of a cross-validation within folds, and the metric that ranks, of all folds together."""
    return [*evaluation_lines("within folds", within_folds), f"  {pooled_text(pooled)}"]


def pooled_text(pooled: Evaluation) -> str:
    """Return the metric that ranks, of all folds together, as text; the main one if none does."""
    task = TASKS[pooled.finest.task]
    texts = [
        f"{level.partition('_')[0]} {with_interval(metrics, task.ranked)}"
        for level, metrics in informative_levels(pooled)
        if level in ("patch", "slide_mean", "patient_mean")
    ]
    how = "ranked together" if task.ranks else "together"
    return f"{task.main[task.ranked]} of all folds {how}: {', '.join(texts)}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text, or a hyphen for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_interval(metrics: Metrics | GroupMetrics, name: str) -> str:
    """Return a metric with its interval: `0.912 [0.872, 0.951]`."""
    return with_ends(metrics.values.get(name), metrics.intervals.get(name))


def evaluation_lines(title: str, evaluation: Evaluation) -> list[str]:
    """Return a table with a line per level, and notes below it."""
    task = TASKS[evaluation.finest.task]
    rows = [[title, "n", *task.main.values(), *task.plain.values()]]
    notes: dict[str, list[str]] = {}
    for name, metrics in informative_levels(evaluation):
        level, _, how = name.partition("_")
        # Predictions of bags have one aggregation only, so it is not named.
        label = (
            name.replace("_", " ", 1) if evaluation.patch and len(task.aggregations) > 1 else level
        )
        if level == "patient" and same_as_slides(evaluation, cast(Aggregation, how)):
            continue
        columns = dict.fromkeys(key[key.index(":") :] for key in metrics.values if ":" in key)
        rows += [
            [
                *([f"    {column[1:]}", ""] if column else [f"  {label}", _count_text(metrics)]),
                *(with_interval(metrics, name + column) for name in task.main),
                *(number(metrics.values.get(name + column)) for name in task.plain),
            ]
            for column in ("", *columns)
        ]
        for note in metrics.notes:
            notes.setdefault(note, []).append(label)
    levels = sum(bool(row[1]) for row in rows) - 1
    lines = [
        *(
            f"  {'' if len(where) == levels else ', '.join(where) + ': '}{note}"
            for note, where in notes.items()
        ),
        *(f"  {remark}" for remark in remarks(evaluation)),
    ]
    in_rows = {row[0].split()[0] for row in rows}
    if same_as_slides(evaluation, "mean") and "slide" in in_rows and "patient" not in in_rows:
        lines.append("  patients: same as slides, because each patient has one slide")
    return aligned(rows) + lines


def _count_text(metrics: Metrics) -> str:
    events = metrics.outcomes.get("events")
    return str(metrics.count) if events is None else f"{metrics.count} ({counted(events, 'event')})"


def informative_levels(evaluation: Evaluation) -> list[tuple[str, Metrics]]:
    """Return the metrics of each level that has a main metric; without one at the finest level, of all levels.

    Most slides of a study with annotations have several labels. Those with one label often have the same.
    """
    levels = evaluation.named()
    if main_metric(evaluation.finest)[1] is None:
        return levels
    return [(name, metrics) for name, metrics in levels if main_metric(metrics)[1] is not None]


def remarks(evaluation: Evaluation) -> list[str]:
    """Return remarks on an evaluation: why it has no metrics of slides or patients, and patients of the training."""
    levels = {name.partition("_")[0] for name, _ in informative_levels(evaluation)}
    finer = {"slide": evaluation.patch, "patient": evaluation.patch or evaluation.slide}
    texts = []
    for level, metrics in (("slide", evaluation.slide), ("patient", evaluation.patient)):
        if finer[level] and level not in levels:
            reasons = [f"each has several {TASKS[evaluation.finest.task].several}"]
            if metrics:
                few = metrics["mean"]
                reasons = [
                    f"the {main_metric(few)[0]} of {few.count} is undefined",
                    *(note for note in few.notes if "excluded" in note),
                ]
            texts.append(f"{level}s: not evaluated, because {'; '.join(reasons)}")
    if evaluation.in_training:
        texts.append(
            f"used in the training, too: {evaluation.in_training} of "
            f"{counted(evaluation.finest.patients, 'patient')}; these metrics are optimistic"
        )
    return texts


def same_as_slides(evaluation: Evaluation, how: Aggregation) -> bool:
    """Return whether the metrics of patients are those of slides, because each patient has one slide."""
    slide, patient = evaluation.slide.get(how), evaluation.patient.get(how)
    # Sums in another order may differ in the last digit.
    return (
        slide is not None and patient is not None and slide.count == slide.patients == patient.count
    )


def split_lines(evaluations: Mapping[Subset, Evaluation]) -> list[str]:
    """Return the table of each split."""
    return [
        line
        for subset, evaluation in evaluations.items()
        for line in evaluation_lines(
            "test (held out)" if subset == "test" and not evaluation.in_training else subset,
            evaluation,
        )
    ]


_SMALLEST = 1e-30
_RANGE = (0.05, 20.0)
_PRIOR = 0.5
"""Standard deviation of the logarithm of temperatures: two thirds are between 0.6 and 1.6. See docs/design/evaluation.md."""
_CHANGED = ("log_loss", "brier", "calibration_error", "calibration_intercept", "calibration_slope")
"""Metrics that a temperature changes."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperature scaling of a model.

    Attributes:
        temperature: one value for classes; one per label for several labels. Above 1: less extreme probabilities.
        before: metrics without it, by subset, level and metric; with several labels, their means.
    """

    temperature: tuple[float, ...]
    before: Mapping[Subset, Mapping[str, Mapping[str, float | None]]]


def calibrated(
    predictions: Mapping[Subset, Predictions], settings: EvaluationSettings
) -> tuple[dict[Subset, Predictions], Calibration]:
    """Return predictions with the temperature that is fitted to those of validation, and what it changes."""
    temperature = fit_temperature(predictions["validation"])
    before = {
        subset: {
            level: {name: metrics.values[name] for name in _CHANGED if name in metrics.values}
            for level, metrics in evaluation.named()
        }
        for subset, evaluation in evaluate_subsets(
            predictions, replace(settings, resamples=0)
        ).items()
    }
    scaled = {
        subset: replace(part, output=tempered(part.output, temperature).astype(np.float32))
        for subset, part in predictions.items()
    }
    return scaled, Calibration(temperature, before)


def fit_temperature(predictions: Predictions) -> tuple[float, ...]:
    """Return the temperature that minimises the log loss of predictions, or one for each of several labels.

    A few patients say little: without a prior, right predictions alone would be made certain. The logarithm of the
    temperature has a normal prior with mean 0, and each patient counts once. So the log loss never increases.
    """
    parts = predictions.task.classifications(predictions)
    return tuple(_fitted(part) if len(part) else 1.0 for _, part in parts)


def _fitted(predictions: Predictions) -> float:
    from scipy.optimize import minimize_scalar

    rows, patients = np.arange(len(predictions)), len(np.unique(predictions.patient))
    label = predictions.label

    def loss(logarithm: float) -> float:
        of_label = tempered(predictions.output, (math.exp(logarithm),))[rows, label]
        likelihood = patients * float(np.log(np.maximum(of_label, _SMALLEST)).mean())
        return (logarithm / _PRIOR) ** 2 / 2 - likelihood

    best = float(minimize_scalar(loss, bounds=tuple(map(math.log, _RANGE)), method="bounded").x)
    return math.exp(best) if loss(best) < loss(0) else 1.0


def tempered(probability: NDArray[np.floating], temperature: Sequence[float]) -> FloatArray:
    """Return (..., C) probabilities whose logits are divided by a temperature, or (..., T) of labels by one each."""
    from scipy.special import softmax  # imported late, so that `--help` is fast

    values, divisor = probability.astype(np.float64), np.asarray(temperature)
    # Classes are two or more, with one temperature.
    of_labels = len(temperature) == values.shape[-1]
    if of_labels:
        values, divisor = np.stack([1 - values, values], axis=-1), divisor[:, None]
    logits = np.log(np.maximum(values, _SMALLEST)) / divisor
    scaled = np.asarray(softmax(logits, axis=-1), np.float64)
    return scaled[..., 1] if of_labels else scaled
