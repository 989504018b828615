"""`histopipe demo`: run the full pipeline on synthetic slides."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--out", type=click.Path(path_type=Path), default="demo", help="Folder for all results."
)
@click.option("--slides", type=int, default=10, help="Number of slides to make and train on.")
def command(out: Path, slides: int) -> None:
    """Run the full pipeline on synthetic slides.

    Make slides of tissue with outlined tumour, ingest them, train on the outlines, predict new slides, and write reports. It
    needs TensorFlow, but no data and no network, and takes about a minute on 2 cores.

    \b
    Example: histopipe demo --out demo
    """  # fmt: skip
    from histopipe.demo.demo import demo  # late: `--help` needs none of it

    click.echo(repr(demo(out, slides=slides)))
