"""Metrics of subgroups of slides or patients, and their differences from the rest."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.participants import COLUMNS, Participant
from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import (
    JudgeSettings,
    Part,
    class_parts,
    joined,
    positive_class,
    target_parts,
)
from histopipe.evaluation.intervals import (
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

ORIGIN = ("site", "vendor", "route", "jpeg_generations", "reader", "store", "mpp")
"""Columns of `slides.csv` that no diagnosis depends on."""
QUALITY = ("tissue", "focus", "pen", "dark", "planned")
"""Columns of `slides.csv` that describe the quality of slides."""
AUTOMATIC = (*ORIGIN, "label_source", *QUALITY)
"""Columns that always have subgroups."""
CATEGORIES = {*ORIGIN, "label_source"} - {"mpp"}
"""Columns whose values are names, also if they look like numbers."""
FEWEST_PATIENTS = 10
"""Smaller groups have no intervals."""
_PATCH_RESAMPLES = 200
_MOST_VALUES, _LARGEST_SHARE = 8, 0.67
"""Numbers with more different values, or fractions with a larger share of different values, are divided into thirds."""
_SPEC = re.compile(r"(?P<column>[^:,]+?)(:(?P<width>\d+(\.\d+)?))?")
_THIRDS = (0, 1 / 3, 2 / 3, 1)
MISSING = "missing"
_MISSING_CELLS = {"", "na", "n/a", "nan", "null", "none"}


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


def check_subgroup(text: str) -> tuple[str, float | None]:
    """Return the column and the width of its bins of a value of `--subgroup`, such as "site" or "age:10".

    Raises:
        UsageError: the text has another form.
    """
    match = _SPEC.fullmatch(text)
    if match is None or (match["width"] and float(match["width"]) == 0):
        raise UsageError(
            "--subgroup",
            found=repr(text),
            expected="columns of --labels, such as sex,age:10 (age in steps of 10)",
        )
    column = match["column"]
    if column.lower() in COLUMNS:
        column = column.lower()
        if column not in ("site", *QUALITY):
            raise UsageError(
                "--subgroup", found=f"{column!r}, a column of slides.csv", expected="a column of --labels",
                todo="give the column of the labels file another name",
            )  # fmt: skip
    return column, float(match["width"]) if match["width"] else None


def labels_columns(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of values of `--subgroup` that only the labels file can have.

    Raises:
        UsageError: a value is wrong, or a column is given twice.
    """
    names = [check_subgroup(text)[0] for text in wanted]
    lower = [name.lower() for name in names]
    for number, name in enumerate(lower):
        if name in lower[:number]:
            raise UsageError("--subgroup", found=f"{name!r} twice", expected="each column once")
    return tuple(name for name in names if name not in COLUMNS)


def groups_of(
    values: Sequence[str], width: float | None = None, *, categories: bool = False
) -> tuple[list[str], list[int]]:
    """Return the names of the groups in order, and the (N,) group of each value; empty values and "NA" are missing.

    Numbers are in bins of `width`; other values are groups of their own. Without `width`, numbers are divided into thirds
    if there are more than eight different ones, or if they are fractions and few of them are equal. With `categories`,
    each value is a group.
    """
    known = [value.strip().lower() not in _MISSING_CELLS for value in values]
    numbers = np.array(
        [_number(it) if own else math.nan for it, own in zip(values, known, strict=True)]
    )
    finite = np.isfinite(numbers) & (not categories)
    numeric = bool(finite.any()) and bool((finite == known).all())
    places: Sequence[float] = numbers.tolist()
    ranges: dict[float, str] = {}
    if width:
        # Rounded, because 0.3 / 0.1 is below 3.
        places = np.floor(np.round(numbers / width, 9)).tolist()
        ranges = {it: _range(it * width, (it + 1) * width) for it in places}
    elif numeric and _is_divided(numbers[finite]):
        edges = np.unique(np.quantile(numbers[finite], _THIRDS)).tolist()
        if len(edges) < 3:  # most values are equal
            edges = np.quantile(np.unique(numbers[finite]), _THIRDS).tolist()
        places = np.clip(np.searchsorted(edges, numbers, side="right"), 1, len(edges) - 1).tolist()
        ranges = {it: _range(*edges[int(it) - 1 : int(it) + 1]) for it in places}
    keys: list[tuple[float, float, str]] = []
    for value, place, own, in_range in zip(values, places, known, finite.tolist(), strict=True):
        if not own:
            keys.append((math.inf, 0, MISSING))
        elif in_range:
            keys.append((0, place, ranges.get(place, value)))
        else:
            keys.append((1, 0, value))
    found = sorted(set(keys))
    number_of = {key: number for number, key in enumerate(found)}
    return [name for _, _, name in found], [number_of[key] for key in keys]


def _is_divided(numbers: NDArray[np.float64]) -> bool:
    """Return whether numbers are divided into thirds."""
    whole = bool((numbers % 1 == 0).all())
    most = min(_MOST_VALUES, math.inf if whole else _LARGEST_SHARE * len(numbers))
    return len(np.unique(numbers)) > max(most, 1)


def _range(low: float, high: float) -> str:
    return f"{_text(low)} to {_text(high)}"


def _text(value: float) -> str:
    """Return a number without exponent."""
    text = f"{value:.6g}"
    return f"{value:.0f}" if "e+" in text else text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


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
        for level, own in items.items():
            if level != "patient":
                values = [of_slide.get(name, "") for name in own.names]
                break
            several = [of_patient.get(name, {""}) for name in own.names]
            values = [min(it) if len(it) == 1 else "several" for it in several]
            if "several" not in values or len(items) == 1:
                break
        else:
            continue
        names, numbers = groups_of(values, width, categories=categories)
        if len(names) > 1 or (column not in AUTOMATIC and names != [MISSING]):
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
    if patients[0] < FEWEST_PATIENTS:
        note = f"too small for intervals: {counted(patients[0], 'patient')}"
        return GroupMetrics(name, len(rows), patients[0], figures, {}, {}, note)
    intervals, _ = intervals_of(statistics, draws[:, : statistics.patients], patients[0])
    known = {key: it for key, it in intervals.items() if figures.get(key) is not None}
    if not patients[1]:
        note = "no difference: no other group"
        return GroupMetrics(name, len(rows), patients[0], figures, known, {}, note)
    if patients[1] < FEWEST_PATIENTS:
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
