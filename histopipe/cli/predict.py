"""`histopipe predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import Share
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the predictions.")  # fmt: skip
@click.option("--batch-size", type=int, default=64, help="Patches per batch, over all devices.")
@click.option("--devices", default="auto", help="auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option(
    "--aggregate",
    type=click.Choice(["mean", "top_k", "majority"]),
    default="mean",
    help="How patches are aggregated to slides and patients.",
)
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    help="CSV: slide,label[,patient]. Metrics are reported where labels are known.  [default: the store's]",
)
@click.option("--allow-extra-rows", is_flag=True, help="Ignore CSV rows that name no slide.")
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="Damaged patch in a store: fail its slide, or skip the patch.",
)
@click.option(
    "--overlap", type=int, help="Slide files: overlap of patches in pixels.  [default: as trained]"
)
@click.option(
    "--tissue",
    type=click.Choice(["otsu", "none"]),
    help="Slide files: tissue detection.  [default: as trained]",
)
@click.option(
    "--tissue-threshold",
    type=Share(),
    help="Slide files: minimum share of tissue in a patch.  [default: as trained]",
)
@click.option(
    "--mpp-csv",
    type=click.Path(path_type=Path),
    help="CSV: slide,mpp, for slide files without scale.",
)
@click.option(
    "--default-mpp", type=float, help="Level-0 µm per pixel of slide files without scale."
)
@click.option(
    "--max-unreadable",
    type=Share(),
    default="1%",
    help="Slide files: maximum share of unreadable patches.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes that read slide files.  [default: one per core]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@untrusted_option("sources")
def command(run: Path, sources: tuple[Path, ...], out: Path, as_json: bool, **options: Any) -> None:
    """Predict SOURCES, stores or slides, by the model of the folder RUN.

    Slides need no store: they are tiled like the slides of the training, and their patches are not kept. --out gets a CSV file of
    patches per slide in patches/, and slides.csv and patients.csv. Run the same command again to predict what is missing.

    \b
    Example: histopipe predict runs/first new-slides/ --out predictions
    """  # fmt: skip
    from histopipe.inference.predict import predict  # late: `--help` needs no numpy

    result = predict(run, sources, out=out, **options)
    text = json.dumps(result.to_json(), indent=2, ensure_ascii=False) if as_json else str(result)
    click.echo(text)
    if result.failed:
        some = bool(result.done or result.kept)
        click.get_current_context().exit(ExitCode.PARTLY if some else ExitCode.NOTHING)
