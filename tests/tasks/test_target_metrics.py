"""Metrics of several labels, numbers and survival: compared with scikit-learn, SciPy and scikit-survival."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics as sk
from sklearn.linear_model import LogisticRegression

from helpers.examples import examples
from helpers.scores import aggregated, task_scores
from histopipe.errors import DamagedStore
from histopipe.evaluation.evaluate import evaluate, evaluate_subsets, evaluation_lines
from histopipe.predictions.prediction_tables import read_predictions, write_predictions
from histopipe.tasks.choices import name_of
from histopipe.tasks.classification import Classification, Multilabel
from histopipe.tasks.metrics import Metrics
from histopipe.tasks.predictions import (
    ARRAYS,
    EvaluationSettings,
    Predictions,
    Thresholds,
    joined_predictions,
    with_common_patients,
)
from histopipe.tasks.regression import Regression, RegressionStatistics
from histopipe.tasks.survival import (
    Survival,
    breslow_survival,
    partial_likelihood,
    time_grid,
)
from histopipe.tasks.task import Task

# Of scikit-survival.
pytestmark = pytest.mark.filterwarnings("ignore")
if importlib.util.find_spec("sksurv"):  # not for Python 3.13
    from sksurv.compare import compare_survival
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.linear_model.coxph import CoxPHOptimizer
    from sksurv.metrics import (
        concordance_index_censored,
        concordance_index_ipcw,
        cumulative_dynamic_auc,
        integrated_brier_score,
    )
    from sksurv.nonparametric import CensoringDistributionEstimator, kaplan_meier_estimator
    from sksurv.util import Surv
needs_scikit_survival = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="a library of scikit-survival has no wheel for Python 3.13"
)


def cohort(
    seed: int, count: int = 80, *, decimals: int = 6
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return risk, time and event of patients. Few decimals give tied times and risks."""
    rng = np.random.default_rng(seed)
    risk = np.round(rng.normal(size=count), decimals)
    time, censored = rng.exponential(np.exp(-risk)), rng.exponential(1.5, count)
    event = (time <= censored).astype(np.float64)
    # Binary fractions, so that times of the grid are equal to them or clearly different.
    grain = 8.0**decimals
    times = np.asarray(np.ceil(np.minimum(time, censored) * grain) / grain, np.float64)
    return np.asarray(risk, np.float64), times, event


def inside_times(grid: list[float], time: NDArray[np.float64]) -> list[float]:
    return [at for at in grid if time.min() <= at < time.max()]


def compute(statistics: Any, weights: NDArray[np.float64]) -> dict[str, float]:
    return {name: float(values[0]) for name, values in statistics.compute(weights).items()}


def statistics_of(task: Task, target: Any, output: Any, **settings: Any) -> Any:
    return task.statistics(task_scores(task, target, output, range(len(target)), **settings))


def of_survival(risk: Any, time: Any, event: Any, grid: Sequence[float], survival: Any) -> Any:
    """Return the statistics of (N,) patients with (N, G) survival at the times of the grid."""
    task = Survival(("time", "event"), tuple(grid))
    return statistics_of(task, np.column_stack([time, event]), np.column_stack([risk, survival]))


@needs_scikit_survival
@pytest.mark.parametrize("decimals", [6, 1])
@given(seed=st.integers(0, 1000))
@examples(12)
def test_survival_metrics_equal_those_of_scikit_survival(seed: int, decimals: int) -> None:
    risk, time, event = cohort(seed, decimals=decimals)
    grid = time_grid(time, event)
    survival = np.exp(-np.outer(np.exp(risk), grid))
    statistics = of_survival(risk, time, event, grid, survival)
    metrics = compute(statistics, np.ones((1, len(risk))))
    truth, inside = Surv.from_arrays(event == 1, time), inside_times(grid, time)
    expected = {"c_index": concordance_index_censored(event == 1, time, risk)[0]}
    # At a last time with censored patients, scikit-survival has no value for events: see the next test.
    censored = CensoringDistributionEstimator().fit(truth)
    if (censored.predict_proba(time[event == 1]) > 0).all():
        columns = survival[:, [grid.index(at) for at in inside]]
        expected |= {
            "c_index_uno": concordance_index_ipcw(truth, truth, risk)[0],
            "auc": cumulative_dynamic_auc(truth, truth, risk, inside)[1],
            "brier": integrated_brier_score(truth, truth, columns, inside),
        }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    # A weight of a patient is the number of times that the patient occurs.
    weights = np.random.default_rng(seed).integers(0, 3, len(risk))
    rows = np.repeat(np.arange(len(risk)), weights)
    again = of_survival(risk[rows], time[rows], event[rows], grid, survival[rows])
    repeated = compute(again, np.ones((1, len(rows))))
    if inside_times(grid, time[rows]) != inside:
        del repeated["auc"], repeated["brier"]
    weighted = compute(statistics, weights[None].astype(np.float64))
    assert {name: weighted[name] for name in repeated} == pytest.approx(repeated, nan_ok=True)


