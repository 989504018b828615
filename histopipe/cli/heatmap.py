"""`histopipe heatmap`: predictions or attention over their slides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import Names
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("place", type=click.Path(path_type=Path), metavar="PREDICTIONS")
@click.option("--out", type=click.Path(path_type=Path), default="heatmaps", help="Folder for the files.")  # fmt: skip
@click.option("--slide", multiple=True, help="Only this one; may be given several times.")
@click.option("--class", "class_name", help="Whose probability.  [default: the last class by name]")
@click.option(
    "--to",
    "formats",
    type=Names(),
    default="png",
    help="png: over the thumbnail; tiff: a pyramid; geojson: objects for QuPath; or several, as png,tiff.",
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Of the patches.  [default: the run's own]",
)
@click.option(
    "--slides",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Files or folder of the slides, for a finer picture than the store's thumbnail.",
)
@click.option(
    "--objects",
    type=click.Choice(["cells", "contours"]),
    default="cells",
    help="Of GeoJSON: each patch, or outlines around those from --threshold on.",
)
@click.option("--threshold", type=float, default=0.5, help="Of --objects contours.")
@click.option("--json", "as_json", is_flag=True, help="What was drawn as JSON.")
@untrusted_option("stores")
def command(place: Path, out: Path, as_json: bool, **flags: Any) -> None:
    """Draw PREDICTIONS, a folder of `histopipe predict` or of a finished run, over their slides.

    Of a run, these are its validation and test patches; of one that learnt from bags, their attention. Files are called as slides
    are. In QuPath, open the TIFF beside the slide, or drag the GeoJSON onto it.

    \b
    Example: histopipe heatmap predictions --out heatmaps --to png,tiff,geojson
    """  # fmt: skip
    from histopipe.reports.heatmap import heatmap  # late: `--help` needs no matplotlib

    result = heatmap(place, out=out, **flags)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2, ensure_ascii=False))
    else:
        count = sum(map(len, result.files.values()))
        click.echo(f"{count} files of {len(result.files)} slides: {out}")
        for name, reason in sorted(result.failed.items()):
            click.echo(f"failed: {name}: {reason}")
    if result.failed:
        click.get_current_context().exit(ExitCode.PARTLY if result.files else ExitCode.NOTHING)
