"""`histopipe remove`."""

from __future__ import annotations

from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("slides", nargs=-1, required=True)
@untrusted_option("store")
def command(store: Path, slides: tuple[str, ...]) -> None:
    """Remove SLIDES from STORE by their ids (see `histopipe info`), with everything that is stored of them.

    Interrupted at any moment, each slide is either complete or removed. If one id is unknown, no slide is removed. The file
    keeps its length until `histopipe compact`; later writes use the free space first. Numbers of removed slides are not used
    again.

    \b
    Example: histopipe remove patches.lmdb slide-17 slide-18
    """
    # Late: `--help` needs none of it.
    from histopipe.maintenance.remove import remove

    click.echo(str(remove(store, slides)))
