"""Predictions of patches, slides and patients: joined, and aggregated to scores, with thresholds and metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.tasks.calibration import Bin, DecisionCurve
from histopipe.tasks.choices import Aggregation, EvaluationLevel, TaskName, name_of
from histopipe.tasks.intervals import (
    FEWEST_PATIENTS,
    TOO_FEW,
    Difference,
    Interval,
    finite_or_none,
    interval_of,
    intervals_of,
    mean_interval,
    patients_notes,
)
from histopipe.tasks.statistics import bootstrap_draws
from histopipe.tasks.survival_curves import RiskGroup, SurvivalChecks
from histopipe.tasks.task import (
    ARRAYS,
    NO_THRESHOLDS,
    EvaluationSettings,
    Predictions,
    Thresholds,
)

ThresholdsByLevel = Mapping[str, Thresholds]
"""Thresholds by name of the level, such as "slide_mean"."""
ModelPredictions = tuple[Predictions, ThresholdsByLevel]
"""Predictions of one model, with its thresholds. A cross-validation has several."""


def with_common_patients(parts: Sequence[Predictions]) -> list[Predictions]:
    """Return predictions of one kind of task with common patient numbers, and outputs in the form of the first ones."""
    names, task = tuple(sorted({name for part in parts for name in part.patients})), parts[0].task
    return [
        replace(
            part,
            patients=names,
            patient=np.searchsorted(names, part.patients).astype(np.int32)[part.patient],
            task=task,
            output=task.converted(part.task, part.output),
        )
        for part in parts
    ]


def joined_predictions(parts: Sequence[Predictions], *, as_folds: bool = False) -> Predictions:
    """Concatenate predictions, at least one, of the same task and level. `as_folds`: items are ranked within each part."""
    parts = with_common_patients(parts)
    slides = tuple(sorted({name for part in parts for name in part.slides}))
    parts = [
        replace(part, slide=np.searchsorted(slides, part.slides).astype(np.int32)[part.slide])
        for part in parts
    ]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS
    }
    width = min(part.limits.shape[1] for part in parts)  # 0 if a model has no threshold
    return replace(
        parts[0],
        slides=slides,
        **arrays,
        limits=np.concatenate([part.limits[:, :width] for part in parts]),
        left_out=sum(part.left_out for part in parts),
        fold=np.repeat(
            np.arange(len(parts) * as_folds, dtype=np.int32), [*map(len, parts)] * as_folds
        ),
    )


def fold_of_patients(parts: Sequence[Predictions]) -> NDArray[np.int32] | None:
    """Return the (P,) part of each patient, as strata of resamples, -1 for none; None if a patient is in several parts."""
    fold = np.full(len(parts[0].patients), -1, np.int32)
    for number, part in enumerate(parts):
        patients = np.unique(part.patient)
        if (fold[patients] >= 0).any():
            return None
        fold[patients] = number
    return fold if len(parts) > 1 else None


def scores_of(
    predictions: Predictions,
    level: EvaluationLevel,
    how: Aggregation,
    settings: EvaluationSettings,
    thresholds: ThresholdsByLevel = MappingProxyType({}),
) -> Predictions:
    """Return predictions for an evaluation, or aggregate them to slides or patients with one target, in their order.

    "mean": mean output. "top_k": for two classes, the mean of the `top_k` highest probabilities of the positive class; for
    more, the same for each class, scaled to a sum of 1. "majority": share of patches for which a class is the most probable.
    """
    task, output = predictions.task.with_settings(settings), predictions.output.astype(np.float64)
    limits = np.array(thresholds.get(name_of(level, how), NO_THRESHOLDS).values)
    if level == "patch":
        return replace(
            predictions, task=task, output=output, limits=np.tile(limits, (len(output), 1))
        )
    group, _ = predictions.owner(level)
    order = np.argsort(group, kind="stable")
    starts = np.unique(group[order], return_index=True)[1]
    # NaN is the same target as NaN.
    ordered = np.nan_to_num(predictions.target[order], nan=np.inf)
    lowest, highest = (
        reduction.reduceat(ordered, starts, axis=0) for reduction in (np.minimum, np.maximum)
    )
    one = (lowest == highest).all(axis=1)
    return replace(
        predictions.rows(order[starts][one]),
        task=task,
        level=level,
        target=np.where(np.isinf(lowest), np.nan, lowest)[one],
        output=task.aggregate(output[order], starts, how, settings.top_k)[one],
        limits=np.tile(limits, (int(one.sum()), 1)),
        left_out=int((~one).sum()),
    )


def joined_scores(
    parts: Sequence[ModelPredictions],
    level: EvaluationLevel,
    how: Aggregation,
    settings: EvaluationSettings,
    *,
    within_folds: bool = True,
) -> tuple[Predictions, tuple[str, ...]]:
    """Return the scores of all parts at one level, and notes on their thresholds.

    All parts have the same numbering of patients. `within_folds`: metrics rank the items of each part alone.
    """
    each = [scores_of(part, level, how, settings, thresholds) for part, thresholds in parts]
    notes = {thresholds.get(name_of(level, how), NO_THRESHOLDS).note for _, thresholds in parts}
    # The numbers of patients in a single part stay unchanged, since resamples depend on them.
    scores = each[0] if len(each) == 1 else joined_predictions(each, as_folds=within_folds)
    return scores, tuple(sorted(notes - {""}))


def mean_resamples(
    each: Sequence[Predictions], draws: NDArray[np.float64], seed: int
) -> dict[str, NDArray[np.float64]]:
    """Return the mean of each metric over the models of several seeds, (1 + R,): of all, then of each resample.

    A resample draws patients, (R, P) `draws`, which are the same for all models; and of S > 1 seeds S - 1, so that the
    variance of the means is that of S seeds.

    Source:
        J. N. K. Rao and C. F. J. Wu, Resampling inference with complex survey data, JASA 83 (1988).
    """
    weights = np.vstack([np.ones(draws.shape[1]), draws])
    values = [
        part.compute(weights[:, : part.patients])
        for part in (scores.task.statistics(scores) for scores in each)
    ]
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(each), size=(max(1, len(each) - 1), len(draws)))
    means = {}
    for name in values[0]:
        of_seeds = np.stack([of_seed[name] for of_seed in values])
        drawn = np.take_along_axis(of_seeds[:, 1:], chosen, axis=0).mean(axis=0)
        means[name] = np.append(of_seeds[:, 0].mean(), drawn)
    return means


def mean_intervals(
    each: Sequence[Predictions],
    draws: NDArray[np.float64],
    resampled: Mapping[str, NDArray[np.float64]],
) -> dict[str, Interval]:
    """Return 95 % intervals of the means over the models of several seeds, from the result of `mean_resamples`.

    They hold the mean interval of the seeds, which has the rules for few patients and for metrics at an end of their range,
    and with several seeds that of the resamples.
    """
    patients, intervals = len(np.unique(each[0].patient)), {}
    of_seeds = [
        intervals_of(part, draws[:, : part.patients], patients)[0]
        for part in (scores.task.statistics(scores) for scores in each)
    ]
    for name, values in resampled.items():
        ends = mean_interval([of_seed.get(name) for of_seed in of_seeds])
        if ends is not None:
            low, high = (len(each) > 1 and interval_of(values[1:], patients)) or ends
            intervals[name] = min(low, ends[0]), max(high, ends[1])
    return intervals


def differences_of(
    scores: Sequence[Predictions], other_scores: Sequence[Predictions], draws: NDArray[np.float64]
) -> dict[str, Difference]:
    """Return the metrics of `other_scores` minus those of `scores`, means over their seeds.

    Intervals are from resampling the same patients, and the seeds. `draws` is (R, P): how often each patient is drawn in
    each resample.
    """
    # The runs may name the patient of an item differently, so the patients of the first are used for all.
    patient, differences = scores[0].patient, {}
    patients = len(np.unique(patient))
    each = ([replace(part, patient=patient) for part in run] for run in (scores, other_scores))
    subtracted, minuends = (mean_resamples(run, draws, seed) for seed, run in enumerate(each))
    for name, values in minuends.items():
        value, *resampled = values - subtracted[name]
        has_interval = resampled and patients >= FEWEST_PATIENTS and np.isfinite(value)
        interval = interval_of(np.array(resampled), patients) if has_interval else None
        differences[name] = Difference(finite_or_none(value), interval)
    return differences


def paired_differences(
    first: Predictions, other: Predictions, settings: EvaluationSettings
) -> dict[str, dict[str, Difference]]:
    """Return by level the metrics of predictions minus those of the first ones, on their common slides or patients."""
    names = sorted({*first.ids("slide")} & {*other.ids("slide")})
    parts = []
    for part in with_common_patients([first, other]):
        row_of = {name: row for row, name in enumerate(part.ids("slide"))}
        parts.append(part.rows(np.array([row_of[name] for name in names], np.intp)))
    draws = bootstrap_draws(len(parts[0].patients), settings.resamples, settings.seed)
    scores = {
        name_of(level, how): [scores_of(part, level, how, settings) for part in parts]
        for level, how in first.task.levels(first.level)
    }
    return {
        name: differences_of(both[:1], both[1:], draws)
        for name, both in scores.items()
        if len(both[0])
    }


RULE = re.compile(
    r"youden|(?P<of>sensitivity|specificity)[:=](?P<least>0?\.\d+|1(\.0*)?)|(?P<fixed>0?\.\d+)"
)
"""Values of `--threshold`."""
EVEN = 0.5
"""Threshold that treats both classes alike."""
FALLBACK = f"threshold {EVEN}"
"""Start of a note on why no threshold was chosen."""


def check_rule(rule: str) -> re.Match[str]:
    """Return the match of a rule. Raise UsageError if the text is not a rule."""
    match = RULE.fullmatch(rule)
    if match is None:
        raise UsageError(
            "--threshold",
            found=repr(rule),
            expected="youden, sensitivity:0.95, specificity:0.95, or a probability such as 0.5",
        )
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
        reason = "validation has only one class" if len(event) else "there is no validation set"
        return EVEN, f"{FALLBACK} used: {reason}"
    thresholds, score_number = np.unique(-probability, return_inverse=True)
    # The ROC curve: false and true positive rates at decreasing scores.
    false_positive, true_positive = (
        np.append(0, np.cumsum(np.bincount(score_number[members], minlength=len(thresholds))))
        / members.sum()
        for members in (~event, event)
    )
    least = float(match["least"] or 0)
    places = {
        None: np.argmax(true_positive - false_positive),
        "sensitivity": np.argmax(true_positive >= least),
        "specificity": np.flatnonzero(1 - false_positive >= least)[-1],
    }
    return _half_way(-thresholds.astype(np.float64), int(places[match["of"]])), ""


def _half_way(scores: NDArray[np.float64], positives: int) -> float:
    """Return a threshold for which the first `positives` of the decreasing scores are positive."""
    if positives == 0:
        return float(np.nextafter(scores[0], np.inf))
    last, after = scores[positives - 1], scores[positives] if positives < len(scores) else 0.0
    middle = (last + after) / 2
    return float(middle if middle > after else last)


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
            notes = [note for note in notes if "intervals" not in note]
            notes += patients_notes(value["patients"])
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