@needs_scikit_survival
@pytest.mark.parametrize("units", [12, 1])
@given(seed=st.integers(0, 1000))
@examples(10)
def test_survival_metrics_of_monthly_and_yearly_times(units: int, seed: int) -> None:
    """At the last time, patients have the event and are censored: metrics are those of scikit-survival before that time."""
    risk, time, event = cohort(seed, 60)
    time = np.minimum(np.ceil(2 * units * time), 6 * units) / units
    time[:2], event[:2] = time.max(), (0, 1)
    grid = inside_times(np.unique(time).tolist(), time)
    survival = np.exp(-np.outer(np.exp(risk), grid))
    statistics = of_survival(risk, time, event, grid, survival)
    metrics = compute(statistics, np.ones((1, len(risk))))
    truth, last = Surv.from_arrays(event == 1, time), time.max()
    before = Surv.from_arrays((event == 1) & (time < last), time)  # as scikit-survival needs
    auc = cumulative_dynamic_auc(truth, before, risk, grid)[1]
    assume(math.isfinite(auc))  # scikit-survival has no value if nobody has the event before a time
    expected = {
        "c_index_uno": concordance_index_ipcw(truth, truth, risk, tau=last)[0],
        "auc": auc,
        "brier": integrated_brier_score(truth, truth, survival, grid),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert f"at the last time, {last:g}," in statistics.remarks()[0]
    late = of_survival(risk, time, event, [2 * last], risk)
    assert "0 of the 1 times of the model" in late.remarks()[1]
    single = of_survival(risk, time, event, [float(np.median(time))], risk)
    assert "1 of the 1 times of the model" in single.remarks()[-1]


@needs_scikit_survival
@pytest.mark.parametrize("decimals", [6, 1])
@given(seed=st.integers(0, 1000))
@examples(10)
def test_cox_regression_equals_that_of_scikit_survival(seed: int, decimals: int) -> None:
    rng = np.random.default_rng(seed)
    _, time, event = cohort(seed, 40, decimals=decimals)
    covariates = rng.normal(size=(40, 2))
    truth = Surv.from_arrays(event.astype(bool), time)
    fitted = CoxPHSurvivalAnalysis(ties="efron").fit(covariates, truth)
    risk = covariates @ fitted.coef_
    loss, gradient = partial_likelihood(risk, time, event)
    optimizer = CoxPHOptimizer(covariates, event == 1, time, np.zeros(2), "efron")
    assert loss / 40 == pytest.approx(optimizer.nlog_likelihood(fitted.coef_), rel=1e-6)
    assert covariates.T @ gradient == pytest.approx(0, abs=1e-2)  # at the maximum of the likelihood
    steps = 1e-6 * np.eye(40)
    above, below = (
        [partial_likelihood(risk + sign * step, time, event)[0] for step in steps]
        for sign in (1, -1)
    )
    assert gradient == pytest.approx((np.array(above) - below) / 2e-6, abs=1e-6)
    baseline = fitted.predict_survival_function(np.zeros((1, 2)))[0](time_grid(time, event))
    ours = breslow_survival(risk, time, event, time_grid(time, event))
    assert ours == pytest.approx(baseline, rel=1e-6)
    # Weight 0 leaves a patient out.
    kept = rng.random(40) < 0.7
    some, slopes = partial_likelihood(risk, time, event, kept.astype(np.float64))
    assert some == pytest.approx(partial_likelihood(risk[kept], time[kept], event[kept])[0])
    assert (slopes[~kept] == 0).all()


@given(seed=st.integers(0, 1000), ties=st.booleans())
@examples(20)
def test_regression_metrics_equal_those_of_scikit_learn(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(30, 2))
    output = target + rng.normal(size=(30, 2))
    if ties:
        target, output = np.round(target), np.round(output)
    target[rng.random((30, 2)) < 0.1] = np.nan
    statistics = statistics_of(Regression(("a", "b")), target, output)
    for weight in (np.ones(30, int), rng.integers(0, 3, 30)):
        expected: dict[str, float] = {}
        for number, name in enumerate("ab"):
            rows = np.repeat(np.arange(30), weight)
            rows = rows[np.isfinite(target[rows, number])]
            true, predicted = target[rows, number], output[rows, number]
            expected |= {
                f"r2:{name}": sk.r2_score(true, predicted),
                f"mae:{name}": sk.mean_absolute_error(true, predicted),
                f"rmse:{name}": sk.root_mean_squared_error(true, predicted),
                f"pearson:{name}": stats.pearsonr(true, predicted)[0],
                f"spearman:{name}": stats.spearmanr(true, predicted)[0],
            }
        metrics = compute(statistics, weight[None].astype(float))
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)
        assert metrics["r2"] == pytest.approx((metrics["r2:a"] + metrics["r2:b"]) / 2)
        assert "mae" not in metrics  # of different units


