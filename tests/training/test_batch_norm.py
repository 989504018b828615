"""Batch normalization: the fused operation equals that of Keras; biases before it have no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lazy import keras, tf
from helpers.lazy import training as modules


def build(seed: int, dtype: str, **options: Any) -> Any:
    """Return a network of a convolution and two normalizations, of which one is frozen."""
    keras.utils.set_random_seed(seed)
    image = keras.Input((4, 5, 3))
    x = keras.layers.Conv2D(4, 3, padding="same", dtype=dtype)(image)
    x = keras.layers.BatchNormalization(dtype=dtype, **options)(x)
    x = keras.layers.BatchNormalization(dtype=dtype, trainable=False)(x)
    model = keras.Model(image, keras.layers.Dense(2, dtype="float32")(x))
    draw = np.random.default_rng(seed)
    for weight in model.weights:
        # Positive: a variance is.
        weight.assign(draw.uniform(0.5, 1.5, weight.shape))
    return model


def step(model: Any, images: np.ndarray, *, training: bool) -> list[np.ndarray]:
    """Return outputs, gradients of all weights that have one, and the statistics afterwards."""
    trainable = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        outputs = model(images, training=training)
        loss = tf.reduce_sum(outputs**2)
    gradients = tape.gradient(loss, trainable)
    return [np.asarray(value) for value in (outputs, *gradients, *model.non_trainable_variables)]


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 9),
    options=st.fixed_dictionaries(
        {"scale": st.booleans(), "center": st.booleans(), "momentum": st.floats(0.1, 0.99)}
    ),
    training=st.booleans(),
)
@pytest.mark.long(reason="traces networks")
def test_outputs_gradients_and_statistics_are_those_of_keras(
    seed: int, rows: int, options: dict[str, Any], training: bool
) -> None:
    images = np.random.default_rng(seed).normal(3, 2, (rows, 4, 5, 3)).astype(np.float32)
    usual, fused = (build(seed, "float32", **options) for _ in range(2))
    modules.models.fuse_batch_norms(fused, training=training)
    of_keras, of_fused = (step(model, images, training=training) for model in (usual, fused))
    # The gradient of a bias before a normalization is a sum that cancels: it is zero but for rounding.
    largest = max(abs(values).max() for values in of_keras)
    for expected, value in zip(of_keras, of_fused, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("training", [True, False])
def test_the_fused_operation_is_used_only_where_it_suits(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = mock.Mock(wraps=tf.compat.v1.nn.fused_batch_norm)
    monkeypatch.setattr(tf.compat.v1.nn, "fused_batch_norm", fused)
    model = build(1, "mixed_bfloat16")
    modules.models.fuse_batch_norms(model, training=training)
    # Of the training's two layers, one is frozen: in inference there is no gradient, so that it is fused as well.
    for in_training, modes in ((True, [training]), (False, [] if training else [False, False])):
        fused.reset_mock()
        outputs = model(np.ones((2, 4, 5, 3), np.float32), training=in_training)
        assert outputs.shape == (2, 4, 5, 2)
        assert [call.kwargs["is_training"] for call in fused.call_args_list] == modes


def test_values_without_places_are_left_to_keras() -> None:
    features = keras.Input((3,))
    model = keras.Model(features, keras.layers.BatchNormalization()(features))
    before = model(np.ones((2, 3), np.float32), training=True)
    modules.models.fuse_batch_norms(model, training=True)
    np.testing.assert_allclose(model(np.ones((2, 3), np.float32), training=True), before)


@pytest.mark.filterwarnings("ignore:__array__")  # keras calls numpy in an old way when it saves
def test_a_saved_model_does_not_change(tmp_path: Path) -> None:
    model = build(1, "float32")
    modules.models.fuse_batch_norms(model, training=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=True)  # stock layers only
    images = np.random.default_rng(1).normal(size=(2, 4, 5, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded(images), model(images))


def network_of_convolutions() -> Any:
    """Return a training model with convolutions before and without a normalization."""
    keras.utils.set_random_seed(1)
    image, seed = keras.Input((6, 6, 3), dtype="uint8"), keras.Input((), dtype="int64")
    x = keras.layers.Rescaling(1 / 255)(image)
    for name, options, frozen in (
        ("cancelled", {}, False),
        ("activated", {"activation": "relu"}, False),
        ("without", {"use_bias": False}, False),
        ("frozen", {}, True),
        ("shared", {}, False),
    ):
        y = keras.layers.Conv2D(4, 3, padding="same", name=name, **options)(x)
        x = keras.layers.BatchNormalization(trainable=not frozen)(y)
    x = keras.layers.Add()([x, y])  # what "shared" computes is used twice
    x = keras.layers.BatchNormalization()(keras.layers.DepthwiseConv2D(3, name="depth")(x))
    x = keras.layers.Conv2D(4, 3, name="last")(x)
    model = keras.Model([image, seed], keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    for weight in model.trainable_variables:
        weight.assign(np.random.default_rng(2).uniform(0.5, 1.5, weight.shape))
    return model


def test_a_step_without_gradients_of_cancelled_biases_is_the_same() -> None:
    objective = modules.objective.ClassObjective(2)
    draw = np.random.default_rng(3)
    part = {
        "image": tf.constant(draw.integers(0, 256, (8, 6, 6, 3)), tf.uint8),
        "label": tf.constant(np.arange(8) % 2, tf.int32),
        "weight": tf.ones(8),
        "key": tf.range(8, dtype=tf.int64),
    }
    gradients = []
    for skips in (False, True):
        model = network_of_convolutions()
        serving = keras.Model(model.inputs[0], model.outputs)
        names = {bias.path for bias in modules.models.cancelled_biases(model)}
        assert names == {"cancelled/bias", "depth/bias"}
        step = modules.train_step.TrainStep(
            tf.distribute.get_strategy(),
            modules.models.PatchModel(model, serving),
            keras.optimizers.SGD(0.1),
            modules.train_step.StepSettings(
                batch_size=8,
                objective=objective,
                class_weight=np.ones(2, np.float32),
                skip_bias_gradients=skips,
            ),
        )
        (sums, _, _), _ = step.gradients(part, tf.constant(0, tf.int64), 8, 8)
        gradients.append([np.asarray(value) for value in sums])
    largest = max(abs(values).max() for values in gradients[0])
    for weight, usual, skipped in zip(model.trainable_variables, *gradients, strict=True):
        np.testing.assert_allclose(skipped, usual, atol=1e-5 * largest)
        assert (skipped == 0).all() == (weight.path in names), weight.path
