"""Test exported models and features: programs without histopipe read them, and compute the same."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import cv2
import h5py
import numpy as np
import onnxruntime
import pytest

import histopipe
from helpers.bags import write_bag
from helpers.lazy import keras, training
from helpers.trainings import IN_TENSORFLOW, csv_rows
from histopipe.errors import DamagedStore, HistopipeError, MachineShort, UsageError
from histopipe.exporting import exported_models
from histopipe.exporting.exported_models import _convert, _in_float32, _random_inputs
from histopipe.predictions.sources import PredictedSlide
from histopipe.runs.config import Precision
from histopipe.runs.task_config import BagPooling
from histopipe.store.store import Store

pytestmark = IN_TENSORFLOW
POOLINGS = get_args(BagPooling)


def test_patch_model_in_onnx_predicts_the_test_patches(
    trained: Path, made_store: Path, tmp_path: Path
) -> None:
    """Also in OpenCV, whose input has the channels first."""
    done = histopipe.export(trained, tmp_path / "model", to="onnx")
    description = json.loads((tmp_path / "model" / "model.json").read_text())
    metrics = json.loads((trained / "metrics.json").read_text())
    assert description["classes"] == ["normal", "tumour"] and description["opset"] == 15
    assert description["temperature"] == metrics["calibration"]["temperature"]
    assert description["spec"]["patch_size"] == 128 and description["patch_mpp"]
    assert description["thresholds"]["patch"]["values"]
    assert description["positive"] == "tumour" and description["inputs"].keys() == {"image"}
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
            log = np.log(value[0]) / description["temperature"][0]
            calibrated = np.exp(log) / np.exp(log).sum()
            expected = [float(row["p_normal"]), float(row["p_tumour"])]
            assert calibrated == pytest.approx(expected, abs=1e-4)
    assert f"equals Keras to {done.to_json()['difference']:.1g}" in str(done)


def test_keras_file_is_that_of_the_run(trained: Path, tmp_path: Path) -> None:
    done = histopipe.export(trained, tmp_path, to="keras").to_json()
    assert [Path(file).name for file in done["files"]] == ["model.keras"]
    assert (tmp_path / "model.keras").read_bytes() == (trained / "model.keras").read_bytes()
    with pytest.raises(UsageError, match=r"model\.keras exists"):
        histopipe.export(trained, tmp_path, to="keras")


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
    run.mkdir()
    for name in ("config.toml", "model.keras"):
        shutil.copy(trained / name, run / name)
    metrics = json.loads((trained / "metrics.json").read_text())
    metrics["encoders"] = [{"encoder": "x", "given": {"model": place}, "stores": [place]}]
    (run / "metrics.json").write_text(json.dumps(metrics))
    histopipe.export(run, tmp_path / "model", to="onnx" if task == "cox" else "keras")
    description = json.loads((tmp_path / "model" / "model.json").read_text())
    assert description["task"] == ("survival" if task in ("cox", "discrete") else task)
    columns = ["risk"] if task == "cox" else metrics["targets"]
    (name,) = description["outputs"].keys() - {"attention"}
    assert description["outputs"][name]["columns"] == (None if task == "discrete" else columns)
    assert description["targets"] and "classes" not in description
    assert description["encoders"] == [{"encoder": "x"}]
    assert place not in (tmp_path / "model" / "model.json").read_text()
    if task == "cox":
        session = onnxruntime.InferenceSession(tmp_path / "model" / "model.onnx")
        features = np.random.default_rng(1).normal(size=(1, 11, 8)).astype(np.float32)
        outputs = session.run(["attention"], {"features": features})[0]
        assert outputs.shape == (1, 11) and outputs.sum() == pytest.approx(1, abs=1e-5)


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
    pairs: Any = ((made_store, "onnx"), (made_store, "h5ad"), (trained, "tfrecord"))
    for source, to in pairs:
        with pytest.raises(UsageError, match="onnx or keras of one run or h5ad of one features"):
            histopipe.export(source, tmp_path / "out", to=to)
    wrong: tuple[dict[str, Any], ...] = ({"predictions": "p"}, {"part": "1/2"})
    for options in wrong:
        with pytest.raises(UsageError, match=r"predictions|several machines"):
            histopipe.export(trained, tmp_path / "out", to="onnx", **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model-channels-first.onnx").write_text("mine")
    with pytest.raises(UsageError, match=r"model-channels-first\.onnx exists"):
        histopipe.export(trained, tmp_path / "full", to="onnx")
    (tmp_path / "full" / "model-channels-first.onnx").unlink()
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(MachineShort, match=r"histopipe\[onnx\]"):
        histopipe.export(trained, tmp_path / "out", to="onnx")
    assert not list(tmp_path.rglob("*.onnx")) and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("size", [None, 0, 1000])
def test_damaged_models_are_not_exported(trained: Path, tmp_path: Path, size: int | None) -> None:
    shutil.copytree(trained, tmp_path / "run")
    model = tmp_path / "run" / "model.keras"
    content = model.read_bytes()
    model.unlink()
    if size is not None:
        model.write_bytes(content[:size])
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
    import anndata

    rows = csv_rows(trained / "predictions.csv")
    slide = rows[0]["slide"]
    with Store(made_store) as store:
        number = store.number(slide)
        index, side = store.index(number), store.records[number].side_l0
    corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
    values = np.zeros((len(corners), 4), np.float32)
    write_bag(tmp_path / "features" / f"{slide}.h5", values, corners)
    with h5py.File(tmp_path / "features" / f"{slide}.h5", "r+") as file:
        file["coords"].attrs["patch_size_level0"] = side
    out = tmp_path / "h5ad"
    done = histopipe.export(tmp_path / "features", out, to="h5ad", predictions=trained).to_json()
    assert not done["failed"]
    table = anndata.read_h5ad(out / f"{slide}.h5ad").obs.set_index(["x_l0", "y_l0"])
    for row in rows:
        if row["slide"] == slide:
            value = table.loc[(int(row["x_l0"]), int(row["y_l0"])), "probability of tumour"]
            assert value == pytest.approx(float(row["p_tumour"]), abs=1e-6)
    again = histopipe.export(tmp_path / "features", out, to="h5ad").to_json()
    assert again["kept"] == 0 and "found other --predictions" in again["failed"][slide]
    (tmp_path / "features" / f"{slide}.h5").rename(tmp_path / "features" / "other.h5")
    with pytest.raises(UsageError, match="no slide of"):
        histopipe.export(tmp_path / "features", out, to="h5ad", predictions=trained)


def test_features_as_anndata(tmp_path: Path) -> None:
    """With positions, labels, and attention, which a slide model gave to half of the patches."""
    import anndata

    values = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    corners = np.array([[512 * i, 1024] for i in range(5)])
    attributes = {"label": "tumour", "patient": "P1"}
    write_bag(tmp_path / "features" / "x" / "one.h5", values, corners, **attributes)
    write_bag(tmp_path / "features" / "two.h5", values[:0], corners[:0])
    write_bag(tmp_path / "features" / "three.h5", values)
    (tmp_path / "features" / "features.json").write_text(json.dumps({"encoder": "uni"}))
    tables = tmp_path / "predictions" / "attention" / "x"
    tables.mkdir(parents=True)
    (tmp_path / "predictions" / "predict.json").write_text("{}")
    (tmp_path / "predictions" / "patches" / "x").mkdir(parents=True)
    slide = PredictedSlide(
        slide="x/one",
        patient="P1",
        label=None,
        width=4096,
        height=4096,
        bounds=[0, 0, 4096, 4096],
        mpp=0.5,
        mpp_source=None,
        size_l0=512,
        stride_l0=512,
        source="",
    )
    slide.write(tmp_path / "predictions" / "patches" / "x" / "one.json")

    def export(out: str) -> dict[str, Any]:
        return histopipe.export(
            tmp_path / "features", tmp_path / out, to="h5ad", predictions=tmp_path / "predictions"
        ).to_json()

    rows = [f"x/one,{512 * i},1024,512,{i / 10},{-i}" for i in (2, 0)]
    header = "slide,x_l0,y_l0,size_l0,attention,contribution_tumour"
    (tables / "one.csv").write_text("\n".join([header, *rows, ""]))
    done = export("h5ad")
    assert (done["files"], done["patches"], list(done["failed"])) == (2, 5, ["three"])
    one = anndata.read_h5ad(tmp_path / "h5ad" / "x" / "one.h5ad")
    assert np.array_equal(one.X, values)
    assert np.array_equal(one.obsm["spatial"], corners + 256)
    assert [*one.obs["label"]] == ["tumour"] * 5 and [*one.obs["patient"]] == ["P1"] * 5
    assert np.allclose(one.obs["attention"], [0, np.nan, 0.2, np.nan, np.nan], equal_nan=True)
    contributions = one.obs["contribution to tumour"]
    assert np.allclose(contributions, [0, np.nan, -2, np.nan, np.nan], equal_nan=True)
    assert one.uns["spatial"]["x_one"]["scalefactors"]["spot_diameter_fullres"] == 512
    assert json.loads(one.uns["encoder"]) == {"encoder": "uni"}
    assert anndata.read_h5ad(tmp_path / "h5ad" / "two.h5ad").shape == (0, 4)
    assert export("h5ad")["kept"] == 2
    (tables / "one.csv").write_text((tables / "one.csv").read_text().replace(",512,", ",256,"))
    assert "found 256 level-0 pixels, expected 512" in export("other")["failed"]["x/one"]
