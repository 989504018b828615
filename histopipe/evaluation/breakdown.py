"""Metrics by subgroup, and the check for shortcuts, of the predictions of a run, a cross-validation or other slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from histopipe.evaluation.evaluate import Evaluation
from histopipe.evaluation.groups import AUTOMATIC, check_subgroup
from histopipe.evaluation.shortcuts import Shortcut, find_shortcut
from histopipe.evaluation.subgroups import Subgroups, subgroups
from histopipe.evaluation.table import aligned, with_ends
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.subsets import Subset
from histopipe.system.result import plural
from histopipe.tasks.choices import TaskName
from histopipe.tasks.intervals import Difference
from histopipe.tasks.predictions import ModelPredictions, Predictions
from histopipe.tasks.registry import TASKS
from histopipe.tasks.task import EvaluationSettings


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Metrics by subgroup, and how well the origin of slides predicts labels (None for tasks without classes)."""

    subgroups: tuple[Subgroups, ...] = ()
    shortcut: Shortcut | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "subgroups": [column.to_json() for column in self.subgroups],
            "shortcut": None if self.shortcut is None else self.shortcut.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Breakdown:
        """Create it from the result of `to_json`. Raise KeyError or TypeError if the value has the wrong form."""
        shortcut = value["shortcut"]
        return cls(
            tuple(Subgroups.from_json(entry) for entry in value["subgroups"]),
            None if shortcut is None else Shortcut(**shortcut),
        )


def breakdown_lines(
    breakdown: Breakdown, task: TaskName, requested: Sequence[str] | None = None
) -> list[str]:
    """Return a table of the main metric of a task by subgroup, of `site` and columns that are not automatic; and a warning.

    `requested` are values of `--subgroup`, whose columns are always in the table.
    """
    always = {"site", *(check_subgroup(text)[0] for text in requested or ())}
    columns = [
        column
        for column in breakdown.subgroups
        if column.column in always or column.column not in AUTOMATIC
    ]
    lines: list[str] = []
    if columns:
        name, title = next(iter(TASKS[task].main.items()))
        rows = [["subgroup", "n", title, "minus the rest"]]
        for column in columns:
            rows.append([f"  {column.column} ({plural(column.level)})", "", "", ""])
            for group in column.groups:
                value = with_ends(group.values.get(name), group.intervals.get(name))
                difference = group.differences.get(name, Difference(None, None))
                apart = with_ends(difference.value, difference.interval, signed=True)
                rows.append([f"    {group.name}", str(group.count), value, group.note or apart])
        lines = aligned(rows)
    if breakdown.shortcut is not None and breakdown.shortcut.warning:
        lines.append(f"warning: {breakdown.shortcut}")
    return lines


def break_down_subsets(
    predictions: Mapping[Subset, Predictions],
    evaluations: Mapping[Subset, Evaluation],
    slides: Sequence[SlideEntry],
    requested: Sequence[str],
    settings: EvaluationSettings,
) -> Breakdown:
    """Return the breakdown of the test set, or of validation if there is none. `evaluations` is the result of `evaluate_subsets`."""
    subset: Subset = "test" if "test" in evaluations else "validation"
    part = (predictions[subset], evaluations[subset].thresholds)
    return break_down([part], evaluations[subset], slides, requested, settings)


def break_down(
    parts: Sequence[ModelPredictions],
    evaluation: Evaluation,
    slides: Sequence[SlideEntry],
    requested: Sequence[str],
    settings: EvaluationSettings,
) -> Breakdown:
    """Return the metrics of the predictions `parts` by subgroup, and the check for shortcuts.

    Args:
        parts: as for `evaluate`; `evaluation` is its result.
        slides: all slides; those that are not excluded are the data in which a shortcut is searched.
        requested: values of `--subgroup`. Columns of `AUTOMATIC` are added.
        settings: as for `evaluate`.
    """
    columns = dict.fromkeys(AUTOMATIC, None) | dict(map(check_subgroup, requested))
    used = [slide for slide in slides if slide.subsets]
    shortcut = None
    if TASKS[evaluation.finest.task].of_classes:
        highest = (
            evaluation.patient.get("mean") or evaluation.slide.get("mean") or evaluation.finest
        )
        shortcut = find_shortcut(used, model_auc=highest.values["auc"], seed=settings.seed)
    return Breakdown(subgroups(parts, used, columns, settings), shortcut)
