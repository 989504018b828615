"""Report of a run with another task than classification: metrics, charts, and predictions of slides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from histopipe.dataset.options import Side
from histopipe.evaluation import table
from histopipe.evaluation.calibration import Bin, reliability_of
from histopipe.evaluation.evaluate import Evaluation
from histopipe.evaluation.levels import Level
from histopipe.evaluation.multilabel import label_scores
from histopipe.evaluation.statistics import Roc, precision_recall_of, roc_of
from histopipe.evaluation.target_metrics import RiskGroup, TargetMetrics
from histopipe.evaluation.target_scores import TargetScores, grouped
from histopipe.reports import charts
from histopipe.reports.html_page import Block, Cell, Charts, Column, Row, Table, number
from histopipe.reports.judged import Judged, metric_cell
from histopipe.reports.run_data import RunData

_MOST_ROWS = 5000


def target_rows(evaluations: Mapping[Side, Evaluation]) -> Iterator[Block]:
    """Yield a table of the metrics of all sides and levels, with a row per column."""
    judged = [
        (side, level, metrics)
        for side, evaluation in evaluations.items()
        for level, metrics in table.informative_levels(evaluation)
        if isinstance(metrics, TargetMetrics)
        and not (level == "patient_mean" and table.same_as_slides(evaluation, "mean"))
    ]
    known = {name.partition(":")[0] for *_, metrics in judged for name in metrics.figures}
    found = [name for name in table.FIGURE_TITLES if name in known]
    main = list(table.shown_figures(judged[0][2].task)[0]) if judged else []
    figures = [*main, *(name for name in found if name not in main)]
    columns = (
        Column("split"), Column("level"), Column("column"), Column("n", True),
        *(Column(table.figure_title(name, judged[0][2].task), True) for name in figures), Column("notes"),
    )  # fmt: skip
    rows = []
    for side, level, metrics in judged:
        names = dict.fromkeys(name.partition(":")[2] for name in metrics.figures)
        for name in names:
            ending = f":{name}" if name else ""
            rows.append(Row([
                Cell(side), Cell(level.partition("_")[0]), Cell(name or ("mean" if len(names) > 1 else "")),
                number(metrics.count), *(metric_cell(metrics, it + ending) for it in figures),
                Cell("; ".join(metrics.notes) if not name else "", tone="why"),
            ]))  # fmt: skip
    yield Table("Metrics at all levels", columns, rows)


def target_charts(judged: Judged) -> Iterator[Block]:
    """Yield charts: survival of the risk groups, true against predicted values, or ROC curves and calibration."""
    yield Charts(list(_charts(judged)))
    for side, evaluation in judged.evaluations.items():
        groups = getattr(evaluation.finest, "groups", ())
        if groups:
            yield _at_risk(side, groups)


def _charts(judged: Judged) -> Iterator[str]:
    for side, scores in judged.targets.items():
        if scores.task == "survival":
            metrics = judged.evaluations[side].finest
            if isinstance(metrics, TargetMetrics) and metrics.groups:
                p = "" if metrics.log_rank is None else f", log-rank p {metrics.log_rank:.2g}"
                yield charts.survival_chart(f"Survival, {side}{p}", metrics.groups)
        elif scores.task == "regression":
            for i, name in enumerate(scores.columns):
                known = np.isfinite(scores.target[:, i])
                yield charts.scatter_chart(
                    f"{name}, {side}", scores.target[known, i], scores.output[known, i]
                )
        else:
            yield from _label_charts(judged, side, scores)


def _label_charts(judged: Judged, side: Side, scores: TargetScores) -> Iterator[str]:
    """Yield ROC curves, precision-recall curves and reliability diagrams of the labels."""
    rows = grouped(scores, scores.level)
    rocs: dict[str, Roc] = {}
    precision: dict[str, charts.Curve] = {}
    bins: dict[str, Sequence[Bin]] = {}
    for i, name in enumerate(scores.columns):
        known = np.isfinite(rows.target[:, i])
        if not known.any():
            continue
        own = label_scores(rows.target[known, i], rows.output[known, i], rows.patient[known])
        roc = roc_of(own, 1, patients=len(scores.patients), seed=judged.judging.seed)
        curve = precision_recall_of(own, 1)
        if roc is not None and curve is not None:
            rocs[name], precision[name] = roc, curve
        bins[name] = reliability_of(own.probability[:, 1], own.label == 1)
    if rocs:
        yield charts.roc_chart(f"ROC, {side}", rocs)
        yield charts.precision_chart(f"Precision and recall, {side}", precision)
    if bins:
        yield charts.calibration_chart(f"Calibration, {side}", bins)


def _at_risk(side: Side, groups: tuple[RiskGroup, ...]) -> Table:
    times = groups[0].at_risk_times
    columns = (
        Column("group"), Column("n", True), Column("events", True), Column("median", True),
        *(Column(f"at {time:.4g}", True) for time in times),
    )  # fmt: skip
    rows = [
        Row([
            Cell(it.name), number(it.count), number(it.events), number(it.median, 3),
            *(number(count) for count in it.at_risk),
        ])
        for it in groups
    ]  # fmt: skip
    return Table(f"{side.capitalize()}: risk groups and numbers at risk", columns, rows)


def _value(value: float) -> Cell:
    return number(None) if math.isnan(value) else Cell(f"{value:.4g}", value, "n")


def target_table(run: RunData) -> Table | None:
    """Return a table of all validation and test slides, or bags, with targets and predictions."""
    found = list(run.targets.items())
    if not found:
        return None
    _, first = found[0]
    level: Level = "patient" if first.level == "patient" else "slide"
    names = first.output_names[: len(first.columns)] if first.task != "survival" else ("risk",)
    columns = (
        Column(level), Column("patient"), Column("split"),
        *(Column(f"true {name}", True) for name in first.columns),
        *(Column(name.replace("_", " ", 1), True) for name in names),
    )  # fmt: skip
    rows = []
    for side, scores in found:
        means = grouped(scores, level)
        ids = scores.slides if level == "slide" else scores.patients
        for i, item in enumerate(means.item.tolist()):
            rows.append(Row([
                Cell(ids[item], tone="id"), Cell(scores.patients[means.patient[i]]), Cell(side),
                *map(_value, means.target[i].tolist()), *map(_value, means.output[i, : len(names)].tolist()),
            ]))  # fmt: skip
    title = "Slides (mean over patches)" if first.level == "patch" else "Bags"
    return Table(f"{title}: targets and predictions", columns, rows[:_MOST_ROWS])
