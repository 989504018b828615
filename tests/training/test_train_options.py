"""Effects of the options of a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import histopipe
from helpers.commands import RunCommand, succeed
from helpers.lazy import keras, tf, training
from helpers.runs import without_training
from helpers.trainings import TINY, check_saved_model, history, in_fork
from histopipe.errors import UsageError
from histopipe.runs.run import Run
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


def check_logs(store: str, run: str) -> None:
    from tensorflow.python.summary.summary_iterator import summary_iterator

    check_saved_model(store, run)
    logged: dict[str, dict[int, float]] = {}
    for path in sorted((Path(run) / "tensorboard").iterdir()):
        for event in summary_iterator(str(path)):
            for value in event.summary.value:
                steps = logged.setdefault(value.tag, {})
                steps[event.step] = float(tf.make_ndarray(value.tensor))
    assert sorted(logged["step_loss"]) == list(range(1, 11))
    for row in history(Path(run)):
        for name in ("loss", "val_auc", "learning_rate"):
            assert logged[name][int(row["epoch"])] == pytest.approx(float(row[name]), abs=1e-6)


@pytest.mark.long(reason="the training on two devices")
def test_logs_advice_and_saved_model_of_a_training_on_two_devices(
    run: RunCommand, small_store: Path, tmp_path: Path
) -> None:
    """One patient has eight of the twelve slides, so that the training subset has one of three patients."""
    rows = [f"{'nt'[i % 2]}{i},{'nt'[i % 2]},{'PQR'[max(0, i // 2 - 3)]}" for i in range(12)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide,label,patient", *rows]))
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    network = ("--model", "normalized.py:build", "--devices", "cpu:2", "--batch-size", 16)
    flags = ("--labels", "labels.csv", "--epochs", 2, "--seed", 1, "--tensorboard")
    done = run("train", small_store, "--out", "run", *network, *flags)
    assert done.returncode == 0, done.stderr
    assert all(np.isfinite(float(row["loss"])) for row in history(tmp_path / "run"))
    (line,) = (line for line in done.stderr.splitlines() if "to improve: " in line)
    assert "split with another --seed, or use --folds: train has 1 of 3 patients" in line
    in_fork(check_logs, small_store, tmp_path / "run")


@pytest.mark.nightly(
    reason="other options; test_logs_advice_and_saved_model_of_a_training_on_two_devices has one"
)
@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "mixed_bfloat16"),
        ("--precision", "mixed_float16", "--devices", "cpu:2"),
        ("--xla",),
        ("--xla", "--devices", "cpu:3", "--accumulate", "2"),
    ],
    ids=" ".join,
)
def test_saved_model_predicts_the_same_for_all_options(
    small_store: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    succeed("train", small_store, "--out", tmp_path / "run", *ARGUMENTS, "--epochs", 1, *options)
    assert all(np.isfinite(float(row["loss"])) for row in history(tmp_path / "run"))
    in_fork(check_saved_model, small_store, tmp_path / "run")


def check_steps() -> None:
    """Of two replicas: an overflow, the schedule, requests, and smooth labels."""
    strategy, objective = (
        training.devices.make_strategy("cpu:2"),
        training.objective.ClassObjective(2),
    )
    config = PatchTrainConfig(
        optimizer="sgd", schedule="cosine", warmup_steps=4, epochs=2, learning_rate=0.1
    )
    options: dict[str, Any] = {"objective": objective, "dropout": 0, "precision": "mixed_float16"}
    with strategy.scope():
        model = training.models.build_model("small-cnn", patch_size=16, **options)
        optimizer = training.models.make_optimizer(config, 10)
    settings = training.train_step.StepSettings(
        batch_size=2,
        objective=objective,
        class_weight=np.ones(2, np.float32),
        scale_loss=True,
    )
    step = training.train_step.TrainStep(strategy, model, optimizer, settings)

    def gradients(values: list[float]) -> Any:
        """One gradient per replica, filled with its value, and no state."""

        def of(context: Any) -> Any:
            value = values[int(context.replica_id_in_sync_group)]
            sums = [tf.fill(v.shape, value) for v in model.training.trainable_variables]
            return sums, [], tf.constant(1.0)

        return strategy.experimental_distribute_values_from_function(of)

    def state() -> tuple[np.ndarray, float, int]:
        weights = [np.asarray(v.value).ravel() for v in model.training.trainable_variables]
        scale = float(np.asarray(step.variables[-2].value))
        return np.concatenate(weights), scale, int(np.asarray(optimizer.iterations.value))

    before, scale, _ = state()
    # The overflow is on the second replica only.
    step.apply(gradients([0.0, float("inf")]), tf.zeros(2))
    after, halved, done = state()
    np.testing.assert_array_equal(after, before)
    assert (scale, halved, done) == (2.0**15, 2.0**14, 0)
    requests = step.apply(gradients([halved, 0.0]), tf.constant([0.0, 1.0]))
    assert requests.numpy().tolist() == [0, 2]  # the sum over both replicas
    moved, _, done = state()
    assert np.isfinite(moved).all() and done == 1
    rates = []
    for _ in range(19):
        rates.append(step.learning_rate)
        step.apply(gradients([0.0, 0.0]), tf.zeros(2))
    # Warm-up to 0.1 in 4 steps, then cosine decay over 16 steps. Step 0 was done above.
    expected = [0.1 * number / 4 for number in range(1, 4)]
    expected += [0.05 * (1 + np.cos(np.pi * number / 16)) for number in range(16)]
    np.testing.assert_allclose(rates, expected, atol=1e-6)
    label, logits = tf.constant([0, 1]), tf.constant([[2.0, -1.0], [0.5, 0.0]])
    of_keras = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.2, reduction="none"
    )
    smooth = training.objective.ClassObjective(3).losses({"label": label}, logits, 0.2)
    np.testing.assert_allclose(smooth, of_keras(tf.one_hot(label, 2), logits), rtol=1e-6)
    with pytest.raises(UsageError, match="--warmup-steps: found 4, expected less than the 4 steps"):
        training.models.make_optimizer(config, 2)
    with strategy.scope(), pytest.raises(UsageError, match="--xla cannot compile batch norm"):
        normalized = training.models.build_model("mobilenet", patch_size=32, **options)
        training.train_step.TrainStep(strategy, normalized, optimizer, replace(settings, xla=True))


@pytest.mark.long(reason="a fork that traces networks")
def test_overflow_schedule_requests_smoothing_and_refusals() -> None:
    in_fork(check_steps)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Wrong types and choices are errors of the argument, others of the flag.
        ({"epochs": 0}, "^--epochs"),
        ({"batch_size": 0}, "^--batch-size"),
        ({"dropout": 1.0}, "^--dropout"),
        ({"learning_rate": 0.0}, "^--learning-rate"),
        ({"optimizer": "magic"}, "^optimizer"),
        ({"fractions": (1.0, 0.0, 0.0)}, "^--fractions"),
        ({"split_by": "hospital"}, "^split_by"),
        ({"region_um": -1.0}, "^--region-um"),
        ({**TINY, "trainable": "lst:2"}, "found 'lst:2', expected all, head, last:N or lora:R"),
        ({**TINY, "trainable": "head:2"}, "^--trainable: found 'head:2'"),
        ({**TINY, "trainable": "lora"}, "^--trainable: found 'lora'"),
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


def test_diverging_training_fails(run: RunCommand, small_store: Path, tmp_path: Path) -> None:
    rate = ("--optimizer", "sgd", "--learning-rate", "1e30")
    done = run("train", small_store, "--out", "run", *ARGUMENTS, *rate)
    assert done.returncode == 2, done.stderr
    assert "the loss of epoch 1 is not finite from step" in done.stderr
    assert not (tmp_path / "run" / "model.keras").exists()


def test_resume_refuses_other_settings(run: RunCommand, uninterrupted: Path) -> None:
    config = (uninterrupted / "config.toml").read_bytes()
    for options, expected in (
        (("--config", uninterrupted / "config.toml"), "found --config"),
        (("other.lmdb",), "found STORES"),
        (("--learning-rate", "1"), "found --learning-rate"),
    ):
        done = run("train", "--resume", "--out", uninterrupted, *options)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr
    assert (uninterrupted / "config.toml").read_bytes() == config


def test_python_function_gives_the_result_of_the_command(
    run: RunCommand, small_store: Path, tmp_path: Path
) -> None:
    with without_training():
        assert run("train", small_store, "--out", "command", *ARGUMENTS).returncode == 0
        result = histopipe.train(
            small_store, out=tmp_path / "python", epochs=2, batch_size=16, split_by="slide"
        )
    assert result.metrics == Run(tmp_path / "command").result.metrics
    for name in ("config.toml", "splits.json", "predictions.csv"):
        assert (tmp_path / "python" / name).read_text() == (tmp_path / "command" / name).read_text()
