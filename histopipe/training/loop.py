"""The training loop over `tf.distribute`: passes over a table of patches, step by step.

Ours instead of Keras' `fit`, which fails on a batch that the replicas cannot share evenly. Every global batch has its full
size, rows that fill it up weigh nothing, and the loss is divided by the weight of the *global* batch: so N replicas do what
one would.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.augmentation import epoch_seed
from histopipe.dataset.batch_sampler import replica_rows
from histopipe.dataset.orders import Order, Sequential
from histopipe.dataset.sample_table import SampleTable
from histopipe.dataset.tf_data import BatchFeed
from histopipe.runs.workers import COMPUTING, READING, Cluster
from histopipe.system.progress import default_progress
from histopipe.training.collectives import gathered
from histopipe.training.memory import MicroBatch
from histopipe.training.steps import Steps
from histopipe.training.tally import Predictions, Tally, predictions

_BEHIND = 2
"""Steps whose results may still be on the device: to fetch them at once would make it wait for the host."""


class Wishes(NamedTuple):
    """What a worker wants before the next step; above 0 for yes."""

    save: float = 0.0
    stop: float = 0.0


def _nothing(*_: Any) -> None:
    pass


class Trainer:
    """Passes of a model over patches.

    Args:
        steps: what a step computes.
        make_batches: of a table in an order, in a part for each of so many replicas.
        seed: of augmentation and dropout.
        micro_batch: makes, from what a replica could compute at once, what it does; all if not given.
        cluster: the workers; this process alone if not given.

    Attributes:
        skipped: why, by key, for every patch that has been skipped so far.
        micro_batch: how many patches a replica computes at once.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        make_batches: Callable[[SampleTable, Order, int], Any],
        seed: int,
        micro_batch: Callable[[int], MicroBatch] = MicroBatch,
        cluster: Cluster | None = None,
    ) -> None:
        self.steps, self._strategy = steps, steps.strategy
        self._cluster = cluster or Cluster()
        self._make_batches, self._seed = make_batches, seed
        self._batch_size = steps.settings.batch_size
        self._replicas = self._strategy.num_replicas_in_sync
        self._own = self._cluster.own_part(self._replicas)
        self._rows = max(len(self._rows_of(replica)) for replica in range(self._replicas))
        self.micro_batch = micro_batch(steps.whole(self._rows))
        self.skipped: dict[int, str] = {}

    def batches(self, table: SampleTable, order: Order) -> Any:
        """Batches of a table, in a part for each replica."""
        return self._make_batches(table, order, self._replicas)

    def train_epoch(
        self,
        batches: Any,
        epoch: int,
        title: str,
        tally: Tally,
        *,
        wishes: Callable[[], Wishes] = Wishes,
        granted: Callable[[Wishes], None] = _nothing,
    ) -> None:
        """One epoch, or the rest of it.

        Args:
            batches: from `batches`.
            epoch: from 0.
            title: of its progress bar.
            tally: of the steps that have been done; gets the results of the others, made before each step's update.
            wishes: asked in each step.
            granted: told after a step, on all workers behind the same one, what any of them wished for.
        """
        number = tf.constant(epoch_seed(self._seed, epoch), tf.int64)
        told: Any = None

        def step(batch: Any) -> Any:
            nonlocal told
            gradients, values = self.micro_batch.fit(
                lambda size: self.steps.gradients(batch, number, self._rows, size)
            )
            wanted = wishes()
            before, told = told, self.steps.apply(gradients, tf.constant(wanted))
            if self._cluster.alone:
                return values, wanted
            # What was wished a step ago: all workers know it by now without waiting for their devices.
            return values, Wishes() if before is None else Wishes(*before.numpy().tolist())

        self._run(batches, epoch * batches.steps_per_epoch, step, title, tally, granted=granted)

    def predict(
        self, table: SampleTable, title: str, *, between: Callable[[], None] = _nothing
    ) -> Predictions | None:
        """Predictions of every patch in the table's order, by the model as it is saved; None if all are damaged.

        Args:
            table: the patches.
            title: of the progress bar.
            between: called before each step.
        """
        batches, tally = self.batches(table, Sequential(len(table))), Tally()

        def step(batch: Any) -> Any:
            between()
            values = self.micro_batch.fit(
                lambda size: self.steps.predictions(batch, self._rows, size)
            )
            return values, Wishes()

        self._run(batches, 0, step, title, tally)
        return predictions(
            batches, 0, self.gathered(tally), seconds=tally.seconds, input_wait=tally.input_wait
        )

    def gathered(self, tally: Tally) -> NDArray[np.float32]:
        """The results so far of all workers, (S, B, C + 2) float32. All of them must call it."""
        classes = self.steps.classes
        rows = sum(len(self._rows_of(replica)) for replica in self._own)
        values = np.asarray(tally.values, np.float32).reshape(-1, rows, classes + 2)
        return gathered(self._cluster, self._strategy, values)

    def own_rows(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """This worker's part of `gathered`, as a tally has it."""
        first, last = self._rows_of(self._own[0]), self._rows_of(self._own[-1])
        return list(values[:, first.start : last.stop])

    def step_rate(self, seconds: float) -> float:
        """Patches a second of training steps on one batch that is at hand. The weights change."""
        side = self.steps.model.serving.input_shape[1]
        sizes = [len(self._rows_of(replica)) for replica in self._own]
        parts = [
            {
                "image": tf.zeros((rows, side, side, 3), tf.uint8),
                "label": tf.zeros((rows,), tf.int32),
                "weight": tf.ones((rows,)),
                "key": tf.range(rows, dtype=tf.int64),
            }
            for rows in sizes
        ]
        batch, number = self._one_a_replica(parts), tf.constant(0, tf.int64)

        def step() -> None:
            gradients, values = self.steps.gradients(batch, number, self._rows, self._rows)
            self.steps.apply(gradients, tf.zeros(2))
            # What is asked for has been computed: devices work on behind the call's back.
            np.asarray(values[0][0])

        step()
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            step()
            count += self._batch_size
        return count / (time.perf_counter() - begun)

    def _rows_of(self, replica: int) -> range:
        return replica_rows(self._batch_size, self._replicas, replica)

    def _run(
        self,
        batches: Any,
        first: int,
        step: Callable[[Any], tuple[Any, Wishes]],
        title: str,
        tally: Tally,
        *,
        granted: Callable[[Wishes], None] = _nothing,
    ) -> None:
        """Do the steps of a pass that its tally does not have yet."""
        done = len(tally.values)
        behind: deque[Any] = deque()
        before = tally.seconds
        started = time.monotonic()

        def fetch(most: int) -> None:
            while len(behind) > most:
                tally.values.append(self._on_host(behind.popleft()))
            tally.seconds = before + time.monotonic() - started

        with (
            closing(
                default_progress().bar(
                    title, unit="steps", total=batches.steps_per_epoch, done=done, detail=True
                )
            ) as progress,
            closing(self._timed(batches, first + done, first + batches.steps_per_epoch)) as steps,
        ):
            for batch, waited in steps:
                tally.input_wait += waited
                self._cluster.note(COMPUTING)
                values, wishes = step(batch)
                del batch
                behind.append(values)
                self.skipped |= batches.skipped
                fetch(_BEHIND)
                if any(wishes):
                    fetch(0)  # who is told of a wish is shown all of the results
                    granted(wishes)
                progress.advance()
        fetch(0)

    def _on_host(self, values: Any) -> NDArray[np.float32]:
        """One step's results, by micro-batch and replica, as (B, C + 2) of this worker's rows."""
        return np.concatenate(
            [
                np.concatenate([part[i] for part in values])[: len(self._rows_of(replica))]
                for i, replica in enumerate(self._own)
            ]
        )

    def _timed(self, batches: Any, first: int, last: int) -> Generator[tuple[Any, float]]:
        """Each step's batch, one part a replica, with the seconds it was waited for.

        From a plain iterator: the one that tf.distribute makes for its devices runs a tuner whatever the dataset's options
        say, and was seen to wait 2 to 7 s for that tuner's sleep at the end of an epoch.
        """
        source = BatchFeed(batches, self._own)
        parts = iter(source.dataset(first, last))
        try:
            for _ in range(first, last):
                before = time.monotonic()
                self._cluster.note(READING)
                step = [next(parts) for _ in self._own]
                waited = time.monotonic() - before
                yield self._one_a_replica(step), waited
                del step  # not to be kept beside the next one
        except tf.errors.OpError:
            if source.failure is not None:
                raise source.failure from None  # what really happened, with its type
            raise
        finally:
            source.settle()

    def _one_a_replica(self, parts: Sequence[dict[str, tf.Tensor]]) -> Any:
        def part(context: tf.distribute.ValueContext) -> dict[str, tf.Tensor]:
            return parts[int(context.replica_id_in_sync_group) - self._own[0]]

        return self._strategy.experimental_distribute_values_from_function(part)
