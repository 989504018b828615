"""Metrics that rank items, of folds: formed within each test set, so that models of folds are not compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.scores import class_scores, task_scores
from histopipe.evaluation.evaluate import evaluate
from histopipe.tasks.classification import Multilabel
from histopipe.tasks.intervals import delong
from histopipe.tasks.metrics import metrics_of
from histopipe.tasks.predictions import (
    EvaluationSettings,
    ModelPredictions,
    Predictions,
    fold_of_patients,
    joined_predictions,
)
from histopipe.tasks.regression import Regression
from histopipe.tasks.statistics import bootstrap_draws, roc_of
from histopipe.tasks.survival import Survival

RANKED = {
    "classification": {"auc": "pairs", "average_precision": "events"},
    "survival": {"c_index": "pairs"},
    "regression": {"pearson": "items", "spearman": "items"},
}
"""Metrics that rank, and what their means over folds are weighted by."""
FOLDS = 3


def parts_of(task: str, seed: int, count: int = 24) -> list[Predictions]:
    """Return predictions of three folds with `count` patients each, some with two items."""
    rng, parts = np.random.default_rng(seed), []
    for fold in range(FOLDS):
        patient = np.sort(rng.integers(0, count, count + 6))
        names = tuple(f"{fold}-{number}" for number in range(count))
        quality = rng.normal(size=len(patient))
        score = quality + rng.normal(size=len(patient)) + fold
        if task == "classification":
            p = 1 / (1 + np.exp(-score))
            part = class_scores((quality > 0.3).astype(int), np.stack([1 - p, p], 1), patient)
        elif task == "survival":
            target = np.stack([np.exp(-quality), rng.random(len(patient)) < 0.6], axis=1)
            part = task_scores(Survival(("t", "e")), target, score[:, None], patient)
        else:
            part = task_scores(Regression(("y",)), quality[:, None], score[:, None], patient)
        parts.append(replace(part, patients=names))
    return parts


def values_of(scores: Predictions, weights: Any = None) -> dict[str, float]:
    statistics = scores.task.statistics(scores)
    if weights is None:
        weights = np.ones((1, statistics.patients))
    of_items = weights[:, : statistics.patients]
    values = statistics.compute(of_items)
    return {name: float(np.nan_to_num(value[0], nan=-9)) for name, value in values.items()}


def pairs_of(scores: Predictions, weight: Any, kind: str) -> float:
    """Return the number of pairs, events or items of a fold, for (P,) weights."""
    rows = weight[scores.patient]
    if kind == "items":
        return float(rows.sum())
    if scores.task.name == "survival":
        time, event = scores.target.T
        comparable = (event[:, None] == 1) & (time[:, None] < time)
        return float(rows @ comparable @ rows)
    events = rows[scores.label == 1].sum()
    return float(events if kind == "events" else events * (rows.sum() - events))


@pytest.mark.parametrize("task", RANKED)
@given(seed=st.integers(0, 999))
@examples(10)
def test_metrics_of_folds_are_their_weighted_means(task: str, seed: int) -> None:
    """Also of a resample. Other metrics do not know of folds."""
    parts = parts_of(task, seed)
    joined = joined_predictions(parts, as_folds=True)
    weights = np.random.default_rng(seed).integers(0, 3, (1, len(joined.patients))).astype(float)
    within, pooled = values_of(joined, weights), values_of(joined_predictions(parts), weights)
    each = [joined.rows(np.flatnonzero(joined.fold == fold)) for fold in range(FOLDS)]
    for name, kind in RANKED[task].items():
        of_folds = [values_of(replace(part, fold=part.fold[:0]), weights)[name] for part in each]
        counts = [pairs_of(part, weights[0], kind) for part in each]
        assert within[name] == pytest.approx(np.average(of_folds, weights=counts), abs=1e-9), name
    ranked = {*RANKED[task], "auc", "c_index_uno"}
    assert {n: v for n, v in within.items() if n not in ranked} == {
        n: v for n, v in pooled.items() if n not in ranked
    }


@pytest.mark.parametrize("task", RANKED)
@given(seed=st.integers(0, 999))
@examples(10)
def test_models_of_folds_are_not_compared(task: str, seed: int) -> None:
    """A model whose outputs are higher than those of others ranks its own patients as before."""
    parts = parts_of(task, seed)
    moved = []
    for number, part in enumerate(parts):
        output = part.output.copy()
        if task == "classification":
            p = output[:, 1] ** (1 + 3 * number)
            output = np.stack([1 - p, p], axis=1)
        else:
            output = output + 5.0 * number
        moved.append(replace(part, output=output))
    before, after = (values_of(joined_predictions(each, as_folds=True)) for each in (parts, moved))
    for name in RANKED[task]:
        assert after[name] == pytest.approx(before[name], abs=1e-9)
    before, after = (values_of(joined_predictions(each)) for each in (parts, moved))
    # One of them may be the same by chance.
    assert any(after[name] != pytest.approx(before[name], abs=1e-9) for name in RANKED[task])


def test_uninformative_models_have_half_although_their_means_depend_on_the_fold() -> None:
    """Sites of different prevalence, each predicted by the prevalence of the others: all folds together have 0."""
    parts = []
    for site, events in enumerate((16, 13, 10, 7, 4)):
        p = 1 - events / 20
        part = class_scores([1] * events + [0] * (20 - events), [[1 - p, p]] * 20)
        parts.append(replace(part, patients=tuple(f"{site}-{n}" for n in range(20))))
    settings = EvaluationSettings(resamples=200)
    each: list[ModelPredictions] = [(part, {}) for part in joined_numbers(parts)]
    within, pooled = (
        evaluate(each, settings, within_folds=how).patient["mean"] for how in (True, False)
    )
    assert pooled.auc < 0.3 and within.auc == 0.5
    low, high = within.intervals["auc"]
    assert low < 0.5 < high
    assert within.brier == pooled.brier and within.confusion == pooled.confusion


def joined_numbers(parts: list[Predictions]) -> list[Predictions]:
    """Return the parts with common numbers of patients."""
    joined = joined_predictions(parts, as_folds=True)
    rows = [np.flatnonzero(joined.fold == fold) for fold in range(len(parts))]
    return [replace(joined.rows(each), fold=joined.fold[:0]) for each in rows]


def test_folds_without_a_pair_are_left_out_and_counted() -> None:
    rng, parts = np.random.default_rng(2), []
    for fold, labels in enumerate(([0] * 8, [0, 1] * 6, [1] * 3, [0, 0, 1] * 5)):
        p = rng.random(len(labels))
        part = class_scores(labels, np.stack([1 - p, p], axis=1))
        parts.append(replace(part, patients=tuple(f"{fold}-{n}" for n in range(len(labels)))))
    joined = joined_predictions(parts, as_folds=True)
    metrics = metrics_of(joined, draws=bootstrap_draws(len(joined.patients), 50, 1))
    some = joined_predictions([parts[1], parts[3]], as_folds=True)
    for name in ("auc", "average_precision"):
        assert metrics.values[name] == pytest.approx(values_of(some)[name])
    note = "2 of 4 folds have no pair to rank: left out of the metrics within folds"
    assert note in metrics.notes
    low, high = metrics.intervals["auc"]
    assert low < metrics.auc < high
    none = joined_predictions([parts[0], parts[2]], as_folds=True)
    assert metrics_of(none, draws=bootstrap_draws(11, 50, 1)).auc is None


@pytest.mark.parametrize("task", ["survival", "regression", "multilabel"])
def test_other_tasks_count_folds_without_a_pair(task: str) -> None:
    targets: Any = {
        "survival": (Survival(("t", "e")), [[3.0, 0], [2, 0], [2, 1]], [[1.0, 1], [1, 0], [2, 0]]),
        "regression": (Regression(("y",)), [[1.0]] * 3, [[1.0], [2], [3]]),
        "multilabel": (Multilabel(("y",)), [[1.0]] * 3, [[1.0], [0], [np.nan]]),
    }[task]
    task_of, *both = targets
    parts = [
        task_scores(task_of, np.array(target), np.array([[0.2], [0.5], [0.6]]), range(3))
        for target in both
    ]
    parts = [
        replace(part, patients=tuple(f"{i}-{n}" for n in range(3))) for i, part in enumerate(parts)
    ]
    joined = joined_predictions(parts, as_folds=True)
    assert joined.task.statistics(joined).folds_without_pairs == (task != "survival")
    if (
        task == "survival"
    ):  # an event at the last time is before those censored then, but not before events
        none = np.array([[3.0, 0], [2, 0], [3, 1]]), np.array([[3.0, 1], [2, 0], [3, 1]])
        counts = [
            joined.task.statistics(replace(joined, target=np.concatenate([target, both[1]])))
            for target in none
        ]
        assert [each.folds_without_pairs for each in counts] == [0, 1]


def test_patients_are_resampled_within_their_fold() -> None:
    parts = joined_numbers(parts_of("classification", 4))
    fold = fold_of_patients(parts)
    assert fold is not None
    draws = bootstrap_draws(len(fold), 30, 1, fold)
    for number in np.unique(fold):
        assert (draws[:, fold == number].sum(axis=1) == (fold == number).sum()).all()
    assert fold_of_patients([parts[0], parts[0]]) is None and fold_of_patients(parts[:1]) is None


@given(seed=st.integers(0, 99))
@examples(10)
def test_variance_within_folds_is_that_of_the_sum_over_folds(seed: int) -> None:
    """Of equal areas: the areas of folds are independent, so that the variance of their mean is a weighted sum."""
    rng = np.random.default_rng(seed)
    event, score = np.tile(rng.permutation(np.arange(30) < 12), 3), np.tile(rng.random(30), 3)
    fold, patient = np.repeat(np.arange(3), 30).astype(np.int32), np.arange(90, dtype=np.int32)
    one = delong(event[:30], score[:30], patient[:30], fold[:30])
    three = delong(event, score + fold, patient, fold)
    assert three[0] == pytest.approx(one[0])
    # Degrees of freedom are those of all patients together.
    assert three[1] == pytest.approx(one[1] / 3, rel=0.1)


def test_curve_of_folds_has_the_area_within_folds() -> None:
    parts = joined_numbers(parts_of("classification", 7, count=60))
    joined = joined_predictions(parts, as_folds=True)
    roc = roc_of(
        joined.label == 1,
        joined.output[:, 1],
        joined.patient,
        patients=len(joined.patients),
        seed=1,
        fold=joined.fold,
    )
    assert roc is not None and len(roc.folds) == FOLDS and roc.band is None
    area = np.trapezoid(roc.true_positive, roc.false_positive)
    assert area == pytest.approx(values_of(joined)["auc"], abs=0.02)
    assert (np.diff(roc.true_positive) >= 0).all() and len(roc.precision) == len(roc.recall) - 1
