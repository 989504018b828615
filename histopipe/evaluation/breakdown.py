"""Metrics by subgroup, and the check for shortcuts, of the predictions of a run, a cross-validation or other slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.evaluate import (
    Calibration,
    Evaluation,
    with_ends,
    with_interval,
)
from histopipe.evaluation.prediction_sets import PredictionSets
from histopipe.evaluation.subgroups import AUTOMATIC, ORIGIN, Subgroups, check_subgroup, subgroups
from histopipe.splits.slide_table import Flow, SlideEntry
from histopipe.system.grouping import grouped
from histopipe.system.output import aligned, plural
from histopipe.tasks.choices import Subset, TaskName
from histopipe.tasks.intervals import Difference
from histopipe.tasks.predictions import EvaluationSettings, ModelPredictions, Predictions
from histopipe.tasks.registry import TASKS
from histopipe.tasks.statistics import area_under_roc
from histopipe.tasks.task import Task

_ORIGIN_CELLS = {
    "scanner",
    "hospital",
    "center",
    "centre",
    "institution",
    "laboratory",
    "lab",
    "batch",
}
"""Columns of the labels file that no diagnosis depends on, either."""
_ALL = "all together"
_FOLDS, _PERMUTATIONS, _LEVEL = 5, 199, 0.02
_MARGIN = 0.05
"""A model whose AUC is higher by less is not clearly better than the origin."""
_FEWEST = 10

Codes = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Shortcut:
    """How well the origin of slides predicts the labels of patients.

    Attributes:
        auc: AUC of a cross-validated classifier of each column alone, and of all of them together; for more than two
            classes, the mean of each class against the rest.
        best: the column with the highest one.
        p: share of random permutations of the labels with a highest AUC that is as high.
        model_auc: AUC of the model; None if it is undefined.
        patients: number of patients with one label.
        warning: whether the origin predicts labels (p at most 0.02) nearly as well as the model.
    """

    auc: Mapping[str, float]
    best: str
    p: float
    model_auc: float | None
    patients: int
    warning: bool

    def __str__(self) -> str:
        model = "" if self.model_auc is None else f"; the model has {self.model_auc:.3f}"
        origin = "the origin of the slides" if self.best == _ALL else self.best
        return (
            f"{origin} alone predicts the label with an AUC of {self.auc[self.best]:.3f} (p = {self.p:.3f}){model}. "
            "The model may have learned the origin of the slides instead of the disease."
        )


def find_shortcut(
    slides: Sequence[SlideEntry], *, model_auc: float | None, seed: int
) -> Shortcut | None:
    """Predict the labels of patients from the origin of their slides.

    The classifier of a column is the smoothed frequency of the labels among patients with the same value; that of all
    columns multiplies these (naive Bayes). Patients are divided into five folds. Permutations of the labels show how
    high the best AUC is by chance.

    Returns:
        The result; None if no column has two values, or with fewer than ten patients with one label, or one label.
    """
    used = (slide for slide in slides if slide.subsets and slide.label)
    by_patient = grouped(used, lambda slide: slide.patient)
    groups = [group for group in by_patient.values() if len({slide.label for slide in group}) == 1]
    names, label = np.unique([group[0].label for group in groups], return_inverse=True)
    cells = dict.fromkeys(name for group in groups for slide in group for name in slide.cells)
    values = {
        column: [" and ".join(sorted({slide.value(column) for slide in group})) for group in groups]
        for column in (*ORIGIN, *(name for name in cells if name.lower() in _ORIGIN_CELLS))
    }
    columns = {
        column: np.unique(of_column, return_inverse=True)[1]
        for column, of_column in values.items()
        if len(set(of_column)) > 1
    }
    if len(groups) < _FEWEST or len(names) < 2 or not columns:
        return None
    rng = np.random.default_rng(seed)
    auc = _areas(columns, label, rng)
    best = max(auc, key=auc.__getitem__)
    higher = sum(
        max(_areas(columns, rng.permutation(label), rng).values()) >= auc[best]
        for _ in range(_PERMUTATIONS)
    )
    p = (1 + higher) / (1 + _PERMUTATIONS)
    close = model_auc is None or auc[best] >= model_auc - _MARGIN
    return Shortcut(auc, best, p, model_auc, len(groups), p <= _LEVEL and close)


def _areas(
    columns: Mapping[str, Codes], label: Codes, rng: np.random.Generator
) -> dict[str, float]:
    """Return the cross-validated AUC of each column, and of all together if there are several."""
    from scipy.special import softmax  # imported late, so that `--help` is fast

    classes = int(label.max()) + 1
    # Stratified: otherwise a fold with many of one class gets predictions from a rest with few of it.
    order = np.lexsort((rng.random(len(label)), label))
    fold = np.empty(len(label), np.intp)
    fold[order] = np.arange(len(label)) % _FOLDS
    log_odds = {name: _out_of_fold(codes, label, fold, classes) for name, codes in columns.items()}
    if len(columns) > 1:
        log_odds[_ALL] = np.sum(list(log_odds.values()), axis=0)
    areas = {
        name: area_under_roc(
            label.astype(np.int32), softmax(values, axis=1).astype(np.float32).round(6)
        )
        for name, values in log_odds.items()
    }
    return {name: 0.5 if area is None else area for name, area in areas.items()}


def _out_of_fold(codes: Codes, label: Codes, fold: Codes, classes: int) -> NDArray[np.float64]:
    """Return (N, C) log ratios of the frequency of each class with the same value to its frequency overall."""
    counts = np.zeros((_FOLDS, int(codes.max()) + 1, classes))
    np.add.at(counts, (fold, codes, label), 1)
    of_rest = counts.sum(axis=0) - counts  # in all folds but one
    totals = of_rest.sum(axis=1, keepdims=True)
    overall = (totals + 1) / (totals.sum(axis=2, keepdims=True) + classes)
    share = (of_rest + overall) / (of_rest.sum(axis=2, keepdims=True) + 1)
    return np.asarray(np.log(share / overall)[fold, codes], np.float64)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Metrics by subgroup, and how well the origin of slides predicts labels (None for tasks without classes)."""

    subgroups: tuple[Subgroups, ...] = ()
    shortcut: Shortcut | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Breakdown:
        """Create it from the result of `to_json`. Raise KeyError or TypeError if the value has the wrong form."""
        return cls(
            tuple(map(Subgroups.from_json, value["subgroups"])),
            value["shortcut"] and Shortcut(**value["shortcut"]),
        )


