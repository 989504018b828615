"""Learning curve: the main metric by number of training patients, and what more patients would give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from histopipe.evaluation.evaluate import with_ends
from histopipe.system.arrays import FloatArray
from histopipe.tasks.choices import name_of
from histopipe.tasks.intervals import Interval
from histopipe.tasks.predictions import (
    ModelPredictions,
    joined_scores,
    mean_intervals,
    mean_resamples,
    with_common_patients,
)
from histopipe.tasks.statistics import bootstrap_draws
from histopipe.tasks.task import EvaluationSettings

_EXPONENTS = np.linspace(0.05, 3, 60)
_PLACES = 40
"""Numbers of patients at which the fitted curve is drawn."""
_ENDS = 2.5, 97.5
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
        lows, highs = np.nanpercentile(np.column_stack([values[1:, -1], curve[1:]]), _ENDS, axis=0)
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
