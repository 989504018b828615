"""`histopipe quality`: measure the quality of the patches of a store."""

from __future__ import annotations

import json
from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--force", is_flag=True, help="Measure slides again that were measured before.")
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes.  [default: one per core]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@untrusted_option("store")
def command(store: Path, force: bool, workers: int | None, as_json: bool) -> int:
    """Measure focus, pen marks, folds and black of every patch of STORE, and add them to its index.

    focus is the variance of the Laplacian at 1 µm per pixel; pen and dark (folded or black) are shares of the patch. No patch
    is changed or removed: `histopipe train --min-focus 50 --exclude-pen 5%` leaves patches out, and another threshold needs no
    other ingest. The table shows medians.

    \b
    Example: histopipe quality patches.lmdb
    """
    from histopipe.measure.quality import quality  # late: `--help` needs none of it

    result = quality(store, force=force, workers=workers)
    text = json.dumps(result.to_json(), indent=2, ensure_ascii=False) if as_json else repr(result)
    click.echo(text)
    return result.exit_code
