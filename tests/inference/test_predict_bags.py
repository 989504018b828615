"""Predictions by slide models and by ensembles, with networks of NumPy: their tables, evaluation and errors."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable, Sequence
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
from histopipe.runs.result import read_result
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
    names = [f"slide-{number:03}" for number in range(8)]
    wrong = ["tumour" if i < 3 else "normal" for i in range(len(names))]
    wrong[-1] = "Normal"
    table = tmp_path / "labels.csv"
    table.write_text(
        "\n".join(["slide,label", *(f"{n},{label}" for n, label in zip(names, wrong, strict=True))])
    )
    out = tmp_path / "p"
    result = histopipe.predict(
        slide_model / "run", golden_runs / "store.lmdb", out=out, labels=table
    )
    assert result.evaluated is not None
    assert "labelled" in str(result)
    check_json(("predict", "--json"), json.dumps(result.to_json()))
    flow = flow_from_json(json.loads((out / "evaluation.json").read_text())["flow"])
    assert adds_up(flow)
    assert flow["slides"].used == {("test",): 7}
    assert flow["slides"].excluded == {"label is no class of the model": 1}
    trained = {
        slide["id"]
        for slide in json.loads((slide_model / "run" / "splits.json").read_text())["slides"]
    }
    assert result.evaluated.in_training
    assert set(result.evaluated.in_training) < trained
    assert result.evaluated.evaluation.in_training == len(result.evaluated.in_training)
    assert "used in the training, too" in str(result)
    page = html.unescape(histopipe.report(out).file.read_text())
    for text in (
        f"Warning: the training used {len(result.evaluated.in_training)} of these slides",
        "The logits are divided by the temperature of the training",
        "ROC, slides",
        "wrong decisions, those with the highest confidence first",
    ):
        assert text in page
    rows = csv_rows(out / "evaluated.csv")
    errors = [
        row
        for row, label in zip(csv_rows(out / "slides.csv"), wrong, strict=True)
        if row["decided"] != label and label != "Normal"
    ]
    assert len(rows) == 7
    assert errors and f"Test: {len(errors)} wrong decisions" in page
    table.write_text(f"slide,label\n{names[0]},tumour\n")
    assert (
        histopipe.predict(
            slide_model / "run", golden_runs / "store.lmdb", out=out, labels=table
        ).evaluated
        is None
    )
    assert not (out / "evaluation.json").exists()
    assert not (out / "evaluated.csv").exists()


def test_flow_of_a_slide_model_begins_with_the_store(golden_runs: Path, tmp_path: Path) -> None:
    """`embed` records the slides of the store, also those without features, and how they were read."""
    store = Path(shutil.copytree(golden_runs / "extended.lmdb", tmp_path / "s.lmdb"))
    bad = tmp_path / "slides"
    bad.mkdir()
    (bad / "broken.svs").write_text("no slide")
    flags = ("--patch-size", 64, "--quality", 60, "--tissue", "none")
    assert run_command("ingest", bad, "--out", store, *flags).returncode == 4
    features, run, table = tmp_path / "features", tmp_path / "run", tmp_path / "labels.csv"
    histopipe.embed(store, model="small-cnn", out=features)
    lines = (
        (golden_runs / "labels.csv").read_text().splitlines()[:10]
    )  # the last slide has no label
    table.write_text("\n".join([*lines, "broken,tumour,B"]))
    train_without(histopipe.train, mil=features, labels=table, out=run)
    flow = flow_from_json(json.loads((run / "metrics.json").read_text())["flow"])
    assert adds_up(flow)
    assert flow["slides"].excluded == {"ingest failed": 1, "no label": 1}
    assert flow["slides"].total == 11
    slides = {row["slide"]: row for row in csv_rows(run / "slides.csv")}
    assert slides["broken"]["label"] == "tumour"
    assert {row["route"] for name, row in slides.items() if name != "broken"} == {"decode"}
    assert slides["slide-000"]["vendor"] == "aperio"
    result = histopipe.predict(run, features, out=tmp_path / "p", labels=table)
    assert result.evaluated is not None
    assert result.evaluated.flow["slides"].excluded == {"ingest failed": 1, "no label": 1}


def write_labels(path: Path, rows: Sequence[tuple[str, ...]]) -> None:
    path.write_text("\n".join(["slide,label,patient,site", *map(",".join, rows)]))


def test_report_of_predicted_patients(golden_runs: Path, tmp_path: Path) -> None:
    """A model of patients writes no table of slides. Errors are those of patients, with all their patches."""
    lines = (golden_runs / "labels.csv").read_text().splitlines()[1:]
    names = [line.split(",")[:2] for line in lines]
    table = tmp_path / "labels.csv"
    # Two slides for each patient, of one label; in the second table, the labels are exchanged.
    order = sorted(names, key=lambda row: row[1])
    rows = [(name, label, f"P{i // 2}", "AB"[i // 2 % 2]) for i, (name, label) in enumerate(order)]
    write_labels(table, rows)
    run, out = tmp_path / "run", tmp_path / "p"
    features = tmp_path / "features"
    histopipe.embed(
        golden_runs / "slides",
        model="small-cnn",
        patch_size=64,
        mpp=0.5,
        tissue="none",
        out=features,
    )
    train_without(histopipe.train, mil=features, bag="patient", labels=table, out=run)
    assert "Patients by site and label" in histopipe.report(run).file.read_text()
    exchange = {"normal": "tumour", "tumour": "normal"}
    errors = []
    for number in range(2):
        labels = tmp_path / f"labels-{number}.csv"
        write_labels(
            labels, [(n, exchange[label] if number else label, p, s) for n, label, p, s in rows]
        )
        assert histopipe.predict(run, features, out=out, labels=labels).metrics is not None
        page = html.unescape(histopipe.report(out).file.read_text())
        assert "6 patients, by" in page
        errors += re.findall(r"wrong decisions, those.*?</table>", page, re.DOTALL)
    # Right decisions are wrong with the exchanged labels, so there is at least one table.
    patches = {row["patient"]: row["patches"] for row in csv_rows(out / "patients.csv")}
    listed = re.findall(
        r'<td class="id">(P\d)</td>.*?data-v="([\d.]+)">\d\.\d{3}<.*?data-v="([\d.]+)"',
        "".join(errors),
    )
    assert len(listed) == 6
    assert {patient: float(count) for patient, _, count in listed} == {
        patient: float(count) for patient, count in patches.items()
    }
    damaged = Path(shutil.copytree(features, tmp_path / "damaged"))
    with h5py.File(damaged / f"{rows[0][0]}.h5", "r+") as file:
        file["features"][0, 0] += 1  # without an update of its checksum
    result = histopipe.predict(run, damaged, out=tmp_path / "q", labels=table)
    assert set(result.failed) == {"P0"}
    assert result.evaluated is not None
    flow = result.evaluated.flow
    assert flow["slides"].excluded == {"prediction failed": 2}
    assert flow["patients"].excluded == {"prediction failed": 1}


def test_new_slides_are_added_and_changed_ones_computed_again(
    slide_model: Path, golden_runs: Path, tmp_path: Path
) -> None:
    names = [f"slide-{number:03}.svs" for number in range(3)]
    slides = tmp_path / "slides"
    slides.mkdir()
    for name in names[:2]:
        shutil.copy(golden_runs / "slides" / name, slides)
    first = histopipe.predict(slide_model / "run", slides, out=tmp_path / "p")
    assert len(first.done) == 2
    features = tmp_path / "p" / "features"
    before = {path.name: path.stat().st_mtime_ns for path in features.glob("*.h5")}
    shutil.copy(golden_runs / "slides" / names[2], slides)
    (slides / "broken.svs").write_bytes(b"no slide")
    shutil.copy(golden_runs / "slides" / names[2], slides / names[1])
    second = histopipe.predict(slide_model / "run", slides, out=tmp_path / "p")
    assert set(second.failed) == {"broken"}
    assert len(second.done) == 3
    after = {path.name: path.stat().st_mtime_ns for path in features.glob("*.h5")}
    kept, changed = (f"{Path(name).stem}.h5" for name in names[:2])
    assert after[kept] == before[kept]
    assert after[changed] != before[changed]
    with pytest.raises(UsageError, match="other settings"):
        histopipe.predict(slide_model / "run", slide_model / "features", out=tmp_path / "p")


def test_ensemble_of_patch_models_is_their_mean(small_store: Path, tmp_path: Path) -> None:
    folds = {"folds": 2, "conformal": 0.4}
    train_without(histopipe.cross_validate, small_store, out=tmp_path / "cv", resamples=20, **folds)
    histopipe.predict(tmp_path / "cv", small_store, out=tmp_path / "p")
    rows = {row["slide"]: row for row in csv_rows(tmp_path / "p" / "slides.csv")}
    single: list[dict[str, float]] = []
    for fold in (1, 2):
        histopipe.predict(tmp_path / "cv" / f"fold-{fold}", small_store, out=tmp_path / f"p{fold}")
        fold_rows = csv_rows(tmp_path / f"p{fold}" / "slides.csv")
        assert "sd_n" not in fold_rows[0]
        single.append({row["slide"]: float(row["p_n"]) for row in fold_rows})
    calibrations = [read_result(tmp_path / "cv" / f"fold-{fold}").sets for fold in (1, 2)]
    task = read_predictions(tmp_path / "cv" / "fold-1" / "predictions.csv")["test"].task
    for level, table in (("slide", "slides.csv"), ("patient", "patients.csv")):
        each = [{row[level]: row for row in csv_rows(tmp_path / f"p{i}" / table)} for i in (1, 2)]
        for row in csv_rows(tmp_path / "p" / table):
            output = [
                [[float(of[row[level]][f"p_{name}"]) for name in task.classes]] for of in each
            ]
            scores = [sets.scores[level] for sets in calibrations if sets]  # type: ignore[index]
            expected = [
                set_cells(task, prediction_sets(scores, task, np.array(output) + rounding, 0.4))
                for rounding in (-1e-5, 1e-5)
            ]
            # A slide may have the score of one that calibrates: itself.
            assert {"set": [row["set"]]} in expected
    for slide, row in rows.items():
        values = [by_slide[slide] for by_slide in single]
        assert float(row["p_n"]) == pytest.approx(np.mean(values), abs=1e-5)
        assert float(row["sd_n"]) == pytest.approx(np.std(values, ddof=1), abs=1e-5)


def test_wrong_input_is_explained(
    slide_model: Path, golden_runs: Path, tmp_path: Path, small_store: Path
) -> None:
    def refused(message: str, run: Path, *sources: Path, **options: Any) -> None:
        with pytest.raises(HistopipeError, match=message):
            histopipe.predict(run, sources, out=tmp_path / "p", **options)

    other = tmp_path / "other"
    shutil.copytree(slide_model / "features", other)
    record = json.loads((other / "features.json").read_text())
    (other / "features.json").write_text(json.dumps(record | {"sha256": "0" * 64}))
    refused("found sha256 0000", slide_model / "run", other)
    coarse = record | {"patches": {**record["patches"], "patch_mpp": 1.0}}
    (other / "features.json").write_text(json.dumps(coarse))
    refused("found µm per pixel 1, expected µm per pixel 0.49", slide_model / "run", other)
    (other / "features.json").unlink()
    with h5py.File(other / "slide-000.h5", "r+") as file:
        values = file["features"][:, :5]
        del file["features"]
        file["features"] = values
    refused("features per patch: found", slide_model / "run", other)
    refused("the size of its patches differs", slide_model / "run", small_store)
    refused(
        "expected 1, in the order of --mil", slide_model / "run", slide_model / "features", other
    )
    refused(
        "features and stores are mixed",
        slide_model / "run",
        slide_model / "features",
        golden_runs / "store.lmdb",
    )
    refused("model of patches: found features", golden_runs / "run", slide_model / "features")
    refused(
        "--encoder: found a model of patches",
        golden_runs / "run",
        golden_runs / "store.lmdb",
        encoder=("uni",),
    )
    refused("no aggregation", slide_model / "run", slide_model / "features", aggregate="top_k")
    refused(
        "other features than in the training",
        slide_model / "run",
        golden_runs / "store.lmdb",
        encoder=(golden_runs / "run",),
    )
    assert not (tmp_path / "p" / "slides.csv").exists()


def test_odd_bags_are_predicted_or_named(
    slide_model: Path, golden_runs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    shutil.copy(slide_model / "features" / "features.json", folder)
    shutil.copy(slide_model / "features" / "slide-001.h5", folder)
    (folder / "damaged.h5").write_bytes((slide_model / "features" / "slide-000.h5").read_bytes())
    with h5py.File(folder / "damaged.h5", "r+") as file:
        file["features"][0, 0] += 1
    write_bag(folder / "one.h5", np.ones((1, DIMENSION), np.float32), np.zeros((1, 2), np.int64))
    write_bag(folder / "empty.h5", np.ones((0, DIMENSION), np.float32))
    result = histopipe.predict(slide_model / "run", folder, out=tmp_path / "p")
    assert set(result.done) == {"slide-001", "one"}
    assert "checksum" in result.failed["damaged"]
    assert result.failed["empty"] == "the slide has no patches"
    assert result.metrics is None
    (folder / "features.json").unlink()
    with pytest.raises(NothingToDo, match="does not exist"):
        histopipe.predict(slide_model / "run", tmp_path / "nothing", out=tmp_path / "q")
    # The run of features without record: their encoder is unknown.
    copied = tmp_path / "run"
    shutil.copytree(slide_model / "run", copied)
    description = json.loads((copied / "metrics.json").read_text())
    (copied / "metrics.json").write_text(json.dumps({**description, "encoders": [None]}))
    with pytest.raises(UsageError, match=r"encoder of .* is not recorded: found slides"):
        histopipe.predict(copied, golden_runs / "slides", out=tmp_path / "q")
    assert len(histopipe.predict(copied, folder, out=tmp_path / "r").done) == 2
