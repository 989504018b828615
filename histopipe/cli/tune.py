"""`histopipe tune`: search for settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from histopipe.cli.parameters import Duration
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode

if TYPE_CHECKING:
    from histopipe.studies.tune_result import TuneResult


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("stores", nargs=-1, type=click.Path())
@click.option(
    "--space",
    type=click.Path(path_type=Path),
    required=True,
    help="TOML: a setting a line, with a range, a list of values, or one value.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The search's folder.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings of all trials, as for `histopipe train`; those of --space go before them.",
)
@click.option("--trials", type=int, default=20, help="How many, of all processes together.")
@click.option(
    "--metric", type=click.Choice(["auc", "accuracy", "loss"]), default="auc", help="Of validation."
)
@click.option(
    "--sampler",
    type=click.Choice(["tpe", "random"]),
    default="tpe",
    help="tpe: learn from earlier trials what to try.",
)
@click.option(
    "--pruner",
    type=click.Choice(["median", "none"]),
    default="median",
    help="median: end trials that are worse than the median at the same epoch.",
)
@click.option(
    "--trial-timeout",
    type=Duration(),
    default="0",
    help="What an attempt at a trial may take, such as 2h; 0: any time.",
)
@click.option("--retries", type=int, default=0, help="Further attempts at a trial that failed.")
@click.option("--devices", help="auto, cpu, cpu:N, gpu or gpu:0,1, of this process.")
@click.option(
    "--storage",
    help="postgresql://, mysql://, redis://, sqlite:/// or a journal file.  [default: a file in --out]",
)
@click.option("--name", help="Of the search in --storage.  [default: that of --out]")
@click.option("--json", "as_json", is_flag=True, help="All trials as JSON.")
@untrusted_option("stores")
def command(
    stores: tuple[str, ...], config: Path | None, devices: str | None, as_json: bool, **flags: Any
) -> None:
    """Search for settings that do better on validation, by training with each on STORES (patches.lmdb if none is named).

    The same command again goes on; started several times at once, on one machine or on several that share --out, the processes share the
    trials. Test patches are kept from the search: `histopipe train --config OUT/best.toml` is judged on them.

    \b
    Example: histopipe tune patches.lmdb --space space.toml --out runs/search --trials 50
    """  # fmt: skip
    from histopipe.runs.settings_file import read_config
    from histopipe.studies.tune import tune

    settings = read_config(config) if config is not None else {}
    if devices is not None:
        settings["devices"] = devices
    result = tune(stores or None, **flags, **settings)
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
