"""What is said of a set of scores: figures with intervals, confusion, calibration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.scores import Scores
from histopipe.evaluation.statistics import Statistics, Values, sensitivity, specificity

FIGURES = (
    "auc", "balanced_accuracy", "accuracy", "f1", "sensitivity", "specificity", "brier", "log_loss",
)  # fmt: skip
BINS = 10
_TAIL = 0.025
_LEAST_PATIENTS = 10
_MOST_LOST = 0.05


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """One class against the rest: how many there are, and what is known of them; None where that is not defined."""

    count: int
    auc: float | None
    sensitivity: float | None
    specificity: float | None


@dataclass(frozen=True, slots=True)
class Bin:
    """Scores of about the same probability.

    Attributes:
        low, high: of the probability.
        count: how many.
        probability, observed: their mean probability, and the share that it came true for; None for none.
    """

    low: float
    high: float
    count: int
    probability: float | None
    observed: float | None


@dataclass(frozen=True, slots=True)
class Metrics:
    """How good scores of patches, slides or patients are. None where a figure is not defined, as the AUC of one class.

    Attributes:
        count, patients: what was judged, and of how many patients.
        auc: area under the ROC curve; of more than two classes the mean over one against the rest.
        balanced_accuracy: mean sensitivity of the classes that are there.
        accuracy: share that was decided right.
        f1, sensitivity, specificity: of the positive class; of more than two classes the mean over those that are there.
        brier: mean squared error of the positive class's probability; of more than two, summed over classes.
        log_loss: mean of -ln of the probability of what is so.
        calibration_error: mean difference of probability and share observed, over the bins of `reliability`.
        threshold: of two classes, the probability from which on the positive one is decided for; None for the likeliest class, or
            where several thresholds had a part.
        intervals: 95 % by figure, from resampling patients; without those that few patients or classes leave undefined.
        confusion: rows are labels, columns decisions.
        classes: by name.
        reliability: of the positive class's probability; of more than two, of the likeliest's.
        notes: what to know about these.
    """

    count: int
    patients: int
    auc: float | None
    balanced_accuracy: float | None
    accuracy: float | None
    f1: float | None
    sensitivity: float | None
    specificity: float | None
    brier: float | None
    log_loss: float | None
    calibration_error: float | None
    threshold: float | None
    intervals: Mapping[str, tuple[float, float]]
    confusion: tuple[tuple[int, ...], ...]
    classes: Mapping[str, ClassMetrics]
    reliability: tuple[Bin, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For a JSON file; `from_json` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Metrics:
        """What `to_json` wrote.

        Raises:
            KeyError, TypeError: it is something else.
        """
        return cls(
            **{
                **value,
                "intervals": {name: tuple(ends) for name, ends in value["intervals"].items()},
                "confusion": tuple(map(tuple, value["confusion"])),
                "classes": {name: ClassMetrics(**it) for name, it in value["classes"].items()},
                "reliability": tuple(Bin(**it) for it in value["reliability"]),
                "notes": tuple(value["notes"]),
            }
        )


def decide(
    scores: Scores, positive: int | None, threshold: float | NDArray[np.float64] | None
) -> NDArray[np.intp]:
    """(N,) the class that is decided for: the positive one from a threshold on, or the likeliest."""
    if positive is None or threshold is None:
        return np.asarray(np.argmax(scores.probability, axis=1), np.intp)
    return np.where(scores.probability[:, positive] >= threshold, positive, 1 - positive)


def metrics_of(
    scores: Scores,
    classes: tuple[str, ...],
    *,
    positive: int | None,
    threshold: float | NDArray[np.float64] | None,
    draws: NDArray[np.float64],
    notes: tuple[str, ...] = (),
) -> Metrics:
    """Everything about a set of scores.

    Args:
        scores: at least one.
        classes: names, by number.
        positive: number of the positive class; None for more than two.
        threshold: of its probability; several are one for each score.
        draws: (R, P) how often each patient was drawn, from `bootstrap_draws`.
        notes: what to know about the scores.
    """
    statistics = Statistics(scores, decide(scores, positive, threshold), positive)
    whole = np.ones((1, statistics.patients))
    figures = {name: _known(values[0]) for name, values in statistics.figures(whole).items()}
    patients = len(np.unique(scores.patient))
    intervals, lost = _intervals(statistics, draws[:, : statistics.patients], patients)
    reliability = _reliability(scores, positive)
    told = [*notes, *_notes(scores, classes, patients if len(draws) else None, lost)]
    return Metrics(
        count=len(scores.label), patients=patients, **figures,
        calibration_error=_calibration_error(reliability),
        threshold=float(threshold) if isinstance(threshold, int | float) else None,
        intervals={name: ends for name, ends in intervals.items() if figures[name] is not None},
        confusion=tuple(
            tuple(int(n) for n in row) for row in statistics.confusion(whole)[0].tolist()
        ),
        classes=_by_class(statistics, classes, whole), reliability=reliability, notes=tuple(told),
    )  # fmt: skip


def bootstrap_draws(patients: int, resamples: int, seed: int) -> NDArray[np.float64]:
    """(R, P) how often each patient is drawn when as many are drawn as there are, with replacement."""
    rng = np.random.default_rng(seed)
    share = np.full(patients, 1 / patients)
    return rng.multinomial(patients, share, size=resamples).astype(np.float64)


def interval_of(values: Values, patients: int) -> tuple[float, float] | None:
    """The 95 % interval from the values of resamples; None if fewer than half of them are defined.

    Percentiles, moved out as a t interval is wider than a normal one: plain ones are too narrow for few patients.

    Args:
        values: (R,), NaN where not defined.
        patients: how many were resampled, at least two.

    Source:
        T. Hesterberg, What teachers should know about the bootstrap, The American Statistician 69 (2015), "expanded percentile".
    """
    # Late: `--help` must not wait for it.
    from scipy.stats import norm, t

    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or not len(defined):
        return None
    reach = math.sqrt(patients / (patients - 1)) * t.ppf(1 - _TAIL, patients - 1)
    low, high = np.quantile(defined, [norm.cdf(-reach), norm.cdf(reach)])
    return float(low), float(high)


def _intervals(
    statistics: Statistics, draws: NDArray[np.float64], patients: int
) -> tuple[dict[str, tuple[float, float]], float]:
    """Intervals by figure, and the share of resamples that left some figure undefined."""
    if not len(draws) or patients < 2:
        return {}, 0.0
    figures = statistics.figures(draws)
    ends = {name: interval_of(values, patients) for name, values in figures.items()}
    lost = max(float(np.isnan(figures[name]).mean()) for name in FIGURES)
    return {name: interval for name, interval in ends.items() if interval is not None}, lost


def _notes(
    scores: Scores, classes: tuple[str, ...], patients: int | None, lost: float
) -> list[str]:
    present = np.unique(scores.label)
    missing = [name for number, name in enumerate(classes) if number not in present]
    notes = []
    if missing:
        notes.append(f"no {' and no '.join(missing)} here")
    if scores.left_out:
        notes.append(f"{scores.left_out} with patches of several labels left out")
    if patients is not None and patients < _LEAST_PATIENTS:
        notes.append(f"{patients} patients: too few for intervals to be trusted")
    if not missing and lost > _MOST_LOST:
        notes.append(f"{lost:.0%} of the resamples lack a class and are left out of the intervals")
    return notes


def _by_class(
    statistics: Statistics, classes: tuple[str, ...], whole: Values
) -> dict[str, ClassMetrics]:
    confusion, areas = statistics.confusion(whole), statistics.areas(whole)[0]
    found, passed = sensitivity(confusion)[0], specificity(confusion)[0]
    counts = confusion[0].sum(axis=1).astype(int).tolist()
    return {
        name: ClassMetrics(counts[i], _known(areas[i]), _known(found[i]), _known(passed[i]))
        for i, name in enumerate(classes)
    }


def _reliability(scores: Scores, positive: int | None) -> tuple[Bin, ...]:
    if positive is None:
        probability = scores.probability.max(axis=1)
        so = scores.probability.argmax(axis=1) == scores.label
    else:
        probability, so = scores.probability[:, positive], scores.label == positive
    place = np.minimum((probability * BINS).astype(int), BINS - 1)
    bins = []
    for number in range(BINS):
        here = place == number
        count = int(here.sum())
        means = (float(probability[here].mean()), float(so[here].mean())) if count else (None, None)
        bins.append(Bin(number / BINS, (number + 1) / BINS, count, *means))
    return tuple(bins)


def _calibration_error(reliability: tuple[Bin, ...]) -> float:
    total = sum(it.count for it in reliability)
    return sum(
        it.count * abs(it.probability - it.observed) / total
        for it in reliability
        if it.probability is not None and it.observed is not None
    )


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
