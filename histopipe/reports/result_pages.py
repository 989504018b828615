"""Reports of a finished run and of a folder of predictions: metrics, curves, slides, settings and limitations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.evaluation.evaluate import remarks, with_interval
from histopipe.evaluation.unusual import unusual_text
from histopipe.predicting.external_evaluation import (
    EVALUATED,
    PARTICIPANTS,
    ExternalEvaluation,
    mean_text,
    read_evaluation,
)
from histopipe.predictions.patch_values import SlideImages, open_stores
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
    metric_cards,
    sentences,
    shortcut_warning,
)
from histopipe.reports.failures import confident_patches, decisions
from histopipe.reports.heatmap import heatmap_gallery
from histopipe.reports.html_page import (
    Block,
    Cell,
    Page,
    Table,
    number,
    values_block,
)
from histopipe.reports.pixel_errors import pixel_errors
from histopipe.runs import folder as run_folder
from histopipe.runs.run import Run
from histopipe.splits.slide_table import (
    Exclusion,
    SlideEntry,
    read_slide_table,
)
from histopipe.store.store import Store
from histopipe.system.files import read_json, reading
from histopipe.system.output import counted, listed
from histopipe.system.table_cells import is_number
from histopipe.system.table_files import read_dicts
from histopipe.tasks.predictions import EvaluationSettings, joined_predictions, scores_of

_MOST_ROWS = 5000
"""Most rows of a table of slides."""


def stores_of_pictures(
    run: Run, stores: Sequence[Path], stack: ExitStack, *, follow: bool
) -> tuple[list[Store], list[str]]:
    """Open `stores`, or with `follow` those of the run or its features. Return them, and what is missing."""
    if not follow and not stores:
        return [], ["No pictures of patches and slides: use --store to name the stores."]
    opened, missing = open_stores(run, stores, stack)
    notes = [f"No pictures of patches and slides: {reason}." for reason in missing]
    if run.config.on_bags and not opened and not notes:
        notes.append("No heatmaps of attention: use --store to name the store of the patches.")
    return opened, notes


def run_page(
    run: Run,
    description: Mapping[str, Any],
    *,
    stores: Sequence[Path],
    pictures: bool,
    follow: bool,
) -> Page:
    """Return the page of a finished run, which `description` describes. `stores` and `follow` as for `stores_of_pictures`."""
    evaluated, config, positive = run.evaluated, run.config, run.evaluated.task.positive
    values, classes = config.values(), run.metrics_file["classes"]
    network = f"bags, {values['pooling']}" if config.on_bags else values["model"]
    subject = (
        " vs. ".join(classes)
        if evaluated.task.by_class
        else f"{config.task} of {', '.join(config.target_columns)}"
    )
    folder = run.folder
    page = Page(f"Run {folder.resolve().name}", f"{network}, {subject}, in {folder}")
    page.add("Summary", *_summary(run, description))
    add_metrics(page, evaluated)
    page.add("Learning curves", _learning_curves(run))
    page.add("Slides", _slide_table(run))
    with ExitStack() as stack:
        opened, missing = stores_of_pictures(run, stores, stack, follow=follow)
        images = SlideImages({}, opened) if pictures else None
        if images is not None:
            page.add("Patches", *confident_patches(evaluated, opened), *pixel_errors(run, opened))
            page.add(
                "Heatmaps",
                heatmap_gallery(
                    run,
                    images,
                    "Dark purple is 0, yellow is 1. Areas without colour are not in validation or test.",
                    None if config.on_bags else classes[-1 if positive is None else positive],
                ),
            )
        add_analysis(page, evaluated, run.slides, images)
    page.add("Splits", *_splits(run))
    page.add("Configuration", values_block("All settings, as in config.toml", values))
    page.add("Environment", _environment(run))
    page.add(
        "Limitations",
        Block("notes", [*description["evaluation"]["limitations"], *_limitations(run), *missing]),
    )
    return page


def _summary(run: Run, description: Mapping[str, Any]) -> Iterator[Block]:
    subset, evaluation = run.evaluated.main
    name = "Test set" if subset == "test" else "Validation set (there is no test set)"
    yield Block("text", f"{name}. {INTERVALS}", tone="soft")
    yield Block("cards", metric_cards(run.evaluated))
    result, rule = run.result, description["training"]["selection_rule"]
    if subset in result.covariates_only:
        metric, title = next(iter(run.evaluated.task.main.items()))
        yield Block(
            "text",
            f"A model of the covariates alone ({', '.join(getattr(run.config, 'covariates', ()))}): {title} "
            f"{with_interval(result.covariates_only[subset].finest, metric)}.",
        )
        yield from [Block("text", text) for text in sentences([result.added_text(subset)])]
    yield Block(
        "text",
        f"Model after epoch {result.best_epoch} of {result.epochs}, "
        f"{'the last one: there is no validation set' if rule is None else f'which has {rule}'}. "
        f"Training took {result.seconds:,.0f} s.",
    )
    yield from shortcut_warning(run.evaluated)
    for remark in remarks(evaluation):
        yield Block("text", f"Warning: {name.lower()}, {remark}.", tone="bad")
    if run.splits.split_by == "patch":
        yield Block(
            "text",
            "Split by patch: test patches are neighbours of training patches. Metrics are not valid for new slides.",
            tone="bad",
        )


def _learning_curves(run: Run) -> Block | None:
    path = run.folder / run_folder.HISTORY
    with reading(path):
        history = [
            {name: float(cell) if cell else None for name, cell in row.items()}
            for row in read_dicts(path)
        ]
    if not history:
        return None
    epochs = [row.get("epoch") or 0.0 for row in history]
    metric, metric_title = next(iter(run.evaluated.task.main.items()))
    made = [
        charts.lines(
            title,
            epochs,
            {
                name: [row.get(f"{prefix}{column}") for row in history]
                for name, prefix in (("training", ""), ("validation", "val_"))
                if f"{prefix}loss" in history[0]
            },
            x="epoch",
            y=y,
            mark=float(run.result.best_epoch),
        )
        for title, column, y in (("Loss", "loss", "loss"), (metric_title, metric, metric_title))
    ]
    rates = [row.get("learning_rate") for row in history]
    if len(set(rates)) > 1:
        curves = {"learning rate": rates}
        made.append(charts.lines("Learning rate", epochs, curves, x="epoch", y="rate"))
    return Block("charts", made)


def _slide_table(run: Run) -> Table:
    """Return a table of all validation and test slides, or bags, with their labels or targets, and predictions."""
    first, task = next(iter(run.evaluated.predictions.values())), run.evaluated.task
    of_patches, settings = first.level == "patch", run.evaluated.evaluation_settings
    annotated = getattr(run.config, "labels_from", "slide") == "annotation"
    if task.of_classes:
        what, rows = "labels", _class_rows(run.evaluated, annotated=annotated)
        columns = [
            "patches" if of_patches else "bags",
            # Most annotated slides have several labels.
            *(task.classes if annotated else ("label", "decided")),
            "correct",
            *(f"p {name}" for name in task.classes),
        ]
    else:
        what, rows = "targets", _target_rows(run.evaluated)
        columns = [*task.item_values(scores_of(first, first.unit, "mean", settings))]
    title = "Slides (mean over patches)" if of_patches else "Bags"
    head = list(islice(rows, _MOST_ROWS))
    cut = f" (the first {_MOST_ROWS:,})" if next(rows, None) else ""
    return Table(
        f"{title}: {what} and predictions{cut}",
        (first.unit, "patient", "split", *columns),
        head,
    )


def _class_rows(evaluated: EvaluatedPredictions, *, annotated: bool) -> Iterator[list[Cell]]:
    """Yield a row per slide. If its patches are `annotated`, it has their numbers and share of correct decisions."""
    for subset in evaluated.predictions:
        for slide in decisions(evaluated, subset):
            if annotated:
                cells = [
                    *(number(slide.counts.get(name, 0)) for name in evaluated.task.classes),
                    number(100 * slide.right, unit=" %"),
                ]
            elif not slide.label:
                cells = [Cell("several"), Cell(slide.decision), Cell("")]
            else:
                correct = Cell("no", tone="bad") if slide.wrong else Cell("yes", tone="good")
                cells = [Cell(slide.label), Cell(slide.decision), correct]
            yield [
                Cell(slide.name, tone="id"),
                Cell(slide.patient),
                Cell(subset),
                number(slide.patches),
                *cells,
                *(number(p, 3) for p in slide.probability.values()),
            ]


def _target_rows(evaluated: EvaluatedPredictions) -> Iterator[list[Cell]]:
    """Yield a row per slide with its targets, and the predictions that a user sees."""
    for subset, predictions in evaluated.predictions.items():
        means = scores_of(predictions, predictions.unit, "mean", evaluated.evaluation_settings)
        columns = predictions.task.item_values(means).values()
        for name, patient, *values in zip(
            means.ids(predictions.unit), means.patient, *columns, strict=True
        ):
            yield [
                Cell(name, tone="id"),
                Cell(predictions.patients[patient]),
                Cell(subset),
                *(
                    number(None) if math.isnan(value) else Cell(f"{value:.4g}", float(value), "n")
                    for value in values
                ),
            ]


def _splits(run: Run) -> Iterator[Block | Table]:
    splits, classes = run.splits, run.metrics_file["classes"]
    how = f"by {splits.split_by}" if splits.column is None else f"from column {splits.column}"
    annotated = getattr(run.config, "labels_from", None) == "annotation"
    yield Block(
        "text",
        f"Split {how}, algorithm {splits.algorithm}, seed {splits.seed}"
        f"{', patch classes from annotations' if annotated else ''}. Written before training.",
    )
    counts = splits.count()
    yield Table(
        f"{run.config.unit.capitalize()} by split and class",
        ("split", *classes),
        [[Cell(subset), *(number(counts[subset][name]) for name in classes)] for subset in counts],
    )
    sites = Counter((slide.site or "no site", str(slide.label)) for slide in splits.slides)
    names = sorted({site for site, _ in sites})
    if len(names) > 1:
        items = "Patients" if getattr(run.config, "bag", "slide") == "patient" else "Slides"
        yield Table(
            f"{items} by site and label. If a site has only one label, the model can learn the site instead.",
            ("site", *classes),
            [[Cell(s), *(number(sites[s, c]) for c in classes)] for s in names],
        )


def _environment(run: Run) -> Block:
    metrics, gpu_bytes = run.metrics_file, run.result.gpu_bytes
    return values_block(
        "Environment of the training",
        {
            **{name: metrics.get(name) for name in ("histopipe", "tensorflow", "keras")},
            **metrics.get("environment", {}),
            "devices": f"{metrics.get('replicas', 1)} ({run.config.devices})",
            "patches per device at a time": metrics.get("micro_batch", ""),
            "precision": run.config.precision,
            "deterministic": run.config.deterministic,
            "peak host memory": f"{run.result.host_bytes / 1e9:,.2f} GB",
            "peak GPU memory": "no GPU" if gpu_bytes is None else f"{gpu_bytes / 1e9:,.2f} GB",
        },
        is_open=True,
    )


def _limitations(run: Run) -> Iterator[str]:
    skipped = run.metrics_file.get("skipped")
    if skipped:
        yield f"{skipped} damaged {run.config.unit} were left out."
    if run.result.gpu_bytes is None:
        yield "GPU memory was not measured: no GPU was used."


_NAMES = ("slide", "patient", "label", "predicted", "decided")
"""Columns of names, also if these look like numbers: `007` is not 7."""


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
            page.add(
                "Heatmaps",
                heatmap_gallery(
                    PredictionsFolder(folder), images, "Dark purple is 0, yellow is 1."
                ),
            )
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
