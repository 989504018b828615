"""Vision Transformers: equal to tiny twins of timm and transformers (tools/make_encoder_twins.py), and their weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.lazy import keras, training
from helpers.paths import ENCODERS, SLIDE_ENCODERS
from histopipe.errors import UsageError
from histopipe.pretrained.architecture import (
    NAMINGS,
    Architecture,
    Naming,
    expected_shapes,
    select,
)
from histopipe.pretrained.checkpoints import Tensor, read_tensors
from histopipe.pretrained.presets import load_preset, preset_names

TWINS = sorted(ENCODERS.glob("*.json"))


def read_twin(path: Path, **changes: Any) -> tuple[Architecture, Naming, dict[str, Tensor]]:
    about, weights = json.loads(path.read_text()), path.with_suffix(".safetensors")
    network, naming = Architecture(**about["architecture"], **changes), NAMINGS[about["naming"]]
    size = about.get("size", 28)
    return network, naming, select(read_tensors(weights), network, naming, size, weights)


def twin_model(path: Path, size: int = 28, **changes: Any) -> Any:
    """Return the network of a twin with its weights, its architecture, and the inputs and outputs of the original."""
    network, naming, tensors = read_twin(path, **changes)
    model = training.pretrained_networks.vision_transformer(network, size)
    training.pretrained_networks.assign_weights(model, network, naming, tensors)
    return model, network, np.load(path.with_suffix(".npz"))


@pytest.mark.parametrize("size", [28, 42])  # the size of the training, and another one
@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.stem)
def test_tokens_equal_those_of_timm_or_transformers(path: Path, size: int) -> None:
    model, _, outputs = twin_model(path, size, pooling="tokens")
    tokens = model(outputs[f"pixels_{size}"], training=False)
    np.testing.assert_allclose(tokens, outputs[f"tokens_{size}"], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:__array__")  # keras calls numpy in an old way when it saves
@pytest.mark.parametrize("pooling", ["class", "class+mean"])
def test_pooling_and_saved_model(pooling: str, tmp_path: Path) -> None:
    twin = ENCODERS / "timm-all-positions.json"
    model, network, outputs = twin_model(twin, pooling=pooling)
    tokens = outputs["tokens_28"]
    expected = tokens[:, 0]
    if pooling == "class+mean":
        expected = np.concatenate([expected, tokens[:, network.prefix :].mean(axis=1)], axis=1)
    assert model.output_shape == (None, network.dimension)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras", safe_mode=True)  # stock layers only
    for variant in (model, plain):
        np.testing.assert_allclose(variant(outputs["pixels_28"]), expected, rtol=0, atol=1e-5)


PUBLISHED = {
    "conch": 87_567_104,
    "conch-v1.5": 306_711_296,
    "dinov2-base": 86_579_712,
    "dinov2-giant": 1_136_479_232,
    "dinov2-large": 304_367_616,
    "dinov2-small": 22_056_192,
    "gigapath": 1_134_953_984,
    "gpfm": 303_227_904,
    "h-optimus-0": 1_134_774_272,
    "h-optimus-1": 1_134_774_272,
    "h0-mini": 85_739_520,
    "hibou-b": 85_728_000,
    "hibou-l": 303_232_000,
    "kaiko-b16": 85_798_656,
    "kaiko-b8": 85_807_872,
    "kaiko-l14": 304_370_688,
    "kaiko-s16": 21_665_664,
    "kaiko-s8": 21_670_272,
    "lunit-s8": 21_670_272,
    "midnight-12k": 1_134_769_664,
    "mstar": 303_350_784,
    "openmidnight": 1_134_775_808,
    "phikon": 85_798_656,
    "phikon-v2": 303_350_784,
    "prost40m": 21_619_584,
    "uni": 303_350_784,
    "uni2-h": 681_394_176,
    "virchow": 631_229_184,
    "virchow2": 631_239_424,
}
"""Parameters of the networks of timm 1.0.27 and transformers 5.14 with the options of the presets, without mask tokens."""


def test_presets_have_the_published_number_of_parameters() -> None:
    assert {*PUBLISHED, "path-foundation"} == set(preset_names())
    for name, published in PUBLISHED.items():
        preset = load_preset(name)
        assert preset.architecture is not None
        size = preset.preprocessing.trained
        shapes = expected_shapes(preset.architecture, NAMINGS[preset.naming], size)
        count = sum(map(math.prod, shapes.values()))
        assert count == preset.parameters == published, name


def test_other_weights_are_listed() -> None:
    path = ENCODERS / "timm.json"
    network, naming, tensors = read_twin(path)
    shapes = expected_shapes(network, naming, 28)
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
    other = Architecture(patch=7, width=12, depth=3, heads=3, hidden=24)
    with pytest.raises(UsageError) as error:
        select({**tensors, "more": tensors["cls_token"]}, other, naming, 28, path)
    assert "14 missing: blocks.2.attn.proj.bias" in str(error.value)
    assert "1 surplus: more" in str(error.value)
    assert "6 misshapen: blocks.0.mlp.fc1.weight (48, 12) for (24, 12)" in str(error.value)


@pytest.mark.parametrize("name", ["conch", "conch-v1.5"])
def test_pooling_by_attention_is_that_of_the_authors(name: str) -> None:
    model, network, expected = twin_model(SLIDE_ENCODERS / f"tower-{name}.json")
    assert model.output_shape == (None, network.dimension) == (None, 16)
    np.testing.assert_allclose(model(expected["pixels"]), expected["features"], atol=2e-6)
