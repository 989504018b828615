"""`histopipe report`: a store or a run as a page."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="The file.  [default: PATH/report.html]"
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Of a run: where its stores are, if not where they were.",
)
@click.option("--no-pictures", is_flag=True, help="Tables and charts only: for very many slides.")
@untrusted_option("path", "stores", passed=True)
def command(
    path: Path, out: Path | None, stores: tuple[Path, ...], no_pictures: bool, untrusted: bool
) -> None:
    """Write a report of PATH, a store or the folder of a finished run, as one HTML file.

    Of a store: every slide with its state, route, scale, counts and notes, what was tiled of it and some of its patches. Of a run:
    figures with intervals, curves, ROC, confusion, calibration, slides, the patches it was surest of, heatmaps, settings, and what
    was not measured. The file needs no network: open it from disk, or send it.

    \b
    Example: histopipe report runs/first
    """
    # Late: `--help` needs none of it.
    from tqdm import tqdm

    from histopipe.reports.report import report

    with tqdm(unit=" slides", disable=not sys.stderr.isatty(), leave=False) as bar:

        def told() -> None:
            bar.update()

        written = report(
            path, out=out, stores=stores, pictures=not no_pictures, follow=not untrusted, told=told
        )
    click.echo(f"{written}  ({written.stat().st_size / 1e6:,.1f} MB)")
