"""The result of a training, and the metrics of its epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import SIDES, Side
from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.evaluate import Evaluation
from histopipe.evaluation.table import number, split_lines
from histopipe.system.files import read_json

METRICS = "metrics.json"


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult:
    """The result of a finished training. `str()` of it is a table of metrics.

    Attributes:
        folder: folder of the run.
        epochs: number of epochs.
        best_epoch: epoch of the model in `model.keras`, from 1.
        metrics: metrics of that model, by side; without "test" if no patch was held out.
        seconds: duration of the epochs and of the evaluation.
        host_bytes: peak memory of the process.
        gpu_bytes: peak memory on all its GPUs; None without a GPU.
    """

    folder: Path
    epochs: int
    best_epoch: int
    metrics: Mapping[Side, Evaluation]
    seconds: float
    host_bytes: int
    gpu_bytes: int | None

    def __repr__(self) -> str:
        found = (f", {side} AUC {number(it.finest.auc)}" for side, it in self.metrics.items())
        return (
            f"<TrainResult {self.folder}: epoch {self.best_epoch} of {self.epochs}{''.join(found)}>"
        )

    def __str__(self) -> str:
        place = f"model of epoch {self.best_epoch}, predictions and metrics: {self.folder}"
        return "\n".join([*split_lines(self.metrics), place])

    def to_json(self) -> dict[str, Any]:
        """Return the result in the form of `metrics.json`."""
        return {
            "epochs": self.epochs,
            "best_epoch": self.best_epoch,
            "seconds": self.seconds,
            "host_bytes": self.host_bytes,
            "gpu_bytes": self.gpu_bytes,
            **{side: evaluation.to_json() for side, evaluation in self.metrics.items()},
        }


def is_finished(folder: Path) -> bool:
    """Return whether a folder contains a finished run: its metrics are written last."""
    return (folder / METRICS).exists()


def read_result(folder: Path) -> TrainResult:
    """Read the result of a finished run.

    Raises:
        UsageError: there is no finished run.
        DamagedStore: its metrics cannot be read.
    """
    path = folder / METRICS
    try:
        value = read_json(path)
        names = ("epochs", "best_epoch", "seconds", "host_bytes", "gpu_bytes")
        metrics = {side: Evaluation.from_json(value[side]) for side in SIDES if side in value}
        return TrainResult(folder=folder, metrics=metrics, **{name: value[name] for name in names})
    except FileNotFoundError as error:
        raise UsageError(
            f"no finished run in {folder}", expected=f"a {METRICS} in it",
            todo=f"finish it with `histopipe train --resume --out {folder}`" if folder.is_dir() else "check the path",
        ) from error  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(
            f"{path} is damaged", found=repr(error)[:200],
            todo=f"evaluate the model again with `histopipe train --resume --out {folder}`",
        ) from error  # fmt: skip


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """Metrics of the predictions of one epoch.

    The loss is weighted by class as in training. For several classes, `auc` is the mean one-vs-rest AUC; it is None
    with fewer than two classes.
    """

    count: int
    loss: float
    accuracy: float
    auc: float | None


def epoch_line(row: dict[str, Any], epochs: int, *, better: bool) -> str:
    """Return the row of an epoch as one line of text."""
    unit = "patches" if "patches_per_s" in row else "bags"
    speed = f"{row[f'{unit}_per_s']:.{0 if unit == 'patches' else 1}f} {unit}/s"
    return (
        f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  acc {row['accuracy']:.3f}  "
        f"auc {number(row['auc'], 4)}  "
        f"val loss {row['val_loss']:.4f}  acc {row['val_accuracy']:.3f}  "
        f"auc {number(row['val_auc'], 4)}  "
        f"{speed}, {row['input_wait']:.0%} waiting for input{'  *best' if better else ''}"
    )
