"""Sections of a report that show an evaluation: of a run, of a cross-validation, or of predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation import evaluate
from histopipe.evaluation.breakdown import Breakdown
from histopipe.evaluation.evaluate import Calibration, Evaluation
from histopipe.evaluation.subgroups import QUALITY, Subgroups
from histopipe.reports import charts
from histopipe.reports.html_page import (
    Block,
    Card,
    Cell,
    Charts,
    Column,
    Confusion,
    Notes,
    Row,
    Table,
    Text,
    number,
)
from histopipe.splits.slide_table import Flow
from histopipe.splits.subsets import Subset
from histopipe.system.output import plural
from histopipe.tasks.calibration import Bin
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.intervals import TOO_FEW, Difference
from histopipe.tasks.predictions import Metrics, ModelPredictions, scores_of
from histopipe.tasks.statistics import Roc, precision_recall_of, roc_of
from histopipe.tasks.task import EvaluationSettings, Predictions, Task

_METRICS = (
    "auc", "average_precision", "balanced_accuracy", "accuracy", "sensitivity", "specificity", "f1", "brier",
    "log_loss", "calibration_error", "calibration_intercept", "calibration_slope",
)  # fmt: skip
_TITLES = evaluate.METRIC_TITLES
_MOST_LEVELS = 4
"""Levels of all splits that fit one table on a page of 1,200 pixels."""
_LEVELS: tuple[tuple[EvaluationLevel, str], ...] = (
    ("patch", "patches"),
    ("slide", "slides"),
    ("patient", "patients"),
)
LEVEL_NAMES: dict[str, str] = dict(_LEVELS)
COLUMN_TITLES = {
    "planned": "patches", "dark": "folds and black", "jpeg_generations": "JPEG generations", "mpp": "µm per pixel",
    "label_source": "source of the label",
}  # fmt: skip


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
    """Predictions of several models on the main split, each with its thresholds; empty for one model."""

    @property
    def main(self) -> tuple[Subset, Evaluation]:
        """The test set if there is one, else the validation set."""
        subset: Subset = "test" if "test" in self.evaluations else "validation"
        return subset, self.evaluations[subset]

    @property
    def task(self) -> Task:
        """The task, with the positive class of the evaluation."""
        return self.predictions[self.main[0]].task.with_settings(self.evaluation_settings)


def metric_cards(evaluated: EvaluatedPredictions) -> list[Card]:
    """Return cards with the main metrics."""
    cards = []
    patients = evaluated.main[1].finest.patients
    for level, metrics in shown_levels(evaluated.main[1]):
        for name, title in evaluated.task.main.items():
            value = evaluate.number(metrics.values[name])
            few = any(note.startswith(TOO_FEW) for note in metrics.notes)
            interval = evaluate.interval(metrics, name) or (TOO_FEW if few else "no interval")
            if metrics.patients < patients:
                interval += f"; {patients - metrics.patients} of {patients} patients left out"
            cards.append(Card(f"{title}, {LEVEL_NAMES[level.partition('_')[0]]}", value, interval))
    return cards


def shown_levels(evaluation: Evaluation) -> Iterator[tuple[str, Metrics]]:
    """Yield metrics of patches, and of means per slide and patient. Patients equal to slides are left out."""
    same = evaluate.same_as_slides(evaluation, "mean")
    for name, metrics in evaluate.informative_levels(evaluation):
        if name in ("patch", "slide_mean") or (name == "patient_mean" and not same):
            yield name, metrics


def metrics_blocks(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield tables of the metrics of classes at all levels, one for each split if one is too wide, and remarks."""
    notes: dict[str, list[str]] = {}
    subsets: dict[Subset, dict[str, Metrics]] = {subset: {} for subset in evaluated.evaluations}
    for subset, evaluation in evaluated.evaluations.items():
        for name, metrics in evaluate.informative_levels(evaluation):
            level = name.replace("_", ", ", 1)
            subsets[subset][level] = metrics
            for note in metrics.notes:
                notes.setdefault(f"{subset}: {note}", []).append(level)
    if sum(map(len, subsets.values())) <= _MOST_LEVELS:
        together = {
            f"{subset}: {level}": metrics
            for subset, levels in subsets.items()
            for level, metrics in levels.items()
        }
        yield _metrics_table("", together)
    else:
        yield from (_metrics_table(f", {subset}", levels) for subset, levels in subsets.items())
    if notes:
        every = max(map(len, notes.values()))
        yield Notes([
            f"{note[0].upper()}{note[1:]}" + ("." if len(levels) == every else f" ({'; '.join(levels)}).")
            for note, levels in notes.items()
        ])  # fmt: skip


