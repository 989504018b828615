"""`histopipe predict`: what a run's model says of slides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import Share
from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode

_TILING = ("overlap", "tissue", "tissue_threshold")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the predictions.")  # fmt: skip
@click.option("--batch-size", type=int, default=64, help="Patches at once, over all devices.")
@click.option("--devices", default="auto", help="auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option(
    "--aggregate",
    type=click.Choice(["mean", "top_k", "majority"]),
    default="mean",
    help="How patches are put together to slides and patients.",
)
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    help="CSV: slide,label[,patient]; then it is told how good the predictions are.  [default: a store's own]",
)
@click.option("--allow-extra-rows", is_flag=True, help="Ignore CSV rows that name no slide.")
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="What a damaged patch of a store does: fail its slide, or be left out.",
)
@click.option(
    "--overlap", type=int, help="Of slides: pixels neighbours share.  [default: as trained]"
)
@click.option(
    "--tissue", type=click.Choice(["otsu", "none"]), help="Of slides.  [default: as trained]"
)
@click.option("--tissue-threshold", type=Share(), help="Of slides.  [default: as trained]")
@click.option(
    "--mpp-csv", type=click.Path(path_type=Path), help="CSV: slide,mpp, for slides that do not say."
)
@click.option("--default-mpp", type=float, help="Level-0 mpp of slides that have none.")
@click.option(
    "--max-unreadable",
    type=Share(),
    default="1%",
    help="Share of a slide's patches that may be lost to damage.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes that read slides.  [default: one a core]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="What was done as JSON.")
@untrusted_option("sources")
def command(run: Path, sources: tuple[Path, ...], out: Path, as_json: bool, **flags: Any) -> None:
    """Predict SOURCES, stores or slides, by the model of the folder RUN.

    Slides need no store: they are tiled as those of the training were, by the same code, and nothing of them is kept. --out gets
    a CSV a slide of its patches in patches/, and slides.csv and patients.csv. The same command again does what is missing.

    \b
    Example: histopipe predict runs/first new-slides/ --out predictions
    """  # fmt: skip
    # Late: `--help` needs none of it.
    from histopipe.evaluation.table import evaluation_lines
    from histopipe.inference.predict import predict

    tiling = {name: flags.pop(name) for name in _TILING}
    given = {name: value for name, value in tiling.items() if value is not None}
    result = predict(run, sources, out=out, tiling=given, **flags)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        if result.metrics is not None:
            click.echo("\n".join(evaluation_lines("labelled", result.metrics)))
        if result.skipped:
            click.echo(f"{result.skipped} damaged patches left out")
        waiting = result.input_wait / result.seconds if result.seconds else 0.0
        click.echo(
            f"{len(result.done)} slides predicted, {len(result.kept)} there before, {len(result.failed)} failed; "
            f"{result.patches:,} patches in {result.seconds:.0f} s, {waiting:.0%} waiting for input: {out}"
        )
        for name, reason in sorted(result.failed.items()):
            click.echo(f"failed: {name}: {reason}")
    if result.failed:
        some = bool(result.done or result.kept)
        click.get_current_context().exit(ExitCode.PARTLY if some else ExitCode.NOTHING)
