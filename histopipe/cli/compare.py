"""`histopipe compare`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--resamples",
    type=int,
    default=1000,
    help="Bootstrap resamples of the patients for 95 % confidence intervals; 0 for none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(runs: tuple[Path, ...], resamples: int, as_json: bool) -> None:
    """Compare finished RUNS, or cross-validations, with the first of them.

    Shows settings that differ, and the metrics of each run on its test patches. If two runs were tested on the same patches, the
    difference has a 95 % confidence interval. If the interval does not include 0, the difference is significant.

    \b
    Example: histopipe compare runs/resnet50 runs/mobilenet
    """  # fmt: skip
    from histopipe.studies.compare import compare  # late: `--help` needs no numpy

    result = compare(runs, resamples=resamples)
    click.echo(json.dumps(result.to_json(), indent=2) if as_json else str(result))
