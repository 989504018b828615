"""Training step on bags: bags are computed one by one, in pieces, and the gradients of a batch are summed.

Memory does not grow with the size of a bag. Gradients need each piece a second time, with the pooled features of the
first pass: a third more work than keeping all activations. Mean pooling is attention with equal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from histopipe.dataset.augmentation import sample_seeds
from histopipe.training.bag_model import BagModel
from histopipe.training.train_step import TrainStep, results, values_of

PIECE = 32_768
"""Patches computed at once: about 300 MB of activations. Larger pieces are not faster."""


class BagTrainStep(TrainStep):
    """The training step of a bag model. A micro-batch is a bag; `size` is the number of patches computed at once."""

    model: BagModel

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
        features, bag = self._bag(part, number)
        seed = sample_seeds(bag["key"], epoch_number)[0]
        pooled = pool(model, values_of(model.patch_weights), features, size, seed)
        last = values_of(model.last_weights)
        logits = model.logits(last, pooled.value, bag.get("covariates"))
        columns = (logits, bag["target"], bag["weight"][:, None])
        return tf.concat([tf.cast(it, tf.float32) for it in columns], axis=1)

    def _joint_replica(self, parts: list[tf.Tensor]) -> tf.Tensor:
        """Return loss and slope of each bag of this replica, (rows, 2), from those of all replicas."""
        context = tf.distribute.get_replica_context()
        own = tf.concat(parts, axis=0)
        together = context.all_gather(own, axis=0)
        found = tf.numpy_function(self.settings.objective.slopes, [together], tf.float32)
        begin = tf.cast(context.replica_id_in_sync_group, tf.int32) * tf.shape(own)[0]
        return tf.ensure_shape(found, (None, 2))[begin : begin + tf.shape(own)[0]]

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
        features, bag = self._bag(part, number)
        seed = sample_seeds(bag["key"], epoch_number)[0]
        own, last = values_of(model.patch_weights), values_of(model.last_weights)
        pooled = pool(model, own, features, size, seed)
        with tf.GradientTape() as tape:
            tape.watch([pooled.value, *last])
            logits = model.logits(last, pooled.value, bag.get("covariates"))
            weight = bag["weight"]
            if slopes is None:
                losses = objective.losses(bag, logits, self.settings.label_smoothing)
            else:
                # Its gradient is that of the loss of all bags, whose mean is per event.
                losses = logits[:, 0] * tf.cast(slopes[number, 1], logits.dtype)
                weight = weight * bag["target"][:, 1]
            factor = tf.cast(bag["weight"], losses.dtype) / self.settings.batch_size
            scale = 1.0 if self._scale is None else self._scale.value
            loss = tf.reduce_sum(losses * factor) * tf.cast(scale, losses.dtype)
        outer, *of_last = tape.gradient(loss, [pooled.value, *last])
        of_patches = patch_gradients(model, own, features, size, seed, pooled, outer)
        weights = [*model.patch_weights, *model.last_weights]
        found = dict(zip(map(id, weights), [*of_patches, *of_last], strict=True))
        gradients = [found[id(weight)] for weight in model.training.trainable_variables]
        total = tf.cast(weight[0], gradients[0].dtype)
        if so_far is not None:
            sums, _, sum_of_weights = so_far
            gradients = [a + b for a, b in zip(sums, gradients, strict=True)]
            total += sum_of_weights
        # The state of the stock dropout layer, which training does not use.
        state = values_of(self._state)
        if slopes is not None:
            losses = slopes[number : number + 1, 0]
        return (gradients, state, total), results(objective.activate(logits), losses, bag["weight"])

    def _predict_replica(self, part: Any, number: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        model = self.model
        features, bag = self._bag(part, number)
        pooled = pool(model, values_of(model.patch_weights), features, size)
        last = values_of(model.last_weights)
        logits = model.logits(last, pooled.value, bag.get("covariates"))
        objective = self.settings.objective
        return results(objective.activate(logits), objective.losses(bag, logits), bag["weight"])

    def _bag(self, part: dict[str, tf.Tensor], number: tf.Tensor) -> Any:
        """Return a bag's features (R, D), and its label, target, weight and key (1, ...).

        After the last bag, the weight is 0.
        """
        count = tf.shape(part["key"])[0]
        place = number % count
        end = part["end"][place]
        begin = tf.where(place > 0, part["end"][place - 1], 0)
        names = [name for name in ("label", "key", "target", "covariates") if name in part]
        bag: dict[str, tf.Tensor] = {name: part[name][place : place + 1] for name in names}
        weight = tf.where(number < count, self._weight(part)[place : place + 1], 0.0)
        return part["features"][begin:end], {**bag, "weight": weight}


class Pooled(NamedTuple):
    """The result of pooling a bag."""

    value: tf.Tensor
    """(H,) pooled hidden features."""
    norm: tf.Tensor
    """() logarithm of the sum of the exponentials of all attention scores."""
    best: tf.Tensor
    """(H,) int64 rows of the maximum of each hidden feature, for max pooling."""


def pool(
    model: BagModel,
    weights: Sequence[tf.Tensor],
    features: tf.Tensor,
    size: tf.Tensor,
    seed: tf.Tensor | None = None,
) -> Pooled:
    """Pool a bag of (N, D) features, `size` patches at once. `weights` are the values of `model.patch_weights`."""
    width = (model.hidden_width,)
    zeros = tf.zeros(width, model.sum_dtype)
    lowest = tf.constant(float("-inf"), model.sum_dtype)

    def weighted_sum(
        piece: tf.Tensor, rows: tf.Tensor, highest: Any, total: Any, value: Any
    ) -> Any:
        hidden, scores = model.patches(weights, piece, rows, seed)
        top = tf.maximum(highest, tf.reduce_max(scores))
        before, own = tf.exp(highest - top), tf.exp(scores - top)
        value = value * before + tf.linalg.matvec(hidden, own, transpose_a=True)
        return top, total * before + tf.reduce_sum(own), value

    def maximum(piece: tf.Tensor, rows: tf.Tensor, value: Any, best: Any) -> Any:
        hidden, _ = model.patches(weights, piece, rows, seed)
        found = tf.reduce_max(hidden, axis=0)
        at = tf.gather(rows, tf.argmax(hidden, axis=0))
        return tf.maximum(value, found), tf.where(found > value, at, best)

    no_rows = tf.zeros(width, tf.int64)
    if model.pooling == "max":
        value, best = _in_pieces(features, size, maximum, (zeros + lowest, no_rows))
        return Pooled(value, lowest, best)
    highest, total, value = _in_pieces(features, size, weighted_sum, (lowest, zeros[0], zeros))
    return Pooled(value / total, highest + tf.math.log(total), no_rows)


def patch_gradients(  # noqa: PLR0917 - a pure function: all inputs are arguments
    model: BagModel,
    weights: Sequence[tf.Tensor],
    features: tf.Tensor,
    size: tf.Tensor,
    seed: tf.Tensor | None,
    pooled: Pooled,
    outer: tf.Tensor,
) -> list[tf.Tensor]:
    """Return the gradients of a loss for `weights`. (H,) `outer` is its gradient for `pooled.value`."""
    common = tf.tensordot(pooled.value, outer, 1)

    def add_gradients(piece: tf.Tensor, rows: tf.Tensor, *sums: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            hidden, scores = model.patches(weights, piece, rows, seed)
            along = tf.linalg.matvec(hidden, outer)
            shares = tf.stop_gradient(tf.exp(scores - pooled.norm))
            # The softmax's gradient depends on the difference between a patch and the pooled features.
            loss = tf.reduce_sum(shares * (along + tf.stop_gradient(along - common) * scores))
        return [a + b for a, b in zip(sums, _gradients(tape, loss, weights), strict=True)]

    if model.pooling == "max":
        # Only patches with the maximum of a feature contribute.
        with tf.GradientTape() as tape:
            tape.watch(weights)
            chosen = tf.gather(features, pooled.best)
            hidden, _ = model.patches(weights, chosen, pooled.best, seed)
            loss = tf.tensordot(tf.linalg.diag_part(hidden), outer, 1)
        return _gradients(tape, loss, weights)
    return list(_in_pieces(features, size, add_gradients, [tf.zeros_like(w) for w in weights]))


def _gradients(
    tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    found: list[tf.Tensor] = tape.gradient(
        loss, list(weights), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return found


def _in_pieces(
    features: tf.Tensor, size: tf.Tensor, step: Callable[..., Any], state: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor]:
    """Apply a function of (piece, its rows, *state) to the pieces of a bag in sequence: memory holds one piece."""
    size = tf.cast(size, tf.int64)
    count = tf.shape(features, tf.int64)[0]

    def body(start: tf.Tensor, *state: tf.Tensor) -> Any:
        stop = tf.minimum(start + size, count)
        return (stop, *step(features[start:stop], tf.range(start, stop), *state))

    begin = tf.zeros((), tf.int64)
    found = tf.while_loop(
        lambda start, *_: start < count, body, (begin, *state), parallel_iterations=1
    )
    return tuple(found[1:])
