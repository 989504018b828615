"""Stain normalization of batches on the CPU, in the threads that load them. Loads TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.augmentation import to_uint8
from histopipe.dataset.options import StainNorm
from histopipe.dataset.stain_normalization import StainNormalizer, normalizing_by
from histopipe.store.stains import StainFit
from histopipe.store.store import Store


def slide_normalizer(
    fit: StainFit, method: StainNorm
) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    """Return a function that normalizes (B, H, W, 3) uint8 images of one slide by its stain fit."""
    with tf.device("CPU"):
        change, by = normalizing_by(fit, method)

    def normalize(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        with tf.device("CPU"):
            changes = tf.repeat(by[None], len(images), axis=0)
            pixels: NDArray[np.uint8] = to_uint8(change(images, changes)).numpy()
        return pixels

    return normalize


def store_normalizer(
    stores: Sequence[Store], method: StainNorm
) -> Callable[[NDArray[np.uint8], NDArray[np.int64]], NDArray[np.uint8]]:
    """Return a function that normalizes (B, H, W, 3) uint8 images with (B,) keys by the stains that stores hold.

    Raises:
        NothingToDo: the stain of a slide has not been measured.
    """
    with tf.device("CPU"):
        normaliser = StainNormalizer(stores, method)

    def normalize(images: NDArray[np.uint8], keys: NDArray[np.int64]) -> NDArray[np.uint8]:
        with tf.device("CPU"):
            pixels: NDArray[np.uint8] = to_uint8(normaliser(images, tf.constant(keys))).numpy()
        return pixels

    return normalize
