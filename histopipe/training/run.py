"""A training under way: epochs, what is kept of them, and where it goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.dataset.options import Side
from histopipe.dataset.orders import make_order
from histopipe.errors import DamagedStore, Interrupted, OutOfMemory
from histopipe.evaluation.evaluate import judge, positive_class
from histopipe.evaluation.predictions_file import write_predictions
from histopipe.evaluation.scores import PatchScores
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.messages import Report
from histopipe.runs.result import TrainResult
from histopipe.runs.workers import Cluster
from histopipe.system.files import appearing
from histopipe.system.progress import message
from histopipe.training import board
from histopipe.training.checkpoint import TrainState, load_state, save_state
from histopipe.training.collectives import check_same
from histopipe.training.devices import make_strategy
from histopipe.training.environment import environment
from histopipe.training.history import epoch_line, history_row, is_better
from histopipe.training.loop import Trainer, Wishes
from histopipe.training.memory import (
    MicroBatch,
    is_out_of_memory,
    out_of_memory,
    peak_bytes,
    remembered_micro_batch,
)
from histopipe.training.metrics import patch_metrics
from histopipe.training.pauses import Pauses
from histopipe.training.steps import Steps
from histopipe.training.tally import (
    Predictions,
    Tally,
    check_finite,
    predictions,
    step_losses,
)
from histopipe.training.task import Task


class Run:
    """A training under way.

    Args:
        config: every setting.
        folder: where it goes.
        task: what it learns from and with.
        cluster: the workers.
        report: told how it goes.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        task: Task,
        cluster: Cluster,
        report: Report,
    ) -> None:
        self._config, self._folder, self._task = config, folder, task
        self._cluster, self._report = cluster, report
        self._splits, self._tables = task.splits, task.tables
        positive_class(task.splits.classes, config.positive)  # or an error, before the long wait
        report("cluster", (cluster.workers, cluster.index))
        cluster.beat = lambda: report("beat", None)
        tf.debugging.set_log_device_placement(config.log_device_placement)
        strategy = make_strategy(
            config.devices, cluster,
            timeout=config.worker_timeout, communication=config.communication,
        )  # fmt: skip
        keras.utils.set_random_seed(config.seed)
        if config.deterministic:
            tf.config.experimental.enable_op_determinism()
        table = self._tables["train"]
        order = make_order(
            table, seed=config.seed, balance=config.balance,
            shuffle_block=config.shuffle_block or None,
        )  # fmt: skip
        self._trainer = self._make_trainer(strategy, -(-len(order) // config.batch_size))
        self._batches = self._trainer.batches(table, order)
        self._pauses = Pauses(config.save_minutes if cluster.chief else math.inf)
        self._state, self._tally = TrainState(), Tally()

    def _make_trainer(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> Trainer:
        steps = self._task.steps(strategy, steps_per_epoch)
        return Trainer(
            steps, make_batches=self._task.batches, seed=self._config.seed,
            cluster=self._cluster, micro_batch=partial(self._micro_batch, steps),
        )  # fmt: skip

    def _micro_batch(self, steps: Steps, rows: int) -> MicroBatch:
        return remembered_micro_batch(
            self._folder, -(-rows // self._config.accumulate), report=self._report,
            repeatable=self._cluster.alone or not steps.meets_within_gradients,
        )  # fmt: skip

    def run(self, *, resume: bool) -> TrainResult:
        """Train to the end, from where the folder's state stands if it is to be resumed."""
        try:
            if resume:
                self._resume()
            self._agree()
            self._report("started", None)
            with self._pauses:
                while not self._finished():
                    self._epoch()
                return self._finish()
        except (tf.errors.OpError, MemoryError, OutOfMemory) as error:
            if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
                raise
            first = self._trainer.micro_batch.first
            raise out_of_memory(error, self._folder, first, self._report) from error

    def _resume(self) -> None:
        self._state, problem = load_state(self._folder, self._trainer.steps.variables)
        if problem:
            message(f"warning: {problem}; going on from the state before it")
        done = f"epoch {self._state.epoch}"
        if len(self._state.values):
            done += f" and {len(self._state.values)} steps of the next"
        message(f"resuming {self._folder} after {done}")

    def _agree(self) -> None:
        """Wait for all workers, and make sure that they are about to do the same."""
        together = self._trainer.steps.meets_within_gradients
        mine = run_folder.fingerprint(
            self._config, self._splits, self._state.epoch, len(self._state.values),
            # Where batch statistics are shared, all must take equally many pieces.
            self._trainer.micro_batch.first if together else 0,
        )  # fmt: skip
        check_same(self._cluster, self._trainer.steps.strategy, mine)

    def _finished(self) -> bool:
        patience, state = self._config.patience, self._state
        return state.epoch >= self._config.epochs or bool(patience and state.waited >= patience)

    def _epoch(self) -> None:
        state, number = self._state, self._state.epoch + 1
        self._tally = Tally(self._trainer.own_rows(state.values), state.seconds, state.input_wait)
        started = time.monotonic() - state.seconds
        self._pauses.saveable = True
        self._trainer.train_epoch(
            self._batches, state.epoch, f"epoch {number}/{self._config.epochs}", self._tally,
            wishes=self._pauses.wishes, granted=self._pause,
        )  # fmt: skip
        self._note_progress()
        if not self._cluster.alone:
            # Others may be told to stop while they validate, and only the first worker saves.
            self._save()
        trained = self._whole("training", predictions(
            self._batches, state.epoch * self._batches.steps_per_epoch, state.values,
            seconds=state.seconds, input_wait=state.input_wait,
        ))  # fmt: skip
        validated = self._predict("validation", self._pause_validating)
        train_metrics, metrics = patch_metrics(trained), patch_metrics(validated)
        better = is_better(metrics, state)
        state.history.append(
            history_row(
                number, train_metrics, metrics, trained=trained,
                learning_rate=self._trainer.steps.learning_rate,
                seconds=time.monotonic() - started, unit=self._task.unit,
            )
        )  # fmt: skip
        losses = step_losses(state.values)
        state.values, state.seconds, state.input_wait = state.values[:0], 0.0, 0.0
        state.epoch, state.waited = number, 0 if better else state.waited + 1
        if better:
            state.best_epoch, state.best_loss = number, metrics.loss
            state.best_auc = -1.0 if metrics.auc is None else metrics.auc
        if self._cluster.chief:
            self._write_epoch(losses, better=better)

    def _write_epoch(self, losses: NDArray[np.float64], *, better: bool) -> None:
        row = self._state.history[-1]
        if better:
            with appearing(self._folder / run_folder.MODEL) as part:
                self._trainer.steps.model.save(part)
        run_folder.write_history(self._folder, self._state.history)
        if self._config.tensorboard:
            board.write_epoch(self._folder, row, losses)
        # Last: what a resumed run finds beside it is never older than it says.
        self._save()
        message(epoch_line(row, self._config.epochs, better=better))
        self._report("epoch", row)

    def _pause(self, wishes: Wishes) -> None:
        """Save the state behind a step of training; end there if that is wished."""
        self._note_progress()
        self._save()
        if wishes.stop:
            raise self._interrupted()

    def _pause_validating(self) -> None:
        """The same, without waiting for others: all that training has done in the epoch is known."""
        if self._pauses.stopping:
            self._save()
            raise self._interrupted()

    def _pause_judging(self) -> None:
        """The state was saved behind the last epoch, and the weights are those of the best one by now."""
        if self._pauses.stopping:
            raise self._interrupted()

    def _note_progress(self) -> None:
        """What training has done in this epoch, on all workers, into the state, unless it has gone astray."""
        self._state.values = self._trainer.gathered(self._tally)
        self._state.seconds, self._state.input_wait = self._tally.seconds, self._tally.input_wait
        check_finite(self._state.values, self._state.epoch + 1)

    def _save(self) -> None:
        self._state.skipped = sorted({*self._state.skipped, *self._trainer.skipped})
        if self._cluster.chief:
            save_state(self._folder, self._state, self._trainer.steps.variables)
        self._pauses.saved()

    def _interrupted(self) -> Interrupted:
        done = len(self._state.values)
        return Interrupted(
            "interrupted", found=f"{self._folder} saved after epoch {self._state.epoch}"
            + (f" and {done} steps of the next" if done else ""),
            todo=f"go on with `histopipe train --resume --out {self._folder}`",
        )  # fmt: skip

    def _predict(self, side: Side, between: Callable[[], None]) -> Predictions:
        return self._whole(side, self._trainer.predict(self._tables[side], side, between=between))

    def _whole(self, title: str, found: Predictions | None) -> Predictions:
        if found is None:
            raise DamagedStore(
                f"{title}: every patch is damaged",
                found=next(iter(self._trainer.skipped.values()), None),
                todo="ingest the slides again",
            )
        return found

    def _finish(self) -> TrainResult:
        """Judge the best model on what it did not train on, and write that down."""
        began = time.monotonic()
        self._agree()  # the chief has written the best model
        best = keras.models.load_model(self._folder / run_folder.MODEL)
        self._trainer.steps.model.serving.set_weights(best.get_weights())
        sides: tuple[Side, ...] = ("validation", "test")
        found = {
            side: self._predict(side, self._pause_judging) for side in sides if side in self._tables
        }
        scores = {side: self._task.scores(predictions) for side, predictions in found.items()}
        host_bytes, gpu_bytes = peak_bytes()
        seconds = sum(row["seconds"] for row in self._state.history)
        result = TrainResult(
            self._folder, self._state.epoch, self._state.best_epoch,
            judge(scores, self._config.judging), seconds=seconds + time.monotonic() - began,
            host_bytes=host_bytes, gpu_bytes=gpu_bytes,
        )  # fmt: skip
        if self._cluster.chief:
            self._task.write_more(self._folder, self._trainer.steps, list(found.values()))
            self._write_results(scores, result)
        return result

    def _write_results(self, scores: dict[Side, PatchScores], result: TrainResult) -> None:
        skipped = len({*self._state.skipped, *self._trainer.skipped})
        if skipped:
            message(f"{skipped} damaged {self._task.unit} were skipped")
        write_predictions(
            self._folder / run_folder.PREDICTIONS,
            [({"split": side}, patches) for side, patches in scores.items()],
        )
        facts = {
            "histopipe": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "environment": environment(),
            "classes": self._splits.classes,
            "split_by": self._splits.split_by,
            self._task.unit: self._splits.count(),
            **self._task.facts,
            "skipped": skipped,
            "replicas": self._trainer.steps.strategy.num_replicas_in_sync,
            "micro_batch": self._trainer.micro_batch.size,
        }
        run_folder.write_metrics(self._folder, {**facts, **result.to_json()})
