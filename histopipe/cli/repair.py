"""`histopipe repair`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.annotation_options import annotation_options
from histopipe.cli.copy_options import allow_network


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("slides", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--annotations",
    type=click.Path(path_type=Path),
    help="Outlines, as for ingest.  [default: patches keep their classes where these are intact]",
)
@annotation_options
@click.option("--full", is_flag=True, help="Decode every patch and picture, too.")
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes.  [default: one per core]"
)
@allow_network
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(store: Path, slides: tuple[Path, ...], as_json: bool, **options: Any) -> int:
    """Verify STORE, and ingest its damaged slides again from SLIDES, files or folders.

    Only damaged slides are touched. They keep their numbers, labels, stain fits and what was measured of their patches. If the
    file itself is damaged, all that can be read is copied into a new one first. After an interruption, run the same command
    again. Exit code 3: some slides could not be repaired; 5: something else is still wrong.

    \b
    Example: histopipe repair patches.lmdb slides/
    """
    # Late: `--help` needs none of it.
    from histopipe.maintenance.repair import repair

    done = repair(store, slides, **options)
    if as_json:
        click.echo(json.dumps(done.to_json(), indent=2, ensure_ascii=False))
        return done.exit_code
    for note in done.notes:
        click.echo(note, err=True)
    for name, why in done.left.items():
        click.echo(f"{name} could not be repaired: {why}", err=True)
    for what in done.remaining:
        click.echo(f"still wrong: {what}", err=True)
    click.echo(str(done))
    return done.exit_code
