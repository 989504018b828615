"""Checks of predicted survival: against lifelines, by hand, and in reports of patients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.scores import task_scores
from histopipe.reports.failures import survival_text
from histopipe.tasks.curves import cox_check, reliability_curve, reliability_of, survival_checks
from histopipe.tasks.intervals import share_interval
from histopipe.tasks.metrics import Metrics, metrics_of
from histopipe.tasks.predictions import EvaluationSettings, scores_of
from histopipe.tasks.survival import Survival

REFERENCE = {
    0: (1.0356653998691565, 0.9297613957976754, 1.0765569586274681, 0.654515942320115),
    1: (1.20435598042919, 0.5782390409115954, 1.1755215740052922, 0.6700619531846078),
    2: (1.0069128039542017, 0.6008233957627215, 1.012743360454624, 0.531449790029012),
}
"""Coefficient and p value of lifelines 0.30.3, and those stratified by fold, with the rank of the times of events."""
FOLLOW_UP = {0: 1.8006965476434584, 1: 1.7581562806807667, 2: 1.3434274669857924}
"""Median of lifelines' KaplanMeierFitter with censoring as the event."""
DRAWS = np.empty((0, 200))


def survival_data(seed: int, patients: int = 80) -> tuple[Any, Any, Any, Any]:
    """Return risk, time, event and fold."""
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=patients)
    time, censored = rng.exponential(np.exp(-risk)), rng.exponential(2, patients)
    return risk, np.minimum(time, censored), time <= censored, np.arange(patients) % 3


@pytest.mark.parametrize("seed", REFERENCE)
def test_cox_models_and_follow_up_equal_those_of_lifelines(seed: int) -> None:
    risk, time, event, fold = survival_data(seed)
    alone = cox_check(risk, time, event, np.zeros(80, np.int32))
    values = (*alone, *cox_check(risk, time, event, fold))
    assert values == pytest.approx(REFERENCE[seed], abs=1e-6)
    target = np.column_stack([time, event])
    checks = survival_checks(target, risk[:, None], (), fold, None, log_hazards=False)
    assert checks.follow_up == pytest.approx(FOLLOW_UP[seed], abs=1e-12)
    assert (checks.slope, checks.calibration) == (None, ())


def test_tied_times_equal_those_of_lifelines() -> None:
    risk, time, event, _ = survival_data(3)
    values = cox_check(risk, np.ceil(4 * time), event, np.zeros(80, np.int32))
    assert values == pytest.approx((0.9525391977998101, 0.5437064566493972), abs=1e-6)


@pytest.mark.parametrize(
    ("risk", "event"), [([1.0] * 4, [1] * 4), ([1.0, 2, 3, 4], [0] * 4), ([1.0, 2], [1, 0])]
)
def test_without_information_there_is_no_coefficient(risk: list[float], event: list[int]) -> None:
    rows = np.array(event) == 1
    result = cox_check(
        np.array(risk), np.arange(len(risk), dtype=np.float64), rows, rows * np.int32(0)
    )
    assert result[1] is None


def test_p_values_of_proportional_hazards_are_uniform_and_see_other_hazards() -> None:
    p = []
    for seed in range(200):
        risk, time, event, fold = survival_data(seed, 100)
        p.append(cox_check(risk, time, event, fold)[1])
    values = np.array(p, np.float64)
    assert abs((values < 0.1).mean() - 0.1) < 3 * math.sqrt(0.1 * 0.9 / 200)
    rng = np.random.default_rng(1)
    risk = rng.normal(size=200)
    # High risks have early events, or else late ones: the effect turns around.
    time = np.where(rng.random(200) < 0.5, np.exp(-2 * risk) / 50, 2 + np.exp(2 * risk))
    assert (cox_check(risk, time, np.ones(200, bool), np.zeros(200, np.int32))[1] or 1) < 0.01


def scores_of_survival(seed: int, patients: int = 60, slides: int = 1) -> Any:
    """Return slides of patients with the right survival of exponential times at three grid times."""
    risk, time, event, _ = survival_data(seed, patients)
    grid = (0.2, 0.5, 1.0)
    output = np.column_stack([risk, *(np.exp(-t * np.exp(risk)) for t in grid)])
    rows = np.repeat(np.arange(patients), slides)
    task = Survival(("t", "e"), grid)
    target = np.column_stack([time, event])[rows]
    return task_scores(task, target, output[rows], rows, limits=(0.0,))


