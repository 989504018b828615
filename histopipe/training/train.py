"""One training from settings to a run folder, in this process. `supervise` runs it in one of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tensorflow as tf

from histopipe.errors import MachineShort, OutOfMemory, WorkerLost
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.messages import Report, unreported
from histopipe.runs.result import TrainResult
from histopipe.runs.splits import opened_sources, run_splits
from histopipe.runs.workers import SIGNS, Cluster
from histopipe.system.filesystems import is_full_disk
from histopipe.training.collectives import find_cluster
from histopipe.training.data import tell_splits
from histopipe.training.memory import is_out_of_memory
from histopipe.training.run import Run
from histopipe.training.task import task_of


def train_here(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    report: Report = unreported,
) -> TrainResult:
    """Train a model in this process, which never gives back all the memory that takes.

    Args:
        config: every setting.
        folder: where the run goes.
        resume: go on with the run that is there.
        report: told how it goes.

    Raises:
        UsageError: a setting does not fit the data or the machine.
        NothingToDo: no store, or nothing to tell apart.
        DamagedStore: a store is damaged, or no longer what the run began with.
        OutOfMemory: memory ran out where this process cannot go on.
        MachineShort: the disk is full.
        WorkerLost: another worker is gone.
        Interrupted: told to stop; the state is saved.
    """
    cluster = find_cluster()
    if cluster.chief:
        run_folder.check(folder, resume=resume, ignored=() if cluster.alone else (SIGNS,))
    with ExitStack() as stack:
        recorded = folder / run_folder.SPLITS if resume else config.splits
        sources = stack.enter_context(opened_sources(config, recorded))
        splits = run_splits(config, sources, folder, resume=resume)
        task = task_of(config, sources, splits)
        if cluster.chief:
            tell_splits(splits, sources, task.holders, task.unit)
        stack.enter_context(cluster.signs(folder))
        stack.enter_context(_full_disk_told(folder))
        stack.enter_context(_lost_workers_told(cluster, folder))
        stack.enter_context(_lost_memory_told())
        run = Run(config, folder, task=task, cluster=cluster, report=report)
        if cluster.chief:
            # All that can be wrong with the settings has been found by now: the folder begins to exist.
            stack.enter_context(run_folder.opened(folder, config, splits, resume=resume))
        return run.run(resume=resume)


@contextmanager
def _full_disk_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        if not is_full_disk(error):
            raise
        raise MachineShort(
            f"the disk that holds {folder} is full",
            todo=f"make room and go on with `histopipe train --resume --out {folder}`",
        ) from error


@contextmanager
def _lost_memory_told() -> Iterator[None]:
    """What runs out of memory before there is anything that could be done in smaller pieces."""
    try:
        yield
    except (tf.errors.OpError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            "memory ran out before the first step", found=str(error).split("\n")[0][:200],
            todo="take a smaller --model, or end what else uses this machine's memory",
        ) from error  # fmt: skip


@contextmanager
def _lost_workers_told(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Errors of a collective operation as what they mean: another worker is gone."""
    since = time.time()
    try:
        yield
    except tf.errors.OpError as error:
        if cluster.alone or is_out_of_memory(error):
            raise
        raise WorkerLost(
            "training cannot go on without all of its workers",
            found=cluster.missing(folder, since),
            todo=f"go on with `histopipe train --resume --out {folder}` on all of them",
        ) from error
