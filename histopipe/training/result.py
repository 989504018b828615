"""What a training comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from histopipe.dataset.splits import Side
from histopipe.training.metrics import PatchMetrics


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished training.

    Attributes:
        folder: the run's folder.
        best_epoch: the one that `model.keras` holds, from 1.
        metrics: of that model, by side; "test" is missing where no patch was held out for it.
    """

    folder: Path
    best_epoch: int
    metrics: dict[Side, PatchMetrics]
