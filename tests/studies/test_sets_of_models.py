"""Prediction sets of runs and cross-validations: who calibrates, and what `predict` and the pages show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import histopipe
from helpers.bags import a_bag, write_bag
from helpers.commands import with_tensorflow
from helpers.runs import without_training
from histopipe.errors import UsageError
from histopipe.evaluation.prediction_sets import calibration_scores, prediction_sets
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.runs.run import Run
from histopipe.splits.splits import load_splits
from histopipe.system.table_files import read_dicts
from histopipe.tasks.predictions import EvaluationSettings

PATIENTS = 60
SETTINGS: dict[str, Any] = {"epochs": 2, "devices": "cpu", "resamples": 50, "subgroup": ("sex",)}


def train(folder: Path, out: str, **settings: Any) -> Any:
    places = {"mil": folder / "features", "labels": folder / "labels.csv", "out": folder / out}
    command = histopipe.cross_validate if "folds" in settings else histopipe.train
    return command(**{**SETTINGS, **places, **settings})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Bags of patients with one or two slides; a trained run, and a cross-validation without a training."""
    folder, rng = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    rows = ["slide,label,patient,sex,age"]
    for i in range(PATIENTS):
        for slide in "ab"[: 1 + i % 2]:
            name, positive = f"s{i}{slide}", i % 3 == 0
            # Bags are hard: only some have the signal.
            values = a_bag(int(rng.integers(1 << 30)), 8, positive=positive and rng.random() < 0.7)
            write_bag(folder / "features" / f"{name}.h5", values)
            rows.append(f"{name},{'np'[positive]},P{i},{'fm'[i % 2]},{30 + i}")
    (folder / "labels.csv").write_text("\n".join(rows))
    train(folder, "run", conformal=0.2, calibration_share=0.5)
    with without_training():
        assert not train(folder, "cv", conformal=0.1, folds=3).failed
        train(folder, "ages", task="regression", target=("age",), conformal=0.3)
        for number in (1, 2, 3):
            shutil.copy(folder / "run" / "model.keras", folder / "cv" / f"fold-{number}")
        yield folder


PREDICT = """
import json, sys, histopipe
from pathlib import Path
from histopipe.training.bag_model import BagModel
from histopipe.training.objectives import objective_class

folder = Path(sys.argv[1])
facts = {"mean": [60.0], "deviation": [17.0]}
objective = objective_class("regression", "huber")(1, "huber", facts)
metrics = folder / "ages" / "metrics.json"
metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"objective": facts}))
BagModel("gated", dimension=12, objective=objective, dropout=0.0).serving.save(folder / "ages" / "model.keras")
for model in ("run", "cv", "cv/fold-1", "cv/fold-2", "cv/fold-3", "ages"):
    labels = {} if model == "ages" else {"labels": folder / "labels.csv", "subgroup": ("sex",)}
    print(model, histopipe.predict(folder / model, folder / "features", out=folder / "predicted" / model.replace("/", "-"), **labels))
"""


@pytest.fixture(scope="module")
def predicted(study: Path) -> Path:
    """Predictions of the slides by each model. Folds have the model of the run, but other sets."""
    done = with_tensorflow(PREDICT, study)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("prediction sets for") == 5
    return study / "predicted"


def test_calibration_patients_are_set_aside(study: Path) -> None:
    splits = load_splits(study / "run" / "splits.json")
    patients = {
        name: {slide.patient for slide in splits.slides_on(name)}
        for name in ("train", "validation", "test", "calibration")
    }
    assert sum(map(len, patients.values())) == len(set().union(*patients.values())) == PATIENTS
    assert abs(len(patients["train"]) - len(patients["calibration"])) <= 2
    for row in read_dicts(study / "run" / "slides.csv"):
        used = row["patient"] in patients["calibration"]
        assert (row["status"] == "calibration") == used and (row["calibration"] != "0") == used
    metrics = json.loads((study / "run" / "metrics.json").read_text())
    assert "calibration" not in metrics and sum(metrics["bags"]["calibration"].values()) > 0
    predictions = read_predictions(study / "run" / "predictions.csv")
    sets = Run(study / "run").result.sets
    assert sets and sets.alpha == 0.2
    assert sets.scores == calibration_scores(predictions["calibration"], EvaluationSettings())
    rows = {row["group"]: row for row in sets.rows}
    assert rows["all"]["patients"] == len(patients["test"]) and {"n", "p", "sex f"} <= rows.keys()


