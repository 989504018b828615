"""Parts of a report that show an evaluation: of a run, of a cross-validation, or of predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation import evaluate
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.evaluation.subgroups import QUALITY, GroupMetrics
from histopipe.predictions.patch_values import SlideImages
from histopipe.reports import charts
from histopipe.reports.failures import failure_blocks, set_blocks, survival_charts
from histopipe.reports.html_page import Block, Card, Cell, Page, Table, number
from histopipe.splits.slide_table import Flow, SlideEntry, subsets_text
from histopipe.system.grouping import grouped_values
from histopipe.system.output import counted, listed, plural
from histopipe.tasks.choices import EvaluationLevel, Subset, TaskName
from histopipe.tasks.curves import Reliability, reliability_curve
from histopipe.tasks.intervals import TOO_FEW, Difference
from histopipe.tasks.metrics import Metrics
from histopipe.tasks.predictions import Predictions, joined_scores
from histopipe.tasks.statistics import Roc, confidence_of, roc_of
from histopipe.tasks.task import Task

_MOST_LEVELS = 4
"""Levels of all splits that fit one table on a page of 1,200 pixels."""
COLUMN_TITLES = {
    "planned": "patches",
    "dark": "folds and black",
    "jpeg_generations": "JPEG generations",
    "mpp": "µm per pixel",
    "label_source": "source of the label",
}
_LEVEL = 0.05
INTERVALS = "Brackets show 95 % confidence intervals, with patients as units."


def units_of(level: str) -> str:
    """Return the units of a level, such as "slides" of "slide_mean"."""
    return plural(level.partition("_")[0])


def level_title(level: str) -> str:
    """Return the name of a level as text, such as `slide, mean` of "slide_mean"."""
    return level.replace("_", ", ", 1)


def sentences(notes: Iterable[str]) -> list[str]:
    """Return notes as sentences."""
    return [f"{note[0].upper()}{note[1:]}." for note in notes if note]


def metric_cards(evaluated: EvaluatedPredictions) -> list[Card]:
    """Return cards with the main metrics."""
    cards = []
    patients = evaluated.main[1].finest.patients
    for level, metrics in shown_levels(evaluated.main[1]):
        for name, title in evaluated.task.main.items():
            few = any(note.startswith(TOO_FEW) for note in metrics.notes)
            value, _, interval = evaluate.with_interval(metrics, name).partition(" ")
            interval = interval or (TOO_FEW if few else "no interval")
            events = metrics.outcomes.get("events")
            interval += "" if events is None else f"; {counted(events, 'event')}"
            if metrics.patients < patients:
                interval += f"; {patients - metrics.patients} of {patients} patients left out"
            cards.append((f"{title}, {units_of(level)}", value, interval))
    return cards


def shown_levels(evaluation: evaluate.Evaluation) -> Iterator[tuple[str, Metrics]]:
    """Yield metrics of patches, and of means per slide and patient. Patients equal to slides are left out."""
    same = evaluate.same_as_slides(evaluation, "mean")
    for name, metrics in evaluate.informative_levels(evaluation):
        if name in ("patch", "slide_mean") or (name == "patient_mean" and not same):
            yield name, metrics


def metrics_blocks(evaluated: EvaluatedPredictions) -> Iterator[Block | Table]:
    """Yield tables of the metrics at all levels, one for each split if one is too wide, and remarks."""
    tables: dict[str, dict[str, Metrics]] = {}
    for subset, evaluation in evaluated.evaluations.items():
        tables[f", {subset}"] = {
            level_title(name): metrics for name, metrics in evaluate.informative_levels(evaluation)
        }
    notes = grouped_values(
        (f"{title[2:]}: {note}", level)
        for title, levels in tables.items()
        for level, metrics in levels.items()
        for note in metrics.notes
    )
    if sum(map(len, tables.values())) <= _MOST_LEVELS:
        tables = {
            "": {
                f"{title[2:]}: {level}": metrics
                for title, levels in tables.items()
                for level, metrics in levels.items()
            }
        }
    yield from (_metrics_table(evaluated.task, *table) for table in tables.items())
    if notes:
        every = max(map(len, notes.values()))
        yield Block(
            "notes",
            sentences(
                note if len(levels) == every else f"{note} ({'; '.join(levels)})"
                for note, levels in notes.items()
            ),
        )


def _metrics_table(task: Task, title: str, levels: Mapping[str, Metrics]) -> Table:
    """Return a table with a row per metric, also of single columns, and a column per level; the main metric comes first.

    Metrics that no level has are left out.
    """
    names = sorted(evaluate.METRIC_TITLES, key=next(iter(task.main)).__ne__)
    endings = dict.fromkeys(
        "".join(name.partition(":")[1:]) for metrics in levels.values() for name in metrics.values
    )
    patients = [
        Cell(listed([f"{count:,} {name}" for name, count in metrics.outcomes.items()]), tone="n")
        for metrics in levels.values()
    ]
    lines = {"n": [number(m.count) for m in levels.values()], "patients": patients} | {
        evaluate.metric_title(name + ending, task.name): [
            metric_cell(metrics, name + ending) for metrics in levels.values()
        ]
        for name in names
        for ending in endings
    }
    if task.of_classes:
        limits = [next(iter(metrics.thresholds.values), None) for metrics in levels.values()]
        lines["threshold"] = [number(limit, 3) for limit in limits]
    return Table(
        f"Metrics at all levels{title}",
        ("metric", *levels),
        [[Cell(name), *cells] for name, cells in lines.items() if any(cell.text for cell in cells)],
    )


def metric_cell(metrics: Metrics | GroupMetrics, name: str) -> Cell:
    """Return a cell with a metric and its interval; empty if it is undefined."""
    value = metrics.values.get(name)
    return Cell("" if value is None else evaluate.with_interval(metrics, name), value, "n")


def _curves(evaluated: EvaluatedPredictions) -> Iterator[Block | Table]:
    """Yield ROC and precision-recall curves, reliability diagrams and decision curves of classes or labels."""
    rocs: dict[str, dict[str, Roc]] = {}
    bins: dict[str, dict[str, Reliability]] = {}
    for subset in evaluated.predictions if evaluated.task.of_classes else ():
        level, settings = evaluated.predictions[subset].level, evaluated.evaluation_settings
        scores, _ = joined_scores(evaluated.models(subset), level, "mean", settings)
        confidence, event = confidence_of(scores.label, scores.output, evaluated.task.positive)
        curve = reliability_curve(confidence, event, scores.patient)
        bins.setdefault("Calibration", {})[subset] = curve
    for subset, title, name, event, part in _events(evaluated):
        probability = part.output[:, 0]
        roc = roc_of(
            event,
            probability,
            part.patient,
            fold=part.folds,
            patients=len(part.patients),
            seed=evaluated.evaluation_settings.seed,
        )
        if roc is not None:
            rocs.setdefault(title, {})[name] = roc
        if not evaluated.task.of_classes:  # the first, finest level has all labels
            bins.setdefault(f"Calibration, {subset}", {}).setdefault(
                name, reliability_curve(probability, event, part.patient)
            )
    yield Block(
        "charts",
        [
            *(charts.roc_chart(f"ROC, {title}", curves) for title, curves in rocs.items()),
            *(
                charts.precision_chart(f"Precision and recall, {title}", curves)
                for title, curves in rocs.items()
            ),
        ],
    )
    yield Block(
        "charts",
        [
            *(charts.calibration_chart(title, curves) for title, curves in bins.items()),
            *(
                charts.decision_chart(f"Decision curve, {units_of(level)}", metrics.decision_curve)
                for level, metrics in shown_levels(evaluated.main[1])
                if metrics.decision_curve is not None
            ),
        ],
    )
    if evaluated.calibration is not None:
        values = ", ".join(map(evaluate.number, evaluated.calibration.temperature))
        yield Block(
            "text",
            f"The logits are divided by a temperature that was fitted to the validation set: {values}.",
        )
        yield _temperature_table(evaluated)


def list_temperature_effects(
    evaluated: EvaluatedPredictions,
) -> list[tuple[Subset, str, Mapping[str, float | None], Mapping[str, float | None]]]:
    """Return split, level, and the metrics before and after the temperature; empty without one."""
    before = {} if evaluated.calibration is None else evaluated.calibration.before
    return [
        (subset, level, by_level[level], metrics.values)
        for subset, by_level in before.items()
        for level, metrics in shown_levels(evaluated.evaluations[subset])
    ]


def _temperature_table(evaluated: EvaluatedPredictions) -> Table:
    levels = list_temperature_effects(evaluated)
    names = [
        name for name in evaluate.METRIC_TITLES if any(name in before for *_, before, _ in levels)
    ]
    return Table(
        "Metrics before and after the temperature",
        ("split", "level", *(evaluate.METRIC_TITLES[name] for name in names)),
        [
            [
                Cell(subset),
                Cell(level_title(level)),
                *(
                    Cell(
                        f"{evaluate.number(before.get(name))} → {evaluate.number(values.get(name))}",
                        tone="n",
                    )
                    for name in names
                ),
            ]
            for subset, level, before, values in levels
        ],
    )


def _events(
    evaluated: EvaluatedPredictions,
) -> Iterator[tuple[Subset, str, str, NDArray[np.bool_], Predictions]]:
    """Yield split, title, name of the curve, (N,) events, and the items with their probability as the only output.

    For two classes there is one curve per split; for more, one per class on the main split; for labels, one per label
    and split, with a title for each split.
    """
    task = evaluated.task
    for level in get_args(EvaluationLevel):
        for subset in evaluated.predictions if task.has_thresholds else [evaluated.main[0]]:
            if level not in dict(task.levels(evaluated.predictions[subset].level)):
                continue
            settings = evaluated.evaluation_settings
            scores, _ = joined_scores(evaluated.models(subset), level, "mean", settings)
            for i, name in enumerate(task.classes or task.columns):
                target = scores.target[:, 0 if task.of_classes else i]
                rows = np.isfinite(target)
                if task.positive in (None, i) and rows.any():
                    yield (
                        subset,
                        plural(level) if task.of_classes else f"{plural(level)}, {subset}",
                        name if task.positive is None else subset,
                        target[rows] == (i if task.of_classes else 1),
                        replace(scores, output=scores.output[:, i : i + 1]).rows(rows),
                    )


def _scatter_charts(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield charts of true against predicted values."""
    yield Block(
        "charts",
        [
            charts.scatter_chart(
                f"{name}, {subset}", predictions.target[rows, i], predictions.output[rows, i]
            )
            for subset, predictions in evaluated.predictions.items()
            for i, (name, rows) in enumerate(
                zip(evaluated.task.columns, np.isfinite(predictions.target).T, strict=False)
            )
        ],
    )


