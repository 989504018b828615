"""Train a model in a separate process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from histopipe.runs import folder as run_folder
from histopipe.runs.recipe import with_recipe
from histopipe.runs.result import TrainResult
from histopipe.runs.supervision import supervise
from histopipe.runs.task_config import make_config, read_config, resumed_config, with_stores
from histopipe.system.progress import Progress, use_progress
from histopipe.system.tensorflow import load_quietly


def train(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    in_process: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a patch model on stores, or with `mil=` a slide model on features.

    The training runs in a separate process, so its memory is freed and a crash does not affect this process.

    Args:
        stores: a store, or several with one patch size. Default: "patches.lmdb", or the stores of the resumed run.
        out: folder for the run.
        resume: continue the run in `out`, with its recorded settings and the given changes.
        in_process: train in this process. Keras keeps 4 to 50 MB of each model until the process ends. Running out of
            memory may kill the process. All trainings must use the devices of the first.
        progress: where to show progress. Default: `default_progress()`.
        settings: settings by name, as in docs/reference/settings.md and as the flags of `histopipe train`.

    Returns:
        The metrics of the best model on validation and test, and the folder.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine.
        NothingToDo: there is no store, or fewer than two classes.
        DamagedStore: a store or run is damaged.
        MachineShort: the disk is full, or memory ran out even with the smallest micro-batches.
        WorkerLost: another worker is lost.
        Interrupted: a signal stopped the training; the state is saved.

    Example:
        >>> result = train("patches.lmdb", out="runs/first", epochs=5)  # doctest: +SKIP
        >>> result.metrics["test"].patch.auc  # doctest: +SKIP
    """
    folder, settings = Path(out), with_stores(settings, stores)
    if resume:
        run_folder.check(folder, resume=True)
        config = resumed_config(read_config(folder / run_folder.CONFIG), settings)
    else:
        make_config(settings)  # checks them before a store is opened
        with use_progress(progress) if progress is not None else nullcontext():
            config = make_config(with_recipe(settings))
    if not in_process:
        return supervise(config, folder, resume=resume, progress=progress)
    with use_progress(progress) if progress is not None else nullcontext():
        train_here = load_quietly("histopipe.training.train").train_here
        result: TrainResult = train_here(config, folder, resume=resume)
        return result
