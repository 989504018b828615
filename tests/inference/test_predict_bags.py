"""Predictions by slide models and by ensembles, with networks of NumPy: their tables, evaluation and errors."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import histopipe
from helpers.bags import write_bag
from helpers.commands import run_command
from helpers.json_results import check_json
from helpers.networks import DIMENSION
from helpers.runs import without_training
from helpers.scores import adds_up
from helpers.trainings import csv_rows
from histopipe.errors import HistopipeError, NothingToDo, UsageError
from histopipe.evaluation.prediction_sets import prediction_sets, set_cells
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.runs.run import Run
from histopipe.splits.slide_table import flow_from_json

pytestmark = pytest.mark.usefixtures("numpy_networks")


def train_without(command: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Run `train` or `cross_validate` without a training."""
    with without_training():
        command(*arguments, **{"resamples": 0, "fractions": (0.4, 0.3, 0.3), **options})


def test_external_validation_of_a_slide_model(
    slide_model: Path, golden_runs: Path, tmp_path: Path
) -> None:
    """Slides of the training are named. A label that is no class is a reason of exclusion. The page has ROC and errors."""
    wrong = {f"slide-{number:03}": "tumour" if number < 3 else "normal" for number in range(7)}
    out, table = tmp_path / "p", tmp_path / "labels.csv"
    rows = [("slide", "label"), *wrong.items(), ("slide-007", "Normal")]
    table.write_text("\n".join(map(",".join, rows)))
    run, store = slide_model / "run", golden_runs / "store.lmdb"
    result = histopipe.predict(run, store, out=out, labels=table)
    evaluated = result.evaluated
    assert evaluated is not None
    check_json(("predict", "--json"), json.dumps(result.to_json()))
    flow = flow_from_json(json.loads((out / "evaluation.json").read_text())["flow"])
    assert adds_up(flow)
    assert flow["slides"].used == {("test",): 7}
    assert flow["slides"].excluded == {"label is no class of the model": 1}
    trained = {slide["id"] for slide in json.loads((run / "splits.json").read_text())["slides"]}
    assert set() < set(evaluated.in_training) < trained
    assert evaluated.evaluation.in_training == len(evaluated.in_training)
    errors = [
        row for row in csv_rows(out / "slides.csv")[:7] if row["decided"] != wrong[row["slide"]]
    ]
    page = html.unescape(histopipe.report(out).file.read_text())
    for text in (
        f"Warning: the training used {len(evaluated.in_training)} of these slides",
        "The logits are divided by the temperature of the training",
        "ROC, slides",
        "wrong decisions, those with the highest confidence first",
        f"Test: {len(errors)} wrong decisions",
    ):
        assert text in page
    assert errors and len(csv_rows(out / "evaluated.csv")) == 7
    table.write_text("slide,label\nslide-000,tumour\n")
    assert histopipe.predict(run, store, out=out, labels=table).evaluated is None
    assert not list(out.glob("evaluat*"))


def test_flow_of_a_slide_model_begins_with_the_store(golden_runs: Path, tmp_path: Path) -> None:
    """`embed` records the slides of the store, also those without features, and how they were read."""
    store = Path(shutil.copytree(golden_runs / "extended.lmdb", tmp_path / "s.lmdb"))
    (tmp_path / "broken.svs").write_text("no slide")
    flags = ("--patch-size", 64, "--quality", 60, "--tissue", "none")
    assert run_command("ingest", tmp_path / "broken.svs", "--out", store, *flags).returncode == 4
    features, run, table = tmp_path / "features", tmp_path / "run", tmp_path / "labels.csv"
    histopipe.embed(store, model="small-cnn", out=features)
    labels = (golden_runs / "labels.csv").read_text().splitlines()
    table.write_text("\n".join([*labels[:10], "broken,tumour,B"]))  # the last slide has no label
    train_without(histopipe.train, mil=features, labels=table, out=run)
    flow = flow_from_json(json.loads((run / "metrics.json").read_text())["flow"])
    assert adds_up(flow)
    assert flow["slides"].excluded == {"ingest failed": 1, "no label": 1}
    assert flow["slides"].total == 11
    slides = {row["slide"]: row for row in csv_rows(run / "slides.csv")}
    assert slides["slide-000"]["vendor"] == "aperio"
    assert slides.pop("broken")["label"] == "tumour"
    assert {row["route"] for row in slides.values()} == {"decode"}
    evaluated = histopipe.predict(run, features, out=tmp_path / "p", labels=table).evaluated
    assert evaluated and evaluated.flow["slides"].excluded == flow["slides"].excluded


