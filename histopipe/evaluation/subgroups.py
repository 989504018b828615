"""Metrics of subgroups of slides or patients, and their differences from the rest."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.splits.slide_table import COLUMNS, SlideEntry
from histopipe.system.arrays import FloatArray
from histopipe.system.grouping import grouped_values
from histopipe.system.output import counted, listed
from histopipe.system.table_cells import NUMERIC_SHARE, cell_number, column_key
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.intervals import (
    FEWEST_PATIENTS,
    NORMAL,
    RELIABLE_PATIENTS,
    TOO_FEW,
    Difference,
    Interval,
    difference_interval,
    read_differences,
)
from histopipe.tasks.predictions import (
    EvaluationSettings,
    ModelPredictions,
    Predictions,
    fold_of_patients,
    joined_scores,
)
from histopipe.tasks.statistics import bootstrap_draws, intervals_of

ORIGIN = ("site", "vendor", "route", "jpeg_generations", "reader", "store", "mpp")
"""Columns of `slides.csv` that no diagnosis depends on."""
QUALITY = ("tissue", "focus", "pen", "dark", "planned")
"""Columns of `slides.csv` that describe the quality of slides."""
AUTOMATIC = (*ORIGIN, "label_source", *QUALITY)
"""Columns that always have subgroups."""
CATEGORIES = {*ORIGIN, "label_source"} - {"mpp"}
"""Columns whose values are names, also if they look like numbers."""
_MOST_VALUES, _LARGEST_SHARE = 8, 0.67
"""Numbers with more different values, or fractions with a larger share of different values, are divided into thirds."""
_SPEC = re.compile(r"(?P<column>[^:,]+?)(:(?P<width>\d+(\.\d+)?))?")
_THIRDS = (0, 1 / 3, 2 / 3, 1)


class NoValue(Enum):
    """Why an item has no value of a column. Its name may also be the value of another item."""

    MISSING = "missing"
    SEVERAL = "several"


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
    if column.lower() == "site" and match["width"]:
        raise UsageError("--subgroup", found=repr(text), expected="site: names have no steps")
    if column.lower() in COLUMNS:
        column = column.lower()
        if column not in ("site", *QUALITY):
            raise UsageError(
                "--subgroup",
                found=f"{column!r}, a column of slides.csv",
                expected="a column of --labels",
                todo="give the column of the labels file another name",
            )
    return column, float(match["width"]) if match["width"] else None


def labels_columns(requested: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of values of `--subgroup` that only the labels file can have.

    Raises:
        UsageError: a value is wrong, or a column is given twice.
    """
    names = [check_subgroup(text)[0] for text in requested]
    for name, count in Counter(map(column_key, names)).items():
        if count > 1:
            raise UsageError("--subgroup", found=f"{name!r} twice", expected="each column once")
    return tuple(name for name in names if name not in COLUMNS)


def group_name(value: str | NoValue) -> str:
    """Return the name of a value's group. A real value "missing" or "several" is in quotes.

    Example:
        >>> group_name(NoValue.MISSING), group_name("missing")
        ('missing', '"missing"')
    """
    text = value if isinstance(value, str) else value.value
    return (
        f'"{text}"'
        if value == text and text.strip('"') in {reason.value for reason in NoValue}
        else text
    )


def groups_of(
    values: Sequence[str | NoValue], width: float | None = None, *, categories: bool = False
) -> tuple[list[str], list[int]]:
    """Return the names of the groups in order, and the (N,) group of each value. Empty values are missing.

    Numbers are in bins of `width`; other values are separate groups. Without `width`, numbers are divided into thirds
    if nearly all values are numbers, and there are more than eight different ones, or fractions of which few are equal.
    With `categories`, each value is a group.
    """
    values = [value or NoValue.MISSING for value in values]
    numbers = np.array(
        [cell_number(value) if isinstance(value, str) else math.nan for value in values]
    )
    finite = np.isfinite(numbers) & (not categories)
    numeric = bool(finite.any()) and int(finite.sum()) >= NUMERIC_SHARE * sum(
        isinstance(value, str) for value in values
    )
    whole = (numbers[finite] % 1 == 0).all()
    most = _MOST_VALUES if whole else min(_MOST_VALUES, _LARGEST_SHARE * finite.sum())
    places: Sequence[float] = numbers.tolist()
    ranges: dict[float, str] = {}
    if width:
        # Rounded, because 0.3 / 0.1 is below 3.
        places = np.floor(np.round(numbers / width, 9)).tolist()
        ranges = {place: _range(place * width, (place + 1) * width) for place in places}
    elif numeric and len(np.unique(numbers[finite])) > max(most, 1):
        edges = np.unique(np.quantile(numbers[finite], _THIRDS)).tolist()
        if len(edges) < 3:  # most values are equal
            edges = np.quantile(np.unique(numbers[finite]), _THIRDS).tolist()
        places = np.clip(np.searchsorted(edges, numbers, side="right"), 1, len(edges) - 1).tolist()
        ranges = {place: _range(*edges[int(place) - 1 : int(place) + 1]) for place in places}
    keys = [
        (0.0, place, ranges.get(place, group_name(value)))
        if in_range
        else (math.inf if value is NoValue.MISSING else 1.0, 0.0, group_name(value))
        for value, place, in_range in zip(values, places, finite.tolist(), strict=True)
    ]
    groups = sorted(set(keys))
    number_of = {key: number for number, key in enumerate(groups)}
    return [name for _, _, name in groups], [number_of[key] for key in keys]


