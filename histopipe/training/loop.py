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

from histopipe.dataset.augmentation import augment, epoch_seed, sample_seeds, to_uint8
from histopipe.dataset.batches import Batches, OnError
from histopipe.dataset.kinds import Augmentation
from histopipe.dataset.loader import BatchSource
from histopipe.dataset.sampling import Balance, make_order
from histopipe.dataset.stain import StainNormaliser
from histopipe.dataset.table import PatchTable
from histopipe.errors import DamagedStore
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
        augmentations: of training patches.
        normalise: gives every patch the same stain, if wanted.
        balance, shuffle_block: how an epoch goes through the training patches.
        on_error: what a damaged patch does.

    Attributes:
        skipped: why, by key, for every patch that has been skipped so far.
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
        augmentations: Sequence[Augmentation] = (),
        normalise: StainNormaliser | None = None,
        balance: Balance = "none",
        shuffle_block: int | None = None,
        on_error: OnError = "raise",
    ) -> None:
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self._stores, self._batch_size, self._seed = stores, batch_size, seed
        self._class_weight = tf.constant(class_weight, tf.float32)
        self._augmentations, self._normalise = tuple(augmentations), normalise
        self._balance, self._shuffle_block, self._on_error = balance, shuffle_block, on_error
        self.skipped: dict[int, str] = {}
        with strategy.scope():
            optimizer.build(model.training.trainable_variables)

    @property
    def variables(self) -> list[keras.Variable]:
        """All that a training changes: weights, batch statistics, optimizer."""
        return [*self.model.training.variables, *self.optimizer.variables]

    def train_epoch(self, table: PatchTable, epoch: int, title: str) -> Predictions:
        """One epoch. The predictions are those made before each step's update."""
        batches = self._batches(table, self._seed, self._balance, self._shuffle_block)
        first = epoch * batches.steps_per_epoch
        number = tf.constant(epoch_seed(self._seed, epoch), tf.int64)
        return self._collect(batches, first, lambda b: self._train_step(b, number), title)

    def predict(self, table: PatchTable, title: str) -> Predictions:
        """Predictions of every patch in the table's order, by the model as it is saved."""
        return self._collect(self._batches(table, None), 0, self._predict_step, title)

    def step_rate(self, seconds: float) -> float:
        """Patches a second of training steps on one batch that is at hand. The weights change."""
        rows = -(-self._batch_size // self.strategy.num_replicas_in_sync)
        side = self.model.serving.input_shape[1]
        part = {
            "image": tf.zeros((rows, side, side, 3), tf.uint8),
            "label": tf.zeros((rows,), tf.int32),
            "weight": tf.ones((rows,)),
            "key": tf.range(rows, dtype=tf.int64),
        }
        batch = self._one_a_replica([part] * self.strategy.num_replicas_in_sync)
        number = tf.constant(0, tf.int64)
        np.asarray(self.strategy.experimental_local_results(self._train_step(batch, number))[0][0])
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            results = self._train_step(batch, number)
            # What is asked for has been computed: devices work on behind the call's back.
            np.asarray(self.strategy.experimental_local_results(results)[0][2])
            count += self._batch_size
        return count / (time.perf_counter() - begun)

    def _batches(
        self,
        table: PatchTable,
        seed: int | None,
        balance: Balance = "none",
        shuffle_block: int | None = None,
    ) -> Batches:
        return Batches(
            self._stores, table, batch_size=self._batch_size, on_error=self._on_error,
            order=make_order(table, seed=seed, balance=balance, shuffle_block=shuffle_block),
            replicas=self.strategy.num_replicas_in_sync,
        )  # fmt: skip

    def _collect(self, batches: Batches, first: int, step: Any, title: str) -> Predictions:
        """Run a step over an epoch's batches and gather its results on the host."""
        collected: list[tuple[Any, ...]] = []
        waits = 0.0
        started = time.monotonic()
        with (
            closing(EpochProgress(title, batches.steps_per_epoch)) as progress,
            closing(self._timed(batches, first)) as steps,
        ):
            for batch, waited in steps:
                waits += waited
                collected.append(self.strategy.experimental_local_results(step(batch)))
                progress.advance()
        self.skipped |= batches.skipped
        rows = [
            [np.asarray(part[i]) for results in collected for part in results] for i in range(4)
        ]
        key, label, probability, losses = (np.concatenate(part) for part in rows)
        real = losses[:, 1] > 0
        if not real.any():
            raise DamagedStore(
                f"{title}: every patch is damaged", found=next(iter(batches.skipped.values()), None),
                todo="ingest the slides again",
            )  # fmt: skip
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
        images = to_uint8(augment(self._normalised(batch), seeds, self._augmentations))
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
        images = to_uint8(self._normalised(batch))
        probability = self.model.serving(images, training=False)
        losses = _cross_entropy(batch["label"], tf.math.log(tf.maximum(probability, 1e-12)))
        return self._results(batch, probability, losses, self._weight(batch))

    def _normalised(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        if self._normalise is None:
            return batch["image"]
        return self._normalise(batch["image"], batch["key"])

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
