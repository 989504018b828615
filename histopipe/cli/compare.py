"""`histopipe compare`: finished runs side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from histopipe.studies.comparison import Comparison
    from histopipe.studies.pairing import Difference


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--resamples", type=int, default=1000, help="Of the patients, for 95 % intervals; 0 for none."
)
@click.option("--json", "as_json", is_flag=True, help="All of it as JSON.")
def command(runs: tuple[Path, ...], resamples: int, as_json: bool) -> None:
    """Hold finished RUNS, or cross-validations, against the first of them.

    Tells which settings differ and how good each is on its test patches. Where two were tested on the same, the difference comes with an
    interval from resampling the patients of both at once: one that does not include 0 is a difference.

    \b
    Example: histopipe compare runs/resnet50 runs/mobilenet
    """  # fmt: skip
    from histopipe.studies.comparison import compare

    result = compare(runs, resamples=resamples)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        click.echo("\n".join(_lines(result)))


def _lines(result: Comparison) -> list[str]:
    from histopipe.evaluation.table import aligned, evaluation_lines

    names = [str(run.folder) for run in result.runs]
    rows = [["setting", *names]]
    rows += [[name, *map(_text, values)] for name, values in result.settings.items()]
    lines = aligned(rows) if result.settings else ["no setting differs"]
    for run in result.runs:
        lines += ["", *evaluation_lines(str(run.folder), run.test)]
        lines += [f"  {note}" for note in run.notes]
    for run, levels, notes in zip(result.runs[1:], result.differences, result.notes, strict=True):
        lines += ["", f"{run.folder} less {names[0]}:"]
        if levels:
            lines += aligned(_difference_rows(levels))
        lines += [f"  not compared: {note}" for note in notes]
    return lines


def _difference_rows(levels: Mapping[str, Mapping[str, Difference]]) -> list[list[str]]:
    """A row a level; without those of patients where each has one slide."""
    shown = {"auc": "AUC", "balanced_accuracy": "bal. acc.", "brier": "Brier"}
    rows = [["", *shown.values()]]
    for name, figures in levels.items():
        level, _, how = name.partition("_")
        if level != "patient" or figures != levels.get(f"slide_{how}"):
            rows.append([f"  {level} {how}".rstrip(), *(_signed(figures[it]) for it in shown)])
    return rows


def _signed(difference: Difference) -> str:
    if difference.value is None:
        return "-"
    if difference.interval is None:
        return f"{difference.value:+.3f}"
    low, high = difference.interval
    return f"{difference.value:+.3f} [{low:+.2f}, {high:+.2f}]"


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None else str(value)
