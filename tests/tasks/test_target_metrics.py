"""Metrics of several labels, numbers and survival: compared with scikit-learn, SciPy and scikit-survival."""

from __future__ import annotations

import importlib.util
import json
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
from helpers.scores import aggregated, target_predictions, task_scores
from histopipe.errors import DamagedStore
from histopipe.evaluation.evaluate import Evaluation, evaluate, evaluate_subsets, evaluation_lines
from histopipe.predictions.prediction_tables import read_predictions, write_predictions
from histopipe.tasks.choices import name_of
from histopipe.tasks.classification import Classification
from histopipe.tasks.multilabel import Multilabel
from histopipe.tasks.predictions import Metrics, joined_predictions, with_common_patients
from histopipe.tasks.regression import Regression, RegressionStatistics
from histopipe.tasks.survival import (
    Survival,
    SurvivalStatistics,
    breslow_survival,
    partial_likelihood,
    time_grid,
)
from histopipe.tasks.task import EvaluationSettings, Predictions, Task, Thresholds

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


@needs_scikit_survival
@pytest.mark.parametrize("decimals", [6, 1])
@given(seed=st.integers(0, 1000))
@examples(12)
def test_survival_metrics_equal_those_of_scikit_survival(seed: int, decimals: int) -> None:
    risk, time, event = cohort(seed, decimals=decimals)
    grid = time_grid(time, event)
    survival = np.exp(-np.outer(np.exp(risk), grid))
    patients = np.arange(len(risk), dtype=np.int32)
    output = np.column_stack([risk, survival])
    statistics = SurvivalStatistics(time, event, output, grid, patients)
    metrics = compute(statistics, np.ones((1, len(risk))))
    truth = Surv.from_arrays(event.astype(bool), time)
    assert metrics["c_index"] == pytest.approx(
        concordance_index_censored(event.astype(bool), time, risk)[0]
    )
    # At a last time with censored patients, scikit-survival has no value for events: see the next test.
    censored = CensoringDistributionEstimator().fit(truth)
    if (censored.predict_proba(time[event == 1]) > 0).all():
        assert metrics["c_index_uno"] == pytest.approx(
            concordance_index_ipcw(truth, truth, risk)[0]
        )
        inside = inside_times(grid, time)
        assert metrics["auc"] == pytest.approx(
            cumulative_dynamic_auc(truth, truth, risk, inside)[1]
        )
        columns = survival[:, [grid.index(at) for at in inside]]
        expected = integrated_brier_score(truth, truth, columns, inside)
        assert metrics["brier"] == pytest.approx(expected)
    # A weight of a patient is the number of times that the patient occurs.
    weights = np.random.default_rng(seed).integers(0, 3, len(risk))
    rows = np.repeat(np.arange(len(risk)), weights)
    again = SurvivalStatistics(
        time[rows], event[rows], output[rows], grid, np.arange(len(rows), dtype=np.int32)
    )
    again_values = compute(again, np.ones((1, len(rows))))
    same_times = inside_times(grid, time[rows]) == inside_times(grid, time)
    weighted = compute(statistics, weights[None].astype(np.float64))
    for name in ("c_index", "c_index_uno", *(("auc", "brier") if same_times else ())):
        assert weighted[name] == pytest.approx(again_values[name], nan_ok=True)


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
    patients = np.arange(len(risk), dtype=np.int32)
    statistics = SurvivalStatistics(time, event, np.column_stack([risk, survival]), grid, patients)
    metrics = compute(statistics, np.ones((1, len(risk))))
    truth, last = Surv.from_arrays(event == 1, time), time.max()
    expected = concordance_index_ipcw(truth, truth, risk, tau=last)[0]
    assert metrics["c_index_uno"] == pytest.approx(expected)
    before = Surv.from_arrays((event == 1) & (time < last), time)  # as scikit-survival needs
    auc = cumulative_dynamic_auc(truth, before, risk, grid)[1]
    assume(math.isfinite(auc))  # scikit-survival has no value if nobody has the event before a time
    assert metrics["auc"] == pytest.approx(auc)
    assert metrics["brier"] == pytest.approx(integrated_brier_score(truth, truth, survival, grid))
    assert f"at the last time, {last:g}," in statistics.remarks()[0]
    late = SurvivalStatistics(time, event, np.column_stack([risk, risk]), [2 * last], patients)
    assert "0 of the 1 times of the model" in late.remarks()[1]
    middle = [float(np.median(time))]
    single = SurvivalStatistics(time, event, np.column_stack([risk, risk]), middle, patients)
    assert "1 of the 1 times of the model" in single.remarks()[-1]


