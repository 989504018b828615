"""Intervals of areas and shares, calibration, average precision and net benefit, compared with published values and with
scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn import metrics as sk
from sklearn.linear_model import LogisticRegression

from helpers.examples import examples
from helpers.scores import class_metrics, class_scores, task_scores
from histopipe.evaluation.evaluate import fit_temperature, tempered
from histopipe.tasks.classification import Multilabel
from histopipe.tasks.curves import decision_curve, recalibration
from histopipe.tasks.intervals import (
    auc_interval,
    delong,
    difference_interval,
    precision_interval,
    share_interval,
)
from histopipe.tasks.metrics import Metrics
from histopipe.tasks.statistics import bootstrap_draws

Floats = NDArray[np.float64]
NO_DRAWS = np.zeros((0, 1))
NO_INTERVAL = (math.nan, math.nan)

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
    area, variance = delong(ABNORMAL_ROWS, RATING, EACH, 0 * EACH)
    assert area == pytest.approx(0.893, abs=5e-4)
    # The example has 0.032, by a formula that assumes exponential distributions.
    assert math.sqrt(variance) == pytest.approx(0.032, abs=2e-3)


def test_score_interval_solves_its_equation() -> None:
    """At both ends, the area is 1.96 standard errors away, by the formula of Hanley and McNeil with equal groups."""
    area = sk.roc_auc_score(ABNORMAL_ROWS, RATING)
    for end in auc_interval(ABNORMAL_ROWS, RATING, EACH, 0 * EACH) or NO_INTERVAL:
        q1, q2 = end / (2 - end), 2 * end**2 / (1 + end)
        variance = (end * (1 - end) + (109 / 2 - 1) * (q1 + q2 - 2 * end**2)) / (58 * 51)
        assert abs(area - end) == pytest.approx(1.95996 * math.sqrt(variance), rel=1e-4)


@given(st.integers(0, 10_000))
def test_delong_equals_its_definition(seed: int) -> None:
    probability, event, patient = sample(seed, 12, 1)
    assume(min(event.sum(), (~event).sum()) > 1)
    score = np.round(probability, 1)  # with ties
    pairs = (score[event][:, None] > score[~event]) + 0.5 * (score[event][:, None] == score[~event])
    variance = (
        pairs.mean(axis=1).var(ddof=1) / event.sum()
        + pairs.mean(axis=0).var(ddof=1) / (~event).sum()
    )
    area_and_variance = delong(event, score, patient, 0 * patient)
    assert area_and_variance == pytest.approx((pairs.mean(), variance), abs=1e-12)


def test_copies_of_all_items_change_nothing() -> None:
    """Ten equal items per patient have the information of one."""
    probability, event, patient = sample(3, 40)
    items = (event, probability, patient, 0 * patient)
    copies = (event.repeat(10), probability.repeat(10), patient.repeat(10), 0 * patient.repeat(10))
    assert delong(*copies) == pytest.approx(delong(*items))
    intervals = [auc_interval(*rows) or NO_INTERVAL for rows in (items, copies)]
    assert np.ptp(intervals[1]) == pytest.approx(np.ptp(intervals[0]), rel=0.2)


@pytest.mark.parametrize("items", [1, 5])
def test_perfect_predictions_have_informative_intervals(items: int) -> None:
    event = np.repeat(np.arange(20) % 2 == 1, items)
    patient = np.repeat(np.arange(20, dtype=np.int32), items)
    metrics = evaluated(np.where(event, 0.9, 0.2), event, patient, resamples=200)
    assert metrics.auc == metrics.sensitivity == metrics.accuracy == metrics.average_precision == 1
    shares = ("sensitivity", "specificity", "accuracy", "balanced_accuracy")
    for name in ("auc", "average_precision", *shares):
        low, high = metrics.intervals[name]
        assert 0.6 < low < 0.95 < high == 1, name
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
    probability = np.sort(rng.random(len(patient)))[::-1]
    first = int(event.sum())
    swapped = probability.copy()
    swapped[[first - 1, first]] = probability[[first, first - 1]]
    areas = [
        auc_interval(event ^ exchanged, p, patient, 0 * patient) for p in (probability, swapped)
    ]
    right = np.full(len(patient), not exchanged)
    one = np.arange(len(patient)) == rng.integers(len(patient))
    shares = [share_interval(decisions, patient) for decisions in (right, right ^ one)]
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
    interval = share_interval(np.arange(263) < 81, np.arange(263, dtype=np.int32))
    assert interval == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_difference_interval_is_newcombes() -> None:
    """56 of 70 minus 48 of 80: example (a) of R. G. Newcombe, Statistics in Medicine 17 (1998), table 2, method 10."""
    first, second = (
        share_interval(np.arange(total) < count, np.arange(total, dtype=np.int32)) or NO_INTERVAL
        for count, total in ((56, 70), (48, 80))
    )
    interval = difference_interval((56 / 70, first), (48 / 80, second))
    assert interval == pytest.approx((0.0524, 0.3339), abs=5e-5)


@pytest.mark.parametrize("seed", range(5))
def test_slope_equals_scikit_learn_and_intercept_its_definition(seed: int) -> None:
    probability, event, patient = sample(seed, 60, 3)
    odds = np.log(probability / (1 - probability))
    values, _ = recalibration(probability, event, patient)
    model = LogisticRegression(C=1e12, tol=1e-10, max_iter=1000).fit(odds[:, None], event)
    assert values["calibration_slope"] == pytest.approx(model.coef_[0, 0], abs=1e-4)
    # With the intercept added, the mean probability is the share of events.
    shifted = odds + (values["calibration_intercept"] or math.nan)
    assert (1 / (1 + np.exp(-shifted))).mean() == pytest.approx(event.mean(), abs=1e-8)


def test_net_benefit_equals_manual_calculation() -> None:
    """100 patients, 10 ill. At 10 %, 20 are treated, 8 of them ill: 8/100 - 12/100 · 0.1/0.9."""
    probability = np.repeat([0.4, 0.4, 0.05, 0.05], [8, 12, 2, 78])
    event = np.repeat([True, False, True, False], [8, 12, 2, 78])
    curve = decision_curve(probability, event)
    at = curve.probability.index(0.1)
    benefits = (curve.model[at], curve.treat_all[at])
    assert benefits == pytest.approx((0.08 - 0.12 / 9, 0.1 - 0.9 / 9))
    assert curve.model[curve.probability.index(0.5)] == 0


def test_temperature_is_found_and_applied() -> None:
    rng = np.random.default_rng(1)
    odds = rng.normal(size=(20_000, 3)) * 2
    truth = np.exp(odds) / np.exp(odds).sum(axis=1, keepdims=True)
    label = (truth.cumsum(axis=1) < rng.random((20_000, 1))).sum(axis=1).astype(np.int32)
    sharp = truth**3 / (truth**3).sum(axis=1, keepdims=True)
    assert list(fit_temperature(class_scores(label, sharp))) == pytest.approx([3], rel=0.05)
    assert tempered(sharp, [3.0]) == pytest.approx(truth, abs=1e-6)
    assert tempered(sharp, [1.0]) == pytest.approx(sharp, abs=1e-6)


def test_each_label_has_its_own_temperature() -> None:
    rng = np.random.default_rng(1)
    odds = rng.normal(size=(20_000, 2))
    target = (rng.random((20_000, 2)) < 1 / (1 + np.exp(-odds))).astype(np.float64)
    target[:100, 0] = np.nan
    probability = 1 / (1 + np.exp(-odds * [2.0, 0.5]))
    scores = task_scores(Multilabel(("a", "b")), target, probability, range(20_000))
    assert fit_temperature(scores) == pytest.approx((2, 0.5), rel=0.1)
    assert tempered(probability, [2.0, 0.5]) == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-6)


@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 5))
def test_temperature_never_increases_the_log_loss(seed: int, patients: int, items: int) -> None:
    probability, event, patient = sample(seed, patients, items)
    scores = class_scores(
        event.astype(int), np.stack([1 - probability, probability], axis=1), patient
    )
    scaled = tempered(scores.output, fit_temperature(scores))
    before, after = (
        sk.log_loss(event, output[:, 1], labels=[False, True]) for output in (scores.output, scaled)
    )
    assert after <= before + 1e-7


def test_right_predictions_are_not_made_certain() -> None:
    """The fewer patients, the less the temperature changes probabilities."""
    highest = []
    for patients in (4, 40, 400):
        label = np.arange(patients) % 2
        probability = np.where(label[:, None] == [0, 1], 0.8, 0.2)
        temperature = fit_temperature(class_scores(label, probability))
        highest.append(tempered(probability, temperature).max())
    assert 0.8 < highest[0] < 0.9 < highest[1] < 0.99 < highest[2] < 0.999


def test_extreme_probabilities_stay_finite() -> None:
    probability = np.array([[0, 1], [1, 0], [1e-30, 1]], np.float32)
    for temperature in (0.05, 1.0, 20.0):
        scaled = tempered(probability, [temperature])
        assert np.isfinite(scaled).all()
        assert scaled.sum(axis=1) == pytest.approx(1)
        assert scaled[0, 1] == scaled[0].max()
    assert math.isfinite(fit_temperature(class_scores([0, 0, 1], probability))[0])


def test_json_holds_all_values() -> None:
    metrics = evaluated(*sample(1, 40, 3), resamples=100)
    value = metrics.to_json()
    assert Metrics.from_json(value) == metrics
    # Of an earlier version, without some of the metrics.
    new = {"average_precision", "calibration_intercept", "calibration_slope", "decision_curve"}
    new |= {"task", "groups", "log_rank", "thresholds"}
    earlier = {name: value[name] for name in value.keys() - new}
    read = Metrics.from_json(earlier | {"threshold": metrics.thresholds.values[0]})
    assert (read.auc, read.thresholds) == (metrics.auc, metrics.thresholds)
    assert "average_precision" not in read.values
