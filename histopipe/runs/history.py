"""The metrics of each epoch: the rows of `history.csv` and the lines on the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """Metrics of the predictions of one epoch.

    The loss is weighted by class as in training. For several classes, `auc` is the mean of one against the rest; it is None with
    fewer than two classes.
    """

    count: int
    loss: float
    accuracy: float
    auc: float | None


def history_row(
    epoch: int,
    train: EpochMetrics,
    validation: EpochMetrics,
    *,
    train_seconds: float,
    input_wait: float,
    learning_rate: float,
    seconds: float,
    unit: str,
) -> dict[str, Any]:
    """Return the row of an epoch, from 1.

    The metrics of training are of predictions before each step's update. `input_wait` is the part of `train_seconds` spent waiting for
    batches; `seconds` is for the whole epoch; `unit` is "patches" or "bags".
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
        f"{unit}_per_s": train.count / train_seconds,
        "input_wait": input_wait / train_seconds,
        "seconds": seconds,
    }


def epoch_line(row: dict[str, Any], epochs: int, *, better: bool) -> str:
    """Return the row of an epoch as one line of text."""
    unit = "patches" if "patches_per_s" in row else "bags"
    auc, val_auc = (f"{v:.4f}" if v is not None else "-" for v in (row["auc"], row["val_auc"]))
    speed = f"{row[f'{unit}_per_s']:.{0 if unit == 'patches' else 1}f} {unit}/s"
    return (
        f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  acc {row['accuracy']:.3f}  auc {auc}  "
        f"val loss {row['val_loss']:.4f}  acc {row['val_accuracy']:.3f}  auc {val_auc}  "
        f"{speed}, {row['input_wait']:.0%} waiting for input{'  *best' if better else ''}"
    )
