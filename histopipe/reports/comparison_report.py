"""Report of a comparison of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from histopipe.evaluation.groups import QUALITY
from histopipe.evaluation.table import remarks, with_ends, with_interval
from histopipe.reports.evaluation_blocks import interval_cell
from histopipe.reports.html_page import Cell, Column, Notes, Page, Row, Table, Text, number
from histopipe.studies.compare import CompareResult, compare
from histopipe.tasks.choices import LEVELS, name_of
from histopipe.tasks.intervals import Difference
from histopipe.tasks.registry import TASKS


def comparison_page(runs: Sequence[Path]) -> Page:
    """Return the page of a comparison of runs or cross-validations with the first one. Raise as `compare`."""
    result = compare(list(runs))
    names = [str(run.folder) for run in result.runs]
    page = Page("Comparison", ", ".join(names))
    page.add("Metrics", _metrics(result))
    page.add("Differences", *_differences(result, names[0]))
    page.add("Subgroups", *_subgroups(result))
    settings = [
        Row([Cell(name), *(Cell("" if value is None else str(value)) for value in values)])
        for name, values in result.settings.items()
    ]
    columns = (Column("setting"), *(Column(name) for name in names))
    page.add(
        "Settings",
        Table("Settings that differ", columns, settings)
        if settings
        else Text("No settings differ."),
    )
    page.add("Limitations", _limitations(result))
    return page


def _metrics(result: CompareResult) -> Table:
    values = _shown(result)
    rows = []
    for level, how in LEVELS:
        for run in result.runs:
            metrics = run.test.at(level, how)
            if metrics is not None:
                cells = [
                    Cell(with_interval(metrics, name), metrics.values.get(name), "n")
                    for name in values
                ]
                rows.append(Row([Cell(name_of(level, how).replace("_", ", ", 1)), Cell(str(run.folder)), number(metrics.count), *cells]))  # fmt: skip
    columns = (
        Column("level"),
        Column("run"),
        Column("n", True),
        *(Column(title, True) for title in values.values()),
    )
    return Table("Metrics of the test sets", columns, rows)


def _shown(result: CompareResult) -> dict[str, str]:
    task = TASKS[result.runs[0].test.finest.task]
    return {**task.main, **task.plain}


def _differences(result: CompareResult, first: str) -> Iterator[Table | Notes]:
    values = _shown(result)
    compared = zip(result.runs[1:], result.differences, result.notes, result.splits, strict=True)
    for run, levels, notes, splits in compared:
        rows = [
            Row([
                Cell(level.replace("_", ", ", 1)),
                *(
                    interval_cell(difference.value, difference.interval, signed=True)
                    for difference in (metrics.get(name, Difference(None, None)) for name in values)
                ),
            ])
            for level, metrics in levels.items()
        ]  # fmt: skip
        columns = (Column("level"), *(Column(title, True) for title in values.values()))
        if rows:
            yield Table(f"{run.folder} minus {first}, on the same patients", columns, rows)
        texts = [] if splits is None else [f"{run.folder}: {splits}."]
        texts += [f"{run.folder}, not compared: {note}." for note in notes]
        if texts:
            yield Notes(texts)


def _subgroups(result: CompareResult) -> Iterator[Table]:
    """Yield the main metric by subgroup, with a column for each run."""
    name, title = next(iter(_shown(result).items()))
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for place, run in enumerate(result.runs):
        for subgroups in run.breakdown.subgroups:
            for group in subgroups.groups if subgroups.column not in QUALITY else ():
                text = with_ends(group.values.get(name), group.intervals.get(name))
                cells.setdefault((subgroups.column, group.name), {})[place] = (
                    f"{text}  (n = {group.count})"
                )
    rows = [
        Row([Cell(column), Cell(group), *(Cell(texts.get(i, "")) for i in range(len(result.runs)))])
        for (column, group), texts in cells.items()
    ]
    columns = (Column("column"), Column("group"), *(Column(str(run.folder)) for run in result.runs))
    if rows:
        yield Table(f"{title} by subgroup", columns, rows)


def _limitations(result: CompareResult) -> Notes:
    notes = [
        f"{run.folder}: {note}."
        for run in result.runs
        for note in (*remarks(run.test), *run.test.notes, *run.notes)
    ]
    return Notes(
        [
            *notes,
            "Differences are for these models: variation between seeds and splits is not in the intervals.",
        ]
    )
