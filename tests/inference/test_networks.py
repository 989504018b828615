"""Networks of Keras: `embed` and `predict` compute what Keras computes, and what trainings have recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

import histopipe
from helpers.bags import features_of, pixels_of, target_training
from helpers.commands import RunCommand
from helpers.lazy import Lazy, keras, tf, training
from histopipe.errors import NothingToDo, UsageError

networks: Any = Lazy("histopipe.inference.networks")
PATCH = ["slide", "x_l0", "y_l0"]
"""Columns that name a patch."""
pytestmark = [pytest.mark.xdist_group("tensorflow"), pytest.mark.usefixtures("tensorflow")]


@pytest.mark.long(reason="two networks of Keras")
def test_features_equal_those_of_keras(golden_runs: Path, tmp_path: Path) -> None:
    trained = keras.models.load_model(golden_runs / "run" / "model.keras")
    inside = keras.Model(trained.input, trained.get_layer("logits").input)
    keras.utils.set_random_seed(1)
    named = training.backbones.build_backbone(
        "mobilenet", patch_size=64, weights="none", training=False
    )
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "run": ({"model": golden_runs / "run"}, inside),
        "named": ({"model": "MobileNet", "weights": "none"}, named),
    }
    pixels = pixels_of(golden_runs / "store.lmdb")
    for name, (arguments, network) in cases.items():
        result = histopipe.embed(
            golden_runs / "store.lmdb", out=tmp_path / name, batch_size=16, **arguments
        )
        assert (len(result.done), result.patches) == (8, 280)
        features = features_of(tmp_path / name)
        expected = np.asarray(network(np.concatenate([*pixels.values()])))
        assert expected.std() > 0 and features.keys() == pixels.keys()
        values = np.concatenate([features[slide] for slide in pixels])
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)


def test_networks_that_are_refused(golden_runs: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "nonsense"}, "small-cnn, a run's folder, an ONNX file, a SavedModel f"),
        ({"model": "small-cnn", "stain_norm": "macenko"}, "histopipe stains"),
    ]
    for options, message in cases:
        with pytest.raises((UsageError, NothingToDo), match=message):
            histopipe.embed(golden_runs / "store.lmdb", out=tmp_path / "f", **options)
    with pytest.raises(UsageError, match="another size: found 64 pixels, expected 128, as in the"):
        networks.load_run_model(golden_runs / "run", 128)
    with pytest.raises(UsageError, match="takes features, not patches"):
        networks.load_run_model(golden_runs / "bags")
    assert not list(tmp_path.rglob("*.h5"))


def test_weights_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError("URL fetch failure on https://example.org/mobilenet.h5: no network")
    monkeypatch.setattr(keras.applications, "MobileNet", Mock(side_effect=error))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    advice = f"without a network, copy the file .*to {tmp_path / 'models'}, or pass it as --weights"
    with pytest.raises(UsageError, match=f"URL fetch failure(?s:.*){advice}"):
        training.backbones.build_backbone(
            "mobilenet", patch_size=32, weights="imagenet", training=False
        )


def test_out_of_memory_reduces_the_pieces(
    golden_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_per_replica = training.devices.one_per_replica

    def short(strategy: Any, parts: Any, first: int) -> Any:
        if len(parts[0]) > 3:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return one_per_replica(strategy, parts, first)

    images = pixels_of(golden_runs / "store.lmdb")["slide-000"][:8]
    network = networks.KerasNetwork(
        lambda: networks.load_run_models([golden_runs / "run"]),
        name="run",
        devices="cpu",
        batch_size=8,
    )
    whole = network.finish(network.start(images))
    monkeypatch.setattr("histopipe.inference.networks.one_per_replica", short)
    np.testing.assert_allclose(network.finish(network.start(images)), whole, rtol=1e-5, atol=1e-6)
    assert "continuing with 2 patches per device at once" in capsys.readouterr().err


def test_models_of_runs_compute_side_by_side(golden_runs: Path) -> None:
    """Each model has its outputs and, with the ranges of the trainings, its whitened features."""
    folders = [golden_runs / "folds" / f"fold-{number}" for number in (1, 2)]
    images = pixels_of(golden_runs / "store.lmdb")["slide-001"][:5]
    matrices = np.random.default_rng(1).normal(size=(2, 64, 3)).astype(np.float32)
    models = [keras.models.load_model(folder / "model.keras") for folder in folders]
    outputs = [np.asarray(model(images)) for model in models]
    features = [
        np.asarray(training.models.without_last_layer(model)(images), np.float32)
        for model in models
    ]
    white = np.stack(features) @ matrices
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
    plain, with_white = (
        networks.load_run_models(folders),
        networks.load_run_models(folders, list(matrices)),
    )
    np.testing.assert_allclose(plain(images), np.hstack(outputs), atol=1e-6)
    expected = np.hstack([outputs[0], white[0], outputs[1], white[1]])
    np.testing.assert_allclose(with_white(images), expected, rtol=1e-4, atol=1e-5)


def test_patch_model_gives_the_predictions_of_the_run(golden_runs: Path, tmp_path: Path) -> None:
    histopipe.predict(golden_runs / "run", golden_runs / "store.lmdb", out=tmp_path)
    predicted = pd.concat(map(pd.read_csv, (tmp_path / "patches").glob("*.csv"))).set_index(PATCH)
    expected = pd.read_csv(golden_runs / "run" / "predictions.csv").set_index(PATCH)["p_tumour"]
    assert (len(expected), len(predicted)) == (140, 280)
    np.testing.assert_allclose(predicted["p_tumour"].loc[expected.index], expected, atol=1e-5)


def check_same(run: Path, predicted: Path, level: str = "slide") -> None:
    """Check that a folder has the test predictions, attention and contributions of a run."""
    expected = pd.read_csv(run / "predictions.csv").query("split == 'test'").set_index(level)
    outputs = expected.filter(regex="^(p_|predicted_|survival_|risk)")
    values = pd.read_csv(predicted / f"{level}s.csv").set_index(level).loc[expected.index]
    assert outputs.size
    np.testing.assert_allclose(values[outputs.columns], outputs, rtol=1e-6, atol=1e-5)
    for name in expected.index:
        files = [folder / "attention" / f"{name}.csv" for folder in (predicted, run)]
        tables = [
            pd.read_csv(file).set_index(PATCH).filter(regex="^(attention|contribution)")
            for file in files
        ]
        pd.testing.assert_frame_equal(*tables, check_like=True, rtol=0, atol=1e-5)


@pytest.mark.parametrize("source", ["features", "store.lmdb", "slides"])
def test_every_source_gives_the_predictions_of_the_run(
    golden_runs: Path, tmp_path: Path, source: str
) -> None:
    out, options = tmp_path / "p", dict[str, Any](labels=golden_runs / "labels.csv")
    if source != "features":
        options["encoder"] = (golden_runs / "run",)
    result = histopipe.predict(
        golden_runs / "bags", golden_runs / source, out=out, allow_extra_rows=True, **options
    )
    assert (len(result.done), result.failed) == (12 if source == "slides" else 8, {})
    assert result.metrics is not None
    check_same(golden_runs / "bags", out)
    assert json.loads((out / "patches" / "slide-000.json").read_text())["width"] == 448
    assert (out / "patches" / "slide-000.jpg").exists() == (source != "features")
    drawing: dict[str, Any] = {"slide": ("slide-000",), "formats": ("png", "tiff", "geojson")}
    done = histopipe.heatmap(
        out, out=tmp_path / "h", show="contribution", class_name="tumour", **drawing
    )
    assert len(done.files["slide-000"]) == 3


@pytest.mark.long(reason="two trainings: of survival, with covariates, in a cross-validation")
def test_ensemble_of_folds_is_their_mean(
    run: RunCommand, target_bags: Path, tmp_path: Path
) -> None:
    """The folds are models of survival with covariates; each one gives the predictions of its run."""
    flags = ("--pooling", "dsmil", "--covariates", "age,MSI", "--folds", 2, "--epochs", 1)
    done = run(*target_training(target_bags, "cox", *flags, "--out", "cv"))
    assert done.returncode == 0, done.stderr
    labels, cv = target_bags / "labels.csv", tmp_path / "cv"
    joined = histopipe.predict(cv, target_bags, out=tmp_path / "p", labels=labels)
    assert joined.metrics is not None and joined.unit == "slide"
    for fold in ("fold-1", "fold-2"):
        histopipe.predict(cv / fold, target_bags, out=tmp_path / fold, labels=labels)
        check_same(cv / fold, tmp_path / fold)
    table, *single = (
        pd.read_csv(tmp_path / name / "slides.csv") for name in ("p", "fold-1", "fold-2")
    )
    risks = [each["risk"] for each in single]
    np.testing.assert_allclose(table["risk"], np.mean(risks, 0), atol=1e-5)
    np.testing.assert_allclose(table["sd_risk"], np.std(risks, 0, ddof=1), atol=1e-5)
    assert any(name.startswith("sd_survival_") for name in table)
    with pytest.raises(UsageError, match="the model takes covariates: found no --labels"):
        histopipe.predict(cv, target_bags, out=tmp_path / "q")
    (tmp_path / "few.csv").write_text("slide,age\ns1,50\n")
    with pytest.raises(UsageError, match="the covariates of the model: MSI"):
        histopipe.predict(cv, target_bags, out=tmp_path / "q", labels=tmp_path / "few.csv")


@pytest.mark.nightly(reason="test_ensemble_of_folds_is_their_mean shows it of survival")
@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("discrete", ("--pooling", "max")),
        ("regression", ("--pooling", "transformer")),
        ("multilabel", ("--pooling", "mean", "--bag", "patient", "--calibrate")),
    ],
)
def test_every_task_gives_the_predictions_of_the_run(
    run: RunCommand, target_bags: Path, tmp_path: Path, task: str, flags: tuple[str, ...]
) -> None:
    done = run(*target_training(target_bags, task, *flags, "--epochs", 1, "--out", "run"))
    assert done.returncode == 0, done.stderr
    labels, level = target_bags / "labels.csv", "patient" if "patient" in flags else "slide"
    result = histopipe.predict(tmp_path / "run", target_bags, out=tmp_path / "p", labels=labels)
    check_same(tmp_path / "run", tmp_path / "p", level)
    assert result.metrics is not None and result.unit == level
