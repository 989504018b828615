"""Slides in the report of a run: table of predictions, and heatmaps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from histopipe.errors import DamagedStore, HistopipeError, NothingToDo, UsageError
from histopipe.reports.evaluation_blocks import EvaluatedPredictions
from histopipe.reports.failures import decisions
from histopipe.reports.heatmap_sources import SlideImages, open_values
from histopipe.reports.html_page import (
    Cell,
    Column,
    Gallery,
    Picture,
    Row,
    Table,
    heatmap_image,
    number,
)
from histopipe.reports.run_data import RunData
from histopipe.runs.task_config import BagTrainConfig
from histopipe.splits.subsets import Subset

_MAX_HEATMAPS = 24


def slide_table(run: RunData) -> Table | None:
    """Return a table of all validation and test slides, or bags. Return None if there are none."""
    annotated = getattr(run.config, "labels_from", "slide") == "annotation"
    rows = [
        row for subset in run.predictions for row in _slide_rows(run.evaluated, subset, annotated)
    ]
    if not rows:
        return None
    if isinstance(run.config, BagTrainConfig):
        what, item, unit = "Bags", run.config.bag, "bags"
    else:
        what, item, unit = "Slides (mean over patches)", "slide", "patches"
    decided = [Column("label"), Column("decided"), Column("correct")]
    if annotated:  # most slides have several labels
        decided = [*(Column(name, True) for name in run.classes), Column("correct", True)]
    columns = (
        Column(item), Column("patient"), Column("split"), Column(unit, True), *decided,
        *(Column(f"p {name}", True) for name in run.classes),
    )  # fmt: skip
    return Table(f"{what}: labels and predictions", columns, rows)


def _slide_rows(evaluated: EvaluatedPredictions, subset: Subset, annotated: bool) -> Iterator[Row]:
    """Yield a row per slide. If its patches are `annotated`, it has their numbers and share of correct decisions."""
    for slide in decisions(evaluated, subset):
        if annotated:
            counts = [number(slide.counts.get(name, 0)) for name in evaluated.task.classes]
            decided = [*counts, number(100 * slide.right, unit=" %")]
        else:
            correct = Cell("no", tone="bad") if slide.wrong else Cell("yes", tone="good")
            several = len(slide.labels) > 1
            label = "several" if several else slide.labels[0]
            decided = [Cell(label), Cell(slide.decision), Cell("") if several else correct]
        yield Row([
            Cell(slide.name, tone="id"), Cell(slide.patient), Cell(subset), number(slide.patches), *decided,
            *(number(p, 3) for p in slide.probability),
        ])  # fmt: skip


def heatmaps(run: RunData) -> Gallery | None:
    """Return heatmaps of some validation and test slides, or None if there are none."""
    name = None
    if not isinstance(run.config, BagTrainConfig):
        positive = run.evaluated.task.positive
        name = run.classes[-1 if positive is None else positive]
    title = "Dark purple is 0, yellow is 1. Areas without colour are not in validation or test."
    return heatmap_gallery(run.folder, SlideImages({}, run.stores), title, name)


def heatmap_gallery(
    folder: Path, images: SlideImages, title: str, class_name: str | None = None
) -> Gallery | None:
    """Return heatmaps of some slides with values in a folder, or None if there are none."""
    made: list[Picture] = []
    try:
        slides, read_values = open_values(folder, images.stores, class_name)
    except HistopipeError:
        return None  # a slide model without attention
    for slide in slides:
        if len(made) == _MAX_HEATMAPS:
            break
        with suppress(NothingToDo, DamagedStore, UsageError):
            values = read_values(slide)
            if values is not None:
                image = heatmap_image(values, images.of(slide))
                made.append(Picture.of(f"heat-{len(made)}", f"{slide}: {values.name}", image))
    return Gallery(title, made) if made else None
