"""Labels that are probably wrong: by hand, against an obvious version, and planted ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.scores import class_predictions, class_scores, task_scores
from histopipe.evaluation.label_errors import (
    contradicted,
    count_by_chance,
    find_label_errors,
    label_errors_text,
    read_label_errors,
    write_label_errors,
)
from histopipe.tasks.predictions import EvaluationSettings, Predictions
from histopipe.tasks.registry import make_task
from histopipe.tasks.regression import Regression

SETTINGS = EvaluationSettings()


def obvious(probability: Any, label: Any, patient: Any) -> list[int]:
    """Return what `contradicted` returns, item by item."""
    table = pandas.DataFrame(probability).groupby([label, patient]).mean()
    means = table.groupby(level=0).mean()
    results = []
    for p, i in zip(probability, label, strict=True):
        likely = [c for c in means.index if c >= 0 and p[c] >= means.loc[c, c] - 1e-9]
        best = max(likely, key=lambda c: p[c], default=i)
        results.append(int(best) if i >= 0 and p[best] > p[i] + 1e-9 else -1)
    return results


def test_a_case_worked_by_hand() -> None:
    # Class 0 has the means 0.9 and 0.4 of two patients: 0.65 at least. Class 1: 0.8 and 0.3, so 0.55.
    first = np.array([0.9, 0.9, 0.9, 0.4, 0.2, 0.7])
    probability = np.stack([first, 1 - first], axis=1)
    label = np.array([0, 0, 0, 0, 1, 1], np.int32)
    patient = np.array([0, 0, 0, 1, 2, 3], np.int32)
    # The fourth has 0.6 for class 1, the last 0.7 for class 0.
    assert contradicted(probability, label, patient).tolist() == [-1, -1, -1, 1, -1, 0]


@given(
    st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 4), st.integers(1, 8), st.booleans()
)
def test_equals_the_obvious_version(
    seed: int, items: int, classes: int, patients: int, coarse: bool
) -> None:
    draw = np.random.default_rng(seed)
    probability = draw.dirichlet(np.ones(classes), items)
    if coarse:
        probability = np.round(probability, 1)  # with ties
    label, patient = draw.integers(-1, classes, items), draw.integers(0, patients, items)
    results = contradicted(probability, label.astype(np.int32), patient.astype(np.int32))
    assert results.tolist() == obvious(probability, label, patient)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_planted_wrong_labels_are_found(seed: int) -> None:
    draw = np.random.default_rng(seed)
    true = draw.integers(0, 3, 300)
    wrong = np.arange(300) < 30
    label = np.where(wrong, (true + 1) % 3, true)
    logits = draw.normal(0, 1, (300, 3)) + 4 * np.eye(3)[true]
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = find_label_errors([class_scores(label, probability)], SETTINGS)
    results = [int(row["slide"]) for row in rows if row["level"] == "patch"]
    right = set(range(30))
    assert len(right & set(results)) >= 27 and len(set(results) - right) <= 10
    # The clearest are first.
    assert len(right & set(results[:20])) >= 19


def patches(output: Any, label: Any, **names: Any) -> Predictions:
    """Return predictions of two patches of each slide, one slide per patient."""
    count = len(label) // 2
    owner = np.repeat(np.arange(count, dtype=np.int32), 2)
    slides, patients = (tuple(f"{letter}{i}" for i in range(count)) for letter in "sP")
    corners = np.tile([0, 256], count).astype(np.int64)
    places = (slides, patients, owner, owner, corners, 0 * corners)
    return class_predictions(("n", "t"), *places, label, np.array(output, np.float32), **names)


def test_slides_come_before_patches_with_the_share_of_patches(tmp_path: Path) -> None:
    first = [0.9, 0.8, 0.9, 0.9, 0.1, 0.05, 0.2, 0.1, 0.9, 0.3]
    output = [(p, 1 - p) for p in first]
    rows = find_label_errors([patches(output, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1])], SETTINGS)
    write_label_errors(tmp_path, rows)
    # s4 has one patch of class n: as a whole, neither class is likely enough for it.
    (row,) = read_label_errors(tmp_path)
    assert (row["level"], row["slide"], row["x_l0"], row["suggested"]) == ("patch", "s4", "0", "n")
    output[-1] = (0.95, 0.05)
    rows = find_label_errors([patches(output, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1])], SETTINGS)
    assert [(row["level"], row["slide"]) for row in rows] == [
        ("slide", "s4"),
        ("patch", "s4"),
        ("patch", "s4"),
    ]
    assert rows[0]["share"] == 1.0 and rows[0]["margin"] == pytest.approx(0.075 - 0.925)
    assert rows[1]["margin"] <= rows[2]["margin"]


def test_seeds_are_averaged() -> None:
    label = [0, 0, 1, 1, 1, 1]
    one = patches([(0.9, 0.1)] * 2 + [(0.1, 0.9)] * 2 + [(0.9, 0.1)] * 2, label)
    other = replace(one, output=one.output[:, ::-1])
    assert [row["slide"] for row in find_label_errors([one, one], SETTINGS)] == ["s2"] * 3
    assert find_label_errors([one, other], SETTINGS) == []


def test_each_label_of_several_and_no_numbers() -> None:
    draw = np.random.default_rng(1)
    target = draw.integers(0, 2, (40, 2)).astype(np.float64)
    output = np.abs(target - 0.1)
    output[3, 1] = 1 - output[3, 1]
    target[5, 0] = np.nan
    scores = task_scores(make_task("multilabel", ("er", "pr")), target, output, range(40))
    rows = find_label_errors([scores], SETTINGS)
    wrong = [(row["level"], row["slide"], row["column"]) for row in rows]
    assert wrong == [("slide", "3", "pr"), ("patch", "3", "pr")]
    numbers = task_scores(
        make_task("regression", ("age",)), target[:, :1], output[:, :1], range(40)
    )
    assert find_label_errors([numbers], SETTINGS) == []


@pytest.mark.parametrize(("signal", "scale"), [(0.5, 1.0), (1.0, 3.0), (2.0, 1.0)])
def test_right_labels_are_listed_as_often_as_stated(signal: float, scale: float) -> None:
    """Also if the models are too certain: the probabilities are calibrated before labels are drawn from them."""
    listed, stated = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        label = (rng.random(200) < 0.4).astype(int)
        logits = (
            np.log(2 / 3) + signal * (signal * label + rng.normal(size=200) - signal / 2)
        ) * scale
        p = 1 / (1 + np.exp(-logits))
        scores = replace(class_scores(label, np.stack([1 - p, p], axis=1)), level="slide")
        listed.append(len(find_label_errors([scores], SETTINGS)))
        stated.append(count_by_chance([scores], SETTINGS))
    assert np.mean(stated) == pytest.approx(np.mean(listed), rel=0.2, abs=2)
    rows = find_label_errors([scores], SETTINGS)
    text = label_errors_text(rows, stated[-1])
    assert text.startswith(
        f"{len(rows)} slides contradicted by the models; about {stated[-1]:.1f} slides"
    )
    assert label_errors_text([], 3.0) == ""


def test_numbers_have_no_labels_to_draw() -> None:
    ages = task_scores(Regression(("age",)), np.ones((3, 1)), np.ones((3, 1)), range(3))
    assert np.isnan(count_by_chance([ages], SETTINGS)) and find_label_errors([ages], SETTINGS) == []
