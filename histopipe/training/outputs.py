"""Outputs of a training, except its model and state: predictions, metrics, TensorBoard logs, attention."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.dataset.sampling import BatchSampler
from histopipe.dataset.selection import SampleLocations, unpack_keys
from histopipe.errors import UsageError
from histopipe.predictions.prediction_tables import PREDICTIONS, write_predictions
from histopipe.runs.result import METRICS, TrainResult
from histopipe.splits.splits import SampleSource, Splits
from histopipe.splits.subsets import Subset
from histopipe.system.files import write_json
from histopipe.system.worker_pool import count_usable_cores
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.task import Predictions, Task

DIVERGED = "lower --learning-rate, or clip the gradients (--clip-norm 1)"
"""What to do if losses or weights are not finite."""


@dataclass(frozen=True, slots=True)
class SampleOutputs:
    """Outputs of a model, in the order of the batches."""

    samples: SampleLocations
    output: NDArray[np.float32]
    """(N, C), such as probabilities."""
    loss: float
    """Mean loss, weighted by class."""


@dataclass(slots=True)
class StepResults:
    """Results of the completed steps of a pass."""

    values: list[NDArray[np.float32]] = field(default_factory=list)
    """By step, (B, C + 2) of this worker's rows: probabilities, loss, and weight in the loss."""
    seconds: float = 0.0
    """Wall time."""
    input_wait: float = 0.0
    """Part of the wall time spent waiting for batches."""


def step_losses(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the (S,) mean over the rows of weight times loss, from (S, B, C + 2) float32; NaN if no row has weight."""
    losses, weights = values[..., -2].astype(np.float64), values[..., -1].astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray((losses * weights).sum(axis=1) / (weights > 0).sum(axis=1))


def check_finite(values: NDArray[np.float32], epoch: int) -> None:
    """Raise a UsageError if a loss of an epoch, counted from 1, is not finite. `values` are (S, B, C + 2) float32."""
    diverged = np.flatnonzero(~np.isfinite(step_losses(values)) & values[..., -1].any(axis=1))
    if len(diverged):
        raise UsageError(
            f"the loss of epoch {epoch} is not finite from step {diverged[0] + 1} on",
            todo=DIVERGED,
        )


def predictions(
    batches: BatchSampler, epoch: int, values: NDArray[np.float32]
) -> SampleOutputs | None:
    """Return the results of an epoch's first steps, (S, B, C + 2) of all workers; None if no row has weight.

    Keys and labels are computed again from the batches, which is cheaper than keeping them.
    """
    flat = values.reshape(-1, values.shape[-1])
    places = np.flatnonzero(flat[:, -1] > 0)
    if not len(places):
        return None
    flat = flat[places]
    return SampleOutputs(
        batches.at(places, epoch)[0],
        flat[:, :-2],
        loss=float(np.average(flat[:, -2].astype(np.float64), weights=flat[:, -1])),
    )


def located(
    outputs: SampleOutputs,
    sources: Sequence[SampleSource],
    splits: Splits,
    *,
    task: Task,
    output: NDArray[np.float32],
    level: EvaluationLevel = "patch",
) -> Predictions:
    """Return predictions of patches or bags with their slides, patients and positions, in the order of the slides.

    `output` are (N, C) outputs of the task.
    """
    keys = outputs.samples.keys
    order = np.argsort(keys, kind="stable")
    ordinals, numbers, rows = unpack_keys(keys[order])
    begins = np.unique(keys[order] >> 32, return_index=True)[1]
    places = list(zip(ordinals[begins].tolist(), numbers[begins].tolist(), strict=True))
    counts, names, in_split = np.diff(begins, append=len(order)), splits.names, splits.by_place
    patients = [in_split[place].patient for place in places]
    patient_numbers = {patient: n for n, patient in enumerate(dict.fromkeys(patients))}
    corners = np.zeros((len(order), 2), np.int64)
    if level == "patch":
        for (store, number), begin, count in zip(places, begins, counts, strict=True):
            here = slice(begin, begin + count)
            index = sources[store].index(number)
            corners[here] = np.stack([index[name][rows[here]] for name in ("x_l0", "y_l0")], axis=1)
    return Predictions(
        task,
        tuple(names[place] for place in places),
        tuple(patient_numbers),
        slide=np.repeat(np.arange(len(places), dtype=np.int32), counts),
        patient=np.repeat(
            np.array([patient_numbers[patient] for patient in patients], np.int32), counts
        ),
        x_l0=corners[:, 0],
        y_l0=corners[:, 1],
        target=targets_of(outputs, splits)[order],
        output=output[order],
        level=level,
    )


def targets_of(outputs: SampleOutputs, splits: Splits) -> NDArray[np.float64]:
    """Return the (N, T) targets of samples; of a classification the class of the patch or bag."""
    if splits.task.of_classes:
        label = outputs.samples.labels
        return np.where(label >= 0, label, np.nan)[:, None].astype(np.float64)
    in_split = splits.by_place
    places = zip(outputs.samples.stores.tolist(), outputs.samples.slides.tolist(), strict=True)
    target = [in_split[place].target for place in places]
    return np.array(target, np.float64).reshape(len(target), len(splits.targets))


def write_tensorboard(folder: Path, row: dict[str, Any], step_losses: NDArray[np.float64]) -> None:
    """Write the metrics of a complete epoch, a row of `history.csv`, and the (S,) losses of its steps.

    A resumed run may write one epoch again, with the same values.
    """
    epoch = row["epoch"]
    scalars = [
        (name, value, epoch) for name, value in row.items() if name != "epoch" and value is not None
    ]
    steps = enumerate(step_losses.tolist(), (epoch - 1) * len(step_losses) + 1)
    scalars += [("step_loss", loss, step) for step, loss in steps if math.isfinite(loss)]
    # As `tf.summary.scalar` writes, but without the TensorBoard package.
    metadata = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"})
    writer = tf.summary.create_file_writer(str(folder / "tensorboard"), filename_suffix=f".{epoch}")
    with writer.as_default():
        for name, value, step in scalars:
            tf.summary.write(name, tf.constant(value, tf.float32), step=step, metadata=metadata)
    writer.close()


def write_results(
    folder: Path,
    predicted: Mapping[Subset, Predictions],
    result: TrainResult,
    description: Mapping[str, Any],
) -> None:
    """Write the predictions, and then `metrics.json`, which marks the run as finished. `description` are added to it.

    It names versions and devices, but neither the machine nor the user.
    """
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    write_predictions(
        folder / PREDICTIONS, [({"split": subset}, part) for subset, part in predicted.items()]
    )
    write_json(
        folder / METRICS,
        {
            "histopipe": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "environment": {
                "python": sys.version.split()[0],
                "numpy": np.__version__,
                "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
                "cores": count_usable_cores(),
                "gpus": [str(detail.get("device_name", "unknown")) for detail in details],
                "cuda": str(tf.sysconfig.get_build_info().get("cuda_version", "none"))
                if gpus
                else "none used",
            },
            **description,
            **result.to_json(),
        },
    )
