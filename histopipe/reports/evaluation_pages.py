"""Reports of evaluations other than that of a run: a cross-validation, a comparison, and a folder of predictions.

A cross-validation has the metrics of each fold, and of all test sets together. Predictions have slides, heatmaps, and where
labels are known, an evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.breakdown import Breakdown, EvaluatedPredictions
from histopipe.evaluation.evaluate import (
    NARROW_FOLDS,
    Evaluation,
    main_metric,
    pooled_text,
    remarks,
)
from histopipe.evaluation.label_errors import read_label_errors
from histopipe.evaluation.learning_curve import LearningCurve
from histopipe.evaluation.prediction_sets import PredictionSets
from histopipe.evaluation.unusual import unusual_text
from histopipe.predicting.evaluate import (
    EVALUATED,
    PARTICIPANTS,
    ExternalEvaluation,
    read_evaluation,
)
from histopipe.predictions.patch_values import SlideImages
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.predictions.sources import (
    PATIENTS,
    SETTINGS,
    SLIDES,
    PredictionsFolder,
    labelled_patches,
)
from histopipe.reports import charts
from histopipe.reports.evaluation_blocks import (
    INTERVALS,
    add_analysis,
    add_metrics,
    level_title,
    metric_cards,
    sentences,
)
from histopipe.reports.failures import label_blocks
from histopipe.reports.heatmap import heatmap_gallery
from histopipe.reports.html_page import Block, Cell, Page, Table, number, values_block
from histopipe.reports.run_description import OTHER_DATA_UNKNOWN
from histopipe.reports.run_report import stores_of_pictures
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.run import Run, mean_text
from histopipe.runs.task_config import CONFIGS, make_config
from histopipe.splits.slide_table import (
    Exclusion,
    SlideEntry,
    flow_from_json,
    read_slide_table,
)
from histopipe.store.store import Store
from histopipe.studies.fold_results import leaked_from, read_parts, tested_slides
from histopipe.studies.study_settings import FoldSettings
from histopipe.system.files import read_json, reading
from histopipe.system.output import counted, listed
from histopipe.system.settings import read_settings, split_settings
from histopipe.system.table_files import is_number, read_dicts
from histopipe.tasks.predictions import joined_predictions
from histopipe.tasks.registry import TASKS
from histopipe.tasks.task import EvaluationSettings

SUMMARY = "summary.json"
_NAMES = ("slide", "patient", "label", "predicted", "decided")
"""Columns of names, also if these look like numbers: `007` is not 7."""


def cross_validation_page(
    folder: Path, *, stores: Sequence[Path], pictures: bool, follow: bool
) -> Page:
    """Return the page of a cross-validation with at least one finished fold. `stores` and `follow` as for `stores_of_pictures`.

    Raises:
        UsageError: no fold is finished.
        DamagedStore: the folder cannot be read.
    """
    settings = read_settings(folder / run_folder.CONFIG, *CONFIGS, FoldSettings)
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
        Block(
            "text",
            _how_summarized(summary),
            tone="soft",
        ),
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
    rows = read_label_errors(folder)
    page.add("Labels to check", *label_blocks(rows, evaluated, summary.get("label_errors", "")))
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
    yield Block("charts", [charts.learning_chart(curve)])
    yield Block("notes", curve.lines)


def _pooled_evaluation(
    summary: Mapping[str, Any], config: TrainConfig, runs: Sequence[Run]
) -> EvaluatedPredictions:
    parts = read_parts(runs)
    # Cross-validations of earlier versions have no number of patients of the training.
    of_folds = Evaluation.from_json(summary.get("within_folds") or summary["pooled"])
    of_folds = replace(of_folds, in_training=len(leaked_from(runs)))
    breakdown = summary.get("breakdown")
    return EvaluatedPredictions(
        {"test": of_folds},
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
    )
    if summary.get("seeds"):
        return (
            f"Means over the seeds. {within} Brackets show 95 % intervals for other patients and other seeds. Numbers, and decisions "
            "or survival curves, are of the first seed; in other charts, each slide counts once per seed."
        )
    return (
        f"All test sets together{', each with the thresholds of its fold' if task.probabilities else ''}. {within} {INTERVALS}"
        + (f" {NARROW_FOLDS}" if task.ranked != "pearson" else "")
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


def predictions_page(folder: Path, *, stores: Sequence[Path], pictures: bool) -> Page:
    """Return the page of a folder of `histopipe predict`.

    Raises:
        DamagedStore: the folder cannot be read.
    """
    try:
        settings: Mapping[str, Any] = read_json(folder / SETTINGS)
        # A model that takes all slides of a patient together predicts patients only.
        table = SLIDES if (folder / SLIDES).exists() else PATIENTS
        slides = list(read_dicts(folder / table))
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedStore(
            f"{folder} cannot be read", found=str(error)[:200], todo="run `histopipe predict` again"
        ) from error
    what = table.removesuffix(".csv")
    page = Page(
        f"Predictions {folder.resolve().name}", f"{len(slides):,} {what}, by {settings.get('run')}"
    )
    external, slide_entries = read_evaluation(folder), read_slide_table(folder / PARTICIPANTS)
    shares = {row[what[:-1]]: float(row["unusual"]) for row in slides if row.get("unusual")}
    unusual = unusual_text(shares, settings)
    failed = [slide.slide for slide in slide_entries if slide.reason is Exclusion.PREDICTION_FAILED]
    missing = (
        [Block("text", f"Failed, and not predicted: {listed(failed)}.", tone="bad")]
        if failed
        else []
    )
    missing += [Block("text", f"Warning: {unusual}.", tone="bad")] if unusual else []
    with ExitStack() as stack:
        opened = [stack.enter_context(Store(path)) for path in stores]
        images = SlideImages({}, opened, PredictionsFolder(folder)) if pictures else None
        if external is None:
            page.add(
                "Summary",
                _counts(slides, what),
                Block("text", "No labels are known, so there are no metrics."),
                *missing,
            )
        else:
            evaluated = _external_evaluation(folder, external)
            page.add(
                "Summary",
                Block("text", f"Slides with known labels. {INTERVALS}", tone="soft"),
                Block("cards", metric_cards(evaluated)),
                *missing,
                *_warnings(external, settings),
                *_how_predicted(settings, slide_entries),
            )
            add_metrics(page, evaluated)
            add_analysis(page, evaluated, slide_entries, images, read="Predicted")
        page.add(what.capitalize(), _prediction_table(slides, what))
        if images is not None:
            page.add("Heatmaps", heatmap_gallery(folder, images, "Dark purple is 0, yellow is 1."))
    page.add("Settings", values_block("Settings of the predictions", settings, is_open=True))
    page.add("Limitations", Block("notes", list(_prediction_limitations(external))))
    return page


def _counts(slides: Sequence[Mapping[str, str]], what: str) -> Block:
    decided = Counter(row["decided"] or "no patches" for row in slides if "decided" in row)
    return Block(
        "cards",
        [
            (what, f"{len(slides):,}", ""),
            *[(f"decided {name}", f"{count:,}", "") for name, count in sorted(decided.items())],
        ],
    )


def _external_evaluation(folder: Path, external: ExternalEvaluation) -> EvaluatedPredictions:
    """Return the evaluation with the predictions that it evaluates."""
    source = PredictionsFolder(folder)
    if (folder / EVALUATED).exists():
        predictions = read_predictions(folder / EVALUATED)["test"]
    else:
        parts = [
            source.read(slide)
            for slide in source.predicted_slides
            if source.path_of(slide, ".csv").exists()
        ]
        predictions = joined_predictions(labelled_patches(parts))
    return EvaluatedPredictions(
        {"test": external.evaluation},
        {"test": predictions},
        EvaluationSettings(positive=external.positive),
        external.breakdown,
        external.flow,
        sets=external.sets,
    )


def _warnings(external: ExternalEvaluation, settings: Mapping[str, Any]) -> Iterator[Block]:
    """Yield what a reader must know of the metrics."""
    leaked = external.in_training
    if leaked:
        names = ", ".join(leaked[:10]) + (", …" if len(leaked) > 10 else "")
        yield Block(
            "text",
            f"Warning: the training used {len(leaked)} of these slides or patients ({names}), which makes the metrics too "
            "good.",
            tone="bad",
        )
    temperatures = list(chain.from_iterable(settings.get("temperature", ())))
    if temperatures:
        of_training = (
            "temperatures of the trainings"
            if len(temperatures) > 1
            else "temperature of the training"
        )
        values = ", ".join(f"{value:.3f}" for value in temperatures)
        yield Block("text", f"The logits are divided by the {of_training} ({values}).")


def _how_predicted(settings: Mapping[str, Any], slides: Sequence[SlideEntry]) -> Iterator[Block]:
    """Yield that predictions are means of models, and which slides calibrated them."""
    calibrating = sum(slide.reason is Exclusion.CALIBRATES for slide in slides)
    if calibrating:
        text = (
            f"Probabilities and thresholds were fitted to {counted(calibrating, 'slide')} that no training has used; metrics are of the "
            "other patients. The files of single slides have the outputs of the models without this."
        )
        yield Block("text", text)
    elif settings.get("models"):
        yield from (Block("text", text) for text in sentences([mean_text(settings["models"])]))


def _prediction_table(slides: Sequence[Mapping[str, str]], what: str) -> Table | None:
    if not slides:
        return None
    return Table(
        f"All {what}",
        list(slides[0]),
        [[_prediction_cell(row, name) for name in row] for row in slides],
    )


def _prediction_cell(row: Mapping[str, str], name: str) -> Cell:
    text = row[name]
    if name == "decided" and text and row.get("label"):
        return Cell(text, tone="good" if text == row["label"] else "bad")
    if name not in _NAMES and is_number(text):
        return Cell(f"{float(text):.4g}", float(text), "n")
    return Cell(text)


def _prediction_limitations(external: ExternalEvaluation | None) -> Iterator[str]:
    if external is not None:
        yield from sentences(sorted(external.evaluation.notes))
        yield "Thresholds are those of the training. They were not adapted to these slides."
    yield "Slides that were used in the training under another name are not found."