def median_text(values: Iterable[str]) -> str:
    """Return the median of the numbers among values; empty if there are none."""
    numbers = [number for number in map(cell_number, values) if math.isfinite(number)]
    return f"{float(np.median(numbers)):.6g}" if numbers else ""


def _range(low: float, high: float) -> str:
    """Return a range of numbers without exponents."""
    texts = [f"{end:.0f}" if "e+" in f"{end:.6g}" else f"{end:.6g}" for end in (low, high)]
    return " to ".join(texts)


_PATCH_RESAMPLES, _SMALLEST = 200, 1e-12


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Metrics of one group.

    Attributes:
        name: value of the column, or range of values.
        count, patients: number of items at the level of the subgroups, and of their patients.
        values, intervals: metrics and 95 % confidence intervals, by name.
        differences: from all other groups together.
        note: why there are no intervals; empty if there are.
        outcomes: number of patients by class or value of a label, or of events.
        p: of the difference in the main metric, for all groups of all columns together; None without one.
    """

    name: str
    count: int
    patients: int
    values: Mapping[str, float | None]
    intervals: Mapping[str, Interval]
    differences: Mapping[str, Difference]
    note: str = ""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    p: float | None = None


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

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Subgroups:
        """Create it from its part of a `Breakdown` in JSON. Raise KeyError or TypeError if the value has the wrong form."""
        groups = (
            GroupMetrics(
                group["name"],
                group["count"],
                group["patients"],
                # Earlier versions had another name of the values.
                group["values"] if "values" in group else group["figures"],
                {name: tuple(ends) for name, ends in group["intervals"].items()},
                read_differences(group["differences"]),
                group["note"],
                group.get("outcomes", {}),
                group.get("p"),
            )
            for group in value["groups"]
        )
        return cls(value["column"], value["level"], tuple(groups))


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
    predictions = [part for part, _ in parts]
    draws = bootstrap_draws(
        len(predictions[0].patients),
        settings.resamples,
        settings.seed,
        fold_of_patients(predictions),
    )
    items = _levels(parts, settings)
    breakdowns, resampled = [], list[FloatArray]()
    for column, width in columns.items():
        of_slide = {slide.slide: slide.value(column) for slide in slides}
        of_patient = grouped_values((slide.patient, slide.value(column)) for slide in slides)
        values: list[str | NoValue]
        for level, scores in items.items():
            if level != "patient":
                values = [of_slide.get(name, "") for name in scores.ids(level)]
                break
            # A model of patients has no predictions of slides to compare instead.
            middle = len(items) == 1 and column in QUALITY
            values = [
                min(cells) if len(cells) == 1 else median_text(cells) if middle else NoValue.SEVERAL
                for cells in (set(of_patient.get(name, [""])) for name in scores.ids(level))
            ]
            if NoValue.SEVERAL not in values or len(items) == 1:
                break
        else:
            continue
        names, numbers = groups_of(values, width, categories=column in CATEGORIES)
        if len(names) > 1 or (column not in AUTOMATIC and names != [NoValue.MISSING.value]):
            used = draws[:_PATCH_RESAMPLES] if level == "patch" else draws
            each = [
                _group(name, np.array(numbers) == i, scores, used) for i, name in enumerate(names)
            ]
            breakdowns.append(Subgroups(column, level, tuple(group for group, _ in each)))
            resampled += [differences for _, differences in each]
    return _with_p(breakdowns, resampled, next(iter(predictions[0].task.main)))


def _levels(
    parts: Sequence[ModelPredictions], settings: EvaluationSettings
) -> dict[EvaluationLevel, Predictions]:
    """Return the scores of each level that has one target for all of its items, the highest level first."""
    levels: tuple[EvaluationLevel, ...] = ("patient", "slide", "patch")
    each = {
        level: joined_scores(parts, level, "mean", settings)[0]
        for level in levels[: levels.index(parts[0][0].level) + 1]
    }
    return {
        level: scores
        for level, scores in each.items()
        if len(scores.target) and not scores.left_out
    }


def _group(
    name: str, inside: NDArray[np.bool_], scores: Predictions, draws: NDArray[np.float64]
) -> tuple[GroupMetrics, FloatArray]:
    """Return the metrics of a group, and the resampled differences of the main metric from the rest, (R,); (0,) without."""
    task, sides = scores.task, [scores.rows(np.flatnonzero(rows)) for rows in (inside, ~inside)]
    patients, other_patients = (len(np.unique(side.patient)) for side in sides)
    names = dict.fromkeys(task.outcome_counts(scores), 0)
    counts = names | task.outcome_counts(sides[0])
    ranked, other_ranked = (
        names | (task.outcome_counts(rows) if len(rows) else {}) for rows in map(_in_pairs, sides)
    )
    statistics = task.statistics(sides[0])
    group = GroupMetrics(
        name, len(sides[0]), patients, statistics.values(), {}, {}, outcomes=counts
    )
    if not len(draws):
        return group, np.empty(0)
    few = _too_few(patients, ranked)
    if few:
        return replace(group, note=f"{TOO_FEW}: {few}"), np.empty(0)
    weights = draws[:, : statistics.patients]
    resampled = statistics.compute(weights)
    intervals, _ = intervals_of(statistics, weights, patients, resampled)
    defined = {key: ends for key, ends in intervals.items() if group.values.get(key) is not None}
    few = _too_few(other_patients, other_ranked)
    if few:
        why = f"only {few} in other groups" if other_patients else "no other group"
        return replace(group, intervals=defined, note=f"no difference: {why}"), np.empty(0)
    rest = task.statistics(sides[1])
    rest_values, weights = rest.values(), draws[:, : rest.patients]
    of_rest = rest.compute(weights)
    rest_intervals, _ = intervals_of(rest, weights, other_patients, of_rest)
    differences = {
        key: _difference(value, defined.get(key), rest_values.get(key), rest_intervals.get(key))
        for key, value in group.values.items()
        if not key.startswith("calibration_error")  # noise makes it larger in small groups
    }
    main = next(iter(task.main))
    return replace(group, intervals=defined, differences=differences), resampled[main] - of_rest[
        main
    ]


def _in_pairs(scores: Predictions) -> Predictions:
    """Return the items of the folds in which they have several classes: others are not ranked."""
    if not scores.fold.size or not scores.task.of_classes:
        return scores
    several = [
        f for f in np.unique(scores.fold) if len(np.unique(scores.label[scores.fold == f])) > 1
    ]
    return scores.rows(np.flatnonzero(np.isin(scores.fold, several)))


def _too_few(patients: int, counts: Mapping[str, int]) -> str:
    """Return of what there are too few for an interval; empty if there are enough."""
    if patients < RELIABLE_PATIENTS:
        return counted(patients, "patient")
    return listed([f"{n} {name}" for name, n in counts.items() if n < FEWEST_PATIENTS])


def _with_p(
    breakdowns: Sequence[Subgroups], resampled: Sequence[FloatArray], main: str
) -> tuple[Subgroups, ...]:
    """Return subgroups with p values of the differences in the main metric, which hold for all groups together.

    A difference is measured in units of its interval, and compared with the largest one that chance makes in any group,
    by the resampled differences of the groups, one after another: single-step max-T.

    Source:
        P. H. Westfall and S. S. Young, Resampling-based multiple testing (1993).
    """
    groups = [group for column in breakdowns for group in column.groups]
    sizes, noise = [math.nan] * len(groups), list[FloatArray]()
    for number, (group, drawn) in enumerate(zip(groups, resampled, strict=True)):
        value, ends = astuple(group.differences.get(main, Difference(None, None)))
        finite = np.isfinite(drawn)
        if value is not None and ends and 2 * finite.sum() > len(drawn) and drawn[finite].std() > 0:
            # The end on the side of 0: beyond it, a single comparison would be significant.
            reach = value - ends[0] if value > 0 else ends[1] - value
            sizes[number] = abs(value) / max(reach, _SMALLEST)
            deviation = np.where(finite, drawn - drawn[finite].mean(), 0) / drawn[finite].std()
            noise.append(np.abs(deviation))
    count = min(map(len, noise), default=0)  # patches have fewer resamples
    highest = np.max([each[:count] for each in noise], axis=0, initial=0)
    exceeded = [int((highest >= NORMAL * size).sum()) for size in sizes]
    with_p = (
        group if math.isnan(size) else replace(group, p=(1 + count) / (1 + len(highest)))
        for group, size, count in zip(groups, sizes, exceeded, strict=True)
    )
    return tuple(
        replace(each, groups=tuple(islice(with_p, len(each.groups)))) for each in breakdowns
    )


def _difference(
    value: float | None,
    interval: Interval | None,
    other: float | None,
    other_interval: Interval | None,
) -> Difference:
    """Return the metric of a group minus that of the rest.

    The interval assumes that both are independent. That makes it too wide for groups that share patients.
    """
    if value is None or other is None:
        return Difference(None, None)
    both = interval and other_interval and ((value, interval), (other, other_interval))
    return Difference(value - other, both and difference_interval(*both))
