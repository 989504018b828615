"""Predictions of patches, slides and patients: joined, aggregated to scores, resampled, and decided by thresholds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.system.arrays import FloatArray
from histopipe.tasks.choices import Aggregation, EvaluationLevel, name_of
from histopipe.tasks.intervals import (
    FEWEST_PATIENTS,
    Difference,
    Interval,
    finite_or_none,
    interval_of,
    mean_interval,
)
from histopipe.tasks.statistics import bootstrap_draws, intervals_of

if TYPE_CHECKING:
    from histopipe.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation.

    Attributes:
        positive: positive class of two; None for the last by name.
        threshold: rule that chooses the threshold; see `choose_threshold`.
        top_k: number of patches for the aggregation "top_k".
        resamples: number of bootstrap resamples of the patients; 0 for no intervals.
        seed: seed of the resamples.
        horizon: time at which predicted and observed survival are compared; None for the median follow-up.
        log_hazards: whether risks are the logarithms of hazards, as of Cox' model.
    """

    positive: str | None = None
    threshold: str = "youden"
    top_k: int = 10
    resamples: int = 1000
    seed: int = 1
    horizon: float | None = None
    log_hazards: bool = False


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Decision thresholds at one level, chosen on validation data, and why the rule was not used.

    `values` has the probability of the positive class, one for each label, or the risk between the risk groups. It is
    empty if nothing is decided by a threshold.
    """

    values: tuple[float, ...] = ()
    note: str = ""


NO_THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of patches, slides or patients: of a model, or aggregated to a level for an evaluation.

    Attributes:
        task: what is predicted; of an evaluation with its positive class.
        slides, patients: slide ids and patients, by number.
        slide, patient: (N,) int32, slide and patient of each row; the patient is the unit of resampling.
        x_l0, y_l0: (N,) int64, top left corner, level-0 pixels; 0 if a row is not a patch.
        target: (N, T) float64, NaN for missing values.
        output: (N, C) float32; float64 if aggregated.
        level: level of the rows. Of rows of patients, `slide` is the patient, or the first of the aggregated slides.
        limits: (N, L) float64, the thresholds of the model of each row; L is 0 without thresholds.
        left_out: number of slides or patients left out because their patches have different targets.
        fold: (N,) number of the fold of each row, within which items are ranked; empty if all are ranked together.
    """

    task: Task
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    slide: NDArray[np.int32]
    patient: NDArray[np.int32]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    target: FloatArray
    output: NDArray[Any]
    level: EvaluationLevel = "patch"
    limits: FloatArray = field(default_factory=partial(np.empty, (0, 0)))
    left_out: int = 0
    fold: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def folds(self) -> NDArray[np.int32]:
        """(N,) number of the fold of each row; 0 if all are ranked together."""
        return self.fold if self.fold.size else np.zeros(len(self), np.int32)

    @property
    def label(self) -> NDArray[np.int32]:
        """(N,) class numbers of a classification; -1 for none."""
        return labels_of(self.target)

    def __len__(self) -> int:
        return len(self.target)

    def rows(self, rows: NDArray[Any]) -> Predictions:
        """Return some of the rows."""
        return replace(
            self,
            limits=self.limits[rows] if self.limits.size else self.limits,
            fold=self.fold[rows] if self.fold.size else self.fold,
            **{name: getattr(self, name)[rows] for name in ARRAYS},
        )

    def by_column(self) -> Iterator[tuple[str, Predictions]]:
        """Return each column of the task, with the rows that have a target in it, and its target, output and threshold only.

        One after another: the rows of all columns together may not fit into memory.
        """
        return (
            (
                name,
                replace(
                    self,
                    target=self.target[:, i : i + 1],
                    output=self.output[:, i : i + 1],
                    limits=self.limits[:, i : i + 1],
                ).labelled(),
            )
            for i, name in enumerate(self.task.columns)
        )

    def labelled(self) -> Predictions:
        """Return the rows that have a target."""
        return self.rows(np.flatnonzero(np.isfinite(self.target).any(axis=1)))

    def without_targets(self) -> Predictions:
        """Return the same predictions as of unknown targets, so that none is left out when they are aggregated."""
        return replace(self, target=np.full_like(self.target, np.nan))

    def owner(self, level: EvaluationLevel) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Return the (N,) slide or patient of each row, and their names."""
        return (self.patient, self.patients) if level == "patient" else (self.slide, self.slides)

    def ids(self, level: EvaluationLevel) -> list[str]:
        """Return the name of the slide or patient of each row."""
        numbers, names = self.owner(level)
        return [names[number] for number in numbers.tolist()]

    @property
    def unit(self) -> EvaluationLevel:
        """The level of a table of slides: patients if these were predicted."""
        return "patient" if self.level == "patient" else "slide"


ARRAYS = ("slide", "patient", "x_l0", "y_l0", "target", "output")
"""Attributes of predictions with a row for each prediction."""


def labels_of(target: FloatArray) -> NDArray[np.int32]:
    """Return the (N,) class numbers of (N, 1) targets of a classification; -1 for none."""
    return np.nan_to_num(target[:, 0], nan=-1).astype(np.int32)


ThresholdsByLevel = Mapping[str, Thresholds]
"""Thresholds by name of the level, such as "slide_mean"."""
ModelPredictions = tuple[Predictions, ThresholdsByLevel]
"""Predictions of one model, with its thresholds. A cross-validation has several."""


def with_common_patients(parts: Sequence[Predictions]) -> list[Predictions]:
    """Return predictions of one kind of task with common patient numbers, and outputs in the form of the first ones."""
    names, task = tuple(sorted({name for part in parts for name in part.patients})), parts[0].task
    ordered = np.array(names)  # once, not for each part
    return [
        replace(
            part,
            patients=names,
            patient=np.searchsorted(ordered, part.patients).astype(np.int32)[part.patient],
            task=task,
            output=task.converted(part.task, part.output),
        )
        for part in parts
    ]


def joined_predictions(parts: Sequence[Predictions], *, as_folds: bool = False) -> Predictions:
    """Concatenate predictions, at least one, of the same task and level. `as_folds`: items are ranked within each part."""
    parts = with_common_patients(parts)
    slides = tuple(sorted({name for part in parts for name in part.slides}))
    ordered = np.array(slides)
    parts = [
        replace(part, slide=np.searchsorted(ordered, part.slides).astype(np.int32)[part.slide])
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

    "youden": highest sensitivity + specificity. "sensitivity:S": highest threshold with at least this sensitivity.
    "specificity:S": lowest threshold with at least this specificity. The threshold is half way between the last
    positive score and the next score, since scores of other data may be close to either of them.

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