def _pixel_charts(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield the calibration of the probabilities of pixels."""
    curves: dict[str, Reliability] = {
        subset: (evaluation.finest.reliability, (np.empty(0), np.empty(0)))
        for subset, evaluation in evaluated.evaluations.items()
    }
    yield Block("charts", [charts.calibration_chart("Calibration of pixels", curves)])


CHARTS: Mapping[
    TaskName, tuple[str, Callable[[EvaluatedPredictions], Iterator[Block | Table | None]]]
] = {
    "classification": ("ROC and calibration", _curves),
    "multilabel": ("ROC and calibration", _curves),
    "survival": ("Predictions", survival_charts),
    "segmentation": ("Calibration", _pixel_charts),
}
PREDICTION_CHARTS = "Predictions", _scatter_charts
"""Title and contents of the section with the charts, by task; of other tasks, true against predicted values."""


def confusions(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield the confusion matrices of the main split."""
    subset, evaluation = evaluated.main
    for level, metrics in shown_levels(evaluation):
        if metrics.confusion:
            threshold = "".join(f", threshold {limit:.3f}" for limit in metrics.thresholds.values)
            yield Block(
                "confusion",
                list(zip(evaluated.task.classes, metrics.confusion, strict=True)),
                f"{subset}: {level_title(level)}{threshold}",
            )


def subgroup_tables(evaluated: EvaluatedPredictions, *, quality: bool) -> Iterator[Block | Table]:
    """Yield a table of metrics by subgroup, of quality or of all other columns; and the number of comparisons."""
    by_column = [
        subgroups
        for subgroups in evaluated.breakdown.subgroups
        if (subgroups.column in QUALITY) == quality
    ]
    if not by_column:
        return
    task = evaluated.task
    main, *other_names = (
        name for name in task.by_subgroup if name in by_column[0].groups[0].values
    )
    title = evaluate.metric_title(main, task.name)
    yield Table(
        "Performance and quality of slides" if quality else "Performance by subgroup",
        (
            "column",
            "group",
            "n",
            "patients",
            title,
            f"{title} minus the rest",
            "p, all groups",
            *(evaluate.metric_title(name, task.name) for name in other_names),
        ),
        [
            [
                Cell(
                    f"{column_title(subgroups.column)} ({plural(subgroups.level)})", tone="nowrap"
                ),
                Cell(group.name, tone="nowrap"),
                number(group.count),
                Cell(_patients_text(group), group.patients, "n"),
                metric_cell(group, main),
                Cell(group.note, tone="soft")
                if group.note
                else difference_cell(group.differences.get(main)),
                number(group.p, 3),
                *(metric_cell(group, name) for name in other_names),
            ]
            for subgroups in by_column
            for group in subgroups.groups
        ],
    )
    tested = [
        g for column in evaluated.breakdown.subgroups for g in column.groups if g.p is not None
    ]
    if tested:
        yield Block(
            "text",
            f"Of {counted(len(tested), 'comparison')} of a group with the rest, in all columns of this page, {sum((g.p or 0) < _LEVEL for g in tested)} "
            f"have p < {_LEVEL}: p values hold for all of them together, intervals for each one alone.",
            tone="soft",
        )


def _patients_text(group: GroupMetrics) -> str:
    """Return the number of patients, and those of each class or of events."""
    outcomes = listed([f"{count:,} {name}" for name, count in group.outcomes.items()])
    return f"{group.patients:,}" + (f" ({outcomes})" if outcomes else "")


def column_title(column: str) -> str:
    """Return the title of a column of `slides.csv`."""
    return COLUMN_TITLES.get(column, column)


def difference_cell(difference: Difference | None) -> Cell:
    """Return a cell with a difference, with signs, and its interval; empty if there is none."""
    value, ends = (None, None) if difference is None else (difference.value, difference.interval)
    return Cell("" if value is None else evaluate.with_ends(value, ends, signed=True), value, "n")


def shortcut_blocks(evaluated: EvaluatedPredictions) -> Iterator[Block | Table]:
    """Yield how well the origin of slides predicts their labels, and a warning if it does so nearly as well as the model."""
    shortcut = evaluated.breakdown.shortcut
    if shortcut is None:
        return
    yield from shortcut_warning(evaluated)
    model = "" if shortcut.model_auc is None else f"; AUC of the model: {shortcut.model_auc:.3f}"
    yield Table(
        f"Labels predicted from the origin of slides, of {shortcut.patients} patients, cross-validated: "
        f"p = {shortcut.p:.3f}{model}",
        ("column", "AUC"),
        [
            [Cell(name), number(value, 3)]
            for name, value in sorted(shortcut.auc.items(), key=lambda entry: -entry[1])
        ],
    )


def shortcut_warning(evaluated: EvaluatedPredictions) -> Iterator[Block]:
    """Yield a warning if the origin of slides predicts their labels nearly as well as the model."""
    shortcut = evaluated.breakdown.shortcut
    if shortcut is not None and shortcut.warning:
        yield Block("text", f"Warning: {shortcut}", tone="bad")


def flow_blocks(flow: Flow, read: str = "Ingested") -> Iterator[Block | Table]:
    """Yield the figure, and a table with a row for each reason of exclusion and each subset.

    Yield nothing for runs of earlier versions, which have no flow. `read` is the title of what could be read.
    """
    if flow:
        yield Block("charts", [charts.flow_chart(flow, read)])
        lines = [
            line
            for level, numbers in flow.items()
            for line in (
                (level, "found", "", numbers.total),
                *((level, "excluded", reason, count) for reason, count in numbers.excluded.items()),
                *(
                    (level, "used", subsets_text(name), count)
                    for name, count in numbers.used.items()
                ),
            )
        ]
        yield Table(
            "Participant flow",
            ("level", "status", "reason or subset", "n"),
            [[*map(Cell, texts), number(count)] for *texts, count in lines],
        )


def add_metrics(page: Page, evaluated: EvaluatedPredictions) -> None:
    """Add the metrics with their charts."""
    page.add("Metrics", *metrics_blocks(evaluated))
    title, draw_charts = CHARTS.get(evaluated.task.name, PREDICTION_CHARTS)
    page.add(title, *draw_charts(evaluated))
    page.add("Confusion", *confusions(evaluated))


def add_analysis(
    page: Page,
    evaluated: EvaluatedPredictions,
    slides: Sequence[SlideEntry],
    images: SlideImages | None,
    *,
    read: str = "Ingested",
) -> None:
    """Add subgroups, failures and participant flow. `images` as for `failure_blocks`, `read` as for `flow_blocks`."""
    page.add("Subgroups", *subgroup_tables(evaluated, quality=False))
    page.add("Prediction sets", *set_blocks(evaluated.sets))
    page.add(
        "Failure analysis",
        *subgroup_tables(evaluated, quality=True),
        *failure_blocks(evaluated, slides, images),
        *shortcut_blocks(evaluated),
    )
    page.add("Participant flow", *flow_blocks(evaluated.flow, read))
