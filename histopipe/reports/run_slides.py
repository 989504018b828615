"""Slides in the report of a run: table of predictions, patches with the highest certainty, and heatmaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import Side
from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.evaluation.evaluate import positive_class
from histopipe.evaluation.levels import Level
from histopipe.evaluation.metrics import Metrics, decide
from histopipe.evaluation.predictions import PatchScores, scores_of
from histopipe.reports.heatmap_sources import SlideImages, find_slide, open_values
from histopipe.reports.html_page import (
    Block,
    Cell,
    Column,
    Gallery,
    Picture,
    Row,
    Table,
    Text,
    fitted,
    heatmap_image,
    number,
)
from histopipe.reports.run_data import RunData
from histopipe.runs.task_config import BagTrainConfig

_PATCHES = 8
_PATCH_SIDE = 112
_MAX_HEATMAPS = 24
_ERRORS = 20
_ORIGIN = ("site", "vendor", "route", "jpeg_generations", "tissue", "focus", "pen")


def slide_table(run: RunData) -> Table | None:
    """Return a table of all validation and test slides, or bags. Return None if there are none."""
    sides = run.predictions.items()
    rows = [row for side, scores in sides for row in _slide_rows(run, side, scores)]
    if not rows:
        return None
    if isinstance(run.config, BagTrainConfig):
        what, item, unit = "Bags", run.config.bag, "bags"
    else:
        what, item, unit = "Slides (mean over patches)", "slide", "patches"
    columns = (
        Column(item), Column("patient"), Column("split"), Column(unit, True), Column("label"),
        Column("decided"), Column("correct"), *(Column(f"p {name}", True) for name in run.classes),
    )  # fmt: skip
    return Table(f"{what}: labels and predictions", columns, rows)


@dataclass(frozen=True, slots=True)
class _Decided:
    """The decision on a slide, or on a patient if the model takes bags of patients."""

    name: str
    patient: str
    patches: int
    labels: tuple[str, ...]
    decision: str
    probability: Sequence[float]

    @property
    def wrong(self) -> bool:
        """Whether the decision differs from its one label."""
        return len(self.labels) == 1 and self.labels[0] != self.decision


def _decisions(run: RunData, side: Side, patches: PatchScores) -> Iterator[_Decided]:
    level: Level = "patient" if patches.level == "patient" else "slide"
    positive = positive_class(run.classes, run.config.judging.positive)
    # Without labels, so that patches with different labels are aggregated too.
    blank = replace(patches, label=np.full(len(patches.label), -1, np.int32))
    scores = scores_of(blank, level, "mean", top_k=run.config.judging.top_k, positive=positive or 0)
    evaluation = run.result.metrics.get(side)
    metrics = evaluation.at(level, "mean") if evaluation else None
    threshold = metrics.threshold if isinstance(metrics, Metrics) else None
    decided = decide(scores, positive, threshold)
    group = patches.slide if level == "slide" else patches.patient
    names = patches.slides if level == "slide" else patches.patients
    for i, item in enumerate(scores.item.tolist()):
        members = np.flatnonzero(group == item)
        labels = np.unique(patches.label[members]).tolist()
        yield _Decided(
            names[item], patches.patients[patches.patient[members[0]]], len(members),
            tuple(run.classes[it] for it in labels), run.classes[decided[i]],
            scores.probability[i].tolist(),
        )  # fmt: skip


def _slide_rows(run: RunData, side: Side, patches: PatchScores) -> Iterator[Row]:
    for it in _decisions(run, side, patches):
        correct = Cell("")
        if len(it.labels) == 1:
            correct = Cell("no", tone="bad") if it.wrong else Cell("yes", tone="good")
        yield Row([
            Cell(it.name, tone="id"), Cell(it.patient), Cell(side), number(it.patches),
            Cell(it.labels[0] if len(it.labels) == 1 else "several"), Cell(it.decision), correct,
            *(number(p, 3) for p in it.probability),
        ])  # fmt: skip


def error_table(run: RunData, *, pictures: bool) -> Table | None:
    """Return the wrong decisions with the highest certainty, with quality and thumbnails of their slides."""
    side = run.judged.main[0]
    if side not in run.predictions:
        return None
    wrong = [it for it in _decisions(run, side, run.predictions[side]) if it.wrong]
    wrong.sort(key=lambda it: it.probability[run.classes.index(it.labels[0])])
    known = {it.slide: it for it in run.participants}
    images = SlideImages({}, run.stores)
    rows = []
    for number_of, it in enumerate(wrong[:_ERRORS]):
        slide = known.get(it.name)
        cells = [Cell(slide.value(name) if slide else "") for name in _ORIGIN]
        image = images.of(it.name) if pictures and run.stores else None
        shown = (
            [Picture.of(f"error-{number_of}", it.name, fitted(image))] if image is not None else []
        )
        rows.append(Row([
            Cell(it.name, tone="id"), Cell(it.patient), Cell(it.labels[0]), Cell(it.decision),
            number(it.probability[run.classes.index(it.labels[0])], 3), number(it.patches), *cells,
        ], shown))  # fmt: skip
    columns = (
        Column("slide"), Column("patient"), Column("label"), Column("decided"), Column("p of the label", True),
        Column("patches", True), *(Column(name) for name in _ORIGIN),
    )  # fmt: skip
    title = (
        f"{side.capitalize()}: {len(wrong)} wrong decisions, those with the highest certainty first"
    )
    return Table(title, columns, rows) if rows else None


def certain_patches(run: RunData) -> Iterator[Block]:
    """Yield galleries of the correctly and wrongly classified patches of each class with the highest certainty."""
    side = "test" if "test" in run.predictions else "validation"
    scores = run.predictions.get(side)  # type: ignore[call-overload]  # one of the two
    if scores is None or scores.level != "patch" or not run.stores:
        return
    yield Text(
        f"{side.capitalize()} patches; p is the predicted probability of the true class. "
        "Predictions are the most probable class, without the threshold.",
        "soft",
    )
    for code, name in enumerate(run.classes):
        of_class = np.flatnonzero(scores.label == code)
        p_true = scores.probability[of_class, code]
        correct = scores.probability[of_class].argmax(axis=1) == code
        for outcome, chosen, order in (("correct", correct, -p_true), ("wrong", ~correct, p_true)):
            rows = of_class[chosen][np.argsort(order[chosen], kind="stable")]
            pictures = list(islice(_patches(run, scores, rows, code), _PATCHES))
            if pictures:
                yield Gallery(f"{name}: {outcome} predictions with the highest certainty", pictures)


def _patches(
    run: RunData, scores: PatchScores, rows: NDArray[np.intp], code: int
) -> Iterator[Picture]:
    """Yield pictures of the patches that can be read."""
    for row in rows.tolist():
        slide = scores.slides[scores.slide[row]]
        pixels = _pixels(run, slide, int(scores.x_l0[row]), int(scores.y_l0[row]))
        if pixels is not None:
            place = f"x {scores.x_l0[row]}, y {scores.y_l0[row]}"
            caption = f"{slide}, {place}, p = {scores.probability[row, code]:.3f}"
            yield Picture.of(f"patch-{row}", caption, fitted(pixels, _PATCH_SIDE))


def _pixels(run: RunData, slide: str, x: int, y: int) -> NDArray[np.uint8] | None:
    found = find_slide(run.stores, slide)
    if found is None:
        return None
    store, slide_number = found
    try:
        index = store.index(slide_number)
        rows = np.flatnonzero((index["x_l0"] == x) & (index["y_l0"] == y))
        return store.read(store.records[slide_number].id, int(rows[0])) if len(rows) else None
    except (DamagedStore, UsageError):
        return None


def heatmaps(run: RunData) -> Gallery | None:
    """Return heatmaps of some validation and test slides, or None if there are none."""
    made: list[Picture] = []
    name = None
    if not isinstance(run.config, BagTrainConfig):
        positive = positive_class(run.classes, run.config.judging.positive)
        name = run.classes[-1 if positive is None else positive]
    images = SlideImages({}, run.stores)
    try:
        slides, read_values = open_values(run.folder, run.stores, name)
    except UsageError:
        return None  # a bag model without attention
    for slide in slides:
        if len(made) == _MAX_HEATMAPS:
            break
        with suppress(NothingToDo, DamagedStore, UsageError):
            values = read_values(slide)
            if values is not None:
                image = heatmap_image(values, images.of(slide))
                made.append(Picture.of(f"heat-{len(made)}", f"{slide}: {values.name}", image))
    title = "Dark purple is 0, yellow is 1. Areas without colour are not in validation or test."
    return Gallery(title, made) if made else None
