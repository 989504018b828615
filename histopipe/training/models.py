"""Patch classifiers, a backbone, dropout and a last layer; fused batch normalization, and optimizers."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from histopipe.dataset.transforms import hash31
from histopipe.errors import UsageError
from histopipe.runs.config import Precision, TrainConfig
from histopipe.runs.defaults import parse_trainable
from histopipe.training.backbones import build_backbone
from histopipe.training.objective import Objective

_CONVOLUTIONS = (keras.layers.Conv2D, keras.layers.DepthwiseConv2D)
_DTYPES = (tf.float32, tf.bfloat16, tf.float16)


def batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the batch normalization layers of a model, including nested ones."""
    layers = model._flatten_layers()
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


def cancelled_biases(model: keras.Model) -> list[keras.Variable]:
    """Return the biases whose gradient is zero, but for rounding: batch normalization follows, and subtracts the mean.

    Their sums over all activations took a fifth of a step of ResNet50 on an H100.
    """
    biases = []
    for norm in batch_norms(model):
        layer = norm.input._keras_history.operation
        is_linear = (
            isinstance(layer, _CONVOLUTIONS) and layer.activation is keras.activations.linear
        )
        # Frozen layers subtract another mean. Axes are those of the channels.
        if norm.trainable and norm.axis in (-1, 3) and is_linear and layer.use_bias:
            biases += [layer.bias] if len(layer._outbound_nodes) == 1 else []
    return biases


def fuse_batch_norms(model: keras.Model, *, training: bool) -> None:
    """Let the layers on images use the fused operation: in training with gradients, or else in inference without any.

    Keras composes it of a dozen operations on float32, each of which reads and writes all activations: an H100 trains a
    ResNet50 with bfloat16 on 410 patches/s then, and on 663 with this (docs/design/foundation-models.md). Only for one
    replica: it has no statistics over several. Results differ by rounding. Files of the model stay the same.
    """
    for layer in batch_norms(model):
        if layer.axis in (-1, 3) and not layer.renorm:
            layer.call = partial(_call, layer, training)


