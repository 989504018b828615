"""`histopipe split`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from histopipe.cli.copy_options import allow_network, as_json
from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("stores", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--splits",
    required=True,
    type=click.Path(path_type=Path),
    help="The splits.json of a run on STORES.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for train.lmdb, validation.lmdb and test.lmdb.",
)
@allow_network
@as_json
@untrusted_option("stores")
def command(
    stores: tuple[Path, ...], splits: Path, out: Path, allow_network: bool, as_json: bool
) -> None:
    """Copy the slides of STORES into one store per side of a split. Slides without a side are left out.

    A split by region or patch is refused, because slides are copied whole. After an interruption, run the same command again.

    \b
    Example: histopipe split patches.lmdb --splits runs/first/splits.json --out sides
    """
    # Late: `--help` needs none of it.
    from histopipe.maintenance.split import split

    copied = split(stores, splits, out, allow_network=allow_network)
    if as_json:
        click.echo(json.dumps(copied.to_json(), indent=2, ensure_ascii=False))
        return
    for note in (note for side in copied.sides.values() for note in side.notes):
        click.echo(note, err=True)
    click.echo(str(copied))
