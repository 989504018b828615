"""A training from its first epoch, or from its saved state, to the evaluation of its best model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from histopipe.dataset.patch_masks import COPY, write_copy
from histopipe.errors import OutOfMemory, UsageError, WorkerLost, first_line
from histopipe.evaluation.breakdown import EvaluatedPredictions, break_down
from histopipe.evaluation.evaluate import calibrated, evaluate_subsets
from histopipe.evaluation.prediction_sets import calibrate_sets
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.fork_server import Report
from histopipe.runs.observers import EpochObserver, tracker_of
from histopipe.runs.run import TrainResult, epoch_line
from histopipe.runs.supervision import HEARTBEATS, Cluster
from histopipe.runs.training_data import opened_sources, print_splits, splits_and_slides
from histopipe.splits.slide_table import flow_of, leaked_patients, with_damaged, write_slide_table
from histopipe.splits.splits import SPLITS
from histopipe.system.files import roomy
from histopipe.system.forecast import Stages, shares_of
from histopipe.system.output import (
    Bar,
    ReportedProgress,
    counted,
    default_progress,
    message,
    use_progress,
)
from histopipe.tasks.choices import Subset
from histopipe.tasks.predictions import paired_differences
from histopipe.training.devices import (
    assign_same,
    check_same,
    find_cluster,
    is_out_of_memory,
    make_strategy,
    out_of_memory,
    peak_bytes,
    remembered_micro_batch,
)
from histopipe.training.epochs import (
    Advice,
    Checkpoints,
    EndedEpoch,
    EpochLoop,
    History,
    StopSignals,
    TensorBoard,
    write_range,
)
from histopipe.training.models import check_weights, frozen_digest, limit_momentum
from histopipe.training.outputs import (
    DIVERGED,
    SampleOutputs,
    TrainState,
    check_finite,
    load_state,
    predictions,
    step_losses,
    write_results,
)
from histopipe.training.patch_training import PatchTraining
from histopipe.training.pixel_training import PixelTraining
from histopipe.training.training_setup import BagTraining, TrainingSetup


class Trainer:
    """Trains the network of a setup. `report` sends messages to the supervisor."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        *,
        setup: TrainingSetup,
        cluster: Cluster,
        report: Report,
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> None:
        self._config, self._folder, self._setup = config, folder, setup
        self._cluster, self._report = cluster, report
        _ = setup.splits.task.with_settings(
            config.evaluation_settings
        ).positive  # raises early if there is none
        report("cluster", (cluster.workers, cluster.index))
        tf.debugging.set_log_device_placement(config.log_device_placement)
        # The strategy first: it sets up devices, which TensorFlow must not have used. Then the seed, before the weights.
        strategy = make_strategy(
            config.devices,
            cluster,
            timeout=config.worker_timeout,
            communication=config.communication,
        )
        keras.utils.set_random_seed(config.seed)
        if config.deterministic:
            tf.config.experimental.enable_op_determinism()
        self.batches: dict[Subset, Any] = {
            subset: setup.batches(subset, strategy.num_replicas_in_sync) for subset in setup.subsets
        }
        self._validated = "validation" in setup.subsets
        self._step = setup.train_step(strategy, self.batches["train"].steps_per_epoch)
        self.loop = EpochLoop(
            self._step,
            seed=config.seed,
            cluster=cluster,
            accumulate=config.accumulate,
            micro_batch=partial(
                remembered_micro_batch,
                folder,
                report=report,
                repeatable=cluster.alone or not self._step.meets_within_gradients,
            ),
        )
        self._stages, self._waited = Stages(), 0.0  # of this process
        self._signals = StopSignals(config.save_minutes if cluster.chief else math.inf)
        model = self._step.model.training
        if callbacks:
            model.optimizer = self._step.optimizer  # for callbacks that change its rate
        self._callbacks = keras.callbacks.CallbackList(
            [*callbacks, *setup.notices(self.batches, self._step)], model=model
        )
        self._state = TrainState(frozen=frozen_digest(self._step.whole.training, setup.description))
        self._checkpoints = Checkpoints(folder, self._step)
        # In this order: the files of an epoch are never older than the state, which is saved last.
        self.observers: list[EpochObserver] = (
            [
                *([TensorBoard(folder)] if config.tensorboard else []),
                History(folder),
                self._checkpoints,
                Advice(config, setup.splits),
            ]
            if cluster.chief
            else []
        )

    def train(self, *, resume: bool) -> TrainResult:
        """Train to the end. If resumed, start from the saved state in the folder."""
        try:
            if resume:
                self._resume()
            limit_momentum(self._step.model.batch_norms, self.batches["train"].steps_per_epoch)
            if not self._state.epoch and not len(self._state.values):
                self._initialise()
            check_weights(
                self._step.whole.training.weights, "the network", "use another --model or --weights"
            )
            self.batches = self._setup.prepared(
                self.batches, self._step, self._folder if self._cluster.chief else None
            )
            self._agree()
            self._report("started", None)
            self._callbacks.on_train_begin()
            with self._signals.handled(), self._bar() as self.loop.overall:
                while not self._ended():
                    self._epoch()
                self._callbacks.on_train_end()
                return self._finish()
        except (tf.errors.OpError, MemoryError, OutOfMemory) as error:
            if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
                raise
            raise out_of_memory(
                error, self._folder, self.loop.micro_batch.first, self._report
            ) from error

    def _ended(self) -> bool:
        patience = (self._validated and self._config.patience) or math.inf
        stopped = getattr(self._step.model.training, "stop_training", False)  # by a callback
        return stopped or self._state.epoch >= self._config.epochs or self._state.waited >= patience

    def _bar(self) -> Bar:
        """Return a bar of the steps of all epochs. Training may end earlier."""
        steps = self.batches["train"].steps_per_epoch
        return default_progress().bar(
            "training",
            unit="steps",
            total=self._config.epochs * steps,
            done=self._state.epoch * steps + len(self._state.values),
        )

    def _initialise(self) -> None:
        """Set the weights whose first values depend on the data: those of the first worker on all workers."""
        assign_same(self._cluster, self._step.strategy, self._setup.initial_values(self._step))
        # With covariates, the new model already predicts: epoch 0.
        if self._setup.covariates is not None and self._validated:
            self._state.keep(self._setup.metrics(self._predict("validation", saving=False)))
            if self._cluster.chief:
                self._checkpoints.save_model()

    def _resume(self) -> None:
        frozen = self._state.frozen
        self._state, damage = load_state(self._folder, self._step.variables)
        if self._state.frozen not in ("", frozen):
            raise UsageError(
                "the weights or the description of the model have changed since the start of the run",
                found="other features, frozen weights, preprocessing or architecture",
                todo="restore the files that --model, --weights or --features name",
            )
        self._state.frozen = frozen
        if damage:
            message(f"warning: {damage}; using the previous checkpoint")
        message(f"resuming {self._folder} after {self._state.position}")

    def _agree(self) -> None:
        """Wait for all workers, and check that their settings, splits and state are the same."""
        check_same(
            self._cluster,
            self._step.strategy,
            run_folder.fingerprint(
                self._config,
                self._setup.splits,
                self._state.epoch,
                len(self._state.values),
                # With shared batch statistics, all workers need the same number of pieces.
                self.loop.micro_batch.first if self._step.meets_within_gradients else 0,
            ),
        )

    def _epoch(self) -> None:
        """Train one epoch, validate, and write the results."""
        state, number = self._state, self._state.epoch + 1
        started = time.monotonic() - state.seconds
        self._callbacks.on_epoch_begin(state.epoch)
        # From predictions before each step's update.
        training = self._setup.metrics(self._train_epoch(f"epoch {number}/{self._config.epochs}"))
        metrics = None  # without validation, the last epoch is the best
        if self._validated:
            self._callbacks.on_test_begin()
            metrics = self._setup.metrics(self._predict("validation", saving=True))
            self._callbacks.on_test_end(metrics.row())
        better = metrics is None or state.is_improved_by(metrics, self._config.monitor)
        row: dict[str, Any] = {
            "epoch": number,
            **training.row(),
            **({} if metrics is None else metrics.row("val_")),
            "learning_rate": self._step.learning_rate,
            f"{self._config.unit}_per_s": training.count / state.seconds,
            "input_wait": state.input_wait / state.seconds,  # share of the training time
            "seconds": time.monotonic() - started,
        }
        state.history.append(row)
        self._waited += state.input_wait
        self._stages.add(
            **{
                "the device": state.seconds - state.input_wait,
                "validation": row["seconds"] - state.seconds,
            }
        )
        losses = step_losses(state.values)
        state.values, state.seconds, state.input_wait = state.values[:0], 0.0, 0.0
        state.epoch, state.waited = number, 0 if better else state.waited + 1
        if better:
            state.keep(metrics or training)
        state.skipped = self._skipped()
        with self._stages.of("writing"):
            for observer in self.observers:
                observer.on_epoch_end(EndedEpoch(state, losses, is_better=better))
        self._signals.saved_at = time.monotonic()
        if self._cluster.chief:
            message(epoch_line(row, self._config.epochs, better=better and self._validated))
            self._report("epoch", row)
        self._callbacks.on_epoch_end(number - 1, {n: row[n] for n in row if n != "epoch"})

    def _train_epoch(self, title: str) -> SampleOutputs:
        """Train one epoch, or the rest of it. Return the predictions before each update."""
        state, batches = self._state, self.batches["train"]
        self._signals.saveable = True
        self.loop.train_epoch(
            batches,
            state,
            title,
            requests=self._signals.requests,
            granted=self._save_and_stop,
            callbacks=self._callbacks,
        )
        self._check_state()
        if not self._cluster.alone:
            # Other workers may be stopped during validation, but only the first worker saves.
            self._save()
        return self._checked(
            "training", predictions(batches, state.epoch, state.values, "training")
        )

    def _save_and_stop(self, stop: bool) -> None:
        """Save the state after a step of training; stop there if requested."""
        self._check_state()
        self._save()
        if stop:
            raise self._state.interrupted(self._folder)

    def _check_state(self) -> None:
        """Check that the losses of this epoch and the weights are finite, before they are saved."""
        check_finite(self._state.values, self._state.epoch + 1)
        check_weights(self._step.variables, f"epoch {self._state.epoch + 1}", DIVERGED)

    def _save(self) -> None:
        self._state.skipped = self._skipped()
        if self._cluster.chief:
            self._checkpoints.save(self._state)
        self._signals.saved_at = time.monotonic()

    def _skipped(self) -> list[int]:
        """Return the keys of all damaged patches that were read so far, also before the training was resumed."""
        of_batches = (batches.skipped for batches in self.batches.values())
        return sorted(set(self._state.skipped).union(*of_batches))

    def _predict(self, subset: Subset, *, saving: bool) -> SampleOutputs:
        """Predict a subset; stop if requested, without waiting for other workers.

        With `saving`, during the validation after an epoch, save the state before stopping. Later the state is already
        saved, and the network has the best weights.
        """

        def stop_if_requested() -> None:
            if self._signals.stopping:
                if saving:
                    self._save()
                raise self._state.interrupted(self._folder)

        return self._checked(
            subset, self.loop.predict(self.batches[subset], subset, stop_if_requested)
        )

    def _shares(self) -> dict[str, float]:
        """Return the share of each stage in the time of the epochs of this process."""
        waited = self.batches["train"].stages.divided(self._waited)
        return shares_of({**self._stages.seconds, **waited})

    def _checked(self, title: str, outputs: SampleOutputs) -> SampleOutputs:
        """Return outputs; raise an error if one is not finite."""
        wrong = outputs.samples.keys[~np.isfinite(outputs.output).all(axis=1)]
        if len(wrong):
            raise UsageError(
                f"{title}: {counted(len(wrong), 'prediction')} not finite",
                found=f"slides {', '.join(list(self._setup.damaged(wrong.tolist()))[:3])}",
                todo="check their values, lower --learning-rate, or use --precision float32",
            )
        return outputs

    def _finish(self) -> TrainResult:
        """Evaluate the kept model on validation and test, and write the results."""
        began = time.monotonic()
        self._agree()  # the chief has written the best model
        best = keras.models.load_model(self._folder / run_folder.MODEL)
        self._step.whole.serving.set_weights(best.get_weights())
        setup, config = self._setup, self._config
        settings = config.evaluation_settings
        by_subset = {subset: self._predict(subset, saving=False) for subset in setup.subsets[1:]}
        # Predictions of a joint objective depend on those of the training, with the best weights.
        if setup.objective.joint:
            trained = setup.predictions(self._predict("train", saving=False))
            setup.objective.fit_baseline(trained.output[:, 0], trained.target)
        predicted = {subset: setup.predictions(outputs) for subset, outputs in by_subset.items()}
        calibration = None
        if config.calibrate:
            predicted, calibration = calibrated(predicted, settings)
        baseline, leaked = setup.baseline(), leaked_patients(setup.splits)
        evaluations = evaluate_subsets(predicted, settings, leaked)
        skipped, (host_bytes, gpu_bytes) = self._skipped(), peak_bytes()
        slides = with_damaged(setup.slides, setup.damaged(skipped))
        evaluated = EvaluatedPredictions(evaluations, predicted, settings)
        result = TrainResult(
            self._folder,
            self._state.epoch,
            self._state.best_epoch,
            evaluations,
            seconds=sum(row["seconds"] for row in self._state.history) + time.monotonic() - began,
            host_bytes=host_bytes,
            gpu_bytes=gpu_bytes,
            shares=self._shares(),
            covariates_only=evaluate_subsets(baseline, settings, leaked) if baseline else {},
            slides_add={
                subset: paired_differences(baseline[subset], predicted[subset], settings)
                for subset in baseline
                if subset in evaluations
            },
            calibration=calibration,
            sets=calibrate_sets(predicted, slides, config.subgroup, settings, config.conformal),
            flow=flow_of(slides),
            breakdown=break_down(evaluated, slides, config.subgroup),
        )
        if self._cluster.chief:
            setup.write_more(self._folder, self._step, list(by_subset.values()))
            if skipped:
                write_slide_table(self._folder / run_folder.SLIDES, slides)
                message(f"{len(skipped)} damaged {config.unit} were skipped")
            setup.description |= {
                "skipped": len(skipped),
                "replicas": self._step.strategy.num_replicas_in_sync,
                "micro_batch": self.loop.micro_batch.size,
            }
            write_results(self._folder, predicted, result, setup.description)
            write_range(self._folder, setup, best, self._step, self.batches)
            for observer in self.observers:
                observer.on_train_end(self._state, result)
        return result


