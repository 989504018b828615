"""Metrics of survival predictions for many weightings of the patients at once, for the bootstrap.

Source:
    F. Harrell et al., "Evaluating the yield of medical tests" (1982), and H. Uno et al., "On the C-statistics for
    evaluating overall adequacy of risk prediction procedures with censored survival data" (2011): concordance.
    H. Uno et al., "Evaluating prediction rules for t-year survivors with censored regression models" (2007): area under
    the time-dependent ROC curve.
    E. Graf et al., "Assessment and comparison of prognostic classification schemes for survival data" (1999): Brier score.

Results equal those of scikit-survival, with the censoring distribution of the same patients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.tasks.intervals import WeightedStatistics

_TIE = 1e-8
"""Risks that differ by less are equal."""
_BLOCK = 1 << 22
"""Pairs of patients computed at once."""


class SurvivalStatistics(WeightedStatistics):
    """Metrics as functions of (R, P) weights of the patients.

    Args:
        time, event: (N,) time, and 1 for an event or 0 for censoring.
        output: (N, 1 + G) risk, and the probability of survival until each time of `grid`.
        grid: (G,) increasing times.
        patient: (N,) numbers of the patients.
    """

    def __init__(
        self,
        time: NDArray[np.float64],
        event: NDArray[np.float64],
        output: NDArray[np.float64],
        grid: Sequence[float],
        patient: NDArray[np.int32],
    ) -> None:
        self.patients = int(patient.max()) + 1
        order = np.argsort(time, kind="stable")
        self._time, self._event = time[order], event[order] == 1
        self._risk, self._survival = output[order, 0], output[order, 1:]
        self._patient, self._grid = patient[order], np.asarray(grid, np.float64)
        self._unique, self._place = np.unique(self._time, return_inverse=True)
        self._inside = self._grid[(self._grid >= self._time[0]) & (self._grid < self._time[-1])]

    def compute(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return (R,) values of each metric; NaN if undefined."""
        rows = weights[:, self._patient]
        inverse = self._inverse_censoring(rows)
        harrell, uno = self._concordance(rows, inverse)
        values = {"c_index": harrell, "c_index_uno": uno}
        values["auc"] = self._mean_auc(rows, inverse, self._inside)
        values["brier"] = self._brier(rows, inverse, self._inside)
        return values

    def remarks(self) -> list[str]:
        """Return remarks on the events and times that metrics leave out."""
        texts, last = [], self._event[self._time == self._time[-1]]
        if last.any() and not last.all():
            texts.append(
                f"Uno's C leaves out events at the last time, {self._time[-1]:g}, when other patients are censored"
            )
        if len(self._grid) and len(self._inside) < 2:
            texts.append(
                f"{len(self._inside)} of the {len(self._grid)} times of the model are within the times of these patients: "
                "the AUC over time needs 1, the integrated Brier score 2"
            )
        return texts

    def _product(
        self, rows: FloatArray, lost: NDArray[np.bool_], first: NDArray[np.bool_]
    ) -> FloatArray:
        """Return the (R, K) Kaplan-Meier product at each unique time, of events `lost`, after those of `first`."""
        starts = np.searchsorted(self._time, self._unique)
        at_risk = np.cumsum(np.add.reduceat(rows, starts, axis=1)[:, ::-1], axis=1)[:, ::-1]
        leaving = np.add.reduceat(rows * lost, starts, axis=1)
        at_risk = at_risk - np.add.reduceat(rows * first, starts, axis=1)
        share = np.divide(leaving, at_risk, out=np.zeros_like(leaving), where=at_risk > 1e-12)
        return np.asarray(np.cumprod(1 - share, axis=1), np.float64)

    def _inverse_censoring(self, rows: FloatArray) -> FloatArray:
        """Return the (R, K) inverse probability not to be censored until each unique time.

        0 where it is infinite: at a last time with events, all others are censored, so that such events have no weight.
        """
        censoring = self._product(rows, ~self._event, self._event)
        return np.divide(1.0, censoring, out=np.zeros_like(censoring), where=censoring > 1e-12)

    def _concordance(self, rows: FloatArray, inverse: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the concordance of Harrell and that of Uno, (R,) each."""
        events = np.flatnonzero(self._event)
        sums = np.zeros((4, len(rows)))
        weight = rows * inverse[:, self._place] ** 2
        size = max(1, _BLOCK // max(len(self._time), 1))
        for begin in range(0, len(events), size):
            block = events[begin : begin + size]
            later = self._time[None] > self._time[block, None]
            same = (self._time[None] == self._time[block, None]) & ~self._event[None]
            comparable = (later | same).astype(np.float64)
            lead = self._risk[block, None] - self._risk[None]
            value = np.where(np.abs(lead) <= _TIE, 0.5, lead > 0) * comparable
            pairs, concordant = rows @ comparable.T, rows @ value.T
            harrell, uno = rows[:, block], weight[:, block]
            sums[0] += (harrell * concordant).sum(axis=1)
            sums[1] += (harrell * pairs).sum(axis=1)
            sums[2] += (uno * concordant).sum(axis=1)
            sums[3] += (uno * pairs).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return sums[0] / sums[1], sums[2] / sums[3]

    def _mean_auc(self, rows: FloatArray, inverse: FloatArray, times: FloatArray) -> FloatArray:
        """Return the (R,) mean area under the time-dependent ROC curve, weighted by the events between the times."""
        if not len(times):
            return np.full(len(rows), math.nan)
        order = np.argsort(self._risk, kind="stable")
        risk = self._risk[order]
        ties = np.flatnonzero(np.append(True, np.diff(risk) > _TIE))
        survival = self._product(rows, self._event, np.zeros_like(self._event))
        areas, falls, before = [], [], np.ones(len(rows))
        with np.errstate(divide="ignore", invalid="ignore"):
            of_cases = rows * self._event * inverse[:, self._place]
            for time in times:
                case = self._event & (self._time <= time)
                cases = np.add.reduceat((of_cases * case)[:, order], ties, axis=1)
                controls = np.add.reduceat((rows * (self._time > time))[:, order], ties, axis=1)
                below = np.cumsum(controls, axis=1) - controls / 2
                pairs = cases.sum(axis=1) * controls.sum(axis=1)
                areas.append((cases * below).sum(axis=1) / pairs)
                now = survival[:, np.searchsorted(self._unique, time, side="right") - 1]
                falls.append(before - now)
                before = now
            fall = np.array(falls)
            used = fall > 0
            total = np.where(used, np.array(areas) * fall, 0).sum(axis=0)
            return np.asarray(total / np.where(used, fall, 0).sum(axis=0), np.float64)

    def _brier(self, rows: FloatArray, inverse: FloatArray, times: FloatArray) -> FloatArray:
        """Return the (R,) Brier score integrated over the times."""
        if len(times) < 2:
            return np.full(len(rows), math.nan)
        scores = []
        with np.errstate(divide="ignore", invalid="ignore"):
            of_events = rows * self._event * inverse[:, self._place]
            for time in times:
                survival = self._survival[:, np.flatnonzero(self._grid == time)[0]]
                here = inverse[:, np.searchsorted(self._unique, time, side="right") - 1]
                gone = of_events * (self._event & (self._time <= time)) * survival**2
                left = rows * (self._time > time) * (1 - survival) ** 2 * here[:, None]
                scores.append((gone + left).sum(axis=1) / rows.sum(axis=1))
        return np.asarray(np.trapezoid(scores, times, axis=0) / (times[-1] - times[0]), np.float64)


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
    order = kept[np.argsort(-time[kept], kind="stable")]
    risk, time, happened = risk[order].astype(np.float64), time[order], event[order] == 1
    top = risk.max()
    hazard = np.exp(risk - top)
    loss, slopes = 0.0, np.zeros(len(order))
    # From the last time to the first: the sum over all whose time is not earlier, and those with an event then.
    ends = np.append(np.flatnonzero(np.diff(time)), len(time) - 1) + 1
    totals = np.cumsum(hazard)
    # For each time with events: the sum of the inverse sums over all patients who can still have the event.
    common = np.zeros(len(ends))
    begin = 0
    for group, end in enumerate(ends):
        tied = np.flatnonzero(happened[begin:end]) + begin
        count = len(tied)
        if count:
            share = np.arange(count) / count
            tied_hazard = hazard[tied].sum()
            denominators = totals[end - 1] - share * tied_hazard
            loss += float(np.sum(np.log(denominators) + top) - risk[tied].sum())
            common[group] = np.sum(1 / denominators)
            slopes[tied] -= 1 + hazard[tied] * np.sum(share / denominators)
        begin = end
    # A patient counts at all times up to the own one: in the own group and all later groups of this order.
    later = np.cumsum(common[::-1])[::-1]
    group_of = np.repeat(np.arange(len(ends)), np.diff(np.append(0, ends)))
    slopes += hazard * later[group_of]
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
    first = np.searchsorted(time, time[happened], side="left")
    steps = 1 / at_risk[first]
    until = np.searchsorted(time[happened], np.asarray(grid), side="right")
    cumulative = np.append(0.0, np.cumsum(steps))[until]
    return np.asarray(np.exp(-cumulative), np.float64)


def time_grid(
    time: NDArray[np.float64], event: NDArray[np.float64], count: int = 10
) -> list[float]:
    """Return up to `count` increasing times between the 10th and 90th percentile of the events."""
    times = time[event == 1]
    return [
        float(quantile) for quantile in np.unique(np.quantile(times, np.linspace(0.1, 0.9, count)))
    ]
