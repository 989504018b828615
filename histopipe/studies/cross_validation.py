"""Cross-validation: write the splits of all folds, then train each fold in a separate process."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from histopipe.errors import DamagedStore, Interrupted, NothingToDo, UsageError
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.recipe import with_recipe
from histopipe.runs.result import is_finished
from histopipe.runs.supervision import StopRequest, Supervision, sigterm_interrupts
from histopipe.runs.task_config import CONFIGS, make_config, resumed_config, with_stores
from histopipe.runs.training_data import opened_sources, read_labelling, refuse_leaks, split_options
from histopipe.runs.workers import in_cluster
from histopipe.splits.splits import Splits
from histopipe.splits.splitting import make_folds
from histopipe.studies.cross_validation_result import (
    CrossValidationResult,
    Fold,
    reevaluate,
    summarize,
)
from histopipe.studies.settings import FoldSettings
from histopipe.studies.trainings import TrainingOutcome, share_devices, train_with_retries
from histopipe.system.progress import Progress, default_progress
from histopipe.system.settings import read_settings, split_settings

_SPLITS, _LOGS = run_folder.FOLD_SPLITS, "logs"
_PLANNED = (_SPLITS, f"part-{run_folder.CONFIG}")
"""Content of a folder whose folds have not begun."""


def cross_validate(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> CrossValidationResult:
    """Train and test a model on every fold of the patients, each fold in a separate process.

    Args:
        stores: one store or several, with patches of one size; "patches.lmdb" if None.
        out: folder for the runs of the folds, their splits, and the summary.
        resume: continue the cross-validation in `out`: keep finished folds, and train all others.
        progress: shows messages; `default_progress()` if None.
        settings: fields of `TrainConfig` and `FoldSettings`, like the flags of `histopipe train`; `folds` is required.

    Returns:
        The result or error of each fold, and the evaluation of all test sets together.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine.
        NothingToDo: there is no store, or there are no labels.
        Interrupted: by Ctrl-C or SIGTERM; finished folds and checkpoints are kept.

    Example:
        >>> result = cross_validate("patches.lmdb", out="runs/cv", folds=5)  # doctest: +SKIP
        >>> result.pooled.patient["mean"].auc  # doctest: +SKIP
    """
    folder, settings = Path(out), with_stores(settings, stores)
    if not resume:
        run_folder.check(folder, resume=False, ignored=_PLANNED)
    config, folds = _resumed(folder, settings) if resume else _new(settings)
    if in_cluster():
        raise UsageError(
            "--folds trains on one machine", found="several workers (TF_CONFIG or Slurm)",
            todo="run it outside of the cluster job",
        )  # fmt: skip
    return _run_folds(config, folds, folder, resume=resume, progress=progress or default_progress())


def _new(settings: dict[str, Any]) -> tuple[TrainConfig, FoldSettings]:
    of_folds, training = split_settings(settings, FoldSettings)
    folds = FoldSettings(**of_folds)
    if not folds.folds:
        raise UsageError("--folds is missing", expected="a number of folds, such as 5, or column")
    if make_config(training).splits is not None:
        raise UsageError("--splits and --folds exclude each other", todo="use one of them")
    return make_config(with_recipe(training)), folds


def _resumed(folder: Path, changes: dict[str, Any]) -> tuple[TrainConfig, FoldSettings]:
    """Read the settings of a cross-validation and apply changes."""
    if not run_folder.is_cross_validation(folder):
        raise UsageError(f"{folder} holds no cross-validation to resume")
    before, recorded = split_settings(
        read_settings(folder / run_folder.CONFIG, *CONFIGS, FoldSettings), FoldSettings
    )
    of_folds, training = split_settings(changes, FoldSettings)
    if of_folds.get("folds") == "column" and recorded.get("split_column"):
        of_folds["folds"] = before["folds"]  # their number is recorded
    folds = FoldSettings(**(before | of_folds))
    if folds.folds != before["folds"]:
        raise UsageError(
            "--resume cannot change the number of folds", found=f"--folds {folds.folds}",
            expected=before["folds"],
        )  # fmt: skip
    return resumed_config(recorded, training), folds


def _run_folds(
    config: TrainConfig, settings: FoldSettings, folder: Path, *, resume: bool, progress: Progress
) -> CrossValidationResult:
    """Train every fold that is not finished, then summarize."""
    run_folder.check(folder, resume=resume, ignored=_PLANNED)
    devices = share_devices(config.devices, settings.parallel_folds)
    existed = folder.exists()
    made = () if resume else _make_folds(config, settings.folds, progress)
    settings = replace(settings, folds=len(made) or settings.folds)
    splits = {f"{_SPLITS}/fold-{number}.json": fold for number, fold in enumerate(made, 1)}
    with run_folder.opened(folder, splits, config, settings, resume=resume):
        numbers = range(1, int(settings.folds) + 1)
        folds = [_existing_fold(config, folder, number, progress) for number in numbers]
        try:
            _train(config, settings, folds, devices, progress)
        except (UsageError, NothingToDo):
            if not resume:
                _remove_plan(folder, keep=existed)
            raise
        except Interrupted:
            summarize(config, folder, folds)
            raise
        return summarize(config, folder, folds)


def _make_folds(
    config: TrainConfig, folds: int | Literal["column"], progress: Progress
) -> tuple[Splits, ...]:
    with opened_sources(config) as sources:
        made = make_folds(sources, folds, **split_options(config, read_labelling(config, sources)))
    for number, splits in enumerate(made, 1):
        refuse_leaks(splits, config)
        for line in splits.shortages(config.unit):
            progress.message(f"warning: fold {number}: {line}")
    return made


def _remove_plan(folder: Path, *, keep: bool) -> None:
    """Remove splits and settings if no fold has started, so that the corrected command can use the folder."""
    if any(run_folder.has_begun(path) for path in folder.glob("fold-*")):
        return
    (folder / run_folder.CONFIG).unlink()
    for part in (_SPLITS, _LOGS):
        shutil.rmtree(folder / part, ignore_errors=True)
    if not keep:
        folder.rmdir()


def _existing_fold(config: TrainConfig, folder: Path, number: int, progress: Progress) -> Fold:
    """Return a fold as found in the folder. A finished fold is evaluated with the current settings."""
    fold_folder = folder / f"fold-{number}"
    result = None
    if is_finished(fold_folder):
        try:
            result = reevaluate(fold_folder, config)
        except (DamagedStore, UsageError) as error:
            progress.message(f"warning: fold {number}: {error}; it is evaluated again")
    return Fold(number, fold_folder, result)


def _train(
    config: TrainConfig,
    settings: FoldSettings,
    folds: list[Fold],
    devices: Sequence[str],
    progress: Progress,
) -> None:
    """Train the folds that are not finished, and update them in `folds`.

    Raises:
        UsageError, NothingToDo: no fold can start with these settings.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    stop = StopRequest()
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in devices:
        free.put(name)

    def train(fold: Fold) -> None:
        if stop.asked:
            return
        name = free.get()
        try:
            outcome = _train_fold(replace(config, devices=name), settings, fold, stop, progress)
        finally:
            free.put(name)
        if outcome.result is None and stop.asked:
            return
        error, begun = outcome.error, any(run_folder.has_begun(other.folder) for other in folds)
        if isinstance(error, UsageError | NothingToDo) and not begun:
            raise error
        folds[fold.number - 1] = replace(fold, **outcome._asdict())

    with ThreadPoolExecutor(settings.parallel_folds) as pool, sigterm_interrupts():
        trained = [pool.submit(train, fold) for fold in folds if fold.result is None]
        try:
            for future in as_completed(trained):
                future.result()
        except KeyboardInterrupt:
            _end(stop, trained)
            finished = sum(fold.result is not None for fold in folds)
            raise Interrupted(
                "interrupted", found=f"{finished} of {len(folds)} folds finished",
                todo=f"continue with `histopipe train --resume --out {folds[0].folder.parent}`",
            ) from None  # fmt: skip
        except BaseException:
            stop.asked += 1
            raise


