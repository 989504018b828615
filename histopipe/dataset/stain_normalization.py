"""Stain normalization of batches to one reference, as TensorFlow functions.

Each patch is normalized with the fit of its whole slide. So a patch of only fat or only nuclei is not stretched to
average tissue. `stain_fit` measures the fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.augmentation import from_density, to_density, to_uint8
from histopipe.dataset.options import StainNorm
from histopipe.dataset.stain_fit import LMS_TO_LAB, RGB_TO_LMS
from histopipe.errors import NothingToDo
from histopipe.store.record import StainFit
from histopipe.store.store import Store
from histopipe.system.output import some

REFERENCE = StainFit(
    0,
    (np.array([8.63234435, -0.11501964, 0.03868433]) / np.log(10)).astype(np.float32),
    (np.array([0.57506023, 0.10403329, 0.01364062]) / np.log(10)).astype(np.float32),
    np.array([[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]], np.float32),
    np.array([1.9705, 1.0308], np.float32),
)
"""The stain that slides are normalized to.

Source:
    Mean and deviation: the reference of HistomicsTK, from slide TCGA-A2-A3XS (there with natural logarithms).
    Vectors and maxima: the values that implementations of Macenko's method have in common.
"""


Normalize = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""Returns (B, H, W, 3) float32, 0 to 255, from (B, H, W, 3) uint8 and keys (B,) int64."""


def stain_normalizer(stores: Sequence[Store], method: StainNorm) -> Normalize:
    """Return a function that normalizes the patches of several stores to the stain of `REFERENCE`.

    Raises:
        NothingToDo: a complete slide has no stain fit.
    """
    change, change_of = _METHODS[method]
    fits = {(o, n): fit for o, store in enumerate(stores) for n, fit in store.stains().items()}
    for ordinal, store in enumerate(stores):
        missing = [r.id for n, r in store.complete.items() if r.stored and (ordinal, n) not in fits]
        if missing:
            raise NothingToDo(
                f"{store.path}: slides without a measured stain",
                found=some(missing, 3),
                todo=f"run `histopipe stains {store.path}`; slides without enough tissue cannot be normalized",
            )
    # Searched by the upper half of a key: stores and slides are in ascending order.
    slides = tf.constant(np.array([o << 24 | n for o, n in fits], np.int64))
    changes = tf.constant(
        np.stack([change_of(fit, REFERENCE) for fit in fits.values()]), tf.float32
    )

    def normalize(images: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        places = tf.bitwise.right_shift(keys, tf.cast(32, tf.int64))
        return change(images, tf.gather(changes, tf.searchsorted(slides, places)))

    return normalize


def reinhard(images: tf.Tensor, changes: tf.Tensor) -> tf.Tensor:
    """Scale and shift each channel of lαβ of (B, H, W, 3) images by (B, 2, 3) factors and shifts; float32, 0 to 255."""
    log10 = np.float32(np.log(10))
    light = tf.matmul(tf.cast(images, tf.float32) + 1, RGB_TO_LMS.T.astype(np.float32))
    lab = tf.matmul(tf.math.log(light) / log10, LMS_TO_LAB.T.astype(np.float32))
    lab = lab * changes[:, None, None, 0] + changes[:, None, None, 1]
    light = tf.exp(tf.matmul(lab, np.linalg.inv(LMS_TO_LAB).T.astype(np.float32)) * log10)
    pixels = tf.matmul(light, np.linalg.inv(RGB_TO_LMS).T.astype(np.float32))
    return tf.clip_by_value(pixels - 1, 0, 255)


def macenko(images: tf.Tensor, changes: tf.Tensor) -> tf.Tensor:
    """Unmix two stains of (B, H, W, 3) images, scale them, and mix the reference stains; float32, 0 to 255.

    `changes` (B, 3, 3) combine these steps in one matrix per image, on rows of optical density.
    """
    return from_density(tf.einsum("bhwc,bcd->bhwd", to_density(images), changes))


def reinhard_changes(fit: StainFit, target: StainFit) -> NDArray[np.float64]:
    """Return (2, 3) factors and shifts that give a slide the target's mean and deviation."""
    factors = target.reinhard_std / np.maximum(fit.reinhard_std.astype(np.float64), 1e-6)
    return np.stack([factors, target.reinhard_mean - fit.reinhard_mean * factors])


def macenko_changes(fit: StainFit, target: StainFit) -> NDArray[np.float64]:
    """Return a (3, 3) matrix on rows of optical density that gives a slide the target's stains and amounts."""
    factors = target.macenko_maximum / np.maximum(fit.macenko_maximum.astype(np.float64), 1e-6)
    unmix = np.linalg.pinv(fit.macenko_stains.astype(np.float64))
    return np.asarray(unmix @ (factors[:, None] * target.macenko_stains))


_METHODS = {"reinhard": (reinhard, reinhard_changes), "macenko": (macenko, macenko_changes)}


def slide_normalizer(fit: StainFit, method: StainNorm) -> Callable[..., NDArray[np.uint8]]:
    """Return a function that normalizes (B, H, W, 3) uint8 images of one slide by its stain fit."""
    change, change_of = _METHODS[method]
    by = change_of(fit, REFERENCE)[None].astype(np.float32)
    return _on_cpu(lambda images: change(images, tf.repeat(by, len(images), axis=0)))


def store_normalizer(
    stores: Sequence[Store], method: StainNorm
) -> Callable[..., NDArray[np.uint8]]:
    """Return a function that normalizes (B, H, W, 3) uint8 images with (B,) keys, as `stain_normalizer` does."""
    with tf.device("CPU"):
        return _on_cpu(stain_normalizer(stores, method))


def _on_cpu(change: Callable[..., tf.Tensor]) -> Callable[..., NDArray[np.uint8]]:
    """Convert a function of tensors to one of arrays, run on the CPU in the calling thread."""

    def normalize(*arrays: NDArray[Any]) -> NDArray[np.uint8]:
        with tf.device("CPU"):
            pixels: NDArray[np.uint8] = to_uint8(change(*arrays)).numpy()
        return pixels

    return normalize
