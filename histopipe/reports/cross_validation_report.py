"""Report of a cross-validation: metrics of each fold and of all test sets together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.evaluation.breakdown import Breakdown
from histopipe.evaluation.evaluate import Evaluation, main_metric, remarks, with_ends, with_interval
from histopipe.evaluation.subgroups import QUALITY
from histopipe.reports.data_description import open_stores, plain
from histopipe.reports.evaluation_blocks import EvaluatedPredictions, interval_cell, metric_cards
from histopipe.reports.evaluation_sections import add_analysis, add_metrics
from histopipe.reports.heatmap_values import SlideImages
from histopipe.reports.html_page import (
    Cards,
    Cell,
    Column,
    NameValueTable,
    Notes,
    Page,
    Row,
    Table,
    Text,
    number,
)
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import TrainResult, read_result
from histopipe.runs.task_config import CONFIGS, make_config
from histopipe.splits.slide_table import flow_from_json
from histopipe.studies.compare import CompareResult, compare
from histopipe.studies.cross_validation import leaked_from, read_parts, tested_slides
from histopipe.studies.settings import FoldSettings
from histopipe.system.files import read_json, reading
from histopipe.system.settings import read_settings
from histopipe.tasks.choices import LEVELS, name_of
from histopipe.tasks.intervals import Difference
from histopipe.tasks.predictions import joined_predictions
from histopipe.tasks.registry import TASKS

SUMMARY = "summary.json"


def cross_validation_page(
    folder: Path, *, stores: Sequence[Path] = (), pictures: bool = True, follow: bool = True
) -> Page:
    """Return the page of a cross-validation with at least one finished fold. For the arguments see `read_run`.

    Raises:
        UsageError: no fold is finished.
        DamagedStore: the folder cannot be read.
    """
    settings = read_settings(folder / run_folder.CONFIG, *CONFIGS, FoldSettings)
    of_folds = {name for name in settings if name in FoldSettings.__dataclass_fields__}
    config = make_config({k: v for k, v in settings.items() if k not in of_folds})
    unfinished = UsageError(
        f"{folder} has no finished fold", todo="continue it with `histopipe train --resume`"
    )
    with reading(folder / SUMMARY, missing=unfinished):
        summary: Mapping[str, Any] = read_json(folder / SUMMARY)
        results = [
            read_result(folder / f"fold-{fold['fold']}")
            for fold in summary["folds"]
            if fold["status"] == "done"
        ]
        evaluated = _evaluated(summary, config, results)
    if evaluated is None:
        raise unfinished
    page = Page(
        f"Cross-validation {folder.resolve().name}", f"{settings['folds']} folds, in {folder}"
    )
    page.add(
        "Summary",
        Text(
            "All test sets together, each with the thresholds of its fold. Brackets show 95 % confidence intervals, "
            "with patients as units. Models of different folds are compared as if they were one.", "soft",
        ),
        *(Text(f"Warning: {remark}.", "bad") for remark in remarks(evaluated.evaluations["test"])),
        Cards(metric_cards(evaluated)),
    )  # fmt: skip
    page.add("Folds", *_folds(summary, evaluated))
    add_metrics(page, evaluated)
    with ExitStack() as stack:
        opened, missing = open_stores(config, stores, stack, follow=follow)
        images = SlideImages({}, opened) if pictures else None
        add_analysis(page, evaluated, tested_slides(results), images)
    facts = [(name, plain(value)) for name, value in settings.items() if value is not None]
    page.add("Configuration", NameValueTable("All settings, as in config.toml", facts))
    page.add("Limitations", Notes([*_limitations(evaluated, summary), *missing]))
    return page


def _evaluated(
    summary: Mapping[str, Any], config: TrainConfig, results: Sequence[TrainResult]
) -> EvaluatedPredictions | None:
    if summary["pooled"] is None:
        return None
    parts = read_parts(results)
    # Cross-validations of earlier versions have no number of patients of the training.
    pooled = replace(Evaluation.from_json(summary["pooled"]), in_training=len(leaked_from(results)))
    breakdown = summary.get("breakdown")
    return EvaluatedPredictions(
        {"test": pooled}, {"test": joined_predictions([predictions for predictions, _ in parts])}, config.evaluation_settings,
        Breakdown() if breakdown is None else Breakdown.from_json(breakdown), flow_from_json(summary.get("flow", {})),
        parts=parts,
    )  # fmt: skip


def _folds(summary: Mapping[str, Any], evaluated: EvaluatedPredictions) -> Iterator[Table]:
    titles = {
        **evaluated.task.main,
        **{name: title for name, title in evaluated.task.plain.items() if name == "accuracy"},
    }
    names, reasons = list(titles), any(fold["reason"] for fold in summary["folds"])
    level = next(name for name, _ in evaluated.evaluations["test"].named())
    columns = (
        Column("fold"), Column("status"), Column("epochs", True), Column("seconds", True),
        *(Column(f"{level.replace('_', ', ', 1)}: {title}", True) for title in titles.values()),
        *([Column("reason")] if reasons else []),
    )  # fmt: skip
    rows = []
    for fold in summary["folds"]:
        metrics = None
        if "metrics" in fold:
            metrics = dict(Evaluation.from_json(fold["metrics"]["test"]).named())[level]
        values = [metrics.values[name] if metrics else None for name in names]
        rows.append(Row([
            Cell(str(fold["fold"])), Cell(fold["status"]), number(fold["epochs"]), number(fold["seconds"]),
            *(number(value, 3) for value in values),
            *([Cell(fold["reason"] or "", tone="why")] if reasons else []),
        ]))  # fmt: skip
    for title, metric_values in (
        ("mean", summary["mean"]),
        ("standard deviation", summary["deviation"]),
    ):
        values = [metric_values.get(f"{level}_{name}") for name in names]
        rows.append(Row([
            Cell(title), Cell(""), Cell(""), Cell(""), *(number(value, 3) for value in values),
            *([Cell("")] if reasons else []),
        ]))  # fmt: skip
    yield Table("Test set of each fold", columns, rows)


def _limitations(evaluated: EvaluatedPredictions, summary: Mapping[str, Any]) -> Iterator[str]:
    missing = [str(fold["fold"]) for fold in summary["folds"] if fold["status"] != "done"]
    if missing:
        yield f"Folds that are not finished: {', '.join(missing)}. Their slides are not tested."
    test = evaluated.evaluations["test"]
    notes = sorted({*remarks(test), *test.notes})
    yield from (f"{note[0].upper()}{note[1:]}." for note in notes)
    title, _ = main_metric(evaluated.evaluations["test"].finest)
    yield f"Intervals of the {title} are for these models: variation between training sets is only shown by the folds."
    yield "Performance on slides from another hospital, scanner or stain is unknown: only this data set was used."


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
    page.add("Limitations", _comparison_limitations(result))
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


def _comparison_limitations(result: CompareResult) -> Notes:
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