def _end(stop: StopRequest, trained: Sequence[Future[None]]) -> None:
    """Wait until running folds have saved a checkpoint and ended. A second Ctrl-C ends them immediately."""
    stop.asked += 1
    try:
        wait(trained)
    except KeyboardInterrupt:
        stop.asked += 1
        wait(trained)


def _train_fold(
    config: TrainConfig, settings: FoldSettings, fold: Fold, stop: StopRequest, progress: Progress
) -> TrainingOutcome:
    title, folder = f"fold {fold.number}/{settings.folds}", fold.folder
    verb = "resumes" if run_folder.has_begun(folder) else "starts"
    progress.message(f"{title}: {verb} in {folder}")
    splits = folder.parent / _SPLITS / f"{folder.name}.json"
    # On one terminal, the lines of parallel folds would be mixed.
    log = folder.parent / _LOGS / f"{folder.name}.log" if settings.parallel_folds > 1 else None
    outcome = train_with_retries(
        replace(config, splits=str(splits)), folder,
        Supervision(seconds=settings.fold_timeout, stop=stop, log=log, alone=True),
        retries=settings.retries, progress=progress,
    )  # fmt: skip
    text = f"done in {outcome.seconds:.0f} s"
    if outcome.error is not None:
        text = f"{'' if stop.asked else 'failed: '}{outcome.error}"
    progress.message(f"{title}: {text}")
    return outcome
