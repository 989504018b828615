"""Logs for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

FOLDER = "tensorboard"


def write_epoch(folder: Path, row: dict[str, Any], step_losses: NDArray[np.float64]) -> None:
    """Write one epoch's figures, once it is whole: so a resumed run writes none of them twice.

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
                tf.summary.scalar(name, value, step=epoch)
        for step, loss in enumerate(step_losses, (epoch - 1) * len(step_losses) + 1):
            if np.isfinite(loss):
                tf.summary.scalar("step_loss", loss, step=step)
    writer.close()
