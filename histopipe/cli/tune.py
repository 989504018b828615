"""`histopipe tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.setting_options import GroupedCommand, given_settings, setting_options
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode
from histopipe.runs.task_config import read_config
from histopipe.studies.settings import StudySettings


@click.command(cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
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
    help="Settings of all trials, as for `histopipe train`. Those of --space override them.",
)
@click.option("--devices", help="Devices of this process: auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option("--json", "as_json", is_flag=True, help="Print all trials as JSON.")
@setting_options(StudySettings)
@untrusted_option("stores")
def command(
    *,
    stores: tuple[str, ...],
    space: Path,
    out: Path,
    config: Path | None,
    devices: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Search for settings with a better validation metric by training on STORES (default: patches.lmdb).

    The same command continues the search. Several processes, on one machine or on several with the same --out, share the trials. No
    trial sees the test patches: evaluate the best settings with `histopipe train --config OUT/best.toml`.

    \b
    Example: histopipe tune patches.lmdb --space space.toml --out runs/search --trials 50
    """  # fmt: skip
    # Late: `--help` needs none of it.
    from histopipe.studies.tune import tune

    settings = read_config(config) if config is not None else {}
    if devices is not None:
        settings["devices"] = devices
    result = tune(stores or None, space=space, out=out, **given_settings(StudySettings), **settings)
    click.echo(json.dumps(result.to_json(), indent=2) if as_json else str(result))
    if result.best is None:
        click.get_current_context().exit(ExitCode.NOTHING)
    if any(trial.state not in ("done", "pruned") for trial in result.trials):
        click.get_current_context().exit(ExitCode.PARTLY)
