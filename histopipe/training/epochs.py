"""Epochs: the loop over their steps, on the replicas of a `tf.distribute` strategy, and what follows their end.

The loop replaces Keras' `fit`, which fails on a batch that cannot be divided evenly among the replicas. Every global batch
has its full size: padding rows have weight 0, and the loss is divided by the weight of the *global* batch. So N
replicas compute the same as one.

The end of an epoch, and of a training, is handled in the process that writes the run. At the end of a training, this is
the range of its features, too, which `predict` compares other slides with.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.bags import read_bag
from histopipe.dataset.batches import BagBatches, PatchBatches
from histopipe.dataset.sampling import BatchSampler, replica_rows
from histopipe.dataset.tf_data import BatchFeed
from histopipe.dataset.transforms import epoch_seed, to_uint8
from histopipe.errors import DamagedStore, first_line
from histopipe.evaluation.unusual import (
    MOST_SLIDES,
    RANGE,
    PatchFeatures,
    TrainingRange,
    spread,
    training_range,
)
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.observers import EpochObserver
from histopipe.runs.run import TrainResult
from histopipe.runs.supervision import COMPUTING, READING, Cluster, signals_handled
from histopipe.runs.train import advise
from histopipe.splits.splits import Splits
from histopipe.system.files import atomic_write
from histopipe.system.output import Bar, default_progress, message
from histopipe.system.table_files import write_dicts
from histopipe.tasks.choices import Subset
from histopipe.training.devices import MicroBatch, gathered, one_per_replica
from histopipe.training.models import without_last_layer
from histopipe.training.outputs import SampleOutputs, TrainState, predictions, save_state
from histopipe.training.patch_training import FeatureBatches
from histopipe.training.train_step import TrainStep
from histopipe.training.training_setup import TrainingSetup

_IN_FLIGHT = 2
"""Steps whose results may still be on the device. Fetching them at once would make the device wait for the host."""


Requests = tuple[float, float]
"""Requests of a worker before the next step, to save and to stop; above 0 for yes."""
NO_REQUEST: Requests = (0.0, 0.0)


class StopSignals:
    """Turns SIGTERM and Ctrl-C into a request to stop after the current step. A second Ctrl-C interrupts at once.

    Also requests a checkpoint every `save_minutes`. `stopping` is set after a signal. `saveable` is set as soon as
    there is a state to save; before that, a signal interrupts at once. `saved_at` is the time of the last checkpoint.
    """

    def __init__(self, save_minutes: float) -> None:
        self._seconds = 60 * save_minutes
        self.saved_at = time.monotonic()
        self.stopping = self.saveable = False

    def requests(self) -> Requests:
        """Return the requests before the next step."""
        return float(time.monotonic() - self.saved_at >= self._seconds), float(self.stopping)

    def handled(self) -> AbstractContextManager[None, bool | None]:
        """Handle signals in the main thread. Enter it after the workers connect, because TensorFlow then sets a handler."""
        return signals_handled(self._stop)

    def _stop(self, number: int, *_: object) -> None:
        if not self.saveable or (self.stopping and number == signal.SIGINT):
            raise KeyboardInterrupt
        self.stopping = True


class EpochLoop:
    """Runs a training step, or a prediction, over all batches of an epoch.

    `seed` is that of augmentation and dropout. A replica computes its rows in `accumulate` pieces; `micro_batch` returns
    the micro-batch for the rows of a piece. Without a `cluster`, this process is alone.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        seed: int,
        accumulate: int = 1,
        micro_batch: Callable[[int], MicroBatch] = MicroBatch,
        cluster: Cluster | None = None,
    ) -> None:
        self.step, self._strategy = step, step.strategy
        self._cluster = cluster or Cluster()
        self.overall = Bar()  # of the steps of all epochs
        self._seed, replicas = seed, self._strategy.num_replicas_in_sync
        self._part = self._cluster.own_part(replicas)
        rows = [replica_rows(step.settings.batch_size, replicas, i) for i in range(replicas)]
        self._local_rows, self._rows = rows[self._part.start : self._part.stop], max(map(len, rows))
        self.micro_batch = micro_batch(-(-(step.largest_piece or self._rows) // accumulate))

    def train_epoch(
        self,
        batches: BatchSampler,
        state: TrainState,
        title: str,
        *,
        requests: Callable[[], Requests] = lambda: NO_REQUEST,
        granted: Callable[[bool], None] | None = None,
        callbacks: keras.callbacks.CallbackList | None = None,
    ) -> None:
        """Train the epoch of a state, or the rest of it. Results and times are added to those of completed steps.

        Results are predictions before each step's update. `requests` returns the requests of this worker before a step.
        `granted` is called on all workers after the same step if one of them has a request, with whether to stop. The
        state has the results of that step.
        """
        number = tf.constant(epoch_seed(self._seed, state.epoch), tf.int64)
        last: Any = None
        callbacks = callbacks or keras.callbacks.CallbackList([])
        numbers = itertools.count(len(state.values))

        def step(batch: Any) -> Any:
            nonlocal last
            step_number = next(numbers)
            callbacks.on_train_batch_begin(step_number)
            gradients, values = self.micro_batch.fit(
                lambda size: self.step.gradients(batch, number, self._rows, size)
            )
            mine = requests()
            before, last = last, self.step.apply(gradients, tf.constant(mine))
            callbacks.on_train_batch_end(step_number)
            if self._cluster.alone:
                return values, mine
            # Requests of the previous step: all workers have them by now without waiting for their devices.
            return values, NO_REQUEST if before is None else before.numpy()

        self._run(batches, step, title, state, granted=granted)

    def predict(
        self, batches: BatchSampler, title: str, before_step: Callable[[], None]
    ) -> SampleOutputs:
        """Return the serving model's predictions in one pass over the batches."""
        state = TrainState()

        def step(batch: Any) -> Any:
            before_step()
            return self.micro_batch.fit(
                lambda size: self.step.predictions(batch, self._rows, size)
            ), NO_REQUEST

        self._run(batches, step, title, state)
        return predictions(batches, 0, state.values, title)

    def _gathered(self, values: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the results of all workers, (S, B, C + 2) float32. All workers must call it."""
        # The shape is needed before the first step.
        rows, columns = sum(map(len, self._local_rows)), self.step.settings.objective.columns + 2
        array = np.asarray(values, np.float32).reshape(-1, rows, columns)
        return gathered(self._cluster, self._strategy, array)

    def _run(
        self,
        batches: BatchSampler,
        step: Callable[[Any], tuple[Any, Requests]],
        title: str,
        state: TrainState,
        *,
        granted: Callable[[bool], None] | None = None,
    ) -> None:
        """Run the steps of the epoch of a state that have no results in it yet."""
        done, total = len(state.values), batches.steps_per_epoch
        remaining = range(state.epoch * total + done, (state.epoch + 1) * total)
        # By step, (B, C + 2) of this worker's rows.
        values = list(state.values[:, self._local_rows[0].start : self._local_rows[-1].stop])
        in_flight: deque[Any] = deque()
        started = time.monotonic() - state.seconds

        def fetch(most: int) -> None:
            while len(in_flight) > most:
                values.append(self._on_host(in_flight.popleft()))
            state.seconds = time.monotonic() - started

        overall = Bar() if granted is None else self.overall
        with (
            default_progress().bar(
                title, unit="steps", total=total, done=done, detail=True
            ) as progress,
            closing(self._read(batches, remaining, state)) as steps,
        ):
            for batch in steps:
                self._cluster.doing = COMPUTING
                results, requested = step(batch)
                del batch
                in_flight.append(results)
                fetch(_IN_FLIGHT)
                if granted is not None and any(requested):
                    fetch(0)  # the saved state needs all results
                    state.values = self._gathered(values)
                    granted(requested[1] > 0)
                progress.advance()
                overall.advance()
        fetch(0)
        state.values = self._gathered(values)

    def _on_host(self, values: Any) -> NDArray[np.float32]:
        """Return the results of a step, by micro-batch and replica, as (B, C + 2) of this worker's rows."""
        by_replica = zip(zip(*values, strict=True), self._local_rows, strict=True)
        return np.concatenate([np.concatenate(parts)[: len(rows)] for parts, rows in by_replica])

    def _read(self, batches: BatchSampler, steps: range, state: TrainState) -> Generator[Any]:
        """Yield each step's batch, one part per replica. Add the seconds spent waiting for it to the state.

        Uses a plain iterator: that of `tf.distribute` runs a tuner regardless of the dataset's options, and waits up to
        7 s for this tuner at the end of an epoch.
        """
        source = BatchFeed(batches, self._part)
        parts = iter(source.dataset(steps.start, steps.stop))
        try:
            for _ in steps:
                before = time.monotonic()
                self._cluster.doing = READING
                step = [next(parts) for _ in self._part]
                state.input_wait += time.monotonic() - before
                yield one_per_replica(self._strategy, step, self._part[0])
                del step  # free it before the next batch is loaded
        except tf.errors.OpError:
            if source.failure is not None:
                raise source.failure from None  # the cause, with its original type
            raise
        finally:
            source.settle()


@dataclass(frozen=True, slots=True)
class EndedEpoch:
    """An epoch that has ended: the state after it, the (S,) losses of its steps, and whether it is the best so far."""

    state: TrainState
    losses: NDArray[np.float64]
    is_better: bool


class Checkpoints(EpochObserver):
    """Saves the best model, and then the state, from which the training continues."""

    def __init__(self, folder: Path, step: TrainStep) -> None:
        self._folder, self._step = folder, step

    def save_model(self) -> None:
        """Save the model."""
        with atomic_write(self._folder / run_folder.MODEL) as part:
            self._step.save(part)

    def save(self, state: TrainState) -> None:
        """Save the state."""
        save_state(self._folder, state, self._step.variables)

    def on_epoch_end(self, epoch: EndedEpoch) -> None:  # noqa: D102
        if epoch.is_better:
            self.save_model()
        self.save(epoch.state)


@dataclass(frozen=True, slots=True)
class History(EpochObserver):
    """Writes `history.csv`."""

    folder: Path

    def on_epoch_end(self, epoch: EndedEpoch) -> None:  # noqa: D102
        write_dicts(self.folder / run_folder.HISTORY, epoch.state.history)


@dataclass(frozen=True, slots=True)
class TensorBoard(EpochObserver):
    """Writes the metrics of each epoch and the losses of its steps. A resumed run may write an epoch again, the same."""

    folder: Path

    def on_epoch_end(self, epoch: EndedEpoch) -> None:  # noqa: D102
        row, losses = epoch.state.history[-1], epoch.losses
        number = row["epoch"]
        scalars = [
            (name, value, number)
            for name, value in row.items()
            if name != "epoch" and value is not None
        ]
        steps = enumerate(losses.tolist(), (number - 1) * len(losses) + 1)
        scalars += [("step_loss", loss, step) for step, loss in steps if np.isfinite(loss)]
        # As `tf.summary.scalar` writes, but without the TensorBoard package.
        metadata = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"})
        writer = tf.summary.create_file_writer(
            str(self.folder / "tensorboard"), filename_suffix=f".{number}"
        )
        with writer.as_default():
            for name, value, step in scalars:
                tf.summary.write(name, tf.constant(value, tf.float32), step=step, metadata=metadata)
        writer.close()


@dataclass(frozen=True, slots=True)
class Advice(EpochObserver):
    """Shows what to try after the training."""

    config: TrainConfig
    splits: Splits

    def on_train_end(self, state: TrainState, result: TrainResult) -> None:  # noqa: D102
        is_drawn = self.config.splits is None and self.config.split_column is None
        advice = advise(
            self.config,
            state.history,
            state.best_epoch,
            patients=len({slide.patient for slide in self.splits.slides}),
            # Only splits that were drawn here can be drawn again.
            shortages=list(self.splits.shortages(self.config.unit)) if is_drawn else [],
        )
        if advice:
            message(advice)


_ROWS = 32
"""Patches of a step, which fit into memory where the batches of the training do not."""


def write_range(
    folder: Path,
    setup: TrainingSetup,
    model: keras.Model,
    step: TrainStep,
    trained: Mapping[Subset, BatchSampler],
) -> None:
    """Write the range of a training. Without it, the run is complete, but `predict` marks no unusual slides."""
    try:
        written = range_of_training(setup, model, step, trained)
        if written is not None:
            written.write(folder)
    except (OSError, ValueError, MemoryError, np.linalg.LinAlgError, tf.errors.OpError) as error:
        reason = first_line(error)
        message(f"warning: no {RANGE}, so that unusual slides will not be marked: {reason}")


def range_of_training(
    setup: TrainingSetup,
    model: keras.Model,
    step: TrainStep,
    trained: Mapping[Subset, BatchSampler],
) -> TrainingRange | None:
    """Return the range of the features of a trained model: those of bags, or the input of its last layer.

    The limits are from patients who are in neither training nor test. Features in the batches of the training are used.
    """
    seed = setup.splits.seed

    def features_of(subset: Subset) -> PatchFeatures:
        stored = trained[subset]
        batches: Any = stored if isinstance(stored, FeatureBatches) else setup.batches(subset, 1)
        if isinstance(batches, BagBatches):
            return _features_of_bags(batches, setup.splits, subset, seed)
        return _features_of_patches(batches, setup.splits, model, step, seed)

    held_out: Sequence[Subset] = ("validation", "calibration")
    of_subsets = [features_of(subset) for subset in held_out if subset in setup.subsets]
    joined = PatchFeatures.joined(of_subsets) if of_subsets else None
    return training_range(features_of("train"), joined, seed)


def _features_of_patches(
    batches: PatchBatches | FeatureBatches,
    splits: Splits,
    model: keras.Model,
    step: TrainStep,
    seed: int,
) -> PatchFeatures:
    """Return the features of patches of random slides, without augmentation."""
    network, slides, parts = without_last_layer(model), splits.by_place, []
    table = batches.table
    chosen = np.random.default_rng(seed).permutation(len(table.counts))[:MOST_SLIDES]
    numbers = np.concatenate([table.starts[i] + spread(table.counts[i]) for i in chosen.tolist()])
    for first in range(0, len(numbers), _ROWS):
        located = table.locate(numbers[first : first + _ROWS])
        if isinstance(batches, FeatureBatches):
            values = batches.features(located.keys)
            is_intact = ~np.isnan(values[:, 0])
        else:
            batch = batches.read(located, np.ones(len(located.rows), np.float32))
            part = {"image": batch["image"].copy(), "key": batch["key"]}
            values = np.asarray(
                network(to_uint8(step.normalized(part)), training=False), np.float32
            )
            is_intact = batch["weight"] > 0
        places = zip(located.stores.tolist(), located.slides.tolist(), strict=True)
        patients = np.array([slides[place].patient for place in places])
        features = PatchFeatures(values, located.labels, located.keys >> 32, patients)
        parts.append(features.rows(is_intact))
    return PatchFeatures.joined(parts)


def _features_of_bags(
    batches: BagBatches, splits: Splits, subset: Subset, seed: int
) -> PatchFeatures:
    """Return the features of patches of random bags."""
    rng, parts = np.random.default_rng(seed), []
    for slide in rng.permutation(np.array(splits.slides_on(subset), object))[:MOST_SLIDES].tolist():
        bag = batches.bags.complete[slide.slide]
        rows = spread(bag.rows)
        columns = (np.full(len(rows), value) for value in (slide.label, bag.id, slide.patient))
        with suppress(DamagedStore):  # training skipped this bag, too
            parts.append(PatchFeatures(read_bag(bag, bag.dtype, rows), *columns))
    return PatchFeatures.joined(parts)
