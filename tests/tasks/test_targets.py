"""Targets of several labels, numbers and survival: labels files, splits, and trainings."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.bags import (
    TARGET_BAGS,
    target_training,
)
from helpers.commands import RunCommand
from helpers.examples import examples
from helpers.json_results import check_json
from helpers.lazy import keras, tf, training
from helpers.runs import without_training
from helpers.trainings import (
    EACH_STEP,
    csv_rows,
    faulty,
    in_tensorflow,
    opened_setup,
    steps_of,
)
from histopipe.errors import NothingToDo, UsageError
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.reports.report import make_statements, report
from histopipe.reports.run_description import describe_run
from histopipe.runs.run import Run
from histopipe.runs.task_config import make_config
from histopipe.runs.training_data import opened_sources, splits_and_slides
from histopipe.splits.assignment import Assignment
from histopipe.splits.labelling import Covariates, Labelling
from histopipe.splits.splits import SlideSplit, load_splits
from histopipe.splits.splitting import REGION, _Plan
from histopipe.store.store import Store
from histopipe.tasks.choices import TaskName
from histopipe.tasks.classification import Multilabel
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.regression import Regression
from histopipe.tasks.survival import Survival
from histopipe.viewer.collection import Collection, open_collection
from histopipe.viewer.layers import slide_layers
from histopipe.viewer.server import find_errors


def grid_of(predictions: Predictions) -> tuple[float, ...]:
    """Return the times of predicted survival."""
    assert isinstance(predictions.task, Survival)
    return predictions.task.grid


def test_planted_signals_are_learned(target_run: tuple[str, Path]) -> None:
    task, run = target_run
    metrics = json.loads((run / "metrics.json").read_text())
    values, scores = (
        metrics["test"]["slide"]["mean"],
        read_predictions(run / "predictions.csv")["test"],
    )
    match task:
        case "regression":
            assert values["r2:share"] > 0.6
            assert values["r2:age"] < 0.4  # there is nothing to learn
        case "multilabel":
            assert values["auc:MSI"] > 0.85
            assert np.isnan(scores.target[:, 1]).any()
        case _:
            assert values["c_index"] > 0.65
            time, event = scores.target.T
            early = scores.output[(time < np.median(time)) & (event == 1), 0]
            late = scores.output[time > np.median(time), 0]
            assert early.mean() > late.mean()  # a higher risk means an earlier event
            assert (np.diff(scores.output[:, 1:], axis=1) <= 1e-6).all()
            assert metrics["objective"]["times"] == pytest.approx(grid_of(scores))
    main = {"regression": "r2", "multilabel": "auc"}.get(task, "c_index")
    assert f"val_{main}" in csv_rows(run / "history.csv")[0]


def test_splits_hold_the_targets(target_run: tuple[str, Path], target_bags: Path) -> None:
    splits = load_splits(target_run[1] / "splits.json")
    assert splits.task_name == target_run[0] or isinstance(splits.task, Survival)
    assert splits.targets == splits.task.columns
    rows = {row["slide"]: row for row in csv_rows(target_bags / "labels.csv")}
    for slide in splits.slides:
        expected = [float(rows[slide.id][name] or "nan") for name in splits.targets]
        np.testing.assert_array_equal(np.array(slide.target), expected)


@pytest.mark.nightly(reason="test_training.py and test_resume.py show it of patches")
@pytest.mark.parametrize(("task", "pooling"), [("cox", "gated"), ("regression", "dsmil")])
def test_devices_and_interruptions_change_nothing(
    run: RunCommand, target_bags: Path, tmp_path: Path, task: str, pooling: str
) -> None:
    covariates = ("--covariates", "age") if task == "cox" else ()
    flags = ("--batch-size", 16, "--pooling", pooling, "--epochs", 2, *covariates)
    command, outputs = target_training(target_bags, task, *flags), []
    for name, devices in (("whole", "cpu"), ("several", "cpu:2")):
        done = run(*command, "--out", name, "--devices", devices)
        assert done.returncode == 0, done.stderr
        outputs.append(read_predictions(tmp_path / name / "predictions.csv")["test"].output)
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4)
    fault = faulty("apply:5:parent", tmp_path / "failed")
    killed = run(*command, *EACH_STEP, "--out", "run", env=fault, new_process=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert run("train", "--resume", "--out", "run").returncode == 0
    for name in ("predictions.csv", "splits.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.long(reason="folds, a search, two runs and their pages")
def test_cross_validation_search_comparison_and_report(
    run: RunCommand, target_bags: Path, tmp_path: Path
) -> None:
    """Of runs without a training."""
    command = target_training(target_bags, "cox", "--epochs", 1)
    with without_training():
        done = run(*command, "--out", "cv", "--folds", 2)
        assert done.returncode == 0, done.stderr
        study = histopipe.tune(
            space={"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}},
            out=tmp_path / "study",
            trials=1,
            epochs=1,
            resamples=0,
            **of_bags(target_bags, **SURVIVAL),
        )
        for flags in (("--out", "a"), ("--out", "b", "--seed", 2, "--splits", "a/splits.json")):
            assert run(*command, *flags).returncode == 0
    assert "slide mean C-index" in done.stdout
    pooled = json.loads((tmp_path / "cv" / "summary.json").read_text())["pooled"]
    assert pooled["slide"]["mean"]["count"] == TARGET_BAGS
    grids = [
        grid_of(read_predictions(tmp_path / "cv" / f"fold-{n}" / "predictions.csv")["test"])
        for n in (1, 2)
    ]
    assert grids[0] != grids[1]
    assert study.best is not None and 0 < (study.best.value or 0) < 1
    compared = histopipe.compare([tmp_path / "a", tmp_path / "b"], resamples=50)
    difference = compared.differences[0]["slide_mean"]["c_index"]
    first, second = (result.test.finest.c_index for result in compared.runs)
    assert difference.value == pytest.approx(second - first) != 0
    assert difference.interval is not None
    page = report(tmp_path / "a").file.read_text()
    for words in (
        "C-index (Harrell)",
        "log-rank p",
        "numbers of patients at risk",
        "integrated Brier score",
    ):
        assert words in page
    # The checklist of a fold does not know how the folds were divided.
    texts = []
    for name in ("a", "cv/fold-1"):
        done = run("report", name, "--checklist", "claim", "--out", "claim.md")
        assert done.returncode == 0, done.stderr
        texts.append((tmp_path / "claim.md").read_text())
    tested = [row for row in csv_rows(tmp_path / "a" / "slides.csv") if row["status"] == "test"]
    patients = {row["patient"]: row["event"] for row in tested}
    happened = [event for event in patients.values() if float(event) == 1]
    assert f"test {len(patients)} with {len(happened)} event" in texts[0]
    assert "bags and event and time" in texts[0]
    assert "Classes had" not in texts[0]
    assert "divided by the cross-validation" in texts[1]
    assert "no ensemble" in texts[0]
    assert "no ensemble" not in texts[1]


@pytest.mark.nightly(reason="trains to a quality")
def test_a_signal_in_the_covariates_is_found_there(
    run: RunCommand, target_bags: Path, tmp_path: Path
) -> None:
    """The label depends on the stage only, which the model of the covariates alone finds as well as the whole model."""
    rng, rows = np.random.default_rng(1), ["slide,label,stage,age"]
    for i in range(TARGET_BAGS):
        stage = ["I", "II", "III", ""][int(rng.integers(4))]
        label = "yes" if stage in ("II", "III") else "no"
        rows.append(f"s{i},{label},{stage},{rng.integers(40, 80)}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    flags = (
        "--labels labels.csv --covariates stage,age --epochs 30 --patience 0 --learning-rate 3e-3"
    )
    flags += " --out run --devices cpu:2 --batch-size 4 --fractions 0.5,0.2,0.3"
    done = run("train", "--mil", target_bags, *flags.split())
    assert done.returncode == 0, done.stderr
    assert "covariates alone, test" in done.stdout
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    whole, alone = (
        results["test"]["slide"]["mean"]["auc"] for results in (metrics, metrics["covariates_only"])
    )
    assert alone == pytest.approx(1)
    assert 0.7 < whole <= alone
    assert [covariate["name"] for covariate in metrics["covariates"]] == ["stage", "age"]
    text = "A model of the covariates alone (stage, age)"
    assert text in report(tmp_path / "run").file.read_text()
    model = keras.models.load_model(tmp_path / "run" / "model.keras")
    assert sorted(len(tensor.shape) for tensor in model.inputs) == [2, 3]


@pytest.mark.long(reason="a training, a prediction and a report")
def test_slides_have_no_part_in_the_predictions_of_epoch_0(
    target_bags: Path, tmp_path: Path
) -> None:
    """The covariates alone are the best on validation: no attention, no contributions, and one plain sentence."""
    rows = ["slide,label,stage"]
    rows += [f"s{i},{'ab'[i % 2]},{'I' * (1 + i % 2)}" for i in range(TARGET_BAGS)]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    out = tmp_path / "run"
    result = histopipe.train(
        mil=target_bags,
        labels=tmp_path / "labels.csv",
        covariates=("stage",),
        epochs=1,
        learning_rate=0.3,
        out=out,
    )
    assert result.best_epoch == 0 and not (out / "attention").exists()
    sentence = "slides have no part in the predictions: the model of epoch 0"
    assert sentence in str(result)
    assert Run(out).result.slides_add["test"]["slide_mean"]["auc"].value == 0
    page = report(out).file.read_text()
    assert sentence.capitalize() in page
    statements = make_statements(describe_run(Run(out)))
    assert sentence.capitalize() in statements["covariates"][0]
    assert not statements["explanations"][0]
    histopipe.predict(out, target_bags, labels=tmp_path / "labels.csv", out=tmp_path / "p")
    assert (tmp_path / "p" / "slides.csv").exists() and not (tmp_path / "p" / "attention").exists()
    with pytest.raises(UsageError, match="the model of epoch 0 predicts from covariates alone"):
        histopipe.heatmap(out, out=tmp_path / "maps")


@in_tensorflow
def test_cox_regression_of_covariates_equals_that_of_scikit_survival() -> None:
    """Of standardised covariates of different scales, with the ridge penalty per patient."""
    pytest.importorskip("sksurv", reason="scikit-survival has no wheels for Python 3.13")
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.util import Surv

    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(90, 3)) * (1, 10, 0.01) + (0, 50, 1)
    inputs = np.column_stack([inputs, np.full(90, 7.0)])  # the last one is constant
    time = np.ceil(4 * rng.exponential(np.exp(-inputs[:, 0])))
    event = rng.random(90) < 0.6
    risk = inputs @ training.objective.cox_weights(inputs, np.column_stack([time, event]))
    scaled = (inputs[:, :3] - inputs[:, :3].mean(axis=0)) / inputs[:, :3].std(axis=0, ddof=1)
    other = CoxPHSurvivalAnalysis(alpha=90 * training.objective.PENALTY, ties="efron")
    expected = other.fit(scaled, Surv.from_arrays(event, time)).predict(scaled)
    assert risk - risk.mean() == pytest.approx(expected - expected.mean(), abs=1e-5)


@in_tensorflow
def test_formulas_of_exported_models_give_the_predictions() -> None:
    """As a reader computes them from the outputs of the model, its JSON and NumPy."""
    rng = np.random.default_rng(5)
    targets = np.stack([rng.exponential(40, 80), rng.random(80) < 0.6], axis=1)
    discrete = training.objective.DiscreteSurvival.of(targets, "discrete")
    described = discrete.description
    hazards = rng.random((5, len(described["edges"]) - 1)).astype(np.float32)
    logarithms = np.log(np.cumprod(1.0 - hazards, axis=1))
    steps = np.concatenate([np.zeros((5, 1)), logarithms], axis=1)
    survival = [np.exp(np.interp(described["times"], described["edges"], row)) for row in steps]
    expected = np.column_stack([-np.exp(logarithms).sum(axis=1), survival])
    np.testing.assert_allclose(discrete.predictions(hazards), expected, rtol=1e-5)
    cox = training.objective.CoxObjective.of(targets, "cox")
    cox.fit_baseline(rng.normal(size=80), targets)
    risk = rng.normal(size=(5, 1)).astype(np.float32)
    expected = np.concatenate([risk, np.array(cox.description["baseline"]) ** np.exp(risk)], axis=1)
    np.testing.assert_allclose(cox.predictions(risk), expected, rtol=1e-5)


@in_tensorflow
@pytest.mark.parametrize("task", ["two", "three", "multilabel", "regression", "discrete"])
def test_a_slide_model_starts_with_the_predictions_of_the_covariates_alone(task: str) -> None:
    """Compare with the predictions of scikit-learn; a class without a training bag stays improbable."""
    from sklearn.linear_model import LogisticRegression, Ridge

    rng = np.random.default_rng(2)
    ages = rng.normal(60, 10, 50)
    cells = [(f"{age:.2f}", "ab"[i % 2]) for i, age in enumerate(ages)]
    covariates = Covariates.of(("age", "stage"), cells)
    inputs = np.array([covariates.encode(row) for row in cells])
    chance = 1 / (1 + np.exp(-(ages - 60) / 5))
    labels = (rng.random(50) < chance).astype(int) * (2 if task == "three" else 1)
    numbers = np.column_stack([ages * 3 + rng.normal(size=50), rng.normal(size=50)])
    numbers[3, 0] = np.nan
    happened = np.column_stack([rng.exponential(9, 50) * (1 - chance / 2), labels > 0])
    objective: training.objective.Objective
    match task:
        case "multilabel":
            targets = np.column_stack([labels, 1 - labels]) * 1.0
            objective = training.objective.MultilabelObjective(2)
        case "regression":
            targets = numbers
            objective = training.objective.RegressionObjective.of(numbers, "huber")
        case "discrete":
            targets, objective = happened, training.objective.DiscreteSurvival.of(happened)
        case _:
            targets = labels[:, None].astype(np.float64)
            objective = training.objective.ClassObjective(labels.max() + 1)
    slides = [
        SimpleNamespace(covariates=row, label="xyz"[label])
        for row, label in zip(cells, labels.tolist(), strict=True)
    ]
    splits: Any = SimpleNamespace(
        task=SimpleNamespace(of_classes=task in ("two", "three")),
        task_name={"discrete": "survival"}.get(task, task),
        classes=["x", "y", "z"][: labels.max() + 1],
        slides_on=lambda _: slides,
        targets_on=lambda _: targets,
    )
    kernel, bias = training.bag_weights.baseline_weights(splits, covariates, objective)
    assert kernel.shape == (inputs.shape[1], objective.outputs)
    predicted = np.asarray(objective.activate(tf.constant(inputs @ kernel + bias)))
    if task == "regression":
        finite = np.isfinite(numbers[:, 0])
        other = Ridge().fit(inputs[finite], numbers[finite, 0]).predict(inputs)
        np.testing.assert_allclose(predicted[:, 0], other)
    elif task == "discrete":
        order = np.argsort(inputs @ training.objective.cox_weights(inputs, happened))
        assert (np.diff(predicted[order], axis=0) >= -1e-12).all()
        assert predicted.mean(axis=0) == pytest.approx(1 / (1 + np.exp(-objective.bias)), abs=0.1)
    else:
        model = LogisticRegression(max_iter=1000).fit(inputs, labels > 0)
        places = {"three": [0, 2], "multilabel": [1, 0]}.get(task, [0, 1])
        np.testing.assert_allclose(predicted[:, places], model.predict_proba(inputs), atol=1e-4)
        assert task != "three" or predicted[:, 1].max() < 1e-6


@in_tensorflow
def test_missing_labels_do_not_change_the_gradients_of_others() -> None:
    targets = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    missing = np.array([[1.0, np.nan], [0.0, 1.0], [1.0, np.nan]])
    labels = training.objective.MultilabelObjective(2)
    labels.positive_weight = np.array([2.0, 1.0])
    for objective in (labels, training.objective.RegressionObjective.of(targets, "huber")):
        gradients = []
        for target in (targets, missing):
            logits = tf.Variable([[0.3, -0.2], [1.0, 2.0], [-0.5, 0.1]])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(objective.losses({"target": tf.constant(target)}, logits))
            gradients.append(tape.gradient(loss, logits).numpy())
        np.testing.assert_array_equal(gradients[0][:, 0], gradients[1][:, 0])
        assert gradients[1][0, 1] == gradients[1][2, 1] == 0 != gradients[0][0, 1]
        outputs = objective.activate(tf.constant([[0.3, -0.2]]))
        np.testing.assert_allclose(objective.logits(outputs), [[0.3, -0.2]], rtol=1e-5)
        layer = objective.layer("float32")
        np.testing.assert_allclose(layer(tf.constant([[0.3, -0.2]])), outputs, rtol=1e-6)


@in_tensorflow
@given(seed=st.integers(0, 999))
@examples(10)
def test_discrete_survival_is_a_likelihood(seed: int) -> None:
    """The loss is -log of the probability of what happened, and the survival falls from 1."""
    rng = np.random.default_rng(seed)
    targets = np.stack([rng.exponential(1, 50), np.ones(50)], axis=1)
    objective = training.objective.DiscreteSurvival.of(targets)
    logits = rng.normal(size=(1, objective.outputs)).astype(np.float32)
    hazard = objective.activate(tf.constant(logits)).numpy()[0]
    rows = tf.constant(np.repeat(logits, 50, axis=0))
    losses = objective.losses({"target": tf.constant(targets)}, rows).numpy()
    edges = np.array(objective.description["edges"])
    part = np.minimum(np.searchsorted(edges, targets[:, 0], "right") - 1, len(hazard) - 1)
    before = np.append(1, np.cumprod(1 - hazard))[part]
    np.testing.assert_allclose(losses, -np.log(before * hazard[part]), rtol=1e-4)
    predictions = objective.predictions(hazard[None])
    assert predictions.shape == (1, 1 + len(objective.description["times"]))
    assert (np.diff(predictions[0, 1:], prepend=1) <= 0).all()
    higher = objective.predictions(np.minimum(hazard[None] * 1.2, 0.99))
    assert higher[0, 0] > predictions[0, 0]  # a higher hazard is a higher risk


@in_tensorflow
def test_coefficients_of_covariates_learn_ten_times_faster() -> None:
    """A step of SGD changes a weight by the learning rate times the gradient."""
    keras.utils.set_random_seed(0)
    objective = training.objective.RegressionObjective(
        1, "squared", {"mean": [0.0], "deviation": [1.0]}
    )
    model = training.bag_model.BagModel(
        "gated", dimension=3, objective=objective, dropout=0.0, covariates=2
    )
    settings = training.train_step.StepSettings(
        batch_size=1, objective=objective, class_weight=np.ones(1, np.float32)
    )
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    step = training.bag_step.BagTrainStep(strategy, model, keras.optimizers.SGD(0.1), settings)
    batch = {
        "features": np.array([[1, 1, 1], [1, 0, 2]], np.float32),
        "covariates": np.array([[1.5, -2]], np.float32),
        "target": np.array([[9]], np.float32),
        "label": np.zeros(1, np.int32),
        "end": np.array([2]),
        "key": np.zeros(1, np.int64),
        "weight": np.ones(1, np.float32),
    }
    weights = model.training.trainable_variables
    before = [np.asarray(weight.value).copy() for weight in weights]
    gradients, _ = step.gradients(
        {name: tf.constant(values) for name, values in batch.items()},
        tf.constant(0, tf.int64),
        1,
        2,
    )
    step.apply(gradients, tf.zeros(2))
    for weight, old, gradient in zip(weights, before, gradients[0], strict=True):
        assert np.abs(gradient).max() > 0 or "score" in weight.path, weight.path
        rates = np.full(old.shape, 0.1)
        if weight is model.last_weights[0]:
            rates[-2:] = 1.0
        change = np.asarray(weight.value) - old
        np.testing.assert_allclose(change, -rates * gradient, rtol=1e-3, atol=1e-6)


@in_tensorflow
def test_weight_decay_spares_the_last_layer(target_bags: Path) -> None:
    """With a decay of one per step, all other weights become 0."""
    settings = {"learning_rate": 1e-6, "weight_decay": 1e6, "target": ("share",)}
    with opened_setup(**of_bags(target_bags, task="regression", **settings)) as setup:
        model = steps_of(setup)[0].model.training
    largest = {name: np.abs(model.get_layer(name).kernel).max() for name in ("hidden", "logits")}
    assert largest["hidden"] < 1e-4
    assert largest["logits"] > 0.01


def test_covariates_are_encoded() -> None:
    rows = [("60", "I"), ("70", "II"), ("", ""), ("80", "I")]
    covariates = Covariates.of(("age", "stage"), rows)
    assert covariates.inputs == ("age", "age missing", "stage=I", "stage=II", "stage missing")
    expected = [
        [-1.2247449, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 1, 0, 0, 1],
        [1.2247449, 0, 1, 0, 0],
    ]
    encoded = np.array([covariates.encode(row) for row in rows])
    np.testing.assert_allclose(encoded, np.array(expected), atol=1e-6)
    assert covariates.encode(("old", "IV")) == [0, 1, 0, 0, 1]
    assert covariates.unknown(("old", "IV")) == ["column age: 'old'", "column stage: 'IV'"]
    assert Covariates.from_json(json.loads(json.dumps(covariates.to_json()))) == covariates
    for cells, message in (
        ([("1",), ("1",)], "only '1' in training"),
        ([("",)], "no value"),
        ([(f"x{i}",) for i in range(60)], "60 categories"),
    ):
        with pytest.raises(UsageError, match=message):
            Covariates.of(("a",), cells)


@in_tensorflow
@pytest.mark.long(reason="a training on patches, and all that shows its values")
@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_patch_models_of_numbers_and_labels(
    run: RunCommand, made: Path, made_store: Path, tmp_path: Path, task: TaskName
) -> None:
    """Predictions of the store equal those of the run, also in heatmaps and in the viewer."""
    with Store(made_store) as store:
        tumour = {record.id: int(record.label == "tumour") for record in store.complete.values()}
    labels, trained, folder = tmp_path / "labels.csv", tmp_path / "run", tmp_path / "predicted"
    rows = [f"{name},{1 + 2 * t},{t},{i % 2}" for i, (name, t) in enumerate(tumour.items())]
    labels.write_text("\n".join(["slide,size,tumour,other", *rows]) + "\n")
    columns = ("size",) if task == "regression" else ("tumour", "other")
    result = histopipe.train(
        made_store,
        labels=labels,
        task=task,
        target=columns,
        out=trained,
        epochs=1,
        max_per_slide=20,
        fractions=(0.6, 0.2, 0.2),
        model="small-cnn",
        resamples=0,
        log_device_placement=True,
        in_process=True,
    )
    assert tf.debugging.get_log_device_placement()
    tf.debugging.set_log_device_placement(False)
    assert {level.partition("_")[0] for level, _ in result.metrics["validation"].named()} == {
        "patch",
        "slide",
        "patient",
    }
    tested = read_predictions(trained / "predictions.csv")["test"]
    names = [*tested.task.target_names, *tested.task.output_names]
    predicted = histopipe.predict(trained, made_store, out=folder, labels=labels)
    assert len(predicted.done) == len(tumour)
    check_json(("predict", "--json"), json.dumps(predicted.to_json()))
    assert run("info", folder).returncode == 0
    trained_run = Run(trained)
    for slide, values in trained_run.by_slide().items():
        of_slide = trained_run.of_slide(slide)
        assert of_slide is not None and of_slide.slides == (
            slide,
        )  # not of all slides, for each slide
        cells = {
            (row["x_l0"], row["y_l0"]): row for row in csv_rows(folder / "patches" / f"{slide}.csv")
        }
        for row in csv_rows(trained / "predictions.csv"):
            if row["slide"] == slide:
                again = cells[row["x_l0"], row["y_l0"]]
                expected = [float(row[name]) for name in names]
                assert [float(again[name]) for name in names] == pytest.approx(expected, abs=1e-5)
        assert {n.removeprefix("p_") for n in tested.task.output_names} == {*values}
    evaluated = json.loads((folder / "evaluation.json").read_text())["test"]
    assert evaluated["slide"]["mean"]["count"] == len(tumour)
    assert set(csv_rows(folder / "slides.csv")[0]) >= {"slide", "patches", *names}
    assert run("report", "run" if task == "regression" else "predicted").returncode == 0
    slide = tested.slides[int(tested.slide[0])]
    flags = ("--class", columns[0], "--to", "png,geojson", "--slide", slide, "--top", 2)
    for source in ("run", "predicted"):
        heatmaps = tmp_path / f"{source}-heat"
        done = run("heatmap", source, *flags, "--out", heatmaps)
        assert done.returncode == 0, done.stderr
        features = json.loads(next(heatmaps.glob("*.geojson")).read_text())["features"]
        assert len(features[0]["properties"]["measurements"]) == len(tested.task.names)
        assert len(csv_rows(next(heatmaps.glob("*.top.csv")))) == 4
    with Collection() as collection:
        opened = open_collection([trained, folder])
        collection.stores = opened.stores
        entry = next(e for e in opened.entries if e.id in Run(trained).slide_ids())
        titles = [layer.title for layer in slide_layers(entry, opened.predictions).layers]
        assert sum(title.endswith(f" {columns[0]}") for title in titles) == 2
        assert not any(list(find_errors(source, 3)) for source in opened.predictions)
    for how in ("majority", "top_k") if task == "regression" else ():
        with pytest.raises(UsageError, match="expected mean"):
            histopipe.predict(trained, made_store, out=tmp_path / "no", aggregate=how)
    if task == "multilabel":
        labels.write_text(labels.read_text().replace(",3,1,", ",3,2,"))
        with pytest.raises(UsageError, match="tumour: found '2'"):
            histopipe.predict(trained, made_store, out=tmp_path / "no", labels=labels)
    assert not list((tmp_path / "no").rglob("*.csv"))


@given(st.integers(20, 80), st.integers(1, 5), st.integers(0, 99))
@examples(20)
def test_labels_are_divided_evenly(units: int, labels: int, seed: int) -> None:
    present = np.random.default_rng(seed).random((units, labels)) < 0.3
    patches = np.hstack([np.ones((units, 1), bool), present]).astype(np.int64)
    assignment = Assignment((0.6, 0.2, 0.2), seed)
    (sides,) = assignment.assign(patches, labels)
    for share, side in ((0.6, 0), (0.2, 1), (0.2, 2)):
        assert abs((sides == side).sum() - share * units) <= 2
        for label in present.T:
            assert abs(label[sides == side].sum() - share * label.sum()) <= 3
    folds = replace(assignment, folds=4).assign(patches, labels)
    assert ((folds == 2).sum(axis=0) == 1).all()  # each unit is tested once


@pytest.mark.parametrize(
    ("task", "chosen", "count", "expected"),
    [
        (Survival(("time", "event")), 6, 36, (4, 1, 1)),
        (Survival(("time", "event")), 8, 80, (6, 1, 1)),
        (Survival(("time", "event")), 40, 80, (28, 6, 6)),
        (Regression(("age",)), 12, 12, (8, 2, 2)),
        (Regression(("age",)), 8, 8, (6, 1, 1)),
        (Regression(("age",)), 80, 80, (56, 12, 12)),
    ],
)
def test_few_patients_of_a_range_do_not_change_the_shares(
    task: Survival | Regression, chosen: int, count: int, expected: tuple[int, int, int]
) -> None:
    """Each side gets a patient of each stratum, so strata are ranges only if there are enough patients for that."""
    targets = np.column_stack([np.arange(1.0, count + 1), np.arange(count) < chosen])
    names = task.strata(targets[:, : len(task.columns)])
    slides = [
        SlideSplit(
            store=0,
            slide=i,
            id=f"s{i}",
            label=names[i],
            patient=f"p{i}",
            site=None,
            content=None,
            count=1,
            crc=0,
            subsets=np.zeros(1, np.int8),
            target=tuple(targets[i, : len(task.columns)].tolist()),
        )
        for i in range(count)
    ]

    def split(folds: int) -> np.ndarray[Any, Any]:
        assignment, classes = Assignment((0.7, 0.15, 0.15), 1, folds), tuple(sorted(set(names)))
        plan = _Plan((), Labelling(task=task), classes, slides, "patient", assignment, REGION)
        return plan._by_group()

    (sides,) = split(0)
    assert tuple(np.bincount(sides[:chosen], minlength=3)) == expected
    tested = split(3) == 2
    assert np.sum(tested, axis=0).tolist() == [1] * count
    assert np.ptp(np.sum(tested, axis=1)) <= 2


def test_wrong_cells_are_named() -> None:
    survival = Survival(("time", "event"))
    for cells, message in (
        ({"time": "-1", "event": "1"}, "time: found '-1', expected a time, 0 or more"),
        ({"time": "", "event": "1"}, "time: found a missing value, expected a time"),
        ({"time": "soon", "event": "1"}, "time: found 'soon', expected a number"),
        ({"time": "inf", "event": "1"}, "time: found 'inf', expected a number"),
        ({"time": "3", "event": "2"}, "event: found '2', expected 0, 1"),
        ({"time": "3", "event": ""}, "event: found a missing value"),
    ):
        with pytest.raises(UsageError, match=f"slide s1: {message}"):
            survival.target(cells, "slide s1")
    assert survival.target({"time": "", "event": ""}, "s") is None
    with pytest.raises(UsageError, match="slide s1: a: found 'yes', expected 0, 1"):
        Multilabel(("a",)).target({"a": "yes"}, "slide s1")
    assert Regression(("a", "b")).target({"a": "", "b": "2"}, "s")[1] == 2  # type: ignore[index]
    for task, targets, message in (
        (survival, [[1, 0], [2, 0]], "no event in column event"),
        (survival, [[1, 1], [1, 1]], "no time later than the first event"),
        (Regression(("a",)), [[1], [1]], "2 slides with one value"),
        (Multilabel(("a",)), [[1], [math.nan]], "1 of 1 with 1, expected both 0 and 1"),
    ):
        with pytest.raises(NothingToDo, match=message):
            task.check(np.array(targets, np.float64), "train")


SURVIVAL = {"task": "survival", "time": "time", "event": "event"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"task": "survival"}, "--time: found no column, expected a column of --labels"),
    ({**SURVIVAL, "event": "time"}, "columns with different names"),
    ({**SURVIVAL, "batch_size": 1}, "2 or more: the Cox loss"),
    ({**SURVIVAL, "covariates": ("time",)}, "expected different columns that are not predicted"),
    ({**SURVIVAL, "mil": None}, "--task survival: found patches, expected --mil with features"),
    ({"task": "regression"}, "--target: found no column"),
    ({"target": ("age",)}, "--target: found --task classification, expected another --task"),
    ({"task": "regression", "target": ("nothing",)}, "wrong header"),
    (
        {"task": "regression", "target": ("age",), "loss": "cox"},
        "--loss: found cox, expected auto, huber, squared",
    ),
    (
        {"task": "regression", "target": ("age",), "class_weights": "balanced"},
        "a task with classes",
    ),
    (
        {"task": "multilabel", "target": ("MSI",), "label_smoothing": 0.1},
        "--label-smoothing: found --task multilabel",
    ),
    ({"task": "multilabel", "target": ("age",)}, "slide s0: age: found"),
    ({"loss": "huber"}, "--loss: found --task classification"),
]


def of_bags(bags: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of a training on the bags of `write_target_bags`."""
    return {"mil": [str(bags)], "labels": str(bags / "labels.csv"), **settings}


