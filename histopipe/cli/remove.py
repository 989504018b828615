"""`histopipe remove`: slides out of a store."""

from __future__ import annotations

from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("slides", nargs=-1, required=True)
@untrusted_option("store")
def command(store: Path, slides: tuple[str, ...]) -> None:
    """Take SLIDES, by their ids (see `histopipe info`), out of STORE, with all that is stored of them.

    Each is there or gone, whenever this ends; none is taken out if one of them is not known. The file keeps its length until
    `histopipe compact`; what comes next is written into the room. Their numbers are not given again.

    \b
    Example: histopipe remove patches.lmdb slide-17 slide-18
    """
    # Late: `--help` needs none of it.
    from histopipe.cli.progress import fraction_bar
    from histopipe.maintenance.remove import remove

    with fraction_bar("remove", "slides") as told:
        removed = remove(store, slides, told=told)
    click.echo(
        f"{store}: {len(removed.slides)} slides of {removed.patches:,} patches taken out; "
        f"{removed.reusable_bytes / 1e6:,.1f} MB of the file are free (`histopipe compact` gives them back)"
    )
