"""Training step on bags: bags are computed one by one, most in pieces, and the gradients of a batch are summed.

See `histopipe.training.bag_pooling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from histopipe.dataset.augmentation import sample_seeds
from histopipe.training.bag_model import BagModel, Patches
from histopipe.training.bag_pooling import PIECE, instance_gradients, patch_gradients, pool
from histopipe.training.train_step import TrainStep, results, values_of

BAG_SHARE = 0.7
"""Share of the bag's loss in the loss of CLAM; the rest is that of the classifiers of single patches."""


class BagTrainStep(TrainStep):
    """The training step of a bag model. A micro-batch is a bag; `size` is the number of patches computed at once."""

    model: BagModel

    @property
    def variables(self) -> list[keras.Variable]:
        """As of `TrainStep`, and the statistics of the features, so that a resumed run does not compute them again."""
        scaling = self.model.scaling
        return [*super().variables, *(() if scaling is None else scaling.weights)]

    def gradients(self, batch: Any, epoch_number: tf.Tensor, rows: int, size: int) -> Any:
        """Compute the gradients of a batch, as `TrainStep`.

        A joint loss depends on all bags: their outputs are computed first, with the same dropout.
        """
        if not self.settings.objective.joint:
            return super().gradients(batch, epoch_number, rows, size)
        pieces = list(self._pieces(rows, size))
        parts = [self._forward_step(batch, epoch_number, *piece) for piece in pieces]
        slopes = self._joint_step(parts)
        so_far, values = None, []
        for piece in pieces:
            so_far, part = self._gradient_step(batch, epoch_number, so_far, *piece, slopes)
            values.append(self.strategy.experimental_local_results(part))
        return so_far, values

    @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]  # tensorflow has no types
    def _forward_step(self, *arguments: Any) -> Any:
        return self.strategy.run(self._forward_replica, args=arguments)

    @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]  # tensorflow has no types
    def _joint_step(self, parts: Any) -> Any:
        return self.strategy.run(self._joint_replica, args=(parts,))

    def _forward_replica(
        self, part: Any, epoch_number: tf.Tensor, number: tf.Tensor, size: tf.Tensor
    ) -> tf.Tensor:
        """Return (1, 4) float32 of a bag: output of the last layer, time, event, weight."""
        model = self.model
        patches, bag = self._bag(part, number)
        seed = sample_seeds(bag["key"], epoch_number)[0]
        pooled = pool(model, values_of(model.patch_weights), patches, size, seed)
        last = values_of(model.last_weights)
        logits = model.logits(last, pooled.value, bag.get("covariates"))
        columns = (logits, bag["target"], bag["weight"][:, None])
        return tf.concat([tf.cast(column, tf.float32) for column in columns], axis=1)

    def _joint_replica(self, parts: list[tf.Tensor]) -> tf.Tensor:
        """Return loss and slope of each bag of this replica, (rows, 2), from those of all replicas."""
        context = tf.distribute.get_replica_context()
        local_rows = tf.concat(parts, axis=0)
        together = context.all_gather(local_rows, axis=0)
        slopes = tf.numpy_function(self.settings.objective.slopes, [together], tf.float32)
        begin = tf.cast(context.replica_id_in_sync_group, tf.int32) * tf.shape(local_rows)[0]
        return tf.ensure_shape(slopes, (None, 2))[begin : begin + tf.shape(local_rows)[0]]

    def whole(self, rows: int) -> int:
        """Return the number of patches of a bag that are computed at once if memory suffices."""
        return PIECE

    def _pieces(self, rows: int, size: int) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """Yield the number of each bag, and the size."""
        for number in range(rows):
            yield tf.constant(number), tf.constant(size)

    def _gradient_replica(  # noqa: PLR0917 - as of TrainStep
        self,
        part: Any,
        epoch_number: tf.Tensor,
        so_far: Any,
        number: tf.Tensor,
        size: tf.Tensor,
        slopes: tf.Tensor | None = None,
    ) -> Any:
        model, objective = self.model, self.settings.objective
        patches, bag = self._bag(part, number)
        seed = sample_seeds(bag["key"], epoch_number)[0]
        patch_weights, last = values_of(model.patch_weights), values_of(model.last_weights)
        pooled = pool(model, patch_weights, patches, size, seed)
        with tf.GradientTape() as tape:
            tape.watch([pooled.value, *last])
            logits = model.logits(last, pooled.value, bag.get("covariates"))
            divisor = bag["divisor"]
            if slopes is None:
                losses = objective.losses(bag, logits, self.settings.label_smoothing)
            else:
                # Its gradient is that of the loss of all bags, whose mean is per event.
                losses = logits[:, 0] * tf.cast(slopes[number, 1], logits.dtype)
                divisor = divisor * bag["target"][:, 1]
            factor = tf.cast(bag["weight"], losses.dtype) / self.settings.batch_size
            if self._scale is not None:
                factor *= tf.cast(self._scale.value, losses.dtype)
            share = BAG_SHARE if model.pooling == "clam" else 1.0
            loss = share * tf.reduce_sum(losses * factor)
        outer, *of_last = tape.gradient(loss, [pooled.value, *last])
        of_patches = patch_gradients(model, patch_weights, patches, size, seed, pooled, outer)
        if model.pooling == "clam":
            slope = (1 - BAG_SHARE) * factor[0]
            of_instances = instance_gradients(
                model, patch_weights, patches, size, seed, bag["label"][0], slope
            )
            of_patches = [a + b for a, b in zip(of_patches, of_instances, strict=True)]
        weights = [*model.patch_weights, *model.last_weights]
        by_id = dict(zip(map(id, weights), [*of_patches, *of_last], strict=True))
        gradients = [by_id[id(weight)] for weight in model.training.trainable_variables]
        total = tf.cast(divisor[0], gradients[0].dtype)
        if so_far is not None:
            sums, _, divisors = so_far
            gradients = [a + b for a, b in zip(sums, gradients, strict=True)]
            total += divisors
        # The state of the stock dropout layer, which training does not use.
        state = values_of(self._state)
        if slopes is not None:
            losses = slopes[number : number + 1, 0]
        return (gradients, state, total), results(objective.activate(logits), losses, bag["weight"])

    def _predict_replica(self, part: Any, number: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        model = self.model
        patches, bag = self._bag(part, number)
        pooled = pool(model, values_of(model.patch_weights), patches, size)
        last = values_of(model.last_weights)
        logits = model.logits(last, pooled.value, bag.get("covariates"))
        objective = self.settings.objective
        return results(objective.activate(logits), objective.losses(bag, logits), bag["weight"])

    def _bag(self, part: dict[str, tf.Tensor], number: tf.Tensor) -> Any:
        """Return a bag's patches, and its label, target, weight, divisor and key (1, ...).

        After the last bag, weight and divisor are 0.
        """
        count = tf.shape(part["key"])[0]
        place = number % count
        end = part["end"][place]
        begin = tf.where(place > 0, part["end"][place - 1], 0)
        names = [name for name in ("label", "key", "target", "covariates") if name in part]
        bag: dict[str, tf.Tensor] = {name: part[name][place : place + 1] for name in names}
        for name, values in (("weight", self._weight(part)), ("divisor", self._divisor(part))):
            bag[name] = tf.where(number < count, values[place : place + 1], 0.0)
        positions = part["position"][begin:end] if "position" in part else None
        return Patches(part["features"][begin:end], positions), bag
