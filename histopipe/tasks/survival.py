"""Survival: a time, and whether the event happened at that time or not until then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo, UsageError
from histopipe.system.arrays import FloatArray
from histopipe.system.output import counted
from histopipe.tasks.curves import risk_groups, survival_checks
from histopipe.tasks.intervals import Interval, bounded_interval
from histopipe.tasks.predictions import EvaluationSettings, Predictions, Thresholds
from histopipe.tasks.statistics import Statistics
from histopipe.tasks.task import TRUE, Target, Task, flag_cell, rank_parts, relative_ranks

_TIE = 1e-8
"""Risks that differ by less are equal."""
_BLOCK = 1 << 22
"""Pairs of patients computed at once."""


class SurvivalStatistics(Statistics):
    """Metrics as functions of (R, P) weights of the patients.

    Args:
        time, event: (N,) time, and 1 for an event or 0 for censoring.
        output: (N, 1 + G) risk, and the probability of survival until each time of `grid`.
        grid: (G,) increasing times.
        patient, fold: (N,) numbers of the patients and folds. Risks are compared within folds; the probabilities not to be
            censored come from all folds together.
    """

    def __init__(
        self,
        time: NDArray[np.float64],
        event: NDArray[np.float64],
        output: NDArray[np.float64],
        grid: Sequence[float],
        patient: NDArray[np.int32],
        *,
        fold: NDArray[np.int32],
    ) -> None:
        self.patients = int(patient.max()) + 1
        order = np.argsort(time, kind="stable")
        self._time, self._event = time[order], event[order] == 1
        self._risk, self._survival = output[order, 0], output[order, 1:]
        self._patient, self._grid = patient[order], np.asarray(grid, np.float64)
        self._fold = np.unique(fold[order], return_inverse=True)[1]
        self._unique, self._place = np.unique(self._time, return_inverse=True)
        rank = 2.0 * self._place + ~self._event  # an event is before those censored at its time
        self.folds_without_pairs = sum(
            rank[of_fold & self._event].min(initial=np.inf) >= rank[of_fold].max()
            for of_fold in (self._fold == number for number in range(self._fold.max() + 1))
        )
        self._inside = self._grid[(self._grid >= self._time[0]) & (self._grid < self._time[-1])]

    def compute(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return (R,) values of each metric; NaN if undefined."""
        rows = weights[:, self._patient]
        # (R, K) inverse probability not to be censored until each unique time. 0 where it is infinite: at a last time
        # with events, all others are censored, so that such events have no weight.
        censoring = self._product(rows, ~self._event, self._event)
        inverse = np.divide(1.0, censoring, out=np.zeros_like(censoring), where=censoring > 1e-12)
        harrell, uno = self._concordance(rows, inverse)
        area, brier = self._over_time(rows, inverse)
        return {
            "c_index": harrell,
            "c_index_uno": uno,
            "auc": area,
            "brier": brier,
        }

    def better_intervals(
        self, weights: FloatArray, values: Mapping[str, FloatArray]
    ) -> Mapping[str, Interval]:
        """Return the interval of the integrated Brier score, whose resamples lack the large errors of few events."""
        brier = self.values()["brier"]
        if brier is None or not np.isfinite(values["brier"]).any():
            return {}
        variance, patients = float(np.nanvar(values["brier"])), len(np.unique(self._patient))
        return {"brier": bounded_interval(min(brier, 1.0), variance, patients)}

    def remarks(self) -> list[str]:
        """Return remarks on the events and times that metrics leave out."""
        last, count = self._event[self._time == self._time[-1]], len(self._inside)
        texts = {
            f"Uno's C leaves out events at the last time, {self._time[-1]:g}, when other patients are censored": (
                last.any() and not last.all()
            ),
            f"{count} of the {len(self._grid)} times of the model are within the times of these patients: the AUC over "
            "time needs 1, the integrated Brier score 2": len(self._grid) and count < 2,
        }
        return [text for text, applies in texts.items() if applies]

    def _product(
        self, rows: FloatArray, lost: NDArray[np.bool_], first: NDArray[np.bool_]
    ) -> FloatArray:
        """Return the (R, K) Kaplan-Meier product at each unique time, of events `lost`, after those of `first`."""
        starts = np.searchsorted(self._time, self._unique)
        counts, leaving, gone = (
            np.add.reduceat(rows * of_kind, starts, axis=1) for of_kind in (1, lost, first)
        )
        at_risk = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1] - gone
        share = np.divide(leaving, at_risk, out=np.zeros_like(leaving), where=at_risk > 1e-12)
        return np.asarray(np.cumprod(1 - share, axis=1), np.float64)

    def _concordance(self, rows: FloatArray, inverse: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the concordance of Harrell and that of Uno, (R,) each."""
        events = np.flatnonzero(self._event)
        sums = np.zeros((4, len(rows)))
        weight = rows * inverse[:, self._place] ** 2
        size = max(1, _BLOCK // max(len(self._time), 1))
        for begin in range(0, len(events), size):
            block = events[begin : begin + size]
            lag = self._time[None] - self._time[block, None]
            later = (lag > 0) | ((lag == 0) & ~self._event[None])
            comparable = later * (self._fold[block, None] == self._fold) * 1.0
            lead = self._risk[block, None] - self._risk[None]
            value = np.where(np.abs(lead) <= _TIE, 0.5, lead > 0) * comparable
            pairs, concordant = rows @ comparable.T, rows @ value.T
            sums += [
                (of_events * of_others).sum(axis=1)
                for of_events in (rows[:, block], weight[:, block])
                for of_others in (concordant, pairs)
            ]
        with np.errstate(divide="ignore", invalid="ignore"):
            return sums[0] / sums[1], sums[2] / sums[3]

    def _over_time(self, rows: FloatArray, inverse: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the (R,) mean area under the time-dependent ROC curve, and the (R,) integrated Brier score.

        The mean is weighted by the events between the times.
        """
        times = self._inside
        if not len(times):
            return np.full(len(rows), math.nan), np.full(len(rows), math.nan)
        order = np.lexsort((self._risk, self._fold))
        begins = np.diff(self._fold[order], prepend=-1) > 0
        ties = np.flatnonzero(begins | (np.diff(self._risk[order], prepend=-np.inf) > _TIE))
        folds = np.flatnonzero(begins[ties])
        of_tie = self._fold[order][ties]
        survival = self._product(rows, self._event, np.zeros_like(self._event))
        places = np.searchsorted(self._unique, times, side="right") - 1
        fall = -np.diff(survival[:, places], prepend=1.0, axis=1).T
        of_events = rows * self._event * inverse[:, self._place]
        areas, scores = [], []
        # With one time, the Brier score is 0 / 0.
        with np.errstate(divide="ignore", invalid="ignore"):
            for time, place in zip(times, places, strict=True):
                gone, left = of_events * (self._time <= time), rows * (self._time > time)
                cases, controls = (
                    np.add.reduceat(of_kind[:, order], ties, axis=1) for of_kind in (gone, left)
                )
                of_folds = np.add.reduceat(controls, folds, axis=1)
                before = np.cumsum(of_folds, axis=1) - of_folds
                below = np.cumsum(controls, axis=1) - controls / 2 - before[:, of_tie]
                pairs = (np.add.reduceat(cases, folds, axis=1) * of_folds).sum(axis=1)
                areas.append((cases * below).sum(axis=1) / pairs)
                predicted = self._survival[:, np.flatnonzero(self._grid == time)[0]]
                error = gone * predicted**2 + left * (1 - predicted) ** 2 * inverse[:, place, None]
                scores.append(error.sum(axis=1) / rows.sum(axis=1))
            used = fall > 0
            total = np.where(used, np.array(areas) * fall, 0).sum(axis=0)
            brier = np.trapezoid(scores, times, axis=0) / (times[-1] - times[0])
            return total / np.where(used, fall, 0).sum(axis=0), np.asarray(brier, np.float64)


def partial_likelihood(
    risk: NDArray[np.float64],
    time: NDArray[np.float64],
    event: NDArray[np.float64],
    weight: NDArray[np.float64] | None = None,
) -> tuple[float, NDArray[np.float64]]:
    """Return the negative log partial likelihood of Cox' model, and its (N,) gradient for the (N,) risks.

    Bags of weight 0 are left out.

    Source:
        B. Efron, "The efficiency of Cox's likelihood function for censored data" (1977): tied times.
    """
    gradient = np.zeros(len(risk))
    kept = np.flatnonzero(np.ones(len(risk)) if weight is None else weight)
    if not len(kept):
        return 0.0, gradient
    # From the last time to the first: the hazards of all with the same or a later time are a cumulative sum.
    order = kept[np.argsort(-time[kept], kind="stable")]
    risk, time, events = (
        risk[order].astype(np.float64),
        time[order],
        np.flatnonzero(event[order] == 1),
    )
    top = risk.max()
    hazard = np.exp(risk - top)
    group = np.append(0, np.cumsum(np.diff(time) != 0))  # number of the time of each patient
    tied = group[events]
    at_risk = np.cumsum(hazard)[np.searchsorted(group, tied, side="right") - 1]
    # Of M events at one time, the one with number K leaves out K / M of the hazards of all M.
    number = np.arange(len(events)) - np.searchsorted(tied, tied)
    share = number / np.bincount(tied)[tied]
    inverse = 1 / (at_risk - share * np.bincount(tied, hazard[events])[tied])
    loss = float(np.sum(top - np.log(inverse)) - risk[events].sum())
    # A patient counts at all times up to the own one: in the own group and all later groups of this order.
    later = np.cumsum(np.bincount(tied, inverse, group[-1] + 1)[::-1])[::-1]
    slopes = hazard * later[group]
    slopes[events] -= 1 + hazard[events] * np.bincount(tied, share * inverse)[tied]
    gradient[order] = slopes
    return loss, gradient


def breslow_survival(
    risk: NDArray[np.float64],
    time: NDArray[np.float64],
    event: NDArray[np.float64],
    grid: Sequence[float],
) -> NDArray[np.float64]:
    """Return the (G,) survival at the times of `grid` of a patient with risk 0, after training patients.

    Source:
        N. Breslow, discussion of D. Cox' "Regression models and life tables" (1972).
    """
    order = np.argsort(time, kind="stable")
    time, happened = time[order], event[order] == 1
    hazard = np.exp(risk[order].astype(np.float64))
    at_risk = np.cumsum(hazard[::-1])[::-1]
    steps = 1 / at_risk[np.searchsorted(time, time[happened], side="left")]
    until = np.searchsorted(time[happened], np.asarray(grid), side="right")
    return np.asarray(np.exp(-np.append(0.0, np.cumsum(steps))[until]), np.float64)


def time_grid(
    time: NDArray[np.float64], event: NDArray[np.float64], count: int = 10
) -> list[float]:
    """Return up to `count` increasing times between the 10th and 90th percentile of the events."""
    return list(np.unique(np.quantile(time[event == 1], np.linspace(0.1, 0.9, count))).tolist())


_RISK, _SURVIVAL = "risk", "survival_"
_BOTH = "correct the cell, or leave time and event empty to exclude the slide"


@dataclass(frozen=True, slots=True)
class Survival(Task):
    """A time, and whether the event happened at that time (1) or not until then (0).

    The output is the risk (higher: the event is earlier), and the probability of survival until each time of `grid`.
    """

    has_mean = False
    linear_loss = "cox"
    name = "survival"
    stratum = "event and time"
    settings = ("time", "event")
    has_sets = of_patches = of_values = False
    outcome_text = "The outcome is the time until an event (columns {})."
    predicted_text = "a risk, and the probability of survival at several times"
    main: ClassVar[Mapping[str, str]] = {"c_index": "C-index", "auc": "AUC(t)"}
    ranked: ClassVar[str] = "c_index"
    plain: ClassVar[Mapping[str, str]] = {"c_index_uno": "Uno's C", "brier": "int. Brier"}
    titles: ClassVar[Mapping[str, str]] = {
        "auc": "AUC over time",
        "brier": "integrated Brier score",
    }
    by_subgroup = ("c_index", "brier")
    compared = ("c_index", "auc", "brier")
    names = (_RISK,)
    grid: tuple[float, ...] = ()
    horizon: float | None = None
    log_hazards: bool = False

    def with_settings(self, settings: EvaluationSettings) -> Self:
        """Return the task with the horizon, and whether risks are logarithms of hazards."""
        return replace(self, horizon=settings.horizon, log_hazards=settings.log_hazards)

    def outcome_counts(self, scores: Predictions) -> dict[str, int]:
        """Return the number of patients with an event."""
        return {"events": len(np.unique(scores.patient[scores.target[:, 1] == 1]))}

    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return time and event; None if both are missing."""
        (time_cell, event_cell) = (cells[name] for name in self.columns)
        if not time_cell and not event_cell:
            return None
        time_place, event_place = (f"{where}: {name}" for name in self.columns)
        time = self.read_cell(time_cell, time_place)
        if not time >= 0:
            raise UsageError(
                time_place,
                found=repr(time_cell) if time_cell else "a missing value",
                expected="a time, 0 or more",
                todo=_BOTH,
            )
        event = flag_cell(event_cell, event_place)
        if math.isnan(event):
            raise UsageError(event_place, found="a missing value", expected="0 or 1", todo=_BOTH)
        return time, event

    def strata(self, targets: FloatArray) -> list[str]:
        """Return event or censored, in the earlier or later half of these."""
        names = np.empty(len(targets), object)
        for value, name in ((1, "event"), (0, "censored")):
            rows = targets[:, 1] == value
            names[rows] = [
                f"{name}, {('early', 'late')[half - 1]}"
                for half in rank_parts(relative_ranks(targets[rows, 0]), 2)
            ]
        return list(names)

    def check(self, targets: FloatArray, subset: str) -> None:
        """Check that there is an event that is not the last time."""
        time, event = targets.T
        if not (event == 1).any():
            raise NothingToDo(
                f"survival cannot be learned: {subset}",
                found=f"no event in column {self.columns[1]}",
                expected="at least one",
                todo="add slides",
            )
        if not (time[event == 1].min() < time).any():
            raise NothingToDo(
                f"survival cannot be learned: {subset}",
                found="no time later than the first event",
                expected="patients with different times",
                todo="add slides",
            )

    def summary(self, targets: FloatArray) -> str:
        """Return the number of events and the median time."""
        return f"{int(targets[:, 1].sum())} events, median time {np.median(targets[:, 0]):.4g}"

    @property
    def flags(self) -> tuple[str, ...]:
        """The column of the event."""
        return self.columns[1:]

    def flag_counts(self, counts: Mapping[str, int]) -> str:
        """Return the number of patients with the event as text."""
        return counted(counts[self.columns[1]], "event")

    @classmethod
    def of_header(cls, names: Sequence[str]) -> Self | None:
        """Return the task of the columns of time, event, risk, and survival at several times."""
        if _RISK not in names:
            return None
        columns = tuple(name.removeprefix(TRUE) for name in names if name.startswith(TRUE))
        survival = names[len(columns) + 1 :]
        return cls(columns, tuple(float(name.removeprefix(_SURVIVAL)) for name in survival))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Columns of the risk and of the survival at each time."""
        return (_RISK, *(f"{_SURVIVAL}{time:.9g}" for time in self.grid))

    def converted(self, task: Self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the outputs at the times of this task, interpolated from survival 1 at time 0.

        Models of different training sets have different times.
        """
        if task.grid == self.grid:
            return output
        rows = [np.interp(self.grid, (0.0, *task.grid), (1.0, *row)) for row in output[:, 1:]]
        survival = np.array(rows, np.float32).reshape(len(rows), len(self.grid))
        return np.concatenate([output[:, :1], survival], axis=1)

    def statistics(self, scores: Predictions) -> SurvivalStatistics:
        """Return concordance, AUC over time, and Brier score."""
        time, event = scores.target.T
        return SurvivalStatistics(
            time, event, scores.output, self.grid, scores.patient, fold=scores.folds
        )

    def thresholds(self, scores: Predictions, rule: str) -> Thresholds:
        """Return the median risk, which divides the risk groups."""
        return Thresholds((float(np.median(scores.output[:, 0])),) if len(scores) else ())

    def details(self, scores: Predictions, statistics: SurvivalStatistics) -> dict[str, Any]:
        """Return risk groups and checks of patients, and remarks on times and events that are left out.

        Slides of one patient are no independent observations.
        """
        details: dict[str, Any] = {"notes": statistics.remarks()}
        if self.horizon and self.grid and self.horizon > self.grid[-1]:
            details["notes"].append(
                f"--horizon {self.horizon:g}: the model has no probabilities after {self.grid[-1]:g}, which is used"
            )
        if len(scores) > len(np.unique(scores.patient)):
            return details
        if scores.limits.shape[
            1
        ]:  # without one, no patient of validation has one time for all slides
            high = scores.output[:, 0] > scores.limits[:, 0]
            details["groups"], details["log_rank"] = risk_groups(scores.target, high)
        details["checks"] = survival_checks(
            scores.target,
            scores.output,
            self.grid,
            scores.folds,
            self.horizon,
            log_hazards=self.log_hazards,
        )
        details["values"] = {"brier_km": self._brier_of_kaplan_meier(scores)}
        return details

    def _brier_of_kaplan_meier(self, scores: Predictions) -> float | None:
        """Return the integrated Brier score of the curve of all patients, which knows nothing of a single one."""
        time, event = scores.target.T
        curve = breslow_survival(np.zeros(len(time)), time, event, self.grid)
        output = np.column_stack([np.zeros(len(time)), np.tile(curve, (len(time), 1))])
        return self.statistics(replace(scores, output=output)).values()["brier"]
