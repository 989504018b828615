"""Slide models that start from the weights of a file or of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import histopipe
from helpers.bags import write_bag
from helpers.lazy import keras, training
from helpers.paths import SLIDE_ENCODERS
from helpers.trainings import in_fork
from histopipe.errors import UsageError
from histopipe.pretrained.checkpoints import read_tensors
from histopipe.runs.task_config import BagTrainConfig, make_config

D = 1024
"""Features of the encoder of a published file: UNI."""
LAYERS = {
    "hidden": "model.patch_embed.0",
    "attention_tanh": "model.global_attn.attention_a.0",
    "attention_gate": "model.global_attn.attention_b.0",
    "attention_score": "model.global_attn.attention_c",
}
CHANGING = {"head": {"logits"}, "pooling": {"logits", *LAYERS} - {"hidden"}}
"""Layers that a value of `trainable` changes."""
SETTINGS: dict[str, Any] = {"devices": "cpu", "epochs": 1, "learning_rate": 1e-5, "resamples": 0}


def name_encoder(folder: Path, encoder: str = "uni", sha256: str = "0" * 64) -> Path:
    record = {"encoder": encoder, "sha256": sha256, "precision": "float32", "dimension": D}
    (folder / "features.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve slides with the features of UNI, and a number in values.csv."""
    folder = tmp_path_factory.mktemp("weights") / "features"
    random, rows = np.random.default_rng(1), ["slide,patient,share"]
    for i in range(12):
        values = random.normal(size=(9, D)).astype(np.float32)
        write_bag(folder / f"s{i:02}.h5", values, label="ab"[i % 2], patient=f"p{i}")
        rows.append(f"s{i:02},p{i},{i % 2 + i / 20:.2f}")
    (folder / "values.csv").write_text("\n".join(rows) + "\n")
    return name_encoder(folder)


@pytest.fixture(scope="module")
def file(features: Path) -> Path:
    return gated_file(features.with_name("w.safetensors"))


def gated_file(path: Path, **changed: np.ndarray) -> Path:
    """Random weights as the authors of FEATHER publish them, with the width 512 that slide models have."""
    random = np.random.default_rng(1)
    shapes = dict(zip(LAYERS.values(), ((512, D), (384, 512), (384, 512), (1, 384)), strict=True))
    values = {}
    for name, shape in shapes.items():
        values[f"{name}.weight"] = random.normal(0, 0.1, shape).astype(np.float32)
        values[f"{name}.bias"] = random.normal(0, 0.1, shape[:1]).astype(np.float32)
    save_file({**values, **changed}, path)
    return path


def values_of(file: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in read_tensors(file).items()}


def weights_of(run: Path) -> dict[str, list[np.ndarray]]:
    model = keras.models.load_model(run / "model.keras")
    return {layer.name: layer.get_weights() for layer in model.layers if layer.weights}


def read(features: Path, **settings: Any) -> Any:
    """Return the initial weights of a training with these settings."""
    config = make_config({"mil": str(features), **settings})
    assert isinstance(config, BagTrainConfig)
    return training.bag_weights.read_bag_weights(config, [features], D)


def train_from_weights(features: str, file: str, out: str) -> None:
    """Train from a file, resume, and give the weights to a regression."""
    first, second, tensors = Path(out) / "first", Path(out) / "second", values_of(Path(file))
    kernels = {layer: tensors[f"{name}.weight"].T for layer, name in LAYERS.items()}
    settings = {**SETTINGS, "mil": features, "in_process": True}
    pooling = {"weights": file, "trainable": "pooling"}
    for options in ({**settings, **pooling}, {"resume": True, "epochs": 2, "in_process": True}):
        histopipe.train(out=first, **options)
        after = weights_of(first)
        assert "scaling" not in after and after["attention_tanh"][0].shape == (512, 384)
        for layer, kernel in kernels.items():
            np.testing.assert_allclose(after[layer][0], kernel, atol=1e-2)
        changed = {layer for layer in LAYERS if (after[layer][0] != kernels[layer]).any()}
        assert changed == CHANGING["pooling"] - {"logits"}
    metrics = json.loads((first / "metrics.json").read_text())
    assert metrics["initial_weights"]["file"] == "w.safetensors"
    settings |= {"task": "regression", "target": ["share"], "labels": f"{features}/values.csv"}
    histopipe.train(out=second, weights=str(first), trainable="head", **settings)
    before, after = weights_of(first), weights_of(second)
    for layer in LAYERS:
        np.testing.assert_equal(after[layer], before[layer])
    assert before["logits"][0].shape != after["logits"][0].shape
    name_encoder(Path(features), sha256="1" * 64)
    for changes, message in (({"pooling": "attention"}, "--pooling gated"), ({}, "other features")):
        with pytest.raises(UsageError, match=message):
            read(Path(features), weights=str(first), **changes)
    name_encoder(Path(features))


@pytest.mark.long(reason="three trainings in one process")
def test_weights_of_files_and_runs_are_kept_and_only_chosen_ones_change(
    features: Path, file: Path, tmp_path: Path
) -> None:
    in_fork(train_from_weights, features, file, tmp_path)


@pytest.mark.parametrize("trainable", ["head", "pooling", "all"])
def test_trained_layers(features: Path, file: Path, trainable: Any) -> None:
    weights, values = read(features, weights=str(file), trainable=trainable), values_of(file)
    model = training.bag_model.BagModel(
        "gated",
        dimension=D,
        objective=training.objective.ClassObjective(2),
        dropout=0.0,
        attention=weights.attention,
        trainable=trainable,
    )
    weights.assign(model)
    trained = {weight.path.split("/")[-2] for weight in model.training.trainable_variables}
    assert trained == CHANGING.get(trainable, {"logits", *LAYERS})
    for layer, name in LAYERS.items():
        expected = [values[f"{name}.weight"].T, values[f"{name}.bias"]]
        np.testing.assert_equal(model.training.get_layer(layer).get_weights(), expected)


def test_files_that_do_not_fit_are_refused(features: Path, file: Path, tmp_path: Path) -> None:
    narrow, lacking = tmp_path / "narrow.safetensors", tmp_path / "lacking.safetensors"
    gated_file(narrow, **{"model.patch_embed.0.weight": np.zeros((512, 30), np.float32)})
    values = values_of(file)
    del values["model.global_attn.attention_c.bias"]
    save_file(values, lacking)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"weights": str(narrow)}, "weights for 30 features per patch"),
        ({"weights": str(lacking)}, "1 missing: global_attn.attention_c.bias"),
        ({"weights": str(SLIDE_ENCODERS / "longnet.safetensors")}, "no gated attention"),
        ({"weights": str(tmp_path / "nothing")}, "nothing"),
        ({"weights": str(file), "pooling": "mean"}, "--pooling mean"),
        ({"weights": str(file), "feature_scaling": "standard"}, "--feature-scaling standard"),
        ({"weights": "imagenet"}, "imagenet"),
        ({"trainable": "head"}, "no --weights"),
        ({"trainable": "last:1", "weights": str(file)}, "trainable"),
    )
    for changes, message in cases:
        with pytest.raises(UsageError, match=message):
            read(features, **changes)


def test_published_files_need_the_features_of_their_encoder(file: Path, tmp_path: Path) -> None:
    """FEATHER's files do not name their encoder: its number of features does."""
    name_encoder(tmp_path, "phikon-v2")
    with pytest.raises(UsageError, match="features of phikon-v2"):
        read(tmp_path, weights=str(file))
    assert read(tmp_path, weights=str(file), allow_mismatch=True).attention == 384
