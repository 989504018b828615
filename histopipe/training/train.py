"""One training from settings to a run folder: the library call behind `histopipe train`."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.dataset.splits import (
    SIDES,
    Side,
    Splits,
)
from histopipe.errors import MachineShort, NothingToDo
from histopipe.files import appearing
from histopipe.store.store import Store, check_patch_sizes
from histopipe.training import run_folder
from histopipe.training.checkpoint import STATE_FILE, TrainState, load_state, save_state
from histopipe.training.config import TrainConfig
from histopipe.training.data import patch_table, run_splits, stain_normaliser, tell_splits
from histopipe.training.devices import make_strategy
from histopipe.training.loop import Predictions, Trainer
from histopipe.training.metrics import PatchMetrics, patch_metrics
from histopipe.training.models import build_model
from histopipe.training.progress import say

_BETTER_AUC = 1e-4
"""An AUC counts as better by more than this; within it the lower loss is better."""


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


def train(config: TrainConfig, folder: Path, *, resume: bool = False) -> TrainResult:
    """Train a model, in this process.

    Args:
        config: every setting.
        folder: where the run goes.
        resume: go on with the run that is there.

    Raises:
        UsageError: a setting does not fit the data or the machine.
        NothingToDo: no store, or nothing to tell apart.
        DamagedStore: a store is damaged, or no longer what the run began with.
        MachineShort: memory ran out.
    """
    run_folder.check(folder, resume=resume)
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(Path(path))) for path in config.stores]
        check_patch_sizes(stores)
        splits = run_splits(config, stores, folder, resume=resume)
        tell_splits(splits, stores)
        run = _Run(config, folder, stores, splits)
        try:
            # All that can be wrong with the settings has been found by now: the folder begins to exist.
            run_folder.create(folder, config, splits)
            return run.run(resume=resume)
        except tf.errors.ResourceExhaustedError as error:
            raise MachineShort(
                "memory ran out while training",
                found=error.message.split("\n")[0][:200],
                todo="go on with --resume and a smaller --batch-size",
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise MachineShort(
                f"the disk that holds {folder} is full",
                todo=f"make room and go on with `histopipe train --resume --out {folder}`",
            ) from error


class _Run:
    """A training under way."""

    def __init__(
        self, config: TrainConfig, folder: Path, stores: Sequence[Store], splits: Splits
    ) -> None:
        self._config, self._folder, self._stores, self._splits = config, folder, stores, splits
        self._tables = {side: patch_table(config, stores, splits, side) for side in SIDES}
        strategy = make_strategy(config.devices)
        keras.utils.set_random_seed(config.seed)
        if config.deterministic:
            tf.config.experimental.enable_op_determinism()
        with strategy.scope():
            model = build_model(
                config.model, patch_size=stores[0].patch_size, classes=len(splits.classes),
                dropout=config.dropout, weights=config.weights,
            )  # fmt: skip
            optimizer = keras.optimizers.get(
                {"class_name": config.optimizer, "config": {"learning_rate": config.learning_rate}}
            )
        self._trainer = Trainer(
            strategy, model, optimizer, stores=stores, batch_size=config.batch_size,
            seed=config.seed, class_weight=_class_weight(config, splits),
            augmentations=config.augmentations, normalise=stain_normaliser(config, stores),
            balance=config.balance, shuffle_block=config.shuffle_block or None,
            on_error=config.on_error,
        )  # fmt: skip

    def run(self, *, resume: bool) -> TrainResult:
        state = TrainState()
        if resume and (self._folder / STATE_FILE).exists():
            state = load_state(self._folder, self._trainer.variables)
            say(f"resuming {self._folder} after epoch {state.epoch}")
        while not self._finished(state):
            self._epoch(state)
        return self._finish(state)

    def _finished(self, state: TrainState) -> bool:
        patience = self._config.patience
        return state.epoch >= self._config.epochs or bool(patience and state.waited >= patience)

    def _epoch(self, state: TrainState) -> None:
        number = state.epoch + 1
        started = time.monotonic()
        trained = self._pass(f"epoch {number}/{self._config.epochs}", "train", epoch=state.epoch)
        validated = self._pass("validation", "validation")
        train_metrics, metrics = patch_metrics(trained), patch_metrics(validated)
        better = _is_better(metrics, state)
        state.history.append(_history_row(number, train_metrics, metrics, trained, started))
        state.skipped = sorted({*state.skipped, *self._trainer.skipped})
        state.epoch, state.waited = number, 0 if better else state.waited + 1
        if better:
            state.best_epoch, state.best_loss = number, metrics.loss
            state.best_auc = -1.0 if metrics.auc is None else metrics.auc
            self._save_model()
        run_folder.write_history(self._folder, state.history)
        # Last: what a resumed run finds beside it is never older than it says.
        save_state(self._folder, state, self._trainer.variables)
        say(_epoch_line(self._config, state.history[-1], better=better))

    def _pass(self, title: str, side: Side, *, epoch: int | None = None) -> Predictions:
        table = self._tables[side]
        if table is None:
            raise NothingToDo(f"no patch for {side}")
        if epoch is None:
            return self._trainer.predict(table, title)
        return self._trainer.train_epoch(table, epoch, title)

    def _save_model(self) -> None:
        with appearing(self._folder / run_folder.MODEL) as part:
            self._trainer.model.serving.save(part)

    def _finish(self, state: TrainState) -> TrainResult:
        """Judge the best model on what it did not train on, and write that down."""
        self._load_best()
        predicted: list[tuple[Side, Predictions]] = [
            (side, self._pass(side, side))
            for side in ("validation", "test")
            if self._tables[side] is not None
        ]
        metrics = {side: patch_metrics(values) for side, values in predicted}
        skipped = len({*state.skipped, *self._trainer.skipped})
        if skipped:
            say(f"{skipped} damaged patches were skipped")
        run_folder.write_predictions(self._folder, self._stores, self._splits.classes, predicted)
        run_folder.write_metrics(
            self._folder,
            {
                "histopipe": __version__,
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
                "classes": self._splits.classes,
                "split_by": self._splits.split_by,
                "patches": self._splits.count(),
                "epochs": state.epoch,
                "best_epoch": state.best_epoch,
                "skipped": skipped,
                **{side: dataclasses.asdict(value) for side, value in metrics.items()},
            },
        )
        return TrainResult(self._folder, state.best_epoch, metrics)

    def _load_best(self) -> None:
        best = keras.models.load_model(self._folder / run_folder.MODEL)
        self._trainer.model.serving.set_weights(best.get_weights())


def _class_weight(config: TrainConfig, splits: Splits) -> NDArray[np.float32]:
    """(C,) weights in the loss: 1, or so that every class weighs the same in all."""
    counts = splits.count()["train"]
    if config.class_weights == "none":
        return np.ones(len(splits.classes), np.float32)
    patches = np.array([counts[name] for name in splits.classes], np.float64)
    return np.asarray(patches.sum() / (len(patches) * np.maximum(patches, 1)), np.float32)


def _is_better(metrics: PatchMetrics, state: TrainState) -> bool:
    auc = -1.0 if metrics.auc is None else metrics.auc
    if state.best_epoch < 0 or auc > state.best_auc + _BETTER_AUC:
        return True
    return auc >= state.best_auc - _BETTER_AUC and metrics.loss < state.best_loss


def _history_row(
    epoch: int, train: PatchMetrics, validation: PatchMetrics, trained: Predictions, started: float
) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "loss": train.loss,
        "accuracy": train.accuracy,
        "auc": train.auc,
        "val_loss": validation.loss,
        "val_accuracy": validation.accuracy,
        "val_auc": validation.auc,
        "patches_per_s": train.patches / trained.seconds,
        "input_wait": trained.input_wait / trained.seconds,
        "seconds": time.monotonic() - started,
    }


def _epoch_line(config: TrainConfig, row: dict[str, Any], *, better: bool) -> str:
    auc, val_auc = (f"{v:.4f}" if v is not None else "-" for v in (row["auc"], row["val_auc"]))
    return (
        f"epoch {row['epoch']}/{config.epochs}  loss {row['loss']:.4f}  acc {row['accuracy']:.3f}  auc {auc}  "
        f"val loss {row['val_loss']:.4f}  acc {row['val_accuracy']:.3f}  auc {val_auc}  "
        f"{row['patches_per_s']:.0f} patches/s, {row['input_wait']:.0%} waiting for input"
        + ("  *best" if better else "")
    )
