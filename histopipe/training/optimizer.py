"""Optimizers, their learning rate schedules, and loss scaling for float16."""

from __future__ import annotations

from functools import partial

import keras
import tensorflow as tf

from histopipe.errors import UsageError
from histopipe.runs.config import TrainConfig

_FIRST = 2.0**15
"""First scale, as in Keras. A scale that is too large costs one skipped step per halving."""
_GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


def make_optimizer(config: TrainConfig, steps_per_epoch: int) -> keras.Optimizer:
    """Return the optimizer of a run. Its step count, which sets the learning rate, is a variable and is resumed.

    Raises:
        UsageError: the warm-up is longer than the training.
    """
    optimizers = {
        "adam": keras.optimizers.Adam,
        "adamw": partial(keras.optimizers.AdamW, weight_decay=config.weight_decay),
        "adagrad": keras.optimizers.Adagrad,
        "sgd": keras.optimizers.SGD,
    }
    return optimizers[config.optimizer](_learning_rate(config, config.epochs * steps_per_epoch))


def _learning_rate(
    config: TrainConfig, steps: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    if config.schedule == "constant":
        return config.learning_rate
    if config.warmup_steps >= steps:
        raise UsageError(
            "--warmup-steps",
            found=config.warmup_steps,
            expected=f"less than the {steps} steps of {config.epochs} epochs",
        )
    if not config.warmup_steps:  # with a warm-up of 0 steps, a graph rounds rates differently
        return keras.optimizers.schedules.CosineDecay(config.learning_rate, steps)
    return keras.optimizers.schedules.CosineDecay(
        0.0,
        steps - config.warmup_steps,
        warmup_target=config.learning_rate,
        warmup_steps=config.warmup_steps,
    )


class LossScale:
    """Factor on the loss that prevents small gradients from vanishing in float16.

    It doubles after many steps without an overflow. It halves at each overflow, and the step is skipped. Keras'
    `LossScaleOptimizer` checks only the first replica, so weights became NaN.
    """

    def __init__(self) -> None:
        self.variables = [
            keras.Variable(
                value, trainable=False, dtype="float32", aggregation="only_first_replica", name=name
            )
            for name, value in (("loss_scale", _FIRST), ("finite_steps", 0.0))
        ]
        self._scale, self._finite_steps = self.variables

    @property
    def value(self) -> tf.Tensor:
        """Current factor, scalar float32."""
        return tf.convert_to_tensor(self._scale.value)

    def adapt(self, finite: tf.Tensor) -> None:
        """Update the factor, on each replica. `finite`: all gradients of the step, summed over replicas, are finite."""
        steps = tf.where(finite, tf.convert_to_tensor(self._finite_steps.value) + 1, 0.0)
        grown = steps >= _GROWTH_STEPS
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        self._scale.assign(tf.maximum(self.value * factor, 1.0))
        self._finite_steps.assign(tf.where(grown, 0.0, steps))
