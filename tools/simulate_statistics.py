"""Simulate what the statistics of reports claim: rates under the null, coverage of intervals, and power.

    python tools/simulate_statistics.py NAME … [--samples 400]

Without names, all parts are run one after another. Each takes at most some minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression

import histopipe
from histopipe.evaluation.evaluate import evaluate, fit_temperature, tempered
from histopipe.evaluation.label_errors import count_by_chance, find_label_errors
from histopipe.evaluation.prediction_sets import calibration_scores, cover_parts
from histopipe.evaluation.subgroups import subgroups
from histopipe.evaluation.unusual import PatchFeatures, beyond, training_range
from histopipe.features.feature_file import writing
from histopipe.features.feature_sets import record_encoder
from histopipe.splits.slide_table import SlideEntry
from histopipe.studies.probe_models import robustness
from histopipe.system.output import Progress, use_progress
from histopipe.tasks.classification import Classification
from histopipe.tasks.curves import cox_check, recalibration, risk_groups
from histopipe.tasks.metrics import metrics_of
from histopipe.tasks.predictions import EvaluationSettings, ModelPredictions, Predictions, scores_of
from histopipe.tasks.statistics import bootstrap_draws
from histopipe.tasks.survival import Survival, SurvivalStatistics
from histopipe.tasks.task import Task

Array = NDArray[Any]
TWO = Classification(classes=("well", "ill"))
SETTINGS = EvaluationSettings(resamples=400)


def slides_of(
    task: Task, target: Array, output: Array, patient: Array, patients: int
) -> Predictions:
    """Return predictions of slides, with 0.5 or the median risk as threshold."""
    rows = np.arange(len(target), dtype=np.int32)
    zeros = np.zeros(len(target), np.int64)
    return Predictions(
        task,
        tuple(map(str, rows)),
        tuple(map(str, range(patients))),
        rows,
        patient.astype(np.int32),
        zeros,
        zeros,
        target.astype(np.float64),
        output.astype(np.float64),
        level="slide",
        limits=np.full((len(target), 1), 0.5 if task.of_classes else 0.0),
    )


def two_classes(ill: Array, p: Array, patient: Array | None = None) -> Predictions:
    """Return slides of two classes from the probability of the second one."""
    numbers = np.arange(len(ill)) if patient is None else patient
    output = np.stack([1 - p, p], axis=1)
    return slides_of(TWO, ill[:, None], output, numbers, int(numbers.max()) + 1)


def share(values: Array | list[Any]) -> str:
    """Return a mean of shares with its standard error."""
    numbers = np.asarray(values, np.float64)
    return f"{numbers.mean():.3f} ± {numbers.std() / math.sqrt(len(numbers)):.3f}"


def folds_of(labels: Array, features: Array, fold: Array) -> list[ModelPredictions]:
    """Return the test predictions of a ridge-penalised logistic regression for each fold, with common patients."""
    parts: list[ModelPredictions] = []
    whole = two_classes(labels, np.full(len(labels), 0.5))
    for number in np.unique(fold):
        test = fold == number
        model = LogisticRegression(C=0.01, max_iter=500).fit(features[~test], labels[~test])
        p = model.predict_proba(features[test])
        parts.append((replace(whole.rows(np.flatnonzero(test)), output=p), {}))
    return parts


def folds(samples: int) -> Iterator[str]:
    """AUC of folds by site, and of ten folds of 20 patients: pooled, within folds, and the mean of folds."""
    yield "design | signal | pooled | within folds | mean of folds | intervals without 0.5: pooled | within"
    for design, signal in (("sites", 0.0), ("sites", 0.35), ("ten", 0.0), ("ten", 0.35)):
        rows, below = [], []
        for seed in range(samples):
            rng = np.random.default_rng(seed)
            if design == "sites":
                counts = [32, 26, 20, 14, 8]
                labels = np.concatenate([[1] * count + [0] * (40 - count) for count in counts])
                fold = np.repeat(np.arange(5), 40)
            else:
                labels = rng.permutation(np.arange(200) % 2)
                fold = np.empty(200, int)
                for code in (0, 1):  # stratified
                    fold[np.flatnonzero(labels == code)] = np.arange(100) % 10
            features = rng.normal(size=(len(labels), 20))
            features[:, :3] += signal * labels[:, None]
            parts = folds_of(labels, features, fold)
            pooled, within = (
                evaluate(parts, SETTINGS, within_folds=how).slide["mean"] for how in (False, True)
            )
            each = [
                evaluate([part], replace(SETTINGS, resamples=0)).slide["mean"] for part in parts
            ]
            means = [metrics.auc for metrics in each if metrics.auc is not None]
            rows.append([pooled.auc, within.auc, np.mean(means)])
            ends = [metrics.intervals["auc"] for metrics in (pooled, within)]
            below.append([not low <= 0.5 <= high for low, high in ends])
        values, outside = np.array(rows), np.array(below)
        yield (
            f"{design} | {signal} | "
            + " | ".join(
                f"{m:.3f} (sd {s:.3f})" for m, s in zip(values.mean(0), values.std(0), strict=True)
            )
            + f" | {share(outside[:, 0])} | {share(outside[:, 1])}"
        )


def null_coverage(samples: int) -> Iterator[str]:
    """Share of data sets without signal whose cross-validated interval holds 0.5, by patients and folds."""
    for patients, count in ((60, 5), (100, 5), (200, 5), (200, 10)):
        hits: dict[bool, list[bool]] = {False: [], True: []}
        for seed in range(samples):
            rng = np.random.default_rng(seed)
            labels, fold = rng.permutation(np.arange(patients) % 2), np.empty(patients, int)
            for code in (0, 1):
                rows = np.flatnonzero(labels == code)
                fold[rows] = np.arange(len(rows)) % count
            parts = folds_of(labels, rng.normal(size=(patients, 50)), fold)
            for how, held in hits.items():
                metrics = evaluate(parts, SETTINGS, within_folds=how).slide["mean"]
                low, high = metrics.intervals["auc"]
                held.append(low <= 0.5 <= high)
        yield f"{patients} patients, {count} folds: pooled {share(hits[False])}, within folds {share(hits[True])}"


def survival_data(rng: Any, patients: int, slides: int, effect: float = 0.0) -> Predictions:
    """Return slides of survival times with a risk of each slide, of which patients have a common part."""
    common = rng.normal(size=patients)
    time, censored = rng.exponential(np.exp(-effect * common)), rng.exponential(2, patients)
    target = np.stack([np.minimum(time, censored), time <= censored], axis=1)
    rows = np.repeat(np.arange(patients), slides)
    risk = common[rows] + 0.5 * rng.normal(size=len(rows))
    grid = tuple(np.quantile(target[:, 0], [0.2, 0.4, 0.6, 0.8]).tolist())
    curves = [np.exp(-t * np.exp(effect * risk)) for t in grid]
    return slides_of(
        Survival(("t", "e"), grid), target[rows], np.stack([risk, *curves], 1), rows, patients
    )


def log_rank(samples: int) -> Iterator[str]:
    """Share of data sets without effect with log-rank p < 0.05, counted by slides and by patients; and of proportional hazards."""
    for slides in (1, 2, 3):
        rates: list[list[bool]] = []
        for seed in range(samples):
            scores = survival_data(np.random.default_rng(seed), 80, slides)
            of_patients = scores_of(scores, "patient", "mean", SETTINGS)
            p = [
                risk_groups(each.target, each.output[:, 0] > np.median(each.output[:, 0]))[1] or 1
                for each in (scores, of_patients)
            ]
            time, event = of_patients.target.T
            fold = (np.arange(len(time)) % 5).astype(np.int32)
            p.append(cox_check(of_patients.output[:, 0], time, event == 1, fold)[1] or 1)
            rates.append([value < 0.05 for value in p])
        by_slides, by_patients, hazards = np.array(rates).T
        yield (
            f"{slides} slides per patient: by slides {share(by_slides)}, by patients {share(by_patients)}, "
            f"proportional hazards {share(hazards)}"
        )


def features_of(rng: Any, patients: int, patches: int, mix: Array, name: str) -> PatchFeatures:
    """Return patches of slides, one per patient, whose means vary between patients."""
    values = (
        rng.normal(size=(patients, patches, len(mix)))
        + 0.5 * rng.normal(size=(patients, 1, len(mix)))
    ) @ mix
    names = np.repeat([f"{name}{i}" for i in range(patients)], patches)
    return PatchFeatures(values.reshape(-1, len(mix)), np.zeros(len(names)), names, names)


def unusual(samples: int) -> Iterator[str]:
    """False alarms of slides by number of patches, after a training on slides of 60: one limit, and limits by size."""
    sizes, rates = (1, 2, 3, 5, 8, 11, 15, 20, 30, 50, 100), list[float]()
    alarms: dict[tuple[str, int], list[bool]] = {}
    for seed in range(samples // 10):
        rng = np.random.default_rng(seed)
        mix = rng.normal(size=(32, 32)) * np.exp(-4 * np.arange(32) / 32)[:, None]
        training, held_out = (features_of(rng, 60, 60, mix, name) for name in "TV")
        limits = training_range(training, held_out, 1)
        if limits is None:
            continue
        rates.append(float(limits.rate))
        before = replace(limits, sizes=np.empty(0), size_limits=np.empty(0))
        for size in sizes:
            for kind, each in (("one limit", before), ("limits by size", limits)):
                for _ in range(30):
                    white = each.whitened(features_of(rng, 1, size, mix, "N").features)
                    alarms.setdefault((kind, size), []).append(beyond([each], [white])[1] > 1)
    yield f"stated: {np.mean(rates):.3f}"
    for kind in ("one limit", "limits by size"):
        yield f"{kind}: " + ", ".join(f"{s} patches {np.mean(alarms[kind, s]):.3f}" for s in sizes)


def sets(samples: int) -> Iterator[str]:
    """Evaluations of prediction sets with a warning: by the interval of each row, and by all rows together; also with a shifted site."""
    for patients in (60, 200):
        for shift in (0.0, 1.0, 2.0):
            before, after = [], []
            for seed in range(samples):
                rng = np.random.default_rng(seed)
                calibration, test = (
                    _three_classes(rng, patients, 0.0),
                    _three_classes(rng, 100, shift),
                )
                table = [
                    SlideEntry(slide=str(i), patient=str(i), site="xy"[i % 2]) for i in range(100)
                ]
                scores = calibration_scores(calibration, SETTINGS)
                reached = cover_parts([(test, [scores])], table, [], SETTINGS, 0.1)
                ends = [row["interval"] for row in reached.rows]
                before.append(any(end and end[1] < 0.9 for end in ends))
                after.append(any(line.startswith("warning") for line in reached.lines))
            yield f"{patients} patients calibrate, site y shifted by {shift}: before {share(before)}, now {share(after)}"


def _three_classes(rng: Any, patients: int, shift: float) -> Predictions:
    label = rng.choice(3, patients, p=(0.6, 0.3, 0.1))
    logits = 1.5 * np.eye(3)[label] + rng.normal(size=(patients, 3))
    logits += shift * (np.arange(patients) % 2)[:, None] * np.array([1, -1, 0])
    output = np.exp(1.5 * logits)
    output /= output.sum(axis=1, keepdims=True)
    task = Classification(classes=("a", "b", "c"))
    return replace(
        slides_of(task, label[:, None], output, np.arange(patients), patients),
        limits=np.empty((patients, 0)),
    )


def calibration(samples: int) -> Iterator[str]:
    """Values of the calibration error outside of their intervals, coverage of the true error, and errors by chance."""
    big = np.random.default_rng(5).normal(size=400_000) * 1.5
    for patients in (20, 60, 200):
        for slope in (1.0, 0.6, 2.0):
            true, p = 1 / (1 + np.exp(-big)), 1 / (1 + np.exp(-slope * big))
            bins = np.minimum((p * 10).astype(int), 9)
            error = sum(abs((p - true)[bins == number].sum()) for number in range(10)) / len(big)
            inside, covered, measured, chance = [], [], [], []
            for seed in range(samples):
                rng = np.random.default_rng(seed)
                logits = 1.5 * rng.normal(size=patients)
                ill = (rng.random(patients) < 1 / (1 + np.exp(-logits))).astype(int)
                if len(set(ill.tolist())) < 2:
                    continue
                scores = two_classes(ill, 1 / (1 + np.exp(-slope * logits)))
                metrics = metrics_of(scores, draws=bootstrap_draws(patients, 400, seed))
                low, high = metrics.intervals["calibration_error"]
                value = float(metrics.calibration_error)
                inside.append(low <= value <= high)
                covered.append(low <= error <= high)
                measured.append(value)
                chance.append(metrics.values["calibration_error_by_chance"] or 0.0)
            yield (
                f"{patients} patients, slope {slope}: value inside {share(inside)}, true error {error:.3f} covered "
                f"{share(covered)}, measured {np.mean(measured):.3f}, by chance {np.mean(chance):.3f}"
            )


def index(samples: int) -> Iterator[str]:
    """Robustness index of noise by patients per site with both classes, and coverage of the expected index."""
    rng = np.random.default_rng(0)
    for patients in (1, 2, 5, 20):
        values, stated = [], []
        for seed in range(samples // 20):
            labels, sites, patient = _design(patients, 200)
            features = rng.normal(size=(len(labels), 16)).astype(np.float32)
            counts = robustness(features, labels, sites, patient, 20, seed)
            values.append(counts.index(np.ones((1, int(patient.max()) + 1)))[0])
            stated.append(counts.of_noise)
        yield f"noise, {patients} patients per site: index {share(values)}, stated {np.mean(stated):.3f}"
    for patients in (5, 10, 20):
        drawn = [_clustered(np.random.default_rng(seed), patients) for seed in range(samples)]
        expected = np.mean([values[0] for values, _ in drawn])
        both = [
            [
                low <= expected <= high
                for low, high in (np.quantile(v, [0.025, 0.975]) for v in each)
            ]
            for each in ((queries[1:], pairs[1:]) for pairs, queries in drawn)
        ]
        queries, pairs = np.array(both).T
        yield (
            f"{patients} patients per site and class: coverage of {expected:.3f} with weights of the patches {share(queries)}, "
            f"with those of their neighbours, too {share(pairs)}"
        )


def _design(patients: int, items: int) -> tuple[Array, Array, Array]:
    """Return classes, sites and patients, who have both classes, of items at two sites."""
    number = np.arange(4 * items)
    labels, sites = number % 2, number // 2 % 2
    return (
        labels.astype(np.int32),
        sites.astype(np.int32),
        (patients * sites + number // 4 % patients).astype(np.int32),
    )


def _clustered(rng: Any, patients: int) -> tuple[Array, Array]:
    """Return resampled indices of patients with one class each, whose patches resemble each other: with pairs, and with queries."""
    count, patches = 4 * patients, 15
    labels, sites = np.arange(count) % 2, np.arange(count) // 2 % 2
    centre = rng.normal(size=(count, 8)) + 0.8 * np.eye(8)[0] * labels[:, None]
    centre += 0.8 * np.eye(8)[1] * sites[:, None]
    rows = np.repeat(np.arange(count), patches)
    features = centre[rows] + rng.normal(size=(len(rows), 8))
    columns = (labels[rows].astype(np.int32), sites[rows].astype(np.int32), rows.astype(np.int32))
    counts = robustness(features.astype(np.float32), *columns, 20, 1)
    stratum = (2 * labels + sites).astype(np.int32)
    weights = np.vstack([np.ones(count), bootstrap_draws(count, 300, 1, stratum)])
    sums = [
        sum(np.asarray(both[kind].sum(axis=1)).ravel() for both in counts.counts.values())
        for kind in (0, 1)
    ]
    by_class, by_site = (weights @ each for each in sums)
    return counts.index(weights), by_class / (by_class + by_site)


def labels(samples: int) -> Iterator[str]:
    """Right labels that models contradict, and the number that is stated, by AUC of the models and their certainty."""
    for signal in (0.0, 0.5, 1.0, 2.0):
        for scale in (0.5, 1.0, 3.0):
            listed, stated = [], []
            for seed in range(samples // 20):
                rng = np.random.default_rng(seed)
                ill = (rng.random(200) < 0.4).astype(int)
                value = signal * (signal * ill + rng.normal(size=200) - signal / 2)
                p = 1 / (1 + np.exp(-scale * (math.log(0.4 / 0.6) + value)))
                p = np.clip(p + (1e-3 * rng.normal(size=200) if signal == 0 else 0), 0.001, 0.999)
                scores = two_classes(ill, p)
                listed.append(len(find_label_errors([scores], SETTINGS)) / 2)
                stated.append(count_by_chance([scores], SETTINGS) / 2)
            yield f"signal {signal}, logits times {scale}: {np.mean(listed):.1f} % of the labels, stated {np.mean(stated):.1f} %"


def groups(samples: int) -> Iterator[str]:
    """Data sets without differences between nine groups of three columns with p < 0.05, and with any interval without 0."""
    for patients in (80, 200):
        for signal in (0.0, 1.0, 2.0):
            joint, single = [], []
            for seed in range(samples // 2):
                rng = np.random.default_rng(seed)
                ill = (rng.random(patients) < 0.5).astype(int)
                scores = two_classes(
                    ill, norm.cdf(signal * (ill - 0.5) + rng.normal(size=patients))
                )
                cells = [rng.integers(0, count, patients) for count in (3, 2, 4)]
                table = [
                    SlideEntry(
                        slide=str(i),
                        patient=str(i),
                        cells={f"c{k}": f"v{column[i]}" for k, column in enumerate(cells)},
                    )
                    for i in range(patients)
                ]
                columns = dict.fromkeys(("c0", "c1", "c2"))
                columns_of = subgroups([(scores, {})], table, columns, replace(SETTINGS, seed=seed))
                tested = [g for column in columns_of for g in column.groups if g.p is not None]
                joint.append(any((group.p or 1) < 0.05 for group in tested))
                ends = [group.differences["auc"].interval or (-1, 1) for group in tested]
                single.append(any(low > 0 or high < 0 for low, high in ends))
            yield f"{patients} patients, signal {signal}: max-T {share(joint)}, any interval {share(single)}"


def permuted(samples: int) -> Iterator[str]:
    """P values of `probe --permutations 19` without a signal: shares up to 0.05, 0.1 and 0.5; also if sites are confounded."""
    for confounded in (False, True):
        p = []
        for seed in range(samples // 4):
            rng = np.random.default_rng(seed)
            site = np.arange(60) % 4
            rate = np.array([0.8, 0.6, 0.4, 0.2])[site] if confounded else np.full(60, 0.5)
            ill = rng.random(60) < rate
            with tempfile.TemporaryDirectory() as name, use_progress(Progress()):
                folder = Path(name)
                (folder / "features").mkdir()
                record_encoder(folder / "features", {"encoder": "synthetic", "dimension": 8})
                rows = ["slide,label,patient,site"]
                for i in range(60):
                    values = rng.normal(size=(1, 8)) + 2 * np.eye(8)[site[i]]
                    path = folder / "features" / f"{i}.h5"
                    with writing(path, 1, 8, "float32") as writer:
                        writer.append(values.astype(np.float32), np.zeros((1, 2), np.int64))
                        writer.finish({}, {"name": str(i)})
                    rows.append(f"{i},{'ab'[int(ill[i])]},p{i},h{site[i]}")
                (folder / "labels.csv").write_text("\n".join(rows))
                result = histopipe.probe(
                    folder / "features",
                    labels=folder / "labels.csv",
                    out=folder / "out",
                    permutations=19,
                    folds=3,
                    shots=(1,),
                    draws=2,
                    resamples=0,
                    neighbours=1,
                    seed=seed,
                )
                p.append(next(s.p for s in result.scores if s.probe == "linear") or math.nan)
        values = np.array(p)
        rates = ", ".join(f"{limit}: {share(values <= limit + 1e-9)}" for limit in (0.05, 0.1, 0.5))
        yield f"{'confounded' if confounded else 'balanced'} sites: {rates}"


def means(samples: int) -> Iterator[str]:
    """Calibration slope and log loss of the mean of five models: of probabilities, of logits, and calibrated with 100 patients."""
    losses: dict[str, list[tuple[float, float]]] = {}
    for seed in range(samples // 4):
        rng = np.random.default_rng(seed)
        truth = rng.normal(size=1400)
        ill = (rng.random(1400) < 1 / (1 + np.exp(-1.5 * truth))).astype(int)
        # Overfitted models: right on average, each with its own large errors.
        logits = 1.5 * truth[:, None] + 2.0 * rng.normal(size=(1400, 5))
        p = {
            "one model": 1 / (1 + np.exp(-logits[:, 0])),
            "mean of probabilities": (1 / (1 + np.exp(-logits))).mean(axis=1),
            "mean of logits": 1 / (1 + np.exp(-logits.mean(axis=1))),
        }
        scores = two_classes(ill[:100], p["mean of probabilities"][:100])
        output = np.stack([1 - p["mean of probabilities"], p["mean of probabilities"]], axis=1)
        p["mean, calibrated"] = tempered(output, fit_temperature(scores))[:, 1]
        for name, values in p.items():
            inner = np.clip(values[100:], 1e-6, 1 - 1e-6)
            slope = recalibration(inner, ill[100:] == 1, np.arange(1300, dtype=np.int32))[0]
            loss = -np.mean(np.log(np.where(ill[100:] == 1, inner, 1 - inner)))
            losses.setdefault(name, []).append((slope["calibration_slope"] or np.nan, loss))
    for name, pairs in losses.items():
        slope, loss = np.mean(pairs, axis=0)
        yield f"{name}: slope {slope:.2f}, log loss {loss:.4f}"


def coverage(samples: int) -> Iterator[str]:
    """Coverage of 95 % intervals by patients, prevalence and slides per patient; in brackets the share without an interval."""
    names = ("auc", "balanced_accuracy", "brier", "calibration_error")
    yield "patients | prevalence | slides | AUC | balanced accuracy | Brier score | calibration error | C-index"
    for patients in (20, 60, 200):
        for prevalence in (0.5, 0.1):
            for slides in (1, 3):
                cells = _classes_covered(names, patients, prevalence, slides, samples)
                cells.append(_concordance_covered(patients, prevalence, slides, samples))
                yield f"{patients} | {prevalence} | {slides} | " + " | ".join(cells)


def _ill_slides(rng: Any, patients: int, prevalence: float, slides: int) -> Predictions:
    ill = np.repeat(rng.random(patients) < prevalence, slides).astype(int)
    rows = np.repeat(np.arange(patients), slides)
    value = 1.5 * ill + rng.normal(size=patients)[rows] * math.sqrt(0.5)
    value += rng.normal(size=len(rows)) * math.sqrt(0.5)
    p = norm.cdf(value - 0.75 + norm.ppf(prevalence))
    return replace(two_classes(ill, p, rows), limits=np.full((len(ill), 1), prevalence))


def _classes_covered(
    names: tuple[str, ...], patients: int, prevalence: float, slides: int, samples: int
) -> list[str]:
    rng = np.random.default_rng(patients)
    truth = metrics_of(_ill_slides(rng, 60_000, prevalence, slides), draws=np.empty((0, 60_000)))
    hits: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(samples):
        scores = _ill_slides(rng, patients, prevalence, slides)
        metrics = metrics_of(scores, draws=bootstrap_draws(patients, 400, seed))
        for name in names:
            low, high = metrics.intervals.get(name, (math.nan, math.nan))
            hits[name].append(
                math.nan if math.isnan(low) else float(low <= (truth.values[name] or 0.0) <= high)
            )
    return [_covered(hits[name]) for name in names]


def _concordance_covered(patients: int, events: float, slides: int, samples: int) -> str:
    """Return the coverage of the C-index, with a share of events as the prevalence."""
    rng = np.random.default_rng(patients)

    def draw(count: int) -> Predictions:
        common = rng.normal(size=count)
        time = rng.exponential(np.exp(-common))
        censored = rng.exponential(size=count) * (1.0 if events == 0.5 else 0.09)
        target = np.stack([np.minimum(time, censored), time <= censored], axis=1)
        rows = np.repeat(np.arange(count), slides)
        risk = common[rows] + 0.7 * rng.normal(size=len(rows))
        return slides_of(Survival(("t", "e")), target[rows], risk[:, None], rows, count)

    big = [draw(3000) for _ in range(12)]
    truth = np.mean([_concordance(each) for each in big])
    hits = []
    for seed in range(samples):
        scores = draw(patients)
        intervals = (
            metrics_of(scores, draws=bootstrap_draws(patients, 400, seed)).intervals
            if scores.target[:, 1].any()
            else {}
        )
        low, high = intervals.get("c_index", (math.nan, math.nan))
        hits.append(math.nan if math.isnan(low) else float(low <= truth <= high))
    return _covered(hits)


def _concordance(scores: Predictions) -> float:
    time, event = scores.target.T
    statistics = SurvivalStatistics(
        time, event, scores.output, (), scores.patient, fold=scores.folds
    )
    return float(statistics.values()["c_index"] or math.nan)


def _covered(hits: list[float]) -> str:
    values = np.array(hits)
    missing = float(np.isnan(values).mean())
    present = values[~np.isnan(values)]
    text = f"{present.mean():.3f}" if len(present) else "-"
    return text + (f" ({missing:.2f})" if missing else "")


PARTS: dict[str, Callable[[int], Iterator[str]]] = {
    function.__name__: function
    for function in (
        *(folds, null_coverage, log_rank, unusual, sets, calibration),
        *(index, labels, groups, means, coverage, permuted),
    )
}


def main() -> None:
    """Run the parts that are named, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--samples", type=int, default=400)
    options = parser.parse_args()
    for name in options.names or PARTS:
        print(f"\n{name}: {PARTS[name].__doc__}", flush=True)
        for line in PARTS[name](options.samples):
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
