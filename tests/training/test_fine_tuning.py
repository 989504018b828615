"""Fine-tuning of encoders: what is trained, how fast, and what is saved."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import histopipe
from helpers.commands import Run
from helpers.lazy import keras, training_modules
from helpers.paths import ENCODERS
from helpers.runs import without_training
from helpers.trainings import (
    EACH_STEP,
    IN_TENSORFLOW,
    TINY,
    TINY_FLAGS,
    TINY_WEIGHTS,
    assert_equal,
    faulty,
    opened_setup,
    steps_of,
)
from histopipe.errors import UsageError

pytestmark = IN_TENSORFLOW


def build_core(name: str = TINY["model"], weights: str = TINY["weights"]) -> Any:
    return training_modules.backbones.build_backbone(
        name, weights=weights, patch_size=32, training=True
    ).core


def build(name: str, **settings: Any) -> Any:
    return training_modules.models.build_model(
        name,
        patch_size=32,
        objective=training_modules.objective.ClassObjective(2),
        dropout=0.1,
        **settings,
    ).training


def trained_layers(trainable: str) -> set[str]:
    core = build_core()
    frozen = training_modules.models.set_trainable(core, trainable)
    assert frozen == (trainable == "head")
    return {weight.path.split("/")[0] for weight in core.trainable_variables}


def test_trained_layers() -> None:
    block = {"norm1", "norm2", "query", "key", "value", "projection", "hidden", "gate", "output"}
    last = {f"block_1_{name}" for name in block} | {"norm"}
    assert trained_layers("head") == set()
    assert trained_layers("last:1") == last
    assert trained_layers("last:2") == last | {f"block_0_{name}" for name in block}
    assert (
        trained_layers("last:3")
        == trained_layers("all")
        == trained_layers("last:2") | {"embedding"}
    )
    assert trained_layers("lora:2") == {
        f"block_{n}_{name}" for n in (0, 1) for name in ("query", "value")
    }
    with pytest.raises(UsageError, match="--trainable last:4: found 3 blocks or layers"):
        trained_layers("last:4")


def test_networks_without_attention() -> None:
    core = build_core("mobilenet", "none")
    with pytest.raises(
        UsageError, match="--trainable lora:2: found no attention layers in mobilenet"
    ):
        training_modules.models.set_trainable(core, "lora:2")
    training_modules.models.set_trainable(core, "last:2")
    names = {weight.path.split("/")[0] for weight in core.trainable_variables}
    assert names == {"conv_dw_13", "conv_dw_13_bn", "conv_pw_13", "conv_pw_13_bn"}


@pytest.mark.parametrize("trainable", ["all", "last:2", "head"])
def test_every_weight_is_trained_or_changing_or_frozen(trainable: str) -> None:
    model = build("mobilenet", trainable=trainable)
    parts = [
        model.trainable_variables,
        training_modules.models.changing_state(model),
        training_modules.models.frozen_weights(model),
    ]
    ids = [id(variable) for part in parts for variable in part]
    assert sorted(ids) == sorted(map(id, model.variables))
    statistics = [variable for variable in parts[1] if "moving" in variable.path]
    assert len(statistics) == {"all": 54, "last:2": 4, "head": 0}[trainable]


def test_rate_factors() -> None:
    model = build(TINY["model"], weights=TINY["weights"])
    paths = [variable.path for variable in model.trainable_variables]
    values = training_modules.models.rate_factors(model.get_layer("vision_transformer"), model, 0.5)
    factors = dict(zip(paths, values, strict=True))
    assert {
        name.rpartition("/")[2]: value for name, value in factors.items() if "logits" in name
    } == {"kernel": 1, "bias": 1}
    assert {value for name, value in factors.items() if "block_1" in name or "norm/" in name} == {
        0.5
    }
    assert {value for name, value in factors.items() if "block_0" in name} == {0.25}
    assert {value for name, value in factors.items() if "embedding" in name} == {0.125}


def weights_of(model: Any) -> dict[str, NDArray[Any]]:
    return {
        weight.path: np.asarray(weight.value) for layer in model.layers for weight in layer.weights
    }


def tuning(store: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of a training of the tiny Vision Transformer."""
    return {"stores": (str(store),), **TINY, "epochs": 2, "batch_size": 16, **settings}


