"""Cross-validation: first the splits of all folds, then each fold in a process of its own."""

from __future__ import annotations

import dataclasses
import queue
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from histopipe.dataset.splits import Splits, write_splits
from histopipe.errors import DamagedStore, Interrupted, NothingToDo, UsageError
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import is_finished
from histopipe.runs.settings_file import changed, known, read_config
from histopipe.runs.splits import new_folds, opened_sources
from histopipe.runs.supervision import sigterm_interrupts
from histopipe.runs.watch import Stop
from histopipe.runs.workers import in_cluster
from histopipe.studies.cross_validation_result import (
    CrossValidationResult,
    Fold,
    reevaluate,
    summarize,
    write_summary,
)
from histopipe.studies.settings import FoldSettings
from histopipe.studies.trainings import (
    TrainingLimits,
    TrainingOutcome,
    has_begun,
    share_devices,
    train_with_retries,
)
from histopipe.system.progress import Progress, default_progress

SPLITS, LOGS = run_folder.FOLD_SPLITS, "logs"


FOLD_SETTINGS = tuple(field.name for field in dataclasses.fields(FoldSettings))


def cross_validate(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> CrossValidationResult:
    """Train and test a model on every fold of the patients, each fold in a process of its own.

    Args:
        stores: one store or several, with patches of one size; "patches.lmdb" if None.
        out: folder for the runs of the folds, their splits, and the summary.
        resume: continue the cross-validation in `out`: finished folds are kept, all others are trained.
        progress: shows messages; `default_progress()` if None.
        settings: fields of `TrainConfig` and `FoldSettings`, as the flags of `histopipe train`; `folds` is required.

    Returns:
        The result of each fold or why it failed, and the evaluation of all test sets together.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine.
        NothingToDo: no store, or no labels.
        Interrupted: by Ctrl-C or SIGTERM; finished folds and saved states are kept.

    Example:
        >>> result = cross_validate("patches.lmdb", out="runs/cv", folds=5)  # doctest: +SKIP
        >>> result.pooled.patient["mean"].auc  # doctest: +SKIP
    """
    if stores is not None:
        paths = [stores] if isinstance(stores, str | Path) else stores
        settings["stores"] = tuple(map(str, paths))
    folder = Path(out)
    config, folds = resumed_folds(folder, settings) if resume else divided_settings(settings)
    return run_folds(config, folds, folder, resume=resume, progress=progress)


def divided_settings(settings: dict[str, Any]) -> tuple[TrainConfig, FoldSettings]:
    """Separate the settings of the trainings from those of the folds.

    Raises:
        UsageError: there is no such setting, or no number of folds.
    """
    own = {name: value for name, value in settings.items() if name in FOLD_SETTINGS}
    others = {name: value for name, value in settings.items() if name not in FOLD_SETTINGS}
    folds = FoldSettings(**own)
    if not folds.folds:
        raise UsageError("--folds is missing", expected="a number of folds, such as 5")
    config = TrainConfig(**known(others))
    if config.splits is not None:
        raise UsageError("--splits and --folds exclude each other", todo="use one of them")
    return config, folds


def resumed_folds(folder: Path, changes: dict[str, Any]) -> tuple[TrainConfig, FoldSettings]:
    """Read the settings of a cross-validation, and apply changes.

    Raises:
        UsageError: the folder holds none, or a setting cannot change after the training has begun.
    """
    if not run_folder.is_cross_validation(folder):
        raise UsageError(f"{folder} holds no cross-validation to resume")
    recorded = read_config(folder / run_folder.CONFIG, TrainConfig, FoldSettings)
    own = {name: recorded.pop(name) for name in FOLD_SETTINGS if name in recorded}
    wanted = {name: changes[name] for name in FOLD_SETTINGS if name in changes}
    folds = FoldSettings(**(own | wanted))
    if folds.folds != own["folds"]:
        raise UsageError(
            "--resume cannot change the number of folds", found=f"--folds {folds.folds}",
            expected=own["folds"],
        )  # fmt: skip
    rest = {name: value for name, value in changes.items() if name not in FOLD_SETTINGS}
    return changed(recorded, rest), folds


def run_folds(
    config: TrainConfig,
    settings: FoldSettings,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> CrossValidationResult:
    """Train every fold that is not finished, then summarize.

    Raises:
        HistopipeError: as `cross_validate`.
    """
    if in_cluster():
        raise UsageError(
            "--folds trains on one machine", found="several workers (TF_CONFIG or Slurm)",
            todo="run it outside of the job",
        )  # fmt: skip
    shown = progress or default_progress()
    run_folder.check(folder, resume=resume, ignored=(SPLITS, f"part-{run_folder.CONFIG}"))
    devices = share_devices(config.devices, settings.parallel_folds)
    was_there = folder.exists()
    made = () if resume else _make_folds(config, settings.folds, shown)
    with run_folder.held(folder):
        if not resume and has_begun(folder):
            raise UsageError(f"{folder}: another run has started there meanwhile")
        _write_plan(config, settings, folder, made)
        numbers = range(1, settings.folds + 1)
        folds = [_existing_fold(config, folder, number, shown) for number in numbers]
        try:
            _train(config, settings, folds, devices, shown)
        except (UsageError, NothingToDo):
            if not resume:
                _remove_plan(folder, keep=was_there)
            raise
        except Interrupted:
            write_summary(summarize(config, folder, folds))
            raise
        result = summarize(config, folder, folds)
        write_summary(result)
    return result


def _write_plan(
    config: TrainConfig, settings: FoldSettings, folder: Path, made: Sequence[Splits]
) -> None:
    """Write new splits of all folds, then the settings: a folder with settings has all splits."""
    with run_folder.writable(folder):
        (folder / SPLITS).mkdir(exist_ok=True)
        for number, splits in enumerate(made, 1):
            write_splits(splits, folder / SPLITS / f"fold-{number}.json")
        own = {name: getattr(settings, name) for name in FOLD_SETTINGS}
        run_folder.write_text(folder / run_folder.CONFIG, config.to_toml(**own))
        if settings.parallel_folds > 1:
            (folder / LOGS).mkdir(exist_ok=True)


def _make_folds(config: TrainConfig, folds: int, progress: Progress) -> tuple[Splits, ...]:
    with opened_sources(config) as sources:
        made = new_folds(config, sources, folds)
    for number, splits in enumerate(made, 1):
        for side, counts in splits.count().items():
            missing = [name for name in splits.classes if not counts[name]]
            if missing:
                progress.message(
                    f"warning: fold {number}: no {' and no '.join(missing)} for {side}"
                )
    return made


def _remove_plan(folder: Path, *, keep: bool) -> None:
    """Remove splits and settings if no fold could start, so that the corrected command can run again."""
    if any(has_begun(path) for path in folder.glob("fold-*")):
        return
    (folder / run_folder.CONFIG).unlink()
    for part in (SPLITS, LOGS):
        shutil.rmtree(folder / part, ignore_errors=True)
    if not keep:
        folder.rmdir()


def _existing_fold(config: TrainConfig, folder: Path, number: int, progress: Progress) -> Fold:
    """Return a fold as found in the folder; a finished one with the present evaluation settings."""
    place = folder / f"fold-{number}"
    result = None
    if is_finished(place):
        try:
            result = reevaluate(place, config)
        except (DamagedStore, UsageError) as error:
            progress.message(f"warning: fold {number}: {error}; it is evaluated again")
    return Fold(number, place, result, None if result else "not done", attempts=0)


def _train(
    config: TrainConfig,
    settings: FoldSettings,
    folds: list[Fold],
    devices: Sequence[str],
    progress: Progress,
) -> None:
    """Train the folds that are not finished, and replace them by their outcomes.

    Raises:
        UsageError, NothingToDo: no fold can start with these settings.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    limits = TrainingLimits(seconds=settings.fold_timeout, retries=settings.retries)
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in devices:
        free.put(name)

    def train(fold: Fold) -> TrainingOutcome | None:
        if limits.stop.asked:
            return None
        name = free.get()
        try:
            return _train_fold(replace(config, devices=name), settings, fold, limits, progress)
        finally:
            free.put(name)

    with ThreadPoolExecutor(settings.parallel_folds) as pool, sigterm_interrupts():
        waiting = {pool.submit(train, fold): fold for fold in folds if fold.result is None}
        try:
            for future in as_completed(waiting):
                _record(folds, waiting[future], future.result())
        except KeyboardInterrupt:
            _end(limits.stop, waiting)
            for future, fold in waiting.items():
                outcome = future.result()
                if outcome is not None and outcome.result is not None:
                    _record(folds, fold, outcome)
            raise Interrupted(
                "interrupted", found=f"{sum(f.result is not None for f in folds)} of {len(folds)} folds finished",
                todo=f"continue with `histopipe train --resume --out {folds[0].folder.parent}`",
            ) from None  # fmt: skip
        except BaseException:
            limits.stop.ask()
            raise


def _end(stop: Stop, waiting: Iterable[Future[Any]]) -> None:
    """Let running folds save and end; a second Ctrl-C ends them at once."""
    stop.ask()
    try:
        wait(waiting)
    except KeyboardInterrupt:
        stop.ask()


def _train_fold(
    config: TrainConfig,
    settings: FoldSettings,
    fold: Fold,
    limits: TrainingLimits,
    progress: Progress,
) -> TrainingOutcome:
    number, place = fold.number, fold.folder
    verb = "resumes" if has_begun(place) else "starts"
    progress.message(f"fold {number}/{settings.folds}: {verb} in {place}")
    splits = place.parent / SPLITS / f"{place.name}.json"
    # The lines of parallel folds would mix.
    log = place.parent / LOGS / f"{place.name}.log" if settings.parallel_folds > 1 else None
    outcome = train_with_retries(
        replace(config, splits=str(splits)), place, limits, progress=progress, log=log
    )
    text = f"done in {outcome.seconds:.0f} s"
    if outcome.error is not None:
        text = f"{'' if limits.stop.asked else 'failed: '}{outcome.error}"
    progress.message(f"fold {number}/{settings.folds}: {text}")
    return outcome


def _record(folds: list[Fold], fold: Fold, outcome: TrainingOutcome | None) -> None:
    """Record the outcome of a fold; raise an error of the settings if no fold has started yet."""
    if outcome is None:
        return
    error = outcome.error
    if isinstance(error, UsageError | NothingToDo) and not any(
        has_begun(it.folder) for it in folds
    ):
        raise error
    folds[fold.number - 1] = replace(
        fold, result=outcome.result, error=error, reason=str(error) if error else None,
        attempts=outcome.attempts, seconds=outcome.seconds, host_bytes=outcome.host_bytes,
    )  # fmt: skip
