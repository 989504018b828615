"""Sections of a page that shows an evaluation: metrics and charts, subgroups, failures, and participant flow."""

from __future__ import annotations

from collections.abc import Sequence

from histopipe.reports.evaluation_blocks import (
    EvaluatedPredictions,
    confusions,
    curves,
    metrics_blocks,
    shortcut_blocks,
    subgroup_tables,
)
from histopipe.reports.failures import failure_blocks
from histopipe.reports.flow_chart import flow_blocks
from histopipe.reports.heatmap_sources import SlideImages
from histopipe.reports.html_page import Page
from histopipe.reports.run_targets import target_charts, target_rows
from histopipe.splits.slide_table import SlideEntry


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