def test_folds_calibrate_each_other(study: Path) -> None:
    summary = json.loads((study / "cv" / "summary.json").read_text())
    rows = {row["group"]: row for row in summary["prediction_sets"]["rows"]}
    assert rows["all"]["patients"] == rows["all"]["count"] == PATIENTS
    assert rows["all"]["coverage"] >= 0.8
    for fold in (1, 2, 3):
        splits = load_splits(study / "cv" / f"fold-{fold}" / "splits.json")
        assert not splits.slides_on("calibration")
        sets = Run(study / "cv" / f"fold-{fold}").result.sets
        assert sets and not sets.rows
        tested = len({slide.patient for slide in splits.slides_on("test")})
        assert sum(map(len, sets.scores["patient"]["label"])) == tested


@pytest.mark.parametrize("model", ["run", "cv"])
def test_sets_of_new_slides(study: Path, model: str, predicted: Path) -> None:
    names = [f"cv/fold-{number}" for number in (1, 2, 3)] if model == "cv" else ["run"]
    calibrations = [Run(study / name).result.sets for name in names]
    task = read_predictions(study / names[0] / "predictions.csv")["test"].task
    for level, table in (("slide", "slides.csv"), ("patient", "patients.csv")):
        rows = [*read_dicts(predicted / model / table)]
        each = []
        for name in names:
            of_model = read_dicts(predicted / name.replace("/", "-") / table)
            values = {row[level]: [float(row["p_n"]), float(row["p_p"])] for row in of_model}
            each.append([values[row[level]] for row in rows])
        scores = [sets.scores[level] for sets in calibrations if sets]  # type: ignore[index]
        # The patients who calibrate are predicted, too: their scores are equal to one of the calibration but for rounding.
        low, high = (
            prediction_sets(
                scores, task, np.array(each) + rounding, 0.2 if model == "run" else 0.1
            )["label"]
            for rounding in (-1e-5, 1e-5)
        )
        sure = (low == high).all(axis=1)
        texts = np.array(["|".join(np.array(["n", "p"])[row]) or "(none)" for row in low])
        cells = np.array([row["set"] for row in rows])
        assert sure.mean() > 0.7
        assert cells[sure].tolist() == texts[sure].tolist()
        assert len(set(cells)) > 1
    evaluation = json.loads((predicted / model / "evaluation.json").read_text())["prediction_sets"]
    by_group = {row["group"]: row for row in evaluation["rows"]}
    assert by_group["all"]["patients"] == PATIENTS and "sex m" in by_group
    right = [row["label"] in row["set"].split("|") for row in rows]  # of patients
    assert by_group["all"]["coverage"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize("name", ["run", "cv", "predicted/run"])
def test_pages_show_the_sets(study: Path, predicted: Path, name: str, tmp_path: Path) -> None:
    page = histopipe.report(study / name, out=tmp_path / "page.html").file.read_text()
    for text in ("Prediction sets of patients", "Risk and coverage", "contain the truth"):
        assert text in page


def test_intervals_of_numbers(study: Path, predicted: Path) -> None:
    sets = Run(study / "ages").result.sets
    assert sets is not None
    (row,) = [row for row in sets.rows if row["group"] == "all"]
    assert row["column"] == "age" and row["size"] > 0 and row["single"] is None
    names = ("low_age", "predicted_age", "high_age")
    slides = read_dicts(predicted / "ages" / "slides.csv")
    reach = np.diff([[float(row[name]) for name in names] for row in slides])
    assert np.ptp(reach) < 1e-4 < reach.min()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "survival", "time": "age", "event": "sex"}, "times of survival are censored"),
        ({"split_by": "slide"}, "split by patient or site"),
        ({"folds": 2, "seeds": 2}, "a patient would calibrate several times"),
        ({"folds": 2, "calibration_share": 0.2}, "the folds calibrate each other"),
        ({"folds": 2, "conformal": 0.04}, r"label p: found 20 patients who.*which is 24"),
        ({}, r"label n: found 5 patients who calibrate"),
    ],
)
def test_wrong_combinations(study: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(study, "x", **{"conformal": 0.1, **settings})
    assert not (study / "x").exists()


def test_searches_and_splits_that_cannot_calibrate_are_refused(study: Path) -> None:
    with pytest.raises(UsageError, match="found a search"):
        histopipe.tune(
            space={"learning_rate": [1e-3, 1e-4]},
            mil=study / "features",
            labels=study / "labels.csv",
            out=study / "x",
            conformal=0.1,
        )
    train(study, "by-slide", split_by="slide", allow_leaks=True)
    splits = study / "by-slide" / "splits.json"
    with pytest.raises(UsageError, match="has patients of another subset"):
        train(study, "x", conformal=0.2, splits=splits, allow_leaks=True)
    text = (study / "run" / "splits.json").read_text()
    text = text.replace('"side": "test"', '"side": "validation"')
    (study / "no-test.json").write_text(text.replace('"calibration"', '"train"'))
    with pytest.raises(UsageError, match="in which test is missing"):
        train(study, "x", conformal=0.2, calibration_share=0.0, splits=study / "no-test.json")
