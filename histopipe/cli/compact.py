"""`histopipe compact`: a store without the room that removals have left in it."""

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
    """Copy STORE without free room, and put the copy in its place at once.

    That takes as much disk as the store's values, for a while. Trainings that read the store go on with the old file; nobody
    may be writing it. Interrupted at any moment, the store is as it was.

    \b
    Example: histopipe compact patches.lmdb
    """
    # Late: `--help` needs none of it.
    from histopipe.cli.progress import fraction_bar
    from histopipe.maintenance.compact import compact

    with fraction_bar("compact", "bytes", scale=True) as told:
        done = compact(store, out, told=told)
    click.echo(f"{done.store}: {done.before / 1e6:,.1f} MB before, {done.after / 1e6:,.1f} MB now")
