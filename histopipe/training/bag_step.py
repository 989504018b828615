"""The training step of a bag model: all bags of a step in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from histopipe.dataset.transforms import sample_seeds
from histopipe.training.bag_model import JOINT, BagModel, Patches
from histopipe.training.bag_pooling import (
    PIECE,
    gradients_of,
    instance_gradients,
    instance_loss,
    patch_gradients,
    pool,
    pool_at_once,
)
from histopipe.training.models import values_of
from histopipe.training.train_step import TrainStep, add_piece, columns_of, on_replicas

BAG_SHARE = 0.7
"""Share of the bag's loss in the loss of CLAM; the rest is that of the classifiers of single patches."""


def _for_any_length(traced: Any) -> Callable[..., Any]:
    """Let a method of `on_replicas` be traced once for batches of any length; else first for that of the first batch."""

    def call(self: TrainStep, part: Any, *arguments: Any) -> Any:
        bound = traced.__get__(self, type(self))
        if not bound.experimental_get_tracing_count():
            bound.get_concrete_function(
                {name: _any_length(values) for name, values in part.items()}, *arguments
            )
        return bound(part, *arguments)

    return call


def _any_length(values: Any) -> Any:
    spec = tf.type_spec_from_value(values)
    if isinstance(spec, tf.TensorSpec):
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return type(spec)(*map(_any_length, values.values))


def _each_bag(
    rows: tf.Tensor, columns: int, step: Callable[[Any, tf.Tensor], Any], state: Any
) -> tuple[Any, tf.Tensor]:
    """Call a step with the state and the number of each bag, one after the other.

    A step returns the next state, and (1, `columns`) float32. Return the last state, and (rows, `columns`).
    """

    def body(number: tf.Tensor, state: Any, values: tf.TensorArray) -> Any:
        state, of_bag = step(state, number)
        return number + 1, state, values.write(number, tf.ensure_shape(of_bag, (1, columns))[0])

    empty = tf.TensorArray(tf.float32, rows, element_shape=(columns,))
    _, state, values = tf.while_loop(
        lambda number, *_: number < rows,
        body,
        (tf.constant(0), state, empty),
        parallel_iterations=1,  # so that memory is that of one bag
    )
    return state, values.stack()


