"""The factor that keeps small gradients from vanishing in float16."""

from __future__ import annotations

import keras
import tensorflow as tf

_FIRST = 2.0**15
_GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


class LossScale:
    """Doubles after many steps without an overflow, and halves with each: such a step is left out.

    Ours, since Keras' `LossScaleOptimizer` looks for overflows on the first replica only, and weights became NaN for good.

    Attributes:
        variables: what a resumed training needs of it.
    """

    def __init__(self) -> None:
        self._scale = _variable(_FIRST, "loss_scale")
        self._finite_steps = _variable(0.0, "finite_steps")
        self.variables = [self._scale, self._finite_steps]

    @property
    def value(self) -> tf.Tensor:
        """The present one, scalar float32."""
        return tf.convert_to_tensor(self._scale.value)

    def adapt(self, finite: tf.Tensor) -> None:
        """Take note of whether a step's gradients, summed over all replicas, were finite. Called on each replica."""
        steps = tf.where(finite, tf.convert_to_tensor(self._finite_steps.value) + 1, 0.0)
        grown = steps >= _GROWTH_STEPS
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        self._scale.assign(tf.maximum(self.value * factor, 1.0))
        self._finite_steps.assign(tf.where(grown, 0.0, steps))


def _variable(value: float, name: str) -> keras.Variable:
    return keras.Variable(
        value, trainable=False, dtype="float32", aggregation="only_first_replica", name=name
    )
