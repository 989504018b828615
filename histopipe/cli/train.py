"""`histopipe train`: train a model on a store or on features."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from histopipe.cli.setting_options import GroupedCommand, given_settings, setting_options
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode, UsageError
from histopipe.runs.settings import declared_settings, flag, read_settings
from histopipe.runs.task_config import CONFIGS
from histopipe.studies.settings import FoldSettings

if TYPE_CHECKING:
    from histopipe.runs.result import TrainResult
    from histopipe.studies.cross_validation_result import CrossValidationResult

_CLASSES = (*CONFIGS, FoldSettings)


@click.command(cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("stores", nargs=-1, type=click.Path(), default=None)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings from a TOML file, such as a run's config.toml; flags override it.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the run.  [default: runs/MODEL-DATE-TIME]",
)
@click.option("--resume", is_flag=True, help="Continue the run in --out, with its own settings.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
@setting_options(*_CLASSES, skip=("stores",))
@untrusted_option("stores", features="mil")
def command(
    stores: tuple[str, ...],
    config: Path | None,
    out: Path | None,
    resume: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Train a patch model on STORES (default: patches.lmdb), or with --mil a slide model on features.

    Splits are written before training. The best model on validation is kept and evaluated on the held-out test patches.
    With --folds, it cross-validates.

    \b
    Example: histopipe train patches.lmdb --model resnet50 --split-by patient
    Whole slides: histopipe train --mil features --labels labels.csv --epochs 40
    The classic recipe:
      histopipe train patches.lmdb --optimizer adagrad --learning-rate 2e-4
        --dropout 0.15 --class-weights balanced
    """  # fmt: skip
    settings = given_settings(*_CLASSES)
    if resume and out is None:
        raise UsageError("--resume needs --out", expected="the folder of a run")
    if resume and config is not None:
        raise UsageError("--resume goes on with the run's own settings", found="--config")
    if config is not None:
        settings = read_settings(config, *_CLASSES) | settings
    if stores:
        if settings.get("mil") is not None:
            raise UsageError("STORES", found=f"--mil {settings['mil']}", expected="one of them")
        settings["stores"] = stores
    _train(out or _new_folder(settings), settings, resume=resume, as_json=as_json)


def _new_folder(settings: dict[str, Any]) -> Path:
    values = {name: it.default for name, it in declared_settings(*CONFIGS).items()} | settings
    kind = f"mil-{values['pooling']}" if settings.get("mil") is not None else values["model"]
    return Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"


def _train(folder: Path, settings: dict[str, Any], *, resume: bool, as_json: bool) -> None:
    """Train once, or once per fold."""
    # Late: `--help` needs none of it.
    from histopipe.runs.folder import is_cross_validation
    from histopipe.runs.train import train

    of_folds = declared_settings(FoldSettings)
    if is_cross_validation(folder) if resume else settings.get("folds"):
        # Late: a single training starts without it.
        from histopipe.studies.cross_validation import cross_validate

        _print_folds(cross_validate(out=folder, resume=resume, **settings), as_json=as_json)
        return
    lost = sorted(name for name in given_settings(FoldSettings) if name != "folds")
    if lost:
        raise UsageError(flag(lost[0]), found="no --folds", expected="the number of folds with it")
    one = {name: value for name, value in settings.items() if name not in of_folds}
    _print(train(out=folder, resume=resume, **one), as_json=as_json)


def _print_folds(result: CrossValidationResult, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"folder": str(result.folder), **result.to_json()}, indent=2))
    else:
        click.echo(str(result))
        click.echo(
            f"summary.csv, summary.json, predictions, and a run for each fold: {result.folder}"
        )
    if result.failed:
        first = result.failed[0].error
        some = len(result.failed) < len(result.folds)
        code = ExitCode.PARTLY if some or first is None else first.exit_code
        click.get_current_context().exit(code)


def _print(result: TrainResult, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"folder": str(result.folder), **result.to_json()}, indent=2))
    else:
        click.echo(str(result))
