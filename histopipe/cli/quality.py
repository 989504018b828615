"""`histopipe quality`: how fit the patches of a store are to be used."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--force", is_flag=True, help="Measure slides anew that have been measured before.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="What was measured as JSON.")
@untrusted_option("store")
def command(store: Path, force: bool, workers: int | None, as_json: bool) -> None:
    """Measure focus, pen marks, folds and black of every patch of STORE, and keep that in its index.

    focus is the variance of the Laplacian at 1 µm a pixel; pen and dark (folded or black) are shares of the patch. No patch is
    changed or removed: `histopipe train --min-focus 50 --exclude-pen 5%` leaves patches out, and another threshold needs no
    other ingest. The table shows medians.

    \b
    Example: histopipe quality patches.lmdb
    """
    # Late: `--help` needs none of it.
    from tqdm import tqdm

    from histopipe.measure.quality import COLUMNS, measure_quality

    with tqdm(unit=" slides", disable=not sys.stderr.isatty(), leave=False) as bar:

        def told(name: str, reason: str) -> None:
            bar.update()
            if reason:
                tqdm.write(f"{name}: failed: {reason}", file=sys.stderr)

        result = measure_quality(store, force=force, workers=workers, told=told)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2, ensure_ascii=False))
    else:
        if result.done:
            click.echo(f"{'slide':<40} {'focus':>8} {'pen':>6} {'dark':>6}")
        for name, medians in sorted(result.done.items()):
            focus, pen, dark = (medians.get(column) for column in COLUMNS)
            if focus is not None and pen is not None and dark is not None:
                click.echo(f"{name:<40} {focus:>8.1f} {pen:>6.1%} {dark:>6.1%}")
        click.echo(
            f"{len(result.done)} slides measured, {len(result.same)} before, {len(result.failed)} failed; "
            f"{result.patches:,} patches, {result.damaged} of them damaged"
        )
    if result.failed:
        some = bool(result.done or result.same)
        click.get_current_context().exit(ExitCode.PARTLY if some else ExitCode.NOTHING)
