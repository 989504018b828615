"""Commands that train: `init`, `train`, `tune`, `probe`."""

from __future__ import annotations

import itertools
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

import histopipe
from histopipe.cli import config_option, settings_of
from histopipe.cli.parameters import (
    PATH,
    SettingOption,
    SettingsCommand,
    check_untrusted_input,
    duration,
    json_option,
    names_in_file,
    setting_options,
    show,
    untrusted_option,
)
from histopipe.errors import ExitCode, HistopipeError, UsageError
from histopipe.runs.task_config import CONFIGS, BagTrainConfig, read_config
from histopipe.studies.study_settings import (
    PROBED,
    FoldSettings,
    ProbeSettings,
)
from histopipe.system.parts import ShareOptions
from histopipe.system.settings import (
    NETWORK_PATH,
    declared_settings,
    flag,
    read_settings,
    select_settings,
    split_settings,
)

_CLASSES = (*CONFIGS, FoldSettings)


@click.command(cls=SettingsCommand)
@click.option("--out", type=PATH, default="histopipe.toml", help="The file.")
@click.option(
    "--slides",
    type=PATH,
    multiple=True,
    default=("slides",),
    help="Folder of slides to train on; repeatable.",
)
@click.option(
    "--new-slides",
    type=PATH,
    multiple=True,
    default=("new-slides",),
    help="Folder of slides to predict; repeatable.",
)
@click.option(
    "--encoder",
    cls=SettingOption,
    path=NETWORK_PATH,
    help="Train a slide model on features of this encoder, as for embed.",
)
@click.option("--weights", type=PATH, help="File or folder of its weights.")
@setting_options("studies.init_settings.INIT_CLASSES", skip="studies.init_settings.NOT_ASKED")
@json_option()
def init(as_json: bool, **options: Any) -> None:
    """Write the file of a study, with a table of settings for each command, which takes it by --config.

    Flags override the file, and the file overrides defaults. Its paths are relative to its folder.

    \b
    Example: histopipe init --labels labels.csv --folds 5
             histopipe ingest --config histopipe.toml
             histopipe train --config histopipe.toml
    """
    show(histopipe.init(**options), as_json=as_json)


_stores_argument = click.argument("stores", nargs=-1, type=click.Path())


