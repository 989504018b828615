"""Fine-tuning of encoders: what is trained, how fast, and what is saved."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

import histopipe
from helpers.commands import Run, succeed, with_tensorflow
from helpers.paths import ENCODERS
from helpers.trainings import (
    EACH_STEP,
    PREDICT,
    TINY,
    TINY_FLAGS,
    TINY_WEIGHTS,
    assert_equal,
    faulty,
    history,
)
from histopipe.errors import UsageError
from histopipe.training.backbones import build_backbone
from histopipe.training.models import (
    build_model,
    changing_state,
    frozen_weights,
    rate_factors,
    set_trainable,
)
from histopipe.training.objective import ClassObjective

FINE_TUNING = (
    *TINY_FLAGS,
    "--epochs",
    "2",
    "--batch-size",
    "16",
    "--optimizer",
    "adamw",
    "--deterministic",
)


def trained_layers(trainable: str) -> set[str]:
    core = build_backbone(**TINY, patch_size=32, training=True).core
    frozen = set_trainable(core, trainable)
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
    core = build_backbone("mobilenet", patch_size=32, weights="none", training=True).core
    with pytest.raises(
        UsageError, match="--trainable lora:2: found no attention layers in mobilenet"
    ):
        set_trainable(core, "lora:2")
    set_trainable(core, "last:2")
    names = {weight.path.split("/")[0] for weight in core.trainable_variables}
    assert names == {"conv_dw_13", "conv_dw_13_bn", "conv_pw_13", "conv_pw_13_bn"}


@pytest.mark.parametrize("trainable", ["all", "last:2", "head"])
def test_every_weight_is_trained_or_changing_or_frozen(trainable: str) -> None:
    model = build_model(
        "mobilenet", patch_size=32, objective=ClassObjective(2), dropout=0.1, trainable=trainable
    ).training
    parts = [model.trainable_variables, changing_state(model), frozen_weights(model)]
    ids = [id(variable) for part in parts for variable in part]
    assert sorted(ids) == sorted(map(id, model.variables))
    statistics = [variable for variable in parts[1] if "moving" in variable.path]
    assert len(statistics) == {"all": 54, "last:2": 4, "head": 0}[trainable]


def test_rate_factors() -> None:
    model = build_model(
        **{"name": TINY["model"]},
        weights=TINY["weights"],
        patch_size=32,
        objective=ClassObjective(2),
        dropout=0.1,
    )
    core = model.training.get_layer("vision_transformer")
    factors = dict(
        zip(
            (variable.path for variable in model.training.trainable_variables),
            rate_factors(core, model.training, 0.5),
            strict=True,
        )
    )
    assert {
        name.rpartition("/")[2]: value for name, value in factors.items() if "logits" in name
    } == {"kernel": 1, "bias": 1}
    assert {value for name, value in factors.items() if "block_1" in name or "norm/" in name} == {
        0.5
    }
    assert {value for name, value in factors.items() if "block_0" in name} == {0.25}
    assert {value for name, value in factors.items() if "embedding" in name} == {0.125}


def weights_of(run: Path) -> dict[str, NDArray[Any]]:
    model = keras.models.load_model(run / "model.keras")
    return {
        weight.path: np.asarray(weight.value) for layer in model.layers for weight in layer.weights
    }


def test_layer_decay_shortens_the_updates(small_store: Path, tmp_path: Path) -> None:
    """One step of SGD, for which the change is the learning rate times the gradient."""
    weights = {}
    for decay in (1.0, 0.5):
        out = tmp_path / str(decay)
        histopipe.train(
            small_store,
            out=out,
            **TINY,
            epochs=1,
            batch_size=120,
            optimizer="sgd",
            learning_rate=1.0,
            deterministic=True,
            layer_decay=decay,
            resamples=0,
        )
        weights[decay] = weights_of(out)
    start = {
        weight.path: np.asarray(weight.value)
        for weight in build_backbone(**TINY, patch_size=32, training=True).core.weights
    }
    factors = {"embedding": 0.125, "block_0": 0.25, "block_1": 0.5, "norm": 0.5}
    for path, value in start.items():
        factor = next(factor for name, factor in factors.items() if path.startswith(name))
        whole, part = (
            next(v for p, v in weights[d].items() if p.endswith(path)) - value for d in (1.0, 0.5)
        )
        if "key/bias" not in path:  # it has no effect: the softmax subtracts it again
            assert np.abs(whole).max() > 1e-5
        np.testing.assert_allclose(part, factor * whole, rtol=1e-3, atol=1e-7)


@pytest.fixture(scope="module", params=["last:1", "lora:2"])
def tuned(
    request: pytest.FixtureRequest, small_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[object, ...], Path]:
    """Arguments of a training of some layers, and its run."""
    flags = ("--trainable", request.param, "--learning-rate", 0.01)
    arguments = ("train", small_store, *FINE_TUNING, *flags)
    out = tmp_path_factory.mktemp("tuned") / "run"
    succeed(*arguments, "--out", out)
    return arguments, out


@pytest.mark.nightly(reason="a kill of a new process; test_resume.py shows it of all weights")
def test_killed_and_resumed_equals_uninterrupted(
    run: Run, tuned: tuple[tuple[object, ...], Path], tmp_path: Path
) -> None:
    arguments, whole = tuned
    fault = faulty("apply:8:parent", tmp_path / "failed")
    killed = run(*arguments, *EACH_STEP, "--out", "run", env=fault, new_process=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run("train", "--resume", "--out", "run")
    assert resumed.returncode == 0, resumed.stderr
    assert_equal(tmp_path / "run", whole)


def test_frozen_weights_stay_and_the_loss_falls(
    small_store: Path, tuned: tuple[tuple[object, ...], Path]
) -> None:
    """Also: the saved model opens in plain Keras."""
    arguments, whole = tuned
    trainable = arguments[arguments.index("--trainable") + 1]
    losses = [float(row["loss"]) for row in history(whole)]
    assert losses[-1] < losses[0]
    start = build_backbone(**TINY, patch_size=32, training=True).core.weights
    weights = weights_of(whole)
    for weight in start:
        same = np.array_equal(
            weights[next(p for p in weights if p.endswith(weight.path))], weight.value
        )
        moves = "block_1" in weight.path or weight.path.startswith("norm/")
        if trainable == "lora:2":
            moves = weight.path.split("/")[0].endswith(("query", "value")) and weight.path.endswith(
                "kernel"
            )
        assert same == (not moves), weight.path
    if trainable == "lora:2":
        program = PREDICT.replace('assert "histopipe" not in sys.modules', "")
        plain = with_tensorflow(program, whole, small_store, "n", "t")
        assert plain.returncode == 0, plain.stderr
        assert float(plain.stdout) < 1e-4
    description = json.loads((whole / "metrics.json").read_text())["backbone"]
    assert description["preset"] == "tiny"
    assert len(description["weights_sha256"]) == 64


def test_checkpoints_leave_out_frozen_weights(run: Run, small_store: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    shutil.copy(TINY_WEIGHTS, weights)
    done = run(
        "train",
        small_store,
        "--out",
        "run",
        *FINE_TUNING,
        "--weights",
        weights,
        "--trainable",
        "head",
        "--epochs",
        1,
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "run" / "resume.npz") as saved:
        sizes = [saved[name].size for name in saved.files if name.startswith("v0")]
    assert sum(sizes) < 200
    shutil.copy(ENCODERS / "tiny.toml", tmp_path / "other.toml")
    content = bytearray(weights.read_bytes())
    content[-4:] = np.float32(0.5).tobytes()
    weights.write_bytes(content)
    resumed = run("train", "--resume", "--out", "run", "--epochs", 2)
    assert resumed.returncode == 2, resumed.stderr
    changed = "the weights or the description of the model have changed since the start of the run"
    assert changed in resumed.stderr


def test_changed_presets_are_noticed(run: Run, small_store: Path, tmp_path: Path) -> None:
    preset = tmp_path / "own.toml"
    preset.write_text(Path(TINY["model"]).read_text())
    flags = ("--model", "own.toml", "--weights", TINY_WEIGHTS)
    done = run("train", small_store, "--out", "run", *FINE_TUNING, *flags, "--epochs", 1)
    assert done.returncode == 0, done.stderr
    assert run("embed", small_store, *flags, "--out", "features").returncode == 0
    preset.write_text(preset.read_text().replace("heads = 3", "heads = 2"))
    resumed = run("train", "--resume", "--out", "run", "--epochs", 2)
    assert resumed.returncode == 2, resumed.stderr
    assert "the description of the model have changed" in resumed.stderr
    mixed = run("embed", small_store, *flags, "--out", "features")
    assert mixed.returncode == 2, mixed.stderr
    assert "computed with other settings" in mixed.stderr


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
    done = run(
        "train",
        small_store,
        "--model",
        "own.py:build",
        "--out",
        "run",
        "--epochs",
        1,
        "--batch-size",
        32,
    )
    assert done.returncode == 0, done.stderr
    predicted = run("predict", "run", small_store, "--out", "predictions")
    assert predicted.returncode == 0, predicted.stderr
    for model, message in {
        "own.py:biuld": "no function 'biuld' in own.py, expected build or other_size or two_outputs or no_model or fails",
        "own.py:no_model": "found a int, expected a function that returns a keras.Model",
        "own.py:fails": "cannot be used: found RuntimeError: no such luck",
        "own.py:two_outputs": "expected input (None, 32, 32, 3) and output (None, features)",
        "own.py:other_size": "found input (None, 48, 48, 3)",
        "other.py:build": "no file other.py",
    }.items():
        wrong = run("train", small_store, "--model", model, "--out", "wrong")
        assert wrong.returncode == 2, wrong.stderr
        assert message in wrong.stderr
        assert not (tmp_path / "wrong").exists()
    (tmp_path / "config.toml").write_text('model = "own.py:build"')
    for flags in (("--model", "own.py:build"), ("--model", "own.py"), ("--config", "config.toml")):
        refused = run("train", small_store, *flags, "--out", "wrong", "--untrusted")
        assert refused.returncode == 2, refused.stderr
        assert "Python files and SavedModels can run any code" in refused.stderr
    refused = run("train", "--resume", "--out", "run", "--epochs", 2, "--untrusted")
    assert "Python files and SavedModels can run any code" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--trainable", "lst:2"),
            "--trainable: found 'lst:2', expected all, head, last:N or lora:R",
        ),
        (("--trainable", "head:2"), "--trainable: found 'head:2'"),
        (("--trainable", "lora"), "--trainable: found 'lora'"),
        (("--weights", "none"), "expected --weights with the file of the weights"),
        (
            ("--weights", "absent.safetensors"),
            "no weights of tiny at absent.safetensors: found no such file",
        ),
        (("--model", "uni"), "patches of 32 pixels would be enlarged"),
        (("--model", "unii"), "no such model, expected efficientnet-lite0, efficientnet-lite1"),
    ],
)
def test_wrong_settings(
    run: Run, small_store: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = run("train", small_store, "--out", "run", *TINY_FLAGS, *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run").exists()
