"""Sections of a page that shows an evaluation: metrics and charts, subgroups, failures, and participant flow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from histopipe.reports.data_description import RunData
from histopipe.reports.evaluation_blocks import (
    CHARTS,
    PREDICTION_CHARTS,
    EvaluatedPredictions,
    confusions,
    metrics_blocks,
    shortcut_blocks,
    subgroup_tables,
)
from histopipe.reports.failures import decisions, failure_blocks
from histopipe.reports.flow_chart import flow_blocks
from histopipe.reports.heatmap_values import SlideImages
from histopipe.reports.html_page import Cell, Page, Row, Table, number
from histopipe.splits.slide_table import SlideEntry
from histopipe.tasks.predictions import scores_of

_MOST_ROWS = 5000
"""Most rows of a table of slides."""


def slide_table(run: RunData) -> Table | None:
    """Return a table of all validation and test slides, or bags, with their labels or targets, and predictions."""
    if not run.predictions:
        return None
    first, task = next(iter(run.predictions.values())), run.evaluated.task
    of_patches = first.level == "patch"
    annotated = getattr(run.config, "labels_from", "slide") == "annotation"
    if task.of_classes:
        what, rows = "labels", _class_rows(run.evaluated, annotated=annotated)
        columns = ["patches" if of_patches else "bags", "label", "decided", "correct"]
        if annotated:  # most slides have several labels
            columns[1:3] = task.classes
        columns += [f"p {name}" for name in task.classes]
    else:
        what, rows = "targets", _target_rows(run.evaluated)
        columns = [f"true {name}" for name in task.columns]
        columns += [name.replace("_", " ", 1) for name in task.output_names[: len(task.names)]]
    title = "Slides (mean over patches)" if of_patches else "Bags"
    head = list(islice(rows, _MOST_ROWS))
    cut = f" (the first {_MOST_ROWS:,})" if next(rows, None) else ""
    return Table(
        f"{title}: {what} and predictions{cut}", (first.unit, "patient", "split", *columns), head
    )


def _class_rows(evaluated: EvaluatedPredictions, *, annotated: bool) -> Iterator[Row]:
    """Yield a row per slide. If its patches are `annotated`, it has their numbers and share of correct decisions."""
    for subset in evaluated.predictions:
        for slide in decisions(evaluated, subset):
            if annotated:
                cells = [number(slide.counts.get(name, 0)) for name in evaluated.task.classes]
                cells.append(number(100 * slide.right, unit=" %"))
            elif len(slide.labels) > 1:
                cells = [Cell("several"), Cell(slide.decision), Cell("")]
            else:
                correct = Cell("no", tone="bad") if slide.wrong else Cell("yes", tone="good")
                cells = [Cell(slide.labels[0]), Cell(slide.decision), correct]
            yield Row(
                [
                    Cell(slide.name, tone="id"),
                    Cell(slide.patient),
                    Cell(subset),
                    number(slide.patches),
                    *cells,
                    *(number(p, 3) for p in slide.probability),
                ]
            )


def _target_rows(evaluated: EvaluatedPredictions) -> Iterator[Row]:
    """Yield a row per slide with its targets, and the predictions that a user sees."""
    for subset, predictions in evaluated.predictions.items():
        means = scores_of(predictions, predictions.unit, "mean", evaluated.evaluation_settings)
        outputs = means.output[:, : len(predictions.task.names)]
        for name, patient, *values in zip(
            means.ids(predictions.unit), means.patient, *means.target.T, *outputs.T, strict=True
        ):
            yield Row(
                [
                    Cell(name, tone="id"),
                    Cell(predictions.patients[patient]),
                    Cell(subset),
                    *(
                        number(None)
                        if math.isnan(value)
                        else Cell(f"{value:.4g}", float(value), "n")
                        for value in values
                    ),
                ]
            )


def add_metrics(page: Page, evaluated: EvaluatedPredictions) -> None:
    """Add the metrics with their charts."""
    page.add("Metrics", *metrics_blocks(evaluated))
    title, draw_charts = CHARTS.get(evaluated.task.name, PREDICTION_CHARTS)
    page.add(title, *draw_charts(evaluated))
    page.add("Confusion", *confusions(evaluated))


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
        "Failure analysis",
        *subgroup_tables(evaluated, quality=True),
        *failure_blocks(evaluated, slides, images),
        *shortcut_blocks(evaluated),
    )
    page.add("Participant flow", *flow_blocks(evaluated.flow, read))