@dataclass(frozen=True, slots=True)
class EvaluatedPredictions:
    """An evaluation of at least one subset with its predictions."""

    evaluations: Mapping[Subset, Evaluation]
    predictions: Mapping[Subset, Predictions]
    evaluation_settings: EvaluationSettings
    breakdown: Breakdown = field(default_factory=Breakdown)
    flow: Flow = field(default_factory=dict)
    calibration: Calibration | None = None
    parts: Sequence[ModelPredictions] = ()
    """Predictions of several models on the main subset, each with its thresholds; empty for one model.

    `break_down` then needs no `predictions`.
    """
    sets: PredictionSets | None = None
    """What prediction sets reached on the main subset; None without these."""

    @property
    def main(self) -> tuple[Subset, Evaluation]:
        """The test set if there is one, else the validation set."""
        subset: Subset = "test" if "test" in self.evaluations else "validation"
        return subset, self.evaluations[subset]

    def models(self, subset: Subset) -> Sequence[ModelPredictions]:
        """Return the predictions of a subset, those of each model with its thresholds."""
        if self.parts and subset == self.main[0]:
            return self.parts
        return [(self.predictions[subset], self.evaluations[subset].thresholds)]

    @property
    def task(self) -> Task:
        """The task, with the positive class of the evaluation."""
        return self.predictions[self.main[0]].task.with_settings(self.evaluation_settings)


def breakdown_lines(
    breakdown: Breakdown, task: TaskName, requested: Sequence[str] | None = None
) -> list[str]:
    """Return a table of the main metric of a task by subgroup, of `site` and columns that are not automatic; and a warning.

    `requested` are values of `--subgroup`, whose columns are always in the table.
    """
    optional = {*AUTOMATIC} - {"site", *(check_subgroup(text)[0] for text in requested or ())}
    columns = [column for column in breakdown.subgroups if column.column not in optional]
    lines: list[str] = []
    if columns:
        name, title = next(iter(TASKS[task].main.items()))
        rows = [["subgroup", "n", title, "minus the rest", "p, all groups"]]
        for column in columns:
            rows.append([f"  {column.column} ({plural(column.level)})", "", "", "", ""])
            for group in column.groups:
                difference = group.differences.get(name, Difference(None, None))
                apart = with_ends(difference.value, difference.interval, signed=True)
                rows.append(
                    [
                        f"    {group.name}",
                        str(group.count),
                        with_interval(group, name),
                        group.note or apart,
                        "" if group.p is None else f"{group.p:.3f}",
                    ]
                )
        lines = aligned(rows)
    if breakdown.shortcut is not None and breakdown.shortcut.warning:
        lines.append(f"warning: {breakdown.shortcut}")
    return lines


def break_down(
    evaluated: EvaluatedPredictions, slides: Sequence[SlideEntry], requested: Sequence[str]
) -> Breakdown:
    """Return the metrics of the main subset by subgroup, and the check for shortcuts.

    Args:
        evaluated: the evaluation with its predictions.
        slides: all slides; those that are not excluded are the data in which a shortcut is searched.
        requested: values of `--subgroup`. Columns of `AUTOMATIC` are added.
    """
    (subset, evaluation), settings = evaluated.main, evaluated.evaluation_settings
    columns = dict.fromkeys(AUTOMATIC, None) | dict(map(check_subgroup, requested))
    used, shortcut = [slide for slide in slides if slide.subsets], None
    if TASKS[evaluation.finest.task].of_classes:
        highest = (
            evaluation.patient.get("mean") or evaluation.slide.get("mean") or evaluation.finest
        )
        shortcut = find_shortcut(used, model_auc=highest.values["auc"], seed=settings.seed)
    return Breakdown(subgroups(evaluated.models(subset), used, columns, settings), shortcut)
