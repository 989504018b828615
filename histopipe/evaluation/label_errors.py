"""What the data limit: labels that models contradict, and whether more patients would help."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.evaluate import fit_temperature, tempered, with_ends
from histopipe.system.arrays import FloatArray
from histopipe.system.output import counted, listed, plural
from histopipe.system.table_files import read_dicts, write_table
from histopipe.tasks.choices import name_of
from histopipe.tasks.intervals import Interval
from histopipe.tasks.predictions import (
    EvaluationSettings,
    ModelPredictions,
    Predictions,
    joined_predictions,
    joined_scores,
    mean_intervals,
    mean_resamples,
    scores_of,
    with_common_patients,
)
from histopipe.tasks.statistics import bootstrap_draws
from histopipe.tasks.task import group_means

LABEL_ERRORS = "label_errors.csv"
"""Name of the table of a cross-validation."""
_COLUMNS = (
    *("level", "slide", "patient", "x_l0", "y_l0", "column", "label", "suggested"),
    *("p_label", "p_suggested", "margin", "share"),
)
_ROUNDING, _DRAWS = 1e-9, 200


def contradicted(
    probability: FloatArray, label: NDArray[np.int32], patient: NDArray[np.int32]
) -> NDArray[np.intp]:
    """Return the (N,) class that contradicts each label; -1 if none does.

    A class is likely for an item if its probability, (N, C), is at least the mean that this class has among the items with
    this label. The most probable likely class contradicts the label if it is more probable. Each patient counts once in the
    means, so that a patient with many patches does not set them alone.

    Source:
        C. G. Northcutt, L. Jiang and I. L. Chuang, Confident learning: estimating uncertainty in dataset labels, Journal of
        Artificial Intelligence Research 70 (2021), with items in place of patients.
    """
    least = np.full(probability.shape[1], np.inf)
    for number in np.unique(label[label >= 0]).tolist():
        rows = label == number
        numbers, of_rows = np.unique(patient[rows], return_inverse=True)
        sums = np.bincount(of_rows, probability[rows, number], len(numbers))
        least[number] = (sums / np.bincount(of_rows)).mean()
    likely = np.where(probability >= least - _ROUNDING, probability, -np.inf)
    best = likely.argmax(axis=1)
    of_label = probability[np.arange(len(label)), np.maximum(label, 0)]
    wrong = (likely.max(axis=1) > of_label + _ROUNDING) & (label >= 0)
    return np.where(wrong, best, -1)


def find_label_errors(
    parts: Sequence[Predictions], settings: EvaluationSettings
) -> list[dict[str, Any]]:
    """Return the items whose label is contradicted, as rows of `LABEL_ERRORS`: slides, then patches, or patients.

    The parts, at least one, are test predictions of the folds; of several seeds, the mean is used. The lowest margin, which is
    the probability of the label minus that of the suggested class, is first. Only tasks with probabilities have rows.
    """
    predictions = _mean_of_seeds(joined_predictions(parts))
    task = predictions.task.with_settings(settings)
    if not task.probabilities:
        return []
    rows: list[dict[str, Any]] = []
    levels = [*dict.fromkeys((predictions.unit, predictions.level))]
    for level in reversed(levels):
        for column, part in task.classifications(scores_of(predictions, level, "mean", settings)):
            rows += _rows_of(part, column if len(task.classes) == 0 else "")
    of_patches = Counter(row["slide"] for row in rows if row["level"] == "patch")
    patches = Counter(predictions.ids("slide"))
    for row in rows:
        if row["level"] == "slide" and predictions.level == "patch":
            row["share"] = of_patches[row["slide"]] / patches[row["slide"]]
    return sorted(rows, key=lambda row: (levels.index(row["level"]), row["margin"]))


def count_by_chance(parts: Sequence[Predictions], settings: EvaluationSettings) -> float:
    """Return how many slides, or patients, would be contradicted on average if all labels were right; NaN for other tasks.

    Labels are drawn from the probabilities with a fitted temperature, one draw for all slides of a patient. So the number is
    that of a model: it holds as far as these probabilities are right.
    """
    predictions = _mean_of_seeds(joined_predictions(parts))
    task, rng, count = predictions.task.with_settings(settings), np.random.default_rng(0), 0
    if not task.probabilities:
        return math.nan
    scores = scores_of(predictions, predictions.unit, "mean", settings)
    for _, part in task.classifications(scores):
        output = part.output.astype(np.float64)
        limits = np.cumsum(tempered(output, fit_temperature(part)), axis=1)[:, :-1]
        for _ in range(_DRAWS):
            drawn = rng.random(len(part.patients))[part.patient]
            label = (drawn[:, None] > limits).sum(axis=1).astype(np.int32)
            count += int((contradicted(output, label, part.patient) >= 0).sum())
    return count / _DRAWS


def _rows_of(part: Predictions, column: str) -> Iterator[dict[str, Any]]:
    output = part.output.astype(np.float64)
    suggested = contradicted(output, part.label, part.patient)
    slides, patients = part.ids("slide"), part.ids("patient")
    names, of_patches = part.task.classes, part.level == "patch"
    for row in np.flatnonzero(suggested >= 0).tolist():
        label, other = int(part.label[row]), int(suggested[row])
        yield {
            "level": part.level,
            "slide": "" if part.level == "patient" else slides[row],
            "patient": patients[row],
            "x_l0": int(part.x_l0[row]) if of_patches else "",
            "y_l0": int(part.y_l0[row]) if of_patches else "",
            "column": column,
            "label": names[label],
            "suggested": names[other],
            "p_label": output[row, label],
            "p_suggested": output[row, other],
            "margin": output[row, label] - output[row, other],
        }


def _mean_of_seeds(predictions: Predictions) -> Predictions:
    """Return predictions with one row per patch, slide or patient, and the mean of its outputs."""
    places = np.stack(
        [getattr(predictions, name) for name in ("slide", "patient", "x_l0", "y_l0")], axis=1
    )
    _, first, group = np.unique(places, axis=0, return_index=True, return_inverse=True)
    if len(first) == len(places):
        return predictions
    order = np.argsort(group.ravel(), kind="stable")
    starts = np.searchsorted(group.ravel()[order], np.arange(len(first)))
    means = group_means(predictions.output[order].astype(np.float64), starts)
    return replace(predictions.rows(first), output=means)


def write_label_errors(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the table atomically, also without rows."""
    cells = ([row.get(name, "") for name in _COLUMNS] for row in rows)
    write_table(
        folder / LABEL_ERRORS,
        _COLUMNS,
        ([f"{c:.6g}" if isinstance(c, float) else c for c in row] for row in cells),
    )


