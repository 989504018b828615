"""Stain normalization of batches on the CPU, in the threads that load them. Loads TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.augmentation import to_uint8
from histopipe.dataset.options import StainNorm
from histopipe.dataset.stain_normalization import StainNormalizer, normalizing_by
from histopipe.store.stains import StainFit
from histopipe.store.store import Store

Normalizer = Callable[..., NDArray[np.uint8]]


def slide_normalizer(fit: StainFit, method: StainNorm) -> Normalizer:
    """Return a function that normalizes (B, H, W, 3) uint8 images of one slide by its stain fit."""
    with tf.device("CPU"):
        change, by = normalizing_by(fit, method)
    return _on_cpu(lambda images: change(images, tf.repeat(by[None], len(images), axis=0)))


def store_normalizer(stores: Sequence[Store], method: StainNorm) -> Normalizer:
    """Return a function that normalizes (B, H, W, 3) uint8 images with (B,) keys by the stains that stores hold.

    Raises:
        NothingToDo: the stain of a slide has not been measured.
    """
    with tf.device("CPU"):
        normalizer = StainNormalizer(stores, method)
    return _on_cpu(lambda images, keys: normalizer(images, tf.constant(keys)))


def _on_cpu(change: Callable[..., tf.Tensor]) -> Normalizer:
    def normalize(*arrays: NDArray[Any]) -> NDArray[np.uint8]:
        with tf.device("CPU"):
            pixels: NDArray[np.uint8] = to_uint8(change(*arrays)).numpy()
        return pixels

    return normalize
