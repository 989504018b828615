"""`histopipe export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("stores", nargs=-1, type=click.Path())
@click.option(
    "--index",
    type=click.Choice(["csv", "parquet"]),
    help="Export a table with one row per patch into the file --out.",
)
@click.option(
    "--to",
    type=click.Choice(["tfrecord", "webdataset", "folder"]),
    help="Export the patches into the folder --out.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="File of --index, or folder of --to.",
)
@click.option(
    "--shard-patches", type=int, default=10_000, help="--to webdataset: patches per tar file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@untrusted_option("stores")
def command(*, stores: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Export the index, or the patches, of STORES (default: patches.lmdb) for other tools.

    tfrecord: one file per slide, with slideflow's features. webdataset: tar files of images and JSON. folder: images by label and
    slide. Patches are neither decoded nor encoded. Run the same command again to write the files that are missing.

    \b
    Example: histopipe export patches.lmdb --index parquet --out index.parquet
    Patches: histopipe export patches.lmdb --to webdataset --out shards
    """  # fmt: skip
    from histopipe.exporting.export import export  # late: `--help` needs no numpy

    result = export(stores or "patches.lmdb", **options)
    click.echo(json.dumps(result.to_json(), indent=2) if as_json else str(result))
    if result.damaged:
        click.get_current_context().exit(ExitCode.PARTLY)
