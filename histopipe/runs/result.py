"""What a training comes to."""

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


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished training.

    Attributes:
        folder: the run's folder.
        epochs, best_epoch: how many it took, and the one that `model.keras` holds, from 1.
        metrics: of that model, by side; "test" is missing where no patch was held out for it.
        seconds: of its epochs and of judging the model.
        host_bytes, gpu_bytes: most memory that its process took, and on all its GPUs; None without a GPU.
    """

    folder: Path
    epochs: int
    best_epoch: int
    metrics: Mapping[Side, Evaluation]
    seconds: float
    host_bytes: int
    gpu_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """What `metrics.json` says of it."""
        return {
            "epochs": self.epochs,
            "best_epoch": self.best_epoch,
            "seconds": self.seconds,
            "host_bytes": self.host_bytes,
            "gpu_bytes": self.gpu_bytes,
            **{side: evaluation.to_json() for side, evaluation in self.metrics.items()},
        }


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run: its metrics are written last."""
    return (folder / METRICS).exists()


def read_result(folder: Path) -> TrainResult:
    """The result of a finished run.

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
