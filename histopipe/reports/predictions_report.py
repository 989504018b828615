"""Report of a folder of predictions: slides, heatmaps, and where labels are known, the evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore
from histopipe.inference.external_evaluation import (
    EVALUATED,
    PARTICIPANTS,
    ExternalEvaluation,
    read_evaluation,
)
from histopipe.predictions.sources import (
    PATIENTS,
    SETTINGS,
    SLIDES,
    PredictionsFolder,
    labelled_patches,
)
from histopipe.predictions.tables import read_predictions
from histopipe.reports.data_description import plain
from histopipe.reports.evaluation_blocks import EvaluatedPredictions, metric_cards
from histopipe.reports.evaluation_sections import add_analysis, add_metrics
from histopipe.reports.heatmap_values import SlideImages
from histopipe.reports.html_page import (
    Card,
    Cards,
    Cell,
    Column,
    NameValueTable,
    Notes,
    Page,
    Row,
    Table,
    Text,
)
from histopipe.reports.run_report import heatmap_gallery
from histopipe.splits.slide_table import Exclusion, SlideEntry, read_slide_table
from histopipe.store.store import Store
from histopipe.system.csv_files import is_number, read_dicts
from histopipe.system.files import read_json
from histopipe.system.output import listed
from histopipe.tasks.predictions import joined_predictions
from histopipe.tasks.task import EvaluationSettings

_NAMES = ("slide", "patient", "label", "predicted", "decided")
"""Columns of names, also if these look like numbers: `007` is not 7."""


def predictions_page(folder: Path, *, stores: Sequence[Path] = (), pictures: bool = True) -> Page:
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
    failed = [slide.slide for slide in slide_entries if slide.reason is Exclusion.PREDICTION_FAILED]
    missing = [Text(f"Failed, and not predicted: {listed(failed)}.", "bad")] if failed else []
    with ExitStack() as stack:
        opened = [stack.enter_context(Store(path)) for path in stores]
        if external is None:
            page.add(
                "Summary",
                _counts(slides, what),
                Text("No labels are known, so there are no metrics."),
                *missing,
            )
        else:
            images = SlideImages({}, opened, PredictionsFolder(folder)) if pictures else None
            notes = [*missing, *_notes(external, settings)]
            _add_evaluation(page, _evaluated(folder, external), notes, slide_entries, images)
        page.add(what.capitalize(), _table(slides, what))
        if pictures:
            images = SlideImages({}, opened, PredictionsFolder(folder))
            page.add("Heatmaps", heatmap_gallery(folder, images, "Dark purple is 0, yellow is 1."))
    facts = [(name, plain(value)) for name, value in settings.items()]
    page.add("Settings", NameValueTable("Settings of the predictions", facts, open=True))
    page.add("Limitations", Notes(list(_limitations(external))))
    return page


def _counts(slides: Sequence[Mapping[str, str]], what: str) -> Cards:
    cards = [Card(what, f"{len(slides):,}")]
    if slides and "decided" in slides[0]:
        decided = Counter(row["decided"] or "no patches" for row in slides)
        cards += [Card(f"decided {name}", f"{count:,}") for name, count in sorted(decided.items())]
    return Cards(cards)


def _evaluated(folder: Path, external: ExternalEvaluation) -> EvaluatedPredictions:
    """Return the evaluation with the predictions that it evaluates."""
    source = PredictionsFolder(folder)
    if (folder / EVALUATED).exists():
        predictions = read_predictions(folder / EVALUATED)["test"]
    else:
        parts = [source.read(slide) for slide in source.slides() if source.csv(slide).exists()]
        predictions = joined_predictions(labelled_patches(parts))
    return EvaluatedPredictions(
        {"test": external.evaluation}, {"test": predictions}, EvaluationSettings(positive=external.positive),
        external.breakdown, external.flow,
    )  # fmt: skip


def _notes(external: ExternalEvaluation, settings: Mapping[str, Any]) -> Iterator[Text]:
    """Yield what a reader must know of the metrics."""
    if external.in_training:
        some = ", ".join(external.in_training[:10]) + (
            ", …" if len(external.in_training) > 10 else ""
        )
        yield Text(
            f"Warning: the training used {len(external.in_training)} of these slides or patients ({some}), "
            "which makes the metrics too good.", "bad",
        )  # fmt: skip
    temperatures = [
        value for model_values in settings.get("temperature", ()) for value in model_values
    ]
    if temperatures:
        values = ", ".join(f"{value:.3f}" for value in temperatures)
        yield Text(
            f"The logits are divided by the temperature of the training ({values})."
            if len(temperatures) == 1
            else f"The logits are divided by the temperatures of the trainings ({values})."
        )


def _add_evaluation(
    page: Page,
    evaluated: EvaluatedPredictions,
    notes: Sequence[Text],
    slides: Sequence[SlideEntry],
    images: SlideImages | None,
) -> None:
    """Add the sections of an evaluation."""
    page.add(
        "Summary",
        Text("Slides with known labels. Brackets show 95 % confidence intervals, with patients as units.", "soft"),
        Cards(metric_cards(evaluated)), *notes,
    )  # fmt: skip
    add_metrics(page, evaluated)
    add_analysis(page, evaluated, slides, images, read="Predicted")


def _table(slides: Sequence[Mapping[str, str]], what: str) -> Table | None:
    if not slides:
        return None
    first = slides[0]
    columns = [Column(name, name not in _NAMES and is_number(first[name])) for name in first]
    rows = []
    for row in slides:
        cells = []
        for column in columns:
            text = row[column.name]
            value = float(text) if column.number and is_number(text) else None
            formatted = f"{value:.4g}" if value is not None else text
            cells.append(Cell(formatted, value, "n" if column.number else ""))
        if row.get("label") and row.get("decided"):
            at = list(row).index("decided")
            good = row["label"] == row["decided"]
            cells[at] = Cell(row["decided"], tone="good" if good else "bad")
        rows.append(Row(cells))
    return Table(f"All {what}", columns, rows)


def _limitations(external: ExternalEvaluation | None) -> Iterator[str]:
    if external is not None:
        notes = {note for _, metrics in external.evaluation.named() for note in metrics.notes}
        yield from (f"{note[0].upper()}{note[1:]}." for note in sorted(notes))
        yield "Thresholds are those of the training. They were not adapted to these slides."
    yield "Slides that were used in the training under another name are not found."
