"""`histopipe split`: a store's slides into one store a side."""

from __future__ import annotations

from pathlib import Path

import click

from histopipe.cli.copied import allow_network, as_json, print_copied
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
    """Copy the slides of STORES into one store a side, as a splits.json has them; those without a side are left out.

    Slides go whole: a split by region or patch is refused. The same command goes on where it was interrupted.

    \b
    Example: histopipe split patches.lmdb --splits runs/first/splits.json --out sides
    """
    # Late: `--help` needs none of it.
    from histopipe.cli.progress import fraction_bar
    from histopipe.maintenance.split import split

    with fraction_bar("split", "bytes", scale=True) as told:
        copied = split(stores, splits, out, allow_network=allow_network, told=told)
    print_copied(list(copied.values()), as_json=as_json)
