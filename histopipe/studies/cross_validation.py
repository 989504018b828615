"""Cross-validation: write the splits of all folds, then train each fold in a separate process."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, Interrupted, NothingToDo, UsageError
from histopipe.evaluation.prediction_sets import check_calibration
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import TrainResult
from histopipe.runs.supervision import StopRequest, Supervision, train_with_retries
from histopipe.runs.task_config import CONFIGS, make_config
from histopipe.runs.train import resumed_config, with_recipe, with_stores, within_budget
from histopipe.runs.training_data import (
    new_splits,
    opened_sources,
    read_labelling,
    refuse_leaks,
    split_options,
)
from histopipe.splits.splits import Splits
from histopipe.splits.splitting import make_folds, part_of_training
from histopipe.studies.fold_results import (
    CrossValidationResult,
    Fold,
    plan_folds,
    reevaluate,
    summarize,
)
from histopipe.studies.study_settings import ALL_PATIENTS, FoldSettings
from histopipe.system.folders import CONFIG, FOLD_SPLITS, SHARE
from histopipe.system.locks import locked_alone
from histopipe.system.output import LineProgress, Progress, default_progress
from histopipe.system.parts import ShareOptions
from histopipe.system.settings import (
    declared_settings,
    flag,
    read_settings,
    split_settings,
    takes,
    to_toml,
)
from histopipe.system.shared_folders import PARTS, Share
from histopipe.system.tensorflow import in_cluster, share_devices

_SPLITS, _LOGS = FOLD_SPLITS, "logs"
_PLANNED = (_SPLITS, f"part-{CONFIG}", PARTS)
"""Content of a folder whose folds have not begun."""
_PLAN_SECONDS = 60.0
"""Time for which a part waits for the splits of another one."""


@takes(declared_settings(*CONFIGS, FoldSettings))
def cross_validate(
    stores: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    part: str | None = None,
    join: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> CrossValidationResult:
    """Train and test a model on every fold of the patients, each fold in a separate process.

    Args:
        stores: one store or several, with patches of one size; "patches.lmdb" if None.
        out: folder for the runs of the folds, their splits, and the summary.
        resume: continue the cross-validation in `out`: keep finished folds, and train all others.
        part: train the folds of one part only, for several processes with the same `out`: `I/N`, `slurm/N` or
            `kubernetes/N`. A part that died continues if it is done again.
        join: train nothing, and summarize the folds of all parts.
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
    share = ShareOptions(part=part, join=join).share
    if share.is_part and settings.get("time_budget"):
        raise UsageError("--time-budget", found="--part", expected="one process for all folds")
    resume = resume or join
    if not resume and not (share.is_part and run_folder.is_cross_validation(folder)):
        run_folder.check(folder, resume=False, ignored=_PLANNED)
    config, folds = _resumed(folder, settings) if resume else _new(settings)
    if in_cluster():
        raise UsageError(
            "--folds trains on one machine",
            found="several workers (TF_CONFIG or Slurm)",
            todo="run it outside of the cluster job",
        )
    progress = progress or default_progress()
    result = _run_folds(config, folds, folder, resume=resume, share=share, progress=progress)
    if config.more_time:
        progress.message(config.more_time)
    return result


def _new(settings: dict[str, Any]) -> tuple[TrainConfig, FoldSettings]:
    of_folds, training = split_settings(settings, FoldSettings)
    folds = FoldSettings(**of_folds)
    if not folds.folds and folds.seeds == 1:
        raise UsageError("--folds is missing", expected="a number of folds, such as 5, or column")
    if folds.folds and make_config(training).splits is not None:
        raise UsageError("--splits and --folds exclude each other", todo="use one of them")
    if training.get("conformal") and folds.seeds > 1:
        raise UsageError(
            "--conformal",
            found=f"--seeds {folds.seeds}: a patient would calibrate several times",
            expected="one seed",
        )
    if folds.folds and training.setdefault("calibration_share", 0.0):
        raise UsageError(
            "--calibration-share", found="--folds", expected="none: the folds calibrate each other"
        )
    config = make_config(with_recipe(training))
    if config.time_budget and not config.more_time:
        runs = math.ceil(len(_make_folds(config, folds)) * sum(folds.shares) / ALL_PATIENTS)
        config = within_budget(config, training, runs=runs)
    return config, folds


