"""Stain normalisation of batches in numpy, on the processor that loads them. Needs TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.augmentation import to_uint8
from histopipe.dataset.options import StainNorm
from histopipe.dataset.stain_normalisation import StainNormaliser, normalising_by
from histopipe.store.stains import StainFit
from histopipe.store.store import Store


def one_slide_normaliser(
    fit: StainFit, method: StainNorm
) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    """What gives (B, H, W, 3) uint8 images of one slide, that is stained as `fit` says, the reference's stain."""
    with tf.device("CPU"):
        change, by = normalising_by(fit, method)

    def normalised(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        with tf.device("CPU"):
            changes = tf.repeat(by[None], len(images), axis=0)
            pixels: NDArray[np.uint8] = to_uint8(change(images, changes)).numpy()
        return pixels

    return normalised


def numpy_normaliser(
    stores: Sequence[Store], method: StainNorm
) -> Callable[[NDArray[np.uint8], NDArray[np.int64]], NDArray[np.uint8]]:
    """What gives (B, H, W, 3) uint8 images of keys (B,) the reference's stain.

    Raises:
        NothingToDo: a slide's stain has not been measured.
    """
    with tf.device("CPU"):
        normalise = StainNormaliser(stores, method)

    def normalised(images: NDArray[np.uint8], keys: NDArray[np.int64]) -> NDArray[np.uint8]:
        with tf.device("CPU"):
            pixels: NDArray[np.uint8] = to_uint8(normalise(images, tf.constant(keys))).numpy()
        return pixels

    return normalised
