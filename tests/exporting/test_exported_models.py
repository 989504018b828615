"""Test exported models and features: programs without histopipe read them, and compute the same."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import cv2
import h5py
import numpy as np
import onnxruntime
import pandas as pd
import pytest

import histopipe
from helpers.bags import write_bag
from helpers.lazy import Lazy, keras, training
from helpers.stores import RECORD
from helpers.trainings import IN_TENSORFLOW, csv_rows
from histopipe.errors import DamagedStore, HistopipeError, MachineShort, UsageError
from histopipe.evaluation.evaluate import tempered
from histopipe.exporting import exported_models
from histopipe.exporting.export_formats import formats_by_source
from histopipe.exporting.exported_models import _convert, _in_float32, _random_inputs
from histopipe.predictions.sources import PredictedSlide
from histopipe.runs.config import Precision
from histopipe.runs.task_config import BagPooling
from histopipe.store.store import Store

pytestmark = IN_TENSORFLOW
anndata: Any = Lazy("anndata")
POOLINGS = get_args(BagPooling)


def test_patch_model_in_onnx_predicts_the_test_patches(
    trained: Path, made_store: Path, tmp_path: Path
) -> None:
    """Also in OpenCV, whose input has the channels first."""
    histopipe.export(trained, tmp_path / "model", to="onnx")
    description = json.loads((tmp_path / "model" / "model.json").read_text())
    metrics = json.loads((trained / "metrics.json").read_text())
    assert {
        "classes": ["normal", "tumour"],
        "positive": "tumour",
        "opset": 15,
        "temperature": metrics["calibration"]["temperature"],
        "spec": metrics["spec"],
        "patch_mpp": metrics["patch_mpp"],
    }.items() <= description.items()
    assert description["thresholds"]["patch"]["values"]
    assert description["inputs"].keys() == {"image"}
    assert description["outputs"]["probability"]["columns"] == ["normal", "tumour"]
    assert {*description["files"]} == {"model.onnx", "model-channels-first.onnx"}
    session = onnxruntime.InferenceSession(tmp_path / "model" / "model.onnx")
    network = cv2.dnn.readNetFromONNX(str(tmp_path / "model" / "model-channels-first.onnx"))
    with Store(made_store) as store:
        for row in csv_rows(trained / "predictions.csv")[::20]:
            index = store.index(store.number(row["slide"]))
            here = (index["x_l0"] == int(row["x_l0"])) & (index["y_l0"] == int(row["y_l0"]))
            patch = store.read(row["slide"], int(np.flatnonzero(here)[0]))
            (value,) = session.run(["probability"], {"image": patch[None]})
            network.setInput(np.moveaxis(patch, -1, 0)[None].astype(np.float32))
            assert np.allclose(network.forward(), value, atol=1e-4)
            calibrated = tempered(value, description["temperature"])[0]
            assert calibrated[1] == pytest.approx(float(row["p_tumour"]), abs=1e-4)


@pytest.mark.long(reason="the conversion of a transformer")
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_and_task_is_the_same_in_onnx(tmp_path: Path, pooling: BagPooling) -> None:
    """Also with covariates, and if the training computed in 16 bits."""
    times, number = np.stack([np.arange(1.0, 21), np.ones(20)], axis=1), POOLINGS.index(pooling)
    objectives = (
        training.objective.DiscreteSurvival.of(times),
        training.objective.MultilabelObjective(2),
        training.objective.RegressionObjective.of(times, "huber"),
        training.objective.CoxObjective.of(times),
        training.objective.ClassObjective(3),
    )
    precision: Precision = "float32" if number % 3 else "mixed_bfloat16"
    model = training.bag_model.BagModel(
        pooling,
        dimension=6,
        objective=objectives[number % 5],
        dropout=0.2,
        covariates=3 * (number % 2),
        precision=precision,
        scaled=True,
    ).serving
    plain, values = _in_float32(model), _random_inputs(model)
    assert _convert(plain, values, tmp_path / "model.onnx") < 1e-5
    if precision == "float32":
        inputs = values if isinstance(model.input, dict) else values["features"]
        for name, output in model(inputs).items():
            assert np.allclose(output, plain(inputs)[name], atol=1e-6)


def test_slide_models_of_every_task_are_described(
    target_run: tuple[str, Path], tmp_path: Path
) -> None:
    """With a Keras file, which has the description of an ONNX file. The latter has attention."""
    (task, trained), run, place = target_run, tmp_path / "run", str(tmp_path)
    shutil.copytree(trained, run)
    metrics = json.loads((trained / "metrics.json").read_text())
    metrics["encoders"] = [{"encoder": "x", "given": {"model": place}, "stores": [place]}]
    (run / "metrics.json").write_text(json.dumps(metrics))
    histopipe.export(run, tmp_path / "model", to="onnx" if task == "cox" else "keras")
    text = (tmp_path / "model" / "model.json").read_text()
    description = json.loads(text)
    assert description["task"] == ("survival" if task in ("cox", "discrete") else task)
    (name,) = description["outputs"].keys() - {"attention"}
    columns = {"cox": ["risk"], "discrete": None}.get(task, metrics["targets"])
    assert description["outputs"][name]["columns"] == columns
    assert description["targets"] and "classes" not in description
    assert description["encoders"] == [{"encoder": "x"}]
    assert place not in text
    if task == "cox":
        session = onnxruntime.InferenceSession(tmp_path / "model" / "model.onnx")
        features = np.random.default_rng(1).normal(size=(1, 11, 8)).astype(np.float32)
        outputs = session.run(["attention"], {"features": features})[0]
        assert outputs.shape == (1, 11) and outputs.sum() == pytest.approx(1, abs=1e-5)
    else:
        exported = tmp_path / "model" / "model.keras"
        assert exported.read_bytes() == (trained / "model.keras").read_bytes()


def test_failed_comparison_leaves_no_file(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file differs: the first one is not kept without its description."""
    convert = exported_models._convert

    def differs(model: Any, inputs: Any, path: Path) -> float:
        difference = convert(model, inputs, path)
        if inputs["image"].shape[1] == 3:
            raise HistopipeError("the ONNX file does not compute what Keras does")
        return difference

    monkeypatch.setattr(exported_models, "_convert", differs)
    with pytest.raises(HistopipeError, match="does not compute what Keras does"):
        histopipe.export(trained, tmp_path / "model", to="onnx")
    assert not list((tmp_path / "model").iterdir())


