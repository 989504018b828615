"""What follows the end of an epoch, and of a training, in the process that writes the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.runs import folder as run_folder
from histopipe.runs.callbacks import EpochObserver
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import TrainResult
from histopipe.runs.train import advise
from histopipe.splits.splits import Splits
from histopipe.system.files import atomic_write
from histopipe.system.output import message
from histopipe.system.table_files import write_dicts
from histopipe.training.outputs import TrainState, save_state
from histopipe.training.train_step import TrainStep


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
