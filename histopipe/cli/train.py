"""`histopipe train`: a store into a model."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from histopipe.cli.label_options import label_options
from histopipe.cli.parameters import Duration, Fractions, Names
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from histopipe.runs.result import TrainResult
    from histopipe.studies.cross_validation_result import CrossValidationResult


def _load_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Settings of a file become the defaults, so that flags override them."""
    if path is not None:
        # Late: `--help` needs no config.
        from histopipe.runs.config import TrainConfig
        from histopipe.runs.settings_file import read_config
        from histopipe.studies.settings import FoldSettings

        ctx.default_map = read_config(path, TrainConfig, FoldSettings)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("stores", nargs=-1, type=click.Path(), default=None)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_load_config,
    help="Settings from a TOML file, such as a run's config.toml; flags override it.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The run's folder.  [default: runs/MODEL-DATE-TIME]",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out, with its own settings.")
@label_options
@click.option(
    "--mil", type=click.Path(), help="Learn of bags of the features in this folder, not of patches."
)
@click.option(
    "--bag",
    type=click.Choice(["slide", "patient"]),
    default="slide",
    help="With --mil: what a bag is of.",
)
@click.option(
    "--pooling",
    type=click.Choice(["gated", "attention", "mean", "max"]),
    default="gated",
    help="With --mil: how a bag's patches become one; gated: attention with a gate.",
)
@click.option(
    "--model", default="small-cnn", help="small-cnn, or a keras.applications name such as resnet50."
)
@click.option(
    "--weights", default="none", help="none, imagenet, or a weights file for the backbone."
)
@click.option("--epochs", type=int, default=20, help="Passes over the training patches, at most.")
@click.option(
    "--batch-size", type=int, help="Patches a step, over all devices.  [default: 64; of bags, 1]"
)
@click.option(
    "--seed", type=int, default=1, help="Of split, order, weights, augmentation and dropout."
)
@click.option(
    "--split-by",
    type=click.Choice(["patient", "site", "slide", "region", "patch"]),
    default="patient",
    help="What stays together on one side of the split.",
)
@click.option(
    "--fractions", type=Fractions(), default="0.7,0.15,0.15", help="Train, validation and test."
)
@click.option(
    "--region-um", type=float, default=250.0, help="Side of the squares of --split-by region, µm."
)
@click.option("--splits", type=click.Path(), help="A splits.json to use instead of making one.")
@click.option(
    "--folds", type=int, default=0, help="Cross-validate with so many folds; 0 trains once."
)
@click.option(
    "--fold-timeout",
    type=Duration(),
    default="0",
    help="What an attempt at a fold may take, such as 2h; 0: any time.",
)
@click.option("--retries", type=int, default=0, help="Further attempts at a fold that failed.")
@click.option(
    "--parallel-folds", type=int, default=1, help="Folds at once, each with its share of the GPUs."
)
@click.option(
    "--allow-leaks", is_flag=True, help="Train although a patient or slide is on several sides."
)
@click.option(
    "--optimizer",
    type=click.Choice(["adam", "adamw", "adagrad", "sgd"]),
    default="adam",
    help="What turns gradients into steps.",
)
@click.option(
    "--learning-rate", type=float, help="Of the optimizer.  [default: 1e-3; on bags, 2e-4]"
)
@click.option("--weight-decay", type=float, default=0.004, help="Of --optimizer adamw.")
@click.option(
    "--schedule",
    type=click.Choice(["constant", "cosine"]),
    default="constant",
    help="Of the learning rate; cosine falls to 0 at the end of --epochs.",
)
@click.option("--warmup-steps", type=int, default=0, help="Steps in which a cosine rises first.")
@click.option(
    "--clip-norm", type=float, default=0.0, help="Longest gradient of all weights together; 0: any."
)
@click.option(
    "--label-smoothing",
    type=float,
    default=0.0,
    help="Share of each training label spread over all classes.",
)
@click.option(
    "--class-weights",
    type=click.Choice(["none", "balanced"]),
    default="none",
    help="balanced: every class weighs the same in the loss.",
)
@click.option(
    "--dropout", type=float, default=0.15, help="Share of features dropped before the last layer."
)
@click.option(
    "--augment",
    type=Names(),
    help="none, or a list of flips (the eight positions of a square), crop, stain, colour.  [default: flips; of bags, none]",
)
@click.option(
    "--stain-norm",
    type=click.Choice(["none", "reinhard", "macenko"]),
    default="none",
    help="Give all slides one stain; `histopipe stains` measures theirs first.",
)
@click.option(
    "--balance",
    type=click.Choice(["none", "class", "slide", "patient"]),
    default="none",
    help="What an epoch of training draws equally often.",
)
@click.option(
    "--max-per-slide",
    type=int,
    default=0,
    help="Training patches of a slide in an epoch, other ones in each; 0 for all.",
)
@click.option(
    "--shuffle-block",
    type=int,
    default=0,
    help="Shuffle blocks of so many neighbours, for hard disks and network filesystems; 0 shuffles all.",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="What a damaged patch does: end the run, or count as weight 0.",
)
@click.option(
    "--patience", type=int, default=5, help="Epochs without a better validation AUC; 0 never stops."
)
@click.option("--positive", help="The class to find, of two.  [default: the last by name]")
@click.option(
    "--threshold",
    default="youden",
    help="How it is chosen, on validation: youden, sensitivity:0.95, specificity:0.95, or a probability.",
)
@click.option("--top-k", type=int, default=10, help="Patches that a slide's top_k score is of.")
@click.option(
    "--resamples", type=int, default=1000, help="Of the patients, for 95 % intervals; 0 for none."
)
@click.option(
    "--accumulate",
    type=int,
    default=1,
    help="Compute each step in up to so many pieces: less memory, the same batch.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "mixed_bfloat16", "mixed_float16", "float64"]),
    default="float32",
    help="What the network computes in. bfloat16 before float16, where the GPU has it.",
)
@click.option("--xla", is_flag=True, help="Compile the network: a slow start, then often faster.")
@click.option("--devices", default="auto", help="auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option(
    "--communication",
    type=click.Choice(["auto", "ring", "nccl"]),
    default="auto",
    help="Between workers on several machines (TF_CONFIG or Slurm names them).",
)
@click.option(
    "--worker-timeout",
    type=float,
    default=600.0,
    help="Seconds to wait for another worker before giving up.",
)
@click.option("--save-minutes", type=float, default=10.0, help="Save the state so often.")
@click.option("--tensorboard", is_flag=True, help="Write logs for TensorBoard into the run.")
@click.option("--log-device-placement", is_flag=True, help="Tell which device computes what.")
@click.option("--deterministic", is_flag=True, help="Bitwise repeatable operations, slower.")
@click.option("--json", "as_json", is_flag=True, help="The metrics as JSON.")
@untrusted_option("stores", features="mil")
def command(
    stores: tuple[str, ...], out: Path | None, resume: bool, as_json: bool, **settings: Any
) -> None:
    """Train a patch model on STORES (patches.lmdb if none is named), or with --mil a slide model on features.

    Splits are written before training; the best model on validation is kept and judged on the held-out test patches.
    --folds 5 does all that for every fifth of the patients in turn.

    \b
    Example: histopipe train patches.lmdb --model resnet50 --split-by patient
    Whole slides: histopipe train --mil features --labels labels.csv --epochs 40
    The classic recipe:
      histopipe train patches.lmdb --optimizer adagrad --learning-rate 2e-4
        --dropout 0.15 --class-weights balanced
    """  # fmt: skip
    kind = f"mil-{settings['pooling']}" if settings["mil"] else settings["model"]
    folder = out or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    if resume:
        if out is None:
            raise UsageError("--resume needs --out", expected="the folder of a run")
        if click.get_current_context().default_map:
            raise UsageError("--resume goes on with the run's own settings", found="--config")
        settings = _given()
    else:
        named = click.get_current_context().default_map or {}
        if stores and settings["mil"]:
            raise UsageError("STORES", found=f"--mil {settings['mil']}", expected="one of them")
        paths = stores or tuple(named.get("stores", ()))
        settings = {name: value for name, value in settings.items() if value is not None}
        settings |= {"stores": paths} if paths else {}
    _train(folder, settings, resume=resume, as_json=as_json)


