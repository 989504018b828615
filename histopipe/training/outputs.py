"""What a training writes besides its model and state: TensorBoard logs, results, and the attention of bag models."""

from __future__ import annotations

import csv
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.dataset.options import Side
from histopipe.errors import DamagedStore
from histopipe.evaluation.predictions_file import write_predictions
from histopipe.evaluation.scores import PatchScores
from histopipe.features.bag_batches import read_bag
from histopipe.features.bag_set import Bag
from histopipe.features.feature_file import read_coords
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS, TrainResult
from histopipe.system.files import appearing, path_within
from histopipe.system.progress import message
from histopipe.training.bag_model import BagModel
from histopipe.training.bag_train_step import PIECE
from histopipe.training.train_step import values_of

_TENSORBOARD = "tensorboard"
_COLUMNS = ("slide", "x_l0", "y_l0", "size_l0", "attention")


def write_tensorboard(folder: Path, row: dict[str, Any], step_losses: NDArray[np.float64]) -> None:
    """Write the metrics of a complete epoch, a row of `history.csv`, and the (S,) losses of its steps.

    A resumed run writes at most that epoch again, with the same values.
    """
    epoch = row["epoch"]
    writer = tf.summary.create_file_writer(str(folder / _TENSORBOARD), filename_suffix=f".{epoch}")
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
    """Write the predictions, and then `metrics.json`, which marks the run as finished. `facts` are added to it."""
    tables = [({"split": side}, patches) for side, patches in scores.items()]
    write_predictions(folder / run_folder.PREDICTIONS, tables)
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


def attention_of(model: BagModel, features: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the (N,) shares of a bag's (N, D) patches, which add up to 1."""
    weights = values_of(model.patch_weights)
    pieces = np.split(features, range(PIECE, len(features), PIECE))
    found = [model.patches(weights, piece, np.arange(len(piece)), None)[1] for piece in pieces]
    scores = np.concatenate(found).astype(np.float64)
    shares = np.exp(scores - scores.max())
    return np.asarray(shares / shares.sum())


def write_attention(folder: Path, bags: Sequence[Bag], model: BagModel) -> None:
    """Write a file per bag: slide, corner and side in level-0 pixels (empty if unknown) and attention of each patch."""
    for bag in bags:
        try:
            path = path_within(folder / run_folder.ATTENTION, f"{bag.id}.csv")
            attention = attention_of(model, read_bag(bag, bag.headers[0].dtype))
            rows = list(_rows(bag, attention))
        except DamagedStore as error:  # one that was skipped in training, too
            message(f"no attention of {bag.id}: {error}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            appearing(path, hidden=True) as part,
            part.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            writer.writerows(rows)


def _rows(bag: Bag, attention: NDArray[np.float64]) -> Iterable[tuple[object, ...]]:
    shares = iter(attention.tolist())
    for slide, header in zip(bag.slides, bag.headers, strict=True):
        coords = read_coords(header)
        side = header.coords.get("patch_size_level0", "")
        corners = [("", "")] * header.rows if coords is None else coords.tolist()
        for (x, y), share in zip(corners, shares, strict=False):
            yield slide, x, y, side, f"{share:.9g}"
