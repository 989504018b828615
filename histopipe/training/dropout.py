"""Dropout that depends on the patch and the epoch, not on the replica that happens to hold the patch."""

from __future__ import annotations

import keras
import tensorflow as tf

from histopipe.dataset.augmentation import hash31

_STEPS = 1 << 31


class SampleDropout(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
    """Drops each feature of each sample by a hash of the sample's seed.

    Keras' own layer draws once a replica, the same mask on each, so several replicas would not equal one. This layer is for
    training only; a saved model has the stock `Dropout` in its place.

    Args:
        rate: share of features to drop, 0 to below 1.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def call(self, features: tf.Tensor, seeds: tf.Tensor, training: bool = False) -> tf.Tensor:
        """(B, F) features, kept ones scaled up so that their mean stays; seeds (B,) int64."""
        if not training or self.rate == 0:
            return features
        places = tf.range(tf.shape(features)[-1], dtype=tf.int64)
        draws = hash31(hash31(seeds, 2)[:, None] ^ hash31(places, 3)[None, :], 4)
        keep = tf.cast(draws >= int(self.rate * _STEPS), features.dtype)
        return features * keep / (1 - self.rate)