def test_higher_risk_means_earlier_event() -> None:
    time, event = np.arange(1.0, 9.0), np.ones(8)
    output = np.column_stack([-time, np.full(8, 0.5)])
    metrics = compute(
        SurvivalStatistics(time, event, output, [4.0], np.arange(8, dtype=np.int32)),
        np.ones((1, 8)),
    )
    assert metrics["c_index"] == metrics["c_index_uno"] == metrics["auc"] == 1
    _, slope = partial_likelihood(np.zeros(8), time, event)
    assert slope[0] < 0 < slope[-1]  # descending this slope raises the risk of the first to die


@needs_scikit_survival
@pytest.mark.parametrize("decimals", [6, 1])
@given(seed=st.integers(0, 1000))
@examples(10)
def test_cox_loss_equals_that_of_scikit_survival_and_its_gradient(seed: int, decimals: int) -> None:
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
    for place in (0, 7, 39):
        step = 1e-6 * np.eye(40)[place]
        ends = [partial_likelihood(risk + sign * step, time, event)[0] for sign in (1, -1)]
        assert gradient[place] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)
    # Weight 0 leaves a patient out.
    weight = (rng.random(40) < 0.7).astype(np.float64)
    kept = weight > 0
    some, slopes = partial_likelihood(risk, time, event, weight)
    assert some == pytest.approx(partial_likelihood(risk[kept], time[kept], event[kept])[0])
    assert (slopes[~kept] == 0).all()


@needs_scikit_survival
def test_baseline_survival_equals_that_of_scikit_survival() -> None:
    rng = np.random.default_rng(3)
    _, time, event = cohort(3, 100)
    covariates = rng.normal(size=(100, 2))
    fitted = CoxPHSurvivalAnalysis().fit(covariates, Surv.from_arrays(event.astype(bool), time))
    grid = time_grid(time, event)
    ours = breslow_survival(covariates @ fitted.coef_, time, event, grid)
    functions = fitted.predict_survival_function(np.zeros((1, 2)))
    assert ours == pytest.approx(functions[0](grid), rel=1e-6)


@given(seed=st.integers(0, 1000), ties=st.booleans())
@examples(20)
def test_regression_metrics_equal_those_of_scikit_learn(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(30, 2))
    output = target + rng.normal(size=(30, 2))
    if ties:
        target, output = np.round(target), np.round(output)
    target[rng.random(30) < 0.2, 1] = np.nan
    patients = np.arange(30, dtype=np.int32)
    weights = rng.integers(0, 3, 30).astype(np.float64)
    task = Regression(("a", "b"))
    statistics = task.statistics(task_scores(task, target, output, patients))
    for weight in (np.ones(30), weights):
        metrics = compute(statistics, weight[None])
        for number, name in enumerate("ab"):
            rows = np.repeat(patients, weight.astype(int))
            rows = rows[np.isfinite(target[rows, number])]
            true, predicted = target[rows, number], output[rows, number]
            assert metrics[f"r2:{name}"] == pytest.approx(sk.r2_score(true, predicted))
            assert metrics[f"mae:{name}"] == pytest.approx(sk.mean_absolute_error(true, predicted))
            assert metrics[f"rmse:{name}"] == pytest.approx(
                sk.root_mean_squared_error(true, predicted)
            )
            assert metrics[f"pearson:{name}"] == pytest.approx(stats.pearsonr(true, predicted)[0])
            assert metrics[f"spearman:{name}"] == pytest.approx(stats.spearmanr(true, predicted)[0])
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
            (target + shift) * factor, (output + shift) * factor, patients
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
    statistics = RegressionStatistics(target, rng.random(50), np.arange(50, dtype=np.int32))
    metrics = statistics.compute(weights.astype(float))
    assert np.isnan([metrics[name] for name in ("r2", "pearson", "spearman")]).all()


@given(seed=st.integers(0, 1000))
@examples(20)
def test_multilabel_metrics_equal_those_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target = (rng.random((60, 2)) < 0.4).astype(np.float64)
    output = np.round(rng.random((60, 2)), 2)
    target[rng.random((60, 2)) < 0.2] = np.nan
    limits = [0.5, 0.3]
    patients = np.arange(60, dtype=np.int32)
    task = Multilabel(("a", "b"))
    scores = task_scores(task, target, output, patients, limits)
    metrics = compute(task.statistics(scores), np.ones((1, 60)))
    for number, name in enumerate("ab"):
        finite = np.isfinite(target[:, number])
        true, p = target[finite, number], output[finite, number]
        assert metrics[f"auc:{name}"] == pytest.approx(sk.roc_auc_score(true, p))
        assert metrics[f"brier:{name}"] == pytest.approx(sk.brier_score_loss(true, p))
        decided = p >= limits[number]
        assert metrics[f"balanced_accuracy:{name}"] == pytest.approx(
            sk.balanced_accuracy_score(true, decided)
        )
        assert metrics[f"f1:{name}"] == pytest.approx(sk.f1_score(true, decided))
    assert metrics["auc"] == pytest.approx((metrics["auc:a"] + metrics["auc:b"]) / 2)