@click.command(cls=SettingsCommand)
@_stores_argument
@config_option(passed=True)
@click.option("--out", type=PATH, help="Folder of the run.  [default: runs/MODEL-DATE-TIME]")
@click.option("--resume", is_flag=True, help="Continue the run in --out with its settings.")
@json_option("the metrics")
@setting_options(*_CLASSES, ShareOptions, skip=("stores",))
@untrusted_option(model=True)
def train(
    stores: tuple[str, ...],
    config: Path | None,
    out: Path | None,
    resume: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Train a patch model on STORES (default: patches.lmdb), or with --mil a slide model on features.

    Splits are written before training. The model with the best --monitor on validation is kept, and evaluated on the test
    patches. --folds cross-validates.

    \b
    Example: histopipe train patches.lmdb --out runs/first
    Slide model: histopipe train --mil features --labels labels.csv --epochs 40
    Other settings:
      histopipe train patches.lmdb --optimizer adagrad --learning-rate 2e-4
        --dropout 0.15 --class-weights balanced
    """
    if resume and out is None:
        raise UsageError("--resume needs --out", expected="the folder of a run")
    if resume and config is not None:
        raise UsageError("--resume uses the settings of the run", found="--config")
    if config is not None:
        settings = read_settings(config, *_CLASSES) | settings
    if resume:  # a study file has the settings of the beginning
        of_file = names_in_file(click.get_current_context())
        settings = {name: settings[name] for name in settings.keys() - set(of_file)}
        stores = () if "stores" in of_file else stores
    if stores:
        if settings.get("mil") is not None:
            raise UsageError(
                "STORES", found=f"--mil {' '.join(settings['mil'])}", expected="STORES or --mil"
            )
        settings["stores"] = stores
    folder = _new_folder(settings) if out is None else out
    try:
        return _train(folder, settings, resume=resume, as_json=as_json)
    finally:
        if out is None:
            with suppress(OSError):  # they are not empty
                folder.rmdir()
                folder.parent.rmdir()


def _new_folder(settings: dict[str, Any]) -> Path:
    """Create a folder for a run. Trainings that start in the same second get different folders."""
    from histopipe.runs.train import chosen_settings
    from histopipe.system.files import writable

    defaults = {name: setting.default for name, setting in declared_settings(*CONFIGS).items()}
    values = {**defaults, **settings}
    with suppress(HistopipeError):  # the training reports it
        values |= chosen_settings(settings)
    kind = f"mil-{values['pooling']}" if settings.get("mil") is not None else values["model"]
    for number in itertools.count(1):
        suffix = "" if number == 1 else f"-{number}"
        folder = Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}{suffix}"
        with writable(folder), suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def _train(folder: Path, settings: dict[str, Any], *, resume: bool, as_json: bool) -> int:
    """Train once, or once per fold."""
    from histopipe.runs.folder import is_cross_validation

    several = settings.get("folds") or settings.get("seeds", 1) != 1
    if is_cross_validation(folder) if resume else several:
        folds = histopipe.cross_validate(out=folder, resume=resume, **settings)
        show(
            folds,
            as_json=as_json,
            text=f"{folds}\nsummary.csv, summary.json, predictions, and a run for each fold: {folder}",
            then=("compare", folder, "OTHER"),
            folder=str(folds.folder),
        )
        if not folds.failed:
            return ExitCode.DONE
        first = folds.failed[0].error
        some = len(folds.failed) < len(folds.folds)
        return ExitCode.PARTLY if some or first is None else first.exit_code
    written = select_settings(click.get_current_context().params, FoldSettings, ShareOptions)
    unused = sorted(written.keys() - {"folds", "seeds"})
    if unused:
        raise UsageError(flag(unused[0]), found="no --folds", expected="--folds with a number")
    _, one = split_settings(settings, FoldSettings)
    result = histopipe.train(out=folder, resume=resume, **one)
    return show(result, as_json=as_json, then=("report", folder), folder=str(result.folder))


@click.command(cls=SettingsCommand)
@_stores_argument
@click.option(
    "--space",
    type=PATH,
    required=True,
    help="TOML file of the search space: a range, a list of values, or one value per setting.",
)
@click.option("--out", type=PATH, required=True, help="Folder of the search.")
@config_option(passed=True)
@click.option("--devices", help="Devices of this process: auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option(
    "--time-budget",
    type=duration,
    help="Time of all trials, such as 4h: left-out --trainable, --epochs and --patches-per-slide are chosen by it.",
)
@json_option("all trials")
@setting_options("search.search_settings.SearchSettings")
@untrusted_option(model=True, passed=True)
def tune(
    *,
    stores: tuple[str, ...],
    space: Path,
    out: Path,
    config: Path | None,
    devices: str | None,
    time_budget: float | None,
    as_json: bool,
    untrusted: bool,
    **options: Any,
) -> int:
    """Search for settings with a better validation metric by training on STORES (default: patches.lmdb).

    The same command continues the search. Several processes with the same --out share the trials, on one or more
    machines. Without tables, --config has the settings of all trials; else they are those of [train]. Trials do not use
    the test patches: evaluate the best settings with `histopipe train --config OUT/best.toml`.

    \b
    Example: histopipe tune patches.lmdb --space space.toml --out runs/search --trials 50
    """
    settings = (
        select_settings(settings_of(train), *CONFIGS) if config is None else read_config(config)
    )
    if untrusted:
        check_untrusted_input(settings, model=True)
    chosen = {"devices": devices, "time_budget": time_budget}
    settings |= {name: value for name, value in chosen.items() if value is not None}
    recorded = settings.pop("stores", None)
    if stores:
        settings.pop("mil", None)
    result = histopipe.tune(stores or recorded, space=space, out=out, **options, **settings)
    best = ("train", "--config", out / "best.toml", "--out", "runs/best")
    show(result, as_json=as_json, then=best if result.best else ())
    if result.best is None:
        return ExitCode.NOTHING
    complete = all(trial.state in ("done", "pruned") for trial in result.trials)
    return ExitCode.DONE if complete else ExitCode.PARTLY


@click.command(cls=SettingsCommand)
@click.argument("features", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, default=Path("probe"), help="Folder of the results.")
@json_option("the metrics")
@setting_options(
    ProbeSettings, BagTrainConfig, skip=declared_settings(BagTrainConfig).keys() - {*PROBED}
)
def probe(features: tuple[Path, ...], out: Path, as_json: bool, **settings: Any) -> None:
    """Compare FEATURES, folders of the features of several encoders, by simple models on the same folds.

    Linear models, nearest neighbours and few patients per class, of the mean features of each slide; and what features
    know of the site. Differences are from the first folder.

    \b
    Example: histopipe probe features/uni features/virchow2 --labels labels.csv
    """
    show(histopipe.probe(features, out=out, **settings), as_json=as_json, then=("report", out))
