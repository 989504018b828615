"""The training loop over `tf.distribute`: one step, one epoch, one evaluation.

Ours instead of Keras' `fit`, which fails on a batch that the replicas cannot share evenly. Every global batch has its full
size, rows that fill it up weigh nothing, and the loss is divided by the weight of the *global* batch: so N replicas do what
one would.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.augmentation import epoch_seed, flip_and_turn, sample_seeds
from histopipe.dataset.batches import Batches
from histopipe.dataset.loader import BatchSource
from histopipe.dataset.table import PatchTable
from histopipe.store.store import Store
from histopipe.training.models import PatchModel
from histopipe.training.progress import EpochProgress


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model says of patches, in the order they came.

    Attributes:
        key: (N,) int64.
        label: (N,) int32.
        probability: (N, C) float32.
        loss: mean cross-entropy.
        seconds, input_wait: wall time, and the part of it spent waiting for batches.
    """

    key: NDArray[np.int64]
    label: NDArray[np.int32]
    probability: NDArray[np.float32]
    loss: float
    seconds: float
    input_wait: float


class Trainer:
    """A model and its optimizer on the devices of a strategy.

    Args:
        strategy: made by `make_strategy`.
        model, optimizer: built within its scope.
        stores: where the patches are.
        batch_size: patches a step over all replicas.
        seed: of order, augmentation and dropout.
        class_weight: (C,) weight of each class in the loss.
        augment: whether to flip and turn.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: PatchModel,
        optimizer: keras.Optimizer,
        *,
        stores: Sequence[Store],
        batch_size: int,
        seed: int,
        class_weight: NDArray[np.float32],
        augment: bool,
    ) -> None:
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self._stores, self._batch_size, self._seed = stores, batch_size, seed
        self._class_weight = tf.constant(class_weight, tf.float32)
        self._augment = augment
        with strategy.scope():
            optimizer.build(model.training.trainable_variables)

    @property
    def variables(self) -> list[keras.Variable]:
        """All that a training changes: weights, batch statistics, optimizer."""
        return [*self.model.training.variables, *self.optimizer.variables]

    def train_epoch(self, table: PatchTable, epoch: int, progress: EpochProgress) -> Predictions:
        """One pass over all patches, each once. The predictions are those made before each step's update."""
        batches = self._batches(table, self._seed)
        first = epoch * batches.steps_per_epoch
        number = tf.constant(epoch_seed(self._seed, epoch), tf.int64)
        return self._collect(batches, first, lambda b: self._train_step(b, number), progress)

    def predict(self, table: PatchTable, progress: EpochProgress) -> Predictions:
        """Predictions of every patch in the table's order, by the model as it is saved."""
        return self._collect(self._batches(table, None), 0, self._predict_step, progress)

    def _batches(self, table: PatchTable, seed: int | None) -> Batches:
        return Batches(
            self._stores, table, batch_size=self._batch_size, seed=seed,
            replicas=self.strategy.num_replicas_in_sync,
        )  # fmt: skip

    def _collect(
        self, batches: Batches, first: int, step: Any, progress: EpochProgress
    ) -> Predictions:
        """Run a step over an epoch's batches and gather its results on the host."""
        collected: list[tuple[Any, ...]] = []
        waits = 0.0
        started = time.monotonic()
        with closing(self._timed(batches, first)) as steps:
            for batch, waited in steps:
                waits += waited
                collected.append(self.strategy.experimental_local_results(step(batch)))
                progress.advance()
        rows = [
            [np.asarray(part[i]) for results in collected for part in results] for i in range(4)
        ]
        key, label, probability, losses = (np.concatenate(part) for part in rows)
        real = losses[:, 1] > 0
        weight = losses[real, 1]
        return Predictions(
            key[real], label[real], probability[real],
            loss=float(np.average(losses[real, 0], weights=weight)),
            seconds=time.monotonic() - started, input_wait=waits,
        )  # fmt: skip

    def _timed(self, batches: Batches, first: int) -> Generator[tuple[Any, float]]:
        """Each step's batch, one part a replica, with the seconds it was waited for.

        From a plain iterator: the one that tf.distribute makes for its devices runs a tuner whatever the dataset's options
        say, and was seen to wait 2 to 7 s for that tuner's sleep at the end of an epoch.
        """
        source = BatchSource(batches)
        parts = iter(source.dataset(first, first + batches.steps_per_epoch))
        try:
            for _ in range(batches.steps_per_epoch):
                before = time.monotonic()
                step = [next(parts) for _ in range(batches.replicas)]
                waited = time.monotonic() - before
                yield self._one_a_replica(step), waited
        except tf.errors.OpError:
            if source.failure is not None:
                raise source.failure from None  # what really happened, with its type
            raise
        finally:
            source.settle()

    def _one_a_replica(self, parts: list[dict[str, tf.Tensor]]) -> Any:
        def part(context: tf.distribute.ValueContext) -> dict[str, tf.Tensor]:
            return parts[int(context.replica_id_in_sync_group)]

        return self.strategy.experimental_distribute_values_from_function(part)

    @tf.function  # type: ignore[untyped-decorator]  # tensorflow has no types
    def _train_step(self, batch: Any, epoch_number: tf.Tensor) -> Any:
        return self.strategy.run(self._train_replica, args=(batch, epoch_number))

    @tf.function  # type: ignore[untyped-decorator]  # tensorflow has no types
    def _predict_step(self, batch: Any) -> Any:
        return self.strategy.run(self._predict_replica, args=(batch,))

    def _train_replica(self, batch: dict[str, tf.Tensor], epoch_number: tf.Tensor) -> Any:
        seeds = sample_seeds(batch["key"], epoch_number)
        images = flip_and_turn(batch["image"], seeds) if self._augment else batch["image"]
        variables = self.model.training.trainable_variables
        weight = self._weight(batch)
        with tf.GradientTape() as tape:
            logits = self.model.training([images, seeds], training=True)
            losses = _cross_entropy(batch["label"], logits)
            loss = tf.reduce_sum(losses * weight)
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(weight))
        gradients = [
            tf.math.divide_no_nan(g, total)
            for g in tape.gradient(loss, [variable.value for variable in variables])
        ]
        # Keras' optimizer sums them over the replicas.
        self.optimizer.apply(gradients, variables)
        return self._results(batch, tf.nn.softmax(logits), losses, weight)

    def _predict_replica(self, batch: dict[str, tf.Tensor]) -> Any:
        probability = self.model.serving(batch["image"], training=False)
        losses = _cross_entropy(batch["label"], tf.math.log(tf.maximum(probability, 1e-12)))
        return self._results(batch, probability, losses, self._weight(batch))

    def _weight(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        return batch["weight"] * tf.gather(self._class_weight, tf.maximum(batch["label"], 0))

    def _results(
        self,
        batch: dict[str, tf.Tensor],
        probability: tf.Tensor,
        losses: tf.Tensor,
        weight: tf.Tensor,
    ) -> Any:
        return batch["key"], batch["label"], probability, tf.stack([losses, weight], axis=1)


def _cross_entropy(label: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """(B,) float32 softmax cross-entropy."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(label, tf.cast(logits, tf.float32))
