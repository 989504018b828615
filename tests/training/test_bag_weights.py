"""Slide models that start from the weights of a file or of a run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import histopipe
from helpers.bags import write_bag
from helpers.lazy import keras
from helpers.paths import SLIDE_ENCODERS
from helpers.runs import without_training
from helpers.slide_patches import slide_patches
from helpers.trainings import IN_TENSORFLOW, opened_setup, steps_of
from histopipe.errors import UsageError
from histopipe.pretrained.checkpoints import read_tensors

pytestmark = IN_TENSORFLOW
D = 24


def features_folder(folder: Path, encoder: str = "tiny", classes: str = "ab") -> Path:
    for number in range(12):
        features, corners = slide_patches(30 + number, D)
        features[:, 0] += 2.0 * (number % 2)
        label = classes[number % 2]
        write_bag(folder / f"s{number:02}.h5", features, corners, label=label, patient=f"p{number}")
    record = {"encoder": encoder, "sha256": "0" * 64, "precision": "float32", "dimension": D}
    (folder / "features.json").write_text(json.dumps(record))
    return folder


def gated_file(path: Path, **changed: np.ndarray) -> Path:
    """Random weights as the authors of FEATHER publish them, with the width 512 that slide models have."""
    random = np.random.default_rng(1)
    shapes = {
        "model.patch_embed.0": (512, D),
        "model.global_attn.attention_a.0": (384, 512),
        "model.global_attn.attention_b.0": (384, 512),
        "model.global_attn.attention_c": (1, 384),
    }
    values = {}
    for name, shape in shapes.items():
        values[f"{name}.weight"] = random.normal(0, 0.1, shape).astype(np.float32)
        values[f"{name}.bias"] = random.normal(0, 0.1, shape[:1]).astype(np.float32)
    save_file({**values, **changed}, path)
    return path


SETTINGS: dict[str, Any] = {"devices": "cpu", "epochs": 1, "learning_rate": 1e-5}


def weights_of(model: Any) -> dict[str, list[np.ndarray]]:
    return {layer.name: layer.get_weights() for layer in model.layers if layer.weights}


@pytest.fixture
def features(tmp_path: Path) -> Path:
    return features_folder(tmp_path / "features")


@pytest.fixture
def finished(features: Path, tmp_path: Path) -> Path:
    """A run of no training, with the model of one step."""
    out = tmp_path / "run"
    with without_training():
        histopipe.train(mil=features, out=out, **SETTINGS)
    with opened_setup(mil=[str(features)], **SETTINGS) as setup:
        steps_of(setup)[0].save(out / "model.keras")
        metrics = json.loads((out / "metrics.json").read_text())
        (out / "metrics.json").write_text(json.dumps({**metrics, **setup.description}))
    return out


ATTENTION = {"attention_tanh", "attention_gate", "attention_score"}


@pytest.mark.parametrize(
    ("trainable", "changing"),
    [("head", set()), ("pooling", ATTENTION), ("all", {"hidden", *ATTENTION})],
)
def test_trained_weights_are_kept_and_only_chosen_ones_change(
    features: Path, tmp_path: Path, trainable: str, changing: set[str]
) -> None:
    file = gated_file(tmp_path / "w.safetensors")
    tensors = {name: tensor.read() for name, tensor in read_tensors(file).items()}
    settings = {**SETTINGS, "mil": [str(features)], "weights": str(file), "trainable": trainable}
    with opened_setup(**settings) as setup:
        after = weights_of(steps_of(setup)[0].model.serving)
        assert setup.description["initial_weights"]["file"] == "w.safetensors"
    assert "scaling" not in after and after["attention_tanh"][0].shape == (512, 384)
    for layer, name in {
        "hidden": "model.patch_embed.0",
        "attention_tanh": "model.global_attn.attention_a.0",
        "attention_gate": "model.global_attn.attention_b.0",
        "attention_score": "model.global_attn.attention_c",
    }.items():
        same = np.array_equal(after[layer][0], tensors[f"{name}.weight"].T)
        assert same == (layer not in changing), (trainable, layer)
        np.testing.assert_allclose(after[layer][0], tensors[f"{name}.weight"].T, atol=1e-2)


def test_frozen_weights_are_those_of_the_file_after_a_resume(
    features: Path, tmp_path: Path
) -> None:
    file, out = gated_file(tmp_path / "w.safetensors"), tmp_path / "run"
    settings = {**SETTINGS, "weights": str(file), "trainable": "head", "resamples": 0}
    histopipe.train(mil=features, out=out, **settings, in_process=True)
    assert json.loads((out / "metrics.json").read_text())["initial_weights"]["file"] == file.name
    histopipe.train(out=out, resume=True, epochs=2, in_process=True)
    hidden = weights_of(keras.models.load_model(out / "model.keras"))["hidden"][0]
    np.testing.assert_array_equal(hidden, read_tensors(file)["model.patch_embed.0.weight"].read().T)


def test_a_run_gives_its_weights_to_another_task(
    features: Path, finished: Path, tmp_path: Path
) -> None:
    labels = tmp_path / "values.csv"
    rows = [f"s{number:02},p{number},{number % 2 + number / 20:.2f}" for number in range(12)]
    labels.write_text("\n".join(["slide,patient,share", *rows]) + "\n")
    task: dict[str, Any] = {"task": "regression", "target": ["share"], "labels": str(labels)}
    settings = {**SETTINGS, **task, "mil": [str(features)], "weights": str(finished)}
    with opened_setup(**settings, trainable="head") as setup:
        second = weights_of(steps_of(setup)[0].model.serving)
    first = weights_of(keras.models.load_model(finished / "model.keras"))
    for layer in ("scaling", "hidden", "attention_tanh", "attention_gate", "attention_score"):
        for a, b in zip(first[layer], second[layer], strict=True):
            np.testing.assert_array_equal(a, b)
    assert first["logits"][0].shape != second["logits"][0].shape


def test_what_does_not_fit_is_refused(features: Path, finished: Path, tmp_path: Path) -> None:
    file, lacking = gated_file(tmp_path / "w.safetensors"), tmp_path / "lacking.safetensors"
    wide = {"model.patch_embed.0.weight": np.zeros((512, 30), np.float32)}
    tensors = {name: tensor.read() for name, tensor in read_tensors(file).items()}
    del tensors["model.global_attn.attention_c.bias"]
    save_file(tensors, lacking)
    other = features_folder(tmp_path / "other")
    record = json.loads((other / "features.json").read_text())
    (other / "features.json").write_text(json.dumps({**record, "sha256": "1" * 64}))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"weights": gated_file(tmp_path / "wide.safetensors", **wide)}, "weights for 30 features"),
        ({"weights": lacking}, "1 missing: global_attn.attention_c.bias"),
        ({"weights": SLIDE_ENCODERS / "longnet.safetensors"}, "no gated attention"),
        ({"weights": tmp_path / "nothing"}, "nothing"),
        ({"weights": file, "pooling": "mean"}, "--pooling mean"),
        ({"weights": file, "feature_scaling": "standard"}, "--feature-scaling standard"),
        ({"weights": "imagenet"}, "imagenet"),
        ({"weights": "none", "trainable": "head"}, "no --weights"),
        ({"weights": file, "trainable": "last:1"}, "trainable"),
        ({"weights": finished, "pooling": "attention"}, "--pooling gated"),
        ({"weights": finished, "mil": [str(other)]}, "other features"),
    ]
    for changes, message in cases:
        settings = {"mil": [str(features)], **SETTINGS, **changes}
        with (
            pytest.raises(UsageError, match=message),
            opened_setup(**{**settings, "weights": str(settings["weights"])}),
        ):
            pass


def test_published_files_need_the_features_of_their_encoder(tmp_path: Path) -> None:
    """FEATHER's files do not name their encoder: its number of features does."""
    folder = tmp_path / "features"
    random = np.random.default_rng(1)
    for number in range(12):
        values = random.normal(size=(9, 1024)).astype(np.float32)
        write_bag(folder / f"s{number:02}.h5", values, label="ab"[number % 2], patient=f"p{number}")
    matrix = random.normal(0, 0.1, (512, 1024)).astype(np.float32)
    file = gated_file(tmp_path / "w.safetensors", **{"model.patch_embed.0.weight": matrix})
    settings = {**SETTINGS, "mil": [str(folder)], "weights": str(file)}
    for encoder in ("uni", "phikon-v2"):
        record = {"encoder": encoder, "sha256": "0" * 64, "precision": "float32", "dimension": 1024}
        (folder / "features.json").write_text(json.dumps(record))
        fits = encoder == "uni"
        with nullcontext() if fits else pytest.raises(UsageError, match="features of phikon-v2"):  # noqa: SIM117
            with opened_setup(**settings):
                pass
        with opened_setup(**settings, allow_mismatch=True) as setup:
            assert setup.description["initial_weights"]["file"] == file.name
