"""The files of a run's folder, each written whole by a rename."""

from __future__ import annotations

import csv
import errno
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.dataset.splits import Side, Splits, write_splits
from histopipe.dataset.table import unpack_keys
from histopipe.errors import UsageError
from histopipe.files import appearing
from histopipe.store.store import Store
from histopipe.training.config import TrainConfig
from histopipe.training.loop import Predictions

CONFIG, SPLITS, HISTORY = "config.toml", "splits.json", "history.csv"
METRICS, MODEL, PREDICTIONS = "metrics.json", "model.keras", "predictions.csv"


def check(folder: Path, *, resume: bool) -> None:
    """Whether a run may go into a folder, before anything is made.

    Raises:
        UsageError: it holds something already and is not to be resumed, or nothing and is.
    """
    if resume:
        if not (folder / CONFIG).exists():
            raise UsageError(f"{folder} holds no run to resume", expected=f"a {CONFIG} in it")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} exists and is not empty",
            todo="pass --resume to go on with it, or choose another --out",
        )


def create(folder: Path, config: TrainConfig, splits: Splits) -> None:
    """Make a run's folder, with what it is to do: the splits first, since a run without them cannot go on.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise UsageError(f"{folder} cannot be made", found=str(error)) from error
    write_splits(splits, folder / SPLITS)
    write_text(folder / CONFIG, config.to_toml())


def write_text(path: Path, text: str) -> None:
    """Write a file by one rename."""
    with appearing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_history(folder: Path, history: Sequence[dict[str, Any]]) -> None:
    """`history.csv`: one row an epoch."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(history[0]))
    writer.writeheader()
    writer.writerows(history)
    write_text(folder / HISTORY, buffer.getvalue())


def write_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    """`metrics.json`."""
    write_text(folder / METRICS, json.dumps(metrics, indent=2, ensure_ascii=False) + "\n")


def write_predictions(
    folder: Path,
    stores: Sequence[Store],
    classes: Sequence[str],
    predictions: Iterable[tuple[Side, Predictions]],
) -> None:
    """`predictions.csv`: one row a patch, by slide id and level-0 coordinates."""
    with (
        appearing(folder / PREDICTIONS) as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(
            ["split", "slide", "x_l0", "y_l0", "label", "predicted", *(f"p_{c}" for c in classes)]
        )
        for side, predicted in predictions:
            _write_rows(writer, stores, classes, side, predicted)


def _write_rows(
    writer: Any, stores: Sequence[Store], classes: Sequence[str], side: Side, predicted: Predictions
) -> None:
    ordinals, slides, rows = unpack_keys(predicted.key)
    for ordinal, slide in np.unique(np.stack([ordinals, slides], axis=1), axis=0).tolist():
        store = stores[ordinal]
        index, name = store.index(slide), store.records[slide].id
        for i in np.flatnonzero((ordinals == ordinal) & (slides == slide)):
            probability = predicted.probability[i]
            writer.writerow(
                [
                    side, name, index["x_l0"][rows[i]], index["y_l0"][rows[i]],
                    classes[predicted.label[i]], classes[int(probability.argmax())],
                    *(f"{p:.6g}" for p in probability.tolist()),
                ]
            )  # fmt: skip