def read_data(settings: dict[str, Any]) -> None:
    """Read the data of a training."""
    config = make_config({name: value for name, value in settings.items() if value is not None})
    with opened_sources(config, config.splits) as sources:
        splits_and_slides(config, sources, Path(), resume=False)


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_use_is_explained(target_bags: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_data(of_bags(target_bags, **settings))


def test_splits_of_another_task_are_refused(target_bags: Path, tmp_path: Path) -> None:
    with without_training():
        of_labels = of_bags(target_bags, task="multilabel", target=("MSI", "BRAF"))
        histopipe.train(out=tmp_path / "run", **of_labels)
    splits = str(tmp_path / "run" / "splits.json")
    with pytest.raises(UsageError, match="expected survival time event"):
        read_data(of_bags(target_bags, **SURVIVAL, splits=splits))


@pytest.mark.parametrize(("offset", "factor"), [(1e9, 1), (2.45e6, 1), (0, 1e-50), (0, 1e40)])
def test_targets_beyond_single_precision_are_refused(offset: float, factor: float) -> None:
    values = np.linspace(1, 5, 20)[:, None]
    Regression(("age",)).check(values, "training")
    with pytest.raises(UsageError, match="column age cannot be learned: training: found values"):
        Regression(("age",)).check(offset + factor * values, "training")