def _metrics_table(title: str, levels: Mapping[str, Metrics]) -> Table:
    """Return a table with a column per level. Metrics that no level has are left out."""
    lines = [("n", [number(metrics.count) for metrics in levels.values()])]
    lines += [
        (_TITLES[name], [metric_cell(metrics, name) for metrics in levels.values()])
        for name in _METRICS
    ]
    limits = [next(iter(metrics.thresholds.values), None) for metrics in levels.values()]
    lines.append(("threshold", [number(limit, 3) for limit in limits]))
    rows = [Row([Cell(name), *cells]) for name, cells in lines if any(cell.text for cell in cells)]
    return Table(
        f"Metrics at all levels{title}",
        (Column("metric"), *(Column(level, True) for level in levels)),
        rows,
    )


def metric_cell(metrics: Metrics, name: str) -> Cell:
    """Return a cell with a metric and its interval; empty if it is undefined."""
    value = metrics.values.get(name)
    return (
        number(None) if value is None else Cell(evaluate.with_interval(metrics, name), value, "n")
    )


def curves(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield ROC and precision-recall curves, reliability diagrams and decision curves of classes."""
    yield Charts([*_roc_charts(evaluated), *_precision_charts(evaluated)])
    bins: dict[str, Sequence[Bin]] = {
        subset: evaluation.finest.reliability
        for subset, evaluation in evaluated.evaluations.items()
    }
    made = [charts.calibration_chart("Calibration", bins)]
    for name, metrics in shown_levels(evaluated.main[1]):
        if metrics.decision_curve is not None:
            title = f"Decision curve, {LEVEL_NAMES[name.partition('_')[0]]}"
            made.append(charts.decision_chart(title, metrics.decision_curve))
    yield Charts(made)
    if evaluated.calibration is not None:
        yield Text(
            "The logits are divided by a temperature that was fitted to the validation set: "
            + ", ".join(evaluate.number(value) for value in evaluated.calibration.temperature) + "."
        )  # fmt: skip
        yield _temperature_table(evaluated, evaluated.calibration)


def _temperature_table(evaluated: EvaluatedPredictions, calibration: Calibration) -> Table:
    rows, names = [], [name for name in _TITLES if name in _changed(calibration)]
    for subset, levels in calibration.before.items():
        for level, metrics in shown_levels(evaluated.evaluations[subset]):
            cells = [
                Cell(f"{evaluate.number(levels[level].get(name))} → {evaluate.number(metrics.values.get(name))}", tone="n")
                for name in names
            ]  # fmt: skip
            rows.append(Row([Cell(subset), Cell(level.replace("_", ", ", 1)), *cells]))
    columns = (Column("split"), Column("level"), *(Column(_TITLES[name], True) for name in names))
    return Table("Metrics before and after the temperature", columns, rows)


def _changed(calibration: Calibration) -> set[str]:
    levels = (level for subset in calibration.before.values() for level in subset.values())
    return {name for values in levels for name in values}


def _events(
    evaluated: EvaluatedPredictions,
) -> Iterator[tuple[str, str, NDArray[np.bool_], NDArray[np.float64], Predictions, int]]:
    """Yield title of the level, name of the curve, (N,) events and probabilities, scores, and number of patients.

    For two classes there is one curve per split, else one per class on the main split.
    """
    task = evaluated.task
    ranks = {level: rank for rank, (level, _) in enumerate(_LEVELS)}
    for level, title in _LEVELS:
        for subset in evaluated.predictions if task.positive is not None else [evaluated.main[0]]:
            predictions = evaluated.predictions[subset]
            if ranks[level] < ranks[predictions.level]:
                continue
            scores, patients = (
                scores_of(predictions, level, "mean", evaluated.evaluation_settings),
                len(predictions.patients),
            )
            for i, name in enumerate(task.classes):
                if task.positive in (None, i) and len(scores.target):
                    curve = subset if task.positive is not None else name
                    yield title, curve, scores.label == i, scores.output[:, i], scores, patients


def _roc_charts(evaluated: EvaluatedPredictions) -> Iterator[str]:
    rocs_by_level: dict[str, dict[str, Roc]] = {}
    for title, name, event, values, scores, patients in _events(evaluated):
        roc = roc_of(
            event,
            values,
            scores.patient,
            patients=patients,
            seed=evaluated.evaluation_settings.seed,
        )
        if roc is not None:
            rocs_by_level.setdefault(title, {})[name] = roc
    for title, rocs in rocs_by_level.items():
        yield charts.roc_chart(f"ROC, {title}", rocs)


def _precision_charts(evaluated: EvaluatedPredictions) -> Iterator[str]:
    curves_by_level: dict[str, dict[str, charts.ChartCurve]] = {}
    for title, name, event, values, *_ in _events(evaluated):
        curve = precision_recall_of(event, values)
        if curve is not None:
            curves_by_level.setdefault(title, {})[name] = curve
    for title, curves_of_level in curves_by_level.items():
        yield charts.precision_chart(f"Precision and recall, {title}", curves_of_level)


def confusions(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield the confusion matrices of the main split."""
    subset, evaluation = evaluated.main
    for level, metrics in shown_levels(evaluation):
        rows = list(zip(evaluated.task.classes, metrics.confusion, strict=True))
        threshold = "".join(f", threshold {limit:.3f}" for limit in metrics.thresholds.values)
        yield Confusion(
            f"{subset}: {level.replace('_', ', ', 1)}{threshold}", evaluated.task.classes, rows
        )


def subgroup_tables(evaluated: EvaluatedPredictions, *, quality: bool) -> Iterator[Block]:
    """Yield a table of metrics by subgroup: of the quality of slides, or of all other columns."""
    by_column = [
        subgroups
        for subgroups in evaluated.breakdown.subgroups
        if (subgroups.column in QUALITY) == quality
    ]
    if by_column:
        what = "Performance and quality of slides" if quality else "Performance by subgroup"
        yield _subgroup_table(what, by_column, evaluated.task)


def _subgroup_table(title: str, by_column: Sequence[Subgroups], task: Task) -> Table:
    names = [name for name in task.by_subgroup if name in by_column[0].groups[0].values]
    titles = {name: evaluate.metric_title(name, task.name) for name in names}
    main = names[0]
    columns = (
        Column("column"), Column("group"), Column("n", True), Column("patients", True),
        Column(titles[main], True), Column(f"{titles[main]} minus the rest", True),
        *(Column(titles[name], True) for name in names[1:]),
    )  # fmt: skip
    rows = []
    for subgroups in by_column:
        column = (
            f"{COLUMN_TITLES.get(subgroups.column, subgroups.column)} ({plural(subgroups.level)})"
        )
        for group in subgroups.groups:
            apart = group.differences.get(main, Difference(None, None))
            first, *further_cells = (
                interval_cell(group.values.get(name), group.intervals.get(name)) for name in names
            )
            difference = interval_cell(apart.value, apart.interval, signed=True)
            rows.append(Row([
                Cell(column, tone="nowrap"), Cell(group.name, tone="nowrap"), number(group.count), number(group.patients),
                first, Cell(group.note, tone="soft") if group.note else difference, *further_cells,
            ]))  # fmt: skip
    return Table(title, columns, rows)


def interval_cell(
    value: float | None, ends: tuple[float, float] | None, *, signed: bool = False
) -> Cell:
    """Return a cell with a value and its interval; empty if it is undefined."""
    return (
        number(None)
        if value is None
        else Cell(evaluate.with_ends(value, ends, signed=signed), value, "n")
    )


def shortcut_blocks(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield how well the origin of slides predicts their labels, and a warning if it does so nearly as well as the model."""
    shortcut = evaluated.breakdown.shortcut
    if shortcut is None:
        return
    if shortcut.warning:
        yield Text(f"Warning: {shortcut}", "bad")
    rows = [
        Row([Cell(name), number(value, 3)])
        for name, value in sorted(shortcut.auc.items(), key=lambda entry: -entry[1])
    ]
    model = "" if shortcut.model_auc is None else f"; AUC of the model: {shortcut.model_auc:.3f}"
    yield Table(
        f"Labels predicted from the origin of slides, of {shortcut.patients} patients, cross-validated: "
        f"p = {shortcut.p:.3f}{model}",
        (Column("column"), Column("AUC", True)), rows,
    )  # fmt: skip
