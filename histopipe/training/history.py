"""The figures of each epoch: what `history.csv` and the lines on the terminal say, and which epoch is the best."""

from __future__ import annotations

from typing import Any

from histopipe.training.checkpoint import TrainState
from histopipe.training.metrics import PatchMetrics
from histopipe.training.tally import Predictions

_BETTER_AUC = 1e-4
"""An AUC counts as better by more than this; within it the lower loss is better."""


def is_better(metrics: PatchMetrics, state: TrainState) -> bool:
    """Whether validation went better than in the best epoch so far."""
    auc = -1.0 if metrics.auc is None else metrics.auc
    if state.best_epoch < 0 or auc > state.best_auc + _BETTER_AUC:
        return True
    return auc >= state.best_auc - _BETTER_AUC and metrics.loss < state.best_loss


def history_row(
    epoch: int,
    train: PatchMetrics,
    validation: PatchMetrics,
    *,
    trained: Predictions,
    learning_rate: float,
    seconds: float,
    unit: str,
) -> dict[str, Any]:
    """One epoch's figures.

    Args:
        epoch: from 1.
        train: before each step's update, as it went along.
        validation: behind the last step.
        trained: the predictions that `train` is of.
        learning_rate: behind the last step.
        seconds: for all of the epoch.
        unit: what was learnt from: "patches" or "bags".
    """
    return {
        "epoch": epoch,
        "loss": train.loss,
        "accuracy": train.accuracy,
        "auc": train.auc,
        "val_loss": validation.loss,
        "val_accuracy": validation.accuracy,
        "val_auc": validation.auc,
        "learning_rate": learning_rate,
        f"{unit}_per_s": train.patches / trained.seconds,
        "input_wait": trained.input_wait / trained.seconds,
        "seconds": seconds,
    }


def epoch_line(row: dict[str, Any], epochs: int, *, better: bool) -> str:
    """The same on a terminal."""
    unit = "patches" if "patches_per_s" in row else "bags"
    auc, val_auc = (f"{v:.4f}" if v is not None else "-" for v in (row["auc"], row["val_auc"]))
    return (
        f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  acc {row['accuracy']:.3f}  auc {auc}  "
        f"val loss {row['val_loss']:.4f}  acc {row['val_accuracy']:.3f}  auc {val_auc}  "
        f"{row[f'{unit}_per_s']:.{0 if unit == 'patches' else 1}f} {unit}/s, {row['input_wait']:.0%} waiting for input"
        + ("  *best" if better else "")
    )