def _train(folder: Path, settings: dict[str, Any], *, resume: bool, as_json: bool) -> None:
    """One training, or one a fold."""
    from histopipe.runs.config import TrainConfig
    from histopipe.runs.folder import is_cross_validation
    from histopipe.runs.setting_checks import flag
    from histopipe.runs.settings_file import known, resumed
    from histopipe.runs.supervision import supervise
    from histopipe.studies import cross_validation as folds

    if is_cross_validation(folder) if resume else settings["folds"]:
        divided = (
            folds.resumed_folds(folder, settings) if resume else folds.divided_settings(settings)
        )
        _print_folds(folds.run_folds(*divided, folder, resume=resume), as_json=as_json)
        return
    lost = sorted(set(_given()) & set(folds.FOLD_SETTINGS) - {"folds"})
    if lost:
        raise UsageError(flag(lost[0]), found="no --folds", expected="the number of folds with it")
    if resume:
        config = resumed(folder, settings)
    else:
        one = {name: it for name, it in settings.items() if name not in folds.FOLD_SETTINGS}
        config = TrainConfig(**known(one))
    _print(supervise(config, folder, resume=resume), as_json=as_json)


def _given() -> dict[str, Any]:
    """The settings that were given as flags, not by default or file."""
    context = click.get_current_context()
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        and name not in ("out", "resume", "as_json")
    }


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
        return
    from histopipe.evaluation.table import evaluation_lines  # late: `--help` needs no table

    for side, evaluation in result.metrics.items():
        title = "test (held out)" if side == "test" else side
        click.echo("\n".join(evaluation_lines(title, evaluation)))
    click.echo(f"model of epoch {result.best_epoch}, predictions and metrics: {result.folder}")
