"""One training step on the replicas of a strategy: computation of gradients, and their application.

Computing gradients has no side effects, so that a step that ran out of memory can be computed again in smaller pieces.
Batch statistics change only together with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.annotations.rules import NOT_ANNOTATED
from histopipe.dataset.transforms import (
    Normalize,
    augment,
    augment_masks,
    sample_seeds,
    to_uint8,
)
from histopipe.errors import UsageError
from histopipe.tasks.choices import Augmentation
from histopipe.training.bag_model import BagModel
from histopipe.training.models import (
    LossScale,
    PatchModel,
    cancelled_biases,
    changing_state,
    fuse_batch_norms,
    values_of,
)
from histopipe.training.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of a training step."""

    batch_size: int
    """Rows of a step, over all replicas."""
    objective: Objective
    class_weight: NDArray[np.float32]
    """(C,) weight of each class in the loss."""
    augmentations: Sequence[Augmentation] = ()
    normalize: Normalize | None = None
    label_smoothing: float = 0.0
    """Share of each label that is spread over all classes."""
    clip_norm: float = 0.0
    """Maximum global norm of the gradients; 0: no limit."""
    scale_loss: bool = False
    """Scale the loss, so that small gradients do not vanish in float16."""
    xla: bool = False
    skip_bias_gradients: bool = False
    """Compute no gradients of `models.cancelled_biases`."""


