"""Evaluations as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from histopipe.dataset.options import Side
from histopipe.evaluation.evaluate import Evaluation
from histopipe.evaluation.metrics import Metrics
from histopipe.evaluation.predictions import Aggregation

WITH_INTERVALS = {"auc": "AUC", "balanced_accuracy": "bal. acc."}
PLAIN = {"sensitivity": "sens.", "specificity": "spec.", "f1": "F1", "brier": "Brier"}
"""Metrics in a table, with and without interval, and their titles."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text, or a hyphen for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def interval(metrics: Metrics, name: str) -> str:
    """Return the interval of a metric, such as `[0.872, 0.951]`; empty if it has none."""
    if name not in metrics.intervals:
        return ""
    low, high = metrics.intervals[name]
    return f"[{number(low)}, {number(high)}]"


def with_interval(metrics: Metrics, name: str) -> str:
    """Return a metric with its interval: `0.912 [0.872, 0.951]`."""
    return f"{number(getattr(metrics, name))} {interval(metrics, name)}".rstrip()


def evaluation_lines(title: str, evaluation: Evaluation) -> list[str]:
    """Return a table with a line per level, and notes below it."""
    rows = [[title, "n", *WITH_INTERVALS.values(), *PLAIN.values()]]
    notes: dict[str, list[str]] = {}
    for name, metrics in evaluation.named():
        level, _, how = name.partition("_")
        # Predictions of bags have one aggregation only, so it is not named.
        label = name.replace("_", " ", 1) if evaluation.patch else level
        if level == "patient" and metrics == evaluation.slide.get(cast(Aggregation, how)):
            continue
        cells = [with_interval(metrics, figure) for figure in WITH_INTERVALS]
        cells += [number(getattr(metrics, figure)) for figure in PLAIN]
        rows.append([f"  {label}", str(metrics.count), *cells])
        for note in metrics.notes:
            notes.setdefault(note, []).append(label)
    levels = len(rows) - 1
    lines = [
        f"  {'' if len(where) == levels else ', '.join(where) + ': '}{note}"
        for note, where in notes.items()
    ]
    if evaluation.slide and not any(row[0].startswith("  patient") for row in rows):
        lines.append("  patients: same as slides, because each patient has one slide")
    return aligned(rows) + lines


def split_lines(evaluations: Mapping[Side, Evaluation]) -> list[str]:
    """Return the table of each split."""
    titles = {"test": "test (held out)"}
    return [
        line
        for side, evaluation in evaluations.items()
        for line in evaluation_lines(titles.get(side, side), evaluation)
    ]
