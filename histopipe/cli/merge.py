"""`histopipe merge`: several stores into one."""

from __future__ import annotations

from pathlib import Path

import click

from histopipe.cli.copied import allow_network, as_json, print_copied
from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("stores", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The store; made if missing, added to if there.",
)
@allow_network
@as_json
@untrusted_option("stores")
def command(stores: tuple[Path, ...], out: Path, allow_network: bool, as_json: bool) -> None:
    """Copy the slides of STORES, or of folders of stores (*.lmdb), into one store.

    The stores' settings must be the same. Of a slide that several stores have, the first one's is taken, and told. Every
    value is held against its checksum on the way. The same command goes on where it was interrupted. Slides get other
    numbers, so that a run goes on with the stores that it began with.

    \b
    Example: histopipe merge node1.lmdb node2.lmdb --out patches.lmdb
    """
    # Late: `--help` needs none of it.
    from histopipe.cli.progress import fraction_bar
    from histopipe.maintenance.merge import merge

    with fraction_bar("merge", "bytes", scale=True) as told:
        copied = merge(stores, out, allow_network=allow_network, told=told)
    print_copied([copied], as_json=as_json)