def test_layer_decay_shortens_the_updates(small_store: Path) -> None:
    """One step of SGD, for which the change is the learning rate times the gradient."""
    weights = {}
    for decay in (1.0, 0.5):
        keras.utils.set_random_seed(1)
        settings = {"optimizer": "sgd", "learning_rate": 1.0, "layer_decay": decay}
        with opened_setup(**tuning(small_store, **settings)) as setup:
            weights[decay] = weights_of(steps_of(setup)[0].model.serving)
    start = {weight.path: np.asarray(weight.value) for weight in build_core().weights}
    factors = {"embedding": 0.125, "block_0": 0.25, "block_1": 0.5, "norm": 0.5}
    for path, value in start.items():
        factor = next(factor for name, factor in factors.items() if path.startswith(name))
        whole, part = (
            next(v for p, v in weights[d].items() if p.endswith(path)) - value for d in (1.0, 0.5)
        )
        if "key/bias" not in path:  # it has no effect: the softmax subtracts it again
            assert np.abs(whole).max() > 1e-5
        np.testing.assert_allclose(part, factor * whole, rtol=1e-3, atol=1e-7)


@pytest.mark.nightly(reason="a kill of a new process; test_resume.py shows it of all weights")
@pytest.mark.parametrize("trainable", ["last:1", "lora:2"])
def test_killed_and_resumed_equals_uninterrupted(
    run: Run, small_store: Path, tmp_path: Path, trainable: str
) -> None:
    flags = ("--batch-size", 16, "--optimizer", "adamw", "--learning-rate", 0.01, "--deterministic")
    arguments = ("train", small_store, *TINY_FLAGS, *flags, "--epochs", 2, "--trainable", trainable)
    assert run(*arguments, "--out", "whole").returncode == 0
    fault = faulty("apply:8:parent", tmp_path / "failed")
    killed = run(*arguments, *EACH_STEP, "--out", "run", env=fault, new_process=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run("train", "--resume", "--out", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert_equal(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("trainable", ["last:1", "lora:2"])
def test_frozen_weights_stay_and_the_loss_falls(
    small_store: Path, tmp_path: Path, trainable: str
) -> None:
    """Also: the saved model opens in plain Keras, and predicts as the trained one."""
    settings = {"trainable": trainable, "learning_rate": 0.01, "dropout": 0.0, "augment": ()}
    with opened_setup(**tuning(small_store, **settings)) as setup:
        step, losses = steps_of(setup, 5)
        description = setup.description["backbone"]
        images = setup.batches("train", 1).load(0)["image"]
    assert losses[-1] < losses[0]
    step.save(tmp_path / "model.keras")
    saved = keras.models.load_model(tmp_path / "model.keras", safe_mode=True)
    logits = step.model.training([images, np.zeros(len(images), np.int64)])
    expected = keras.ops.softmax(logits)
    np.testing.assert_allclose(saved(images), expected, atol=1e-5)
    weights = weights_of(saved)
    for weight in build_core().weights:
        same = np.array_equal(
            weights[next(p for p in weights if p.endswith(weight.path))], weight.value
        )
        moves = "block_1" in weight.path or weight.path.startswith("norm/")
        if trainable == "lora:2":
            moves = weight.path.split("/")[0].endswith(("query", "value")) and weight.path.endswith(
                "kernel"
            )
        assert same == (not moves), weight.path
    assert description["preset"] == "tiny"
    assert len(description["weights_sha256"]) == 64


def test_checkpoints_leave_out_frozen_weights_and_changed_ones_are_noticed(
    small_store: Path, tmp_path: Path
) -> None:
    weights, preset = tmp_path / "weights.safetensors", tmp_path / "own.toml"
    shutil.copy(TINY_WEIGHTS, weights)
    shutil.copy(ENCODERS / "tiny.toml", preset)
    own = {"model": str(preset), "weights": str(weights), "trainable": "head", "epochs": 1}
    settings = tuning(small_store, resamples=0, **own)
    histopipe.train(out=tmp_path / "run", **settings, in_process=True)
    with np.load(tmp_path / "run" / "resume.npz") as saved:
        sizes = [saved[name].size for name in saved.files if name.startswith("v0")]
    assert sum(sizes) < 200
    content = weights.read_bytes()
    for file, changed in (
        (weights, content[:-4] + np.float32(0.5).tobytes()),
        (preset, preset.read_bytes().replace(b"heads = 3", b"heads = 2")),
    ):
        before = file.read_bytes()
        file.write_bytes(changed)
        with pytest.raises(UsageError, match="the weights or the description of the model have ch"):
            histopipe.train(out=tmp_path / "run", resume=True, epochs=2, in_process=True)
        file.write_bytes(before)


OWN = """
import keras

def build(size):
    image = keras.Input((size, size, 3))
    x = keras.layers.Conv2D(8, 5, strides=4)(image)
    return keras.Model(image, keras.layers.GlobalAveragePooling2D()(x))

def other_size(size):
    return build(48)

def two_outputs(size):
    model = build(size)
    return keras.Model(model.input, [model.output, model.output])

def no_model(size):
    return size

def fails(size):
    raise RuntimeError("no such luck")
"""


def test_networks_of_users(run: Run, small_store: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with opened_setup(**tuning(small_store, model=f"{tmp_path}/own.py:build", weights="none")) as s:
        step, losses = steps_of(s)
        assert np.isfinite(losses).all() and step.model.serving.output_shape == (None, 2)
    for name, message in {
        "own.py:biuld": "no function 'biuld' in .*own.py, expected build or other_size or two_outputs or no_model or fails",
        "own.py:no_model": "found a int, expected a function that returns a keras.Model",
        "own.py:fails": "cannot be used: found RuntimeError: no such luck",
        "own.py:two_outputs": r"expected input \(None, 32, 32, 3\) and output \(None, features\)",
        "own.py:other_size": r"found input \(None, 48, 48, 3\)",
        "other.py:build": "no file .*other.py",
    }.items():
        with pytest.raises(UsageError, match=message):
            build(f"{tmp_path}/{name}")
    (tmp_path / "config.toml").write_text('model = "own.py:build"')
    with without_training():
        assert run("train", small_store, "--model", "own.py:build", "--out", "run").returncode == 0
    refused = [
        (small_store, "--out", "wrong", *flags)
        for flags in (
            ("--model", "own.py:build"),
            ("--model", "own.py"),
            ("--config", "config.toml"),
        )
    ]
    for flags in (*refused, ("--resume", "--out", "run", "--epochs", 2)):
        done = run("train", *flags, "--untrusted")
        assert done.returncode == 2, done.stderr
        assert "Python files and SavedModels can run any code" in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"trainable": "lst:2"},
            "--trainable: found 'lst:2', expected all, head, last:N or lora:R",
        ),
        ({"trainable": "head:2"}, "--trainable: found 'head:2'"),
        ({"trainable": "lora"}, "--trainable: found 'lora'"),
        ({"model": "small-cnn", "weights": "imagenet"}, "has no trained weights"),
        ({"weights": "none"}, "expected --weights with the file of the weights"),
        (
            {"weights": "absent.safetensors"},
            "no weights of tiny at absent.safetensors: found no such file",
        ),
        ({"model": "uni"}, "patches of 32 pixels would be enlarged"),
        ({"model": "unii"}, "no such model, expected efficientnet-lite0, efficientnet-lite1"),
    ],
)
def test_wrong_settings(small_store: Path, settings: dict[str, Any], message: str) -> None:
    with (
        pytest.raises(UsageError, match=message),
        opened_setup(**tuning(small_store, **settings)) as setup,
    ):
        steps_of(setup, 0)
