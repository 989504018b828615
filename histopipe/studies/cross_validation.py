"""Cross-validation: splits for every fold first, then each fold in a process of its own."""

from __future__ import annotations

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
from histopipe.runs.settings import declared_settings, read_settings, to_toml
from histopipe.runs.splits import new_folds, opened_sources
from histopipe.runs.stopping import StopRequest, sigterm_interrupts
from histopipe.runs.task_config import CONFIGS, make_config, resumed_config
from histopipe.runs.workers import in_cluster
from histopipe.studies.attempts import Limits, Outcome, attempt, has_begun
from histopipe.studies.fold_summary import CrossValidation, Fold, summarise, write_summary
from histopipe.studies.judging import judged_anew
from histopipe.studies.places import share_devices
from histopipe.studies.settings import FoldSettings
from histopipe.system.progress import message

SPLITS, LOGS = run_folder.FOLD_SPLITS, "logs"


FOLD_SETTINGS = tuple(declared_settings(FoldSettings))


def cross_validate(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    **settings: Any,
) -> CrossValidation:
    """Train and test a patch model on every fold of the patients, each fold in a process of its own.

    Args:
        stores: a store, or several, whose patches are of one size; "patches.lmdb" if not given.
        out: the folder: a run's folder a fold, their splits, and the summary.
        resume: go on with the cross-validation in `out`; finished folds stay as they are, all others are tried again.
        settings: by the names of `TrainConfig` and `FoldSettings`, as the flags of `histopipe train`; `folds` is needed.

    Returns:
        The result of each fold, of those that failed the reason; and all folds' predictions judged together.

    Raises:
        UsageError: a setting is unknown, or does not fit the data or the machine.
        NothingToDo: no store, or nothing to tell apart.
        Interrupted: told to stop; what was done is kept.

    Example:
        >>> result = cross_validate("patches.lmdb", out="runs/cv", folds=5)  # doctest: +SKIP
        >>> result.pooled.patient["mean"].auc  # doctest: +SKIP
    """
    if stores is not None:
        paths = [stores] if isinstance(stores, str | Path) else stores
        settings["stores"] = tuple(map(str, paths))
    if resume:
        return run_folds(*resumed_folds(Path(out), settings), Path(out), resume=True)
    return run_folds(*divided_settings(settings), Path(out))


def divided_settings(settings: dict[str, Any]) -> tuple[TrainConfig, FoldSettings]:
    """Settings of the trainings and of the folds.

    Raises:
        UsageError: there is no such setting, or no number of folds.
    """
    own = {name: value for name, value in settings.items() if name in FOLD_SETTINGS}
    others = {name: value for name, value in settings.items() if name not in FOLD_SETTINGS}
    folds = FoldSettings(**own)
    if not folds.folds:
        raise UsageError("--folds is missing", expected="how many, such as 5")
    config = make_config(others)
    if config.splits is not None:
        raise UsageError(
            "--splits is one split, and --folds makes its own", todo="take one of them"
        )
    return config, folds


def resumed_folds(folder: Path, changes: dict[str, Any]) -> tuple[TrainConfig, FoldSettings]:
    """A cross-validation's own settings, and what is to change.

    Raises:
        UsageError: the folder holds none, or the change would make what was trained so far meaningless.
    """
    if not run_folder.is_cross_validation(folder):
        raise UsageError(f"{folder} holds no cross-validation to resume")
    recorded = read_settings(folder / run_folder.CONFIG, *CONFIGS, FoldSettings)
    own = {name: recorded.pop(name) for name in FOLD_SETTINGS if name in recorded}
    wanted = {name: changes[name] for name in FOLD_SETTINGS if name in changes}
    folds = FoldSettings(**(own | wanted))
    if folds.folds != own["folds"]:
        raise UsageError(
            "--resume goes on with the folds that were made", found=f"--folds {folds.folds}",
            expected=own["folds"],
        )  # fmt: skip
    rest = {name: value for name, value in changes.items() if name not in FOLD_SETTINGS}
    return resumed_config(recorded, rest), folds


def run_folds(
    config: TrainConfig, settings: FoldSettings, folder: Path, *, resume: bool = False
) -> CrossValidation:
    """Train every fold that is not finished, then sum up.

    Raises:
        HistopipeError: as `cross_validate`.
    """
    if in_cluster():
        raise UsageError(
            "--folds trains on one machine", found="several workers (TF_CONFIG or Slurm)",
            todo="start it outside of them",
        )  # fmt: skip
    run_folder.check(folder, resume=resume, ignored=(SPLITS, f"part-{run_folder.CONFIG}"))
    devices = share_devices(config.devices, settings.parallel_folds)
    was_there = folder.exists()
    made = () if resume else _make_folds(config, settings.folds)
    with run_folder.held(folder):
        if not resume and has_begun(folder):
            raise UsageError(f"{folder}: another run has begun there meanwhile")
        _write_plan(config, settings, folder, made)
        folds = [_as_found(config, folder, number) for number in range(1, settings.folds + 1)]
        try:
            _train(config, settings, folds, devices)
        except (UsageError, NothingToDo):
            if not resume:
                _unmake(folder, keep=was_there)
            raise
        except Interrupted:
            write_summary(summarise(config, folder, folds))
            raise
        result = summarise(config, folder, folds)
        write_summary(result)
    return result


