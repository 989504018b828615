"""`histopipe annotate`: label the patches of a store from annotations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.annotation_options import annotation_options
from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("annotations", type=click.Path(path_type=Path))
@annotation_options
@click.option(
    "--workers", type=click.IntRange(1), help="Number of processes.  [default: one per core]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@untrusted_option("store")
def command(
    store: Path, annotations: Path, workers: int | None, as_json: bool, **flags: Any
) -> int:
    """Label the patches of STORE from the files in the folder ANNOTATIONS.

    Files have the names of slides: SLIDE.geojson (QuPath), SLIDE.xml (ASAP, Aperio ImageScope). Where outlines of several
    classes overlap, the smallest one counts. The patches are not changed. `histopipe train --labels-from annotation` trains
    on these classes.

    \b
    Example: histopipe annotate patches.lmdb annotations/
    """  # fmt: skip
    from histopipe.measure.annotate import annotate  # late: `--help` needs none of it

    result = annotate(store, annotations, workers=workers, **flags)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
        return result.exit_code
    for note in result.notes:
        click.echo(note, err=True)
    for name, notes in sorted(result.done.items()):
        for note in notes:
            click.echo(f"{name}: {note}", err=True)
    click.echo(repr(result))
    return result.exit_code
