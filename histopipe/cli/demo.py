"""`histopipe demo`: everything once, on made slides."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--out", type=click.Path(path_type=Path), default="demo", help="Folder for all of it."
)
@click.option("--slides", type=int, default=10, help="Slides to make and train on.")
def command(out: Path, slides: int) -> None:
    """Make slides of tissue with tumour outlined in it, tile them, train on the outlines, predict new slides, and write reports.

    It needs no data and no network, and takes about a minute on 2 cores. What it does, step by step, are the commands of the
    README. It needs TensorFlow.

    \b
    Example: histopipe demo --out demo
    """
    # Late: `--help` needs none of it.
    from histopipe.demo.demo import STEPS, demo
    from histopipe.evaluation.table import evaluation_lines
    from histopipe.ingest.progress import choose_progress

    def step(number: int, what: str) -> None:
        click.echo(f"{number}/{STEPS} {what}", err=True)

    progress = choose_progress()
    try:
        made = demo(out, slides=slides, progress=progress, step=step)
    finally:
        progress.close()
    for side, evaluation in made.result.metrics.items():
        title = "test (held out)" if side == "test" else side
        click.echo("\n".join(evaluation_lines(title, evaluation)))
    click.echo(f"heatmaps of new slides: {made.heatmaps}")
    click.echo(f"open in a browser: {made.reports[0]}")
    click.echo(f"                   {made.reports[1]}")
