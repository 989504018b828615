"""`histopipe info`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, slide by slide.")
@untrusted_option("store")
def command(store: Path, as_json: bool) -> None:
    """Show the contents of STORE: slides by state, patches, bytes, scales, labels and settings.

    \b
    Example: histopipe info patches.lmdb
    """
    # Late: `--help` needs none of it.
    from histopipe.maintenance.info import info

    found = info(store)
    click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False) if as_json else str(found))
