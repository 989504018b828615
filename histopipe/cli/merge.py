"""`histopipe merge`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from histopipe.cli.copy_options import allow_network, as_json
from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("stores", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The merged store. It is made if missing, else slides are added.",
)
@allow_network
@as_json
@untrusted_option("stores")
def command(stores: tuple[Path, ...], out: Path, allow_network: bool, as_json: bool) -> None:
    """Copy the slides of STORES, or of folders of stores (*.lmdb), into one store.

    The stores' settings must be equal. Of a slide that several stores have, the first one's is taken, with a note. Every value
    is compared with its checksum. After an interruption, run the same command again. Slides get new numbers, so resume a run
    on the stores that it began with.

    \b
    Example: histopipe merge node1.lmdb node2.lmdb --out patches.lmdb
    """
    # Late: `--help` needs none of it.
    from histopipe.maintenance.merge import merge

    copied = merge(stores, out, allow_network=allow_network)
    if as_json:
        click.echo(json.dumps([copied.to_json()], indent=2, ensure_ascii=False))
        return
    for note in copied.notes:
        click.echo(note, err=True)
    click.echo(str(copied))