def test_report_of_predicted_patients(golden_runs: Path, tmp_path: Path) -> None:
    """A model of patients writes no table of slides. Errors are those of patients, with all their patches."""
    names = [(row["slide"], row["label"]) for row in csv_rows(golden_runs / "labels.csv")]
    # Two slides for each patient, of one label; in the second table, the labels are exchanged.
    rows = [
        (
            name,
            label,
            {"normal": "tumour", "tumour": "normal"}[label],
            f"P{i // 2}",
            "AB"[i // 2 % 2],
        )
        for i, (name, label) in enumerate(sorted(names, key=itemgetter(1)))
    ]
    for column, table in enumerate(("labels.csv", "exchanged.csv"), 1):
        lines = [",".join([row[0], row[column], *row[3:]]) for row in rows]
        (tmp_path / table).write_text("\n".join(["slide,label,patient,site", *lines]))
    labels, run, features = (tmp_path / name for name in ("labels.csv", "run", "features"))
    options: dict[str, Any] = {"patch_size": 64, "mpp": 0.5, "tissue": "none"}
    histopipe.embed(golden_runs / "slides", model="small-cnn", out=features, **options)
    train_without(histopipe.train, mil=features, bag="patient", labels=labels, out=run)
    assert "Patients by site and label" in histopipe.report(run).file.read_text()
    out, errors = tmp_path / "p", ""
    for table in ("labels.csv", "exchanged.csv"):
        assert histopipe.predict(run, features, out=out, labels=tmp_path / table).metrics
        page = html.unescape(histopipe.report(out).file.read_text())
        assert "6 patients, by" in page
        errors += "".join(re.findall(r"wrong decisions, those.*?</table>", page, re.DOTALL))
    # Each patient is wrong with one of the tables.
    listed = re.findall(
        r'<td class="id">(P\d)</td>.*?data-v="[\d.]+">\d\.\d{3}<.*?data-v="([\d.]+)"', errors
    )
    assert sorted((patient, float(count)) for patient, count in listed) == [
        (row["patient"], float(row["patches"])) for row in csv_rows(out / "patients.csv")
    ]
    with h5py.File(features / f"{rows[0][0]}.h5", "r+") as file:
        file["features"][0, 0] += 1  # without an update of its checksum
    result = histopipe.predict(run, features, out=tmp_path / "q", labels=labels)
    assert set(result.failed) == {"P0"} and result.evaluated
    flow = result.evaluated.flow
    assert flow["slides"].excluded == {"prediction failed": 2}
    assert flow["patients"].excluded == {"prediction failed": 1}


def test_new_slides_are_added_and_changed_ones_computed_again(
    slide_model: Path, golden_runs: Path, tmp_path: Path
) -> None:
    run, slides, out = slide_model / "run", tmp_path / "slides", tmp_path / "p"
    slides.mkdir()
    for name in ("slide-000.svs", "slide-001.svs"):
        shutil.copy(golden_runs / "slides" / name, slides)
    assert histopipe.predict(run, slides, out=out).done == ("slide-000", "slide-001")
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("features/*.h5")}
    (slides / "broken.svs").write_bytes(b"no slide")
    for name in ("slide-001.svs", "slide-002.svs"):
        shutil.copy(golden_runs / "slides" / "slide-002.svs", slides / name)
    second = histopipe.predict(run, slides, out=out)
    assert set(second.failed) == {"broken"} and len(second.done) == 3
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("features/*.h5")}
    assert after.keys() == {"slide-000.h5", "slide-001.h5", "slide-002.h5"}
    assert [name for name, time in before.items() if after[name] != time] == ["slide-001.h5"]
    with pytest.raises(UsageError, match="other settings"):
        histopipe.predict(run, slide_model / "features", out=out)


