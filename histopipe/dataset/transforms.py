"""Transforms of batches of images: augmentation, and stain normalization to one reference, as TensorFlow functions.

Augmentation is a pure function of a batch and a random number per patch and epoch.

Keras' random layers draw per batch and replica, so a patch would differ between GPUs and after a restart. Here every
draw is a hash of (seed, epoch, key), and does not depend on the batch or the device.

The functions take (B, H, H, 3) uint8 or float32 images, 0 to 255, and (B,) int64 seeds from `sample_seeds`. Flips keep
the type of the images. All other functions return (B, H, H, 3) float32, 0 to 255.

Stain normalization changes each patch by the fit of its whole slide. So a patch of only fat or only nuclei is not stretched
to average tissue. `stain_fit` measures the fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.stain_fit import LMS_TO_LAB, RGB_TO_LMS
from histopipe.errors import NothingToDo
from histopipe.store.record import StainFit
from histopipe.store.store import Store
from histopipe.system.hashing import combine
from histopipe.system.output import some
from histopipe.tasks.choices import AUGMENTATIONS, Augmentation, StainNorm

_LOW = 0x7FFFFFFF
_STEPS = 1 << 31

RUIFROK = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]], np.float32)
"""Optical densities of haematoxylin, eosin and DAB in red, green and blue.

Source:
    A. C. Ruifrok and D. A. Johnston, "Quantification of histochemical staining by color deconvolution" (2001).
"""


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch, for `sample_seeds`."""
    return int(combine(seed, epoch)) & _LOW


def sample_seeds(keys: tf.Tensor, epoch_number: tf.Tensor | int) -> tf.Tensor:
    """Return a random 31-bit number per patch, (B,) int64, from keys (B,) int64 and `epoch_seed`."""
    return hash31(hash31(keys & _LOW, epoch_number) ^ (_right_shift(keys, 31) & _LOW), epoch_number)


def hash31(values: tf.Tensor, salt: tf.Tensor | int) -> tf.Tensor:
    """Hash 31-bit numbers stored as int64. All devices can multiply and shift this type.

    Source:
        The multiply and xor-shift construction of C. Wellons' "hash prospector", here with 31 bits so that no product
        overflows int64.
    """
    values = (values ^ tf.cast(salt, tf.int64)) & _LOW
    for multiplier in (0x7FEB352D, 0x46CA68B5):
        values = ((values ^ _right_shift(values, 15)) * multiplier) & _LOW
    return values ^ _right_shift(values, 16)


def uniform(seeds: tf.Tensor, draws: int, salt: int) -> tf.Tensor:
    """Return uniform numbers in [0, 1), (B, draws) float32, from (B,) seeds. Each salt gives different numbers."""
    positions = hash31(tf.range(draws, dtype=tf.int64), salt)
    # float32 represents 24 bits exactly, so that no number is rounded to 1.
    bits = _right_shift(hash31(hash31(seeds, salt)[:, None] ^ positions[None, :], salt), 7)
    return tf.cast(bits, tf.float32) / (_STEPS >> 7)


def augment(images: tf.Tensor, seeds: tf.Tensor, steps: Sequence[Augmentation]) -> tf.Tensor:
    """Apply augmentations with their default strengths, always in the order flips, crop, stain, colour.

    Images and result are as in the functions below. Without steps, or with flips only, the images keep their type.
    """
    functions: dict[Augmentation, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
        "flips": flip_and_turn,
        "crop": random_crop,
        "stain": stain_jitter,
        "colour": colour_jitter,
    }
    for name in AUGMENTATIONS:
        if name in steps:
            images = functions[name](images, seeds)
    return images


def augment_masks(masks: tf.Tensor, seeds: tf.Tensor, steps: Sequence[Augmentation]) -> tf.Tensor:
    """Move the pixels of (B, H, W) uint8 masks as `augment` moves those of their images."""
    planes = masks[..., None]
    if "flips" in steps:
        planes = flip_and_turn(planes, seeds)
    if "crop" in steps:
        planes = tf.cast(random_crop(planes, seeds, method="nearest"), tf.uint8)
    return planes[..., 0]


