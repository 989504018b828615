"""Predictions of patches, slides and patients as arrays: joined, and aggregated to scores."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.tasks.calibration import Bin, DecisionCurve
from histopipe.tasks.choices import Aggregation, EvaluationLevel, TaskName, name_of
from histopipe.tasks.intervals import TOO_FEW, intervals_of, patients_notes, stored_intervals
from histopipe.tasks.survival import RiskGroup
from histopipe.tasks.task import (
    NO_THRESHOLDS,
    EvaluationSettings,
    Scores,
    Task,
    Thresholds,
    known,
    labels_of,
)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of patches; of slides or patients if the model takes bags.

    Attributes:
        task: what is predicted.
        slides, patients: slide ids and patients, by number.
        slide, patient: (N,) int32, slide and patient of each row.
        x_l0, y_l0: (N,) int64, top left corner, level-0 pixels; 0 if a row is not a patch.
        target: (N, T) float64, NaN for missing values.
        output: (N, C) float32.
        level: level of the rows; in rows of patients, `slide` is the patient.
    """

    task: Task
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    slide: NDArray[np.int32]
    patient: NDArray[np.int32]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    target: NDArray[np.float64]
    output: NDArray[np.float32]
    level: EvaluationLevel = "patch"

    @property
    def label(self) -> NDArray[np.int32]:
        """(N,) class numbers of a classification; -1 for none."""
        return labels_of(self.target)

    def __len__(self) -> int:
        return len(self.target)

    def rows(self, rows: NDArray[Any]) -> Predictions:
        """Return some of the rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _ARRAYS})

    def known(self) -> Predictions:
        """Return the rows of which a target is known."""
        return self.rows(np.flatnonzero(np.isfinite(self.target).any(axis=1)))

    def without_targets(self) -> Predictions:
        """Return the same predictions as of unknown targets, so that none is left out when they are aggregated."""
        return replace(self, target=np.full_like(self.target, np.nan))

    def owner(self, level: EvaluationLevel) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Return the (N,) slide or patient of each row, and their names."""
        return (self.patient, self.patients) if level == "patient" else (self.slide, self.slides)

    @property
    def unit(self) -> EvaluationLevel:
        """The level of a table of slides: patients if these were predicted."""
        return "patient" if self.level == "patient" else "slide"


_ARRAYS = ("slide", "patient", "x_l0", "y_l0", "target", "output")
ThresholdsByLevel = Mapping[str, Thresholds]
"""Thresholds by name of the level, such as "slide_mean"."""
ModelPredictions = tuple[Predictions, ThresholdsByLevel]
"""Predictions of one model, with its thresholds. A cross-validation has several."""


def with_common_patients(parts: Sequence[Predictions]) -> list[Predictions]:
    """Return the same predictions, with common patient numbers, and outputs in the form of the first ones."""
    names = tuple(sorted({name for part in parts for name in part.patients}))
    number = {name: i for i, name in enumerate(names)}
    renumbered = []
    for part in parts:
        new = np.array([number[name] for name in part.patients], np.int32)
        first = parts[0].task
        same = type(part.task) is type(first)
        renumbered.append(
            replace(
                part, patients=names, patient=new[part.patient], task=first if same else part.task,
                output=first.converted(part.task, part.output) if same else part.output,
            )
        )  # fmt: skip
    return renumbered


def joined_predictions(parts: Sequence[Predictions]) -> Predictions:
    """Concatenate predictions, at least one, of the same task and level."""
    slides = sorted({name for part in parts for name in part.slides})
    number = {name: i for i, name in enumerate(slides)}
    renumbered = [
        replace(part, slide=np.array([number[name] for name in part.slides], np.int32)[part.slide])
        for part in with_common_patients(parts)
    ]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in renumbered]) for name in _ARRAYS
    }
    return replace(renumbered[0], slides=tuple(slides), **arrays)


