"""Augmentation as pure functions of a batch and a random number per patch and epoch.

Keras' random layers draw per batch and replica, so a patch would differ between GPUs and after a restart. Here every
draw is a hash of (seed, epoch, key), and does not depend on the batch or the device.

The functions take (B, H, H, 3) uint8 or float32 images, 0 to 255, and (B,) int64 seeds from `sample_seeds`. Flips keep
the type of the images. All other functions return (B, H, H, 3) float32, 0 to 255.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from histopipe.dataset.options import AUGMENTATIONS, Augmentation
from histopipe.system.hashing import combine

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


def flip_and_turn(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Flip and rotate each square image, of any type, to a random one of its eight orientations."""
    draws = hash31(seeds, 1)
    images = tf.where(_bit(draws, 8), tf.reverse(images, axis=[1]), images)
    images = tf.where(_bit(draws, 9), tf.reverse(images, axis=[2]), images)
    return tf.where(_bit(draws, 10), tf.transpose(images, [0, 2, 1, 3]), images)


def random_crop(images: tf.Tensor, seeds: tf.Tensor, least: float = 0.8) -> tf.Tensor:
    """Crop a square window, with at least a share `least` of the side, from each image. Resize it back (bilinear)."""
    draws = uniform(seeds, 3, 5)
    side = least + (1 - least) * draws[:, :1]
    corner = draws[:, 1:] * (1 - side)
    height, width = images.shape[1:3]
    boxes = tf.concat([corner, corner + side], axis=1)
    return tf.image.crop_and_resize(images, boxes, tf.range(tf.shape(images)[0]), (height, width))


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
