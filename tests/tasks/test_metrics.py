"""Metrics compared with scikit-learn and with manual calculations, and coverage of the intervals."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from bench_metrics import coverage  # of tools/, which is on the path of the tests
from hypothesis import given
from hypothesis import strategies as st
from sklearn import calibration
from sklearn import metrics as sk

from helpers.paths import GOLDEN
from helpers.scores import (
    aggregated,
    class_metrics,
    class_predictions,
    class_scores,
    task_scores,
)
from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.evaluation.evaluate import (
    METRIC_TITLES,
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
from histopipe.tasks.choices import Subset
from histopipe.tasks.classification import Classification, Multilabel
from histopipe.tasks.curves import BINS
from histopipe.tasks.metrics import Metrics
from histopipe.tasks.predictions import (
    EvaluationSettings,
    Predictions,
    Thresholds,
    choose_threshold,
    with_common_patients,
)
from histopipe.tasks.statistics import area_under_roc, bootstrap_draws, roc_of

NO_DRAWS = np.zeros((0, 1))


def binary(label: Any, positive: Any, patient: Any = None) -> Predictions:
    return class_scores(label, [[1 - p, p] for p in positive], patient)


def random_scores(seed: int, classes: int, count: int = 200, patients: int = 20) -> Predictions:
    """Return random scores with ties: probabilities with one to five decimals."""
    rng = np.random.default_rng(seed)
    steps = 10 ** int(rng.integers(1, 6))
    probability = rng.multinomial(steps, rng.dirichlet(np.ones(classes), count)) / steps
    label, patient = rng.integers(0, classes, count), rng.integers(0, patients, count)
    return class_scores(label, probability, patient)


@given(st.integers(0, 10_000), st.floats(0.05, 0.95), st.integers(0, 1))
def test_two_classes_equal_scikit_learn(seed: int, threshold: float, positive: int) -> None:
    scores = random_scores(seed, 2)
    truth, p = (scores.label == positive).astype(int), scores.output[:, positive]
    decided = (p >= threshold).astype(int)
    metrics = class_metrics(
        scores, ("n", "t"), positive=positive, threshold=threshold, draws=NO_DRAWS
    )
    expected = {
        "auc": sk.roc_auc_score(truth, p),
        "average_precision": sk.average_precision_score(truth, p),
        "accuracy": sk.accuracy_score(truth, decided),
        "balanced_accuracy": sk.balanced_accuracy_score(truth, decided),
        "f1": sk.f1_score(truth, decided),
        "sensitivity": sk.recall_score(truth, decided),
        "specificity": sk.recall_score(truth, decided, pos_label=0),
        "brier": sk.brier_score_loss(truth, p),
        "log_loss": sk.log_loss(scores.label, scores.output),
    }
    assert {name: metrics.values[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    confusion = sk.confusion_matrix(truth, decided)[:: positive or -1, :: positive or -1]
    np.testing.assert_array_equal(metrics.confusion, confusion)
    assert (metrics.count, metrics.patients) == (200, len(set(scores.patient.tolist())))


@given(st.integers(0, 10_000), st.integers(3, 5))
def test_more_classes_equal_scikit_learn(seed: int, classes: int) -> None:
    scores = random_scores(seed, classes)
    truth, probability = scores.label, scores.output
    decided, names = probability.argmax(axis=1), tuple("abcde"[:classes])
    metrics = class_metrics(scores, names, positive=None, threshold=None, draws=NO_DRAWS)
    areas = [sk.roc_auc_score(truth == c, probability[:, c]) for c in range(classes)]
    recalls = sk.recall_score(truth, decided, average=None)
    expected = {
        "auc": np.mean(areas),
        "balanced_accuracy": sk.balanced_accuracy_score(truth, decided),
        "f1": sk.f1_score(truth, decided, average="macro"),
        "brier": sk.brier_score_loss(truth, probability, labels=range(classes)),
    }
    assert {name: metrics.values[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    of_classes = [(entry.auc, entry.sensitivity) for entry in metrics.classes.values()]
    np.testing.assert_allclose(np.array(of_classes, float), np.stack([areas, recalls], axis=1))
    np.testing.assert_array_equal(metrics.confusion, sk.confusion_matrix(truth, decided))


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_repeated_patients(seed: int, classes: int) -> None:
    """Compare with a slow reference that repeats the scores of each drawn patient, once per draw."""
    scores = random_scores(seed, classes)
    scores = replace(scores, limits=np.full((200, 1 if classes == 2 else 0), 0.4))
    draw = bootstrap_draws(20, 1, seed)
    fast = scores.task.statistics(scores).compute(draw)
    rows = np.repeat(np.arange(200), draw[0].astype(int)[scores.patient])
    slow = scores.task.statistics(scores.rows(rows))
    for name, values in slow.compute(np.ones((1, slow.patients))).items():
        assert fast[name][0] == pytest.approx(values[0], abs=1e-12), name


@given(st.integers(0, 10_000))
def test_reliability_equals_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    label, p = rng.integers(0, 2, 200), rng.random(200)
    metrics = class_metrics(binary(label, p), ("n", "t"), positive=1, threshold=0.5, draws=NO_DRAWS)
    filled = [b for b in metrics.reliability if b.count]
    rates = np.array([(b.observed, b.probability) for b in filled], float)
    expected = calibration.calibration_curve(label, p, n_bins=BINS)
    np.testing.assert_allclose(rates, np.transpose(expected))
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


@pytest.mark.nightly(
    reason="a simulation; test_evaluations_are_those_of_earlier_versions has such intervals"
)
def test_coverage_of_intervals_is_95_percent() -> None:
    """Expect 95 % of 200 samples, with three standard errors (1.5 %), and slightly less for only 40 patients."""
    for name, share in coverage(patients=40, apart=1.2, samples=200, patches=10).items():
        assert 0.90 <= share <= 0.99, name


@pytest.mark.parametrize(
    ("patients", "note"),
    [
        (1, "too few patients for an interval: 1, expected at least 5"),
        (4, "too few patients for an interval: 4, expected at least 5"),
        (5, "confidence intervals are unreliable: only 5 patients"),
        (9, "confidence intervals are unreliable: only 9 patients"),
        (10, None),
    ],
)
def test_few_patients_have_no_intervals(patients: int, note: str | None) -> None:
    patient, p = np.repeat(np.arange(patients), 2), np.linspace(0.2, 0.8, 2 * patients)
    scores, draws = binary([0, 1] * patients, p, patient), bootstrap_draws(patients, 200, 1)
    metrics = class_metrics(scores, ("n", "t"), positive=1, threshold=0.5, draws=draws)
    assert metrics.notes == ((note,) if note else ())
    names = {"auc", "f1", "calibration_slope"}
    assert names & metrics.intervals.keys() == (names if patients >= 5 else set())
    roc = roc_of(scores.label == 1, p, scores.patient, patients=patients, seed=1)
    assert roc is not None and (roc.band is None) == (patients < 5)
    lines = evaluation_lines("test", Evaluation(metrics, {}, {}))
    # Between the table and why there are neither slides nor patients.
    assert [line.strip() for line in lines[2:-2]] == list(metrics.notes)
    # Earlier versions had intervals of two patients and more.
    stored = metrics.to_json() | {"intervals": {"auc": [0.1, 1.0]}, "notes": ["a", "intervals"]}
    read = Metrics.from_json(stored)
    assert read.intervals == ({} if patients < 5 else {"auc": (0.1, 1.0)})
    assert read.notes == ("a", note if patients < 5 else "intervals")


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
        np.testing.assert_allclose(predictions.output, [[1 - p, p] for p in expected])
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
    note = "threshold 0.5 used: validation has only one class"
    assert chosen(binary([1, 1], [0.2, 0.3]), 1, "youden") == (0.5, note)
    with pytest.raises(UsageError, match=r"--threshold: found 'best', expected youden"):
        chosen(validation, 1, "best")


@given(st.integers(0, 10_000), st.sampled_from([0.5, 0.8, 0.95, 1.0]))
def test_threshold_reaches_the_required_value(seed: int, share: float) -> None:
    """And no other threshold has a higher Youden index."""
    scores = random_scores(seed, 2, count=60)
    event, p = scores.label == 1, scores.output[:, 1]

    def rates(rule: str) -> tuple[float, float]:
        decided = p >= chosen(scores, 1, rule)[0]
        return decided[event].mean(), (~decided[~event]).mean()

    false_positive, true_positive, _ = sk.roc_curve(event, p)
    assert sum(rates("youden")) - 1 == pytest.approx((true_positive - false_positive).max())
    assert rates(f"sensitivity:{share}")[0] >= share - 1e-12
    assert rates(f"specificity:{share}")[1] >= share - 1e-12


def patches(
    seed: int, patients: Sequence[str], classes: tuple[str, ...] = ("n", "t")
) -> Predictions:
    """Return scores of twelve patches per slide and two slides per patient. Labels alternate by patient."""
    rng = np.random.default_rng(seed)
    slides = tuple(f"{name}-{i}" for name in patients for i in range(2))
    slide = np.repeat(np.arange(len(slides)), 12).astype(np.int32)
    label = slide // 2 % len(classes)
    probability = (
        rng.dirichlet(np.ones(len(classes)), len(slide)) + 0.3 * np.eye(len(classes))[label]
    )
    return class_predictions(
        classes,
        slides,
        tuple(patients),
        slide=slide,
        patient=slide // 2,
        x_l0=np.tile(np.arange(12) * 128, len(slides)),
        y_l0=np.zeros(len(slide), np.int64),
        label=label,
        probability=(probability / 1.3).astype(np.float32),
    )


def of_validation(scores: Predictions) -> EvaluatedPredictions:
    subsets: dict[Subset, Predictions] = {"validation": scores}
    settings = EvaluationSettings(resamples=0)
    return EvaluatedPredictions(evaluate_subsets(subsets, settings), subsets, settings)


def test_levels_without_metrics_have_a_reason() -> None:
    """Every patient has slides of two classes, every slide patches of two, or every patient has one slide."""
    items = np.arange(12, dtype=np.int32)
    scores = class_scores(items % 2, np.full((12, 2), 0.5), items // 2)
    reason = "not evaluated, because each has several labels"
    for changed, level, texts in (
        (scores, "patch", [f"patients: {reason}"]),
        (scores, "slide", [f"patients: {reason}"]),
        (replace(scores, slide=items // 2), "patch", [f"slides: {reason}", f"patients: {reason}"]),
        (replace(scores, patient=items), "patch", []),
        (replace(scores, patient=items), "patient", []),
    ):
        predictions = replace(changed, level=level)  # type: ignore[arg-type]
        evaluation = of_validation(predictions).evaluations["validation"]
        assert remarks(evaluation) == texts
        lines = [line.strip() for line in evaluation_lines("validation", evaluation)]
        assert set(texts) <= set(lines)
        same = "patients: same as slides, because each patient has one slide"
        assert (same in lines) == (level != "patient" and not texts)


def test_slides_of_annotated_patches_have_no_row_without_metrics() -> None:
    """All slides have patches of two classes, but the first, whose patches are of one: its AUC is undefined."""
    items = np.arange(12, dtype=np.int32)
    label = np.where(items < 3, 0, items % 2)
    scores = replace(binary(label, 0.8 * label, items // 3), slide=items // 3)
    evaluated = of_validation(scores)
    title, *lines = evaluation_lines("validation", evaluated.evaluations["validation"])
    columns = "validation n AUC bal. acc. acc. sens. spec. F1 Brier"
    assert title.split() == columns.split()
    assert lines[0].split()[:5] == ["patch", "12", "1.000", "1.000", "1.000"]
    reason = "not evaluated, because the AUC of 1 is undefined; 3 excluded, because they have several labels"
    assert [line.strip() for line in lines[1:]] == [f"slides: {reason}", f"patients: {reason}"]
    (table,) = metrics_blocks(evaluated)
    assert isinstance(table, Table)
    assert [*table.columns] == ["metric", "validation: patch"]
    assert all(cell.text for row in table.rows for cell in row)
    assert [note for _, _, note in metric_cards(evaluated)] == ["no interval"] * 2
    first, *_ = decisions(evaluated, "validation")
    assert (first.counts, first.right) == ({"a": 3}, 1.0)


def test_cards_show_how_many_patients_are_left_out() -> None:
    """Patient d has a slide of each class."""
    scores = patches(1, "abcd")
    scores = replace(scores, target=np.where(scores.slide[:, None] == 7, 0, scores.target))
    notes = [note for _, _, note in metric_cards(of_validation(scores))]
    assert notes[::2] == ["no interval"] * 2 + ["no interval; 1 of 4 patients left out"]


def test_curves_of_labels_are_drawn_for_every_split() -> None:
    """Each split has its own charts, with a curve per label."""
    target = np.array([[0, 1], [1, 0], [0, 0], [1, 1]], np.float64)
    task = Multilabel(("grade", "stage"))
    scores = replace(task_scores(task, target, 0.2 + 0.5 * target, range(4)), level="slide")
    settings = EvaluationSettings(resamples=0)
    splits: dict[Subset, Predictions] = {"validation": scores, "test": scores}
    evaluated = EvaluatedPredictions(evaluate_subsets(splits, settings), splits, settings)
    blocks = [block for block in CHARTS["multilabel"][1](evaluated) if isinstance(block, Block)]
    text = "".join(svg for block in blocks for svg in block.content)
    levels = [f"{level}, {split}" for level in ("slides", "patients") for split in splits]
    titles = [f"{chart}, {level}" for chart in ("ROC", "Precision and recall") for level in levels]
    titles += [f"Calibration, {split}" for split in splits]
    labels = [f"{title}: grade, stage" for title in titles]
    assert re.findall(r'aria-label="(.*?)"', text) == labels


def test_patients_of_the_training_are_counted() -> None:
    """Those of the predictions only, at any level."""
    settings = EvaluationSettings(resamples=0)
    text = "used in the training, too: 1 of 2 patients; these metrics are optimistic"
    for leaked, count, last, title in (
        ({"p", "other"}, 1, [text], "test  "),
        (set[str](), 0, [], "test (held out)"),
    ):
        evaluation = evaluate([(SLIDES, {})], settings, leaked)
        assert evaluation.in_training == count
        assert remarks(evaluation)[-1:] == last
        assert split_lines({"test": evaluation})[0].startswith(title)


def test_thresholds_do_not_depend_on_test_data() -> None:
    settings = EvaluationSettings(resamples=0)
    thresholds = choose_thresholds(patches(1, "abcdef"), settings)
    test = patches(2, "ghijkl")
    for target in (test.target, 1 - test.target):
        evaluation = evaluate([(replace(test, target=target), thresholds)], settings)
        assert evaluation.thresholds == thresholds
    assert len(thresholds) == 7


def test_pooled_folds_use_the_threshold_of_each_fold() -> None:
    settings = EvaluationSettings(resamples=20)
    folds = with_common_patients([patches(1, "abcdef"), patches(2, "ghijkl")])
    parts = [(fold, {"patch": Thresholds((v,))}) for fold, v in zip(folds, (0.2, 0.8), strict=True)]
    pooled = evaluate(parts, settings).finest
    assert pooled.thresholds.values == ()
    confusions = [evaluate([part], settings).finest.confusion for part in parts]
    np.testing.assert_array_equal(pooled.confusion, np.sum(confusions, axis=0))
    assert (pooled.count, pooled.patients) == (288, 12)
    output = np.concatenate([fold.output[:, 1] for fold in folds])
    label = np.concatenate([fold.label for fold in folds])
    assert pooled.auc == pytest.approx(sk.roc_auc_score(label, output))


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
    predictions = patches(1, "abc")
    write_predictions(tmp_path / "predictions.csv", [({"split": "test"}, predictions)])
    table = pandas.read_csv(tmp_path / "predictions.csv")
    columns = ["split", "slide", "patient", "x_l0", "y_l0", "label", "predicted", "p_n", "p_t"]
    assert list(table) == columns
    assert table["p_t"].dtype == "float64" and table["x_l0"].dtype == "int64"
    most_probable = np.where(predictions.output[:, 1] > 0.5, "t", "n")
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


@pytest.mark.parametrize(
    "path", sorted((GOLDEN / "evaluation").glob("*.csv")), ids=lambda path: path.stem
)
def test_evaluations_are_those_of_earlier_versions(path: Path) -> None:
    evaluated = evaluate_subsets(read_predictions(path), EvaluationSettings(resamples=50, top_k=2))
    text = json.dumps({subset: evaluation.to_json() for subset, evaluation in evaluated.items()})
    expected = json.loads(
        path.with_suffix(".json").read_text(),
        parse_float=lambda number: pytest.approx(float(number), abs=1e-9),
    )
    assert json.loads(text) == expected
    read = {subset: Evaluation.from_json(value) for subset, value in json.loads(text).items()}
    assert read == evaluated
    levels = (metrics for evaluation in read.values() for _, metrics in evaluation.named())
    names = {name.partition(":")[0] for metrics in levels for name in metrics.values}
    assert names <= METRIC_TITLES.keys()  # a metric without a title is in no report
