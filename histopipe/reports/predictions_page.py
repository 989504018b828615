"""Report of a folder of predictions: slides, heatmaps and, where labels are known, an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.evaluation.unusual import unusual_text
from histopipe.predicting.external_evaluation import (
    EVALUATED,
    PARTICIPANTS,
    ExternalEvaluation,
    mean_text,
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
from histopipe.reports.evaluation_blocks import (
    INTERVALS,
    add_analysis,
    add_metrics,
    metric_cards,
    sentences,
)
from histopipe.reports.heatmap import heatmap_gallery
from histopipe.reports.html_page import Block, Cell, Page, Table, values_block
from histopipe.splits.slide_table import (
    Exclusion,
    SlideEntry,
    read_slide_table,
)
from histopipe.store.store import Store
from histopipe.system.files import read_json
from histopipe.system.output import counted, listed
from histopipe.system.table_files import is_number, read_dicts
from histopipe.tasks.predictions import joined_predictions
from histopipe.tasks.task import EvaluationSettings

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