def test_ensemble_of_patch_models_is_their_mean(small_store: Path, tmp_path: Path) -> None:
    """Its prediction sets are those of the models, each with its own calibration."""
    cv = tmp_path / "cv"
    folds = {"folds": 2, "conformal": 0.4, "resamples": 20}
    train_without(histopipe.cross_validate, small_store, out=cv, **folds)
    for folder in (cv, cv / "fold-1", cv / "fold-2"):
        histopipe.predict(folder, small_store, out=tmp_path / "p" / folder.name)
    calibrations = [Run(cv / f"fold-{fold}").result.sets for fold in (1, 2)]
    task = read_predictions(cv / "fold-1" / "predictions.csv")["test"].task
    for level in ("slide", "patient"):
        scores = [sets.scores[level] for sets in calibrations if sets]
        rows, *single = (
            csv_rows(tmp_path / "p" / name / f"{level}s.csv") for name in ("cv", "fold-1", "fold-2")
        )
        for row, *each in zip(rows, *single, strict=True):
            assert [of[level] for of in each] == [row[level]] * 2
            output = np.array([[[float(of[f"p_{name}"]) for name in task.classes]] for of in each])
            mean, deviation = output.mean(axis=0)[0], output.std(axis=0, ddof=1)[0]
            assert [float(row[f"p_{name}"]) for name in task.classes] == pytest.approx(
                mean, abs=1e-5
            )
            if level == "slide":
                assert float(row["sd_n"]) == pytest.approx(deviation[0], abs=1e-5)
            # A slide may have the score of one that calibrates: itself.
            assert {"set": [row["set"]]} in [
                set_cells(task, prediction_sets(scores, task, output + rounding, 0.4))
                for rounding in (-1e-5, 1e-5)
            ]
            assert "sd_n" not in each[0]


def test_wrong_input_is_explained(
    slide_model: Path, golden_runs: Path, tmp_path: Path, small_store: Path
) -> None:
    run, features, of_patches = slide_model / "run", slide_model / "features", golden_runs / "run"
    store = golden_runs / "store.lmdb"
    record = json.loads((features / "features.json").read_text())
    coarse = {**record, "patches": {**record["patches"], "patch_mpp": 1.0}}
    for name, changed in (("other", {**record, "sha256": "0" * 64}), ("coarse", coarse)):
        shutil.copytree(features, tmp_path / name)
        (tmp_path / name / "features.json").write_text(json.dumps(changed))
    write_bag(
        tmp_path / "narrow" / "slide-000.h5",
        np.ones((3, 5), np.float32),
        np.zeros((3, 2), np.int64),
    )
    cases: list[tuple[str, Path, tuple[Path, ...], dict[str, Any]]] = [
        ("found sha256 0000", run, (tmp_path / "other",), {}),
        ("found µm per pixel 1, expected µm per pixel 0.49", run, (tmp_path / "coarse",), {}),
        ("features per patch: found", run, (tmp_path / "narrow",), {}),
        ("the size of its patches differs", run, (small_store,), {}),
        ("expected 1, in the order of --mil", run, (features, tmp_path / "other"), {}),
        ("features and stores are mixed", run, (features, store), {}),
        ("model of patches: found features", of_patches, (features,), {}),
        ("--encoder: found a model of patches", of_patches, (store,), {"encoder": ("uni",)}),
        ("no aggregation", run, (features,), {"aggregate": "top_k"}),
        ("other features than in the training", run, (store,), {"encoder": (of_patches,)}),
    ]
    for message, folder, sources, options in cases:
        with pytest.raises(HistopipeError, match=message):
            histopipe.predict(folder, sources, out=tmp_path / "p", **options)
    assert not (tmp_path / "p" / "slides.csv").exists()


def test_odd_bags_are_predicted_or_named(
    slide_model: Path, golden_runs: Path, tmp_path: Path
) -> None:
    folder, features, run = tmp_path / "odd", slide_model / "features", tmp_path / "run"
    folder.mkdir()
    for name, source in (("slide-001", "slide-001"), ("damaged", "slide-000")):
        shutil.copy(features / f"{source}.h5", folder / f"{name}.h5")
    with h5py.File(folder / "damaged.h5", "r+") as file:
        file["features"][0, 0] += 1
    write_bag(folder / "one.h5", np.ones((1, DIMENSION), np.float32), np.zeros((1, 2), np.int64))
    write_bag(folder / "empty.h5", np.ones((0, DIMENSION), np.float32))
    # The encoder of a run of features without record is unknown, also that of features without record.
    shutil.copytree(slide_model / "run", run)
    description = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**description, "encoders": [None]}))
    assert set(histopipe.predict(run, folder, out=tmp_path / "r").done) == {"slide-001", "one"}
    shutil.copy(features / "features.json", folder)
    result = histopipe.predict(slide_model / "run", folder, out=tmp_path / "p")
    assert (set(result.done), result.metrics) == ({"slide-001", "one"}, None)
    assert "checksum" in result.failed["damaged"]
    assert result.failed["empty"] == "the slide has no patches"
    with pytest.raises(NothingToDo, match="does not exist"):
        histopipe.predict(run, tmp_path / "nothing", out=tmp_path / "q")
    with pytest.raises(UsageError, match=r"encoder of .* is not recorded: found slides"):
        histopipe.predict(run, golden_runs / "slides", out=tmp_path / "q")
