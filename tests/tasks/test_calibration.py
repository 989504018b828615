"""Intervals of areas and shares, calibration, average precision and net benefit, compared with published values and with
scikit-learn."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn import metrics as sk
from sklearn.linear_model import LogisticRegression

from helpers.examples import examples
from helpers.scores import class_metrics, class_predictions, class_scores, target_predictions
from histopipe.evaluation.evaluate import fit_temperature, tempered
from histopipe.tasks.calibration import decision_curve, recalibration
from histopipe.tasks.intervals import (
    auc_interval,
    delong,
    difference_interval,
    precision_interval,
    share_interval,
)
from histopipe.tasks.predictions import Metrics
from histopipe.tasks.statistics import bootstrap_draws
from histopipe.tasks.task import Predictions

Floats = NDArray[np.float64]
NO_DRAWS = np.zeros((0, 1))

# J. A. Hanley and B. J. McNeil, Radiology 143 (1982), table 2: ratings 1 to 5 of 58 normal and 51 abnormal images.
NORMAL, ABNORMAL = (33, 6, 6, 11, 2), (3, 2, 2, 11, 33)
RATING = np.repeat(np.tile(np.arange(1.0, 6), 2), [*NORMAL, *ABNORMAL])
ABNORMAL_ROWS = np.arange(109) >= 58
EACH = np.arange(109, dtype=np.int32)


def sample(
    seed: int, patients: int = 30, items: int = 1
) -> tuple[Floats, NDArray[np.bool_], NDArray[np.int32]]:
    """Return probabilities, events and patients."""
    rng = np.random.default_rng(seed)
    patient = np.repeat(np.arange(patients, dtype=np.int32), items)
    value = np.repeat(rng.normal(size=patients), items) + rng.normal(size=len(patient))
    return 1 / (1 + np.exp(-value)), rng.random(len(value)) < 1 / (1 + np.exp(-value / 2)), patient


def evaluated(
    probability: Floats, event: NDArray[np.bool_], patient: NDArray[np.int32], resamples: int = 0
) -> Metrics:
    scores = class_scores(
        event.astype(np.int32), np.stack([1 - probability, probability], axis=1), patient
    )
    draws = bootstrap_draws(int(patient.max()) + 1, resamples, 1) if resamples else NO_DRAWS
    return class_metrics(scores, ("n", "t"), positive=1, threshold=0.5, draws=draws)


def test_area_and_error_equal_the_published_example() -> None:
    area, variance = delong(ABNORMAL_ROWS, RATING, EACH)
    assert area == pytest.approx(0.893, abs=5e-4)
    # The example has 0.032, by a formula that assumes exponential distributions.
    assert math.sqrt(variance) == pytest.approx(0.032, abs=2e-3)


def test_score_interval_solves_its_equation() -> None:
    """At both ends, the area is 1.96 standard errors away, by the formula of Hanley and McNeil with equal groups."""
    interval = auc_interval(ABNORMAL_ROWS, RATING, EACH)
    assert interval is not None
    peers = 109 / 2 - 1
    area = sk.roc_auc_score(ABNORMAL_ROWS, RATING)
    for end in interval:
        q1, q2 = end / (2 - end), 2 * end**2 / (1 + end)
        variance = (end * (1 - end) + peers * (q1 + q2 - 2 * end**2)) / (58 * 51)
        assert abs(area - end) == pytest.approx(1.95996 * math.sqrt(variance), rel=1e-4)


@given(st.integers(0, 10_000))
def test_delong_equals_its_definition(seed: int) -> None:
    probability, event, patient = sample(seed, 12, 1)
    score = np.round(probability, 1)  # with ties
    if min(event.sum(), (~event).sum()) < 2:
        return
    pairs = (score[event][:, None] > score[~event]) + 0.5 * (score[event][:, None] == score[~event])
    expected = (
        pairs.mean(axis=1).var(ddof=1) / event.sum()
        + pairs.mean(axis=0).var(ddof=1) / (~event).sum()
    )
    area, variance = delong(event, score, patient)
    assert area == pytest.approx(pairs.mean())
    assert variance == pytest.approx(expected, abs=1e-12)


def test_copies_of_all_items_change_nothing() -> None:
    """Ten equal items per patient have the information of one."""
    probability, event, patient = sample(3, 40)
    alone = delong(event, probability, patient)
    event10, probability10, patient10 = event.repeat(10), probability.repeat(10), patient.repeat(10)
    assert delong(event10, probability10, patient10) == pytest.approx(alone)
    pooled = auc_interval(event10, probability10, patient10)
    interval = auc_interval(event, probability, patient)
    assert pooled is not None
    assert interval is not None
    assert pooled[1] - pooled[0] == pytest.approx(interval[1] - interval[0], rel=0.2)


@pytest.mark.parametrize("items", [1, 5])
def test_perfect_predictions_have_informative_intervals(items: int) -> None:
    event = np.repeat(np.arange(20) % 2 == 1, items)
    patient = np.repeat(np.arange(20, dtype=np.int32), items)
    metrics = evaluated(np.where(event, 0.9, 0.2), event, patient, resamples=200)
    assert metrics.auc == metrics.sensitivity == metrics.accuracy == metrics.average_precision == 1
    informative = (
        "auc",
        "sensitivity",
        "specificity",
        "accuracy",
        "balanced_accuracy",
        "average_precision",
    )
    for name in informative:
        low, high = metrics.intervals[name]
        assert 0.6 < low < 0.95, name
        assert high == 1
    assert "f1" not in metrics.intervals
    assert metrics.calibration_slope is None


@given(
    patients=st.integers(2, 12),
    items=st.integers(20, 40),
    share=st.floats(0.2, 0.8),
    exchanged=st.booleans(),
    seed=st.integers(0, 999),
)
@examples(25)
def test_one_error_changes_little_in_intervals_of_clusters(
    patients: int, items: int, share: float, exchanged: bool, seed: int
) -> None:
    """From no error to one, or from no hit to one, interval ends move by a few errors; an area has many more pairs."""
    rng = np.random.default_rng(seed)
    patient = np.repeat(np.arange(2 * patients, dtype=np.int32), items)
    event = patient < min(max(2, round(2 * patients * share)), 2 * patients - 2)
    probability = np.sort(rng.random(len(patient)))[::-1].copy()
    first = int(event.sum())
    swapped = probability.copy()
    swapped[[first - 1, first]] = probability[[first, first - 1]]
    if exchanged:
        event = ~event
    right = np.full(len(patient), not exchanged)
    wrong = right.copy()
    wrong[rng.integers(len(patient))] = exchanged
    areas = [auc_interval(event, values, patient) for values in (probability, swapped)]
    shares = [share_interval(decisions, patient) for decisions in (right, wrong)]
    for (before, after), step in ((areas, 0.01), (shares, 0.1)):
        assert before is not None
        assert before == pytest.approx(after, abs=step)
        assert before[1] - before[0] > 0.01


@given(st.integers(0, 999))
@examples(10)
def test_one_error_changes_little_in_the_interval_of_average_precision(seed: int) -> None:
    resampled = 1 - np.random.default_rng(seed).random(100) * 1e-3
    before = precision_interval(1.0, np.ones(100), 10, several=True)
    after = precision_interval(float(resampled.mean()), resampled, 10, several=True)
    assert before == pytest.approx(after, abs=0.02)  # it was above 0.2


def test_share_interval_is_wilsons() -> None:
    """The example of 81 of 263 of R. G. Newcombe, Statistics in Medicine 17 (1998), table 1."""
    right = np.arange(263) < 81
    interval = share_interval(right, np.arange(263, dtype=np.int32))
    assert interval == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_difference_interval_is_newcombes() -> None:
    """56 of 70 minus 48 of 80: example (a) of R. G. Newcombe, Statistics in Medicine 17 (1998), table 2, method 10."""
    intervals = []
    for count, total in ((56, 70), (48, 80)):
        interval = share_interval(np.arange(total) < count, np.arange(total, dtype=np.int32))
        assert interval is not None
        intervals.append((count / total, interval))
    assert difference_interval(*intervals) == pytest.approx((0.0524, 0.3339), abs=5e-5)


@given(st.integers(0, 10_000))
def test_average_precision_equals_scikit_learn(seed: int) -> None:
    probability, event, patient = sample(seed)
    probability = np.round(probability, 1)
    expected = (
        sk.average_precision_score(event, probability) if event.any() and not event.all() else None
    )
    metrics = evaluated(probability, event, patient)
    assert metrics.average_precision == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("seed", range(5))
def test_intercept_and_slope_equal_scikit_learn(seed: int) -> None:
    probability, event, patient = sample(seed, 60, 3)
    odds = np.log(probability / (1 - probability))
    values, _ = recalibration(probability, event, patient)
    model = LogisticRegression(C=1e12, tol=1e-10, max_iter=1000).fit(odds[:, None], event)
    assert values["calibration_slope"] == pytest.approx(model.coef_[0, 0], abs=1e-4)

    def loss(intercept: Floats) -> float:
        return float(np.logaddexp(0, np.where(event, -1, 1) * (odds + intercept[0])).sum())

    assert values["calibration_intercept"] == pytest.approx(minimize(loss, [0.0]).x[0], abs=1e-4)


@pytest.mark.nightly(
    reason="a simulation; test_evaluations_are_those_of_earlier_versions has such intervals"
)
@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_interval_of_the_calibration_error_holds_the_true_one(exponent: float) -> None:
    """Expect 95 % of 60 samples, with three standard errors."""
    rng = np.random.default_rng(2)

    def drawn(patients: int) -> tuple[Floats, NDArray[np.bool_], NDArray[np.int32]]:
        odds = rng.normal(size=patients) * 2
        event = rng.random(patients) < 1 / (1 + np.exp(-odds / exponent))
        return 1 / (1 + np.exp(-odds)), event, np.arange(patients, dtype=np.int32)

    true = evaluated(*drawn(100_000)).calibration_error
    assert true is not None
    held = 0
    for _ in range(60):
        low, high = evaluated(*drawn(60), resamples=200).intervals["calibration_error"]
        held += low - 1e-3 <= true <= high
    assert held >= 52


def test_net_benefit_equals_manual_calculation() -> None:
    """100 patients, 10 ill. At 10 %, 20 are treated, 8 of them ill: 8/100 - 12/100 · 0.1/0.9."""
    probability = np.repeat([0.4, 0.4, 0.05, 0.05], [8, 12, 2, 78])
    event = np.repeat([True, False, True, False], [8, 12, 2, 78])
    curve = decision_curve(probability, event)
    at = curve.probability.index(0.1)
    assert curve.model[at] == pytest.approx(0.08 - 0.12 / 9)
    assert curve.treat_all[at] == pytest.approx(0.1 - 0.9 / 9)
    assert curve.model[curve.probability.index(0.5)] == 0


def of_patches(probability: Floats, label: NDArray[np.int32]) -> Predictions:
    each, zeros = np.arange(len(label), dtype=np.int32), np.zeros(len(label), np.int32)
    names = tuple(map(str, range(probability.shape[1])))
    return class_predictions(
        names,
        ("s",),
        tuple(map(str, each)),
        zeros,
        each,
        zeros.astype(np.int64),
        zeros.astype(np.int64),
        label,
        probability.astype(np.float32),
    )


def test_temperature_is_found_and_applied() -> None:
    rng = np.random.default_rng(1)
    odds = rng.normal(size=(20_000, 3)) * 2
    truth = np.exp(odds) / np.exp(odds).sum(axis=1, keepdims=True)
    label = (truth.cumsum(axis=1) < rng.random((20_000, 1))).sum(axis=1).astype(np.int32)
    sharp = truth**3 / (truth**3).sum(axis=1, keepdims=True)
    assert list(fit_temperature(of_patches(sharp, label))) == pytest.approx([3], rel=0.05)
    assert tempered(sharp, [3.0]) == pytest.approx(truth, abs=1e-6)
    assert tempered(sharp, [1.0]) == pytest.approx(sharp, abs=1e-6)


def test_each_label_has_its_own_temperature() -> None:
    rng = np.random.default_rng(1)
    odds = rng.normal(size=(20_000, 2))
    target = (rng.random((20_000, 2)) < 1 / (1 + np.exp(-odds))).astype(np.float64)
    target[:100, 0] = np.nan
    probability = 1 / (1 + np.exp(-odds * [2.0, 0.5]))
    zeros = np.zeros(20_000, np.int32)
    scores = target_predictions(
        "multilabel",
        ("a", "b"),
        (),
        ("s",),
        tuple(map(str, range(20_000))),
        zeros,
        np.arange(20_000, dtype=np.int32),
        zeros.astype(np.int64),
        zeros.astype(np.int64),
        target,
        probability.astype(np.float32),
    )
    temperatures = fit_temperature(scores)
    assert temperatures == pytest.approx((2, 0.5), rel=0.1)
    assert tempered(probability, [2.0, 0.5]) == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-6)


@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 5))
def test_temperature_never_increases_the_log_loss(seed: int, patients: int, items: int) -> None:
    probability, event, patient = sample(seed, patients, items)
    both = np.stack([1 - probability, probability], axis=1)
    scores = dataclasses.replace(of_patches(both, event.astype(np.int32)), patient=patient)
    scaled = tempered(scores.output, fit_temperature(scores))[:, 1]
    before, after = (
        sk.log_loss(event, output, labels=[False, True]) for output in (scores.output[:, 1], scaled)
    )
    assert after <= before + 1e-7


def test_right_predictions_are_not_made_certain() -> None:
    """The fewer patients, the less the temperature changes probabilities."""
    highest = []
    for patients in (4, 40, 400):
        label = np.arange(patients, dtype=np.int32) % 2
        probability = np.where(label[:, None] == [0, 1], 0.8, 0.2)
        highest.append(tempered(probability, fit_temperature(of_patches(probability, label))).max())
    assert 0.8 < highest[0] < 0.9 < highest[1] < 0.99 < highest[2] < 0.999


def test_extreme_probabilities_stay_finite() -> None:
    probability = np.array([[0, 1], [1, 0], [1e-30, 1]], np.float32)
    for temperature in (0.05, 1.0, 20.0):
        scaled = tempered(probability, [temperature])
        assert np.isfinite(scaled).all()
        assert scaled.sum(axis=1) == pytest.approx(1)
        assert scaled[0, 1] == scaled[0].max()
    scores = of_patches(probability.astype(np.float64), np.array([0, 0, 1], np.int32))
    assert math.isfinite(fit_temperature(scores)[0])


def test_json_holds_all_values() -> None:
    metrics = evaluated(*sample(1, 40, 3), resamples=100)
    assert Metrics.from_json(metrics.to_json()) == metrics
    # Of an earlier version, without some of the metrics.
    earlier = metrics.to_json()
    earlier["threshold"] = earlier.pop("thresholds")["values"][0]
    new = ("average_precision", "calibration_intercept", "calibration_slope", "decision_curve")
    for name in (*new, "task", "groups", "log_rank"):
        del earlier[name]
    read = Metrics.from_json(earlier)
    assert (read.auc, read.thresholds) == (metrics.auc, metrics.thresholds)
    assert "average_precision" not in read.values
