"""What follows the end of an epoch, and of a training, in the process that writes the run.

At the end of a training, this is the range of its features, which `predict` compares other slides with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.augmentation import to_uint8
from histopipe.dataset.bags import read_bag
from histopipe.dataset.batches import BagBatches, PatchBatches
from histopipe.errors import DamagedStore
from histopipe.evaluation.unusual import (
    MOST_SLIDES,
    RANGE,
    PatchFeatures,
    TrainingRange,
    spread,
    training_range,
)
from histopipe.runs import folder as run_folder
from histopipe.runs.callbacks import EpochObserver
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import TrainResult
from histopipe.runs.train import advise
from histopipe.splits.splits import Splits
from histopipe.splits.subsets import Subset
from histopipe.system.files import atomic_write
from histopipe.system.output import message
from histopipe.system.table_files import write_dicts
from histopipe.training.models import without_last_layer
from histopipe.training.outputs import TrainState, save_state
from histopipe.training.train_step import TrainStep
from histopipe.training.training_setup import TrainingSetup


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


def write_range(folder: Path, setup: TrainingSetup, model: keras.Model, step: TrainStep) -> None:
    """Write the range of a training. Without it, the run is complete, but `predict` marks no unusual slides."""
    try:
        written = range_of_training(setup, model, step)
        if written is not None:
            written.write(folder)
    except (OSError, ValueError, MemoryError, np.linalg.LinAlgError, tf.errors.OpError) as error:
        reason = str(error).split("\n")[0][:200]
        message(f"warning: no {RANGE}, so that unusual slides will not be marked: {reason}")


def range_of_training(
    setup: TrainingSetup, model: keras.Model, step: TrainStep
) -> TrainingRange | None:
    """Return the range of the features of a trained model: those of bags, or the input of its last layer.

    The limits are from patients who are in neither training nor test.
    """
    seed = setup.splits.seed

    def features_of(subset: Subset) -> PatchFeatures:
        batches: Any = setup.batches(subset, 1)
        if isinstance(batches, BagBatches):
            return _features_of_bags(batches, setup.splits, subset, seed)
        return _features_of_patches(batches, setup.splits, model, step, seed)

    held_out: Sequence[Subset] = ("validation", "calibration")
    of_subsets = [features_of(subset) for subset in held_out if subset in setup.subsets]
    joined = PatchFeatures.joined(of_subsets) if of_subsets else None
    return training_range(features_of("train"), joined, seed)


def _features_of_patches(
    batches: PatchBatches, splits: Splits, model: keras.Model, step: TrainStep, seed: int
) -> PatchFeatures:
    """Return the features of patches of random slides, without augmentation."""
    network, slides, parts = without_last_layer(model), splits.by_place, []
    table = batches.table
    chosen = np.random.default_rng(seed).permutation(len(table.counts))[:MOST_SLIDES]
    numbers = np.concatenate([table.starts[i] + spread(table.counts[i]) for i in chosen.tolist()])
    for first in range(0, len(numbers), _ROWS):
        located = table.locate(numbers[first : first + _ROWS])
        batch = batches.read(located, np.ones(len(located.rows), np.float32))
        images = to_uint8(step.normalized({"image": batch["image"].copy(), "key": batch["key"]}))
        values = np.asarray(network(images, training=False), np.float32)
        places = zip(located.stores.tolist(), located.slides.tolist(), strict=True)
        patients = np.array([slides[place].patient for place in places])
        features = PatchFeatures(values, located.labels, located.keys >> 32, patients)
        parts.append(features.rows(batch["weight"] > 0))
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