def test_wrong_kinds_are_refused(
    trained: Path, made_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *of_folders = formats_by_source().items()
    sources = "".join(f"; {kind}: {' or '.join(names)}" for kind, names in of_folders)
    file = "model-channels-first.onnx"
    (tmp_path / "full").mkdir()
    for name in (file, "model.keras"):
        (tmp_path / "full" / name).write_text("mine")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (made_store, {"to": "onnx"}, sources),
        (made_store, {"to": "h5ad"}, sources),
        (trained, {"to": "tfrecord"}, sources),
        (trained, {"to": "onnx", "predictions": "p"}, "predictions"),
        (trained, {"to": "onnx", "part": "1/2"}, "several machines"),
        (trained, {"to": "onnx", "out": tmp_path / "full"}, f"{file} exists"),
        (trained, {"to": "keras", "out": tmp_path / "full"}, "model.keras exists"),
    ]
    for source, options, message in cases:
        with pytest.raises(UsageError, match=message):
            histopipe.export(source, **{"out": tmp_path / "out", **options})
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(MachineShort, match=r"histopipe\[onnx\]"):
        histopipe.export(trained, tmp_path / "out", to="onnx")
    written = [*tmp_path.rglob("*.onnx"), *tmp_path.rglob("*.json")]
    assert written == [tmp_path / "full" / file]


