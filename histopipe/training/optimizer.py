"""Optimizers and the course of their learning rate."""

from __future__ import annotations

import keras

from histopipe.errors import UsageError
from histopipe.runs.config import TrainConfig


def make_optimizer(config: TrainConfig, steps_per_epoch: int) -> keras.Optimizer:
    """The optimizer of a run. How far its learning rate has come is counted in its variables, so a resumed run goes on there.

    Args:
        config: the settings.
        steps_per_epoch: of training.

    Raises:
        UsageError: a warm-up that is longer than the training.
    """
    rate = _learning_rate(config, config.epochs * steps_per_epoch)
    match config.optimizer:
        case "adam":
            return keras.optimizers.Adam(rate)
        case "adamw":
            return keras.optimizers.AdamW(rate, weight_decay=config.weight_decay)
        case "adagrad":
            return keras.optimizers.Adagrad(rate)
        case "sgd":
            return keras.optimizers.SGD(rate)


def _learning_rate(
    config: TrainConfig, steps: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    if config.schedule == "constant":
        return config.learning_rate
    if config.warmup_steps >= steps:
        raise UsageError(
            "--warmup-steps", found=config.warmup_steps,
            expected=f"less than the {steps} steps of {config.epochs} epochs",
        )  # fmt: skip
    if not config.warmup_steps:
        return keras.optimizers.schedules.CosineDecay(config.learning_rate, steps)
    return keras.optimizers.schedules.CosineDecay(
        0.0, steps - config.warmup_steps,
        warmup_target=config.learning_rate, warmup_steps=config.warmup_steps,
    )  # fmt: skip
