"""`histopipe heatmap`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import Names
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("predictions", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default="heatmaps", help="Folder for the files.")  # fmt: skip
@click.option("--slide", multiple=True, help="Draw this slide only; repeatable.")
@click.option(
    "--class",
    "class_name",
    help="Class whose probability is drawn.  [default: the last class by name]",
)
@click.option(
    "--to",
    "formats",
    type=Names(),
    default="png",
    help="png: over the slide's thumbnail; tiff: pyramid; geojson: objects for QuPath; or several: png,tiff.",
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Store of the patches; repeatable.  [default: the run's]",
)
@click.option(
    "--slides",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Slide files, or a folder of them, for finer images than the thumbnails.",
)
@click.option(
    "--objects",
    type=click.Choice(["cells", "contours"]),
    default="cells",
    help="GeoJSON objects: each patch, or contours around patches from --threshold on.",
)
@click.option("--threshold", type=float, default=0.5, help="Threshold of --objects contours.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@untrusted_option("stores")
def command(predictions: Path, as_json: bool, **options: Any) -> None:
    """Draw heatmaps of PREDICTIONS, a folder of `histopipe predict` or of a finished run, over the slides.

    For a run, its validation and test patches are drawn; for a model of bags, the attention. Files are named after their slides. In
    QuPath, open the TIFF file next to the slide, or drag the GeoJSON file onto it.

    \b
    Example: histopipe heatmap predictions --out heatmaps --to png,tiff,geojson
    """  # fmt: skip
    from histopipe.reports.heatmap import heatmap  # late: `--help` needs no matplotlib

    result = heatmap(predictions, **options)
    text = json.dumps(result.to_json(), indent=2, ensure_ascii=False) if as_json else str(result)
    click.echo(text)
    if result.failed:
        click.get_current_context().exit(ExitCode.PARTLY if result.files else ExitCode.NOTHING)
