"""One training, from settings to a run folder, in this process. `runs.supervision` starts a process for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tensorflow as tf

from histopipe.errors import OutOfMemory, WorkerLost
from histopipe.runs import folder as run_folder
from histopipe.runs.advice import advise
from histopipe.runs.config import TrainConfig
from histopipe.runs.messages import Report, ReportedProgress, one_at_a_time
from histopipe.runs.result import TrainResult
from histopipe.runs.training_data import opened_sources, splits_and_slides
from histopipe.runs.workers import HEARTBEATS, Cluster
from histopipe.splits.slide_table import write_slide_table
from histopipe.splits.splits import SPLITS
from histopipe.system.filesystems import roomy
from histopipe.system.progress import message, use_progress
from histopipe.training.bag_problem import make_problem
from histopipe.training.devices import find_cluster
from histopipe.training.memory import is_out_of_memory
from histopipe.training.problem import print_splits
from histopipe.training.trainer import Trainer


def train_here(
    config: TrainConfig, folder: Path, *, resume: bool = False, report: Report | None = None
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
            report = one_at_a_time(report)
            stack.enter_context(use_progress(ReportedProgress(report)))
        splits_path = folder / SPLITS if resume else config.splits
        sources = stack.enter_context(opened_sources(config, splits_path))
        splits, slides = splits_and_slides(config, sources, folder, resume=resume)
        problem = make_problem(config, sources, splits)
        if cluster.chief:
            print_splits(splits, sources, problem.holders, config.unit)
        stack.enter_context(cluster.heartbeats(folder))
        stack.enter_context(_explained(cluster, folder))
        problem.slides = slides
        trainer = Trainer(
            config, folder, problem=problem, cluster=cluster, report=report or (lambda *_: None)
        )
        if cluster.chief:
            # All checks of the settings have passed: create the folder.
            stack.enter_context(run_folder.opened(folder, {SPLITS: splits}, config, resume=resume))
            write_slide_table(folder / run_folder.SLIDES, slides)
        result = trainer.train(resume=resume)
        patients = len({slide.patient for slide in splits.slides})
        is_drawn = config.splits is None and config.split_column is None
        shortages = list(splits.shortages(config.unit)) if is_drawn else []
        advice = advise(config, trainer.history, result.best_epoch, patients, shortages)
        if advice and cluster.chief:
            message(advice)
        return result


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
                "memory ran out before the first step", found=str(error).split("\n")[0][:200],
                todo="use a smaller --model, or end other programs on this machine",
            ) from error  # fmt: skip
        if isinstance(error, tf.errors.OpError) and not cluster.alone:
            raise WorkerLost(
                "training cannot continue without all of its workers",
                found=cluster.missing(folder, since), todo=f"run {resume} on all of them",
            ) from error  # fmt: skip
        raise