@pytest.mark.parametrize("size", [None, 0, 1000])
def test_damaged_models_are_not_exported(trained: Path, tmp_path: Path, size: int | None) -> None:
    shutil.copytree(trained, tmp_path / "run")
    model = tmp_path / "run" / "model.keras"
    if size is None:
        model.unlink()
    else:
        os.truncate(model, size)
    for to in ("onnx", "keras"):
        with pytest.raises((DamagedStore, UsageError), match=r"model\.keras"):
            histopipe.export(tmp_path / "run", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("gated", [False, True])
def test_encoders_are_the_same_in_onnx(gated: bool, tmp_path: Path) -> None:
    """Also with exact GELU, whose operation ONNX does not have; beyond values where it is 0 or the identity."""
    image = keras.Input((8, 8, 3), dtype="uint8", name="image")
    hidden = keras.layers.Rescaling(1 / 16, offset=-8)(image)
    hidden = keras.layers.Conv2D(4, 3, activation="silu" if gated else "gelu")(hidden)
    pooled = keras.layers.GlobalAveragePooling2D()(hidden)
    model = keras.Model(image, {"value": keras.layers.Dense(2, name="value")(pooled)})
    assert _convert(model, _random_inputs(model), tmp_path / "model.onnx") < 1e-5


def test_runs_add_values_to_anndata(trained: Path, made_store: Path, tmp_path: Path) -> None:
    """The stores of the run have the sizes of its patches. Another request keeps no file of this one."""
    features, out = tmp_path / "features", tmp_path / "h5ad"
    rows = pd.read_csv(trained / "predictions.csv")
    slide = rows["slide"][0]
    with Store(made_store) as store:
        number = store.number(slide)
        index, side = store.index(number), store.records[number].side_l0
    corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
    write_bag(features / f"{slide}.h5", np.zeros((len(corners), 4), np.float32), corners)
    with h5py.File(features / f"{slide}.h5", "r+") as file:
        file["coords"].attrs["patch_size_level0"] = side
    assert not histopipe.export(features, out, to="h5ad", predictions=trained).to_json()["failed"]
    table = anndata.read_h5ad(out / f"{slide}.h5ad").obs.set_index(["x_l0", "y_l0"])
    expected = rows[rows["slide"] == slide].set_index(["x_l0", "y_l0"])["p_tumour"]
    values = table["probability of tumour"].loc[expected.index]
    np.testing.assert_allclose(values, expected, atol=1e-6)
    again = histopipe.export(features, out, to="h5ad").to_json()
    assert again["kept"] == 0 and "found other --predictions" in again["failed"][slide]
    (features / f"{slide}.h5").rename(features / "other.h5")
    with pytest.raises(UsageError, match="no slide of"):
        histopipe.export(features, out, to="h5ad", predictions=trained)


def test_features_as_anndata(tmp_path: Path) -> None:
    """With positions, labels, and attention, which a slide model gave to half of the patches."""
    features, predictions = tmp_path / "features", tmp_path / "predictions"
    values = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    corners = np.array([[512 * i, 1024] for i in range(5)])
    write_bag(features / "x" / "one.h5", values, corners, label="tumour", patient="P1")
    write_bag(features / "two.h5", values[:0], corners[:0])
    write_bag(features / "three.h5", values)
    (features / "features.json").write_text(json.dumps({"encoder": "uni"}))
    for kind in ("attention", "patches"):
        (predictions / kind / "x").mkdir(parents=True)
    (predictions / "predict.json").write_text("{}")
    slide = PredictedSlide.of(
        dataclasses.replace(RECORD, id="x/one", width=4096, height=4096), source=""
    )
    dataclasses.replace(slide, size_l0=512).write(predictions / "patches" / "x" / "one.json")
    table = predictions / "attention" / "x" / "one.csv"
    header = "slide,x_l0,y_l0,size_l0,attention,contribution_tumour"
    table.write_text(f"{header}\nx/one,1024,1024,512,0.2,-2\nx/one,0,1024,512,0,0\n")
    options: dict[str, Any] = {"to": "h5ad", "predictions": predictions}
    done = histopipe.export(features, tmp_path / "h5ad", **options).to_json()
    assert (done["files"], done["patches"], list(done["failed"])) == (2, 5, ["three"])
    one = anndata.read_h5ad(tmp_path / "h5ad" / "x" / "one.h5ad")
    assert np.array_equal(one.X, values)
    assert np.array_equal(one.obsm["spatial"], corners + 256)
    assert (one.obs[["label", "patient"]] == ["tumour", "P1"]).all(axis=None)
    none = np.full(2, np.nan)
    shares = one.obs[["attention", "contribution to tumour"]]
    assert np.allclose(shares, np.stack([np.zeros(2), none, [0.2, -2], none, none]), equal_nan=True)
    assert one.uns["spatial"]["x_one"]["scalefactors"]["spot_diameter_fullres"] == 512
    assert json.loads(one.uns["encoder"]) == {"encoder": "uni"}
    assert anndata.read_h5ad(tmp_path / "h5ad" / "two.h5ad").shape == (0, 4)
    assert histopipe.export(features, tmp_path / "h5ad", **options).to_json()["kept"] == 2
    table.write_text(table.read_text().replace(",512,", ",256,"))
    failed = histopipe.export(features, tmp_path / "other", **options).to_json()["failed"]
    assert "found 256 level-0 pixels, expected 512" in failed["x/one"]
