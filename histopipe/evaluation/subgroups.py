"""Metrics of subgroups of slides or patients, and their differences from the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.groups import (
    AUTOMATIC,
    CATEGORIES,
    QUALITY,
    NoValue,
    groups_of,
    median_text,
)
from histopipe.splits.slide_table import SlideEntry
from histopipe.system.result import counted
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.intervals import (
    TOO_FEW,
    Difference,
    Interval,
    WeightedStatistics,
    difference_interval,
    intervals_of,
)
from histopipe.tasks.predictions import ModelPredictions, joined_scores
from histopipe.tasks.statistics import bootstrap_draws
from histopipe.tasks.task import EvaluationSettings, Scores, known

_FEWEST_PATIENTS = 10
"""Smaller groups have no intervals."""
_PATCH_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Metrics of one group.

    Attributes:
        name: value of the column, or range of values.
        count, patients: number of items at the level of the subgroups, and of their patients.
        values, intervals: metrics and 95 % confidence intervals, by name.
        differences: from all other groups together.
        note: why there are no intervals; empty if there are.
    """

    name: str
    count: int
    patients: int
    values: Mapping[str, float | None]
    intervals: Mapping[str, Interval]
    differences: Mapping[str, Difference]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Subgroups:
    """Metrics by the values of a column.

    Attributes:
        column: column of `slides.csv`.
        level: "patient" if each patient is in one group, "slide" if each slide is, or "patch" if slides have no label.
        groups: in the order of their values.
    """

    column: str
    level: EvaluationLevel
    groups: tuple[GroupMetrics, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Subgroups:
        """Create it from the result of `to_json`. Raise KeyError or TypeError if the value has the wrong form."""
        groups = []
        for group in value["groups"]:
            differences = {
                name: Difference(difference["value"], _ends(difference["interval"]))
                for name, difference in group["differences"].items()
            }
            intervals = {name: tuple(ends) for name, ends in group["intervals"].items()}
            # Earlier versions had another name of the values.
            values = group["values"] if "values" in group else group["figures"]
            groups.append(GroupMetrics(
                group["name"], group["count"], group["patients"], values, intervals, differences, group["note"]
            ))  # fmt: skip
        return cls(value["column"], value["level"], tuple(groups))


def _ends(value: Sequence[float] | None) -> Interval | None:
    return None if value is None else (value[0], value[1])


def subgroups(
    parts: Sequence[ModelPredictions],
    slides: Sequence[SlideEntry],
    columns: Mapping[str, float | None],
    settings: EvaluationSettings,
) -> tuple[Subgroups, ...]:
    """Return the metrics of predictions by the values of columns.

    Args:
        parts: predictions of one or several models, with thresholds, as for `evaluate`.
        slides: the predicted slides, and others.
        columns: columns of the slides, with the width of the bins of numbers or None.
        settings: of the evaluation.

    Returns:
        One for each column of which the predicted slides have at least two values, or one value of the labels file.
    """
    draws = bootstrap_draws(len(parts[0][0].patients), settings.resamples, settings.seed)
    items = _levels(parts, settings)
    breakdowns = []
    for column, width in columns.items():
        categories = column in CATEGORIES
        of_slide = {slide.slide: slide.value(column) for slide in slides}
        of_patient: dict[str, set[str]] = {}
        for slide in slides:
            of_patient.setdefault(slide.patient, set()).add(slide.value(column))
        values: list[str | NoValue]
        for level, scores in items.items():
            if level != "patient":
                values = [of_slide.get(name, "") for name in _names(parts, level, scores.item)]
                break
            several = [of_patient.get(name, {""}) for name in _names(parts, level, scores.item)]
            # A model of patients has no predictions of slides to compare instead.
            middle = len(items) == 1 and column in QUALITY
            values = [
                min(cells) if len(cells) == 1 else median_text(cells) if middle else NoValue.SEVERAL
                for cells in several
            ]
            if NoValue.SEVERAL not in values or len(items) == 1:
                break
        else:
            continue
        names, numbers = groups_of(values, width, categories=categories)
        if len(names) > 1 or (column not in AUTOMATIC and names != [NoValue.MISSING.value]):
            used = draws[:_PATCH_RESAMPLES] if level == "patch" else draws
            group = np.array(numbers)
            each = tuple(_group(name, group == i, scores, used) for i, name in enumerate(names))
            breakdowns.append(Subgroups(column, level, each))
    return tuple(breakdowns)


def _levels(
    parts: Sequence[ModelPredictions], settings: EvaluationSettings
) -> dict[EvaluationLevel, Scores]:
    """Return the scores of each level that has one target for all of its items, the highest level first."""
    lowest = parts[0][0].level
    levels: tuple[EvaluationLevel, ...] = ("patient", "slide", "patch")
    each = {
        level: joined_scores(parts, level, "mean", settings)[0]
        for level in levels[: levels.index(lowest) + 1]
    }
    return {
        level: scores
        for level, scores in each.items()
        if len(scores.target) and not scores.left_out
    }


def _names(
    parts: Sequence[ModelPredictions], level: EvaluationLevel, item: NDArray[np.int64]
) -> list[str]:
    """Return the slide of each patch or slide, or the patient."""
    names = []
    for value in item.tolist():
        predictions, number = parts[value >> 32][0], value & 0xFFFFFFFF
        if level == "patch":
            number = int(predictions.slide[number])
        names.append(predictions.owner(level)[1][number])
    return names


def _group(
    name: str, inside: NDArray[np.bool_], scores: Scores, draws: NDArray[np.float64]
) -> GroupMetrics:
    rows, rest = np.flatnonzero(inside), np.flatnonzero(~inside)
    statistics = scores.task.statistics(scores.rows(rows))
    values = _values(statistics)
    patients = [len(np.unique(scores.patient[some])) for some in (rows, rest)]
    if not len(draws):
        return GroupMetrics(name, len(rows), patients[0], values, {}, {})
    if patients[0] < _FEWEST_PATIENTS:
        note = f"{TOO_FEW}: {patients[0]}"
        return GroupMetrics(name, len(rows), patients[0], values, {}, {}, note)
    intervals, _ = intervals_of(statistics, draws[:, : statistics.patients], patients[0])
    defined = {key: ends for key, ends in intervals.items() if values.get(key) is not None}
    if not patients[1]:
        note = "no difference: no other group"
        return GroupMetrics(name, len(rows), patients[0], values, defined, {}, note)
    if patients[1] < _FEWEST_PATIENTS:
        note = f"no difference: only {counted(patients[1], 'patient')} in other groups"
        return GroupMetrics(name, len(rows), patients[0], values, defined, {}, note)
    rest_statistics = scores.task.statistics(scores.rows(rest))
    of_others, _ = intervals_of(rest_statistics, draws[:, : rest_statistics.patients], patients[1])
    differences = _differences(values, defined, _values(rest_statistics), of_others)
    return GroupMetrics(name, len(rows), patients[0], values, defined, differences)


def _values(statistics: WeightedStatistics) -> dict[str, float | None]:
    values = statistics.compute(np.ones((1, statistics.patients)))
    return {name: known(value[0]) for name, value in values.items()}


def _differences(
    values: Mapping[str, float | None],
    intervals: Mapping[str, Interval],
    rest_values: Mapping[str, float | None],
    of_others: Mapping[str, Interval],
) -> dict[str, Difference]:
    """Return the metrics of a group minus those of the others.

    The intervals assume that both are independent. That makes them too wide for groups that share patients.
    """
    differences = {}
    for name, value in values.items():
        other, interval = rest_values.get(name), None
        if value is None or other is None:
            differences[name] = Difference(None, None)
            continue
        if name in intervals and name in of_others:
            interval = difference_interval((value, intervals[name]), (other, of_others[name]))
        differences[name] = Difference(value - other, interval)
    return differences