class BagTrainStep(TrainStep):
    """The training step of a bag model. A micro-batch is a bag; `size` is the number of patches computed at once."""

    model: BagModel
    largest_piece = PIECE

    @property
    def variables(self) -> list[keras.Variable]:
        """As of `TrainStep`, and the statistics of the features, so that a resumed run does not compute them again."""
        scaling = self.model.scaling
        return [*super().variables, *(() if scaling is None else scaling.weights)]

    def gradients(self, batch: Any, epoch_number: tf.Tensor, rows: int, size: int) -> Any:
        """Compute the gradients of all bags in one call: a call takes as long as a bag of some hundred patches."""
        numbers = tf.constant(rows), tf.constant(size)
        slopes = (
            [self._slopes(batch, epoch_number, *numbers)] if self.settings.objective.joint else []
        )
        gradients, values = self._gradient_step(batch, epoch_number, *numbers, *slopes)
        return gradients, [self.strategy.experimental_local_results(values)]

    def predictions(self, batch: Any, rows: int, size: int) -> Any:
        """Predict all bags in one call; as of `TrainStep`."""
        values = self._predict_step(batch, tf.constant(rows), tf.constant(size))
        return [self.strategy.experimental_local_results(values)]

    @_for_any_length
    @on_replicas
    def _slopes(
        self, part: Any, epoch_number: tf.Tensor, rows: tf.Tensor, size: tf.Tensor
    ) -> tf.Tensor:
        """Return loss and slope of each bag of this replica, (rows, 2), from those of all replicas.

        The loss is a joint one, of the outputs of all bags with the dropout of the gradients.
        """

        def forward(_: Any, number: tf.Tensor) -> Any:
            """Return (1, 4) float32 of a bag: output of the last layer, time, event, weight."""
            bag, logits = self._logits(part, number, size, epoch_number)
            time, event = bag["target"][:, 0], bag["target"][:, 1]
            return (), columns_of(logits, time, event, bag["weight"])

        context = tf.distribute.get_replica_context()
        _, local_rows = _each_bag(rows, 4, forward, ())
        slopes = tf.numpy_function(
            self.settings.objective.slopes, [context.all_gather(local_rows, axis=0)], tf.float32
        )
        begin = tf.cast(context.replica_id_in_sync_group, tf.int32) * tf.shape(local_rows)[0]
        return tf.ensure_shape(slopes, (None, 2))[begin : begin + tf.shape(local_rows)[0]]

    @_for_any_length
    @on_replicas
    def _gradient_step(
        self,
        part: Any,
        epoch_number: tf.Tensor,
        rows: tf.Tensor,
        size: tf.Tensor,
        slopes: tf.Tensor | None = None,
    ) -> Any:
        weights = values_of(self.model.training.trainable_variables)
        zeros = [tf.zeros_like(value) for value in weights]
        nothing = zeros, values_of(self._state), tf.zeros((), zeros[0].dtype)
        add = partial(self._add_bag, part, epoch_number, size=size, slopes=slopes)
        return _each_bag(rows, self.settings.objective.outputs + 2, add, nothing)

    def _add_bag(  # noqa: PLR0917 - a pure function: all inputs are arguments
        self,
        part: Any,
        epoch_number: tf.Tensor,
        so_far: Any,
        number: tf.Tensor,
        size: tf.Tensor,
        slopes: tf.Tensor | None,
    ) -> Any:
        """Return `so_far` with the gradients of a bag, and (1, C + 2) float32: outputs, loss, weight."""
        model, objective = self.model, self.settings.objective
        patches, bag = self._bag(part, number)
        seed = sample_seeds(bag["key"], epoch_number)[0]
        scale = tf.cast(self._loss_scale, model.sum_dtype) / self.settings.batch_size
        factor = scale * tf.cast(bag["weight"], model.sum_dtype)
        bag |= {"factor": factor, "single": (1 - BAG_SHARE) * factor[0]}
        slope = None if slopes is None else slopes[number, 1]
        # The loss of all bags is a mean per event.
        divisor = bag["divisor"] * (1.0 if slopes is None else bag["target"][:, 1])
        at_once = partial(self._at_once, patches, bag, seed, slope)
        in_pieces = partial(self._in_pieces, patches, bag, seed, slope, size)
        values, logits, losses = (
            at_once()
            if model.pooling in JOINT
            else tf.cond(tf.shape(patches.features)[0] <= size, at_once, in_pieces)
        )
        by_id = dict(zip(map(id, [*model.patch_weights, *model.last_weights]), values, strict=True))
        gradients = [by_id[id(weight)] for weight in model.training.trainable_variables]
        # The state is that of the stock dropout layer, which training does not use.
        so_far = add_piece(
            so_far, gradients, values_of(self._state), tf.cast(divisor[0], gradients[0].dtype)
        )
        return so_far, columns_of(
            objective.activate(logits),
            losses if slopes is None else slopes[number : number + 1, 0],
            bag["weight"],
        )

    def _at_once(self, patches: Patches, bag: Any, seed: tf.Tensor, slope: Any) -> Any:
        """Return the gradients of weights of patches and of the last layer, (1, C) logits and (1,) losses of a bag."""
        model = self.model
        weights, last = values_of(model.patch_weights), values_of(model.last_weights)
        with tf.GradientTape() as tape:
            tape.watch([*weights, *last])
            value, hidden, scores = pool_at_once(model, weights, patches, seed)
            logits, losses, loss = self._losses(last, value, bag, slope)
            if model.has_instances:
                loss += instance_loss(
                    model,
                    weights,
                    scores,
                    partial(tf.gather, hidden),
                    bag["label"][0],
                    bag["single"],
                )
        return gradients_of(tape, loss, [*weights, *last]), logits, losses

    def _in_pieces(
        self, patches: Patches, bag: Any, seed: tf.Tensor, slope: Any, size: tf.Tensor
    ) -> Any:
        """As `_at_once`, with activations of `size` patches in memory."""
        model = self.model
        weights, last = values_of(model.patch_weights), values_of(model.last_weights)
        pooled = pool(model, weights, patches, size, seed)
        with tf.GradientTape() as tape:
            tape.watch([pooled.value, *last])
            logits, losses, loss = self._losses(last, pooled.value, bag, slope)
        outer, *of_last = tape.gradient(loss, [pooled.value, *last])
        of_patches = patch_gradients(model, weights, patches, size, seed, pooled, outer)
        if model.has_instances:
            of_instances = instance_gradients(
                model, weights, patches, size, seed, bag["label"][0], bag["single"]
            )
            of_patches = [a + b for a, b in zip(of_patches, of_instances, strict=True)]
        return [*of_patches, *of_last], logits, losses

    def _losses(self, last: list[tf.Tensor], pooled: tf.Tensor, bag: Any, slope: Any) -> Any:
        """Return logits, losses and the sum of the weighted losses; or of logits multiplied by `slope`."""
        model, settings = self.model, self.settings
        logits = model.logits(last, pooled, bag.get("covariates"))
        losses = (
            settings.objective.losses(bag, logits, settings.label_smoothing)
            if slope is None
            else logits[:, 0] * tf.cast(slope, logits.dtype)
        )
        loss = tf.reduce_sum(losses * tf.cast(bag["factor"], losses.dtype))
        return logits, losses, (BAG_SHARE if model.has_instances else 1.0) * loss

    @_for_any_length
    @on_replicas
    def _predict_step(self, part: Any, rows: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        objective = self.settings.objective

        def predict(_: Any, number: tf.Tensor) -> Any:
            bag, logits = self._logits(part, number, size)
            losses = objective.losses(bag, logits)
            return (), columns_of(objective.activate(logits), losses, bag["weight"])

        return _each_bag(rows, objective.outputs + 2, predict, ())[1]

    def _logits(
        self, part: Any, number: tf.Tensor, size: tf.Tensor, epoch_number: tf.Tensor | None = None
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Return a bag without its patches, and its (1, C) logits; in an epoch of training, with dropout."""
        model = self.model
        patches, bag = self._bag(part, number)
        seed = None if epoch_number is None else sample_seeds(bag["key"], epoch_number)[0]
        pooled = pool(model, values_of(model.patch_weights), patches, size, seed).value
        return bag, model.logits(values_of(model.last_weights), pooled, bag.get("covariates"))

    def _bag(self, part: dict[str, tf.Tensor], number: tf.Tensor) -> Any:
        """Return a bag's patches, and its label, target, weight, divisor and key (1, ...).

        After the last bag, weight and divisor are 0.
        """
        part, count = self._weighted(part), tf.shape(part["key"])[0]
        place = number % count
        end = part["end"][place]
        begin = tf.where(place > 0, part["end"][place - 1], 0)
        bag: dict[str, tf.Tensor] = {
            name: part[name][place : place + 1]
            for name in ("label", "key", "target", "covariates")
            if name in part
        }
        bag |= {
            name: tf.where(number < count, part[name][place : place + 1], 0.0)
            for name in ("weight", "divisor")
        }
        return Patches(
            part["features"][begin:end], part["position"][begin:end] if "position" in part else None
        ), bag
