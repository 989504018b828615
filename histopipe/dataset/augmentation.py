"""Augmentation as pure functions of the batch and a number per patch and epoch.

Keras' random layers draw per batch and replica, so the same patch would look different on two GPUs or after a restart. Here
every draw is a hash of (seed, epoch, key), so it does not matter where or when a patch comes up.
"""

from __future__ import annotations

import tensorflow as tf

from histopipe.dataset.hashing import combine

_LOW = 0x7FFFFFFF


def epoch_seed(seed: int, epoch: int) -> int:
    """The number that `sample_seeds` wants for an epoch of a run."""
    return int(combine(seed, epoch)) & _LOW


def sample_seeds(keys: tf.Tensor, epoch_number: tf.Tensor) -> tf.Tensor:
    """A random 31-bit number per patch, (B,) int64, from keys (B,) int64 and `epoch_seed`."""
    return hash31(hash31(keys & _LOW, epoch_number) ^ (_shifted(keys, 31) & _LOW), epoch_number)


def hash31(values: tf.Tensor, salt: tf.Tensor | int) -> tf.Tensor:
    """Scrambles 31-bit numbers held as int64, the integer type whose products and shifts every device has.

    Source:
        The multiply and xor-shift construction of C. Wellons' "hash prospector", here with 31 bits so that no product
        leaves int64.
    """
    values = (values ^ tf.cast(salt, tf.int64)) & _LOW
    for multiplier in (0x7FEB352D, 0x46CA68B5):
        values = ((values ^ _shifted(values, 15)) * multiplier) & _LOW
    return values ^ _shifted(values, 16)


def flip_and_turn(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Each square image in one of its eight positions: mirrored or not, turned by a multiple of 90°.

    Args:
        images: (B, H, H, 3) any type.
        seeds: (B,) int64 from `sample_seeds`.
    """
    draws = hash31(seeds, 1)
    images = tf.where(_bit(draws, 8), tf.reverse(images, axis=[1]), images)
    images = tf.where(_bit(draws, 9), tf.reverse(images, axis=[2]), images)
    return tf.where(_bit(draws, 10), tf.transpose(images, [0, 2, 1, 3]), images)


def _bit(draws: tf.Tensor, bit: int) -> tf.Tensor:
    """(B, 1, 1, 1) bool."""
    return ((_shifted(draws, bit) & 1) == 1)[:, None, None, None]


def _shifted(values: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(values, tf.cast(bits, values.dtype))
