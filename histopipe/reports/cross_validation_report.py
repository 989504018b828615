"""Report of a cross-validation: metrics of each fold and of all test sets together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.evaluation.breakdown import Breakdown, EvaluatedPredictions
from histopipe.evaluation.evaluate import Evaluation, main_metric, remarks, with_interval
from histopipe.evaluation.subgroups import QUALITY
from histopipe.reports.evaluation_blocks import (
    INTERVALS,
    add_analysis,
    add_metrics,
    difference_cell,
    level_title,
    metric_cards,
    metric_cell,
    sentences,
)
from histopipe.reports.heatmap_values import SlideImages
from histopipe.reports.html_page import Block, Cell, Page, Table, number, values_block
from histopipe.reports.run_description import OTHER_DATA_UNKNOWN
from histopipe.reports.run_report import open_stores
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import TrainResult, read_result
from histopipe.runs.task_config import CONFIGS, make_config
from histopipe.splits.slide_table import flow_from_json
from histopipe.studies.compare import CompareResult, compare
from histopipe.studies.cross_validation import leaked_from, read_parts, tested_slides
from histopipe.studies.study_settings import FoldSettings
from histopipe.system.files import read_json, reading
from histopipe.system.settings import read_settings
from histopipe.tasks.choices import LEVELS, name_of
from histopipe.tasks.predictions import joined_predictions
from histopipe.tasks.registry import TASKS

SUMMARY = "summary.json"


def cross_validation_page(
    folder: Path, *, stores: Sequence[Path], pictures: bool, follow: bool
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
        if summary["pooled"] is None:
            raise unfinished
        evaluated = _evaluated(summary, config, results)
    page = Page(
        f"Cross-validation {folder.resolve().name}", f"{settings['folds']} folds, in {folder}"
    )
    page.add(
        "Summary",
        Block(
            "text",
            f"All test sets together, each with the thresholds of its fold. {INTERVALS} "
            "Models of different folds are compared as if they were one.",
            tone="soft",
        ),
        *(
            Block("text", f"Warning: {remark}.", tone="bad")
            for remark in remarks(evaluated.evaluations["test"])
        ),
        Block("cards", metric_cards(evaluated)),
    )
    page.add("Folds", _folds(summary, evaluated))
    add_metrics(page, evaluated)
    with ExitStack() as stack:
        opened, missing = open_stores(config, stores, stack, follow=follow)
        images = SlideImages({}, opened) if pictures else None
        add_analysis(page, evaluated, tested_slides(results), images)
    page.add("Configuration", values_block("All settings, as in config.toml", settings))
    page.add("Limitations", Block("notes", [*_limitations(evaluated, summary), *missing]))
    return page


def _evaluated(
    summary: Mapping[str, Any], config: TrainConfig, results: Sequence[TrainResult]
) -> EvaluatedPredictions:
    parts = read_parts(results)
    # Cross-validations of earlier versions have no number of patients of the training.
    pooled = replace(Evaluation.from_json(summary["pooled"]), in_training=len(leaked_from(results)))
    breakdown = summary.get("breakdown")
    return EvaluatedPredictions(
        {"test": pooled},
        {"test": joined_predictions([predictions for predictions, _ in parts])},
        config.evaluation_settings,
        Breakdown() if breakdown is None else Breakdown.from_json(breakdown),
        flow_from_json(summary.get("flow", {})),
        parts=parts,
    )


def _folds(summary: Mapping[str, Any], evaluated: EvaluatedPredictions) -> Table:
    titles = {**evaluated.task.main, **evaluated.task.plain}
    names = [name for name in titles if name in evaluated.task.main or name == "accuracy"]
    folds, level = summary["folds"], next(iter(evaluated.evaluations["test"].named()))[0]
    lines = [
        (
            [
                Cell(str(fold["fold"])),
                Cell(fold["status"]),
                number(fold["epochs"]),
                number(fold["seconds"]),
            ],
            _test_metrics(fold, level),
            fold["reason"] or "",
        )
        for fold in folds
    ]
    lines += [
        (
            [Cell(title), *[Cell("")] * 3],
            {name: summary[key].get(f"{level}_{name}") for name in names},
            "",
        )
        for title, key in (("mean", "mean"), ("standard deviation", "deviation"))
    ]
    with_reasons = any(fold["reason"] for fold in folds)
    return Table(
        "Test set of each fold",
        (
            "fold",
            "status",
            "epochs",
            "seconds",
            *(f"{level_title(level)}: {titles[name]}" for name in names),
            *(["reason"] if with_reasons else []),
        ),
        [
            [
                *cells,
                *(number(values.get(name), 3) for name in names),
                *([Cell(reason, tone="why")] if with_reasons else []),
            ]
            for cells, values, reason in lines
        ],
    )


def _test_metrics(fold: Mapping[str, Any], level: str) -> Mapping[str, float | None]:
    """Return the metrics of the test set of a fold; empty if it is not finished."""
    if "metrics" not in fold:
        return {}
    return dict(Evaluation.from_json(fold["metrics"]["test"]).named())[level].values


def _limitations(evaluated: EvaluatedPredictions, summary: Mapping[str, Any]) -> Iterator[str]:
    missing = [str(fold["fold"]) for fold in summary["folds"] if fold["status"] != "done"]
    if missing:
        yield f"Folds that are not finished: {', '.join(missing)}. Their slides are not tested."
    test = evaluated.evaluations["test"]
    yield from sentences(sorted({*remarks(test), *test.notes}))
    title, _ = main_metric(test.finest)
    yield f"Intervals of the {title} are for these models: variation between training sets is only shown by the folds."
    yield f"{OTHER_DATA_UNKNOWN}: only this data set was used."


def comparison_page(runs: Sequence[Path]) -> Page:
    """Return the page of a comparison of runs or cross-validations with the first one. Raise as `compare`."""
    result = compare(list(runs))
    names = [str(run.folder) for run in result.runs]
    page = Page("Comparison", ", ".join(names))
    task = TASKS[result.runs[0].test.finest.task]
    titles = {**task.main, **task.plain}
    rows = [
        [
            Cell(level_title(name_of(level, how))),
            Cell(name),
            number(metrics.count),
            *(metric_cell(metrics, metric) for metric in titles),
        ]
        for level, how in LEVELS
        for name, run in zip(names, result.runs, strict=True)
        if (metrics := run.test.at(level, how)) is not None
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
    models = "Differences are for these models: variation between seeds and splits is not in the intervals."
    page.add("Limitations", Block("notes", [*notes, models]))
    return page


def _differences(result: CompareResult, titles: Mapping[str, str]) -> Iterator[Table | Block]:
    first, *other_runs = result.runs
    compared = zip(other_runs, result.differences, result.notes, result.splits, strict=True)
    for run, levels, notes, splits in compared:
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
