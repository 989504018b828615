"""What a training writes besides its model and state: TensorBoard logs, the environment, the results."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.dataset.options import Side
from histopipe.evaluation.predictions_file import write_predictions
from histopipe.evaluation.scores import PatchScores
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS, TrainResult

FOLDER = "tensorboard"


def write_tensorboard(folder: Path, row: dict[str, Any], step_losses: NDArray[np.float64]) -> None:
    """Write the metrics of a complete epoch. A resumed run writes at most that epoch again, with the same values.

    Args:
        folder: folder of the run.
        row: of `history.csv`.
        step_losses: (S,) losses of its steps.
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
    """Do as `tf.summary.scalar`, which needs TensorBoard installed where the training runs."""
    kind = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=kind)
    tf.summary.write(name, tf.constant(value, tf.float32), step=step, metadata=metadata)


def write_results(
    folder: Path, scores: Mapping[Side, PatchScores], result: TrainResult, facts: Mapping[str, Any]
) -> None:
    """Write `predictions.csv` and then `metrics.json`, which marks the run as finished.

    Args:
        folder: folder of the run.
        scores: predictions of the best model, by side.
        result: its evaluation.
        facts: what else `metrics.json` holds.
    """
    write_predictions(
        folder / run_folder.PREDICTIONS,
        [({"split": side}, patches) for side, patches in scores.items()],
    )
    versions = {
        "histopipe": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "environment": _environment(),
    }
    run_folder.write_json(folder / METRICS, {**versions, **facts, **result.to_json()})


def _environment() -> dict[str, object]:
    """Versions and devices, without names of the machine or its user."""
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    build = tf.sysconfig.get_build_info()
    return {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [str(it.get("device_name", "unknown")) for it in details],
        "cuda": str(build.get("cuda_version", "none")) if gpus else "none used",
    }
