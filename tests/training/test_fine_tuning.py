"""Fine-tuning of encoders: what is trained, how fast, and what is saved."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import histopipe
from helpers.commands import RunCommand, succeed
from helpers.lazy import tf, training
from helpers.paths import GOLDEN
from helpers.trainings import (
    EACH_STEP,
    TINY,
    TINY_WEIGHTS,
    assert_equal,
    check_saved_model,
    faulty,
    history,
    in_fork,
    weights,
)
from histopipe.errors import UsageError
from histopipe.runs.task_config import PatchTrainConfig

FINE_TUNING = "--epochs 2 --batch-size 16 --optimizer adamw --learning-rate 0.01 --deterministic"
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


def core_of(model: str, weights: str = "none") -> Any:
    return training.backbones.build_backbone(
        model, weights=weights, patch_size=32, training=True
    ).core


def check_layers() -> None:
    def trained(trainable: str, core: Any = None) -> set[str]:
        core = core or core_of(**TINY)
        assert training.models.set_trainable(core, trainable) == (trainable == "head")
        return {weight.path.split("/")[0] for weight in core.trainable_variables}

    block = {"norm1", "norm2", "query", "key", "value", "projection", "hidden", "gate", "output"}
    last = {f"block_1_{name}" for name in block} | {"norm"}
    both = last | {f"block_0_{name}" for name in block}
    expected = {
        "head": set(),
        "last:1": last,
        "last:2": both,
        "last:3": both | {"embedding"},
        "all": both | {"embedding"},
        "lora:2": {f"block_{n}_{name}" for n in (0, 1) for name in ("query", "value")},
    }
    assert {trainable: trained(trainable) for trainable in expected} == expected
    with pytest.raises(UsageError, match="--trainable last:4: found 3 blocks or layers"):
        trained("last:4")
    mobilenet = core_of("mobilenet")
    with pytest.raises(UsageError, match="lora:2: found no attention layers in mobilenet"):
        trained("lora:2", mobilenet)
    names = {"conv_dw_13", "conv_dw_13_bn", "conv_pw_13", "conv_pw_13_bn"}
    assert trained("last:2", mobilenet) == names


def check_that_every_weight_is_trained_or_changing_or_frozen() -> None:
    options: Any = {"dropout": 0.1, "objective": training.objective.ClassObjective(2)}
    for trainable, count in {"all": 54, "last:2": 4, "head": 0}.items():
        options["trainable"] = trainable
        model = training.models.build_model("mobilenet", patch_size=32, **options).training
        changing = training.models.changing_state(model)
        frozen = training.models.frozen_weights(model)
        ids = map(id, (*model.trainable_variables, *changing, *frozen))
        assert sorted(ids) == sorted(map(id, model.variables))
        assert sum("moving" in variable.path for variable in changing) == count


def check_layer_decay() -> None:
    """One step of SGD with gradients of one, for which the change is the learning rate."""
    objective: Any = training.objective.ClassObjective(2)
    options: Any = {"weights": TINY["weights"], "dropout": 0.1, "layer_decay": 0.5}
    model = training.models.build_model(
        TINY["model"], patch_size=32, objective=objective, **options
    )
    config = PatchTrainConfig(optimizer="sgd", learning_rate=1.0)
    step = training.train_step.TrainStep(
        training.devices.make_strategy("cpu"),
        model,
        training.models.make_optimizer(config, 1),
        training.train_step.StepSettings(
            batch_size=1, objective=objective, class_weight=np.ones(2, np.float32)
        ),
    )
    trained = model.training.trainable_variables
    before = [np.asarray(variable.value) for variable in trained]
    step.apply(([tf.ones(v.shape) for v in trained], [], tf.constant(1.0)), tf.zeros(2))
    factors = {"embedding": 0.125, "block_0": 0.25, "block_1": 0.5, "norm": 0.5, "logits": 1.0}
    seen = set()
    for variable, old in zip(trained, before, strict=True):
        name = next(name for name in factors if name in variable.path)
        np.testing.assert_allclose(np.asarray(variable.value) - old, -factors[name], atol=1e-5)
        seen.add(name)
    assert seen == factors.keys() and len(trained) == len(step.model.rate_factors)


def check_refusals() -> None:
    tiny = TINY["model"]
    Path("own.py").write_text(OWN)
    for model, file, message in (
        (
            "own.py:biuld",
            "none",
            "no function 'biuld' in own.py, expected build or other_size or two_outputs or no_model or fails",
        ),
        (
            "own.py:no_model",
            "none",
            "found a int, expected a function that returns a keras.Model",
        ),
        ("own.py:fails", "none", "cannot be used: found RuntimeError: no such luck"),
        (
            "own.py:two_outputs",
            "none",
            r"expected input \(None, 32, 32, 3\) and output \(None, features\)",
        ),
        ("own.py:other_size", "none", r"found input \(None, 48, 48, 3\)"),
        ("other.py:build", "none", "no file other.py"),
        ("small-cnn", "imagenet", "has no trained weights"),
        ("nothing", "none", "no such model, expected efficientnet-lite0, efficientnet-lite1"),
        (tiny, "none", "expected --weights with the file of the weights"),
        (
            tiny,
            "absent.safetensors",
            "no weights of tiny at absent.safetensors: found no such file",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            core_of(model, file)
    without_gpu = mock.patch("tensorflow.config.list_physical_devices", return_value=[])
    with without_gpu, pytest.raises(UsageError, match="no GPU"):
        training.devices.make_strategy("gpu")


def check_functions(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        check_refusals()
    check_layers()
    check_that_every_weight_is_trained_or_changing_or_frozen()
    check_layer_decay()


@pytest.mark.long(reason="builds a dozen networks")
def test_layers_rates_and_refusals_of_networks(tmp_path: Path) -> None:
    in_fork(check_functions, tmp_path)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("last:1", marks=pytest.mark.nightly(reason="lora:2 is shown")),
        "lora:2",
    ],
)
def tuned(
    request: pytest.FixtureRequest, small_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[object, ...], Path]:
    """Arguments of a training of some layers, and its run. Its preset and weights are files next to it."""
    folder = tmp_path_factory.mktemp("tuned")
    model = shutil.copy(TINY["model"], folder / "own.toml")
    weights = shutil.copy(TINY_WEIGHTS, folder / "weights.safetensors")
    files = ("--model", model, "--weights", weights, "--trainable", request.param)
    arguments = ("train", small_store, *files, *FINE_TUNING.split())
    succeed(*arguments, "--out", folder / "run")
    return arguments, folder / "run"


@pytest.mark.nightly(reason="a kill of a new process; test_resume.py shows it of all weights")
def test_killed_and_resumed_equals_uninterrupted(
    run: RunCommand, tuned: tuple[tuple[object, ...], Path], tmp_path: Path
) -> None:
    arguments, whole = tuned
    fault = faulty("apply:8:parent", tmp_path / "failed")
    killed = run(*arguments, *EACH_STEP, "--out", "run", env=fault, new_process=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    succeed("train", "--resume", "--out", tmp_path / "run")
    assert_equal(tmp_path / "run", whole)


def check_tuned(store: str, trainable: str, folder: str) -> None:
    """Frozen weights stay; the saved model opens in plain Keras; changed frozen weights are noticed."""
    run, tensors = Path(folder), core_of(**TINY).weights
    model = check_saved_model(store, folder, atol=1e-4)
    weights = {w.path: np.asarray(w.value) for layer in model.layers for w in layer.weights}
    for weight in tensors:
        path = next(p for p in weights if p.endswith(weight.path))
        moves = "block_1" in weight.path or weight.path.startswith("norm/")
        if trainable == "lora:2":
            moves = weight.path.endswith(("query/kernel", "value/kernel"))
        assert np.array_equal(weights[path], weight.value) == (not moves), weight.path
    preset, content = run.with_name("own.toml"), run.with_name("weights.safetensors")
    for file, changed in (
        (preset, preset.read_bytes().replace(b"heads = 3", b"heads = 2")),
        (content, content.read_bytes()[:-4] + np.float32(0.5).tobytes()),
    ):
        whole = file.read_bytes()
        file.write_bytes(changed)
        with pytest.raises(UsageError, match="the weights or the description of the model have"):
            histopipe.train(out=run, resume=True, epochs=3, in_process=True)
        file.write_bytes(whole)


def test_frozen_weights_stay_and_are_not_saved(
    small_store: Path, tuned: tuple[tuple[object, ...], Path]
) -> None:
    arguments, whole = tuned
    trainable = str(arguments[arguments.index("--trainable") + 1])
    losses = [float(row["loss"]) for row in history(whole)]
    assert losses[-1] < losses[0]
    description = json.loads((whole / "metrics.json").read_text())["backbone"]
    assert description["preset"] == "own"
    assert len(description["weights_sha256"]) == 64
    saved = sum(values.size for values in weights(whole))
    assert saved < (1000 if trainable == "lora:2" else 30_000)
    in_fork(check_tuned, small_store, trainable, whole)


def test_networks_of_users_need_trust(run: RunCommand, small_store: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.toml").write_text('model = "own.py:build"')
    earlier = Path(shutil.copytree(GOLDEN / "2026-11-25" / "run", tmp_path / "earlier"))
    config = (earlier / "config.toml").read_text()
    (earlier / "config.toml").write_text(config.replace('"small-cnn"', '"own.py:build"'))
    new = (small_store, "--out", "wrong")
    for flags in (
        (*new, "--model", "own.py:build"),
        (*new, "--model", "own.py"),
        (*new, "--config", "config.toml"),
        ("--resume", "--out", "earlier", "--epochs", 2),
    ):
        refused = run("train", *flags, "--untrusted")
        assert refused.returncode == 2, refused.stderr
        assert "Python files and SavedModels can run any code" in refused.stderr