def on_replicas(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a method that computes the part of a replica, so that a call runs it on all replicas."""

    # Bags differ in length: without `reduce_retracing`, each would be traced again. TensorFlow counts traces by the
    # wrapped function: without `wraps`, it would warn of those of all methods together.
    @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]  # tensorflow has no types
    @wraps(step)
    def run(self: TrainStep, *arguments: Any) -> Any:
        return self.strategy.run(partial(step, self), args=arguments)

    return cast(Callable[..., Any], run)


class TrainStep:
    """The training and prediction steps of a model and its optimizer, built in the strategy's scope.

    Raises:
        UsageError: XLA cannot compile batch normalization over several replicas.
    """

    largest_piece: int | None = None
    """Rows, or patches of a bag, that are computed at once if memory suffices; None: all rows of a replica."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: PatchModel | BagModel,
        optimizer: keras.Optimizer,
        settings: StepSettings,
    ) -> None:
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self.whole = model  # what is saved
        self.settings = settings
        if settings.xla and self.meets_within_gradients and strategy.num_replicas_in_sync > 1:
            raise UsageError(
                "--xla cannot compile batch normalization over several devices",
                todo="leave out --xla, or use one device or a --model without batch normalization",
            )
        self._state = changing_state(model.training)
        cancelled = cancelled_biases(model.training) if settings.skip_bias_gradients else ()
        self._skipped = [
            any(weight is bias for bias in cancelled)
            for weight in model.training.trainable_variables
        ]
        self._differentiated = (
            tf.function(self._differentiate, autograph=False, jit_compile=True)
            if settings.xla
            else self._differentiate
        )
        with strategy.scope():
            optimizer.build(model.training.trainable_variables)
            self._scale = LossScale() if settings.scale_loss else None
        self._synchronize(True)
        if strategy.num_replicas_in_sync == 1 and tf.config.get_visible_devices("GPU"):
            fuse_batch_norms(model.training, training=True)  # no gain on CPUs
        # Prevents Keras from summing gradients over the replicas again: they are summed before clipping.
        _ = optimizer._all_reduce_sum_gradients  # raises if this Keras has no such method
        optimizer._all_reduce_sum_gradients = list

    def _synchronize(self, synchronized: bool) -> None:
        """Compute batch statistics over all replicas, or per replica."""
        for layer in self.model.batch_norms:
            layer.synchronized = synchronized

    def save(self, path: Path) -> None:
        """Save the serving model, for any backend of Keras: only TensorFlow has batch statistics over replicas."""
        self._synchronize(False)
        try:
            self.whole.serving.save(path)
        finally:
            self._synchronize(True)

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables that training changes: weights, batch statistics, optimizer, loss scale."""
        return [
            *self.model.training.trainable_variables,
            *self._state,
            *self.optimizer.variables,
            *(self._scale.variables if self._scale is not None else ()),
        ]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))

    @property
    def meets_within_gradients(self) -> bool:
        """Whether replicas exchange batch statistics while they compute gradients."""
        return any(layer.trainable for layer in self.model.batch_norms)

    def gradients(self, batch: Any, epoch_number: tf.Tensor, rows: int, size: int) -> Any:
        """Compute the gradients of a batch, summed over micro-batches of `size` rows. Nothing changes.

        The batch has a part per replica; `rows` is the size of the largest. `epoch_number` comes from `epoch_seed`.
        Return the argument of `apply`, and by micro-batch and replica (size, C + 2) float32: outputs, loss, weight.
        """
        so_far, values = None, []
        for piece in self._pieces(rows, size):
            so_far, part = self._gradient_step(batch, epoch_number, so_far, *piece)
            values.append(self.strategy.experimental_local_results(part))
        return so_far, values

    def predictions(self, batch: Any, rows: int, size: int) -> Any:
        """Predict with the serving model. Return by micro-batch and replica (size, C + 2) float32, as `gradients`."""
        return [
            self.strategy.experimental_local_results(self._predict_step(batch, *piece))
            for piece in self._pieces(rows, size)
        ]

    def _pieces(self, rows: int, size: int) -> Iterator[tuple[tf.Tensor, Any]]:
        """Yield the first row and the size of each micro-batch; None for the size of a whole part."""
        for start in range(0, rows, size):
            yield tf.constant(start), None if size >= rows else size

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # tensorflow has no types
    def apply(self, gradients: Any, requests: tf.Tensor) -> tf.Tensor:
        """Update the weights by the gradients of a step, summed over replicas. Return the (2,) sum of all requests."""
        sums, state, divisor = gradients
        means, finite, requests = self.strategy.run(self._reduce, args=(sums, divisor, requests))
        if self._scale is None:
            self._update(means, state)
        else:
            tf.cond(
                self.strategy.experimental_local_results(finite)[0],
                lambda: self._update(means, state),
                lambda: None,
            )
        return self.strategy.experimental_local_results(requests)[0]

    @on_replicas
    def _gradient_step(
        self, part: Any, epoch_number: tf.Tensor, so_far: Any, start: tf.Tensor, size: int | None
    ) -> Any:
        part = _micro_batch(part, start, size)
        seeds = sample_seeds(part["key"], epoch_number)
        if "mask" in part:
            masks = augment_masks(part["mask"], seeds, self.settings.augmentations)
            part = {**part, "mask": masks}
        part = self._weighted(part)
        inputs, model = self.inputs(part, seeds), self.model.training
        state = values_of(self._state) if so_far is None else so_far[1]
        values = values_of(model.trainable_variables)
        non_trainable = values_of(model.non_trainable_variables)
        truth = {name: part[name] for name in ("label", "target", "mask") if name in part}
        gradients, state, outputs, losses = self._differentiated(
            values, state, non_trainable, inputs, seeds, truth, part["weight"], self._loss_scale
        )
        divisor = tf.reduce_sum(tf.cast(part["divisor"], gradients[0].dtype))
        columns = columns_of(outputs, losses, part["weight"])
        return add_piece(so_far, gradients, state, divisor), columns

    def _differentiate(  # noqa: PLR0917 - a pure function: all inputs are arguments
        self,
        values: list[tf.Tensor],
        state: list[tf.Tensor],
        non_trainable: list[tf.Tensor],
        images: tf.Tensor,
        seeds: tf.Tensor,
        truth: dict[str, tf.Tensor],
        weight: tf.Tensor,
        scale: tf.Tensor | float,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Return gradients of the weighted sum of losses, the new state, (B, C) outputs and (B,) losses.

        `non_trainable` are all variables without a gradient. Those of `state` replace them; the rest is frozen, and not part of
        the result: a copy of each would need as much memory as the network.
        """
        model, objective = self.model.training, self.settings.objective
        state_by_id = dict(zip(map(id, self._state), state, strict=True))
        ids = [id(variable) for variable in model.non_trainable_variables]
        non_trainable = [
            state_by_id.get(key, value) for key, value in zip(ids, non_trainable, strict=True)
        ]
        with tf.GradientTape() as tape:
            tape.watch(values)
            called = [
                tf.stop_gradient(value) if skipped else value
                for value, skipped in zip(values, self._skipped, strict=True)
            ]
            logits, non_trainable = model.stateless_call(
                called, non_trainable, [images, seeds], training=True
            )
            # `_state` has the order of `non_trainable_variables`.
            state = [
                value for key, value in zip(ids, non_trainable, strict=True) if key in state_by_id
            ]
            losses = objective.losses(truth, logits, self.settings.label_smoothing)
            # Divide by the batch size, which is the same on all replicas: sums overflow in float16.
            factor = tf.cast(weight, losses.dtype) / self.settings.batch_size
            loss = tf.reduce_sum(losses * factor) * tf.cast(scale, losses.dtype)
        gradients = tape.gradient(loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        outcomes = objective.outcomes(truth, objective.activate(logits))
        return gradients, state, outcomes, losses

    @on_replicas
    def _predict_step(self, part: Any, start: tf.Tensor, size: int | None) -> tf.Tensor:
        part = self._weighted(_micro_batch(part, start, size))
        outputs = self.model.serving(self.inputs(part), training=False)
        objective = self.settings.objective
        losses = objective.losses(part, objective.logits(outputs))
        outcomes = objective.outcomes(part, outputs, final=True)
        return columns_of(outcomes, losses, part["weight"])

    def _reduce(self, sums: list[tf.Tensor], divisor: tf.Tensor, requests: tf.Tensor) -> Any:
        """Return the mean gradient over all replicas, clipped; whether it is finite; and the sum of all requests."""
        values = [*sums, divisor, tf.cast(requests, divisor.dtype)]
        *sums, divisor, requests = tf.distribute.get_replica_context().all_reduce(
            # Copied to this replica's device; otherwise they are reduced one by one.
            tf.distribute.ReduceOp.SUM,
            [tf.identity(value) for value in values],
        )
        share = divisor / self.settings.batch_size * self._loss_scale
        means = [tf.math.divide_no_nan(s, share) for s in sums]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(s)) for s in sums])
        if self._scale is not None:
            self._scale.adapt(finite)
        if self.settings.clip_norm:
            means, _ = tf.clip_by_global_norm(means, self.settings.clip_norm)
        return means, finite, tf.cast(requests, tf.float32)

    def _update(self, means: list[Any], state: list[Any]) -> None:
        weights, factors = self.model.training.trainable_variables, self.model.rate_factors
        scaled = [
            (weight, factor, tf.convert_to_tensor(weight.value))
            for weight, factor in zip(weights, factors, strict=bool(factors))
            if np.any(factor != 1)
        ]
        self.strategy.run(self.optimizer.apply, args=(means, weights))
        # Equal to another learning rate: no state of the optimizers depends on it, and the change is in proportion.
        for variable, factor, before in scaled:
            self.strategy.extended.update(variable.value, _scale_change, args=(before, factor))
        for variable, value in zip(self._state, state, strict=True):
            self.strategy.extended.update(variable.value, _assign, args=(value,))

    @property
    def _loss_scale(self) -> tf.Tensor | float:
        return 1.0 if self._scale is None else self._scale.value

    def inputs(self, part: Mapping[str, tf.Tensor], seeds: tf.Tensor | None = None) -> tf.Tensor:
        """Return the (B, H, W, 3) uint8 images of a batch for the network; with seeds, augmented."""
        images = self.normalized(part)
        return to_uint8(
            images if seeds is None else augment(images, seeds, self.settings.augmentations)
        )

    def normalized(self, part: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Return the images of a batch with normalized stain, if the settings have it."""
        normalize = self.settings.normalize
        return part["image"] if normalize is None else normalize(part["image"], part["key"])

    def _weighted(self, part: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return a part with the weight of each row in the loss, and its `divisor`.

        This is what a row adds to the divisor of the sum of losses: 1, and 0 for padding, damaged samples, and patches without
        an annotated pixel. Divided by the sum of the weights, the weights would cancel in a step whose rows have one class.
        """
        real, by_class = part["weight"], tf.constant(self.settings.class_weight, tf.float32)
        if "mask" in part:
            real *= tf.cast(tf.reduce_any(part["mask"] != NOT_ANNOTATED, axis=[1, 2]), tf.float32)
        weight = real * tf.gather(by_class, tf.maximum(part["label"], 0))
        return part | {"weight": weight, "divisor": real}


def add_piece(so_far: Any, gradients: list[tf.Tensor], state: list[Any], divisor: tf.Tensor) -> Any:
    """Return sums of gradients, state and sum of divisors after one more micro-batch; `so_far` before it, if any."""
    if so_far is None:
        return gradients, state, divisor
    sums, _, divisors = so_far
    return [a + b for a, b in zip(sums, gradients, strict=True)], state, divisors + divisor


def _scale_change(variable: tf.Variable, before: tf.Tensor, factor: Any) -> None:
    """Multiply the last change of a variable."""
    variable.assign(before + factor * (variable - before))


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value)


def _micro_batch(part: dict[str, tf.Tensor], start: tf.Tensor, size: int | None) -> Any:
    """Return `size` rows from `start` on. After the last row, pad with the first rows and weight 0."""
    if size is None:
        return part
    places = start + tf.range(size)
    rows = tf.shape(part["key"])[0]
    piece = {name: tf.gather(values, places % rows) for name, values in part.items()}
    return piece | {"weight": tf.where(places < rows, piece["weight"], 0.0)}


def columns_of(outputs: tf.Tensor, *columns: tf.Tensor) -> tf.Tensor:
    """Return (B, C + K) float32: outputs, and K columns (B,), such as loss and weight."""
    parts = [outputs, *(column[:, None] for column in columns)]
    return tf.concat([tf.cast(part, tf.float32) for part in parts], axis=1)
