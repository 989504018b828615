"""Metrics compared with scikit-learn and with manual calculations, and coverage of the intervals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm
from sklearn import calibration
from sklearn import metrics as sk

from helpers.paths import GOLDEN
from helpers.scores import (
    aggregated,
    class_metrics,
    class_predictions,
    class_scores,
    target_predictions,
)
from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.evaluation.evaluate import (
    Evaluation,
    choose_thresholds,
    evaluate,
    evaluate_subsets,
    evaluation_lines,
    remarks,
    split_lines,
)
from histopipe.predictions.prediction_tables import read_predictions, write_predictions
from histopipe.reports.evaluation_blocks import CHARTS, metric_cards, metrics_blocks
from histopipe.reports.failures import decisions
from histopipe.reports.html_page import Block, Table
from histopipe.splits.subsets import Subset
from histopipe.tasks.calibration import BINS
from histopipe.tasks.classification import Classification
from histopipe.tasks.predictions import Metrics, choose_threshold, with_common_patients
from histopipe.tasks.statistics import area_under_roc, bootstrap_draws, roc_of
from histopipe.tasks.task import EvaluationSettings, Predictions, Thresholds

NO_DRAWS = np.zeros((0, 1))


def binary(
    label: Sequence[int], positive: Sequence[float], patient: Sequence[int] | None = None
) -> Predictions:
    return class_scores(label, [[1 - p, p] for p in positive], patient)


def random_scores(seed: int, classes: int, count: int = 200, patients: int = 20) -> Predictions:
    """Return random scores with ties: probabilities with one to five decimals."""
    rng = np.random.default_rng(seed)
    steps = 10 ** int(rng.integers(1, 6))
    probability = rng.multinomial(steps, rng.dirichlet(np.ones(classes), count)) / steps
    return class_scores(
        rng.integers(0, classes, count).tolist(),
        probability.tolist(),
        rng.integers(0, patients, count).tolist(),
    )


@given(st.integers(0, 10_000), st.floats(0.05, 0.95), st.integers(0, 1))
def test_two_classes_equal_scikit_learn(seed: int, threshold: float, positive: int) -> None:
    scores = random_scores(seed, 2)
    truth, p = (scores.label == positive).astype(int), scores.output[:, positive]
    decided = (p >= threshold).astype(int)
    metrics = class_metrics(
        scores, ("n", "t"), positive=positive, threshold=threshold, draws=NO_DRAWS
    )
    assert metrics.auc == pytest.approx(sk.roc_auc_score(truth, p), abs=1e-12)
    assert metrics.accuracy == pytest.approx(sk.accuracy_score(truth, decided), abs=1e-12)
    assert metrics.balanced_accuracy == pytest.approx(
        sk.balanced_accuracy_score(truth, decided), abs=1e-12
    )
    assert metrics.f1 == pytest.approx(sk.f1_score(truth, decided), abs=1e-12)
    assert metrics.sensitivity == pytest.approx(sk.recall_score(truth, decided), abs=1e-12)
    assert metrics.specificity == pytest.approx(
        sk.recall_score(truth, decided, pos_label=0), abs=1e-12
    )
    assert metrics.brier == pytest.approx(sk.brier_score_loss(truth, p), abs=1e-12)
    assert metrics.log_loss == pytest.approx(sk.log_loss(scores.label, scores.output), abs=1e-9)
    expected = sk.confusion_matrix(truth, decided)[:: positive or -1, :: positive or -1]
    np.testing.assert_array_equal(metrics.confusion, expected)
    assert (metrics.count, metrics.patients) == (200, len(set(scores.patient.tolist())))


@given(st.integers(0, 10_000), st.integers(3, 5))
def test_more_classes_equal_scikit_learn(seed: int, classes: int) -> None:
    scores = random_scores(seed, classes)
    truth, probability = scores.label, scores.output
    decided = probability.argmax(axis=1)
    names = tuple("abcde"[:classes])
    metrics = class_metrics(scores, names, positive=None, threshold=None, draws=NO_DRAWS)
    areas = [sk.roc_auc_score(truth == c, probability[:, c]) for c in range(classes)]
    assert metrics.auc == pytest.approx(np.mean(areas), abs=1e-12)
    assert [entry.auc for entry in metrics.classes.values()] == pytest.approx(areas, abs=1e-12)
    assert metrics.balanced_accuracy == pytest.approx(
        sk.balanced_accuracy_score(truth, decided), abs=1e-12
    )
    assert metrics.f1 == pytest.approx(sk.f1_score(truth, decided, average="macro"), abs=1e-12)
    recalls = sk.recall_score(truth, decided, average=None)
    assert [entry.sensitivity for entry in metrics.classes.values()] == pytest.approx(
        recalls, abs=1e-12
    )
    assert metrics.brier == pytest.approx(
        sk.brier_score_loss(truth, probability, labels=range(classes)), abs=1e-9
    )
    np.testing.assert_array_equal(metrics.confusion, sk.confusion_matrix(truth, decided))


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_repeated_patients(seed: int, classes: int) -> None:
    """Compare with a slow reference that repeats the scores of each drawn patient, once per draw."""
    scores = random_scores(seed, classes)
    limits = np.full((200, 1 if classes == 2 else 0), 0.4)
    draw = bootstrap_draws(20, 1, seed)
    scores = replace(scores, limits=limits)
    fast = scores.task.statistics(scores).compute(draw)
    rows = np.repeat(np.arange(200), draw[0].astype(int)[scores.patient])
    slow = scores.task.statistics(scores.rows(rows))
    for name, values in slow.compute(np.ones((1, slow.patients))).items():
        assert fast[name][0] == pytest.approx(values[0], abs=1e-12), name


@given(st.integers(0, 10_000))
def test_reliability_equals_scikit_learn(seed: int) -> None:
    scores = random_scores(seed, 2)
    metrics = class_metrics(scores, ("n", "t"), positive=1, threshold=0.5, draws=NO_DRAWS)
    filled = [b for b in metrics.reliability if b.count]
    # scikit-learn's bins include the upper border, ours the lower. Other probabilities have the same bin.
    off = np.abs(scores.output[:, 1] * BINS - (scores.output[:, 1] * BINS).round()) > 1e-9
    if off.all():
        observed, mean = calibration.calibration_curve(
            scores.label, scores.output[:, 1], n_bins=BINS
        )
        assert [b.observed for b in filled] == pytest.approx(observed)
        assert [b.probability for b in filled] == pytest.approx(mean)
    assert sum(b.count for b in filled) == 200


def test_missing_class_is_noted_and_leaves_metrics_undefined() -> None:
    one = class_metrics(
        binary([1, 1], [0.9, 0.4]), ("n", "t"), positive=1, threshold=0.5, draws=NO_DRAWS
    )
    assert (one.auc, one.specificity, one.sensitivity) == (None, None, 0.5)
    assert (one.balanced_accuracy, one.notes) == (0.5, ("missing class: n",))
    assert one.classes["n"].count == 0 and one.classes["n"].auc is None
    three = class_scores(
        [0, 1, 0, 1], [[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.6, 0.2, 0.2], [0.5, 0.1, 0.4]]
    )
    metrics = class_metrics(three, ("a", "b", "c"), positive=None, threshold=None, draws=NO_DRAWS)
    assert metrics.notes == ("missing class: c",)
    assert metrics.auc == pytest.approx((1.0 + 0.625) / 2)
    assert metrics.balanced_accuracy == 0.75
    assert metrics.classes["c"].specificity == 1.0
    rare, draws = binary([0, 0, 0, 0, 1], [0.1, 0.8, 0.4, 0.3, 0.6]), bootstrap_draws(5, 200, 1)
    resampled = class_metrics(rare, ("n", "t"), positive=1, threshold=0.5, draws=draws)
    assert any("of the resamples lack a class" in note for note in resampled.notes)


def test_area_under_roc_of_an_epoch() -> None:
    scores = random_scores(3, 2)
    area = area_under_roc(scores.label, scores.output.astype(np.float32))
    assert area == pytest.approx(sk.roc_auc_score(scores.label, scores.output[:, 1]))
    assert area_under_roc(np.zeros(3, np.int32), np.full((3, 2), 0.5, np.float32)) is None
    assert area_under_roc(np.array([0, 1], np.int32), np.full((2, 2), np.nan, np.float32)) is None


# Intervals.


def clustered(rng: np.random.Generator, patients: int) -> Predictions:
    """Return scores of ten patches per patient. Half of the patients are ill; each has a random shift."""
    ill = np.repeat(np.arange(patients) % 2, 10)
    shift = np.repeat(rng.normal(size=patients), 10) * math.sqrt(0.3)
    value = 1.2 * ill + shift + rng.normal(size=10 * patients) * math.sqrt(0.7)
    p = norm.cdf(value - 0.6)
    return binary(ill.tolist(), p.tolist(), np.repeat(np.arange(patients), 10).tolist())


def covered(patients: int, trials: int, by_patch: bool = False) -> dict[str, float]:
    """Return the share of intervals that contain the true value, by metric."""
    rng = np.random.default_rng(5)
    truth = class_metrics(
        clustered(rng, 20_000), ("n", "t"), positive=1, threshold=0.5, draws=NO_DRAWS
    )
    hits = {"auc": 0, "balanced_accuracy": 0, "brier": 0}
    for trial in range(trials):
        sample = clustered(rng, patients)
        if by_patch:
            sample = replace(sample, patient=np.arange(10 * patients, dtype=np.int32))
        draws = bootstrap_draws(int(sample.patient.max()) + 1, 300, trial)
        metrics = class_metrics(sample, ("n", "t"), positive=1, threshold=0.5, draws=draws)
        for name in hits:
            low, high = metrics.intervals[name]
            hits[name] += low <= getattr(truth, name) <= high
    return {name: count / trials for name, count in hits.items()}


@pytest.mark.nightly(
    reason="a simulation; test_evaluations_are_those_of_earlier_versions has such intervals"
)
def test_coverage_of_intervals_is_95_percent() -> None:
    """Expect 95 % of 200 samples, with three standard errors (1.5 %), and slightly less for only 40 patients."""
    for name, share in covered(40, 200).items():
        assert 0.90 <= share <= 0.99, name
    assert covered(40, 100, by_patch=True)["auc"] < 0.8  # resampled patches are too narrow


@pytest.mark.parametrize("patients", [1, 2, 4, 5, 9, 10])
def test_few_patients_have_no_intervals(patients: int) -> None:
    """Of fewer than five; of fewer than ten, a note warns that they are unreliable."""
    label, patient = [0, 1] * patients, np.repeat(np.arange(patients), 2).tolist()
    probability = np.linspace(0.2, 0.8, 2 * patients).tolist()
    scores = binary(label, probability, patient)
    computed = class_metrics(
        scores, ("n", "t"), positive=1, threshold=0.5, draws=bootstrap_draws(patients, 200, 1)
    )
    few = f"too few patients for an interval: {patients}, expected at least 5"
    unreliable = f"confidence intervals are unreliable: only {patients} patients"
    evaluation = Evaluation(computed, {}, {})
    lines = evaluation_lines("test", evaluation)
    roc = roc_of(scores.label == 1, scores.output[:, 1], scores.patient, patients=patients, seed=1)
    assert roc is not None and (roc.band is None) == (patients < 5)
    if patients < 5:
        assert (computed.intervals, computed.notes) == ({}, (few,))
        assert "[" not in "".join(lines)
        assert sum(few in line for line in lines) == 1
    else:
        assert {"auc", "f1", "calibration_slope"} <= computed.intervals.keys()
        assert (unreliable in computed.notes) == (patients < 10)
        assert not any("too few" in note for note in computed.notes)
    # Of earlier versions, which had intervals of two patients and more.
    stored = evaluation.to_json()
    stored["patch"] |= {"intervals": {"auc": [0.1, 1.0]}, "notes": ["a note", unreliable]}
    (metrics,) = (metrics for _, metrics in Evaluation.from_json(stored).named())
    assert metrics.intervals == ({} if patients < 5 else {"auc": (0.1, 1.0)})
    assert metrics.notes == ("a note", few if patients < 5 else unreliable)


# From patches to slides and patients.

SLIDES = class_predictions(
    ("n", "t"), ("s1", "s2", "s3"), ("p", "q"),
    slide=np.array([0, 0, 0, 1, 1, 2], np.int32), patient=np.array([0, 0, 0, 0, 0, 1], np.int32),
    x_l0=np.arange(6), y_l0=np.zeros(6, np.int64),
    label=np.array([1, 1, 1, 1, 1, 0], np.int32),
    probability=np.array([[1 - p, p] for p in (0.9, 0.2, 0.4, 0.6, 0.8, 0.3)], np.float32),
)  # fmt: skip


@pytest.mark.parametrize(
    ("how", "slides", "patients"),
    [
        ("mean", [0.5, 0.7, 0.3], [0.58, 0.3]),
        ("top_k", [0.65, 0.7, 0.3], [0.85, 0.3]),
        ("majority", [1 / 3, 1.0, 0.0], [0.6, 0.0]),
    ],
)
def test_aggregation_equals_manual_calculation(
    how: str, slides: list[float], patients: list[float]
) -> None:
    for level, expected in (("slide", slides), ("patient", patients)):
        predictions = aggregated(SLIDES, level, how, top_k=2, positive=1)  # type: ignore[arg-type]
        assert predictions.output[:, 1] == pytest.approx(expected)
        assert predictions.output.sum(axis=1) == pytest.approx(1)
        assert predictions.label.tolist() == [1] * (len(expected) - 1) + [0]
    assert aggregated(SLIDES, "slide", "mean", top_k=2, positive=1).patient.tolist() == [0, 0, 1]


def test_top_k_uses_the_positive_class_or_each_class() -> None:
    other = aggregated(SLIDES, "slide", "top_k", top_k=2, positive=0)
    assert other.output[:, 0] == pytest.approx([0.7, 0.3, 0.7])
    three = replace(
        SLIDES,
        task=Classification(classes=("a", "b", "c")),
        slide=np.zeros(6, np.int32),
        target=np.zeros((6, 1)),
        output=np.array([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]] * 2, np.float32),
    )
    predictions = aggregated(three, "slide", "top_k", top_k=4, positive=0)
    assert predictions.output[0] == pytest.approx(np.array([0.7, 0.55, 0.1]) / 1.35)


def test_slides_with_several_labels_are_excluded_and_counted() -> None:
    mixed = replace(SLIDES, target=np.array([[1.0], [0], [1], [1], [1], [0]]))
    slide = aggregated(mixed, "slide", "mean", top_k=2, positive=1)
    assert (slide.slide.tolist(), slide.left_out) == ([1, 2], 1)
    evaluation = evaluate([(mixed, {})], EvaluationSettings(resamples=0))
    assert "1 excluded, because they have several labels" in evaluation.slide["mean"].notes
    assert evaluation.finest.notes == ()
    assert evaluation.patient["mean"].notes[0] == "missing class: t"


# Thresholds.


def chosen(scores: Predictions, number: int, rule: str) -> tuple[float, str]:
    return choose_threshold(scores.label == number, scores.output[:, number], rule)


def test_thresholds_equal_manual_calculation() -> None:
    well, ill = [0.1, 0.2, 0.3, 0.7], [0.25, 0.6, 0.65, 0.8, 0.9]
    validation = binary([0] * 4 + [1] * 5, well + ill)
    for rule, expected in {
        "youden": 0.45,
        "sensitivity:1": 0.225,
        "sensitivity:0.7": 0.45,
        "sensitivity:0.6": 0.625,
        "specificity:1": 0.75,
        "specificity:0.75": 0.45,
        "0.35": 0.35,
    }.items():
        assert chosen(validation, 1, rule)[0] == pytest.approx(expected), rule
    assert chosen(validation, 0, "sensitivity:1")[0] == pytest.approx(0.25)
    threshold, note = chosen(binary([1, 1], [0.2, 0.3]), 1, "youden")
    assert threshold == 0.5 and "only one class" in note
    with pytest.raises(UsageError, match=r"--threshold: found 'best', expected youden"):
        chosen(validation, 1, "best")


@given(st.integers(0, 10_000), st.sampled_from([0.5, 0.8, 0.95, 1.0]))
def test_threshold_reaches_the_required_value(seed: int, share: float) -> None:
    scores = random_scores(seed, 2, count=60)
    for name in ("sensitivity", "specificity"):
        threshold, _ = chosen(scores, 1, f"{name}:{share}")
        metrics = class_metrics(scores, ("n", "t"), positive=1, threshold=threshold, draws=NO_DRAWS)
        assert getattr(metrics, name) >= share - 1e-12


def test_no_other_threshold_has_a_higher_youden_index() -> None:
    scores = random_scores(4, 2)
    best, _ = chosen(scores, 1, "youden")

    positive, p = scores.label == 1, scores.output[:, 1]

    def index(threshold: float) -> float:
        return float((p[positive] >= threshold).mean() + (p[~positive] < threshold).mean())

    assert index(best) >= max(map(index, [*np.linspace(0, 1.01, 500), *p])) - 1e-12


def patches(
    seed: int, patients: Sequence[str], classes: tuple[str, ...] = ("n", "t")
) -> Predictions:
    """Return scores of twelve patches per slide and two slides per patient. Labels alternate by patient."""
    rng = np.random.default_rng(seed)
    slides = tuple(f"{name}-{i}" for name in patients for i in range(2))
    slide = np.repeat(np.arange(len(slides)), 12).astype(np.int32)
    label = (slide // 2 % len(classes)).astype(np.int32)
    probability = rng.dirichlet(np.ones(len(classes)), len(slide))
    probability[np.arange(len(slide)), label] += 0.3
    return class_predictions(
        classes,
        slides,
        tuple(patients),
        slide=slide,
        patient=(slide // 2).astype(np.int32),
        x_l0=np.tile(np.arange(12) * 128, len(slides)),
        y_l0=np.zeros(len(slide), np.int64),
        label=label,
        probability=(probability / 1.3).astype(np.float32),
    )


def test_levels_without_metrics_have_a_reason() -> None:
    """Every patient has slides of two classes, every slide patches of two, or every patient has one slide."""
    items = np.arange(12, dtype=np.int32)
    probability = np.stack([np.linspace(0.1, 0.9, 12)] * 2, axis=1).astype(np.float32)
    names = tuple(f"s{i}" for i in range(12))
    scores = class_predictions(
        ("n", "t"),
        names,
        names,
        items,
        items // 2,
        items.astype(np.int64),
        items.astype(np.int64),
        (items % 2).astype(np.int32),
        probability,
    )
    reason = "not evaluated, because each has several labels"
    for changed, level, texts in (
        (scores, "patch", [f"patients: {reason}"]),
        (scores, "slide", [f"patients: {reason}"]),
        (replace(scores, slide=items // 2), "patch", [f"slides: {reason}", f"patients: {reason}"]),
        (replace(scores, patient=items), "patch", []),
        (replace(scores, patient=items), "patient", []),
    ):
        predictions = replace(changed, level=level)  # type: ignore[arg-type]
        evaluation = evaluate_subsets({"validation": predictions}, EvaluationSettings(resamples=0))[
            "validation"
        ]
        assert remarks(evaluation) == texts
        lines = evaluation_lines("validation", evaluation)
        assert set(texts) <= {line.strip() for line in lines}
        equal = any("patients: same as slides" in line for line in lines)
        assert equal == (level != "patient" and not texts)


def test_slides_of_annotated_patches_have_no_row_without_metrics() -> None:
    """All slides have patches of two classes, but the first, whose patches are of one: its AUC is undefined."""
    items = np.arange(12, dtype=np.int32)
    label = np.where(items < 3, 0, items % 2).astype(np.int32)
    probability = np.stack([1 - label * 0.8, label * 0.8], axis=1).astype(np.float32)
    names = ("a", "b", "c", "d")
    scores = class_predictions(
        ("gland", "stroma"),
        names,
        names,
        items // 3,
        items // 3,
        items.astype(np.int64),
        items.astype(np.int64),
        label,
        probability,
    )
    evaluation = evaluate_subsets({"validation": scores}, EvaluationSettings(resamples=0))[
        "validation"
    ]
    title, *lines = evaluation_lines("validation", evaluation)
    assert title.split() == [
        "validation",
        "n",
        "AUC",
        "bal.",
        "acc.",
        "acc.",
        "sens.",
        "spec.",
        "F1",
        "Brier",
    ]
    assert lines[0].split()[:5] == ["patch", "12", "1.000", "1.000", "1.000"]
    reason = "not evaluated, because the AUC of 1 is undefined; 3 excluded, because they have several labels"
    assert [line.strip() for line in lines[1:]] == [f"slides: {reason}", f"patients: {reason}"]
    evaluated = EvaluatedPredictions(
        {"validation": evaluation}, {"validation": scores}, EvaluationSettings()
    )
    table, *rest = metrics_blocks(evaluated)
    assert isinstance(table, Table) and not rest
    assert [*table.columns] == ["metric", "validation: patch"]
    assert all(cell.text for row in table.rows for cell in row)
    assert [note for _, _, note in metric_cards(evaluated)] == ["no interval"] * 2
    first, *_ = decisions(evaluated, "validation")
    assert (first.counts, first.right) == ({"gland": 3}, 1.0)


def test_cards_show_how_many_patients_are_left_out() -> None:
    """Patient d has a slide of each class."""
    scores = patches(1, "abcd")
    scores = replace(scores, target=np.where(scores.slide[:, None] == 7, 0, scores.target))
    evaluation = evaluate_subsets({"validation": scores}, EvaluationSettings(resamples=0))[
        "validation"
    ]
    evaluated = EvaluatedPredictions(
        {"validation": evaluation}, {"validation": scores}, EvaluationSettings()
    )
    notes = {name: note for name, _, note in metric_cards(evaluated)}
    assert notes["AUC, patches"] == notes["AUC, slides"] == "no interval"
    assert notes["AUC, patients"] == "no interval; 1 of 4 patients left out"


def test_curves_of_labels_are_drawn_for_every_split() -> None:
    """Each split has its own charts, with a curve per label."""
    each, zeros = np.arange(4, dtype=np.int32), np.zeros(4, np.int64)
    names, target = ("a", "b", "c", "d"), np.array([[0, 1], [1, 0], [0, 0], [1, 1]], np.float64)
    scores = target_predictions(
        "multilabel",
        ("grade", "stage"),
        (),
        names,
        names,
        each,
        each,
        zeros,
        zeros,
        target,
        (0.2 + 0.5 * target).astype(np.float32),
        "slide",
    )
    chosen = EvaluationSettings(resamples=0)
    splits: dict[Subset, Predictions] = {"validation": scores, "test": scores}
    evaluated = EvaluatedPredictions(evaluate_subsets(splits, chosen), splits, chosen)
    blocks = [block for block in CHARTS["multilabel"][1](evaluated) if isinstance(block, Block)]
    labels = re.findall(
        r'aria-label="(.*?)"', "".join(svg for block in blocks for svg in block.content)
    )
    levels = [f"{level}, {split}" for level in ("slides", "patients") for split in splits]
    titles = [f"{chart}, {level}" for chart in ("ROC", "Precision and recall") for level in levels]
    titles += [f"Calibration, {split}" for split in splits]
    assert labels == [f"{title}: grade, stage" for title in titles]


def test_patients_of_the_training_are_counted() -> None:
    """Those of the predictions only, at any level."""
    settings, leaked = EvaluationSettings(resamples=0), {"validation": {"p", "other"}}
    evaluation = evaluate_subsets({"validation": SLIDES}, settings, leaked)["validation"]  # type: ignore[arg-type]
    assert evaluation.in_training == 1
    assert Evaluation.from_json(evaluation.to_json()) == evaluation
    text = "used in the training, too: 1 of 2 patients; metrics are too good"
    assert remarks(evaluation)[-1] == text
    assert split_lines({"test": evaluation})[0].startswith("test  ")
    held_out = evaluate_subsets({"validation": SLIDES}, settings)["validation"]
    assert held_out.in_training == 0
    assert split_lines({"test": held_out})[0].startswith("test (held out)")


def test_thresholds_do_not_depend_on_test_data() -> None:
    settings = EvaluationSettings(resamples=0)
    thresholds = choose_thresholds(patches(1, "abcdef"), settings)
    test = patches(2, "ghijkl")
    first = evaluate([(test, thresholds)], settings)
    for name, metrics in first.named():
        assert isinstance(metrics, Metrics)
        assert metrics.thresholds == thresholds[name]
    flipped = replace(test, target=1 - test.target)
    again = evaluate([(flipped, thresholds)], settings)
    limits = [[m.thresholds for _, m in evaluation.named()] for evaluation in (first, again)]
    assert limits[0] == limits[1] != []


def test_pooled_folds_use_the_threshold_of_each_fold() -> None:
    settings = EvaluationSettings(resamples=20)
    parts = with_common_patients([patches(1, "abcdef"), patches(2, "ghijkl")])
    limits = [{"patch": Thresholds((value,))} for value in (0.2, 0.8)]
    pooled = evaluate(list(zip(parts, limits, strict=True)), settings).finest
    assert isinstance(pooled, Metrics)
    each = [evaluate([pair], settings).finest for pair in zip(parts, limits, strict=True)]
    assert pooled.thresholds.values == ()
    confusions = [m.confusion for m in each if isinstance(m, Metrics)]
    np.testing.assert_array_equal(pooled.confusion, np.sum(confusions, axis=0))
    assert (pooled.count, pooled.patients) == (288, 12)
    joined = np.concatenate([part.output[:, 1] for part in parts])
    labels = np.concatenate([part.label for part in parts])
    assert pooled.auc == pytest.approx(sk.roc_auc_score(labels, joined))


def test_evaluations_of_three_classes_are_read_back_from_json() -> None:
    evaluation = evaluate(
        [(patches(1, "abcdef", ("a", "b", "c")), {})], EvaluationSettings(resamples=20)
    )
    assert Evaluation.from_json(evaluation.to_json()) == evaluation
    assert [name for name, _ in evaluation.named()] == [
        "patch",
        "slide_mean",
        "slide_top_k",
        "slide_majority",
        "patient_mean",
        "patient_top_k",
        "patient_majority",
    ]
    assert (evaluation.slide["mean"].count, evaluation.patient["mean"].count) == (12, 6)


def test_positive_class() -> None:
    two, three = Classification(classes=("n", "t")), Classification(classes=("a", "b", "c"))
    assert (two.positive, three.positive) == (1, None)
    assert replace(two, positive_class="n").positive == 0
    for task, name, message in (
        (two, "x", "--positive: found 'x', expected n or t"),
        (three, "a", "there are 3 classes"),
    ):
        with pytest.raises(UsageError, match=message):
            assert replace(task, positive_class=name).positive


# The file.


def test_predictions_are_read_by_pandas(tmp_path: Path) -> None:
    path = tmp_path / "predictions.csv"
    predictions = patches(1, "abc")
    write_predictions(path, [({"split": "test"}, predictions)])
    table = pandas.read_csv(path)
    assert list(table) == [
        "split",
        "slide",
        "patient",
        "x_l0",
        "y_l0",
        "label",
        "predicted",
        "p_n",
        "p_t",
    ]
    assert table["p_t"].dtype == "float64" and table["x_l0"].dtype == "int64"
    slides = table.groupby("slide")["p_t"].mean()
    ours = aggregated(predictions, "slide", "mean", top_k=1, positive=1)
    assert slides[list(predictions.slides)].to_numpy() == pytest.approx(ours.output[:, 1])
    most_probable: NDArray[np.str_] = np.array(predictions.task.classes)[
        predictions.output.argmax(axis=1)
    ]
    assert table["predicted"].tolist() == most_probable.tolist()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:0],
        lambda text: text.replace("split,slide", "slide,split", 1),
        lambda text: text.replace(",n,", ",unknown,", 1),
        lambda text: text[:-30],
        lambda text: text.replace("128", "12.8", 1),
    ],
)
def test_damaged_predictions_are_refused(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "predictions.csv"
    write_predictions(path, [({"split": "test"}, patches(1, "abc"))])
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(DamagedStore, match="is damaged"):
        read_predictions(path)
    with pytest.raises(UsageError, match="does not exist"):
        read_predictions(tmp_path / "none.csv")


# Evaluations of fixed predictions, written by tools/make_golden_evaluation.py.


def leaves(value: object, where: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{where}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from leaves(part, f"{where}[{number}]")
    else:
        yield where, value


@pytest.mark.parametrize(
    "path", sorted((GOLDEN / "evaluation").glob("*.csv")), ids=lambda path: path.stem
)
def test_evaluations_are_those_of_earlier_versions(path: Path) -> None:
    evaluated = evaluate_subsets(read_predictions(path), EvaluationSettings(resamples=50, top_k=2))
    value = {side: evaluation.to_json() for side, evaluation in evaluated.items()}
    actual = dict(leaves(json.loads(json.dumps(value))))
    expected = dict(leaves(json.loads(path.with_suffix(".json").read_text())))
    assert actual.keys() == expected.keys()
    assert len(actual) > 200
    for name, one in expected.items():
        other = actual[name]
        assert other == (pytest.approx(one, abs=1e-9) if isinstance(one, float) else one), name
