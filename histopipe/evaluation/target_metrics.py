"""Evaluate predictions of several labels, numbers and survival, at every level."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import TaskName
from histopipe.evaluation.intervals import (
    FEWEST_PATIENTS,
    TOO_FEW,
    WeightedStatistics,
    intervals_of,
    patients_notes,
    stored_intervals,
)
from histopipe.evaluation.levels import Aggregation, Level, levels_of, name_of
from histopipe.evaluation.multilabel import (
    MultilabelStatistics,
    label_scores,
    recalibrated_labels,
)
from histopipe.evaluation.regression import RegressionStatistics
from histopipe.evaluation.survival import SurvivalStatistics
from histopipe.evaluation.target_scores import GroupedScores, TargetScores, grouped
from histopipe.evaluation.thresholds import choose_threshold

_MAX_UNDEFINED = 0.05
_HALF_TOLERANCE = 1e-8
"""Rounding of a curve that is exactly one half: then the median survival is the first time of that step."""
Thresholds = Mapping[str, tuple[float, ...]]
"""By name of the level: a probability per label, or the risk between the risk groups; empty for regression."""
Part = tuple[TargetScores, Thresholds]
"""Predictions of one model, with its thresholds. A cross-validation has several."""


@dataclass(frozen=True, slots=True)
class TargetMetrics:
    """Metrics of patches, slides or patients.

    Attributes:
        task: "multilabel", "regression" or "survival".
        count: number of patches, slides or patients.
        patients: number of patients.
        figures: metrics by name, None if undefined. With several columns, the means over them, and `metric:column`.
        intervals: 95 % confidence intervals by metric, from resampling patients; only where defined.
        thresholds: see `Thresholds`; empty if several were used.
        groups: survival of patients with a high and a low risk.
        log_rank: p value of their difference, by the log-rank test; None if it is undefined.
        notes: remarks on the metrics.
    """

    task: TaskName
    count: int
    patients: int
    figures: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float]]
    thresholds: tuple[float, ...] = ()
    groups: tuple[RiskGroup, ...] = ()
    log_rank: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TargetMetrics:
        """Create the metrics from the result of `to_json`.

        Raises:
            KeyError, TypeError: the value has the wrong form.
        """
        parts = {
            **stored_intervals(value),
            "thresholds": tuple(value["thresholds"]),
            "groups": tuple(RiskGroup.from_json(group) for group in value["groups"]),
        }
        return cls(**{**value, **parts})


@dataclass(frozen=True, slots=True)
class RiskGroup:
    """Patients with a risk above or below the threshold, and their Kaplan-Meier curve.

    Attributes:
        name: "high risk" or "low risk".
        count, events: number of patients or slides, and of their events.
        median: median survival, the first time when survival is at most one half; None if it is not reached.
        times, survival: steps of the curve, from time 0.
        low, high: its 95 % confidence band.
        at_risk: number at risk at each of `at_risk_times`.
    """

    name: str
    count: int
    events: int
    median: float | None
    times: tuple[float, ...]
    survival: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    at_risk_times: tuple[float, ...]
    at_risk: tuple[int, ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RiskGroup:
        """Create a group from JSON, where tuples are lists."""
        fields: dict[str, Any] = {
            name: tuple(it) if isinstance(it, list) else it for name, it in value.items()
        }
        return cls(**fields)


def choose_target_thresholds(validation: TargetScores, rule: str) -> Thresholds:
    """Choose thresholds for every level on validation data.

    Each label has a threshold by `rule`, as for classes. The risk groups are divided at the median risk.
    """
    if validation.task == "regression":
        return {}
    chosen: dict[str, tuple[float, ...]] = {}
    for level, how in target_levels(validation.level):
        scores = grouped(validation, level)
        if validation.task == "survival":
            limits = [float(np.median(scores.output[:, 0]))] if len(scores.output) else []
        else:
            limits = [_threshold(scores, number, rule) for number in range(len(validation.columns))]
        chosen[name_of(level, how)] = tuple(limits)
    return chosen


def _threshold(scores: GroupedScores, number: int, rule: str) -> float:
    known = np.isfinite(scores.target[:, number])
    own = label_scores(
        scores.target[known, number], scores.output[known, number], scores.patient[known]
    )
    return choose_threshold(own, 1, rule)[0]


def target_levels(level: Level) -> list[tuple[Level, Aggregation]]:
    """Return the levels of an evaluation. Patches are aggregated by their mean only."""
    return [(level, how) for level, how in levels_of(level) if how == "mean"]


def evaluate_target_parts(
    parts: Sequence[Part], draws: NDArray[np.float64]
) -> dict[Level, dict[Aggregation, TargetMetrics]]:
    """Evaluate the predictions of one or several models together, at every level.

    Each part has at least one row. All parts have the same task, columns, times and numbering of patients. `draws` are from
    `bootstrap_draws`.
    """
    first = parts[0][0]
    found: dict[Level, dict[Aggregation, TargetMetrics]] = {"patch": {}, "slide": {}, "patient": {}}
    for level, how in target_levels(first.level):
        scores, limits = joined_targets(parts, level, how)
        if len(scores.target):
            found[level][how] = _metrics(first, scores, limits, draws, several=len(parts) > 1)
    return found


def joined_targets(
    parts: Sequence[Part], level: Level, how: Aggregation
) -> tuple[GroupedScores, NDArray[np.float64]]:
    """Return the predictions of all parts at one level, and their (N, L) thresholds. Items are part << 32 | item."""
    each = [grouped(scores, level) for scores, _ in parts]
    limits = [
        np.tile(np.array(thresholds.get(name_of(level, how), ())), (len(own.target), 1))
        for own, (_, thresholds) in zip(each, parts, strict=True)
    ]
    joined = GroupedScores(
        np.concatenate([it.target for it in each]), np.concatenate([it.output for it in each]),
        np.concatenate([it.patient for it in each]),
        np.concatenate([it.item + (number << 32) for number, it in enumerate(each)]),
        sum(it.left_out for it in each),
    )  # fmt: skip
    return joined, np.concatenate(limits)


def target_statistics(
    kind: TargetScores, scores: GroupedScores, limits: NDArray[np.float64]
) -> WeightedStatistics:
    """Return the metrics of predictions as functions of weights. `kind` has the task, columns and times."""
    if kind.task == "survival":
        time, event = scores.target.T
        return SurvivalStatistics(time, event, scores.output, kind.grid, scores.patient)
    if kind.task == "multilabel":
        return MultilabelStatistics(
            scores.target, scores.output, kind.columns, limits, scores.patient
        )
    return RegressionStatistics(scores.target, scores.output, kind.columns, scores.patient)


def epoch_figures(scores: TargetScores) -> dict[str, float | None]:
    """Return the main metric of an epoch, by name: mean AUC, R², or concordance index."""
    limits = np.full(len(scores.columns), 0.5)
    own = GroupedScores(
        scores.target,
        scores.output.astype(np.float64),
        scores.patient,
        np.arange(len(scores.target)),
    )
    statistics = target_statistics(scores, own, limits)
    values = statistics.figures(np.ones((1, statistics.patients)))
    name = {"multilabel": "auc", "regression": "r2", "survival": "c_index"}[scores.task]
    return {name: _known(float(values[name][0]))}


def _metrics(
    kind: TargetScores,
    scores: GroupedScores,
    limits: NDArray[np.float64],
    draws: NDArray[np.float64],
    *,
    several: bool,
) -> TargetMetrics:
    statistics = target_statistics(kind, scores, limits)
    values = statistics.figures(np.ones((1, statistics.patients)))
    figures = {name: _known(value[0]) for name, value in values.items()}
    patients = len(np.unique(scores.patient))
    intervals, undefined = intervals_of(statistics, draws[:, : statistics.patients], patients)
    notes = statistics.remarks() if isinstance(statistics, SurvivalStatistics) else []
    if scores.left_out:
        notes.append(f"{scores.left_out} excluded, because their slides have several targets")
    small, few = patients_notes(patients), _few_patients(kind.columns, scores)
    if len(draws):
        notes += small or [f"{name}: {TOO_FEW}" for name in few]
    if not small and undefined > _MAX_UNDEFINED and None not in figures.values():
        notes.append(f"{undefined:.0%} of the resamples are undefined: excluded from the intervals")
    if kind.task == "multilabel":
        recalibrated, own = recalibrated_labels(
            scores.target, scores.output, kind.columns, scores.patient
        )
        figures |= recalibrated
        intervals |= own if len(draws) else {}
    groups, log_rank = _risk_groups(kind, scores, limits)
    return TargetMetrics(
        kind.task, len(scores.target), patients, figures,
        {
            name: ends for name, ends in intervals.items()
            if figures[name] is not None and name.partition(":")[2] not in (few and ["", *few])
        },
        () if several else tuple(limits[0].tolist()), groups, log_rank, tuple(notes),
    )  # fmt: skip


def _few_patients(columns: Sequence[str], scores: GroupedScores) -> list[str]:
    """Return the columns with values of too few patients for an interval. The means over the columns have none, too."""
    patients = [len(np.unique(scores.patient[rows])) for rows in np.isfinite(scores.target).T]
    return [name for name, count in zip(columns, patients, strict=False) if count < FEWEST_PATIENTS]


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _risk_groups(
    kind: TargetScores, scores: GroupedScores, limits: NDArray[np.float64]
) -> tuple[tuple[RiskGroup, ...], float | None]:
    # Without a threshold, no patient of validation has one time for all slides.
    if kind.task != "survival" or not limits.shape[1]:
        return (), None
    from scipy import stats  # imported late: takes 0.6 s

    time, event = scores.target.T
    high = scores.output[:, 0] > limits[:, 0]
    at_risk_times = np.linspace(0, time.max(), 6)
    groups, samples = [], []
    for name, rows in (("high risk", high), ("low risk", ~high)):
        if not rows.any():
            continue
        happened = event[rows] == 1
        samples.append(stats.CensoredData(time[rows][happened], right=time[rows][~happened]))
        times, curve, (low, high) = _kaplan_meier(stats.ecdf(samples[-1]).sf)
        groups.append(
            RiskGroup(
                name, int(rows.sum()), int(happened.sum()),
                next(iter(times[curve <= 0.5 + _HALF_TOLERANCE].tolist()), None), tuple(times.tolist()), tuple(curve.tolist()),
                tuple(low.tolist()), tuple(high.tolist()), tuple(at_risk_times.tolist()),
                tuple(int((time[rows] >= start).sum()) for start in at_risk_times),
            )
        )  # fmt: skip
    if len(groups) < 2 or not event.any():
        return tuple(groups), None
    # Undefined if no event happens while both groups have patients left; then SciPy divides by 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        test = stats.logrank(*samples)
    return tuple(groups), float(test.pvalue) if math.isfinite(test.statistic) else None


def _kaplan_meier(curve: Any) -> tuple[NDArray[np.float64], ...]:
    """Return the times of a Kaplan-Meier curve of SciPy from 0, its survival, and (2, K) ends of its 95 % band."""
    with warnings.catch_warnings(action="ignore"):  # the band is undefined where survival is 0 or 1
        band = curve.confidence_interval(method="log-log")
    ends = np.stack([band.low.probabilities, band.high.probabilities])
    begin = (int(curve.quantiles[0] > 0), 0)
    return (
        np.pad(curve.quantiles, begin),
        np.pad(curve.probabilities, begin, constant_values=1.0),
        np.pad(
            np.where(np.isnan(ends), curve.probabilities, ends),
            ((0, 0), begin),
            constant_values=1.0,
        ),
    )