@given(seed=st.integers(0, 99), horizon=st.sampled_from([0.1, 0.4, 0.9, 5.0]))
@examples(10)
def test_calibration_compares_groups_of_equal_size_with_kaplan_meier(
    seed: int, horizon: float
) -> None:
    scores = scores_of_survival(seed)
    task = replace(scores.task, horizon=horizon)
    metrics = metrics_of(replace(scores, task=task), draws=DRAWS)
    checks = metrics.checks
    assert checks is not None and checks.horizon == min(horizon, 1.0)
    assert any("--horizon 5: the model has" in note for note in metrics.notes) == (horizon == 5)
    assert [place.count for place in checks.calibration] == [12] * 5
    (time, event), at = scores.target.T, checks.horizon
    p = np.array([1 - np.interp(at, (0, *task.grid), (1, *row)) for row in scores.output[:, 1:]])
    for rows, place in zip(np.array_split(np.argsort(p), 5), checks.calibration, strict=True):
        assert place.probability == pytest.approx(p[rows].mean())
        assert place.at_risk == (time[rows] >= at).sum()
        survival = 1.0
        for moment in np.sort(time[rows][(event[rows] == 1) & (time[rows] <= at)]):
            survival *= 1 - 1 / (time[rows] >= moment).sum()
        if place.observed is not None:
            assert place.observed == pytest.approx(1 - survival)
            low, high = place.interval or (0, 1)
            assert low <= place.observed <= high
    assert Metrics.from_json(metrics.to_json()) == metrics


def test_probabilities_until_the_horizon_are_right_in_simulation() -> None:
    apart = []
    for seed in range(40):
        checks = metrics_of(scores_of_survival(seed), draws=DRAWS).checks
        assert checks is not None
        apart += [
            p.observed - (p.probability or 0) for p in checks.calibration if p.observed is not None
        ]
    assert abs(np.mean(apart)) < 0.02


def test_slides_of_a_patient_are_no_independent_observations() -> None:
    """Curves, numbers at risk, log-rank test and checks are of patients; metrics are of both."""
    slides = scores_of_survival(2, slides=3)
    of_slides = metrics_of(slides, draws=DRAWS)
    assert (of_slides.groups, of_slides.log_rank, of_slides.checks) == ((), None, None)
    settings = EvaluationSettings(log_hazards=True)
    level = replace(slides, level="slide", patients=tuple(map(str, range(60))))
    patients = replace(scores_of(level, "patient", "mean", settings), limits=np.zeros((60, 1)))
    metrics, once = (
        metrics_of(patients, draws=DRAWS),
        metrics_of(scores_of_survival(2), draws=DRAWS),
    )
    assert sum(group.count for group in metrics.groups) == 60 == metrics.patients
    assert metrics.log_rank == once.log_rank and metrics.checks is not None
    assert metrics.checks.slope == pytest.approx(1, abs=0.5)
    assert metrics.outcomes == {"events": int(patients.target[:, 1].sum())} == of_slides.outcomes
    text = survival_text("Test", metrics)
    for words in ("60 patients with", "events, median follow-up", "proportional hazards p"):
        assert words in text
    assert "Cox" not in survival_text("Test", once)


def test_kaplan_meier_is_the_brier_score_to_beat() -> None:
    scores = scores_of_survival(5, 300)
    values = metrics_of(scores, draws=DRAWS).values
    assert (values["brier"] or 1) < (values["brier_km"] or 0)
    constant = replace(scores, output=np.tile(scores.output.mean(axis=0), (300, 1)))
    values = metrics_of(constant, draws=DRAWS).values
    assert values["brier_km"] == pytest.approx(values["brier"], abs=0.02)


def test_bins_have_the_intervals_of_shares_and_curves_are_lines_through_lines() -> None:
    rng = np.random.default_rng(3)
    probability, patient = rng.random(300), np.repeat(np.arange(150), 2).astype(np.int32)
    event = rng.random(300) < probability
    for place in reliability_of(probability, event, patient):
        rows = (probability >= place.low) & (probability < place.high)
        assert place.interval == share_interval(event[rows], patient[rows])
    _, (places, smooth) = reliability_curve(probability, event, patient)
    assert np.abs(smooth - places).max() < 0.2
    line: Any = 0.2 + 0.5 * probability
    _, (places, smooth) = reliability_curve(probability, line, patient)
    np.testing.assert_allclose(smooth, 0.2 + 0.5 * places)
    assert len(reliability_curve(probability[:9], event[:9], patient[:9])[1][0]) == 0
    many = rng.random(40_000)
    _, (places, smooth) = reliability_curve(many, many > 2, np.arange(40_000, dtype=np.int32))
    assert len(places) == 50 and not smooth.any()
