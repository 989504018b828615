"""Preprocessing of a preset as stock Keras layers, computed on the device: resize, crop and normalize."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from histopipe.pretrained.presets import Preprocessing
from histopipe.pretrained.resampling import resampling_matrix

_PIL_ONE = 1 << 22


def prepare(image: keras.KerasTensor, settings: Preprocessing) -> keras.KerasTensor:
    """Return (B, S, S, 3) inputs of a network for (B, H, H, 3) uint8 RGB images."""
    exact = keras.config.dtype_policy().variable_dtype
    if image.shape[1] != settings.resized:
        image = _resized(image, settings)
    first = (settings.resized - settings.size) // 2
    if settings.resized != settings.size:
        last = settings.resized - settings.size - first
        image = layers.Cropping2D(((first, last), (first, last)), dtype=exact)(image)
    std = np.array(settings.std)
    scale, offset = 1 / (255 * std), -np.array(settings.mean) / std
    return layers.Rescaling(scale.tolist(), offset.tolist(), dtype=exact, name="normalize")(image)


def as_float(image: keras.KerasTensor) -> keras.KerasTensor:
    """Return images as floating-point numbers from 0 to 255."""
    return layers.Rescaling(1.0, dtype=keras.config.dtype_policy().variable_dtype)(image)


def _resized(image: keras.KerasTensor, settings: Preprocessing) -> keras.KerasTensor:
    """Resize as PIL does, bit for bit: first along rows, then along columns, each rounded to 8 bits.

    Two products of matrices, because TensorFlow's resizing does not round between both passes, and XLA cannot compile
    it. In float64, since GPUs compute float32 products with 10 bits (TensorFloat-32).
    """
    source, target = image.shape[1], settings.resized
    matrix = resampling_matrix(source, target, settings.interpolation)
    # PIL's weights have 22 bits after the point, rounded half away from zero. Sums are exact in float64.
    matrix = np.trunc(matrix * _PIL_ONE + np.copysign(0.5, matrix)) / _PIL_ONE
    image = ops.cast(image, "float64")
    for equation, shape in (
        ("bhwc,wx->bhxc", (source, target, 3)),
        ("bhwc,hy->bywc", (target, target, 3)),
    ):
        product = layers.EinsumDense(equation, shape, dtype="float64", trainable=False)
        image = ops.floor(ops.clip(product(image), 0, 255) + 0.5)
        product.set_weights([matrix])
    return image
