"""Sections of a page that shows an evaluation: metrics and charts, subgroups, failures, and participant flow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from histopipe.evaluation import evaluate
from histopipe.evaluation.evaluate import Evaluation
from histopipe.reports import charts
from histopipe.reports.data_description import RunData
from histopipe.reports.evaluation_blocks import (
    EvaluatedPredictions,
    confusions,
    curves,
    metric_cell,
    metrics_blocks,
    shortcut_blocks,
    subgroup_tables,
)
from histopipe.reports.failures import failure_blocks
from histopipe.reports.flow_chart import flow_blocks
from histopipe.reports.heatmap_values import SlideImages
from histopipe.reports.html_page import Block, Cell, Charts, Column, Page, Row, Table, number
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.subsets import Subset
from histopipe.tasks.calibration import Bin, reliability_of
from histopipe.tasks.choices import TaskName
from histopipe.tasks.predictions import scores_of
from histopipe.tasks.registry import TASKS
from histopipe.tasks.statistics import Roc, precision_recall_of, roc_of
from histopipe.tasks.survival import RiskGroup
from histopipe.tasks.task import Predictions

_MOST_ROWS = 5000


def target_rows(evaluations: Mapping[Subset, Evaluation]) -> Iterator[Block]:
    """Yield a table of the metrics of all subsets and levels, with a row per column."""
    evaluated = [
        (subset, level, metrics)
        for subset, evaluation in evaluations.items()
        for level, metrics in evaluate.informative_levels(evaluation)
        if not (level == "patient_mean" and evaluate.same_as_slides(evaluation, "mean"))
    ]
    metric_names = {name.partition(":")[0] for *_, metrics in evaluated for name in metrics.values}
    titled = [name for name in evaluate.METRIC_TITLES if name in metric_names]
    main = list(TASKS[evaluated[0][2].task].main) if evaluated else []
    values = [*main, *(name for name in titled if name not in main)]
    columns = (
        Column("split"), Column("level"), Column("column"), Column("n", True),
        *(Column(evaluate.metric_title(name, evaluated[0][2].task), True) for name in values), Column("notes"),
    )  # fmt: skip
    rows = []
    for subset, level, metrics in evaluated:
        names = dict.fromkeys(name.partition(":")[2] for name in metrics.values)
        for name in names:
            ending = f":{name}" if name else ""
            rows.append(Row([
                Cell(subset), Cell(level.partition("_")[0]), Cell(name or ("mean" if len(names) > 1 else "")),
                number(metrics.count), *(metric_cell(metrics, name + ending) for name in values),
                Cell("; ".join(metrics.notes) if not name else "", tone="why"),
            ]))  # fmt: skip
    yield Table("Metrics at all levels", columns, rows)


def target_charts(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield charts: survival of the risk groups, true against predicted values, or ROC curves and calibration."""
    yield Charts(list(_charts(evaluated)))
    for subset, evaluation in evaluated.evaluations.items():
        if evaluation.finest.groups:
            yield _at_risk(subset, evaluation.finest.groups)


def _charts(evaluated: EvaluatedPredictions) -> Iterator[str]:
    for subset, predictions in evaluated.predictions.items():
        draw = _CHARTS.get(predictions.task.name, _scatter_charts)
        yield from draw(evaluated, subset, predictions)


def _survival_charts(
    evaluated: EvaluatedPredictions, subset: Subset, _: Predictions
) -> Iterator[str]:
    metrics = evaluated.evaluations[subset].finest
    if metrics.groups:
        p = "" if metrics.log_rank is None else f", log-rank p {metrics.log_rank:.2g}"
        yield charts.survival_chart(f"Survival, {subset}{p}", metrics.groups)


def _scatter_charts(
    _: EvaluatedPredictions, subset: Subset, predictions: Predictions
) -> Iterator[str]:
    for i, name in enumerate(predictions.task.columns):
        rows = np.isfinite(predictions.target[:, i])
        true, predicted = predictions.target[rows, i], predictions.output[rows, i]
        yield charts.scatter_chart(f"{name}, {subset}", true, predicted)


