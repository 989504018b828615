"""Steps over bags: each bag by itself, a piece of it at a time, and the gradients of a batch's bags added up."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from histopipe.dataset.augmentation import sample_seeds
from histopipe.training.bag_model import BagModel
from histopipe.training.pooling import patch_gradients, pool
from histopipe.training.train_step import StepSettings, TrainStep, cross_entropy, results

PIECE = 32_768
"""Patches computed at once: some 300 MB of hidden features and their like, and more would be no faster."""


class BagTrainStep(TrainStep):
    """The steps of a bag model. Of a micro-batch, `size` is the patches of a bag that are computed at once.

    Args:
        strategy, model, optimizer, settings: as for `TrainStep`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: BagModel,
        optimizer: keras.Optimizer,
        settings: StepSettings,
    ) -> None:
        super().__init__(strategy, model, optimizer, settings)
        self._bags = model

    def whole(self, rows: int) -> int:
        """What is computed at once of a bag."""
        return PIECE

    def gradients(self, batch: Any, epoch_number: tf.Tensor, rows: int, size: int) -> Any:
        """As `TrainStep.gradients`, with `rows` of bags."""
        so_far, values = None, []
        for number in range(rows):
            so_far, part = self._bag_gradients(
                batch, epoch_number, so_far, tf.constant(number), tf.constant(size)
            )
            values.append(self.strategy.experimental_local_results(part))
        return so_far, values

    def predictions(self, batch: Any, rows: int, size: int) -> Any:
        """As `TrainStep.predictions`."""
        parts = (
            self._bag_prediction(batch, tf.constant(number), tf.constant(size))
            for number in range(rows)
        )
        return [self.strategy.experimental_local_results(part) for part in parts]

    # Bags differ in length, and must not each be traced anew.
    @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]  # tensorflow has no types
    def _bag_gradients(
        self, batch: Any, epoch_number: tf.Tensor, so_far: Any, number: tf.Tensor, size: tf.Tensor
    ) -> Any:
        arguments = (batch, epoch_number, so_far, number, size)
        return self.strategy.run(self._bag_gradients_replica, args=arguments)

    @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]  # tensorflow has no types
    def _bag_prediction(self, batch: Any, number: tf.Tensor, size: tf.Tensor) -> Any:
        return self.strategy.run(self._bag_prediction_replica, args=(batch, number, size))

    def _bag_gradients_replica(
        self, part: Any, epoch_number: tf.Tensor, so_far: Any, number: tf.Tensor, size: tf.Tensor
    ) -> Any:
        model = self._bags
        features, bag = self._bag(part, number)
        seed = sample_seeds(bag["key"], epoch_number)[0]
        own, last = _values(model.patch_weights), _values(model.last_weights)
        pooled = pool(model, own, features, size, seed)
        with tf.GradientTape() as tape:
            tape.watch([pooled.value, *last])
            logits = model.logits(last, pooled.value)
            losses = cross_entropy(bag["label"], logits, self.settings.label_smoothing)
            factor = tf.cast(bag["weight"], losses.dtype) / self.settings.batch_size
            scale = 1.0 if self._scale is None else self._scale.value
            loss = tf.reduce_sum(losses * factor) * tf.cast(scale, losses.dtype)
        outer, *of_last = tape.gradient(loss, [pooled.value, *last])
        of_patches = patch_gradients(model, own, features, size, seed, pooled, outer)
        found = dict(zip(map(id, [*model.patch_weights, *model.last_weights]),
                         [*of_patches, *of_last], strict=True))  # fmt: skip
        gradients = [found[id(weight)] for weight in model.training.trainable_variables]
        total = tf.cast(bag["weight"][0], gradients[0].dtype)
        if so_far is not None:
            sums, _, weights = so_far
            gradients = [a + b for a, b in zip(sums, gradients, strict=True)]
            total += weights
        state = _values(model.training.non_trainable_variables)  # of the stock dropout: never used
        return (gradients, state, total), results(tf.nn.softmax(logits), losses, bag["weight"])

    def _bag_prediction_replica(self, part: Any, number: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        model = self._bags
        features, bag = self._bag(part, number)
        pooled = pool(model, _values(model.patch_weights), features, size)
        logits = model.logits(_values(model.last_weights), pooled.value)
        losses = cross_entropy(bag["label"], logits)
        return results(tf.nn.softmax(logits), losses, bag["weight"])

    def _bag(self, part: dict[str, tf.Tensor], number: tf.Tensor) -> Any:
        """One bag's features (R, D), and its label, weight and key (1,). Behind the last one, one that weighs nothing."""
        count = tf.shape(part["key"])[0]
        place = number % count
        end = part["end"][place]
        begin = tf.where(place > 0, part["end"][place - 1], 0)
        bag = {name: part[name][place : place + 1] for name in ("label", "key")}
        weight = tf.where(number < count, self._weight(part)[place : place + 1], 0.0)
        return part["features"][begin:end], {**bag, "weight": weight}


def _values(variables: list[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(variable.value) for variable in variables]
