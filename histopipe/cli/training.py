"""Commands for trainings and networks: `train`, `tune`, `compare`, `predict`, `embed`, `encoders`."""

from __future__ import annotations

import itertools
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import histopipe
from histopipe.cli.parameters import (
    PATH,
    SettingsCommand,
    json_option,
    path_or_url,
    setting_options,
    show,
    stores_argument,
    untrusted_option,
)
from histopipe.errors import ExitCode, HistopipeError, UsageError
from histopipe.inference.options import EmbedOptions, PredictOptions
from histopipe.runs.task_config import CONFIGS, read_config
from histopipe.studies.study_settings import FoldSettings, StudySettings
from histopipe.system.output import exit_code_of
from histopipe.system.settings import (
    declared_settings,
    flag,
    read_settings,
    select_settings,
    split_settings,
)

if TYPE_CHECKING:
    pass


_CLASSES = (*CONFIGS, FoldSettings)
_stores_argument = click.argument("stores", nargs=-1, type=click.Path())


@click.command(cls=SettingsCommand)
@_stores_argument
@click.option(
    "--config",
    type=PATH,
    help="TOML file with settings, such as config.toml of a run; flags override it.",
)
@click.option("--out", type=PATH, help="Folder of the run.  [default: runs/MODEL-DATE-TIME]")
@click.option("--resume", is_flag=True, help="Continue the run in --out with its settings.")
@json_option("the metrics")
@setting_options(*_CLASSES, skip=("stores",))
@untrusted_option("stores", features="mil", model="model")
def train(
    stores: tuple[str, ...],
    config: Path | None,
    out: Path | None,
    resume: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Train a patch model on STORES (default: patches.lmdb), or with --mil a slide model on features.

    Splits are written before training. The model with the best validation metric is kept, and evaluated on the test
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
    from histopipe.runs.recipe import chosen_settings
    from histopipe.system.folders import writable

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

    if is_cross_validation(folder) if resume else settings.get("folds"):
        folds = histopipe.cross_validate(out=folder, resume=resume, **settings)
        text = f"{folds}\nsummary.csv, summary.json, predictions, and a run for each fold: {folder}"
        then = ("compare", folder, "OTHER")
        show(folds, as_json=as_json, text=text, then=then, folder=str(folds.folder))
        if not folds.failed:
            return ExitCode.DONE
        first = folds.failed[0].error
        some = len(folds.failed) < len(folds.folds)
        return ExitCode.PARTLY if some or first is None else first.exit_code
    written = select_settings(click.get_current_context().params, FoldSettings)
    unused = sorted(written.keys() - {"folds"})
    if unused:
        raise UsageError(flag(unused[0]), found="no --folds", expected="--folds with a number")
    _, one = split_settings(settings, FoldSettings)
    result = histopipe.train(out=folder, resume=resume, **one)
    show(result, as_json=as_json, then=("report", folder), folder=str(result.folder))
    return ExitCode.DONE


@click.command(cls=SettingsCommand)
@_stores_argument
@click.option(
    "--space",
    type=PATH,
    required=True,
    help="TOML file of the search space: a range, a list of values, or one value per setting.",
)
@click.option("--out", type=PATH, required=True, help="Folder of the search.")
@click.option(
    "--config",
    type=PATH,
    help="TOML file with settings of all trials, as for `histopipe train`. --space overrides them.",
)
@click.option("--devices", help="Devices of this process: auto, cpu, cpu:N, gpu or gpu:0,1.")
@json_option("all trials")
@setting_options(StudySettings)
@untrusted_option("stores", features="mil", model="model")
def tune(
    *,
    stores: tuple[str, ...],
    space: Path,
    out: Path,
    config: Path | None,
    devices: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Search for settings with a better validation metric by training on STORES (default: patches.lmdb).

    The same command continues the search. Several processes with the same --out share the trials, on one or more
    machines. Trials do not use the test patches: evaluate the best settings with `histopipe train --config
    OUT/best.toml`.

    \b
    Example: histopipe tune patches.lmdb --space space.toml --out runs/search --trials 50
    """
    settings = read_config(config) if config is not None else {}
    if devices is not None:
        settings["devices"] = devices
    result = histopipe.tune(stores or None, space=space, out=out, **options, **settings)
    best = ("train", "--config", out / "best.toml", "--out", "runs/best")
    show(result, as_json=as_json, then=best if result.best else ())
    if result.best is None:
        return ExitCode.NOTHING
    complete = all(trial.state in ("done", "pruned") for trial in result.trials)
    return ExitCode.DONE if complete else ExitCode.PARTLY


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option(
    "--resamples",
    type=int,
    default=1000,
    help="Bootstrap resamples of the patients for 95 % confidence intervals; 0 for none.",
)
@json_option()
def compare(runs: tuple[Path, ...], resamples: int, as_json: bool) -> None:
    """Compare finished RUNS, or cross-validations, with the first one.

    Shows settings that differ, and the metrics of each run on its test patches. If two runs were tested on the same
    patches, the difference has a 95 % confidence interval. If the interval does not include 0, the difference is
    significant.

    \b
    Example: histopipe compare runs/resnet50 runs/mobilenet
    """
    show(histopipe.compare(runs, resamples=resamples), as_json=as_json, then=("report", runs[0]))


@click.command(cls=SettingsCommand)
@click.argument("run", type=PATH)
@click.argument("sources", nargs=-1, required=True, type=path_or_url)
@click.option("--out", type=PATH, required=True, help="Folder for the predictions.")
@setting_options(PredictOptions)
@json_option()
@untrusted_option("sources")
def predict(
    run: Path, sources: tuple[Path | str, ...], out: Path, as_json: bool, **options: Any
) -> int:
    """Predict SOURCES (stores, slides, or features) with the model in the run folder RUN.

    Slides need no store: they are tiled like the training slides, and their patches are not stored. A slide model also
    computes their features, or takes folders of features. If RUN is a cross-validation, its folds are averaged. Writes a
    CSV file of patches per slide, slides.csv and patients.csv. Run the same command again to predict missing slides.

    \b
    Example: histopipe predict runs/first new-slides/ --out predictions
    """
    result = histopipe.predict(run, sources, out=out, **options)
    show(result, as_json=as_json, then=("heatmap", out) if result.done or result.kept else ())
    return exit_code_of(len(result.failed), len(result.done) + len(result.kept))


@click.command(cls=SettingsCommand)
@stores_argument
@click.option(
    "--out", type=click.Path(), required=True, help="Folder for the feature files, one per slide."
)
@setting_options(EmbedOptions)
@json_option()
@untrusted_option("stores", model="model")
def embed(stores: tuple[Path, ...], out: str, as_json: bool, **options: Any) -> int:
    """Compute features of every patch of STORES (default: patches.lmdb) for slide-level models.

    Writes one HDF5 file per slide in the format of CLAM and TRIDENT: features (N, D), and coords (N, 2) in level-0
    pixels. Run the same command again to embed missing slides. `histopipe encoders` lists foundation models. An ONNX
    file needs a JSON file with the same name and with mean, std and size.

    \b
    Example: histopipe embed patches.lmdb --model uni --weights uni/ --out features
    """
    result = histopipe.embed(stores or "patches.lmdb", out=out, **options)
    show(
        result,
        as_json=as_json,
        then=("train", "--mil", out) if result.done or result.kept else (),
    )
    return exit_code_of(len(result.failed), len(result.done) + len(result.kept))


@click.command()
@click.argument("name", required=False)
@json_option()
def encoders(name: str | None, as_json: bool) -> None:
    """List the encoders (foundation models) for --model of embed and train, or show NAME in detail.

    The details are the expected patches, the licence, and the commands that download the weights. histopipe does not
    download them itself.

    \b
    Example: histopipe encoders uni
    """
    show(histopipe.encoders(name), as_json=as_json, then=() if name else ("encoders", "NAME"))
