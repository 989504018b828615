"""`histopipe tune`: search for settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from histopipe.cli.setting_options import GroupedCommand, given_settings, setting_options
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode
from histopipe.runs.task_config import read_config
from histopipe.studies.settings import StudySettings

if TYPE_CHECKING:
    from histopipe.studies.tune_result import TuneResult


@click.command(cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("stores", nargs=-1, type=click.Path())
@click.option(
    "--space",
    type=click.Path(path_type=Path),
    required=True,
    help="TOML file: one setting per line, with a range, a list of values, or one value.",
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
    """Search for the settings with the best validation metric, by training on STORES (default: patches.lmdb).

    The same command again continues the search. Started several times at once, on one machine or on several that share --out, the
    processes share the trials. The search never uses test patches: `histopipe train --config OUT/best.toml` evaluates on them.

    \b
    Example: histopipe tune patches.lmdb --space space.toml --out runs/search --trials 50
    """  # fmt: skip
    # Late: `--help` needs none of it.
    from histopipe.studies.tune import tune

    settings = read_config(config) if config is not None else {}
    if devices is not None:
        settings["devices"] = devices
    result = tune(stores or None, space=space, out=out, **given_settings(StudySettings), **settings)
    _print(result, as_json=as_json)


def _print(result: TuneResult, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        click.echo("\n".join(result.lines()))
    failed = [trial for trial in result.trials if trial.state not in ("done", "pruned")]
    if result.best is None:
        click.get_current_context().exit(ExitCode.NOTHING)
    if not as_json:
        click.echo(f"the best: histopipe train --config {result.folder}/best.toml")
    if failed:
        click.get_current_context().exit(ExitCode.PARTLY)
