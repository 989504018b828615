"""`histopipe verify`: whether a store is what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from histopipe.maintenance.finding import Verified


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--full", is_flag=True, help="Decode every patch and picture, too.")
@click.option(
    "--untrusted", is_flag=True, help="The store is a stranger's: do not let LMDB look at it first."
)
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="All findings as JSON.")
def command(store: Path, full: bool, untrusted: bool, workers: int | None, as_json: bool) -> int:
    """Look at all of STORE: the file's structure, its format, every record, index and value.

    A value's checksum is bound to its place, so that swapped values are found. Nothing is written, and a damaged file cannot
    bring the command down. Exit code 5: something is wrong; `histopipe repair` mends it.

    \b
    Example: histopipe verify patches.lmdb --full
    """
    # Late: `--help` needs none of it.
    from histopipe.cli.progress import fraction_bar
    from histopipe.maintenance.verify import verify

    with fraction_bar("verify", "pages", scale=True) as told:
        found = verify(store, full=full, untrusted=untrusted, workers=workers, told=told)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(found)))
    return found.exit_code


def _lines(found: Verified) -> list[str]:
    lines = []
    for finding in found.findings:
        name = finding.slide or (
            f"slide number {finding.number}" if finding.number is not None else ""
        )
        lines.append(f"{finding.kind}: {name + ': ' if name else ''}{finding.what}")
    looked = f"{found.slides:,} slides, {found.patches:,} patches, {found.file_bytes / 1e6:,.1f} MB in {found.seconds:.1f} s"
    if not lines:
        return [
            f"{found.store} is whole: {looked}" + (", every patch decoded" if found.full else "")
        ]
    damaged = len(found.damaged_slides)
    return [
        *lines,
        "",
        f"{found.store} is damaged: {len(lines)} findings, {damaged} slides hit; {looked}",
    ]