def _resumed(folder: Path, changes: dict[str, Any]) -> tuple[TrainConfig, FoldSettings]:
    """Read the settings of a cross-validation and apply changes."""
    if not run_folder.is_cross_validation(folder):
        raise UsageError(f"{folder} holds no cross-validation to resume")
    before, recorded = split_settings(
        read_settings(folder / CONFIG, *CONFIGS, FoldSettings), FoldSettings
    )
    of_folds, training = split_settings(changes, FoldSettings)
    if of_folds.get("folds") == "column" and recorded.get("split_column"):
        of_folds["folds"] = before["folds"]  # their number is recorded
    folds = FoldSettings(**(before | of_folds))
    config = resumed_config(recorded, training)
    fixed = [("folds", folds.folds, before), ("seeds", folds.seeds, before)]
    if folds.shares != FoldSettings(**before).shares:
        raise UsageError(
            "--resume cannot change --learning-curve", todo="leave it out, or use another --out"
        )
    # Without validation, the number of epochs is not only the largest one.
    for name, count, earlier in fixed + [("epochs", config.epochs, recorded)] * (
        not config.fractions[1]
    ):
        if count != earlier.get(name, count if name == "epochs" else 1):
            raise UsageError(
                f"--resume cannot change the number of {name}",
                found=f"{flag(name)} {count}",
                expected=earlier.get(name, 1),
            )
    return config, folds


