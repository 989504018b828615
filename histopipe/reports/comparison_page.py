"""Report of a comparison of runs or cross-validations with the first one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from histopipe.evaluation.evaluate import remarks, with_interval
from histopipe.evaluation.subgroups import QUALITY
from histopipe.reports.evaluation_blocks import difference_cell, level_title, metric_cell
from histopipe.reports.html_page import Block, Cell, Page, Table, number
from histopipe.studies.compare import CompareResult, compare
from histopipe.tasks.choices import LEVELS, name_of
from histopipe.tasks.registry import TASKS


def comparison_page(runs: Sequence[Path]) -> Page:
    """Return the page of a comparison of runs or cross-validations with the first one. Raise as `compare`."""
    result = compare(list(runs))
    names = [str(run.folder) for run in result.runs]
    page = Page("Comparison", ", ".join(names))
    task = TASKS[result.runs[0].test.finest.task]
    titles = {**task.main, **task.plain}
    rows = [
        [
            Cell(level_title(level)),
            Cell(name),
            number(metrics.count),
            *(metric_cell(metrics, metric) for metric in titles),
        ]
        for level in (name_of(*at) for at in LEVELS)
        for name, run in zip(names, result.runs, strict=True)
        if (metrics := dict(run.test.named()).get(level)) is not None
    ]
    page.add(
        "Metrics", Table("Metrics of the test sets", ("level", "run", "n", *titles.values()), rows)
    )
    page.add("Differences", *_differences(result, titles))
    page.add("Subgroups", *_subgroups(result, names, *next(iter(titles.items()))))
    rows = [
        [Cell(name), *(Cell("" if value is None else str(value)) for value in values)]
        for name, values in result.settings.items()
    ]
    page.add(
        "Settings",
        Table("Settings that differ", ("setting", *names), rows)
        if rows
        else Block("text", "No settings differ."),
    )
    notes = [
        f"{run.folder}: {note}."
        for run in result.runs
        for note in (*remarks(run.test), *run.test.notes, *run.notes)
    ]
    page.add(
        "Limitations", Block("notes", [*notes, f"{result.scope[0].upper()}{result.scope[1:]}."])
    )
    return page


def _differences(result: CompareResult, titles: Mapping[str, str]) -> Iterator[Table | Block]:
    first, *other_runs = result.runs
    for run, levels, notes, splits in zip(
        other_runs, result.differences, result.notes, result.splits, strict=True
    ):
        rows = [
            [Cell(level_title(level)), *(difference_cell(metrics.get(name)) for name in titles)]
            for level, metrics in levels.items()
        ]
        if rows:
            yield Table(
                f"{run.folder} minus {first.folder}, on the same patients",
                ("level", *titles.values()),
                rows,
            )
        texts = [] if splits is None else [f"{run.folder}: {splits}."]
        texts += [f"{run.folder}, not compared: {note}." for note in notes]
        if texts:
            yield Block("notes", texts)


def _subgroups(
    result: CompareResult, names: Sequence[str], metric: str, title: str
) -> Iterator[Table]:
    """Yield a metric by subgroup, with a column for each run."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for place, run in enumerate(result.runs):
        for subgroups in run.breakdown.subgroups:
            for group in subgroups.groups if subgroups.column not in QUALITY else ():
                texts = cells.setdefault((subgroups.column, group.name), {})
                texts[place] = f"{with_interval(group, metric)}  (n = {group.count})"
    rows = [
        [Cell(column), Cell(group), *(Cell(texts.get(i, "")) for i in range(len(names)))]
        for (column, group), texts in cells.items()
    ]
    if rows:
        yield Table(f"{title} by subgroup", ("column", "group", *names), rows)
