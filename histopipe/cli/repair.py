"""`histopipe repair`: what is damaged in a store brought back from the slides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.annotation_options import annotation_options, rules_of
from histopipe.cli.copied import allow_network


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("slides", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--annotations",
    type=click.Path(path_type=Path),
    help="Outlines, as for ingest.  [default: patches keep their classes where these are whole]",
)
@annotation_options
@click.option("--full", is_flag=True, help="Decode every patch and picture, too.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one a core]")
@allow_network
@click.option("--json", "as_json", is_flag=True, help="What was done as JSON.")
def command(
    store: Path,
    slides: tuple[Path, ...],
    workers: int | None,
    allow_network: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Look at all of STORE, as `histopipe verify` does, and ingest what is damaged again from SLIDES, files or folders.

    Only damaged slides are touched. They keep their numbers, labels, stains and what was measured of their patches. If the
    file itself is damaged, all that is sound is written into a new one, which takes its place at the end. Interrupted, the
    same command goes on. Exit code 3: some slides could not be brought back; 5: something else is still wrong.

    \b
    Example: histopipe repair patches.lmdb slides/
    """
    # Late: `--help` needs none of it.
    from histopipe.annotations.folder import find_annotations
    from histopipe.cli.progress import fraction_bar
    from histopipe.maintenance.repair import RepairOptions, repair
    from histopipe.slides.discovery import discover
    from histopipe.slides.tables import SlideNames
    from histopipe.system.progress import default_progress

    found = discover(slides)
    outlines: dict[str, Path] = {}
    if flags["annotations"] is not None:
        annotations = find_annotations(flags["annotations"], SlideNames(s.id for s in found))
        outlines = dict(annotations.by_slide)
    options = RepairOptions(
        full=flags["full"], workers=workers, annotations=outlines, rules=rules_of(flags), allow_network=allow_network,
    )  # fmt: skip
    with fraction_bar("verify", "pages", scale=True) as told:
        done = repair(store, found, options, default_progress(), told)
    if as_json:
        value = dataclasses.asdict(done) | {"exit_code": int(done.exit_code)}
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))
        return done.exit_code
    for note in done.notes:
        click.echo(note, err=True)
    for name, why in done.left.items():
        click.echo(f"{name} could not be brought back: {why}", err=True)
    for what in done.remaining:
        click.echo(f"still wrong: {what}", err=True)
    if not done.findings and not done.slides and not done.left:
        click.echo(f"{store} is whole: nothing to repair")
    else:
        names = f": {', '.join(done.slides)}" if done.slides else ""
        click.echo(
            f"{store}: {done.findings} findings, {len(done.slides)} slides ingested again{names}"
        )
    return done.exit_code