def flip_and_turn(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Flip and rotate each square image, of any type, to a random one of its eight orientations."""
    draws = hash31(seeds, 1)
    images = tf.where(_bit(draws, 8), tf.reverse(images, axis=[1]), images)
    images = tf.where(_bit(draws, 9), tf.reverse(images, axis=[2]), images)
    return tf.where(_bit(draws, 10), tf.transpose(images, [0, 2, 1, 3]), images)


def random_crop(
    images: tf.Tensor, seeds: tf.Tensor, least: float = 0.8, method: str = "bilinear"
) -> tf.Tensor:
    """Crop a square window, with at least a share `least` of the side, from each image. Resize it back."""
    draws = uniform(seeds, 3, 5)
    side = least + (1 - least) * draws[:, :1]
    corner = draws[:, 1:] * (1 - side)
    height, width = images.shape[1:3]
    boxes = tf.concat([corner, corner + side], axis=1)
    rows = tf.range(tf.shape(images)[0])
    return tf.image.crop_and_resize(images, boxes, rows, (height, width), method)


def colour_jitter(
    images: tf.Tensor,
    seeds: tf.Tensor,
    *,
    brightness: float = 0.1,
    contrast: float = 0.1,
    saturation: float = 0.1,
    hue: float = 0.02,
) -> tf.Tensor:
    """Change brightness, contrast, saturation and hue of each image, in this order.

    Factors of the first three are drawn from 1 - x to 1 + x. Contrast is relative to the image's mean, saturation to
    each pixel's luma (Rec. 601). Hue rotates colours about the grey axis, by at most a share `hue` of a full turn.
    """
    draws = 2 * uniform(seeds, 4, 6) - 1
    strengths = tf.constant([brightness, contrast, saturation], tf.float32)
    factors = (1 + draws[:, :3] * strengths)[:, :, None, None, None]
    images = tf.cast(images, tf.float32) * factors[:, 0]
    mean = tf.reduce_mean(images, axis=[1, 2, 3], keepdims=True)
    images = mean + (images - mean) * factors[:, 1]
    luma = tf.reduce_sum(images * tf.constant([0.299, 0.587, 0.114]), axis=-1, keepdims=True)
    images = luma + (images - luma) * factors[:, 2]
    rotations = _hue_rotations(draws[:, 3] * (2 * np.pi * hue))
    return tf.clip_by_value(tf.einsum("bhwc,bcd->bhwd", images, rotations), 0, 255)


def stain_jitter(
    images: tf.Tensor, seeds: tf.Tensor, *, factor: float = 0.05, shift: float = 0.05
) -> tf.Tensor:
    """Scale and shift the amounts of haematoxylin, eosin and residual in each image.

    Factors are from 1 - factor to 1 + factor. Shifts are from -shift to shift (optical density, natural logarithm).

    Source:
        D. Tellez et al., "Whole-slide mitosis detection in H&E breast histology using PHH3 as a reference to train
        distilled stain-invariant convolutional networks" (2018). They later call 0.05 "light".
    """
    stains = RUIFROK / np.linalg.norm(RUIFROK, axis=1, keepdims=True)
    draws = 2 * uniform(seeds, 6, 7) - 1
    factors, shifts = 1 + factor * draws[:, :3], shift * draws[:, 3:]
    # One matrix per image combines unmixing, scaling and mixing.
    matrices = tf.einsum("cs,bs,sd->bcd", np.linalg.inv(stains), factors, stains)
    density = tf.einsum("bhwc,bcd->bhwd", to_density(images), matrices)
    return from_density(density + tf.matmul(shifts, stains)[:, None, None, :])


def to_uint8(images: tf.Tensor) -> tf.Tensor:
    """Clip pixels to 0 to 255, and round them to uint8."""
    if images.dtype == tf.uint8:
        return images
    return tf.cast(tf.round(tf.clip_by_value(images, 0, 255)), tf.uint8)


def to_density(images: tf.Tensor) -> tf.Tensor:
    """Return the optical density of 8-bit light, -ln((I + 1) / 256): 0 for white, finite for black; float32."""
    return -tf.math.log((tf.cast(images, tf.float32) + 1) / 256)


def from_density(density: tf.Tensor) -> tf.Tensor:
    """Return the light intensity of an optical density, float32, 0 to 255."""
    return tf.clip_by_value(256 * tf.exp(-density) - 1, 0, 255)


def _hue_rotations(angles: tf.Tensor) -> tf.Tensor:
    """Return (B, 3, 3) rotations about the grey axis, for the product `rgb @ rotation` (Rodrigues' formula)."""
    cos, sin = tf.cos(angles)[:, None, None], tf.sin(angles)[:, None, None]
    cross = tf.constant([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / np.sqrt(np.float32(3))
    return cos * tf.eye(3) + (1 - cos) / 3 * tf.ones((3, 3)) + sin * tf.transpose(cross)


def _bit(draws: tf.Tensor, bit: int) -> tf.Tensor:
    """Return whether a bit is set, (B, 1, 1, 1) bool."""
    return ((_right_shift(draws, bit) & 1) == 1)[:, None, None, None]


def _right_shift(values: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(values, tf.cast(bits, values.dtype))


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
