"""Slide models that start from the weights of a file or of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import histopipe
from helpers.bags import write_bag
from helpers.paths import SLIDE_ENCODERS
from helpers.slide_patches import slide_patches
from histopipe.errors import UsageError
from histopipe.pretrained.checkpoints import read_tensors

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


def weights_of(run: Path) -> dict[str, list[np.ndarray]]:
    model = keras.models.load_model(run / "model.keras")
    return {layer.name: layer.get_weights() for layer in model.layers if layer.weights}


def test_trained_weights_are_kept_and_only_chosen_ones_change(tmp_path: Path) -> None:
    features, file = features_folder(tmp_path / "features"), gated_file(tmp_path / "w.safetensors")
    tensors = {name: tensor.read() for name, tensor in read_tensors(file).items()}
    before = {
        "hidden": "model.patch_embed.0",
        "attention_tanh": "model.global_attn.attention_a.0",
        "attention_gate": "model.global_attn.attention_b.0",
        "attention_score": "model.global_attn.attention_c",
    }
    for trainable, changing in (
        ("head", {"logits"}),
        ("pooling", {"logits", "attention_tanh", "attention_gate", "attention_score"}),
        ("all", {"logits", *before}),
    ):
        out = tmp_path / trainable
        settings = {**SETTINGS, "weights": str(file), "trainable": trainable}
        histopipe.train(mil=features, out=out, **settings)
        after = weights_of(out)
        assert "scaling" not in after and after["attention_tanh"][0].shape == (512, 384)
        for layer, name in before.items():
            same = np.array_equal(after[layer][0], tensors[f"{name}.weight"].T)
            assert same == (layer not in changing), (trainable, layer)
            np.testing.assert_allclose(after[layer][0], tensors[f"{name}.weight"].T, atol=1e-2)
    metrics = json.loads((tmp_path / "head" / "metrics.json").read_text())
    assert metrics["initial_weights"]["file"] == "w.safetensors"
    resumed = histopipe.train(out=tmp_path / "head", resume=True, epochs=2)
    assert resumed.epochs == 2 or resumed.best_epoch in (1, 2)
    np.testing.assert_array_equal(
        weights_of(tmp_path / "head")["hidden"][0], tensors["model.patch_embed.0.weight"].T
    )


def test_a_run_gives_its_weights_to_another_task(tmp_path: Path) -> None:
    features = features_folder(tmp_path / "features")
    histopipe.train(mil=features, out=tmp_path / "first", **{**SETTINGS, "learning_rate": 1e-3})
    labels = tmp_path / "values.csv"
    rows = [f"s{number:02},p{number},{number % 2 + number / 20:.2f}" for number in range(12)]
    labels.write_text("\n".join(["slide,patient,share", *rows]) + "\n")
    histopipe.train(
        mil=features,
        out=tmp_path / "second",
        weights=str(tmp_path / "first"),
        trainable="head",
        task="regression",
        target=["share"],
        labels=labels,
        **SETTINGS,
    )
    first, second = weights_of(tmp_path / "first"), weights_of(tmp_path / "second")
    for layer in ("scaling", "hidden", "attention_tanh", "attention_gate", "attention_score"):
        for a, b in zip(first[layer], second[layer], strict=True):
            np.testing.assert_array_equal(a, b)
    assert first["logits"][0].shape != second["logits"][0].shape
    histopipe.predict(tmp_path / "second", features, out=tmp_path / "predicted", devices="cpu")


@pytest.mark.parametrize("folder", ["files", "runs"])
def test_what_does_not_fit_is_refused(folder: str, tmp_path: Path) -> None:
    features, file = features_folder(tmp_path / "features"), gated_file(tmp_path / "w.safetensors")
    wide = gated_file(
        tmp_path / "wide.safetensors",
        **{"model.patch_embed.0.weight": np.zeros((512, 30), np.float32)},
    )
    lacking = dict(read_tensors(file))
    del lacking["model.global_attn.attention_c.bias"]
    save_file({n: t.read() for n, t in lacking.items()}, tmp_path / "lacking.safetensors")
    cases: list[tuple[dict[str, Any], str]] = (
        [
            ({"weights": str(wide)}, "weights for 30 features per patch"),
            (
                {"weights": str(tmp_path / "lacking.safetensors")},
                "1 missing: global_attn.attention_c.bias",
            ),
            ({"weights": str(SLIDE_ENCODERS / "longnet.safetensors")}, "no gated attention"),
            ({"weights": str(tmp_path / "nothing")}, "nothing"),
            ({"weights": str(file), "pooling": "mean"}, "--pooling mean"),
            ({"weights": str(file), "feature_scaling": "standard"}, "--feature-scaling standard"),
            ({"weights": "imagenet"}, "imagenet"),
        ]
        if folder == "files"
        else [
            ({"trainable": "head"}, "no --weights"),
            ({"trainable": "last:1", "weights": str(file)}, "trainable"),
            ({"weights": str(tmp_path / "run"), "pooling": "attention"}, "--pooling gated"),
            ({"weights": str(tmp_path / "run"), "mil": str(tmp_path / "other")}, "other features"),
        ]
    )
    if folder == "runs":
        histopipe.train(mil=features, out=tmp_path / "run", **SETTINGS)
        features_folder(tmp_path / "other")
        record = json.loads((tmp_path / "other" / "features.json").read_text())
        (tmp_path / "other" / "features.json").write_text(
            json.dumps({**record, "sha256": "1" * 64})
        )
    for changes, message in cases:
        with pytest.raises(UsageError, match=message):
            histopipe.train(
                **{"mil": str(features), "out": tmp_path / "refused", **SETTINGS, **changes}
            )


def test_published_files_need_the_features_of_their_encoder(tmp_path: Path) -> None:
    """FEATHER's files do not name their encoder: its number of features does."""
    folder = tmp_path / "features"
    random = np.random.default_rng(1)
    for number in range(12):
        values = random.normal(size=(9, 1024)).astype(np.float32)
        write_bag(folder / f"s{number:02}.h5", values, label="ab"[number % 2], patient=f"p{number}")
    file = gated_file(
        tmp_path / "w.safetensors",
        **{"model.patch_embed.0.weight": random.normal(0, 0.1, (512, 1024)).astype(np.float32)},
    )
    for encoder, fits in (("uni", True), ("phikon-v2", False)):
        record = {"encoder": encoder, "sha256": "0" * 64, "precision": "float32", "dimension": 1024}
        (folder / "features.json").write_text(json.dumps(record))
        settings = {**SETTINGS, "weights": str(file), "out": tmp_path / encoder}
        if fits:
            histopipe.train(mil=folder, **settings)
        else:
            with pytest.raises(UsageError, match="features of phikon-v2"):
                histopipe.train(mil=folder, **settings)
            histopipe.train(mil=folder, **settings, allow_mismatch=True)
