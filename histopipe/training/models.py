"""Patch classifiers: a backbone, dropout, and a last layer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from histopipe.dataset.augmentation import hash31
from histopipe.runs.config import Precision
from histopipe.training.backbones import build_backbone
from histopipe.training.fine_tuning import rate_factors, set_trainable
from histopipe.training.objective import Objective

_HASHES = 1 << 31
_LEAST_MOMENTUM = 0.8
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
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Origin and preprocessing of the backbone, as JSON values."""

    @property
    def batch_norms(self) -> list[keras.layers.BatchNormalization]:
        """Batch normalization layers, including nested ones."""
        layers = self.training._flatten_layers()
        return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]

    def synchronize(self, synchronized: bool) -> None:
        """Compute batch statistics over all replicas, or per replica."""
        for layer in self.batch_norms:
            layer.synchronized = synchronized

    def save(self, path: Path) -> None:
        """Save the serving model, for any backend of Keras: only TensorFlow has batch statistics over replicas."""
        self.synchronize(False)
        try:
            self.serving.save(path)
        finally:
            self.synchronize(True)


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
        training = head(SampleDropout(dropout)(features, seed))
        serving = objective.layer(last)(head(keras.layers.Dropout(dropout)(features)))
        trained = keras.Model([image, seed], training, name="training")
        factors = rate_factors(backbone.core, trained, layer_decay) if layer_decay < 1 else ()
        saved_name = re.sub(r"\W", "_", f"model_{Path(name).stem}", flags=re.ASCII)
        model = PatchModel(
            trained, keras.Model(image, serving, name=saved_name), factors, backbone.facts
        )
        model.synchronize(True)
        return model


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
        """Return (B, F) features; kept ones are scaled up to preserve the mean. Seeds are (B,) int64."""
        if not training or self.rate == 0:
            return features
        places = tf.range(tf.shape(features)[-1], dtype=tf.int64)
        draws = hash31(hash31(seeds, 2)[:, None] ^ hash31(places, 3)[None, :], 4)
        keep = tf.cast(draws >= int(self.rate * _HASHES), features.dtype)
        return features * keep / (1 - self.rate)