def scores_of(
    predictions: Predictions,
    level: EvaluationLevel,
    how: Aggregation,
    settings: EvaluationSettings,
    thresholds: ThresholdsByLevel = MappingProxyType({}),
) -> Scores:
    """Return the scores of predictions, or aggregate them to slides or patients with one target.

    "mean": mean output. "top_k": for two classes, the mean of the `top_k` highest probabilities of the positive class; for
    more, the same for each class, scaled to a sum of 1. "majority": share of patches for which a class is the most probable.
    """
    task, target = predictions.task.with_settings(settings), predictions.target
    output, patient = predictions.output.astype(np.float64), predictions.patient
    limits = np.array(thresholds.get(name_of(level, how), NO_THRESHOLDS).values)
    if level == "patch":
        items = np.arange(len(target))
        return Scores(task, target, output, patient, items, np.tile(limits, (len(target), 1)))
    group, _ = predictions.owner(level)
    order = np.argsort(group, kind="stable")
    items, starts = np.unique(group[order], return_index=True)
    # NaN is the same target as NaN.
    ordered = np.nan_to_num(target[order], nan=np.inf)
    lowest, highest = (
        reduction.reduceat(ordered, starts, axis=0) for reduction in (np.minimum, np.maximum)
    )
    one = (lowest == highest).all(axis=1)
    return Scores(
        task, np.where(np.isinf(lowest), np.nan, lowest)[one],
        task.aggregate(output[order], starts, how, settings.top_k)[one], patient[order][starts][one],
        items[one].astype(np.int64), np.tile(limits, (int(one.sum()), 1)), int((~one).sum()),
    )  # fmt: skip


def joined_scores(
    parts: Sequence[ModelPredictions],
    level: EvaluationLevel,
    how: Aggregation,
    settings: EvaluationSettings,
) -> tuple[Scores, tuple[str, ...]]:
    """Return the scores of all parts at one level, and notes on their thresholds. Items are numbered part << 32 | item."""
    each = [scores_of(part, level, how, settings, thresholds) for part, thresholds in parts]
    chosen = [thresholds.get(name_of(level, how), NO_THRESHOLDS) for _, thresholds in parts]
    width = min(scores.limits.shape[1] for scores in each)  # 0 if a model has no threshold
    joined = Scores(
        each[0].task,
        np.concatenate([scores.target for scores in each]),
        np.concatenate([scores.output for scores in each]),
        np.concatenate([scores.patient for scores in each]),
        np.concatenate([scores.item + (number << 32) for number, scores in enumerate(each)]),
        np.concatenate([scores.limits[:, :width] for scores in each]),
        sum(scores.left_out for scores in each),
    )
    return joined, tuple(sorted({limits.note for limits in chosen if limits.note}))


RULE = re.compile(
    r"youden|(?P<of>sensitivity|specificity)[:=](?P<least>0?\.\d+|1(\.0*)?)|(?P<fixed>0?\.\d+)"
)
"""Values of `--threshold`."""
EVEN = 0.5
FALLBACK = f"threshold {EVEN}"
"""Start of a note on why no threshold was chosen."""


def check_rule(rule: str) -> re.Match[str]:
    """Return the match of a rule. Raise UsageError if the text is not a rule."""
    match = RULE.fullmatch(rule)
    if match is None:
        raise UsageError(
            "--threshold", found=repr(rule),
            expected="youden, sensitivity:0.95, specificity:0.95, or a probability such as 0.5",
        )  # fmt: skip
    return match


def choose_threshold(
    event: NDArray[np.bool_], probability: NDArray[np.float64], rule: str
) -> tuple[float, str]:
    """Return the threshold that a rule chooses for (N,) events and their probabilities, with a note or "".

    "youden": highest sensitivity + specificity. "sensitivity:S": highest threshold with at least this sensitivity. "specificity:S":
    lowest threshold with at least this specificity. The threshold is half way between the last positive score and the
    next score, since scores of other data may be close to either of them.

    Source:
        W. J. Youden, Index for rating diagnostic tests, Cancer 3 (1950).
    """
    match = check_rule(rule)
    if match["fixed"]:
        return float(match["fixed"]), ""
    if event.all() or not event.any():
        return EVEN, f"{FALLBACK} used: validation has only one class"
    thresholds, score_number = np.unique(-probability, return_inverse=True)
    # The ROC curve: false and true positive rates at decreasing scores.
    false_positive, true_positive = (
        np.append(0, np.cumsum(np.bincount(score_number[members], minlength=len(thresholds))))
        / members.sum()
        for members in (~event, event)
    )
    if match["of"] is None:
        place = int(np.argmax(true_positive - false_positive))
    elif match["of"] == "sensitivity":
        place = int(np.argmax(true_positive >= float(match["least"])))
    else:
        place = int(np.flatnonzero(1 - false_positive >= float(match["least"]))[-1])
    return _half_way(-thresholds.astype(np.float64), place), ""


def _half_way(scores: NDArray[np.float64], positives: int) -> float:
    """Return a threshold for which the first `positives` of the decreasing scores are positive."""
    if positives == 0:
        return float(np.nextafter(scores[0], np.inf))
    last, after = scores[positives - 1], scores[positives] if positives < len(scores) else 0.0
    middle = (last + after) / 2
    return float(middle if middle > after else last)


_MAX_UNDEFINED = 0.05


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