def test_each_label_has_intercept_and_slope() -> None:
    """Those of scikit-learn, without the rows that are unknown; the mean is undefined if a label is."""
    rng = np.random.default_rng(1)
    odds = rng.normal(size=(200, 2))
    target = (rng.random((200, 2)) < 1 / (1 + np.exp(-odds / 2))).astype(np.float64)
    target[:20, 0] = np.nan
    output = (1 / (1 + np.exp(-odds))).astype(np.float32)
    scores = slide_scores(Multilabel(("a", "b")), target, output)
    metrics = evaluate_subsets({"validation": scores}, EvaluationSettings(resamples=20))[
        "validation"
    ].slide["mean"]
    for number, name in enumerate("ab"):
        finite = np.isfinite(target[:, number])
        model = LogisticRegression(C=1e12, tol=1e-10).fit(
            odds[finite, number : number + 1], target[finite, number]
        )
        slope = metrics.values[f"calibration_slope:{name}"]
        assert slope == pytest.approx(model.coef_[0, 0], abs=1e-3)
        low, high = metrics.intervals[f"calibration_slope:{name}"]
        assert low < model.coef_[0, 0] < high
    slopes = [metrics.values[f"calibration_slope:{name}"] or 0 for name in "ab"]
    assert metrics.values["calibration_slope"] == pytest.approx(np.mean(slopes))
    unknown = replace(scores, target=np.column_stack([target[:, 0], np.zeros(200)]))
    metrics = evaluate_subsets({"validation": unknown}, EvaluationSettings(resamples=0))[
        "validation"
    ].slide["mean"]
    assert metrics.values["calibration_slope"] is None
    assert metrics.values["calibration_slope:b"] is None


def slide_scores(task: Task, target: Any, output: Any) -> Predictions:
    """Return scores of slides, one of each patient."""
    return replace(task_scores(task, target, output, range(len(target))), level="slide")


def survival_scores(seed: int, count: int = 60, *, slides: int = 1) -> Predictions:
    """Return predictions of patients with one or several slides each."""
    risk, time, event = cohort(seed, count)
    grid = tuple(time_grid(time, event, 4))
    rows = np.repeat(np.arange(count), slides)
    noise = np.random.default_rng(seed).normal(size=len(rows)) * 0.5
    survival = np.exp(-np.outer(np.exp(risk[rows]), grid))
    return target_predictions(
        "survival",
        ("time", "event"),
        grid,
        tuple(f"s{i}" for i in range(len(rows))),
        tuple(f"p{i}" for i in range(count)),
        np.arange(len(rows), dtype=np.int32),
        rows.astype(np.int32),
        np.zeros(len(rows), np.int64),
        np.zeros(len(rows), np.int64),
        np.column_stack([time, event])[rows],
        np.column_stack([risk[rows] + noise, survival]).astype(np.float32),
        "slide",
    )


@needs_scikit_survival
def test_risk_groups_equal_those_of_scikit_survival() -> None:
    scores = {"validation": survival_scores(1), "test": survival_scores(2)}
    evaluations = evaluate_subsets(scores, EvaluationSettings(resamples=50))  # type: ignore[arg-type]
    metrics = evaluations["test"].slide["mean"]
    assert isinstance(metrics, Metrics)
    limit = np.median(scores["validation"].output[:, 0].astype(np.float64))
    assert list(metrics.thresholds.values) == pytest.approx([limit])
    time, event = scores["test"].target.T
    high = scores["test"].output[:, 0] > limit
    _, p_value = compare_survival(Surv.from_arrays(event == 1, time), high)
    assert metrics.log_rank == pytest.approx(p_value)
    for group, rows in zip(metrics.groups, (high, ~high), strict=True):
        times, survival, (low_end, high_end) = kaplan_meier_estimator(
            event[rows] == 1, time[rows], conf_type="log-log"
        )
        assert group.times == pytest.approx([0, *times])
        assert group.survival == pytest.approx([1, *survival])
        inside = (survival > 0) & (survival < 1)
        assert np.array(group.low)[1:][inside] == pytest.approx(low_end[inside])
        assert np.array(group.high)[1:][inside] == pytest.approx(high_end[inside])
        expected = times[survival <= 0.5]
        assert group.median == (expected[0] if len(expected) else None)
    assert metrics.groups[0].at_risk[0] == metrics.groups[0].count == high.sum()
    low, value, ends = 0.0, metrics.values["c_index"], metrics.intervals["c_index"]
    assert value is not None
    assert low < ends[0] < value < ends[1] < 1
    lines = "\n".join(evaluation_lines("test", evaluations["test"]))
    assert "C-index" in lines
    assert "patients: same as slides" in lines
    for evaluation in evaluations.values():
        text = json.dumps(evaluation.to_json())
        assert Evaluation.from_json(json.loads(text)) == evaluation


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
    output = rng.random((12, 2)).astype(np.float32)
    scores = slide_scores(Multilabel(("first", "second")), target, output)
    metrics = evaluate_subsets({"validation": scores}, EvaluationSettings(resamples=50))[
        "validation"
    ].slide["mean"]
    assert isinstance(metrics, Metrics)
    assert metrics.intervals
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
    means = aggregated(scores, "patient")
    assert len(means.target) == 40
    assert means.output[:, 0] == pytest.approx(
        scores.output[:, 0].astype(np.float64).reshape(40, 3).mean(axis=1)
    )
    changed = scores.target.copy()
    changed[0, 0] += 1  # this patient has two times
    other = replace(scores, target=changed)
    assert (len(aggregated(other, "patient").target), aggregated(other, "patient").left_out) == (
        39,
        1,
    )


