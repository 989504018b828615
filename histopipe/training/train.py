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
from histopipe.dataset.split_makers import make_splits
from histopipe.dataset.splits import (
    SIDES,
    Side,
    Splits,
    read_splits,
    site_by_label,
)
from histopipe.dataset.table import PatchTable
from histopipe.errors import MachineShort, NothingToDo, UsageError
from histopipe.files import appearing
from histopipe.geometry import Micrometres
from histopipe.slides.tables import SlideNames, read_labels
from histopipe.store.store import Store, check_patch_sizes
from histopipe.training import run_folder
from histopipe.training.checkpoint import STATE_FILE, TrainState, load_state, save_state
from histopipe.training.config import TrainConfig
from histopipe.training.devices import make_strategy
from histopipe.training.loop import Predictions, Trainer
from histopipe.training.metrics import PatchMetrics, patch_metrics
from histopipe.training.models import build_model
from histopipe.training.progress import EpochProgress, say

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
        splits = _splits(config, stores, folder, resume=resume)
        _tell(splits, stores)
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
        self._tables = {side: _table(splits, side) for side in SIDES}
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
            augment=config.augment == "flips",
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
        progress = EpochProgress(title, -(-len(table) // self._config.batch_size))
        try:
            if epoch is None:
                return self._trainer.predict(table, progress)
            return self._trainer.train_epoch(table, epoch, progress)
        finally:
            progress.close()

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
                **{side: dataclasses.asdict(value) for side, value in metrics.items()},
            },
        )
        return TrainResult(self._folder, state.best_epoch, metrics)

    def _load_best(self) -> None:
        best = keras.models.load_model(self._folder / run_folder.MODEL)
        self._trainer.model.serving.set_weights(best.get_weights())


def _splits(config: TrainConfig, stores: Sequence[Store], folder: Path, *, resume: bool) -> Splits:
    """The run's splits: read if it goes on or if they are given, else made."""
    if resume:
        return read_splits(folder / run_folder.SPLITS, stores)
    if config.splits is not None:
        splits = read_splits(Path(config.splits), stores)
    else:
        first, second, third = config.fractions
        splits = make_splits(
            stores,
            split_by=config.split_by,
            seed=config.seed,
            labels=_labels(config, stores),
            fractions=(first, second, third),
            region=Micrometres(config.region_um),
        )
    leaks = splits.leaks() if splits.split_by in ("patient", "site", "slide") else []
    if leaks and not config.allow_leaks:
        raise UsageError(
            "the split leaks",
            found="; ".join(leaks[:3]) + ("; …" if len(leaks) > 3 else ""),
            expected="each patient and slide on one side",
            todo="split by patient, or pass --allow-leaks if you mean it",
        )
    return splits


def _labels(
    config: TrainConfig, stores: Sequence[Store]
) -> dict[str, tuple[str | None, str | None, str | None]] | None:
    if config.labels is None:
        return None
    names = SlideNames(record.id for store in stores for record in store.slides)
    rows = read_labels(Path(config.labels), names, allow_extra=config.allow_extra_rows)
    return {name: (row.label, row.patient, row.site) for name, row in rows.items()}


def _tell(splits: Splits, stores: Sequence[Store]) -> None:
    """What the model will see, before the long wait."""
    for side, counts in splits.count().items():
        say(f"{side:<11}" + ", ".join(f"{counts[c]} {c}" for c in splits.classes))
    if splits.split_by == "patch":
        say("warning: split by patch: neighbours of training patches are in the test set, so its")
        say("figures say that the pipeline learns, not how good the model is on another slide")
    left_out = sum(len(store.complete) for store in stores) - len(splits.slides)
    if left_out:
        say(f"{left_out} complete slides left out: they have no label, or no patch")
    dropped = sum(int((slide.sides < 0).sum()) for slide in splits.slides)
    if dropped:
        say(f"{dropped} patches left out (unreadable, or too near another side's)")
    sites = site_by_label(splits.slides)
    if len(sites) > 1:
        say("slides by site and label:")
        for site, counts in sorted(sites.items()):
            say(f"  {site:<20}" + ", ".join(f"{counts[c]} {c}" for c in splits.classes))


def _table(splits: Splits, side: Side) -> PatchTable | None:
    """The patches of one side; None for a test set that was not asked for."""
    if side == "test" and not any(len(slide.on(side)) for slide in splits.slides):
        return None
    return splits.table(side)


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
