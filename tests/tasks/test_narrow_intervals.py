"""Intervals of small studies: those of errors with heavy tails and rare events, and remarks where they are too narrow."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.scores import class_scores, task_scores
from histopipe.tasks.intervals import bounded_interval, root_interval
from histopipe.tasks.metrics import metrics_of
from histopipe.tasks.registry import make_task
from histopipe.tasks.statistics import bootstrap_draws
from histopipe.tasks.survival import SurvivalStatistics

AGE = make_task("regression", ("age",))


# Their mean is 1, and their variance between patients 0.4 · 10 / 9.
SQUARES = [0.5, 1.5, 0.2, 1.8, 1, 1, 0.3, 1.7, 1, 1]


@pytest.mark.parametrize(
    ("squares", "slides", "variance"),
    [
        (SQUARES, 1, 2 / 10),  # normal errors have more, 2
        ([9.1, *[0.1] * 9], 1, 10 / 9 * (8.1**2 + 9 * 0.9**2) / 100),  # more than normal errors
        (np.repeat(SQUARES, 2), 2, 2 / 10),  # the number of patients counts
    ],
    ids=["even", "one large error", "two slides of each patient"],
)
def test_root_interval_by_hand(squares: list[float], slides: int, variance: float) -> None:
    patient = np.repeat(np.arange(10, dtype=np.int32), slides)
    reach = 2.2621571628 * math.sqrt(variance) / 2
    expected = (math.exp(-reach), math.exp(reach))
    assert root_interval(np.array(squares), patient) == pytest.approx(expected)


def test_root_interval_is_undefined_without_errors_or_for_one_patient() -> None:
    assert root_interval(np.zeros(5), np.arange(5, dtype=np.int32)) is None
    assert root_interval(np.ones(5), np.zeros(5, np.int32)) is None


@pytest.mark.parametrize(("patients", "least"), [(20, 0.92), (50, 0.93)])
def test_root_mean_square_errors_are_covered(patients: int, least: float) -> None:
    rng = np.random.default_rng(patients)
    ends = [
        root_interval(rng.normal(size=patients) ** 2, np.arange(patients, dtype=np.int32)) or (0, 0)
        for _ in range(1000)
    ]
    assert least < np.mean([low <= 1 <= high for low, high in ends]) < 0.985


def test_rare_events_widen_the_integrated_brier_score() -> None:
    rng, grid, hits = np.random.default_rng(2), np.array([2.0, 4, 6, 8]), []
    survival = np.exp(-np.exp(rng.normal(size=100_000))[:, None] * grid / 150)
    truth = np.trapezoid((survival * (1 - survival)).mean(axis=0), grid) / 6
    for seed in range(60):
        risk = rng.normal(size=40)
        lived, left = rng.exponential(150 * np.exp(-risk)), rng.uniform(0, 20, 40)
        output = np.column_stack([risk, np.exp(-np.exp(risk)[:, None] * grid / 150)])
        time, event = np.minimum(lived, left), (lived <= left).astype(float)
        patients = np.arange(40, dtype=np.int32)
        scores = SurvivalStatistics(
            time, event, output, grid.tolist(), patients, fold=np.zeros(len(time), np.int32)
        )
        draws = bootstrap_draws(40, 100, seed)
        values = scores.compute(draws)
        low, high = scores.better_intervals(draws, values)["brier"]
        variance, brier = float(np.nanvar(values["brier"])), scores.values()["brier"] or math.nan
        assert (low, high) == bounded_interval(brier, variance, 40)
        hits.append(low <= truth <= high)
    assert np.mean(hits) >= 0.85


def remarks(scores: object, patients: int) -> list[str]:
    notes = metrics_of(scores, draws=bootstrap_draws(patients, 20, 1)).notes  # type: ignore[arg-type]
    return [note for note in notes if "too narrow" in note]


def test_remarks_on_few_patients_of_a_class() -> None:
    rng = np.random.default_rng(3)
    label = np.array([0] * 20 + [1] * 4 + [2] * 9)
    probability = rng.dirichlet(np.ones(3), len(label))
    assert remarks(class_scores(label, probability), len(label)) == [
        "few patients (b 4 and c 9): intervals of F1, log loss and calibration error may be too narrow"
    ]
    assert not remarks(class_scores(np.repeat([0, 1, 2], 10), probability[:30]), 30)
    labels = make_task("multilabel", ("MSI", "BRAF"))
    target = np.stack([np.arange(24) < 3, np.arange(24) < 12], axis=1).astype(float)
    scores = task_scores(labels, target, rng.random((24, 2)), range(24))
    assert remarks(scores, 24) == [
        "few patients (MSI 1 3): intervals of F1, log loss and calibration error may be too narrow"
    ]


def test_remarks_on_heavy_tails() -> None:
    rng = np.random.default_rng(4)
    target = rng.normal(50, 10, (40, 1))
    errors = rng.normal(size=(40, 1))
    assert not remarks(task_scores(AGE, target, target + errors, range(40)), 40)
    errors[7] = 30
    (note,) = remarks(task_scores(AGE, target, target + errors, range(40)), 40)
    assert note.startswith("age: the twentieth of the patients with the largest errors makes 9")
    assert note.endswith("intervals of RMSE and R² may be too narrow")