def _write_plan(
    config: TrainConfig, settings: FoldSettings, folder: Path, made: Sequence[Splits]
) -> None:
    """The splits of all folds that are new, then the settings: a folder with these has all of the splits."""
    with run_folder.writable(folder):
        (folder / SPLITS).mkdir(exist_ok=True)
        for number, splits in enumerate(made, 1):
            write_splits(splits, folder / SPLITS / f"fold-{number}.json")
        run_folder.write_text(folder / run_folder.CONFIG, to_toml(config, settings))
        if settings.parallel_folds > 1:
            (folder / LOGS).mkdir(exist_ok=True)


def _make_folds(config: TrainConfig, folds: int) -> tuple[Splits, ...]:
    with opened_sources(config) as sources:
        made = new_folds(config, sources, folds)
    for number, splits in enumerate(made, 1):
        for side, counts in splits.count().items():
            missing = [name for name in splits.classes if not counts[name]]
            if missing:
                message(f"warning: fold {number}: no {' and no '.join(missing)} for {side}")
    return made


def _unmake(folder: Path, *, keep: bool) -> None:
    """Remove a plan that no fold could begin with, so that the command can be put right and repeated."""
    if any(has_begun(path) for path in folder.glob("fold-*")):
        return
    (folder / run_folder.CONFIG).unlink()
    for part in (SPLITS, LOGS):
        shutil.rmtree(folder / part, ignore_errors=True)
    if not keep:
        folder.rmdir()


def _as_found(config: TrainConfig, folder: Path, number: int) -> Fold:
    """A fold as it is before anything is done; a finished one judged as this cross-validation wants it."""
    place = folder / f"fold-{number}"
    result = None
    if is_finished(place):
        try:
            result = judged_anew(place, config)
        except (DamagedStore, UsageError) as error:
            message(f"warning: fold {number}: {error}; it is judged anew")
    return Fold(number, place, result, None if result else "not done", attempts=0)


def _train(
    config: TrainConfig, settings: FoldSettings, folds: list[Fold], devices: Sequence[str]
) -> None:
    """Train folds that are not finished, and put what becomes of each in its place.

    Raises:
        UsageError, NothingToDo: no fold can be trained so.
        Interrupted: told to stop.
    """
    limits = Limits(seconds=settings.fold_timeout, retries=settings.retries)
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in devices:
        free.put(name)

    def train(fold: Fold) -> Outcome | None:
        if limits.stop.asked:
            return None
        name = free.get()
        try:
            return _train_fold(replace(config, devices=name), settings, fold, limits)
        finally:
            free.put(name)

    with ThreadPoolExecutor(settings.parallel_folds) as pool, sigterm_interrupts():
        waiting = {pool.submit(train, fold): fold for fold in folds if fold.result is None}
        try:
            for future in as_completed(waiting):
                _take_in(folds, waiting[future], future.result())
        except KeyboardInterrupt:
            _end(limits.stop, waiting)
            for future, fold in waiting.items():
                outcome = future.result()
                if outcome is not None and outcome.result is not None:
                    _take_in(folds, fold, outcome)
            raise Interrupted(
                "interrupted", found=f"{sum(f.result is not None for f in folds)} of {len(folds)} folds finished",
                todo=f"go on with `histopipe train --resume --out {folds[0].folder.parent}`",
            ) from None  # fmt: skip
        except BaseException:
            limits.stop.ask()
            raise


def _end(stop: StopRequest, waiting: Iterable[Future[Any]]) -> None:
    """Let the folds under way save and end; at once after a second Ctrl-C."""
    stop.ask()
    try:
        wait(waiting)
    except KeyboardInterrupt:
        stop.ask()


def _train_fold(config: TrainConfig, settings: FoldSettings, fold: Fold, limits: Limits) -> Outcome:
    number, place = fold.number, fold.folder
    message(
        f"fold {number}/{settings.folds}: {'going on' if has_begun(place) else 'begins'} in {place}"
    )
    splits = place.parent / SPLITS / f"{place.name}.json"
    # Side by side their lines would mix.
    log = place.parent / LOGS / f"{place.name}.log" if settings.parallel_folds > 1 else None
    outcome = attempt(replace(config, splits=str(splits)), place, limits, log=log)
    told = f"done in {outcome.seconds:.0f} s"
    if outcome.error is not None:
        told = f"{'' if limits.stop.asked else 'failed: '}{outcome.error}"
    message(f"fold {number}/{settings.folds}: {told}")
    return outcome


def _take_in(folds: list[Fold], fold: Fold, outcome: Outcome | None) -> None:
    """What became of a fold; an error of settings before any fold has begun is raised."""
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