def read_label_errors(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the table; none if there is no table."""
    return list(read_dicts(folder / LABEL_ERRORS)) if (folder / LABEL_ERRORS).exists() else []


def label_errors_text(rows: Sequence[Mapping[str, Any]], by_chance: float) -> str:
    """Return how many slides and patches have a label to check, and how many by chance, as text; empty without any."""
    numbers = Counter(row["level"] for row in rows)
    texts = [counted(number, level) for level, number in numbers.items()]
    unit = next((level for level in numbers if level != "patch"), "slide")
    return (
        f"{listed(texts)} contradicted by the models; about {round(by_chance, 1):g} {plural(unit)} would be if all labels were right "
        "(by the models' calibrated probabilities)"
        if texts
        else ""
    )


_EXPONENTS = np.linspace(0.05, 3, 60)
_PLACES = 40
"""Numbers of patients at which the fitted curve is drawn."""
_SMALLEST = 1e-3
"""Lowest width of an interval by percentiles that shows how much too narrow it is."""
_FEWEST_SHARES = 3
"""A power law has three parameters."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The metric after training on so many patients, on average over the runs; with a 95 % interval, if there is one."""

    patients: float
    value: float | None
    interval: Interval | None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """The main metric of the test sets by number of training patients.

    Attributes:
        level, title: level and title of the metric, such as "slide_mean" and "AUC".
        points: the measured points, by share of the training patients.
        fitted: the fitted power law, up to twice as many patients as there are; empty for fewer than three shares.
        limit: what it would reach with any number of patients.
    """

    level: str
    title: str
    points: tuple[CurvePoint, ...]
    fitted: tuple[CurvePoint, ...] = ()
    limit: CurvePoint | None = None

    @property
    def lines(self) -> list[str]:
        """The curve as lines of text."""
        lines = [
            f"{point.share:g} % of the training, {point.patients:.0f} patients without those of validation: "
            f"{self.title} {_text(point)}"
            for point in self.points
        ]
        if self.fitted and self.limit:
            twice = self.fitted[-1]
            lines.append(
                f"twice as many, {twice.patients:.0f} patients: {self.title} {_text(twice)} expected; "
                f"limit {_text(self.limit)}"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LearningCurve:
        """Create the curve from the result of `to_json`."""
        points, fitted = (
            tuple(CurvePoint(**point) for point in value[name]) for name in ("points", "fitted")
        )
        limit = value["limit"] and CurvePoint(**value["limit"])
        return cls(value["level"], value["title"], points, fitted, limit)


def _text(point: CurvePoint) -> str:
    return with_ends(point.value, point.interval)


def learning_curve(
    parts: Mapping[float, Sequence[Sequence[ModelPredictions]]],
    patients: Mapping[float, float],
    settings: EvaluationSettings,
) -> LearningCurve:
    """Return the curve from test predictions by share of the training patients, and by seed.

    All shares have the same test sets. `patients` are the mean numbers of training patients. The intervals are for other
    test patients and, with several seeds, other choices of training patients. Of numbers that are not defined, such as an AUC
    of one class, there is no value.
    """
    shares, flat = sorted(parts), [p for share in parts.values() for seed in share for p in seed]
    common = iter(with_common_patients([predictions for predictions, _ in flat]))
    numbered = {
        share: [[(next(common), limits) for _, limits in seed] for seed in parts[share]]
        for share in parts
    }
    first = next(iter(numbered.values()))[0][0][0]
    levels = first.task.levels(first.level)
    level, how = levels[min(1, len(levels) - 1)] if first.level == "patch" else levels[0]
    draws = bootstrap_draws(len(first.patients), settings.resamples, settings.seed)
    metric, title = next(iter(first.task.main.items()))
    rows, points, name = [], [], name_of(level, how)
    for share in shares:
        scores = [joined_scores(seed, level, how, settings)[0] for seed in numbered[share]]
        resampled = mean_resamples(scores, draws, settings.seed)
        rows.append(resampled[metric])
        value = float(rows[-1][0])
        interval = mean_intervals(scores, draws, resampled).get(metric)
        points.append(
            CurvePoint(patients[share], value if np.isfinite(value) else None, interval, share)
        )
    values = np.stack(rows, axis=1)
    last, sizes = points[-1].interval, np.array([point.patients for point in points])
    if len(shares) < _FEWEST_SHARES or not np.isfinite(values[0]).all():
        return LearningCurve(name, title, tuple(points))
    places = np.append(np.geomspace(sizes[0], 2 * sizes[-1], _PLACES), np.inf)
    curve = 1 - power_law(sizes, 1 - values, places)
    intervals: list[Interval | None] = [None] * len(places)
    if last is not None:
        # Plain percentiles are too narrow: all are widened as much as those of the largest measured point.
        lows, highs = np.nanpercentile(
            np.column_stack([values[1:, -1], curve[1:]]), (2.5, 97.5), axis=0
        )
        centre = np.append(values[0, -1], curve[0])
        below, above = np.maximum(centre - lows, 0), np.maximum(highs - centre, 0)
        below *= max(1.0, (centre[0] - last[0]) / max(below[0], _SMALLEST))
        above *= max(1.0, (last[1] - centre[0]) / max(above[0], _SMALLEST))
        highest = np.minimum(centre + above, 1)
        intervals = [*zip((centre - below)[1:].tolist(), highest[1:].tolist(), strict=True)]
    *fitted, limit = map(CurvePoint, places.tolist(), curve[0].tolist(), intervals)
    # JSON has no infinity.
    limit = CurvePoint(0, limit.value, limit.interval)
    return LearningCurve(name, title, tuple(points), tuple(fitted), limit)


def power_law(sizes: FloatArray, errors: FloatArray, places: FloatArray) -> FloatArray:
    """Return (R, P) errors at sizes `places` from (R, S) errors at (S,) sizes: limit + scale · size ** -exponent.

    The least squares of each row, with a limit and a scale of at least 0 and an exponent of 0.05 to 3; a row with a value
    that is not finite has none.

    Source:
        R. L. Figueroa et al., Predicting sample size required for classification performance, BMC Medical Informatics and
        Decision Making 12 (2012).
    """
    scaled = sizes / sizes.max()  # so that small exponents and large ones are equally exact
    inputs = scaled[None, :] ** -_EXPONENTS[:, None]  # (E, S)
    centred = inputs - inputs.mean(axis=1, keepdims=True)
    scale = np.maximum(errors @ centred.T / (centred**2).sum(axis=1), 0)  # (R, E)
    limit = errors.mean(axis=1, keepdims=True) - scale * inputs.mean(axis=1)
    through_zero = errors @ inputs.T / (inputs**2).sum(axis=1)
    scale, limit = np.where(limit < 0, through_zero, scale), np.maximum(limit, 0)
    residuals = limit[..., None] + scale[..., None] * inputs - errors[:, None, :]
    best = np.argmin((residuals**2).sum(axis=2), axis=1)
    rows = np.arange(len(errors))
    powers = (places / sizes.max())[None, :] ** -_EXPONENTS[best][:, None]
    return np.asarray(limit[rows, best][:, None] + scale[rows, best][:, None] * powers)
