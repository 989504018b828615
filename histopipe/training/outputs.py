"""Files of a training: checkpoints, predictions, metrics and TensorBoard logs.

A checkpoint has everything that the next step depends on, in one file that is complete or missing. The format is npz,
because Keras' formats leave out seeds and `tf.train.Checkpoint` refuses Keras 3 metrics. Each file ends with a digest.
The previous checkpoint is kept in case the newest is damaged on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.dataset.sampling import BatchSampler
from histopipe.dataset.selection import SampleLocations
from histopipe.errors import DamagedStore, Interrupted, UsageError
from histopipe.predictions.prediction_tables import PREDICTIONS, write_predictions
from histopipe.runs import folder as run_folder
from histopipe.runs.run import METRICS, EpochMetrics, TrainResult
from histopipe.system.files import atomic_write, write_json
from histopipe.system.worker_pool import count_usable_cores
from histopipe.tasks.choices import Subset
from histopipe.tasks.predictions import Predictions

STATE_FILE, OLDER_FILE = "resume.npz", "resume-older.npz"
"""Names of the newest checkpoint, and of the one before it."""
_DIGEST, _DIGEST_BYTES = "blake2b", 64
_BETTER = 1e-4
"""Minimum increase of the metric that counts as better. For smaller differences, the lower loss is better."""
LOWEST = -1e9
"""Score if the metric is undefined."""


@dataclass(slots=True)
class TrainState:
    """The state of a training, except its variables."""

    epoch: int = 0
    """Index of the next or current epoch."""
    values: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0, 0), np.float32))
    """(S, B, C + 2) results of the completed steps of that epoch; the next step is S. Of each row: outputs, loss, and weight
    in the loss."""
    seconds: float = 0.0
    """Wall time of these steps."""
    input_wait: float = 0.0
    """Part of the wall time spent waiting for batches."""
    best_score: float = LOWEST
    best_loss: float = float("inf")
    best_epoch: int = -1
    """Epoch of the model in `model.keras`; 0 for the weights before the first; -1 for none yet."""
    waited: int = 0
    """Epochs since the best epoch."""
    skipped: list[int] = field(default_factory=list)
    """Keys of damaged patches."""
    history: list[dict[str, Any]] = field(default_factory=list)
    row_mean: bool = True
    """The loss of a step is a mean over its rows. Files of version 0.2 lack it, and are refused by `resumed_config`."""
    frozen: str = ""
    """Digest of what training does not change: frozen weights, which are not in the checkpoint, and the preset."""

    def is_improved_by(self, metrics: EpochMetrics, monitor: str) -> bool:
        """Return whether validation metrics are better than in the best epoch so far, by the loss or the metric."""
        if self.best_epoch < 0:
            return True
        is_lower = metrics.loss < self.best_loss
        if monitor == "loss":
            return is_lower
        score = LOWEST if metrics.score is None else metrics.score
        equal = self.best_score - _BETTER <= score <= self.best_score + _BETTER
        return is_lower if equal else score > self.best_score

    def keep(self, metrics: EpochMetrics) -> None:
        """Record that the weights after `epoch` epochs are the best so far, with these validation metrics."""
        self.best_epoch, self.best_loss = self.epoch, metrics.loss
        self.best_score = LOWEST if metrics.score is None else metrics.score

    @property
    def position(self) -> str:
        """What is done, as text."""
        steps = f" and {len(self.values)} steps of the next" if len(self.values) else ""
        return f"epoch {self.epoch}{steps}"

    def interrupted(self, folder: Path) -> Interrupted:
        """Return the error of a stopped training whose state is saved."""
        return Interrupted(
            "interrupted",
            found=f"{folder} saved after {self.position}",
            todo=run_folder.resume_hint(folder),
        )


def save_state(folder: Path, state: TrainState, variables: Sequence[Any]) -> None:
    """Write `resume.npz` by one rename, and keep the previous file as `resume-older.npz`."""
    arrays = {_name(i): np.asarray(variable.value) for i, variable in enumerate(variables)}
    description = asdict(state)
    arrays["values"] = description.pop("values")
    newest = folder / STATE_FILE
    with atomic_write(newest) as part, part.open("w+b") as file:
        np.savez(file, allow_pickle=False, state=np.array(json.dumps(description)), **arrays)
        file.seek(0)
        file.write(hashlib.file_digest(file, _DIGEST).digest())
        file.flush()
        os.fsync(file.fileno())
        _keep(newest)  # last: until the new file gets its name, one of both may be missing


def _keep(newest: Path) -> None:
    """Keep the newest file under the name of the older one."""
    with contextlib.suppress(FileNotFoundError):
        newest.rename(newest.with_name(OLDER_FILE))


def load_state(folder: Path, variables: Sequence[Any]) -> tuple[TrainState, str | None]:
    """Restore the variables. Return the newest intact state, and the error if the newest file is damaged.

    Without files, the state is that of a new training.

    Raises:
        DamagedStore: no file is intact, or the files belong to another model.
    """
    problems = []
    for name in (STATE_FILE, OLDER_FILE):
        path = folder / name
        try:
            state, arrays = _read(path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{name}: {error}")
        else:
            shapes, model_shapes = [a.shape for a in arrays], [tuple(v.shape) for v in variables]
            if shapes != model_shapes:
                raise DamagedStore(
                    f"{path} belongs to another model",
                    found=f"{len(shapes)} variables",
                    expected=f"{len(model_shapes)} with the shapes of this model",
                )
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)
            return state, problems[0] if problems else None
    if problems:
        raise DamagedStore(
            f"{folder / STATE_FILE} is damaged",
            found="; ".join(problems),
            todo="start a new run",
        )
    return TrainState(), None


def _read(path: Path) -> tuple[TrainState, list[NDArray[Any]]]:
    whole = path.read_bytes()
    content = whole[:-_DIGEST_BYTES]
    if hashlib.new(_DIGEST, content).digest() != whole[-_DIGEST_BYTES:]:
        raise ValueError("does not match its checksum")
    with np.load(io.BytesIO(content), allow_pickle=False) as saved:
        description = json.loads(str(saved["state"]))
        variables = [saved[_name(i)] for i in range(len(saved.files) - 2)]
        return TrainState(**description, values=saved["values"]), variables


def _name(number: int) -> str:
    return f"v{number:05d}"


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
    batches: BatchSampler, epoch: int, values: NDArray[np.float32], title: str
) -> SampleOutputs:
    """Return the results of an epoch's first steps, (S, B, C + 2) of all workers. `title` names the pass in an error.

    Keys and labels are computed again from the batches, which is cheaper than keeping them.

    Raises:
        DamagedStore: no row has weight.
    """
    flat = values.reshape(-1, values.shape[-1])
    places = np.flatnonzero(flat[:, -1] > 0)
    if not len(places):
        raise DamagedStore(
            f"{title}: every patch is damaged",
            found=next(iter(batches.skipped.values()), None),
            todo="ingest the slides again",
        )
    flat = flat[places]
    return SampleOutputs(
        batches.at(places, epoch)[0],
        flat[:, :-2],
        loss=float(np.average(flat[:, -2].astype(np.float64), weights=flat[:, -1])),
    )


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
                "python": platform.python_version(),
                "numpy": np.__version__,
                "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
                "cores": count_usable_cores(),
                "gpus": [
                    tf.config.experimental.get_device_details(gpu).get("device_name", "unknown")
                    for gpu in gpus
                ],
                "cuda": str(tf.sysconfig.get_build_info().get("cuda_version", "none"))
                if gpus
                else "none used",
            },
            **description,
            **result.to_json(),
        },
    )
