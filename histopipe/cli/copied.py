"""What `histopipe merge` and `histopipe split` have in common: flags, and telling what was copied."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from histopipe.maintenance.copying import Copied

allow_network = click.option(
    "--allow-network",
    is_flag=True,
    help="Let what is written lie on a network filesystem, at your own risk.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="What was copied as JSON.")


def print_copied(results: Sequence[Copied], *, as_json: bool) -> None:
    """Tell what was copied into each store."""
    if as_json:
        click.echo(
            json.dumps([dataclasses.asdict(r) for r in results], indent=2, ensure_ascii=False)
        )
        return
    for result in results:
        for note in result.notes:
            click.echo(note, err=True)
        already = f", {len(result.already)} were there" if result.already else ""
        click.echo(
            f"{result.store}: {len(result.slides)} slides copied{already}; {result.patches:,} patches"
        )
