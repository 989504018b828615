"""Labels that are probably wrong: by hand, against an obvious version, and planted ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.scores import class_predictions, class_scores, task_scores
from histopipe.evaluation.label_errors import (
    contradicted,
    find_label_errors,
    read_label_errors,
    write_label_errors,
)
from histopipe.tasks.registry import make_task
from histopipe.tasks.task import EvaluationSettings, Predictions

SETTINGS = EvaluationSettings()


def obvious(probability: Any, label: Any, patient: Any) -> list[int]:
    """Return what `contradicted` returns, item by item."""
    classes = range(probability.shape[1])
    means = {}
    for c in classes:
        of_patients = [
            np.mean(
                [
                    p[c]
                    for p, i, j in zip(probability, label, patient, strict=True)
                    if (i, j) == (c, who)
                ]
            )
            for who in {j for i, j in zip(label, patient, strict=True) if i == c}
        ]
        means[c] = np.mean(of_patients) if of_patients else np.inf
    results = []
    for p, i in zip(probability, label, strict=True):
        likely = [c for c in classes if p[c] >= means[c] - 1e-9]
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
    label = draw.integers(-1, classes, items).astype(np.int32)
    patient = draw.integers(0, patients, items).astype(np.int32)
    assert contradicted(probability, label, patient).tolist() == obvious(
        probability, label, patient
    )


def test_repeating_the_patches_of_a_patient_changes_nothing() -> None:
    draw = np.random.default_rng(1)
    probability, label = draw.dirichlet(np.ones(3), 30), draw.integers(0, 3, 30).astype(np.int32)
    patient = np.arange(30, dtype=np.int32)
    many = np.repeat(np.arange(30), [1] * 29 + [50])
    once = contradicted(probability, label, patient)
    assert (contradicted(probability[many], label[many], patient[many]) == once[many]).all()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_planted_wrong_labels_are_found(seed: int) -> None:
    draw = np.random.default_rng(seed)
    true = draw.integers(0, 3, 300)
    wrong = np.zeros(300, bool)
    wrong[:30] = True
    label = np.where(wrong, (true + 1) % 3, true)
    logits = draw.normal(0, 1, (300, 3)) + 4 * np.eye(3)[true]
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = find_label_errors([class_scores(label, probability)], SETTINGS)
    results = [int(row["slide"]) for row in rows if row["level"] == "patch"]
    right = {int(number) for number in np.flatnonzero(wrong)}
    assert len(right & set(results)) >= 27 and len(set(results) - right) <= 10
    # The clearest are first.
    assert len(right & set(results[:20])) >= 19


def patches(output: Any, label: Any, **names: Any) -> Predictions:
    """Return predictions of two patches of each slide, one slide per patient."""
    count = len(label) // 2
    owner = np.repeat(np.arange(count, dtype=np.int32), 2)
    slides = tuple(f"s{i}" for i in range(count))
    patients = tuple(f"P{i}" for i in range(count))
    corners = np.tile([0, 256], count).astype(np.int64)
    places = (slides, patients, owner, owner, corners, 0 * corners)
    return class_predictions(("n", "t"), *places, label, np.array(output, np.float32), **names)


def test_slides_come_before_patches_with_the_share_of_patches(tmp_path: Path) -> None:
    first = [0.9, 0.8, 0.9, 0.9, 0.1, 0.05, 0.2, 0.1, 0.9, 0.3]
    output = [(p, 1 - p) for p in first]
    rows = find_label_errors([patches(output, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1])], SETTINGS)
    write_label_errors(tmp_path, rows)
    read = read_label_errors(tmp_path)
    # s4 has one patch of class n: as a whole, neither class is likely enough for it.
    assert [(row["level"], row["slide"], row["x_l0"], row["suggested"]) for row in read] == [
        ("patch", "s4", "0", "n")
    ]
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
    half = find_label_errors([one, other], SETTINGS)
    assert half == []


def test_each_label_of_several_and_no_numbers() -> None:
    draw = np.random.default_rng(1)
    target = draw.integers(0, 2, (40, 2)).astype(np.float64)
    output = np.abs(target - 0.1)
    output[3, 1] = 1 - output[3, 1]
    target[5, 0] = np.nan
    scores = task_scores(make_task("multilabel", ("er", "pr")), target, output, range(40))
    rows = find_label_errors([scores], SETTINGS)
    assert {(row["slide"], row["column"]) for row in rows} == {("3", "pr")}
    assert [row["level"] for row in rows] == ["slide", "patch"]
    numbers = task_scores(
        make_task("regression", ("age",)), target[:, :1], output[:, :1], range(40)
    )
    assert find_label_errors([numbers], SETTINGS) == []