@given(
    task=st.sampled_from(["classification", "regression", "multilabel", "survival"]),
    level=st.sampled_from(["patch", "slide", "patient"]),
    seed=st.integers(0, 99),
)
@examples(20)
def test_written_predictions_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, task: Any, level: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    names = tuple(f"P {i}, ü" for i in range(5))
    outputs = 4 if task == "survival" else 2
    target = rng.random((5, 2))
    if task == "classification":
        target = rng.integers(0, 2, (5, 1)).astype(np.float64)
    elif task != "survival":
        target[1, 0] = np.nan
    corner = rng.integers(0, 9, 5) * (level == "patch")
    scores = target_predictions(
        task,
        ("a b", "c"),
        (0.1, 2.0, 1e3 / 3) if task == "survival" else (),
        names if level == "patient" else tuple("vwxyz"),
        names,
        np.arange(5, dtype=np.int32),
        np.arange(5, dtype=np.int32),
        corner,
        corner,
        target,
        rng.random((5, outputs)).astype(np.float32),
        level,
    )
    if task == "classification":
        scores = replace(scores, task=Classification(classes=("a b", "c")))
    path = tmp_path_factory.mktemp("predictions") / "predictions.csv"
    write_predictions(path, [({"split": "test"}, scores)])
    restored = read_predictions(path)["test"]
    assert isinstance(restored, Predictions)
    if isinstance(restored.task, Survival) and isinstance(scores.task, Survival):
        assert restored.task.grid == pytest.approx(scores.task.grid)
    assert (type(restored.task), restored.task.columns) == (type(scores.task), scores.task.columns)
    for name in ("slides", "patients", "level"):
        assert getattr(restored, name) == getattr(scores, name)
    for name in ("slide", "patient", "x_l0", "y_l0", "target", "output"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(scores, name))
    twice = joined_predictions(with_common_patients([restored, restored]))
    assert len(twice.output) == 10
    path.write_text(path.read_text().replace(",0.", ",x", 1))
    with pytest.raises(DamagedStore, match="is damaged"):
        read_predictions(path)


def test_models_of_other_training_sets_get_the_times_of_the_first() -> None:
    """The times of folds differ. Constant hazards have the same survival at any times, to interpolation."""
    one = survival_scores(1)
    assert isinstance(one.task, Survival)
    grid = one.task.grid
    times = tuple(np.linspace(0.01, 2 * grid[-1], 60).tolist())
    hazard = np.exp(one.output[:, :1].astype(np.float64))
    grids = [
        replace(
            one,
            task=replace(one.task, grid=each),
            output=np.hstack([one.output[:, :1], np.exp(-hazard * np.array(each))]).astype(
                np.float32
            ),
        )
        for each in (grid, times)
    ]
    same, other = with_common_patients(grids)
    np.testing.assert_array_equal(same.output, grids[0].output)
    assert other.task == one.task
    np.testing.assert_array_equal(other.output[:, 0], one.output[:, 0])
    np.testing.assert_allclose(other.output, same.output, atol=0.03)


def test_undefined_metrics_are_none() -> None:
    one = survival_scores(1, 12)
    same = replace(one, target=np.column_stack([one.target[:, 0], np.zeros(12)]))
    metrics = evaluate_subsets(
        {"validation": same, "test": same}, EvaluationSettings(resamples=20)
    )["test"].slide["mean"]
    assert isinstance(metrics, Metrics)
    assert metrics.values["c_index"] is None
    assert metrics.log_rank is None
    assert all(value is None or math.isfinite(value) for value in metrics.values.values())
