"""A line for each slide, or bag, that a run was validated or tested on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from histopipe.dataset.options import Side
from histopipe.evaluation.evaluate import positive_class
from histopipe.evaluation.metrics import decide
from histopipe.evaluation.scores import Level, PatchScores, scores_of
from histopipe.reports.page import Cell, Column, Row, Table, number
from histopipe.reports.run_facts import RunFacts
from histopipe.runs.task_config import BagTrainConfig


def slide_table(run: RunFacts) -> Table | None:
    """The table; None where nothing was predicted."""
    rows = [row for side, scores in run.predictions.items() for row in _rows(run, side, scores)]
    if not rows:
        return None
    of_bags = isinstance(run.config, BagTrainConfig)
    columns = (
        Column(run.config.bag if isinstance(run.config, BagTrainConfig) else "slide"), Column("patient"), Column("side"),
        Column("bags" if of_bags else "patches", True), Column("label"), Column("decided"), Column("right"),
        *(Column(f"p {name}", True) for name in run.classes),
    )  # fmt: skip
    how = "" if of_bags else ", as the mean of its patches"
    return Table(f"What was predicted of each{how}", columns, rows)


def _rows(run: RunFacts, side: Side, patches: PatchScores) -> Iterator[Row]:
    level: Level = "patient" if patches.level == "patient" else "slide"
    positive = positive_class(run.classes, run.judging.positive)
    # All patches together, whatever their own labels are.
    blank = replace(patches, label=np.full(len(patches.label), -1, np.int32))
    scores = scores_of(blank, level, "mean", top_k=run.judging.top_k, positive=positive or 0)
    evaluation = run.result.metrics.get(side)
    judged = evaluation.at(level, "mean") if evaluation else None
    decided = decide(scores, positive, judged.threshold if judged else None)
    group = patches.slide if level == "slide" else patches.patient
    names = patches.slides if level == "slide" else patches.patients
    counts = np.bincount(group, minlength=len(names))
    for i, item in enumerate(scores.item.tolist()):
        here = np.flatnonzero(group == item)
        labels = np.unique(patches.label[here])
        label = run.classes[labels[0]] if len(labels) == 1 else "several"
        decision = run.classes[decided[i]]
        known = len(labels) == 1
        right = Cell("yes", tone="good") if label == decision else Cell("no", tone="bad")
        yield Row([
            Cell(names[item], tone="id"), Cell(patches.patients[patches.patient[here[0]]]), Cell(side),
            number(int(counts[item])), Cell(label), Cell(decision), right if known else Cell(""),
            *(number(float(p), 3) for p in scores.probability[i]),
        ])  # fmt: skip
