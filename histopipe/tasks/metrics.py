"""Metrics of scores: values with confidence intervals, thresholds, and what single tasks add."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.tasks.calibration import Bin, DecisionCurve
from histopipe.tasks.choices import TaskName
from histopipe.tasks.classification import ClassMetrics
from histopipe.tasks.intervals import TOO_FEW, intervals_of, patients_notes, stored_intervals
from histopipe.tasks.survival import RiskGroup
from histopipe.tasks.task import NO_THRESHOLDS, Scores, Thresholds, known
from histopipe.tasks.thresholds import FALLBACK

_MAX_UNDEFINED = 0.05


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
    """

    task: TaskName
    count: int
    patients: int
    values: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float]]
    thresholds: Thresholds = NO_THRESHOLDS
    notes: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    classes: Mapping[str, ClassMetrics] = dataclasses.field(default_factory=dict)
    reliability: tuple[Bin, ...] = ()
    decision_curve: DecisionCurve | None = None
    groups: tuple[RiskGroup, ...] = ()
    log_rank: float | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a metric by its name: `metrics.auc`."""
        if name != "values" and name in self.values:
            return self.values[name]
        raise AttributeError(f"{name} is no metric of {type(self).__name__}")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict, with the metrics by name at the same level as the other fields."""
        value = dataclasses.asdict(self)
        return {**value.pop("values"), **value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Metrics:
        """Create the metrics from the result of `to_json`, or from files of earlier versions.

        Raises:
            KeyError, TypeError: the value has the wrong form.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value[name] for name in names & value.keys()} | stored_intervals(value)
        # Earlier versions had the metrics of other tasks than classification in a field.
        by_name = {
            name: metric for name, metric in value.items() if name not in {*names, "threshold"}
        }
        fields["values"] = value.get("figures", by_name)
        fields.setdefault("task", "classification")
        limits = value["thresholds"] if "thresholds" in value else [value["threshold"]]
        if isinstance(limits, list):  # of an earlier version
            note = next((text for text in value["notes"] if text.startswith(FALLBACK)), "")
            limits = {"values": [limit for limit in limits if limit is not None], "note": note}
        fields["thresholds"] = Thresholds(tuple(limits["values"]), limits["note"])
        fields["confusion"] = tuple(map(tuple, value.get("confusion", ())))
        fields["classes"] = {
            name: ClassMetrics(**metrics) for name, metrics in value.get("classes", {}).items()
        }
        fields["reliability"] = tuple(Bin(**place) for place in value.get("reliability", ()))
        curve = value.get("decision_curve")
        if curve is not None:
            fields["decision_curve"] = DecisionCurve(
                **{name: tuple(values) for name, values in curve.items()}
            )
        fields["groups"] = tuple(map(RiskGroup.from_json, value.get("groups", ())))
        return cls(**fields)


def metrics_of(
    scores: Scores,
    *,
    draws: NDArray[np.float64],
    notes: tuple[str, ...] = (),
    thresholds: Thresholds = NO_THRESHOLDS,
) -> Metrics:
    """Compute all metrics of at least one score. `draws` are from `bootstrap_draws`; `notes` come first."""
    task = scores.task
    statistics = task.statistics(scores)
    values = statistics.compute(np.ones((1, statistics.patients)))
    details = task.details(scores, statistics)
    metric_values = {name: known(value[0]) for name, value in values.items()} | details.values
    patients = len(np.unique(scores.patient))
    intervals, undefined = intervals_of(statistics, draws[:, : statistics.patients], patients)
    remarks = [*notes, *details.remarks]
    if scores.left_out:
        remarks.append(f"{scores.left_out} excluded, because they have several {task.several}")
    if (
        details.complete
        and metric_values[next(iter(task.main))] is not None
        and undefined > _MAX_UNDEFINED
    ):
        remarks.append(
            f"{undefined:.0%} of the resamples {task.undefined}: excluded from the intervals"
        )
    if len(draws):
        intervals |= details.intervals
        remarks += patients_notes(patients) or [f"{name}: {TOO_FEW}" for name in details.few]
    # The means over the columns have no interval, too, if a column has none.
    without = ["", *details.few] if details.few else []
    return Metrics(
        task.name, len(scores.target), patients, metric_values,
        {
            name: ends for name, ends in intervals.items()
            if metric_values[name] is not None and name.partition(":")[2] not in without
        },
        thresholds, tuple(remarks), **details.fields,
    )  # fmt: skip