def _label_charts(
    evaluated: EvaluatedPredictions, subset: Subset, predictions: Predictions
) -> Iterator[str]:
    """Yield ROC curves, precision-recall curves and reliability diagrams of the labels."""
    rocs: dict[str, Roc] = {}
    precision: dict[str, charts.ChartCurve] = {}
    bins: dict[str, Sequence[Bin]] = {}
    seed, patients = evaluated.evaluation_settings.seed, len(predictions.patients)
    for i, name in enumerate(predictions.task.columns):
        rows = np.isfinite(predictions.target[:, i])
        if not rows.any():
            continue
        event = predictions.target[rows, i] == 1
        values = predictions.output[rows, i].astype(np.float64)
        roc = roc_of(event, values, predictions.patient[rows], patients=patients, seed=seed)
        curve = precision_recall_of(event, values)
        if roc is not None and curve is not None:
            rocs[name], precision[name] = roc, curve
        bins[name] = reliability_of(values, event)
    if rocs:
        yield charts.roc_chart(f"ROC, {subset}", rocs)
        yield charts.precision_chart(f"Precision and recall, {subset}", precision)
    if bins:
        yield charts.calibration_chart(f"Calibration, {subset}", bins)


_CHARTS: Mapping[TaskName, Callable[[EvaluatedPredictions, Subset, Predictions], Iterator[str]]] = {
    "survival": _survival_charts, "multilabel": _label_charts,
}  # fmt: skip
"""Charts of a task; true against predicted values for others."""


def _at_risk(subset: Subset, groups: tuple[RiskGroup, ...]) -> Table:
    times = groups[0].at_risk_times
    columns = (
        Column("group"), Column("n", True), Column("events", True), Column("median", True),
        *(Column(f"at {time:.4g}", True) for time in times),
    )  # fmt: skip
    rows = [
        Row([
            Cell(group.name), number(group.count), number(group.events), number(group.median, 3),
            *(number(count) for count in group.at_risk),
        ])
        for group in groups
    ]  # fmt: skip
    return Table(f"{subset.capitalize()}: risk groups and numbers at risk", columns, rows)


def _value(value: float) -> Cell:
    return number(None) if math.isnan(value) else Cell(f"{value:.4g}", value, "n")


def target_table(run: RunData) -> Table | None:
    """Return a table of all validation and test slides, or bags, with targets and predictions."""
    subsets = list(run.predictions.items())
    if not subsets:
        return None
    _, first = subsets[0]
    level = first.unit
    names = first.task.output_names[: len(first.task.names)]
    columns = (
        Column(level), Column("patient"), Column("split"),
        *(Column(f"true {name}", True) for name in first.task.columns),
        *(Column(name.replace("_", " ", 1), True) for name in names),
    )  # fmt: skip
    rows = []
    for subset, scores in subsets:
        means = scores_of(scores, level, "mean", run.evaluated.evaluation_settings)
        for i, name in enumerate(means.ids(level)):
            rows.append(Row([
                Cell(name, tone="id"), Cell(scores.patients[means.patient[i]]), Cell(subset),
                *map(_value, means.target[i].tolist()), *map(_value, means.output[i, : len(names)].tolist()),
            ]))  # fmt: skip
    title = "Slides (mean over patches)" if first.level == "patch" else "Bags"
    return Table(f"{title}: targets and predictions", columns, rows[:_MOST_ROWS])


def add_metrics(page: Page, evaluated: EvaluatedPredictions) -> None:
    """Add the metrics with their charts."""
    if evaluated.task.of_classes:
        page.add("Metrics", *metrics_blocks(evaluated))
        page.add("ROC and calibration", *curves(evaluated))
        page.add("Confusion", *confusions(evaluated))
    else:
        page.add("Metrics", *target_rows(evaluated.evaluations))
        page.add("Predictions", *target_charts(evaluated))


def add_analysis(
    page: Page,
    evaluated: EvaluatedPredictions,
    slides: Sequence[SlideEntry],
    images: SlideImages | None,
    *,
    read: str = "Ingested",
) -> None:
    """Add subgroups, failures and participant flow. `images` as for `failure_blocks`, `read` as for `flow_blocks`."""
    page.add("Subgroups", *subgroup_tables(evaluated, quality=False))
    page.add(
        "Failure analysis", *subgroup_tables(evaluated, quality=True), *failure_blocks(evaluated, slides, images),
        *shortcut_blocks(evaluated),
    )  # fmt: skip
    page.add("Participant flow", *flow_blocks(evaluated.flow, read))
