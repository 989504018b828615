"""`histopipe report`."""

from __future__ import annotations

from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="HTML file.  [default: PATH/report.html]"
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Store of a run, if it has moved; repeatable.",
)
@click.option("--no-pictures", is_flag=True, help="Only tables and charts, for very many slides.")
@untrusted_option("path", "stores", passed=True)
def command(
    path: Path, out: Path | None, stores: tuple[Path, ...], no_pictures: bool, untrusted: bool
) -> None:
    """Write a report of PATH, a store or the folder of a finished run, as one HTML file.

    The report of a store shows every slide: state, route, scale, counts, notes, tissue and some patches. The report of a run shows
    metrics with intervals, curves, ROC, confusion, calibration, slides, patches with the most certain predictions, heatmaps, settings,
    and what was not measured. The file needs no network.

    \b
    Example: histopipe report runs/first
    """  # fmt: skip
    from histopipe.reports.report import report  # late: `--help` needs no matplotlib

    result = report(path, out=out, stores=stores, pictures=not no_pictures, untrusted=untrusted)
    click.echo(str(result))
