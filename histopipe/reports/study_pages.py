"""Reports of studies: a cross-validation, a comparison with the first of several runs, and probes of encoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.evaluation.breakdown import Breakdown, EvaluatedPredictions
from histopipe.evaluation.evaluate import (
    NARROW_FOLDS,
    Evaluation,
    main_metric,
    metric_title,
    pooled_text,
    remarks,
    with_ends,
    with_interval,
)
from histopipe.evaluation.label_errors import LearningCurve, read_label_errors
from histopipe.evaluation.prediction_sets import PredictionSets
from histopipe.evaluation.subgroups import QUALITY
from histopipe.predictions.patch_values import SlideImages
from histopipe.reports.charts import interval_chart, learning_chart
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
from histopipe.reports.failures import label_blocks
from histopipe.reports.html_page import Block, Cell, Page, Table, number, values_block
from histopipe.reports.result_pages import stores_of_pictures
from histopipe.reports.run_description import OTHER_DATA_UNKNOWN
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import Run
from histopipe.runs.task_config import CONFIGS, make_config
from histopipe.splits.slide_table import flow_from_json
from histopipe.studies.compare import CompareResult, compare
from histopipe.studies.fold_results import leaked_from, read_parts, tested_slides
from histopipe.studies.probe import INDEX, OTHER_SITES, SITE, ProbeResult, Score, read_probe
from histopipe.studies.study_settings import FoldSettings
from histopipe.system.files import read_json, reading
from histopipe.system.folders import CONFIG
from histopipe.system.settings import read_settings, split_settings
from histopipe.tasks.choices import LEVELS, name_of
from histopipe.tasks.predictions import joined_predictions
from histopipe.tasks.registry import TASKS

SUMMARY = "summary.json"


def cross_validation_page(
    folder: Path, *, stores: Sequence[Path], pictures: bool, follow: bool
) -> Page:
    """Return the page of a cross-validation with at least one finished fold. `stores` and `follow` as for `stores_of_pictures`.

    Raises:
        UsageError: no fold is finished.
        DamagedStore: the folder cannot be read.
    """
    settings = read_settings(folder / CONFIG, *CONFIGS, FoldSettings)
    config = make_config(split_settings(settings, FoldSettings)[1])
    unfinished = UsageError(
        f"{folder} has no finished fold", todo="continue it with `histopipe train --resume`"
    )
    with reading(folder / SUMMARY, missing=unfinished):
        summary: Mapping[str, Any] = read_json(folder / SUMMARY)
        runs = [
            Run(folder / fold.get("run", f"fold-{fold['fold']}"))
            for fold in summary["folds"]
            if fold["status"] == "done" and "share" not in fold
        ]
        if summary["pooled"] is None:
            raise unfinished
        evaluated = _pooled_evaluation(summary, config, runs)
    count = sum("share" not in fold for fold in summary["folds"])
    page = Page(f"Cross-validation {folder.resolve().name}", f"{count} folds, in {folder}")
    page.add(
        "Summary",
        Block("text", _how_summarized(summary), tone="soft"),
        *(
            Block("text", f"Warning: {remark}.", tone="bad")
            for remark in remarks(evaluated.evaluations["test"])
        ),
        Block("cards", metric_cards(evaluated)),
        Block("text", f"{pooled_text(Evaluation.from_json(summary['pooled']))}."),
    )
    page.add("Folds", _folds(summary, evaluated))
    page.add("Learning curve", *_learning_curve(summary.get("learning_curve")))
    add_metrics(page, evaluated)
    with ExitStack() as stack:
        opened, missing = stores_of_pictures(runs[0], stores, stack, follow=follow)
        add_analysis(
            page,
            evaluated,
            tested_slides(runs),
            SlideImages({}, opened) if pictures else None,
        )
    page.add(
        "Labels to check",
        *label_blocks(read_label_errors(folder), evaluated, summary.get("label_errors", "")),
    )
    page.add("Configuration", values_block("All settings, as in config.toml", settings))
    page.add("Limitations", Block("notes", [*_fold_limitations(evaluated, summary), *missing]))
    return page


def _learning_curve(value: Mapping[str, Any] | None) -> Iterator[Block]:
    """Yield the chart and the numbers of a learning curve; nothing without one."""
    if value is None:
        return
    curve = LearningCurve.from_json(value)
    yield Block(
        "text",
        "Each fold was also trained on parts of its training patients, and tested on the same patients. Intervals are for "
        "other test patients; with several seeds, also for other training patients. The curve is a power law; what it "
        "expects beyond the measured points is an extrapolation.",
        tone="soft",
    )
    yield Block("charts", [learning_chart(curve)])
    yield Block("notes", curve.lines)


def _pooled_evaluation(
    summary: Mapping[str, Any], config: TrainConfig, runs: Sequence[Run]
) -> EvaluatedPredictions:
    parts = read_parts(runs)
    # Cross-validations of earlier versions have no number of patients of the training.
    of_folds = Evaluation.from_json(summary.get("within_folds") or summary["pooled"])
    breakdown = summary.get("breakdown")
    return EvaluatedPredictions(
        {"test": replace(of_folds, in_training=len(leaked_from(runs)))},
        {"test": joined_predictions([predictions for predictions, _ in parts], as_folds=True)},
        config.evaluation_settings,
        Breakdown() if breakdown is None else Breakdown.from_json(breakdown),
        flow_from_json(summary.get("flow", {})),
        parts=parts,
        sets=PredictionSets(**sets) if (sets := summary.get("prediction_sets")) else None,
    )


def _folds(summary: Mapping[str, Any], evaluated: EvaluatedPredictions) -> Table:
    titles = {**evaluated.task.main, **evaluated.task.plain}
    names = [name for name in titles if name in evaluated.task.main or name == "accuracy"]
    folds, level = summary["folds"], next(iter(evaluated.evaluations["test"].named()))[0]
    of_seeds = {f"seed {seed}": values for seed, values in summary.get("seeds", {}).items()}
    means = {"mean": summary["mean"], "standard deviation": summary["deviation"]}
    lines = [(*_fold_cells(fold, level), fold["reason"] or "") for fold in folds] + [
        (
            [Cell(title), *[Cell("")] * 3],
            {name: values.get(f"{level}_{name}") for name in names},
            "",
        )
        for title, values in (of_seeds | means).items()
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


def _how_summarized(summary: Mapping[str, Any]) -> str:
    """Return how the metrics of a cross-validation are formed."""
    if not summary.get("within_folds"):
        return (
            f"All test sets together, as if their models were one. {INTERVALS} `histopipe train --resume` with this version "
            "ranks the patients of each fold alone."
        )
    task = TASKS[Evaluation.from_json(summary["within_folds"]).finest.task]
    within = (
        f"What ranks patients, such as {task.main[task.ranked]}, is formed within each test set."
        if task.ranks
        else ""
    )
    if summary.get("seeds"):
        return (
            f"Means over the seeds. {within} Brackets show 95 % intervals for other patients and other seeds. Numbers, and decisions "
            "or survival curves, are of the first seed; in other charts, each slide counts once per seed."
        )
    return (
        f"All test sets together{', each with the thresholds of its fold' if task.probabilities else ''}. {within} {INTERVALS}"
        + (f" {NARROW_FOLDS}" if task.ranks and task.ranked != "pearson" else "")
    )


def _fold_cells(
    fold: Mapping[str, Any], level: str
) -> tuple[list[Cell], Mapping[str, float | None]]:
    """Return the first cells of a fold, and its metrics; none if it is not finished."""
    return [
        Cell(fold.get("run", str(fold["fold"]))),
        Cell(fold["status"]),
        number(fold["epochs"]),
        number(fold["seconds"]),
    ], (
        dict(Evaluation.from_json(fold["metrics"]["test"]).named())[level].values
        if "metrics" in fold
        else {}
    )


def _fold_limitations(evaluated: EvaluatedPredictions, summary: Mapping[str, Any]) -> Iterator[str]:
    missing = [
        fold.get("run", str(fold["fold"])) for fold in summary["folds"] if fold["status"] != "done"
    ]
    if missing:
        yield f"Folds that are not finished: {', '.join(missing)}. " + (
            "Their seeds are not in the means."
            if summary.get("seeds")
            else "Their slides are not tested."
        )
    test = evaluated.evaluations["test"]
    yield from sentences(sorted({*remarks(test), *test.notes}))
    title, _ = main_metric(test.finest)
    if any(metrics.groups for metrics in test.patient.values()):
        yield "The log-rank p takes the risk groups as given: models of folds share training patients, so that it may be too small."
    if not summary.get("seeds"):
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
        texts = [
            *([] if splits is None else [f"{run.folder}: {splits}."]),
            *(f"{run.folder}, not compared: {note}." for note in notes),
        ]
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


_OF_SITES = {
    OTHER_SITES: "The linear model is trained on other sites than it is tested on. If the interval of its difference from the "
    "linear probe above is below 0, the linear probe has used the site, or learns less from patients of other sites.",
    SITE: "How well a linear model predicts the site, across patients. The better, the easier a model learns the site in place of the class.",
    INDEX: "Of the nearest patches of other patients that share either the class or the site, the share with the same "
    "class, in balanced comparisons of two classes at two sites (after Kömen et al. 2026). The index of noise is that of features "
    "without information on these patients: 0.5, and more if few patients have both classes. Below it, the site is stronger "
    "than the class. The class of a patch is that of its slide.",
}


def probe_page(folder: Path) -> Page:
    """Return the page of a folder of `probe`.

    Raises:
        DamagedStore: the folder cannot be read.
    """
    result = read_probe(folder)
    page = Page(
        f"Encoders {folder.resolve().name}", f"{len(result.sets)} feature sets, in {folder}"
    )
    rows = [
        [
            Cell(name),
            number(values["dimension"]),
            number(values["patches"]),
            number(values["bytes_per_patch"] / 1024, 1),
        ]
        for name, values in result.sets.items()
    ]
    page.add(
        "Summary",
        Block(
            "text",
            f"{result.items} bags of {result.patients} patients, each the mean of its patches, in the same folds. "
            f"{INTERVALS} Differences are from the first feature set, of the same patients. What ranks patients, such as the AUC, is "
            "formed within the test set of each fold.",
            tone="soft",
        ),
        Table("Feature sets", ("features", "dimension", "patches", "kB per patch"), rows),
        Block("charts", list(_charts(result))),
    )
    page.add("Probes", _table(result, [s for s in result.scores if s.probe not in _OF_SITES]))
    blocks: list[Block | Table] = []
    for probe, text in _OF_SITES.items():
        scores = [score for score in result.scores if score.probe == probe]
        blocks += [Block("text", text), _table(result, scores)] if scores else []
    page.add("Sites", *blocks)
    page.add("Remarks", Block("notes", list(result.notes)))
    return page


def _table(result: ProbeResult, scores: Sequence[Score]) -> Table:
    """Return a table of probes with the same metrics."""
    names = list(scores[0].values)
    titles = [metric_title(name, result.task) for name in names]
    with_p = any(score.p is not None for score in scores)
    with_loss = any(score.less_linear for score in scores)
    return Table(
        scores[0].probe if len({score.probe for score in scores}) == 1 else "",
        (
            *("probe", "features", *titles, f"difference of {titles[0]}"),
            *["minus the linear probe"] * with_loss,
            *["p"] * with_p,
        ),
        [
            [
                Cell(score.probe),
                Cell(score.features),
                *(
                    Cell(with_ends(value, score.intervals.get(name)), value, "n")
                    for name, value in score.values.items()
                ),
                difference_cell(score.differences.get(names[0])),
                *[difference_cell(score.less_linear.get(names[0]))] * with_loss,
                *[number(score.p, 3)] * with_p,
            ]
            for score in scores
        ],
    )


def _charts(result: ProbeResult) -> Iterator[str]:
    """Yield a chart of the main metric of all probes of the targets, and one of the sites."""
    for title, of_sites in (("Probes", False), ("Sites", True)):
        scores = [score for score in result.scores if (score.probe in _OF_SITES) == of_sites]
        series: Mapping[str, dict[str, Any]] = {name: {} for name in result.sets}
        for score in scores:
            main = next(iter(score.values))
            series[score.features][score.probe] = (score.values[main], score.intervals.get(main))
        if scores:
            main = metric_title(next(iter(scores[0].values)), result.task)
            yield interval_chart(title, series, y=f"{main}, or index" if of_sites else main)
