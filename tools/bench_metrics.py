"""Measure coverage and cost of the 95 % confidence intervals of `histopipe.evaluation`: `python tools/bench_metrics.py`.

Predictions are synthetic: one or ten patches per patient, half of the patients ill. A random shift per patient has a
third of the variance.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.metrics import log_loss, roc_auc_score

from histopipe.evaluation import evaluate
from histopipe.evaluation.breakdown import find_shortcut
from histopipe.evaluation.evaluate import fit_temperature, tempered
from histopipe.evaluation.subgroups import subgroups
from histopipe.splits.slide_table import SlideEntry
from histopipe.tasks.classification import Classification
from histopipe.tasks.metrics import Metrics, metrics_of
from histopipe.tasks.predictions import (
    EvaluationSettings,
    ModelPredictions,
    Predictions,
    Thresholds,
)
from histopipe.tasks.statistics import bootstrap_draws

TASK = Classification(classes=("well", "ill"))
FIGURES = (
    "auc",
    "average_precision",
    "balanced_accuracy",
    "sensitivity",
    "specificity",
    "f1",
    "brier",
    "calibration_error",
    "calibration_intercept",
    "calibration_slope",
)
PATCHES = 10


def synthetic_scores(
    rng: np.random.Generator,
    patients: int,
    apart: float,
    patches: int = PATCHES,
    prevalence: float = 0.5,
) -> Predictions:
    """Draw scores whose classes differ by `apart` standard deviations. `prevalence` is the share of ill patients."""
    # Random, so that the share of ill patients varies between samples as it varies between resamples.
    ill = np.repeat(rng.random(patients) < prevalence, patches)
    shift = np.repeat(rng.normal(size=patients), patches) * math.sqrt(1 / 3)
    value = apart * ill + shift + rng.normal(size=len(ill)) * math.sqrt(2 / 3)
    p = norm.cdf(value - apart / 2 + norm.ppf(prevalence))
    names, rows = tuple(map(str, range(patients))), np.repeat(np.arange(patients), patches)
    patient, zeros = rows.astype(np.int32), np.zeros(len(ill), np.int64)
    return Predictions(
        TASK,
        names,
        names,
        patient,
        patient,
        zeros,
        zeros,
        ill[:, None].astype(np.float64),
        np.stack([1 - p, p], axis=1),
        limits=np.full((len(ill), 1), 0.5),
    )


def evaluated(scores: Predictions, draws: NDArray[np.float64]) -> Metrics:
    """Compute metrics with intervals."""
    return metrics_of(scores, draws=draws)


def coverage(
    patients: int, apart: float, samples: int, patches: int, prevalence: float = 0.5
) -> dict[str, float]:
    """Return the share of samples whose interval contains the metric of 50,000 patients.

    A sample without interval counts as one that does not contain it.
    """
    rng = np.random.default_rng(patients)
    draw = partial(synthetic_scores, rng, apart=apart, patches=patches, prevalence=prevalence)
    truth = evaluated(draw(50_000), np.zeros((0, 50_000)))
    hits = dict.fromkeys(FIGURES, 0)
    for number in range(samples):
        intervals = evaluated(draw(patients), bootstrap_draws(patients, 1000, number)).intervals
        for name in FIGURES:
            low, high = intervals.get(name, (math.inf, -math.inf))
            hits[name] += low <= getattr(truth, name) <= high
    return {name: count / samples for name, count in hits.items()}


OF_GROUPS = (
    "auc",
    "average_precision",
    "balanced_accuracy",
    "sensitivity",
    "specificity",
    "brier",
)


def group_coverage(patients: int, apart: tuple[float, float], samples: int) -> dict[str, float]:
    """Return the share of samples whose interval of the difference of a group from the rest holds the true one.

    A third of the patients is in the group. `apart` separates the classes of the group, and of the rest.
    """
    rng = np.random.default_rng(patients)
    group, rest = (
        evaluated(synthetic_scores(rng, 50_000, separation, 1), np.zeros((0, 50_000)))
        for separation in apart
    )
    hits = dict.fromkeys(OF_GROUPS, 0)
    of_group = max(patients // 3, 10)
    for number in range(samples):
        drawn = [
            synthetic_scores(rng, count, separation, 1)
            for count, separation in zip((of_group, patients - of_group), apart, strict=True)
        ]
        part, slides = _as_slides(drawn)
        settings = EvaluationSettings(resamples=1000, seed=number)
        (by_site,) = subgroups([part], slides, {"site": None}, settings)
        for name in OF_GROUPS:
            true = getattr(group, name) - getattr(rest, name)
            ends = by_site.groups[0].differences[name].interval
            hits[name] += ends is not None and ends[0] <= true <= ends[1]
    return {name: count / samples for name, count in hits.items()}


def _as_slides(drawn: Sequence[Predictions]) -> tuple[ModelPredictions, list[SlideEntry]]:
    """Return scores of groups as those of slides, with the threshold 0.5, and the slides, with the group as site."""
    target, output = (
        np.concatenate([getattr(scores, name) for scores in drawn]) for name in ("target", "output")
    )
    each, zeros = np.arange(len(target), dtype=np.int32), np.zeros(len(target), np.int64)
    names = tuple(map(str, range(len(target))))
    predictions = Predictions(
        TASK, names, names, each, each, zeros, zeros, target, output.astype(np.float32), "slide"
    )
    sites = np.repeat(np.arange(len(drawn)), [len(scores.target) for scores in drawn])
    slides = [
        SlideEntry(slide=name, patient=name, site=str(site), test=1)
        for name, site in zip(names, sites.tolist(), strict=True)
    ]
    limits = Thresholds((0.5,))
    return (predictions, {"slide_mean": limits, "patient_mean": limits}), slides


def false_alarms(data_sets: int) -> float:
    """Return the share of random data sets, without a confounder, in which a shortcut is reported."""
    alarms = 0
    for seed in range(data_sets):
        rng = np.random.default_rng(seed)
        slides = [
            SlideEntry(
                slide=f"s{i}",
                patient=f"p{i}",
                label="nt"[rng.integers(2)],
                train=1,
                site=str(rng.integers(4)),
                measured={"route": str(rng.integers(2)), "vendor": str(rng.integers(3))},
            )
            for i in range(80)
        ]
        shortcut = find_shortcut(slides, model_auc=0.5, seed=seed)
        alarms += shortcut is not None and shortcut.warning
    return alarms / data_sets


def temperature_losses(patients: int, samples: int) -> tuple[float, float, float]:
    """Return the mean log loss of new patients: without temperature, with one, and with one that has no prior.

    The logits of a good model (AUC 0.97) are multiplied by a random factor, whose logarithm has a standard deviation of 0.5.
    """
    rng = np.random.default_rng(patients)
    losses = []
    for _ in range(samples):
        factor = math.exp(rng.normal() / 2)
        drawn, new = (_logits(rng, count, factor) for count in (patients, 4000))
        temperatures = [1.0, fit_temperature(drawn)[0]]
        with mock.patch.object(evaluate, "_PRIOR", 1e9):
            temperatures.append(fit_temperature(drawn)[0])
        losses.append(
            [
                log_loss(new.label, tempered(new.output, (divisor,)), labels=[0, 1])
                for divisor in temperatures
            ]
        )
    none, ours, plain = np.mean(losses, axis=0)
    return float(none), float(ours), float(plain)


def _logits(rng: np.random.Generator, patients: int, factor: float) -> Predictions:
    true = 4 * rng.normal(size=patients)
    ill = (rng.random(patients) < 1 / (1 + np.exp(-true))).astype(np.int32)
    p = 1 / (1 + np.exp(-true * factor))
    each, zeros = np.arange(patients, dtype=np.int32), np.zeros(patients, np.int64)
    names = tuple(map(str, range(patients)))
    return Predictions(
        TASK,
        names,
        names,
        each,
        each,
        zeros,
        zeros,
        ill[:, None].astype(np.float64),
        np.stack([1 - p, p], axis=1).astype(np.float32),
        "slide",
    )


def seconds(task: Callable[[], object]) -> float:
    """Return the duration of a call."""
    began = time.perf_counter()
    task()
    return time.perf_counter() - began


def cost(patients: int, rounds: int) -> tuple[float, float]:
    """Return median seconds per resample: of all metrics by our code, and of the AUC only by scikit-learn."""
    scores = synthetic_scores(np.random.default_rng(1), patients, 1.2)
    draws = bootstrap_draws(patients, 10, 1)
    ready = TASK.statistics(scores)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(seconds(lambda: ready.compute(draws)) / len(draws))
        weights = [draw[scores.patient] for draw in draws]
        theirs.append(
            statistics.median(
                seconds(
                    lambda w=weight: roc_auc_score(  # type: ignore[misc]
                        scores.label, scores.output[:, 1], sample_weight=w
                    )
                )
                for weight in weights
            )
        )
    return statistics.median(ours), statistics.median(theirs)


def main() -> None:
    """Print the tables of coverage and cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    samples = parser.parse_args().samples
    print(f"| patches per patient | prevalence | patients | true AUC | {' | '.join(FIGURES)} |")
    for patches, prevalence in product((1, PATCHES), (0.5, 0.25, 0.1)):
        for apart, patients in product((1.2, 2.5, 3.3), (10, 20, 40, 100)):
            if patients * prevalence < 2:
                continue  # one ill patient, or none
            shares = coverage(patients, apart, samples, patches, prevalence)
            truth = norm.cdf(apart / math.sqrt(2))
            cells = " | ".join(f"{share:.2f}" for share in shares.values())
            print(f"| {patches} | {prevalence} | {patients} | {truth:.2f} | {cells} |", flush=True)
    print(f"| patients | AUC of group, rest | {' | '.join(OF_GROUPS)} |")
    for separation in ((1.2, 1.2), (2.5, 2.5), (1.2, 2.5)):
        for patients in (40, 100, 300):
            shares = group_coverage(patients, separation, samples)
            areas = ", ".join(f"{norm.cdf(distance / math.sqrt(2)):.2f}" for distance in separation)
            cells = " | ".join(f"{share:.3f}" for share in shares.values())
            print(f"| {patients} | {areas} | {cells} |", flush=True)
    print(f"false alarms of shortcuts: {false_alarms(200):.3f} of 200 data sets", flush=True)
    print("| validation patients | no temperature | temperature | without prior |")
    for patients in (4, 10, 20, 50, 200):
        cells = " | ".join(f"{loss:.3f}" for loss in temperature_losses(patients, samples))
        print(f"| {patients} | {cells} |", flush=True)
    print("| patches | all metrics, ms per resample | scikit-learn, AUC only, ms |")
    for patients in (100, 1_000, 10_000, 100_000):
        ours, theirs = cost(patients, 5)
        print(f"| {patients * PATCHES:,} | {1e3 * ours:.2f} | {1e3 * theirs:.2f} |")


if __name__ == "__main__":
    main()
