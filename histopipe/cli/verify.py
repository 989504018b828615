"""`histopipe verify`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--full", is_flag=True, help="Decode every patch and picture, too.")
@click.option(
    "--untrusted",
    is_flag=True,
    help="Treat the store as untrusted: verify its pages before LMDB opens it.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes.  [default: one per core]"
)
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
def command(store: Path, full: bool, untrusted: bool, workers: int | None, as_json: bool) -> int:
    """Verify the integrity of STORE: the file's structure, its format, every record, index and value.

    Each value's checksum includes its key, so that swapped values are found. Nothing is written. A damaged file cannot crash
    the command. Exit code 5: something is wrong; `histopipe repair` repairs it.

    \b
    Example: histopipe verify patches.lmdb --full
    """
    # Late: `--help` needs none of it.
    from histopipe.maintenance.verify import verify

    found = verify(store, full=full, untrusted=untrusted, workers=workers)
    click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False) if as_json else str(found))
    return found.exit_code
