"""Effects of the options of a training."""

from __future__ import annotations

import json
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import histopipe
from helpers.commands import Run, succeed, with_tensorflow
from helpers.lazy import tf, training_modules
from helpers.trainings import difference_of_model, history, in_tensorflow
from histopipe.errors import UsageError
from histopipe.runs.task_config import PatchTrainConfig

NORMALIZED = """
import keras

def build(patch_size):
    image = keras.Input((patch_size, patch_size, 3))
    x = keras.layers.Conv2D(8, 5, 4, "same", use_bias=False)(keras.layers.Rescaling(1 / 255)(image))
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.Model(image, keras.layers.GlobalAveragePooling2D()(x))
"""
"""A network with batch statistics, which a saved model must not synchronize."""
ARGUMENTS = ("--epochs", "2", "--batch-size", "16", "--split-by", "slide")
SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 16, "split_by": "slide"}
"""`ARGUMENTS` as settings."""


@in_tensorflow
@pytest.mark.parametrize(
    "options",
    [
        ("--model", "normalized.py:build", "--devices", "cpu:2"),
        *(
            pytest.param(options, marks=pytest.mark.nightly(reason="other options"))
            for options in (
                ("--precision", "mixed_bfloat16"),
                ("--precision", "mixed_float16", "--devices", "cpu:2"),
                ("--xla",),
                ("--xla", "--devices", "cpu:3", "--accumulate", "2"),
            )
        ),
    ],
    ids=" ".join,
)
def test_saved_model_predicts_the_same_in_plain_keras_for_all_options(
    run: Run, small_store: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    done = run("train", small_store, "--out", "run", *ARGUMENTS, "--epochs", 1, *options)
    assert done.returncode == 0, done.stderr
    assert all(np.isfinite(float(row["loss"])) for row in history(tmp_path / "run"))
    assert difference_of_model(tmp_path / "run", small_store) < 0.02
    with zipfile.ZipFile(tmp_path / "run" / "model.keras") as saved:
        assert b'"synchronized": true' not in saved.read("config.json")


STEPS = """
import dataclasses, json
import keras, numpy as np, tensorflow as tf
from histopipe.errors import UsageError
from histopipe.training import train_step
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.training.devices import make_strategy
from histopipe.training.models import build_model
from histopipe.training.objective import ClassObjective
from histopipe.training.optimizer import make_optimizer

strategy = make_strategy("cpu:2")
config = PatchTrainConfig(optimizer="sgd", schedule="cosine", warmup_steps=4, epochs=2, learning_rate=0.1)
with strategy.scope():
    model = build_model("small-cnn", patch_size=16, objective=ClassObjective(2), dropout=0, precision="mixed_float16")
    optimizer = make_optimizer(config, 10)
settings = train_step.StepSettings(batch_size=2, objective=ClassObjective(2), class_weight=np.ones(2, np.float32), scale_loss=True)
step = train_step.TrainStep(strategy, model, optimizer, settings)

def gradients(values):
    '''One gradient per replica, filled with its value, and no state.'''
    def of(context):
        value = values[int(context.replica_id_in_sync_group)]
        sums = [tf.fill(v.shape, value) for v in model.training.trainable_variables]
        return sums, [], tf.constant(1.0)
    return strategy.experimental_distribute_values_from_function(of)

def state():
    weights = [np.asarray(v.value) for v in model.training.trainable_variables]
    return weights, float(np.asarray(step.variables[-2].value)), int(np.asarray(optimizer.iterations.value))

output = {}
before, scale, _ = state()
# The overflow is on the second replica only.
step.apply(gradients([0.0, float("inf")]), tf.zeros(2))
after, halved, steps_done = state()
output["kept"] = all((a == b).all() for a, b in zip(before, after))
output["scales"], output["skipped"] = [scale, halved], steps_done
requests = step.apply(gradients([halved, 0.0]), tf.constant([0.0, 1.0]))
output["requests"] = requests.numpy().tolist()
moved, _, output["done"] = state()
output["finite"] = all(np.isfinite(w).all() for w in moved)
rates = []
for _ in range(19):
    rates.append(step.learning_rate)
    step.apply(gradients([0.0, 0.0]), tf.zeros(2))
output["rates"] = rates
label, logits = tf.constant([0, 1]), tf.constant([[2.0, -1.0], [0.5, 0.0]])
output["smooth"] = ClassObjective(3).losses({"label": label}, logits, 0.2).numpy().tolist()
output["keras"] = keras.losses.CategoricalCrossentropy(
    from_logits=True, label_smoothing=0.2, reduction="none"
)(tf.one_hot(label, 2), logits).numpy().tolist()
with strategy.scope():
    normalized = build_model("mobilenet", patch_size=32, objective=ClassObjective(2), dropout=0)
try:
    train_step.TrainStep(strategy, normalized, optimizer, dataclasses.replace(settings, xla=True))
except UsageError as error:
    output["xla"] = str(error)
print(json.dumps(output))
"""


def test_overflow_schedule_requests_and_smoothing() -> None:
    done = with_tensorflow(STEPS)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["kept"]
    assert output["scales"] == [2.0**15, 2.0**14]
    assert (output["skipped"], output["done"]) == (0, 1)
    assert output["finite"]
    assert "--xla" in output["xla"]  # with batch normalization over several devices
    assert output["requests"] == [0, 2]  # the sum over both replicas
    # Warm-up to 0.1 in 4 steps, then cosine decay over 16 steps. Step 0 was done above.
    expected = [0.1 * step / 4 for step in range(1, 4)]
    expected += [0.05 * (1 + np.cos(np.pi * step / 16)) for step in range(16)]
    np.testing.assert_allclose(output["rates"], expected, atol=1e-6)
    np.testing.assert_allclose(output["smooth"], output["keras"], rtol=1e-6)


@pytest.fixture(scope="module")
def logged_run(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with logs for TensorBoard."""
    out = tmp_path_factory.mktemp("logged") / "run"
    succeed("train", small_store, "--out", out, *ARGUMENTS, "--tensorboard")
    return out


@in_tensorflow
def test_tensorboard_logs_equal_the_history(logged_run: Path) -> None:
    from tensorflow.python.summary.summary_iterator import summary_iterator

    logged: dict[str, dict[int, float]] = defaultdict(dict)
    for path in sorted((logged_run / "tensorboard").iterdir()):
        for event in summary_iterator(str(path)):
            for value in event.summary.value:
                logged[value.tag][event.step] = float(tf.make_ndarray(value.tensor))
    assert sorted(logged["step_loss"]) == list(range(1, 11))
    for row in history(logged_run):
        for name in ("loss", "val_auc", "learning_rate"):
            assert logged[name][int(row["epoch"])] == pytest.approx(float(row[name]), abs=1e-6)


@pytest.mark.nightly(
    reason="an interpreter; test_a_training_in_this_process_gives_the_result_of_the_command has the setting"
)
def test_device_placement_is_printed(run: Run, small_store: Path) -> None:
    flags = ("--epochs", 1, "--log-device-placement", "--out", "run")
    assert "device:CPU:0" in run("train", small_store, *flags).stderr


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"accumulate": 0}, "--accumulate: found 0, expected 1 or more"),
        ({"accumulate": 65}, "--accumulate: found 65, expected at most the 64"),
        ({"warmup_steps": 5}, "expected --schedule cosine"),
        ({"label_smoothing": 1.0}, "--label-smoothing: found 1.0, expected from 0 to below 1"),
        ({"clip_norm": -1.0}, "--clip-norm: found -1.0"),
        ({"precision": "float8"}, "precision: found 'float8', expected 'float32' or"),
        ({"save_minutes": 0.0}, "--save-minutes: found 0.0, expected more than 0"),
        ({"epochs": "three"}, "epochs: found 'three', expected a whole number"),
        ({"xla": 1}, "xla: found 1, expected True or False"),
        ({"seed": 1 << 32}, "--seed: found 4294967296, expected from 0 to 4294967295"),
        ({"devices": "cpu:x"}, "--devices: found 'cpu:x'"),
        ({"devices": "gpu:0,1,2", "batch_size": 2}, "--batch-size: found 2, .*3 devices"),
        ({"devices": "cpu:4", "batch_size": 3}, "--batch-size: found 3, .*4 devices"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        PatchTrainConfig(**settings)  # type: ignore[arg-type]  # wrong types are tested


@in_tensorflow
def test_diverging_training_fails(small_store: Path, tmp_path: Path) -> None:
    rate: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1e30}
    with pytest.raises(UsageError, match="the loss of epoch 1 is not finite from step"):
        histopipe.train(small_store, out=tmp_path / "run", **SETTINGS, **rate, in_process=True)
    assert not (tmp_path / "run" / "model.keras").exists()


@in_tensorflow
def test_resume_refuses_other_settings(run: Run, logged_run: Path) -> None:
    config = (logged_run / "config.toml").read_bytes()
    for options, expected in (
        (("--config", logged_run / "config.toml"), "found --config"),
        (("other.lmdb",), "found STORES"),
        (("--learning-rate", "1"), "found --learning-rate"),
    ):
        done = run("train", "--resume", "--out", logged_run, *options)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr
    assert (logged_run / "config.toml").read_bytes() == config


@in_tensorflow
def test_warmup_longer_than_the_training_is_refused() -> None:
    config = PatchTrainConfig(epochs=2, schedule="cosine", warmup_steps=10)
    message = "--warmup-steps: found 10, expected less than the 10 steps of 2 epochs"
    with pytest.raises(UsageError, match=message):
        training_modules.optimizer.make_optimizer(config, 5)


@in_tensorflow
def test_a_training_in_this_process_gives_the_result_of_the_command(
    small_store: Path, logged_run: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "log_device_placement": True, "in_process": True}
    result = histopipe.train(small_store, out=tmp_path / "run", **settings)
    assert tf.debugging.get_log_device_placement()
    tf.debugging.set_log_device_placement(False)
    metrics = json.loads((logged_run / "metrics.json").read_text())
    auc = metrics["test"]["patch"]["auc"]
    assert result.metrics["test"].finest.values["auc"] == pytest.approx(auc, abs=1e-6)
    with pytest.raises(UsageError, match="unknown settings: found colour"):
        histopipe.train(small_store, out="x", colour=3)