@given(seed=st.integers(0, 1000), scale=st.integers(-100, 100), offset=st.integers(0, 9))
@examples(20)
def test_regression_metrics_of_any_scale_and_offset(seed: int, scale: int, offset: int) -> None:
    """Metrics without unit do not depend on the unit: targets may vary little, or be far from zero."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=20)
    output = target + rng.normal(size=20) / 2
    patients, weights = np.arange(20, dtype=np.int32), rng.integers(0, 3, (3, 20)).astype(float)
    plain, moved = (
        RegressionStatistics(
            (target + shift) * factor,
            (output + shift) * factor,
            patients,
            fold=np.zeros(20, np.int32),
        ).compute(weights)
        for shift, factor in ((0, 1.0), (10**offset, 10.0**scale))
    )
    for name in ("r2", "pearson", "spearman"):
        assert moved[name] == pytest.approx(plain[name], abs=1e-5)
    assert moved["mae"] / 10.0**scale == pytest.approx(plain["mae"], abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e9])
def test_constant_targets_have_no_coefficient_of_determination(value: float) -> None:
    """Also those of a resample: their mean may differ from them by rounding."""
    rng = np.random.default_rng(1)
    target = np.append(np.full(49, value), 7.0)
    weights = np.append(rng.integers(0, 4, (20, 49)), np.zeros((20, 1)), axis=1)
    statistics = RegressionStatistics(
        target, rng.random(50), np.arange(50, dtype=np.int32), fold=np.zeros(50, np.int32)
    )
    metrics = statistics.compute(weights.astype(float))
    assert np.isnan([metrics[name] for name in ("r2", "pearson", "spearman")]).all()


@given(seed=st.integers(0, 1000))
@examples(20)
def test_multilabel_metrics_equal_those_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target = (rng.random((60, 2)) < 0.4).astype(np.float64)
    output = np.round(rng.random((60, 2)), 2)
    target[rng.random((60, 2)) < 0.2] = np.nan
    statistics = statistics_of(Multilabel(("a", "b")), target, output, limits=[0.5, 0.3])
    metrics = compute(statistics, np.ones((1, 60)))
    expected: dict[str, float] = {}
    for number, name, limit in ((0, "a", 0.5), (1, "b", 0.3)):
        finite = np.isfinite(target[:, number])
        true, p = target[finite, number], output[finite, number]
        expected |= {
            f"auc:{name}": sk.roc_auc_score(true, p),
            f"brier:{name}": sk.brier_score_loss(true, p),
            f"balanced_accuracy:{name}": sk.balanced_accuracy_score(true, p >= limit),
            f"f1:{name}": sk.f1_score(true, p >= limit),
        }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["auc"] == pytest.approx((metrics["auc:a"] + metrics["auc:b"]) / 2)


def test_each_label_has_a_slope() -> None:
    """Those of scikit-learn, without the rows that are unknown; the mean is undefined if a label is."""
    rng = np.random.default_rng(1)
    odds = rng.normal(size=(200, 2))
    target = (rng.random((200, 2)) < 1 / (1 + np.exp(-odds / 2))).astype(np.float64)
    target[:20, 0] = np.nan
    scores = slide_scores(Multilabel(("a", "b")), target, 1 / (1 + np.exp(-odds)))
    metrics, expected = metrics_of_slides(scores, resamples=20), []
    for number, name in enumerate("ab"):
        rows = np.isfinite(target[:, number])
        model = LogisticRegression(C=1e12, tol=1e-10).fit(
            odds[rows, [number]][:, None], target[rows, number]
        )
        expected.append(model.coef_[0, 0])
        assert metrics.values[f"calibration_slope:{name}"] == pytest.approx(expected[-1], abs=1e-3)
        low, high = metrics.intervals[f"calibration_slope:{name}"]
        assert low < expected[-1] < high
    assert metrics.values["calibration_slope"] == pytest.approx(np.mean(expected), abs=1e-3)
    target[:, 1] = 0
    unknown = metrics_of_slides(scores).values
    assert unknown["calibration_slope"] is None
    assert unknown["calibration_slope:b"] is None


def slide_scores(task: Task, target: Any, output: Any) -> Predictions:
    """Return scores of slides, one of each patient."""
    return replace(task_scores(task, target, output, range(len(target))), level="slide")


def metrics_of_slides(scores: Predictions, resamples: int = 0) -> Metrics:
    """Return the metrics, decided by the thresholds that are chosen on the same slides."""
    evaluations = evaluate_subsets({"validation": scores}, EvaluationSettings(resamples=resamples))
    return evaluations["validation"].slide["mean"]


def survival_scores(seed: int, count: int = 60, *, slides: int = 1) -> Predictions:
    """Return predictions of patients with one or several slides each."""
    risk, time, event = cohort(seed, count)
    grid = tuple(time_grid(time, event, 4))
    rows = np.repeat(np.arange(count), slides)
    noise = np.random.default_rng(seed).normal(size=len(rows)) * 0.5
    survival = np.exp(-np.outer(np.exp(risk[rows]), grid))
    output = np.column_stack([risk[rows] + noise, survival]).astype(np.float32)
    target = np.column_stack([time, event])[rows]
    task = Survival(("time", "event"), grid)
    return replace(task_scores(task, target, output, rows), level="slide")


@needs_scikit_survival
def test_risk_groups_equal_those_of_scikit_survival() -> None:
    validation, test = survival_scores(1), survival_scores(2)
    settings = EvaluationSettings(resamples=50)
    evaluation = evaluate_subsets({"validation": validation, "test": test}, settings)["test"]
    metrics = evaluation.slide["mean"]
    limit = np.median(validation.output[:, 0].astype(np.float64))
    assert list(metrics.thresholds.values) == pytest.approx([limit])
    time, event = test.target.T
    high = test.output[:, 0] > limit
    _, p_value = compare_survival(Surv.from_arrays(event == 1, time), high)
    assert metrics.log_rank == pytest.approx(p_value)
    for group, rows in zip(metrics.groups, (high, ~high), strict=True):
        times, survival, ends = kaplan_meier_estimator(
            event[rows] == 1, time[rows], conf_type="log-log"
        )
        assert group.times == pytest.approx([0, *times])
        assert group.survival == pytest.approx([1, *survival])
        inside = (survival > 0) & (survival < 1)
        band = np.array([group.low, group.high])[:, 1:]
        np.testing.assert_allclose(band[:, inside], ends[:, inside])
        assert group.median == next(iter(times[survival <= 0.5]), None)
        assert group.at_risk[0] == group.count == rows.sum()
    low, upper = metrics.intervals["c_index"]
    assert 0 < low < metrics.c_index < upper < 1
    lines = "\n".join(evaluation_lines("test", evaluation))
    assert "C-index" in lines and "patients: same as slides" in lines


def one_risk_group(time: Sequence[float], event: Sequence[int]) -> Metrics:
    """Return the metrics of patients, the last two of whom have a low risk."""
    risk = np.append(np.full(len(time) - 2, 1.0), [0.0, 0.0])[:, None].astype(np.float32)
    target = np.column_stack([time, event]).astype(np.float64)
    scores = slide_scores(Survival(("time", "event")), target, risk)
    # None for patients: then they have no risk groups.
    limits = {name_of("slide", "mean"): Thresholds((0.5,))}
    return evaluate([(scores, limits)], EvaluationSettings(resamples=0)).slide["mean"]


def test_columns_of_few_patients_have_no_intervals() -> None:
    """The second label is known of four of twelve patients; the means over both have no intervals, either."""
    rng = np.random.default_rng(1)
    target = rng.integers(0, 2, (12, 2)).astype(np.float64)
    target[:4, 1] = 0, 1, 0, 1
    target[4:, 1] = np.nan
    scores = slide_scores(Multilabel(("first", "second")), target, rng.random((12, 2)))
    metrics = metrics_of_slides(scores, resamples=50)
    assert {name.partition(":")[2] for name in metrics.intervals} == {"first"}
    assert "second: too few patients for an interval" in metrics.notes


def test_median_survival_is_the_first_time_of_a_curve_at_one_half() -> None:
    """9/10 * 7/9 * 5/7 is one half, which floating-point numbers exceed by 1e-16."""
    metrics = one_risk_group([12, 24, 24, 36, 36, 54, 60, 60, 60, 60, 9, 80], [1] * 6 + [0] * 6)
    high, low = metrics.groups
    assert high.survival[3] > 0.5
    assert high.median == 36
    assert low.median is None  # never reached
    assert low.low == low.high == low.survival == (1, 1, 1)


def test_log_rank_test_is_undefined_without_events_of_both_groups_at_risk() -> None:
    """Its variance is 0; observed minus expected events may be 1e-16 by rounding."""
    for count in range(2, 60):
        time = [*range(1, count + 1), 0.5, 0.5]
        assert one_risk_group(time, [1] * count + [0, 0]).log_rank is None


def test_slides_are_aggregated_to_patients() -> None:
    scores = survival_scores(1, 40, slides=3)
    means = scores.output[:, 0].astype(np.float64).reshape(40, 3).mean(axis=1)
    assert aggregated(scores, "patient").output[:, 0] == pytest.approx(means)
    scores.target[0, 0] += 1  # this patient has two times
    rest = aggregated(scores, "patient")
    assert (len(rest.target), rest.left_out) == (39, 1)


TASKS = (
    Classification(classes=("a b", "c")),
    Regression(("a b", "c")),
    Multilabel(("a b", "c")),
    Survival(("a b", "c"), grid=(0.1, 2.0, 333.333333)),
)


@given(
    task=st.sampled_from(TASKS),
    level=st.sampled_from(["patch", "slide", "patient"]),
    seed=st.integers(0, 99),
)
@examples(20)
def test_written_predictions_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, task: Task, level: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    names = tuple(f"P {i}, ü" for i in range(5))
    target = rng.random((5, len(task.columns)))
    if task.of_classes:
        target = rng.integers(0, 2, (5, 1)).astype(np.float64)
    elif not isinstance(task, Survival):
        target[1, 0] = np.nan
    corner, each = rng.integers(0, 9, 5) * (level == "patch"), np.arange(5, dtype=np.int32)
    slides = names if level == "patient" else tuple("vwxyz")
    output = rng.random((5, len(task.output_names))).astype(np.float32)
    scores = Predictions(task, slides, names, each, each, corner, corner, target, output, level)
    path = tmp_path_factory.mktemp("predictions") / "predictions.csv"
    write_predictions(path, [({"split": "test"}, scores)])
    restored = read_predictions(path)["test"]
    for name in ("task", "slides", "patients", "level"):
        assert getattr(restored, name) == getattr(scores, name)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(restored, name), getattr(scores, name))
    assert len(joined_predictions([restored, restored]).output) == 10
    path.write_text(path.read_text().replace(",0.", ",x", 1))
    with pytest.raises(DamagedStore, match="is damaged"):
        read_predictions(path)


def test_models_of_other_training_sets_get_the_times_of_the_first() -> None:
    """The times of folds differ. Constant hazards have the same survival at any times, to interpolation."""
    scores = survival_scores(1)
    risk = scores.output[:, :1]
    grid = time_grid(scores.target[:, 0], scores.target[:, 1], 4)
    models = []
    for times in (np.array(grid), np.linspace(0.01, 2 * grid[-1], 60)):
        task = Survival(("time", "event"), tuple(times.tolist()))
        survival = np.exp(-np.exp(risk.astype(np.float64)) * times)
        output = np.hstack([risk, survival]).astype(np.float32)
        models.append(replace(scores, task=task, output=output))
    same, other = with_common_patients(models)
    np.testing.assert_array_equal(same.output, models[0].output)
    assert other.task == models[0].task
    np.testing.assert_array_equal(other.output[:, :1], risk)
    np.testing.assert_allclose(other.output, same.output, atol=0.03)


def test_undefined_metrics_are_none() -> None:
    scores = survival_scores(1, 12)
    scores.target[:, 1] = 0
    metrics = metrics_of_slides(scores, resamples=20)
    assert metrics.values["c_index"] is None
    assert metrics.log_rank is None
    assert all(value is None or math.isfinite(value) for value in metrics.values.values())
