"""Survival: a time, and whether the event happened at that time or not until then."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.system.arrays import FloatArray
from histopipe.tasks.intervals import WeightedStatistics
from histopipe.tasks.survival_statistics import SurvivalStatistics
from histopipe.tasks.task import (
    TRUE,
    Details,
    Scores,
    Target,
    Task,
    Thresholds,
    few_patients,
    flag_cell,
    numeric_cell,
    rank_parts,
    relative_ranks,
)

_RISK, _SURVIVAL = "risk", "survival_"
_BOTH = "correct the cell, or leave time and event empty to exclude the slide"
_HALF_TOLERANCE = 1e-8
"""Rounding of a curve that is exactly one half: then the median survival is the first time of that step."""


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
            name: tuple(entry) if isinstance(entry, list) else entry
            for name, entry in value.items()
        }
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Survival(Task):
    """A time, and whether the event happened at that time (1) or not until then (0).

    The output is the risk (higher: the event is earlier), and the probability of survival until each time of `grid`.
    """

    name = "survival"
    main: ClassVar[Mapping[str, str]] = {"c_index": "C-index", "auc": "AUC(t)"}
    plain: ClassVar[Mapping[str, str]] = {"c_index_uno": "Uno's C", "brier": "int. Brier"}
    titles: ClassVar[Mapping[str, str]] = {
        "auc": "AUC over time",
        "brier": "integrated Brier score",
    }
    by_subgroup = ("c_index", "brier")
    compared = ("c_index", "auc", "brier")
    grid: tuple[float, ...] = ()

    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return time and event; None if both are missing."""
        time_name, event_name = self.columns
        if not cells[time_name] and not cells[event_name]:
            return None
        time = numeric_cell(cells[time_name], f"{where}: {time_name}")
        if not time >= 0:
            raise UsageError(
                f"{where}: {time_name}",
                found=repr(cells[time_name]) if cells[time_name] else "a missing value",
                expected="a time, 0 or more",
                todo=_BOTH,
            )
        event = flag_cell(cells[event_name], f"{where}: {event_name}")
        if math.isnan(event):
            raise UsageError(
                f"{where}: {event_name}", found="a missing value", expected="0 or 1", todo=_BOTH
            )
        return time, event

    def strata(self, targets: FloatArray) -> list[str]:
        """Return event or censored, in the earlier or later half of these."""
        names = np.empty(len(targets), object)
        for value, name in ((1, "event"), (0, "censored")):
            rows = np.flatnonzero(targets[:, 1] == value)
            halves = rank_parts(relative_ranks(targets[rows, 0]), 2)
            for row, half in zip(rows, halves, strict=True):
                names[row] = f"{name}, {('early', 'late')[half - 1]}"
        return [str(name) for name in names]

    def check(self, targets: FloatArray, subset: str) -> None:
        """Check that there is an event that is not the last time."""
        time, event = targets.T
        if not (event == 1).any():
            raise NothingToDo(
                f"survival cannot be learned: {subset}", found=f"no event in column {self.columns[1]}",
                expected="at least one", todo="add slides",
            )  # fmt: skip
        if not (time[event == 1].min() < time).any():
            raise NothingToDo(
                f"survival cannot be learned: {subset}", found="no time later than the first event",
                expected="patients with different times", todo="add slides",
            )  # fmt: skip

    def summary(self, targets: FloatArray) -> str:
        """Return the number of events and the median time."""
        return f"{int(targets[:, 1].sum())} events, median time {np.median(targets[:, 0]):.4g}"

    @property
    def outcome(self) -> str:
        """A sentence on what is predicted."""
        return f"The outcome is the time until an event (columns {self.columns[0]} and {self.columns[1]})."

    @property
    def predicted(self) -> str:
        """What the model returns."""
        return "a risk, and the probability of survival at several times"

    @classmethod
    def of_header(cls, names: Sequence[str]) -> Self | None:
        """Return the task of the columns of time, event, risk, and survival at several times."""
        if _RISK not in names:
            return None
        columns = tuple(name.removeprefix(TRUE) for name in names if name.startswith(TRUE))
        outputs = names[len(columns) + 1 :]
        return cls(columns, tuple(float(name.removeprefix(_SURVIVAL)) for name in outputs))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Columns of the risk and of the survival at each time."""
        return (_RISK, *(f"{_SURVIVAL}{time:.9g}" for time in self.grid))

    @property
    def names(self) -> tuple[str, ...]:
        """The risk alone."""
        return (_RISK,)

    def converted(self, task: Self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the outputs at the times of this task, interpolated from survival 1 at time 0.

        Models of different training sets have different times.
        """
        if task.grid == self.grid:
            return output
        curves = np.concatenate([np.ones((len(output), 1)), output[:, 1:]], axis=1)
        rows = [np.interp(self.grid, (0.0, *task.grid), row) for row in curves]
        survival = np.array(rows, np.float32).reshape(len(rows), len(self.grid))
        return np.concatenate([output[:, :1], survival], axis=1)

    def statistics(self, scores: Scores) -> WeightedStatistics:
        """Return concordance, AUC over time, and Brier score."""
        time, event = scores.target.T
        return SurvivalStatistics(time, event, scores.output, self.grid, scores.patient)

    def thresholds(self, scores: Scores, rule: str) -> Thresholds:
        """Return the median risk, which divides the risk groups."""
        return Thresholds((float(np.median(scores.output[:, 0])),) if len(scores.output) else ())

    def details(self, scores: Scores, statistics: WeightedStatistics) -> Details:
        """Return the risk groups, and remarks on times and events that are left out."""
        assert isinstance(statistics, SurvivalStatistics)  # noqa: S101 - for mypy
        groups, log_rank = _risk_groups(scores)
        return Details(
            fields={"groups": groups, "log_rank": log_rank}, remarks=statistics.remarks(),
            few=few_patients(self.columns, scores),
        )  # fmt: skip


def _risk_groups(scores: Scores) -> tuple[tuple[RiskGroup, ...], float | None]:
    """Return the groups of high and low risk, and the p value of their difference."""
    # Without a threshold, no patient of validation has one time for all slides.
    if not scores.limits.shape[1]:
        return (), None
    from scipy import stats  # imported late: takes 0.6 s

    time, event = scores.target.T
    high = scores.output[:, 0] > scores.limits[:, 0]
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


def _kaplan_meier(curve: Any) -> tuple[FloatArray, ...]:
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
