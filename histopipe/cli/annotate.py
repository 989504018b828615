"""`histopipe annotate`: classes that are drawn on slides, for the patches of a store."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from histopipe.cli.annotation_options import annotation_options, rules_of
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("annotations", type=click.Path(path_type=Path))
@annotation_options
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="What was done as JSON.")
@untrusted_option("store")
def command(
    store: Path, annotations: Path, workers: int | None, as_json: bool, **flags: Any
) -> None:
    """Give the patches of STORE the classes that are drawn on their slides, by the files in the folder ANNOTATIONS.

    Files are called as slides are: SLIDE.geojson (QuPath), SLIDE.xml (ASAP, Aperio ImageScope). Where outlines of several
    classes overlap, a place is of the smallest one that holds it. No patch is touched. Train on these classes with
    `histopipe train --labels-from annotation`.

    \b
    Example: histopipe annotate patches.lmdb annotations/
    """  # fmt: skip
    # Late: `--help` needs none of it.
    from tqdm import tqdm

    from histopipe.measure import annotate as library

    with tqdm(unit=" slides", disable=not sys.stderr.isatty(), leave=False) as bar:

        def told(name: str, reason: str) -> None:
            bar.update()
            if reason:
                tqdm.write(f"{name}: failed: {reason}", file=sys.stderr)

        result = library.annotate_store(
            store, annotations, rules_of(flags), told=told, workers=workers
        )
    if as_json:
        click.echo(json.dumps(library.as_json(result), indent=2, ensure_ascii=False))
    else:
        for note in result.notes:
            click.echo(note, err=True)
        for name, notes in sorted(result.done.items()):
            for note in notes:
                click.echo(f"{name}: {note}", err=True)
        click.echo(
            f"{len(result.done)} slides labelled, {len(result.same)} so labelled before, "
            f"{len(result.without)} without annotations, {len(result.failed)} failed"
        )
        counts = ", ".join(f"{number:,} {name}" for name, number in sorted(result.patches.items()))
        click.echo(f"patches: {counts or 'none of any class'}")
    if result.failed:
        some = bool(result.done or result.same)
        click.get_current_context().exit(ExitCode.PARTLY if some else ExitCode.NOTHING)
