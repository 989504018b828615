"""Prediction sets of runs and cross-validations: who calibrates, and what `predict` and the pages show."""

from __future__ import annotations

import csv
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
from histopipe.runs.result import read_result
from histopipe.splits.splits import load_splits
from histopipe.system.table_files import read_dicts
from histopipe.tasks.task import EvaluationSettings

PATIENTS = 60
SETTINGS: dict[str, Any] = {"epochs": 2, "devices": "cpu", "resamples": 50, "subgroup": ("sex",)}


def train(folder: Path, out: str, **settings: Any) -> Any:
    places = {"mil": folder / "features", "labels": folder / "labels.csv", "out": folder / out}
    command = histopipe.cross_validate if "folds" in settings else histopipe.train
    return command(**{**SETTINGS, **places, **settings})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Bags of patients with one or two slides; a trained run, and a cross-validation without a training."""
    folder = tmp_path_factory.mktemp("sets")
    rows = [("slide", "label", "patient", "sex", "age")]
    rng = np.random.default_rng(0)
    for i in range(PATIENTS):
        for slide in "ab"[: 1 + i % 2]:
            name, positive = f"s{i}{slide}", i % 3 == 0
            # Bags are hard: only some have the signal.
            values = a_bag(int(rng.integers(1 << 30)), 8, positive=positive and rng.random() < 0.7)
            write_bag(folder / "features" / f"{name}.h5", values)
            rows.append((name, "np"[positive], f"P{i}", "fm"[i % 2], str(30 + i)))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
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
from histopipe.training.objective import objective_class

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
    assert sum(map(len, patients.values())) == PATIENTS
    assert len(set().union(*patients.values())) == PATIENTS
    assert abs(len(patients["train"]) - len(patients["calibration"])) <= 2
    for row in read_dicts(study / "run" / "slides.csv"):
        used = row["patient"] in patients["calibration"]
        assert (row["status"] == "calibration") == used and (row["calibration"] != "0") == used
    metrics = json.loads((study / "run" / "metrics.json").read_text())
    assert "calibration" not in metrics and sum(metrics["bags"]["calibration"].values()) > 0
    predictions = read_predictions(study / "run" / "predictions.csv")
    sets = read_result(study / "run").sets
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
        sets = read_result(study / "cv" / f"fold-{fold}").sets
        assert sets and not sets.rows
        tested = len({slide.patient for slide in splits.slides_on("test")})
        assert sum(map(len, sets.scores["patient"]["label"])) == tested


@pytest.mark.parametrize("model", ["run", "cv"])
def test_sets_of_new_slides(study: Path, model: str, predicted: Path) -> None:
    folds = [f"cv/fold-{number}" for number in (1, 2, 3)]
    folders = [study / name for name in (folds if model == "cv" else ["run"])]
    calibrations = [read_result(folder).sets for folder in folders]
    for level, table in (("slide", "slides.csv"), ("patient", "patients.csv")):
        rows = [*read_dicts(predicted / model / table)]
        each = []
        for folder in folders:
            out = predicted / str(folder.relative_to(study)).replace("/", "-")
            values = {row[level]: row for row in read_dicts(out / table)}
            each.append([[float(values[row[level]][f"p_{name}"]) for name in "np"] for row in rows])
        task = read_predictions(folders[0] / "predictions.csv")["test"].task
        scores = [sets.scores[level] for sets in calibrations if sets]  # type: ignore[index]
        # The patients who calibrate are predicted, too: their scores are equal to one of the calibration but for rounding.
        expected = [
            prediction_sets(
                scores, task, np.array(each) + rounding, 0.2 if model == "run" else 0.1
            )["label"]
            for rounding in (-1e-5, 1e-5)
        ]
        sure = (expected[0] == expected[1]).all(axis=1)
        texts = ["|".join(np.array(["n", "p"])[row]) or "(none)" for row in expected[0]]
        cells = [row["set"] for row in rows]
        assert sure.mean() > 0.7
        assert [a for a, same in zip(cells, sure, strict=True) if same] == [
            b for b, same in zip(texts, sure, strict=True) if same
        ]
    assert len({row["set"] for row in read_dicts(predicted / model / "slides.csv")}) > 1
    evaluation = json.loads((predicted / model / "evaluation.json").read_text())["prediction_sets"]
    by_group = {row["group"]: row for row in evaluation["rows"]}
    assert by_group["all"]["patients"] == PATIENTS and "sex m" in by_group
    of_patients = {row["patient"]: row for row in read_dicts(predicted / model / "patients.csv")}
    right = [row["label"] in row["set"].split("|") for row in of_patients.values()]
    assert by_group["all"]["coverage"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize("name", ["run", "cv", "predicted/run"])
def test_pages_show_the_sets(study: Path, predicted: Path, name: str, tmp_path: Path) -> None:
    histopipe.report(study / name, out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Prediction sets of patients" in text and "Risk and coverage" in text
    assert "contain the truth" in text


def test_intervals_of_numbers(study: Path, predicted: Path) -> None:
    sets = read_result(study / "ages").sets
    assert sets is not None
    (row,) = [row for row in sets.rows if row["group"] == "all"]
    assert row["column"] == "age" and row["size"] > 0 and row["single"] is None
    rows = [*read_dicts(predicted / "ages" / "slides.csv")]
    reach = [float(row["high_age"]) - float(row["predicted_age"]) for row in rows]
    assert reach == pytest.approx(
        [float(row["predicted_age"]) - float(row["low_age"]) for row in rows]
    )
    assert max(reach) - min(reach) < 1e-4 < min(reach)


def test_wrong_combinations(study: Path) -> None:
    with pytest.raises(UsageError, match="times of survival are censored"):
        train(study, "x", task="survival", time="age", event="sex", conformal=0.1)
    with pytest.raises(UsageError, match="split by patient or site"):
        train(study, "x", conformal=0.1, split_by="slide")
    with pytest.raises(UsageError, match="a patient would calibrate several times"):
        train(study, "x", conformal=0.1, folds=2, seeds=2)
    with pytest.raises(UsageError, match="the folds calibrate each other"):
        train(study, "x", conformal=0.1, folds=2, calibration_share=0.2)
    with pytest.raises(UsageError, match=r"label p: found 20 patients who calibrate.*which is 24"):
        train(study, "x", conformal=0.04, folds=2)
    with pytest.raises(UsageError, match=r"label n: found 5 patients who calibrate"):
        train(study, "x", conformal=0.1)
    with pytest.raises(UsageError, match="found a search"):
        histopipe.tune(
            space={"learning_rate": [1e-3, 1e-4]},
            mil=study / "features",
            labels=study / "labels.csv",
            out=study / "x",
            conformal=0.1,
        )
    assert not (study / "x").exists()
    by_slide = study / "by-slide"
    train(study, "by-slide", split_by="slide", allow_leaks=True)
    splits = by_slide / "splits.json"
    with pytest.raises(UsageError, match="has patients of another subset"):
        train(study, "x", conformal=0.2, splits=splits, allow_leaks=True)


def test_patients_without_calibration_are_refused(study: Path) -> None:
    splits = study / "run" / "splits.json"
    text = splits.read_text().replace('"side": "test"', '"side": "validation"')
    (study / "no-test.json").write_text(text.replace('"calibration"', '"train"'))
    with pytest.raises(UsageError, match="in which test is missing"):
        train(study, "x", conformal=0.2, calibration_share=0.0, splits=study / "no-test.json")
