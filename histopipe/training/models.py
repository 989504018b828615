"""The models: a small convolutional network, and every network of `keras.applications`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from histopipe.dataset.augmentation import hash31
from histopipe.errors import UsageError
from histopipe.runs.config import Precision
from histopipe.training.memory import is_out_of_memory

SMALL_CNN = "small-cnn"
_HASHES = 1 << 31
LOGITS = "logits"
"""Name of the last layer with weights, in training and in saved models."""


@dataclass(frozen=True, slots=True)
class PatchModel:
    """A training and a serving model that share their weights."""

    training: keras.Model
    """(image (B, H, W, 3) uint8, seed (B,) int64) to logits (B, C), with dropout per sample."""
    serving: keras.Model
    """Image (B, H, W, 3) uint8 RGB to probabilities (B, C), with only stock layers. Saved in `model.keras`."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.serving.output_shape[-1])

    @property
    def batch_norms(self) -> list[keras.layers.BatchNormalization]:
        """Batch normalization layers, including nested ones."""
        layers = self.training._flatten_layers()
        return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]

    def synchronize(self, wanted: bool) -> None:
        """Compute batch statistics over all replicas, or per replica."""
        for layer in self.batch_norms:
            layer.synchronized = wanted

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
    classes: int,
    dropout: float,
    weights: str = "none",
    precision: Precision = "float32",
) -> PatchModel:
    """Build a patch classifier.

    The name is "small-cnn", or a model of `keras.applications` in any spelling (resnet50, EfficientNetB0). Weights are
    "none", "imagenet", or a weights file of the backbone. Dropout is before the last layer, which is at least float32.

    Raises:
        UsageError: there is no such model, its weights are missing or do not fit, or patches are too small.
    """
    with dtype_policy(precision):  # `keras.applications` has no argument for it
        return _build(name, patch_size, classes, dropout, weights)


@contextlib.contextmanager
def dtype_policy(precision: Precision) -> Iterator[None]:
    """Build layers with this dtype policy of Keras."""
    usual = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(usual)


def build_encoder(name: str, *, patch_size: int, weights: str) -> keras.Model:
    """Build a network of `keras.applications` without its last layer: (B, H, H, 3) uint8 RGB to (B, D) features.

    Name and weights as for `build_model`.

    Raises:
        UsageError: there is no such network, its weights are missing or do not fit, or patches are too small.
    """
    image = keras.Input((patch_size, patch_size, 3), dtype="uint8", name="image")
    others = "a run's folder", "an ONNX file"
    return keras.Model(image, _application(name, image, weights, *others), name="encoder")


def _build(name: str, patch_size: int, classes: int, dropout: float, weights: str) -> PatchModel:
    image = keras.Input((patch_size, patch_size, 3), dtype="uint8", name="image")
    seed = keras.Input((), dtype="int64", name="seed")
    features = (
        _small_cnn(image, weights)
        if name == SMALL_CNN
        else _application(name, image, weights, SMALL_CNN)
    )
    # At least 32 bits, also with 16-bit precision: sums and probabilities need it.
    last = keras.config.dtype_policy().variable_dtype
    head = keras.layers.Dense(classes, dtype=last, name=LOGITS)
    training = head(SampleDropout(dropout)(features, seed))
    serving = keras.layers.Softmax(dtype=last, name="probability")(
        head(keras.layers.Dropout(dropout)(features))
    )
    model = PatchModel(
        keras.Model([image, seed], training, name="training"),
        keras.Model(image, serving, name=name.replace("-", "_")),
    )
    model.synchronize(True)
    return model


def _small_cnn(image: keras.KerasTensor, weights: str) -> keras.KerasTensor:
    """One convolution block and one dense layer: enough to test a pipeline."""
    if weights != "none":
        raise UsageError(
            f"--weights {weights}", expected=f"none: {SMALL_CNN} has no trained weights"
        )
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(image)
    x = keras.layers.Conv2D(32, 7, strides=2, padding="same", activation="relu")(x)
    x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.layers.Dense(64, activation="relu")(x)


def _application(
    name: str, image: keras.KerasTensor, weights: str, *others: str
) -> keras.KerasTensor:
    build = _find_application(name, others)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Keras prints downloads
            backbone = build(
                include_top=False,
                weights="imagenet" if weights == "imagenet" else None,
                input_shape=tuple(image.shape[1:]),
                pooling="avg",
            )
        if weights not in ("none", "imagenet"):
            backbone.load_weights(weights)
    except Exception as error:  # Keras raises a bare Exception if a download fails
        if is_out_of_memory(error):
            raise
        todo = None
        if weights == "imagenet":
            # As documented by Keras, which has no public function for it.
            home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
            todo = (
                "imagenet weights are downloaded once; without a network, copy the file named above to "
                f"{home / 'models'}, or pass it as --weights FILE"
            )
        raise UsageError(
            f"--model {name} --weights {weights}", found=str(error).split("\n")[0][:300], todo=todo
        ) from error
    preprocess = sys.modules[build.__module__].preprocess_input
    features = backbone(_preprocessed(image, preprocess))
    return keras.layers.Flatten()(features) if len(features.shape) > 2 else features


def _find_application(name: str, others: Sequence[str]) -> Callable[..., keras.Model]:
    plain = {n.lower(): n for n in dir(keras.applications) if n[0].isupper()}
    found = plain.get(name.lower().replace("-", "").replace("_", ""))
    if found is None:
        raise UsageError(
            f"--model {name}", found="no such model",
            expected=", ".join([*others, *sorted(plain.values())]),
        )  # fmt: skip
    build: Callable[..., keras.Model] = getattr(keras.applications, found)
    return build


def _preprocessed(image: keras.KerasTensor, preprocess: Callable[[Any], Any]) -> keras.KerasTensor:
    """Return the preprocessing of a network as stock layers, so that a saved model takes uint8 RGB.

    Every `preprocess_input` of Keras is a scale, an offset and an optional change from RGB to BGR. They are measured on
    four colours.
    """
    colours = np.concatenate([np.zeros((1, 3)), 255 * np.eye(3)]).reshape(4, 1, 1, 3)
    seen = np.asarray(preprocess(colours.astype(np.float32))).reshape(4, 3)
    offset, matrix = seen[0], (seen[1:] - seen[0]) / 255  # row: channel in, column: channel out
    swapped = matrix[0, 0] == 0 and matrix[0, 2] != 0
    scale = np.diag(matrix[::-1] if swapped else matrix)
    if not np.allclose(matrix, np.diag(scale)[::-1] if swapped else np.diag(scale), atol=1e-6):
        raise UsageError("--model", found="preprocessing other than a scale and an offset")
    if swapped:
        image = keras.ops.flip(image, axis=-1)
    return keras.layers.Rescaling(scale.tolist(), offset=offset.tolist())(image)


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
