"""`histopipe train`: a store into a model."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from histopipe.errors import Interrupted, MachineShort, UsageError

if TYPE_CHECKING:
    from histopipe.training.train import TrainResult


_MAY_CHANGE = ("epochs", "patience", "devices", "on_error")


class _Names(click.ParamType[tuple[str, ...]]):
    """`flips,colour`."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, list | tuple):
            return tuple(value)
        return tuple(part.strip() for part in str(value).split(","))


class _Fractions(click.ParamType[tuple[float, ...]]):
    """`0.7,0.15,0.15`."""

    name = "fractions"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, list | tuple):
            return tuple(value)
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: write 0.7,0.15,0.15", param, ctx)


def _load_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Settings of a file become the defaults, so that flags override them."""
    if path is not None:
        from histopipe.training.config import read_config  # late: `--help` needs no config

        ctx.default_map = read_config(path)


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
@click.option(
    "--labels",
    type=click.Path(),
    help="CSV: slide,label[,patient][,site], instead of the recorded labels.",
)
@click.option(
    "--allow-extra-rows", is_flag=True, help="Ignore rows of --labels that name no slide."
)
@click.option(
    "--model", default="small-cnn", help="small-cnn, or a keras.applications name such as resnet50."
)
@click.option(
    "--weights", default="none", help="none, imagenet, or a weights file for the backbone."
)
@click.option("--epochs", type=int, default=20, help="Passes over the training patches, at most.")
@click.option("--batch-size", type=int, default=64, help="Patches a step, over all devices.")
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
    "--fractions", type=_Fractions(), default="0.7,0.15,0.15", help="Train, validation and test."
)
@click.option(
    "--region-um", type=float, default=250.0, help="Side of the squares of --split-by region, µm."
)
@click.option("--splits", type=click.Path(), help="A splits.json to use instead of making one.")
@click.option(
    "--allow-leaks", is_flag=True, help="Train although a patient or slide is on several sides."
)
@click.option("--optimizer", type=click.Choice(["adam", "adamw", "adagrad", "sgd"]), default="adam")
@click.option("--learning-rate", type=float, default=1e-3)
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
    type=_Names(),
    default="flips",
    help="none, or a list of flips (the eight positions of a square), crop, stain, colour.",
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
@click.option("--devices", default="auto", help="auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option("--deterministic", is_flag=True, help="Bitwise repeatable operations, slower.")
@click.option("--json", "as_json", is_flag=True, help="The metrics as JSON.")
def command(
    stores: tuple[str, ...], out: Path | None, resume: bool, as_json: bool, **settings: Any
) -> None:
    """Train a patch model on STORES (patches.lmdb if none is named).

    Splits are written before training; the best model on validation is kept and judged on the held-out test patches.
    The classic recipe is --optimizer adagrad --learning-rate 2e-4 --dropout 0.15 --class-weights balanced.

    \b
    Example: histopipe train patches.lmdb --model resnet50 --split-by patient
    """  # fmt: skip
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is loaded
    from histopipe.training.config import TrainConfig, read_config

    folder = out or Path("runs") / f"{settings['model']}-{datetime.now():%Y%m%d-%H%M%S}"
    if resume:
        if out is None or not (out / "config.toml").is_file():
            raise UsageError(
                "--resume needs --out" if out is None else f"no run to resume in {out}",
                expected="the folder of a run, with its config.toml",
            )
        recorded = read_config(folder / "config.toml")
        config = TrainConfig(**_tuples(recorded | _changes(settings, stores)))
    else:
        named = click.get_current_context().default_map or {}
        paths = stores or tuple(named.get("stores", ())) or TrainConfig().stores
        config = TrainConfig(stores=paths, **_tuples(settings))
    train = load_quietly("histopipe.training.train").train
    try:
        result = train(config, folder, resume=resume)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted", found=f"the run's last whole epoch in {folder}",
            todo=f"go on with `histopipe train --resume --out {folder}`",
        ) from None  # fmt: skip
    _print(result, as_json=as_json)


def load_quietly(module: str) -> Any:
    """A module that loads TensorFlow.

    Raises:
        MachineShort: it is not installed, or does not load.
    """
    try:
        with _quiet():
            return importlib.import_module(module)
    except ImportError as error:
        raise MachineShort(
            "this needs TensorFlow, which is not installed or does not load", found=str(error),
            todo="pip install 'histopipe[train]' (CPU) or 'histopipe[gpu]'",
        ) from error  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what TensorFlow's libraries write to standard error while they load, which no setting of theirs stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _tuples(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def _changes(settings: dict[str, Any], stores: tuple[str, ...]) -> dict[str, Any]:
    """Flags given beside --resume: only those that leave what was trained so far meaningful."""
    source = click.get_current_context().get_parameter_source
    given = {k: v for k, v in settings.items() if source(k) is ParameterSource.COMMANDLINE}
    refused = [f"--{name.replace('_', '-')}" for name in given if name not in _MAY_CHANGE]
    if refused or stores:
        raise UsageError(
            "--resume goes on with the run's own settings",
            found=", ".join([*refused, *stores]),
            expected="only --out and "
            + ", ".join(f"--{name.replace('_', '-')}" for name in _MAY_CHANGE),
        )
    return given


def _print(result: TrainResult, *, as_json: bool) -> None:
    if as_json:
        sides = {side: dataclasses.asdict(value) for side, value in result.metrics.items()}
        run = {"folder": str(result.folder), "best_epoch": result.best_epoch}
        click.echo(json.dumps({**run, **sides}, indent=2))
        return
    for side, metrics in result.metrics.items():
        auc = f"{metrics.auc:.4f}" if metrics.auc is not None else "not defined (one class)"
        held_out = " (held out)" if side == "test" else ""
        click.echo(
            f"{side}{held_out}: AUC {auc}, accuracy {metrics.accuracy:.3f}, "
            f"loss {metrics.loss:.4f}, {metrics.patches} patches"
        )
    click.echo(f"model of epoch {result.best_epoch}, predictions and metrics: {result.folder}")
