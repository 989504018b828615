"""Evaluations as tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from histopipe.evaluation.evaluate import Evaluation
from histopipe.splits.subsets import Subset
from histopipe.system.result import counted
from histopipe.tasks.choices import Aggregation, TaskName
from histopipe.tasks.metrics import Metrics
from histopipe.tasks.registry import TASKS

METRIC_TITLES: Mapping[str, str] = {
    "auc": "AUC", "average_precision": "average precision", "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy", "sensitivity": "sensitivity", "specificity": "specificity", "f1": "F1",
    "brier": "Brier score", "log_loss": "log loss", "calibration_error": "calibration error",
    "calibration_intercept": "calibration intercept", "calibration_slope": "calibration slope", "r2": "R²",
    "pearson": "Pearson correlation", "spearman": "Spearman correlation", "mae": "MAE", "rmse": "RMSE",
    "c_index": "C-index (Harrell)", "c_index_uno": "C-index (Uno)",
}  # fmt: skip


def metric_title(name: str, task: TaskName) -> str:
    """Return the title of a metric, also of one column: `Brier score, age` of `brier:age`."""
    bare, _, column = name.partition(":")
    titles = {**METRIC_TITLES, **TASKS[task].titles}
    return titles.get(bare, bare.replace("_", " ")) + (f", {column}" if column else "")


def with_ends(
    value: float | None, ends: tuple[float, float] | None, *, signed: bool = False
) -> str:
    """Return a value with its interval, such as `0.912 [0.872, 0.951]`, or with signs; a hyphen for None."""
    if value is None:
        return "-"
    sign = "+" if signed else ""
    text = f"{value:{sign}.3f}"
    return text if ends is None else f"{text} [{ends[0]:{sign}.3f}, {ends[1]:{sign}.3f}]"


def main_metric(metrics: Metrics) -> tuple[str, float | None]:
    """Return title and value of the main metric."""
    name, title = next(iter(TASKS[metrics.task].main.items()))
    return title, metrics.values[name]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
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
    return f"{number(metrics.values.get(name))} {interval(metrics, name)}".rstrip()


def evaluation_lines(title: str, evaluation: Evaluation) -> list[str]:
    """Return a table with a line per level, and notes below it."""
    task = TASKS[evaluation.finest.task]
    with_intervals, plain = task.main, task.plain
    rows = [[title, "n", *with_intervals.values(), *plain.values()]]
    notes: dict[str, list[str]] = {}
    for name, metrics in informative_levels(evaluation):
        level, _, how = name.partition("_")
        # Predictions of bags have one aggregation only, so it is not named.
        label = (
            name.replace("_", " ", 1) if evaluation.patch and len(task.aggregations) > 1 else level
        )
        if level == "patient" and same_as_slides(evaluation, cast(Aggregation, how)):
            continue
        for column in ("", *_columns_of(metrics)):
            cells = [with_interval(metrics, name + column) for name in with_intervals]
            cells += [number(metrics.values.get(name + column)) for name in plain]
            first = f"    {column[1:]}" if column else f"  {label}"
            rows.append([first, "" if column else str(metrics.count), *cells])
        for note in metrics.notes:
            notes.setdefault(note, []).append(label)
    levels = sum(bool(row[1]) for row in rows) - 1
    lines = [
        f"  {'' if len(where) == levels else ', '.join(where) + ': '}{note}"
        for note, where in notes.items()
    ]
    lines += [f"  {remark}" for remark in remarks(evaluation)]
    levels_shown = {row[0].split()[0] for row in rows}
    same = same_as_slides(evaluation, "mean")
    if same and "slide" in levels_shown and "patient" not in levels_shown:
        lines.append("  patients: same as slides, because each patient has one slide")
    return aligned(rows) + lines


def informative_levels(evaluation: Evaluation) -> Iterator[tuple[str, Metrics]]:
    """Yield the metrics of each level that has a main metric. Without one at the finest level, yield all levels.

    Most slides of a study with annotations have several labels. Those with one label often have the same.
    """
    all_levels = main_metric(evaluation.finest)[1] is None
    for name, metrics in evaluation.named():
        if all_levels or main_metric(metrics)[1] is not None:
            yield name, metrics


def remarks(evaluation: Evaluation) -> list[str]:
    """Return remarks on an evaluation: why it has no metrics of slides or patients, and patients of the training."""
    several = TASKS[evaluation.finest.task].several
    levels = {name.partition("_")[0] for name, _ in informative_levels(evaluation)}
    finer = {"slide": evaluation.patch, "patient": evaluation.patch or evaluation.slide}
    texts = []
    for level, metrics in (("slide", evaluation.slide), ("patient", evaluation.patient)):
        if not finer[level] or level in levels:
            continue
        reasons = [f"each has several {several}"]
        if metrics:
            few = metrics["mean"]
            reasons = [f"the {main_metric(few)[0]} of {few.count} is undefined"]
            reasons += [note for note in few.notes if "excluded" in note]
        texts.append(f"{level}s: not evaluated, because {'; '.join(reasons)}")
    if evaluation.in_training:
        texts.append(
            f"used in the training, too: {evaluation.in_training} of "
            f"{counted(evaluation.finest.patients, 'patient')}; metrics are too good"
        )
    return texts


def same_as_slides(evaluation: Evaluation, how: Aggregation) -> bool:
    """Return whether the metrics of patients are those of slides, because each patient has one slide."""
    slide, patient = evaluation.slide.get(how), evaluation.patient.get(how)
    # Sums in another order may differ in the last digit.
    return (
        slide is not None and patient is not None and slide.count == slide.patients == patient.count
    )


def _columns_of(metrics: Metrics) -> list[str]:
    """Return the endings of the metrics of single columns, such as `:age`."""
    endings = dict.fromkeys(name.partition(":")[2] for name in metrics.values)
    return [f":{name}" for name in endings if name]


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
