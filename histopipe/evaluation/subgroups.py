"""Metrics of subgroups of slides or patients, and their differences from the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.participants import Participant
from histopipe.evaluation.evaluate import (
    JudgeSettings,
    Part,
    class_parts,
    joined,
    positive_class,
    target_parts,
)
from histopipe.evaluation.groups import (
    AUTOMATIC,
    CATEGORIES,
    QUALITY,
    NoValue,
    groups_of,
    median_text,
)
from histopipe.evaluation.intervals import (
    TOO_FEW,
    Difference,
    Interval,
    WeightedStatistics,
    difference_interval,
    intervals_of,
)
from histopipe.evaluation.levels import Level
from histopipe.evaluation.metrics import decide
from histopipe.evaluation.predictions import PatchScores, Scores
from histopipe.evaluation.statistics import Statistics, bootstrap_draws
from histopipe.evaluation.target_metrics import joined_targets, target_statistics
from histopipe.evaluation.target_scores import GroupedScores, TargetScores
from histopipe.system.result import counted

_FEWEST_PATIENTS = 10
"""Smaller groups have no intervals."""
_PATCH_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Metrics of one group.

    Attributes:
        name: value of the column, or range of values.
        count, patients: number of items at the level of the subgroups, and of their patients.
        figures, intervals: metrics and 95 % confidence intervals, by name.
        differences: from all other groups together.
        note: why there are no intervals; empty if there are.
    """

    name: str
    count: int
    patients: int
    figures: Mapping[str, float | None]
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
    level: Level
    groups: tuple[GroupMetrics, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Subgroups:
        """Create it from the result of `to_json`. Raise KeyError or TypeError if the value has the wrong form."""
        groups = []
        for it in value["groups"]:
            differences = {
                name: Difference(own["value"], _ends(own["interval"]))
                for name, own in it["differences"].items()
            }
            intervals = {name: tuple(ends) for name, ends in it["intervals"].items()}
            groups.append(
                GroupMetrics(**{**it, "differences": differences, "intervals": intervals})
            )
        return cls(value["column"], value["level"], tuple(groups))


def _ends(value: Sequence[float] | None) -> Interval | None:
    return None if value is None else (value[0], value[1])


def subgroups(
    parts: Sequence[Part],
    slides: Sequence[Participant],
    columns: Mapping[str, float | None],
    settings: JudgeSettings,
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
    found = []
    for column, width in columns.items():
        categories = column in CATEGORIES
        of_slide = {it.slide: it.value(column) for it in slides}
        of_patient: dict[str, set[str]] = {}
        for it in slides:
            of_patient.setdefault(it.patient, set()).add(it.value(column))
        values: list[str | NoValue]
        for level, own in items.items():
            if level != "patient":
                values = [of_slide.get(name, "") for name in own.names]
                break
            several = [of_patient.get(name, {""}) for name in own.names]
            # A model of patients has no predictions of slides to compare instead.
            middle = len(items) == 1 and column in QUALITY
            values = [
                min(it) if len(it) == 1 else median_text(it) if middle else NoValue.SEVERAL
                for it in several
            ]
            if NoValue.SEVERAL not in values or len(items) == 1:
                break
        else:
            continue
        names, numbers = groups_of(values, width, categories=categories)
        if len(names) > 1 or (column not in AUTOMATIC and names != [NoValue.MISSING.value]):
            used = draws[:_PATCH_RESAMPLES] if level == "patch" else draws
            group = np.array(numbers)
            each = tuple(_group(name, group == i, own, used) for i, name in enumerate(names))
            found.append(Subgroups(column, level, each))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Items:
    """Items of a level: their slides or patients, and metrics of some of them as functions of weights."""

    names: Sequence[str]
    patient: NDArray[np.int32]
    statistics: Callable[[NDArray[np.intp]], WeightedStatistics]


def _levels(parts: Sequence[Part], settings: JudgeSettings) -> dict[Level, _Items]:
    """Return the items of each level that has labels for all of them, the highest level first."""
    lowest = parts[0][0].level
    wanted: tuple[Level, ...] = ("patient", "slide", "patch")
    found = {level: _items(parts, level, settings) for level in wanted[: wanted.index(lowest) + 1]}
    return {level: items for level, items in found.items() if items is not None}


def _items(parts: Sequence[Part], level: Level, settings: JudgeSettings) -> _Items | None:
    """Return the items of a level; None if it has none, or if some have several labels."""
    kind = parts[0][0]
    if isinstance(kind, TargetScores):
        found, limits = joined_targets(target_parts(parts), level, "mean")
        if found.left_out or not len(found.target):
            return None

        def of_targets(rows: NDArray[np.intp]) -> WeightedStatistics:
            own = GroupedScores(found.target[rows], found.output[rows], found.patient[rows], rows)
            return target_statistics(kind, own, limits[rows])

        return _Items(_names(parts, level, found.item), found.patient, of_targets)
    scores, threshold, _ = joined(class_parts(parts), level, "mean", settings)
    if scores.left_out or not len(scores.label):
        return None
    positive = positive_class(kind.classes, settings.positive)
    decided = decide(scores, positive, threshold)

    def of_classes(rows: NDArray[np.intp]) -> WeightedStatistics:
        own = Scores(scores.label[rows], scores.probability[rows], scores.patient[rows], rows)
        return Statistics(own, decided[rows], positive)

    return _Items(_names(parts, level, scores.item), scores.patient, of_classes)


def _names(parts: Sequence[Part], level: Level, item: NDArray[np.int64]) -> list[str]:
    """Return the slide of each patch or slide, or the patient."""
    names = []
    for value in item.tolist():
        scores: PatchScores | TargetScores = parts[value >> 32][0]
        own = value & 0xFFFFFFFF
        if level == "patch":
            own = int(scores.slide[own])
        names.append((scores.patients if level == "patient" else scores.slides)[own])
    return names


def _group(
    name: str, inside: NDArray[np.bool_], items: _Items, draws: NDArray[np.float64]
) -> GroupMetrics:
    rows, rest = np.flatnonzero(inside), np.flatnonzero(~inside)
    statistics = items.statistics(rows)
    figures = _figures(statistics)
    patients = [len(np.unique(items.patient[it])) for it in (rows, rest)]
    if not len(draws):
        return GroupMetrics(name, len(rows), patients[0], figures, {}, {})
    if patients[0] < _FEWEST_PATIENTS:
        note = f"{TOO_FEW}: {patients[0]}"
        return GroupMetrics(name, len(rows), patients[0], figures, {}, {}, note)
    intervals, _ = intervals_of(statistics, draws[:, : statistics.patients], patients[0])
    known = {key: it for key, it in intervals.items() if figures.get(key) is not None}
    if not patients[1]:
        note = "no difference: no other group"
        return GroupMetrics(name, len(rows), patients[0], figures, known, {}, note)
    if patients[1] < _FEWEST_PATIENTS:
        note = f"no difference: only {counted(patients[1], 'patient')} in other groups"
        return GroupMetrics(name, len(rows), patients[0], figures, known, {}, note)
    others = items.statistics(rest)
    of_others, _ = intervals_of(others, draws[:, : others.patients], patients[1])
    differences = _differences(figures, known, _figures(others), of_others)
    return GroupMetrics(name, len(rows), patients[0], figures, known, differences)


def _figures(statistics: WeightedStatistics) -> dict[str, float | None]:
    values = statistics.figures(np.ones((1, statistics.patients)))
    return {name: float(it[0]) if math.isfinite(it[0]) else None for name, it in values.items()}


def _differences(
    figures: Mapping[str, float | None],
    intervals: Mapping[str, Interval],
    others: Mapping[str, float | None],
    of_others: Mapping[str, Interval],
) -> dict[str, Difference]:
    """Return the metrics of a group minus those of the others.

    The intervals assume that both are independent. That makes them too wide for groups that share patients.
    """
    found = {}
    for name, value in figures.items():
        other, interval = others.get(name), None
        if value is None or other is None:
            found[name] = Difference(None, None)
            continue
        if name in intervals and name in of_others:
            interval = difference_interval((value, intervals[name]), (other, of_others[name]))
        found[name] = Difference(value - other, interval)
    return found
