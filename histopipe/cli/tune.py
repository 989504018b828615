"""`histopipe tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import Duration
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("stores", nargs=-1, type=click.Path())
@click.option(
    "--space",
    type=click.Path(path_type=Path),
    required=True,
    help="Search space, TOML: a range, a list of values, or one value per setting.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the search.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings of all trials, as for `histopipe train`; those of --space take precedence.",
)
@click.option("--trials", type=int, default=20, help="Number of trials, of all processes together.")
@click.option(
    "--metric",
    type=click.Choice(["auc", "accuracy", "loss"]),
    default="auc",
    help="Validation metric.",
)
@click.option(
    "--sampler",
    type=click.Choice(["tpe", "random"]),
    default="tpe",
    help="tpe: choose settings by the results of earlier trials.",
)
@click.option(
    "--pruner",
    type=click.Choice(["median", "none"]),
    default="median",
    help="median: stop trials that are worse than the median at the same epoch.",
)
@click.option(
    "--trial-timeout",
    type=Duration(),
    default="0",
    help="Time limit of one attempt at a trial, such as 2h; 0: none.",
)
@click.option("--retries", type=int, default=0, help="Retries of a trial that failed.")
@click.option("--devices", help="Devices of this process: auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option(
    "--storage",
    help="postgresql://, mysql://, redis://, sqlite:/// or a journal file.  [default: a file in --out]",
)
@click.option("--name", help="Name of the study in --storage.  [default: name of --out]")
@click.option("--json", "as_json", is_flag=True, help="Print all trials as JSON.")
@untrusted_option("stores")
def command(
    stores: tuple[str, ...], config: Path | None, devices: str | None, as_json: bool, **flags: Any
) -> None:
    """Search for settings with a better validation metric by training on STORES (default: patches.lmdb).

    The same command continues the search. Several processes, on one machine or on several with the same --out, share the trials. No
    trial sees the test patches: evaluate the best settings with `histopipe train --config OUT/best.toml`.

    \b
    Example: histopipe tune patches.lmdb --space space.toml --out runs/search --trials 50
    """  # fmt: skip
    from histopipe.runs.settings_file import read_config
    from histopipe.studies.tune import tune

    settings = read_config(config) if config is not None else {}
    if devices is not None:
        settings["devices"] = devices
    result = tune(stores or None, **flags, **settings)
    click.echo(json.dumps(result.to_json(), indent=2) if as_json else str(result))
    if result.best is None:
        click.get_current_context().exit(ExitCode.NOTHING)
    if any(trial.state not in ("done", "pruned") for trial in result.trials):
        click.get_current_context().exit(ExitCode.PARTLY)
