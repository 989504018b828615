"""Prediction sets: by hand, against obvious versions, and their coverage in simulations."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.scores import class_scores, task_scores
from histopipe.errors import UsageError
from histopipe.evaluation.prediction_sets import (
    PredictionSets,
    _coverage_by_chance,
    _p_value,
    calibrate_sets,
    calibration_scores,
    check_calibration,
    cover,
    cover_parts,
    prediction_sets,
    set_cells,
)
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import SlideSplit, Splits
from histopipe.tasks.classification import Classification
from histopipe.tasks.predictions import EvaluationSettings, Predictions
from histopipe.tasks.registry import make_task

SETTINGS = EvaluationSettings(resamples=0)
TWO = Classification(classes=("a", "b"))
AGE = make_task("regression", ("age",))
UNIT = st.integers(0, 20).map(lambda number: number / 20)


def of_slides(predictions: Predictions) -> Predictions:
    return replace(predictions, level="slide")


def test_a_case_worked_by_hand() -> None:
    # Nine patients of class a with the scores 0.1 to 0.9: at 0.2, the quantile is the eighth, ceil(10 · 0.8).
    scores = {"label": [[i / 10 for i in range(1, 10)], [0.5, 0.6, 0.7, 0.8]]}
    probability = np.array([[0.2, 0.8], [0.19, 0.81], [0.95, 0.05]])
    sets = prediction_sets([scores], TWO, probability[None], 0.2)
    # Of class b, the quantile is the highest of four, ceil(5 · 0.8): 0.8, so that a probability of 0.05 is too low.
    assert sets["label"].tolist() == [[True, True], [False, True], [True, False]]
    assert set_cells(TWO, sets) == {"set": ["a|b", "b", "a"]}
    assert set_cells(TWO, {"label": np.zeros((1, 2), bool)}) == {"set": ["(none)"]}


@given(
    st.lists(st.lists(UNIT, max_size=12), min_size=1, max_size=3),
    st.lists(UNIT, min_size=3, max_size=3),
    st.sampled_from([0.05, 0.1, 0.2, 0.29, 0.5]),
)
def test_classes_have_p_values(
    calibration: list[list[float]], outputs: list[float], alpha: float
) -> None:
    """Against a count of each pair. The first class has the calibration, the second none: it is always inside."""
    models = [{"label": [sorted(of_model), []]} for of_model in calibration]
    probability = np.array(outputs)[: len(models), None, None]
    inside = prediction_sets(
        models, TWO, np.concatenate([probability, 1 - probability], axis=2), alpha
    )["label"]
    higher = sum(
        value >= 1 - p
        for of_model, (p,) in zip(calibration, probability[:, 0], strict=True)
        for value in of_model
    )
    total = sum(map(len, calibration))
    assert inside[0].tolist() == [(higher + 1) / (total + 1) - alpha > 1e-9, True]


@given(
    st.lists(st.lists(UNIT, min_size=1, max_size=8), min_size=1, max_size=3),
    st.lists(UNIT, min_size=3, max_size=3),
    st.sampled_from([0.1, 0.25, 0.5]),
)
def test_intervals_are_those_of_the_jackknife(
    errors: list[list[float]], outputs: list[float], alpha: float
) -> None:
    pairs = [(c, e) for c, of_model in zip(outputs, errors, strict=False) for e in of_model]
    lows, highs = (sorted(c + sign * e for c, e in pairs) for sign in (-1, 1))
    below = math.floor(round(alpha * (len(pairs) + 1), 9))
    above = math.ceil(round((1 - alpha) * (len(pairs) + 1), 9))
    expected = (-math.inf, math.inf) if not below else (lows[below - 1], highs[above - 1])
    models = [{"age": [sorted(of_model)]} for of_model in errors]
    output = np.array(outputs)[: len(models), None, None]
    interval = prediction_sets(models, AGE, output, alpha)["age"]
    assert interval[0].tolist() == pytest.approx(list(expected))


def test_each_patient_counts_once() -> None:
    probability = np.array([[0.9, 0.1], [0.5, 0.5], [0.3, 0.7], [0.2, 0.8]])
    scores = calibration_scores(
        of_slides(class_scores([0, 0, 1, 0], probability, [0, 0, 1, 2])), SETTINGS
    )
    rounded = [np.round(of_class, 6).tolist() for of_class in scores["patient"]["label"]]
    assert rounded == [[0.3, 0.8], [0.3]]
    of_slide = scores["slide"]["label"][0]
    assert len(of_slide) == 2 and of_slide[0] in (pytest.approx(0.1), pytest.approx(0.5))


def test_labels_and_numbers_leave_out_missing_targets() -> None:
    labels = make_task("multilabel", ("MSI", "BRAF"))
    target = np.array([[1, np.nan], [0, 1], [1, 0]])
    output = np.array([[0.9, 0.5], [0.2, 0.7], [0.6, 0.4]])
    predictions = of_slides(task_scores(labels, target, output, range(3)))
    scores = calibration_scores(predictions, SETTINGS)["patient"]
    rounded = {name: [np.round(of, 6).tolist() for of in values] for name, values in scores.items()}
    assert rounded == {"MSI": [[0.2], [0.1, 0.4]], "BRAF": [[0.4], [0.3]]}
    sets = prediction_sets([scores], labels, output[None], 0.5)
    assert set_cells(labels, sets) == {"set_MSI": ["1", "0", "1"], "set_BRAF": ["(none)", "1", "0"]}
    reached = cover(predictions, sets, [], (), 0.5)
    rows = {(row["column"], row["group"]): row for row in reached.rows}
    assert rows["BRAF", "all"]["count"] == 2 and rows["BRAF", "1"]["coverage"] == 1
    assert rows["MSI", "all"]["coverage"] == 1 and not reached.curve
    ages = task_scores(
        AGE, np.array([[30.0], [np.nan], [50.0]]), np.array([[31.0], [9], [47]]), range(3)
    )
    scores = calibration_scores(of_slides(ages), SETTINGS)["patient"]
    assert scores == {"age": [[1, 3]]}
    sets = prediction_sets([scores], AGE, np.array([[[40.0]]]), 0.34)
    assert set_cells(AGE, sets) == {"low_age": ["37"], "high_age": ["43"]}


def draw(rng: np.random.Generator, patients: int, most: int, shift: float = 0) -> Predictions:
    """Return predictions of slides, up to `most` of each patient, of three classes that are not equally frequent."""
    label = rng.choice(3, patients, p=(0.6, 0.3, 0.1))
    patient = np.repeat(np.arange(patients), rng.integers(1, most + 1, patients))
    logits = (1.5 * np.eye(3)[label] + rng.normal(size=(patients, 3)))[patient]
    logits += rng.normal(size=logits.shape) * 0.7 + shift * np.array([1, -1, 0])
    probability = np.exp(1.5 * logits)
    probability /= probability.sum(axis=1, keepdims=True)
    return of_slides(class_scores(label[patient], probability, patient))


MANY = pytest.mark.nightly(reason="more simulations; that of most patients is in make test")


@pytest.mark.parametrize(
    ("patients", "most"),
    [
        (200, 4),
        *(
            pytest.param(patients, most, marks=MANY)
            for patients, most in ((20, 1), (20, 4), (60, 1), (60, 4), (200, 1))
        ),
    ],
)
def test_coverage_in_simulation(patients: int, most: int) -> None:
    """Of patients, of those of each class, and of slides."""
    rng, runs, means = np.random.default_rng(patients + most), 100, []
    for _ in range(runs):
        scores = calibration_scores(draw(rng, patients, most), SETTINGS)
        test, shifted = (draw(rng, 200, most, shift) for shift in (0, 2))
        groups, of_shifted = (
            {row["group"]: row["coverage"] for row in reached.rows}
            for reached in (
                cover_parts([(part, [scores])], [], (), SETTINGS, 0.1) for part in (test, shifted)
            )
        )
        inside = prediction_sets([scores["slide"]], test.task, test.output[None], 0.1)["label"]
        slides = inside[np.arange(len(test)), test.label].mean()
        of_groups = [groups.get(name, np.nan) for name in ("all", "a", "b", "c")]
        means.append([*of_groups, slides, of_shifted["all"]])
    mean, error = np.nanmean(means, axis=0), np.nanstd(means, axis=0) / math.sqrt(runs)
    assert (mean[:5] > 0.9 - 3 * error[:5] - 1e-9).all(), mean
    # With enough patients, the sets are not larger than needed; and a shift is seen.
    if patients == 200:
        assert mean[0] < 0.93 and mean[4] < 0.95 and mean[5] < 0.8


def test_folds_calibrate_each_other() -> None:
    """Five models with other errors: the sets of each fold are calibrated by the other four."""
    rng, values = np.random.default_rng(6), []
    for _ in range(60):
        folds = [draw(rng, 30, 2) for _ in range(5)]
        scores = [calibration_scores(fold, SETTINGS) for fold in folds]
        parts = [(fold, scores[:i] + scores[i + 1 :]) for i, fold in enumerate(folds)]
        values.append(cover_parts(parts, [], (), SETTINGS, 0.1).rows[0]["coverage"])
    assert 0.9 - 3 * np.std(values) / math.sqrt(60) < np.mean(values) < 0.94


def test_a_shifted_site_is_named() -> None:
    rng = np.random.default_rng(7)
    here, far = draw(rng, 200, 1), draw(rng, 200, 1, shift=2)
    scores = calibration_scores(draw(rng, 200, 1), SETTINGS)
    slides = [
        SlideEntry(slide=str(i), patient=str(i), site=site, cells={"sex": "fm"[i % 2]})
        for i, site in enumerate(["here"] * 200 + ["far"] * 200)
    ]
    both = class_scores(
        np.concatenate([here.label, far.label]), np.concatenate([here.output, far.output])
    )
    reached = cover_parts([(of_slides(both), [scores])], slides, ["sex"], SETTINGS, 0.1)
    rows = {row["group"]: row for row in reached.rows}
    assert [*rows] == ["all", "a", "b", "c", "site far", "site here", "sex f", "sex m"]
    assert rows["site far"]["coverage"] < 0.85 < rows["site here"]["coverage"]
    assert rows["site here"]["interval"][0] < 0.9 < rows["site here"]["interval"][1]
    first, *warnings = reached.lines
    assert first.startswith("prediction sets for 90% of label, all: right for")
    assert any("label, site far: right for only" in line for line in warnings)
    assert not any("here" in line for line in warnings)
    assert PredictionSets(**json.loads(json.dumps(asdict(reached)))).lines == reached.lines


def test_exchangeable_patients_are_seldom_said_to_differ() -> None:
    """At most one evaluation in twenty has a warning, over all of its rows; a shift is seen in most."""
    rng, runs, warned = np.random.default_rng(9), 80, np.zeros((2, 80))
    for number in range(runs):
        scores = calibration_scores(draw(rng, 60, 3), SETTINGS)
        for row, shift in enumerate((0, 2)):
            test = draw(rng, 100, 3, shift)
            slides = [
                SlideEntry(slide=name, patient=patient, site="xy"[int(patient) % 2])
                for name, patient in zip(test.ids("slide"), test.ids("patient"), strict=True)
            ]
            reached = cover_parts([(test, [scores])], slides, [], SETTINGS, 0.1)
            warned[row, number] = any(line.startswith("warning") for line in reached.lines)
    assert warned[0].mean() <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs), warned[0].mean()
    assert warned[1].mean() > 0.7, warned[1].mean()


@given(count=st.integers(3, 60), missed=st.integers(0, 20), alpha=st.sampled_from([0.05, 0.1, 0.3]))
@examples(10)
def test_coverage_by_chance_is_beta_binomial(count: int, missed: int, alpha: float) -> None:
    from scipy.stats import betabinom

    rank = math.floor(round(alpha * (count + 1), 9))
    shares = _coverage_by_chance([list(range(count))], alpha)
    covered = np.arange(40) >= missed
    p = _p_value(covered, np.zeros(40, np.intp), shares)
    right = covered.sum()
    expected = betabinom.cdf(right, 40, count + 1 - rank, rank) if rank else float(missed == 0)
    assert p == pytest.approx(expected, abs=0.015)
    assert _p_value(covered, np.zeros(40, np.intp), []) is None


def test_nothing_is_said_of_slides_and_of_folds_that_calibrate_each_other() -> None:
    rng = np.random.default_rng(11)
    part = draw(rng, 60, 1, shift=3)
    scores = calibration_scores(draw(rng, 60, 1), SETTINGS)
    one, several = (
        cover_parts([(part, [scores] * count)], [], (), SETTINGS, 0.1) for count in (1, 2)
    )
    assert any("who differ" in line for line in one.lines)
    assert not any("who differ" in line for line in several.lines)
    assert {row["p"] for row in several.rows} == {None}
    # Results of earlier versions have no p values.
    rows = [{name: value for name, value in row.items() if name != "p"} for row in one.rows]
    assert len(replace(one, rows=rows).lines) == 1


def test_patients_with_several_targets_are_evaluated_by_slide() -> None:
    probability = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    part = of_slides(class_scores([0, 1, 1], probability, [0, 0, 1]))
    scores = calibration_scores(part, SETTINGS)
    reached = cover_parts([(part, [scores])], [], (), SETTINGS, 0.1)
    assert reached.level == "slide" and reached.rows[0]["count"] == 3


@given(st.lists(st.tuples(UNIT, st.integers(0, 1)), min_size=1, max_size=70))
def test_risk_coverage(items: list[tuple[float, int]]) -> None:
    first = np.array([p for p, _ in items])
    probability = np.stack([first, 1 - first], axis=1)
    scores = class_scores([label for _, label in items], probability)
    curve = cover(scores, {"label": np.ones((len(items), 2), bool)}, [], (), 0.1).curve
    expected = {}
    for least in set(probability.max(axis=1).tolist()):
        wrong = [(p < 0.5) == (label == 0) for p, label in items if max(p, 1 - p) >= least]
        expected[len(wrong) / len(items)] = np.mean(wrong)
    # Probabilities are on a grid of 20 steps, so that no point is left out.
    assert dict(curve) == pytest.approx(expected)


def test_a_run_is_calibrated_by_patients_who_have_chosen_nothing() -> None:
    rng = np.random.default_rng(8)
    parts: dict[Any, Predictions] = {
        name: draw(rng, 50, 1) for name in ("validation", "test", "calibration")
    }
    whole = calibrate_sets(parts, [], (), SETTINGS, 0.1)
    assert whole is not None and calibrate_sets(parts, [], (), SETTINGS, None) is None
    assert whole.scores == calibration_scores(parts["calibration"], SETTINGS)
    assert whole.rows[0]["count"] == 50
    del parts["calibration"]
    fold = calibrate_sets(parts, [], (), SETTINGS, 0.1)
    assert fold is not None
    assert fold.scores == calibration_scores(parts["test"], SETTINGS) and not fold.rows


def test_too_few_patients_are_refused() -> None:
    labels = "aaaaaaaaaabbbbbbbb"
    slides = [
        SlideSplit(0, i, f"s{i}", label, f"P{i}", None, None, 1, 0, np.full(1, 3, np.int8))
        for i, label in enumerate(labels)
    ]
    splits = Splits("patient", 1, (0.7, 0.15, 0.15), ("u",), ("a", "b"), tuple(slides))
    expected = (
        r"label b: found 8 patients who calibrate, expected at least 1 / 0\.1 - 1, which is 9"
    )
    with pytest.raises(UsageError, match=expected):
        check_calibration([splits], "calibration", 0.1)
    check_calibration([splits], "calibration", 0.12)
    numbers = replace(
        splits,
        task_name="regression",
        targets=("age",),
        slides=tuple(replace(slide, target=(float(slide.slide),)) for slide in slides),
    )
    check_calibration([numbers], "calibration", 0.1)
    with pytest.raises(UsageError, match="found 18 patients"):
        check_calibration([numbers], "calibration", 0.05)