def setup_class(config: TrainConfig) -> type[TrainingSetup]:
    """Return the class of the data and the network of a training."""
    if config.on_bags:
        return BagTraining
    return PixelTraining if config.task == "segmentation" else PatchTraining


def train_here(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    report: Report | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> TrainResult:
    """Train a model in this process. Part of the memory is not freed before the process ends.

    `report` sends messages and progress to a supervisor; without it, progress is shown here.

    Raises:
        UsageError: a setting does not fit the data or the machine.
        NothingToDo: there is no store, or fewer than two classes.
        DamagedStore: a store is damaged, or differs from the one at the start of the run.
        OutOfMemory: memory ran out in a way that this process cannot recover from.
        MachineShort: the disk is full.
        WorkerLost: another worker is lost.
        Interrupted: a signal stopped the training; the state is saved.
    """
    cluster = find_cluster()
    if cluster.chief:
        run_folder.check(folder, resume=resume, ignored=() if cluster.alone else (HEARTBEATS,))
    with ExitStack() as stack:
        if report is not None:
            stack.enter_context(use_progress(ReportedProgress(report)))
        sources = stack.enter_context(
            opened_sources(
                config, folder / SPLITS if resume else config.splits, folder if resume else None
            )
        )
        splits, slides = splits_and_slides(config, sources, folder, resume=resume)
        setup = setup_class(config)(config, sources, splits, slides)
        if cluster.chief:
            print_splits(splits, sources, setup.units, config.unit)
        # Before the strategy connects the workers: those that wait for this one read its heartbeat.
        stack.enter_context(cluster.heartbeats(folder))
        stack.enter_context(_explained(cluster, folder))
        trainer = Trainer(
            config,
            folder,
            setup=setup,
            cluster=cluster,
            report=report or (lambda *_: None),
            callbacks=callbacks,
        )
        if cluster.chief:
            tracker = tracker_of(folder, config)
            # All checks of the settings have passed: create the folder.
            copy = partial(write_copy, sources, folder / COPY, resume=resume)
            stack.enter_context(
                run_folder.opened(folder, {SPLITS: splits}, config, resume=resume, prepare=copy)
            )
            write_slide_table(folder / run_folder.SLIDES, slides)
            if tracker is not None:
                # Before the advice, which is the last line.
                trainer.observers.insert(-1, stack.enter_context(tracker))
        return trainer.train(resume=resume)


@contextmanager
def _explained(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Report errors by their causes: no memory before the first step, the loss of another worker, a full disk."""
    since, resume = time.time(), f"`histopipe train --resume --out {folder}`"
    try:
        with roomy(folder, f"run {resume}"):
            yield
    except (OSError, MemoryError, tf.errors.OpError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                "memory ran out before the first step",
                found=first_line(error),
                todo="use a smaller --model, or end other programs on this machine",
            ) from error
        if isinstance(error, tf.errors.OpError) and not cluster.alone:
            raise WorkerLost(
                "training cannot continue without all of its workers",
                found=cluster.missing(folder, since),
                todo=f"run {resume} on all of them",
            ) from error
        raise
