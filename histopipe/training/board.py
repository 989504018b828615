"""Logs for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

FOLDER = "tensorboard"


def write_epoch(folder: Path, row: dict[str, Any], step_losses: NDArray[np.float64]) -> None:
    """Write one epoch's figures, once it is whole: a resumed run writes at most that epoch again, and the same.

    Args:
        folder: the run's.
        row: of `history.csv`.
        step_losses: (S,) of its steps.
    """
    epoch = row["epoch"]
    writer = tf.summary.create_file_writer(str(folder / FOLDER), filename_suffix=f".{epoch}")
    with writer.as_default():
        for name, value in row.items():
            if name != "epoch" and value is not None:
                _write(name, value, epoch)
        for step, loss in enumerate(step_losses, (epoch - 1) * len(step_losses) + 1):
            if np.isfinite(loss):
                _write("step_loss", loss, step)
    writer.close()


def _write(name: str, value: float, step: int) -> None:
    """As `tf.summary.scalar`, which wants TensorBoard installed where the training runs."""
    kind = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=kind)
    tf.summary.write(name, tf.constant(value, tf.float32), step=step, metadata=metadata)