def _run_folds(
    config: TrainConfig,
    settings: FoldSettings,
    folder: Path,
    *,
    resume: bool,
    share: Share,
    progress: Progress,
) -> CrossValidationResult:
    """Train every fold of this process that is not finished, then summarize."""
    devices, existed = share_devices(config.devices, settings.parallel_folds), folder.exists()
    made = [] if resume else _make_folds(config, settings)
    if made and settings.folds:
        settings = replace(settings, folds=len(made) // settings.seeds)
    planned = plan_folds(settings, folder, config.seed)
    names = [fold.folder.name for fold in planned]
    # Smaller shares are parts of larger ones.
    made = [part_of_training(each, share / 100) for each in made for share in settings.shares]
    splits = {f"{_SPLITS}/{name}.json": each for name, each in zip(names, made, strict=False)}
    for fold, each in zip(planned, made if settings.folds else (), strict=False):
        for line in each.shortages(config.unit) if fold.share == ALL_PATIENTS else ():
            progress.message(f"warning: {fold.folder.name.replace('-', ' ')}: {line}")
    chosen, failed = share.chosen(dict.fromkeys(names, 1)), share.joined(folder)
    with ExitStack() as stack:
        if share.is_part:
            stack.enter_context(share.held(folder))
            _write_plan(folder, splits, config, settings)
        else:
            stack.enter_context(run_folder.opened(folder, splits, config, settings, resume=resume))
        folds = [
            _existing_fold(config, fold, progress) for fold in planned if fold.folder.name in chosen
        ]
        if share.join:
            return summarize(config, folder, [_joined(fold, failed, share) for fold in folds])
        try:
            _train(config, settings, folds, devices, progress)
        except (UsageError, NothingToDo):
            if not resume and not share.is_part:
                _remove_plan(folder, keep=existed)
            raise
        except Interrupted:
            if not share.is_part:
                summarize(config, folder, folds)
            raise
        share.end(folder, {fold.folder.name: fold.reason for fold in folds if fold.reason})
        return (
            CrossValidationResult(folder, tuple(folds), {}, {}, None)
            if share.is_part
            else summarize(config, folder, folds)
        )


def _write_plan(folder: Path, splits: dict[str, Splits], *settings: Any) -> None:
    """Write splits and settings if no other part has written them.

    Raises:
        UsageError: those of another part differ.
    """
    busy = f"another part is writing the splits of {folder}"
    with locked_alone(folder / PARTS, busy, "run this part again", wait_seconds=_PLAN_SECONDS):
        if not run_folder.is_cross_validation(folder):
            run_folder.write_plan(folder, splits, *settings)
        elif (folder / CONFIG).read_text() != to_toml(*settings):
            raise UsageError(
                f"{folder} is a cross-validation with other settings",
                expected=f"those of {folder / CONFIG}",
                todo="run all parts with the same options, or choose another --out",
            )


def _joined(fold: Fold, failed: Mapping[str, str], share: Share) -> Fold:
    """Return a fold of a part, if it is finished or has failed."""
    name = fold.folder.name
    if fold.result is None and name not in failed:
        raise share.missing(fold.folder.parent, name)
    return fold if fold.result else replace(fold, error=UsageError(failed[name]))


def _make_folds(config: TrainConfig, settings: FoldSettings) -> list[Splits]:
    """Return the splits of all runs, those of one seed after those of another."""
    made: list[Splits] = []
    with opened_sources(config) as sources:
        labelling = read_labelling(config, sources, required=config.splits is None)
        for repeat in range(settings.seeds):
            seeded = replace(config, seed=config.seed + repeat)
            made += (
                make_folds(sources, settings.folds, **split_options(seeded, labelling))
                if settings.folds
                else [new_splits(seeded, sources, labelling)]
            )
    for splits in made:
        refuse_leaks(splits, config)
    if config.conformal:
        check_calibration(made, "test", config.conformal)
    return made


def _remove_plan(folder: Path, *, keep: bool) -> None:
    """Remove splits and settings if no fold has started, so that the corrected command can use the folder."""
    if any(map(run_folder.has_begun, run_folder.runs_of(folder))):
        return
    (folder / CONFIG).unlink()
    for part in (_SPLITS, _LOGS):
        shutil.rmtree(folder / part, ignore_errors=True)
    if not keep:
        folder.rmdir()


def _existing_fold(config: TrainConfig, fold: Fold, progress: Progress) -> Fold:
    """Return a fold as found in its folder. A finished fold is evaluated with the current settings."""
    if fold.run.is_finished:
        try:
            return replace(fold, result=reevaluate(fold.folder, config))
        except (DamagedStore, UsageError) as error:
            progress.message(f"warning: {fold.folder.name}: {error}; it is evaluated again")
    return fold


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
    stop, free = StopRequest(), [*devices]  # as many as there are threads

    def train(fold: Fold) -> None:
        if stop.asked:
            return
        on_device = replace(config, devices=free.pop())
        try:
            trained_fold = _train_fold(on_device, settings, fold, stop, progress)
        finally:
            free.append(on_device.devices)
        if trained_fold.result is None and stop.asked:
            return
        begun = any(run_folder.has_begun(other.folder) for other in folds)
        if isinstance(trained_fold.error, UsageError | NothingToDo) and not begun:
            raise trained_fold.error
        folds[folds.index(fold)] = trained_fold

    with stop.by_signals(), ThreadPoolExecutor(settings.parallel_folds) as pool:
        trained = [pool.submit(train, fold) for fold in folds if fold.result is None]
        try:
            for future in as_completed(trained):
                future.result()
        except BaseException:
            stop.asked += 1  # running folds save a checkpoint and end, and no other fold begins
            raise
    if stop.asked:
        finished = sum(fold.result is not None for fold in folds)
        raise Interrupted(
            "interrupted",
            found=f"{finished} of {len(folds)} folds finished",
            todo=run_folder.resume_hint(folds[0].folder.parent),
        )


def _train_fold(
    config: TrainConfig, settings: FoldSettings, fold: Fold, stop: StopRequest, progress: Progress
) -> Fold:
    folder = fold.folder
    name, _, share = folder.name.partition(f"-{SHARE}")
    title = name.replace("-", " ") + (f"/{settings.folds}" if fold.number else "")
    title += f", {share} % of the patients" * bool(share)
    verb = "resumes" if run_folder.has_begun(folder) else "starts"
    progress.message(f"{title}: {verb} in {folder}")
    splits = folder.parent / _SPLITS / f"{folder.name}.json"
    config = replace(config, splits=str(splits), seed=fold.seed)
    watch, log = Supervision(seconds=settings.fold_timeout, stop=stop), folder.parent / _LOGS
    with ExitStack() as stack:
        # On one terminal, the lines of parallel folds would be mixed.
        if settings.parallel_folds > 1:
            log.mkdir(exist_ok=True)
            file = stack.enter_context((log / f"{folder.name}.log").open("a", encoding="utf-8"))
            watch.progress, watch.stderr = LineProgress(file), file.fileno()
        outcome, attempts, seconds = train_with_retries(
            config, folder, watch, retries=settings.retries, progress=progress
        )
    fold = replace(fold, attempts=attempts, seconds=seconds)
    if isinstance(outcome, TrainResult):
        progress.message(f"{title}: done in {seconds:.0f} s")
        return replace(fold, result=outcome)
    progress.message(f"{title}: {'' if stop.asked else 'failed: '}{outcome}")
    return replace(fold, error=outcome)
