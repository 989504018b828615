"""Metrics of patches, slides or patients, with intervals: computed from scores, and read from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.tasks.choices import TaskName
from histopipe.tasks.curves import Bin, DecisionCurve, RiskGroup, SurvivalChecks
from histopipe.tasks.intervals import FEWEST_PATIENTS, TOO_FEW, patients_notes
from histopipe.tasks.predictions import FALLBACK, NO_THRESHOLDS, Predictions, Thresholds
from histopipe.tasks.statistics import intervals_of

_MAX_UNDEFINED = 0.05
"""Share of undefined resamples that a note states: fewer hardly change an interval."""


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """Metrics of one class against the rest; None if undefined."""

    count: int
    auc: float | None
    sensitivity: float | None
    specificity: float | None
    average_precision: float | None = None
    calibration_intercept: float | None = None
    calibration_slope: float | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of patches, slides or patients.

    Attributes:
        task: task of the predictions.
        count: number of patches, slides or patients.
        patients: number of patients.
        values: metrics by name, None if undefined. With several columns, the means over them, and `metric:column`.
        intervals: 95 % confidence intervals by metric, from resampling patients; only where defined.
        thresholds: thresholds of the decisions; without values if several were used.
        notes: remarks on the metrics.
        confusion: of classes; rows are labels, columns decisions.
        classes: of classes: metrics by class name.
        reliability: of classes: bins of the probability of the positive class; for more than two classes, of the most
            probable one.
        decision_curve: net benefit of the positive class of two.
        groups: of survival: patients with a high and a low risk.
        log_rank: p value of their difference, by the log-rank test; None if it is undefined.
        checks: of survival: follow-up, calibration, and proportional hazards; None if items are no patients.
        outcomes: number of patients by class or value of a label, or of events.
    """

    task: TaskName
    count: int
    patients: int
    values: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float]]
    thresholds: Thresholds = NO_THRESHOLDS
    notes: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    classes: Mapping[str, ClassMetrics] = field(default_factory=dict)
    reliability: tuple[Bin, ...] = ()
    decision_curve: DecisionCurve | None = None
    groups: tuple[RiskGroup, ...] = ()
    log_rank: float | None = None
    checks: SurvivalChecks | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Return a metric by its name: `metrics.auc`."""
        if name != "values" and name in self.values:
            return self.values[name]
        raise AttributeError(f"{name} is no metric of {type(self).__name__}")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict, with the metrics by name at the same level as the other fields."""
        value = asdict(self)
        return {**value.pop("values"), **value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Metrics:
        """Create the metrics from the result of `to_json`, or from files of earlier versions.

        Raises:
            KeyError, TypeError: the value has the wrong form.
        """
        intervals = {name: tuple(ends) for name, ends in value["intervals"].items()}
        notes, names = value["notes"], {attribute.name for attribute in fields(cls)}
        if intervals and value["patients"] < FEWEST_PATIENTS:
            # Earlier versions had intervals of two patients and more.
            intervals = {}
            notes = [
                *(note for note in notes if "intervals" not in note),
                *patients_notes(value["patients"]),
            ]
        limits: Any = value["thresholds"] if "thresholds" in value else [value["threshold"]]
        if "values" not in limits:  # of an earlier version
            note = next((text for text in value["notes"] if text.startswith(FALLBACK)), "")
            limits = {"values": [limit for limit in limits if limit is not None], "note": note}
        by_name = {key: value[key] for key in value if key not in {*names, "threshold"}}
        curve, checks = value.get("decision_curve"), value.get("checks")
        arguments = {
            "task": "classification",
            **{name: value[name] for name in names & value.keys()},
            # Earlier versions had the metrics of other tasks than classification in a field.
            "values": value.get("figures", by_name),
            "intervals": intervals,
            "thresholds": Thresholds(tuple(limits["values"]), limits["note"]),
            "notes": tuple(notes),
            "confusion": tuple(map(tuple, value.get("confusion", ()))),
            "classes": {
                name: ClassMetrics(**metrics) for name, metrics in value.get("classes", {}).items()
            },
            "reliability": _bins(value.get("reliability", ())),
            "decision_curve": curve and DecisionCurve(**_with_tuples(curve)),
            "groups": tuple(RiskGroup(**_with_tuples(group)) for group in value.get("groups", ())),
            "checks": checks
            and SurvivalChecks(**checks | {"calibration": _bins(checks["calibration"])}),
        }
        return cls(**arguments)


def _bins(value: Sequence[Mapping[str, Any]]) -> tuple[Bin, ...]:
    return tuple(Bin(**_with_tuples(place)) for place in value)


def _with_tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of JSON with tuples for lists."""
    return {
        name: tuple(entry) if isinstance(entry, list) else entry for name, entry in value.items()
    }


def metrics_of(
    scores: Predictions,
    *,
    draws: NDArray[np.float64],
    notes: tuple[str, ...] = (),
    thresholds: Thresholds = NO_THRESHOLDS,
) -> Metrics:
    """Compute all metrics of at least one score. `draws` are from `bootstrap_draws`; `notes` come first."""
    task = scores.task
    statistics = task.statistics(scores)
    details = task.details(scores, statistics)
    values = statistics.values() | details.pop("values", {})
    patients = len(np.unique(scores.patient))
    intervals, undefined = intervals_of(statistics, draws[:, : statistics.patients], patients)
    further = details.pop("intervals", {})
    remarks = [*notes, *details.pop("notes", ())]
    if statistics.folds_without_pairs and scores.fold.size:
        remarks.append(
            f"{statistics.folds_without_pairs} of {len(np.unique(scores.fold))} folds have no pair to rank: left out of "
            "the metrics within folds"
        )
    if scores.left_out:
        remarks.append(f"{scores.left_out} excluded, because they have several {task.several}")
    has_all_classes = all(of_class.count for of_class in details.get("classes", {}).values())
    has_main = values[next(iter(task.main))] is not None
    if has_all_classes and has_main and undefined > _MAX_UNDEFINED:
        remarks.append(
            f"{undefined:.0%} of the resamples {task.undefined}: excluded from the intervals"
        )
    few = [
        name
        for name, rows in zip(task.columns, np.isfinite(scores.target).T, strict=True)
        if len(np.unique(scores.patient[rows])) < FEWEST_PATIENTS
    ]
    if len(draws):
        intervals |= further
        several = [f"{name}: {TOO_FEW}" for name in few] + task.cautions(scores)
        remarks += patients_notes(patients) or several
    # The means over the columns have no interval, too, if a column has none.
    without = ["", *few] if few else []
    return Metrics(
        task.name,
        len(scores),
        patients,
        values,
        {
            name: ends
            for name, ends in intervals.items()
            if values[name] is not None and name.partition(":")[2] not in without
        },
        thresholds,
        tuple(remarks),
        outcomes=task.outcome_counts(scores),
        **details,
    )