def _call(
    layer: keras.layers.BatchNormalization,
    fuses_training: bool,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    by_batch = bool(training and layer.trainable)
    # In inference it has no deterministic gradient, which frozen layers need.
    suits = by_batch == fuses_training and mask is None
    if not suits or inputs.shape.rank != 4 or inputs.dtype not in _DTYPES:
        return type(layer).call(layer, inputs, training=training, mask=mask)
    mean, variance = (
        keras.ops.cast(statistic, "float32")
        for statistic in (layer.moving_mean, layer.moving_variance)
    )
    arguments: dict[str, Any] = {
        "scale": keras.ops.cast(layer.gamma, "float32") if layer.scale else tf.ones_like(mean),
        "offset": keras.ops.cast(layer.beta, "float32") if layer.center else tf.zeros_like(mean),
        "epsilon": layer.epsilon,
        "is_training": by_batch,
    }
    fused = tf.compat.v1.nn.fused_batch_norm
    if not by_batch:
        return fused(inputs, mean=mean, variance=variance, **arguments)[0]
    outputs, batch_mean, batch_variance = fused(inputs, **arguments)
    count = tf.cast(tf.reduce_prod(tf.shape(inputs)[:-1]), tf.float32)
    batch_variance *= (count - 1) / count  # the operation divides by count - 1, Keras by count
    for variable, before, now in (
        (layer.moving_mean, mean, batch_mean),
        (layer.moving_variance, variance, batch_variance),
    ):
        variable.assign(before * layer.momentum + now * (1 - layer.momentum))
    return outputs


_BLOCK = re.compile(r"(?P<block>(conv\d+_)?block_?\d+[a-z]?)_")
"""Names of layers with their block: here, and in ResNet, DenseNet, EfficientNet, VGG and others."""
_NORMS = (keras.layers.BatchNormalization, keras.layers.LayerNormalization)


def set_trainable(core: keras.Model, trainable: str) -> bool:
    """Freeze the weights of a backbone for a value of `--trainable`. Return whether all of it is frozen.

    "all"; "head": nothing of the backbone; "last:N": the last N blocks, or layers if the network has no blocks;
    "lora:R": low-rank matrices of rank R, added to the queries and values of the attention.

    Source:
        Hu et al. 2022, LoRA: Low-Rank Adaptation of Large Language Models.

    Raises:
        UsageError: the network has no attention layers for "lora", or fewer blocks than N.
    """
    kind, number = parse_trainable(trainable)
    match kind:
        case "head":
            core.trainable = False
        case "last":
            blocks = _blocks(core)
            if number > len(blocks):
                raise UsageError(
                    f"--trainable {trainable}",
                    found=f"{len(blocks)} blocks or layers in {core.name}",
                    expected="at most that many",
                )
            for layer in itertools.chain(*blocks[: len(blocks) - number]):
                layer.trainable = False
        case "lora":
            parts = [x for x in _leaves(core) if x.name.rpartition("_")[2] in ("query", "value")]
            if not parts or not all(isinstance(part, keras.layers.Dense) for part in parts):
                raise UsageError(
                    f"--trainable {trainable}",
                    found=f"no attention layers in {core.name}",
                    expected="a Vision Transformer of a preset",
                    todo="use head or last:N",
                )
            for weight in core.variables:
                weight.trainable = False
            for part in parts:
                part.enable_lora(number)
    return kind == "head"


def changing_state(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that training changes without gradients: batch statistics and the states of seeds."""
    frozen = {id(weight) for weight in frozen_weights(model)}
    return [weight for weight in model.non_trainable_variables if id(weight) not in frozen]


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Return the weights that training does not change, including the batch statistics of frozen layers."""
    frozen: list[keras.Variable] = []
    for layer in model._flatten_layers():
        if not isinstance(layer, keras.Model):
            weights = layer._trainable_variables
            frozen += (
                [weight for weight in weights if not weight.trainable]
                if layer.trainable
                else [*weights, *layer._non_trainable_variables]
            )
    return frozen


def values_of(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Return the values of variables."""
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def digest(weights: Iterable[keras.Variable]) -> str:
    """Return the SHA-256 of weights, read one at a time."""
    checksum = hashlib.sha256()
    for weight in weights:
        checksum.update(np.ascontiguousarray(weight.value).tobytes())
    return checksum.hexdigest()


def frozen_digest(model: keras.Model, description: Mapping[str, Any]) -> str:
    """Return a digest of what training does not change: frozen weights, preprocessing, architecture.

    `description` is that of a setup. Without the names of files, which may change.
    """
    backbone = description.get("backbone", {})
    described = {name: backbone[name] for name in backbone.keys() - {"weights", "file"}}
    content = json.dumps([digest(frozen_weights(model)), described], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def check_weights(variables: Iterable[keras.Variable], where: str, todo: str) -> None:
    """Raise a UsageError if a variable is NaN or infinite. Losses do not show it: a ReLU layer turns NaN into 0."""
    for variable in variables:
        value = tf.convert_to_tensor(variable.value)
        if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value)):
            raise UsageError(
                f"{where}: the weights {variable.path} are not finite",
                expected="numbers",
                todo=todo,
            )


def rate_factors(core: keras.Model, model: keras.Model, decay: float) -> list[float]:
    """Return the factor of the learning rate for each trainable weight of a model with this backbone.

    1 for the head, `decay` for the last block, `decay` squared for the block before it, and so on.

    Source:
        Clark et al. 2020, ELECTRA, layer-wise learning-rate decay.
    """
    factors = {
        id(weight): decay**depth
        for depth, block in enumerate(reversed(_blocks(core)), 1)
        for layer in block
        for weight in layer.variables
    }
    return [factors.get(id(weight), 1.0) for weight in model.trainable_variables]


def _blocks(core: keras.Model) -> list[list[keras.layers.Layer]]:
    """Return the layers with weights by block, first to last.

    A layer without a block in its name is a block, with the norm that follows. Those after the last block, such as the
    final norm of a Vision Transformer, are part of it.
    """
    names: list[str] = []
    layers = list(_leaves(core))
    for layer in layers:
        match = _BLOCK.match(layer.name)
        follows = names and not match and isinstance(layer, _NORMS)
        names.append(names[-1] if follows else match["block"] if match else layer.name)
    blocks = [
        [layer for layer, _ in block]
        for _, block in itertools.groupby(zip(layers, names, strict=True), lambda pair: pair[1])
    ]
    last = max(
        (place for place, block in enumerate(blocks) if _BLOCK.match(block[0].name)), default=None
    )
    if last is not None:
        blocks[last:] = [list(itertools.chain(*blocks[last:]))]
    return blocks


def _leaves(model: keras.Model) -> Iterator[keras.layers.Layer]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _leaves(layer)
        elif layer.weights:
            yield layer


_HASHES = 1 << 31
"""Number of values of `hash31`."""
_LEAST_MOMENTUM = 0.8
"""With less, the statistics would be those of fewer than five batches."""
LOGITS = "logits"
"""Name of the last layer with weights, in training and in saved models."""


@dataclass(frozen=True, slots=True)
class PatchModel:
    """A training and a serving model that share their weights."""

    training: keras.Model
    """(image (B, H, W, 3) uint8, seed (B,) int64) to logits (B, C), with dropout per sample."""
    serving: keras.Model
    """Image (B, H, W, 3) uint8 RGB to outputs (B, C), such as probabilities. Saved in `model.keras`."""
    rate_factors: Sequence[float] = ()
    """Factor of the learning rate for each trainable weight; empty: 1."""
    description: Mapping[str, Any] = field(default_factory=dict)
    """Origin and preprocessing of the backbone, as JSON values."""
    head: PatchModel | None = None
    """If nothing else is trained: the last layer of both, with (B, D) features in the place of images."""
    features: keras.Model | None = None
    """And the frozen network, from images to these features."""

    @property
    def batch_norms(self) -> list[keras.layers.BatchNormalization]:
        """Batch normalization layers, including nested ones."""
        return batch_norms(self.training)


def build_model(
    name: str,
    *,
    patch_size: int,
    objective: Objective,
    dropout: float,
    weights: str = "none",
    precision: Precision = "float32",
    trainable: str = "all",
    layer_decay: float = 1.0,
) -> PatchModel:
    """Build a patch model from a backbone, dropout, and a last layer of at least float32.

    Name and weights as for `build_backbone`; `trainable` as for `set_trainable`; `layer_decay` as for `rate_factors`.

    Raises:
        UsageError: there is no such model, its weights are missing or do not fit, or patches are too small.
    """
    with dtype_policy(precision):  # `keras.applications` has no argument for it
        image = keras.Input((patch_size, patch_size, 3), dtype="uint8", name="image")
        seed = keras.Input((), dtype="int64", name="seed")
        backbone = build_backbone(name, patch_size=patch_size, weights=weights, training=True)
        frozen = set_trainable(backbone.core, trainable)
        features = backbone(image, **({"training": False} if frozen else {}))
        # At least 32 bits, also with 16-bit precision: sums and probabilities need it.
        last = keras.config.dtype_policy().variable_dtype
        head = keras.layers.Dense(objective.outputs, dtype=last, name=LOGITS)
        dropped = SampleDropout(dropout)(features, seed)
        trained = keras.Model([image, seed], head(dropped), name="training")
        serving = objective.layer(last)(head(keras.layers.Dropout(dropout)(features)))
        of_head = _on_features(head, features.shape[-1], objective, dropout) if frozen else None
        saved_name = re.sub(r"\W", "_", f"model_{Path(name).stem}", flags=re.ASCII)
        return PatchModel(
            trained,
            keras.Model(image, serving, name=saved_name),
            rate_factors(backbone.core, trained, layer_decay) if layer_decay < 1 else (),
            backbone.description,
            of_head,
            keras.Model(image, features) if frozen else None,
        )


def build_head(dimension: int, *, objective: Objective, dropout: float) -> PatchModel:
    """Build a patch model on (B, dimension) float32 features in the place of images."""
    head = keras.layers.Dense(objective.outputs, dtype="float32", name=LOGITS)
    model = _on_features(head, dimension, objective, dropout)
    return replace(model, head=model)


def _on_features(
    head: keras.layers.Dense, dimension: int, objective: Objective, dropout: float
) -> PatchModel:
    """Return models of a last layer on features."""
    features = keras.Input((dimension,), name="features")
    seed = keras.Input((), dtype="int64", name="seed")
    return PatchModel(
        keras.Model([features, seed], head(SampleDropout(dropout)(features, seed))),
        keras.Model(features, objective.layer(head.compute_dtype)(head(features))),
    )


def without_last_layer(model: keras.Model) -> keras.Model:
    """Return a patch model that returns the (B, D) input of its last layer, or its mean. ValueError if it has none."""
    features = model.get_layer(LOGITS).input
    is_map = len(features.shape) > 2
    return keras.Model(
        model.input, keras.layers.GlobalAveragePooling2D()(features) if is_map else features
    )


def limit_momentum(layers: Iterable[keras.layers.BatchNormalization], steps_per_epoch: int) -> None:
    """Lower the momentum of batch normalization, so that an epoch replaces 99 % of the first statistics.

    Keras' 0.99 needs 460 steps for it. With short epochs, validation would use the statistics of the first weights.
    """
    for layer in layers:
        layer.momentum = min(layer.momentum, max(_LEAST_MOMENTUM, 0.01 ** (1 / steps_per_epoch)))


@contextlib.contextmanager
def dtype_policy(precision: Precision) -> Iterator[None]:
    """Build layers with this dtype policy of Keras."""
    usual = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(usual)


class SampleDropout(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
    """Drops each feature of each sample with probability `rate`, by a hash of the sample's seed.

    Keras' layer draws the same mask on each replica, so several replicas would not equal one. This layer is for
    training only. A saved model has the stock `Dropout` in its place.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def call(self, features: tf.Tensor, seeds: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Return (B, …, F) features; kept ones are scaled up to preserve the mean. Seeds are (B,) int64."""
        if not training or self.rate == 0:
            return features
        places = tf.range(tf.shape(features)[-1], dtype=tf.int64)
        draws = hash31(hash31(seeds, 2)[:, None] ^ hash31(places, 3)[None, :], 4)
        keep = tf.cast(draws >= int(self.rate * _HASHES), features.dtype)
        while len(keep.shape) < len(features.shape):  # the same channels of all pixels of a map
            keep = keep[:, None]
        return features * keep / (1 - self.rate)


_FIRST = 2.0**15
"""First scale, as in Keras. A scale that is too large costs one skipped step per halving."""
_GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


def make_optimizer(config: TrainConfig, steps_per_epoch: int) -> keras.Optimizer:
    """Return the optimizer of a run. Its step count, which sets the learning rate, is a variable and is resumed.

    Raises:
        UsageError: the warm-up is longer than the training.
    """
    optimizers = {
        "adam": keras.optimizers.Adam,
        "adamw": partial(keras.optimizers.AdamW, weight_decay=config.weight_decay),
        "adagrad": keras.optimizers.Adagrad,
        "sgd": keras.optimizers.SGD,
    }
    return optimizers[config.optimizer](_learning_rate(config, config.epochs * steps_per_epoch))


def _learning_rate(
    config: TrainConfig, steps: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    if config.schedule == "constant":
        return config.learning_rate
    if config.warmup_steps >= steps:
        raise UsageError(
            "--warmup-steps",
            found=config.warmup_steps,
            expected=f"less than the {steps} steps of {config.epochs} epochs",
        )
    if not config.warmup_steps:  # with a warm-up of 0 steps, a graph rounds rates differently
        return keras.optimizers.schedules.CosineDecay(config.learning_rate, steps)
    return keras.optimizers.schedules.CosineDecay(
        0.0,
        steps - config.warmup_steps,
        warmup_target=config.learning_rate,
        warmup_steps=config.warmup_steps,
    )


class LossScale:
    """Factor on the loss that prevents small gradients from vanishing in float16.

    It doubles after many steps without an overflow. It halves at each overflow, and the step is skipped. Keras'
    `LossScaleOptimizer` checks only the first replica, so weights became NaN.
    """

    def __init__(self) -> None:
        self.variables = [
            keras.Variable(
                value, trainable=False, dtype="float32", aggregation="only_first_replica", name=name
            )
            for name, value in (("loss_scale", _FIRST), ("finite_steps", 0.0))
        ]
        self._scale, self._finite_steps = self.variables

    @property
    def value(self) -> tf.Tensor:
        """Current factor, scalar float32."""
        return tf.convert_to_tensor(self._scale.value)

    def adapt(self, finite: tf.Tensor) -> None:
        """Update the factor, on each replica. `finite`: all gradients of the step, summed over replicas, are finite."""
        steps = tf.where(finite, tf.convert_to_tensor(self._finite_steps.value) + 1, 0.0)
        grown = steps >= _GROWTH_STEPS
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        self._scale.assign(tf.maximum(self.value * factor, 1.0))
        self._finite_steps.assign(tf.where(grown, 0.0, steps))
