"""`histopipe compact`."""

from __future__ import annotations

from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the copy there, and leave STORE as it is."
)
@untrusted_option("store")
def command(store: Path, out: Path | None) -> None:
    """Copy STORE without its free pages, and replace it by the copy.

    The disk needs room for the copy. Trainings that read the store continue with the old file. No process may have it open for
    writing. Interrupted at any moment, the store is as before.

    \b
    Example: histopipe compact patches.lmdb
    """
    # Late: `--help` needs none of it.
    from histopipe.maintenance.compact import compact

    click.echo(str(compact(store, out)))
