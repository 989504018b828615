"""The result of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.dataset.options import SIDES, Side
from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.evaluate import Evaluation
from histopipe.system.files import read_json

METRICS = "metrics.json"


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult:
    """The result of a finished training. `str()` of it is a table of metrics.

    Attributes:
        folder: folder of the run.
        epochs: number of epochs.
        best_epoch: the epoch of the model in `model.keras`, from 1.
        metrics: of that model, by side; "test" is missing if no patch was held out.
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
        found = (f", {side} AUC {_text(it.finest.auc)}" for side, it in self.metrics.items())
        return (
            f"<TrainResult {self.folder}: epoch {self.best_epoch} of {self.epochs}{''.join(found)}>"
        )

    def __str__(self) -> str:
        # Late: writing a run needs no table.
        from histopipe.evaluation.table import evaluation_lines

        lines = [
            line
            for side, evaluation in self.metrics.items()
            for line in evaluation_lines("test (held out)" if side == "test" else side, evaluation)
        ]
        place = f"model of epoch {self.best_epoch}, predictions and metrics: {self.folder}"
        return "\n".join([*lines, place])

    def to_json(self) -> dict[str, Any]:
        """Return the result as it is in `metrics.json`."""
        return {
            "epochs": self.epochs,
            "best_epoch": self.best_epoch,
            "seconds": self.seconds,
            "host_bytes": self.host_bytes,
            "gpu_bytes": self.gpu_bytes,
            **{side: evaluation.to_json() for side, evaluation in self.metrics.items()},
        }


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds a finished run: its metrics are written last."""
    return (folder / METRICS).exists()


def read_result(folder: Path) -> TrainResult:
    """Read the result of a finished run.

    Raises:
        UsageError: there is none.
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
            f"{folder} holds no finished run", expected=f"a {METRICS} in it",
            todo=f"end it with `histopipe train --resume --out {folder}`",
        ) from error  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(
            f"{path} is damaged", found=repr(error)[:200],
            todo=f"`histopipe train --resume --out {folder}` judges the model anew",
        ) from error  # fmt: skip
