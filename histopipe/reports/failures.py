"""Failure analysis: wrong decisions with the highest certainty and largest errors, with their slides and positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UsageError
from histopipe.reports.evaluation_blocks import EvaluatedPredictions
from histopipe.reports.heatmap_values import SlideImages, find_slide
from histopipe.reports.html_page import (
    SIDE,
    Block,
    Cell,
    Column,
    Gallery,
    Picture,
    Row,
    Table,
    Text,
    number,
)
from histopipe.slides.thumbnail import resize_image
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.subsets import SUBSETS, Subset
from histopipe.store.store import Store
from histopipe.tasks.predictions import ModelPredictions, scores_of
from histopipe.tasks.task import Predictions

_MOST = 20
_PATCHES = 8
_PATCH_SIDE = 112
_FACTS = ("site", "vendor", "route", "jpeg_generations", "tissue", "focus", "pen")


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision on a slide, or on a patient if the model takes bags of patients."""

    name: str
    patient: str
    patches: int
    labels: tuple[str, ...]
    counts: Mapping[str, int]
    """Number of patches by label."""
    right: float
    """Share of its patches that are decided correctly."""
    decision: str
    probability: Sequence[float]

    @property
    def wrong(self) -> bool:
        """Whether the decision differs from its one label."""
        return len(self.labels) == 1 and self.labels[0] != self.decision


def failure_blocks(
    evaluated: EvaluatedPredictions,
    slides: Sequence[SlideEntry],
    images: SlideImages | None,
) -> Iterator[Block]:
    """Yield tables of the errors with the highest certainty: of slides and patches, or of numbers.

    Args:
        evaluated: the evaluation with its predictions.
        slides: facts of the slides.
        images: thumbnails of the slides, and stores of the patches; None for no pictures.
    """
    if not evaluated.task.of_classes:
        yield from _target_errors(evaluated)
        return
    subset, _ = evaluated.main
    wrong = [slide for slide in decisions(evaluated, subset) if slide.wrong]
    if wrong:
        yield _slide_errors(evaluated, wrong, slides, images)
    yield from _patch_errors(evaluated, () if images is None else images.stores)


def _parts(evaluated: EvaluatedPredictions, subset: Subset) -> Sequence[ModelPredictions]:
    """Return the predictions of a subset, each with the thresholds of its model."""
    if evaluated.parts and subset == evaluated.main[0]:
        return evaluated.parts
    if subset not in evaluated.predictions:
        return []
    return [(evaluated.predictions[subset], evaluated.evaluations[subset].thresholds)]


def decisions(evaluated: EvaluatedPredictions, subset: Subset) -> Iterator[Decided]:
    """Yield the decision on each slide, or patient, of a subset."""
    for part in _parts(evaluated, subset):
        predictions, thresholds = part
        # Without labels, so that patches with different labels are aggregated too.
        scores = scores_of(
            predictions.without_targets(),
            predictions.unit,
            "mean",
            evaluated.evaluation_settings,
            thresholds,
        )
        classes = evaluated.task.classes
        decided = scores.task.decide(scores.output, scores.limits)
        group, names = predictions.owner(predictions.unit)
        right, label = _decided_patches(evaluated, part) == predictions.label, predictions.label
        for i, item in enumerate(scores.owner(predictions.unit)[0].tolist()):
            members = np.flatnonzero(group == item)
            numbers, counts = np.unique(label[members], return_counts=True)
            labels = [classes[number] for number in numbers.tolist()]
            yield Decided(
                names[item], predictions.patients[predictions.patient[members[0]]], len(members),
                tuple(labels), dict(zip(labels, counts.tolist(), strict=True)), float(right[members].mean()),
                classes[decided[i]], scores.output[i].tolist(),
            )  # fmt: skip


def _slide_errors(
    evaluated: EvaluatedPredictions,
    wrong: list[Decided],
    slides: Sequence[SlideEntry],
    images: SlideImages | None,
) -> Table:
    """Return the wrong decisions on slides with quality and thumbnails, the highest certainty first."""

    def of_label(decided: Decided) -> float:
        return decided.probability[evaluated.task.classes.index(decided.labels[0])]

    level = evaluated.predictions[evaluated.main[0]].level
    of_slides = level != "patient"
    slide_entries = {entry.slide if of_slides else entry.patient: entry for entry in slides}
    counts = Counter[str]()
    for entry in slides:
        owner = entry.slide if of_slides else entry.patient
        counts[owner] += sum(getattr(entry, subset) for subset in SUBSETS)
    facts = [
        name for name in _FACTS if of_slides and len({entry.value(name) for entry in slides}) > 1
    ]
    rows = []
    for i, decided in enumerate(sorted(wrong, key=of_label)[:_MOST]):
        slide = slide_entries.get(decided.name)
        image = images.of(decided.name) if images is not None and of_slides else None
        patches = decided.patches if level == "patch" else counts[decided.name]
        pictures = (
            []
            if image is None
            else [Picture.of(f"error-{i}", decided.name, resize_image(image, SIDE))]
        )
        rows.append(Row([
            Cell(decided.name, tone="id"), Cell(decided.patient), Cell(decided.labels[0]), Cell(decided.decision),
            number(of_label(decided), 3), number(patches or None), *(Cell(slide.value(name) if slide else "") for name in facts),
        ], pictures))  # fmt: skip
    columns = (
        Column("slide" if of_slides else "patient"), Column("patient"), Column("label"), Column("decided"),
        Column("p of the label", True), Column("patches", True), *(Column(name.replace("_", " ")) for name in facts),
    )  # fmt: skip
    subset = evaluated.main[0].capitalize()
    title = f"{subset}: {len(wrong)} wrong decisions, those with the highest certainty first"
    return Table(title, columns, rows)


def _decided_patches(evaluated: EvaluatedPredictions, part: ModelPredictions) -> NDArray[np.intp]:
    """Return the (N,) decided classes of patches."""
    scores = scores_of(part[0], "patch", "mean", evaluated.evaluation_settings, part[1])
    return scores.task.decide(scores.output, scores.limits)


def _patch_errors(evaluated: EvaluatedPredictions, stores: Sequence[Store]) -> Iterator[Table]:
    """Yield the wrong decisions on patches with their positions, the highest certainty first."""
    subset, count = evaluated.main[0], 0
    errors: list[tuple[float, str, str, int, int, str, str]] = []
    for part in _parts(evaluated, subset):
        patches = part[0]
        if patches.level != "patch":
            continue
        decided, labels = _decided_patches(evaluated, part), patches.label
        wrong = np.flatnonzero(decided != labels)
        of_label = patches.output[wrong, labels[wrong]]
        count += len(wrong)
        for row, p in zip(
            wrong[np.argsort(of_label, kind="stable")][:_MOST].tolist(),
            np.sort(of_label),
            strict=False,
        ):
            errors.append((
                float(p), patches.slides[patches.slide[row]], patches.patients[patches.patient[row]],
                int(patches.x_l0[row]), int(patches.y_l0[row]),
                evaluated.task.classes[labels[row]], evaluated.task.classes[decided[row]],
            ))  # fmt: skip
    rows = []
    for i, (p, slide, patient, x, y, label, decision) in enumerate(sorted(errors)[:_MOST]):
        pixels = _pixels(stores, slide, x, y)
        caption = f"{slide}, x {x}, y {y}"
        pictures = [] if pixels is None else [Picture.of(f"patch-error-{i}", caption, resize_image(pixels, 2 * _PATCH_SIDE))]  # fmt: skip
        rows.append(Row([
            Cell(slide, tone="id"), Cell(patient), number(x), number(y), Cell(label), Cell(decision), number(p, 3),
        ], pictures))  # fmt: skip
    if rows:
        columns = (
            Column("slide"), Column("patient"), Column("x", True), Column("y", True), Column("label"),
            Column("decided"), Column("p of the label", True),
        )  # fmt: skip
        yield Table(
            f"{subset.capitalize()}: {count:,} wrong decisions on patches, those with the highest certainty first; x and y "
            "are the top left corner in pixels of level 0",
            columns, rows,
        )  # fmt: skip


def _target_errors(evaluated: EvaluatedPredictions) -> Iterator[Table]:
    """Yield the largest differences between predictions and targets; none for survival, where errors are not defined."""
    subset, _ = evaluated.main
    parts = [predictions for predictions, _ in _parts(evaluated, subset)]
    if not evaluated.task.of_values or not parts:
        return
    differences = [
        difference for predictions in parts for difference in _differences(predictions, evaluated)
    ]
    differences.sort(key=lambda difference: -difference[0])
    rows = [
        Row([
            Cell(name, tone="id"), Cell(patient), Cell(column), *(Cell(f"{value:.4g}", value, "n") for value in values),
        ])
        for _, name, patient, column, *values in differences[:_MOST]
    ]  # fmt: skip
    columns = (
        Column(parts[0].unit), Column("patient"), Column("column"),
        Column("true", True), Column("predicted", True), Column("difference", True),
    )  # fmt: skip
    yield Table(
        f"{subset.capitalize()}: largest errors first, in standard deviations of the column",
        columns,
        rows,
    )


def _differences(
    predictions: Predictions, evaluated: EvaluatedPredictions
) -> Iterator[tuple[float, str, str, str, float, float, float]]:
    """Yield size in standard deviations, slide or patient, patient, column, true and predicted value, and difference."""
    means = scores_of(predictions, predictions.unit, "mean", evaluated.evaluation_settings)
    names = means.ids(predictions.unit)
    for i, column in enumerate(predictions.task.columns):
        true, predicted = means.target[:, i], means.output[:, i]
        rows = np.flatnonzero(np.isfinite(true))
        deviation = float(true[rows].std()) or 1.0 if len(rows) else 1.0
        for row in rows.tolist():
            difference = float(predicted[row] - true[row])
            yield (
                abs(difference) / deviation, names[row], predictions.patients[means.patient[row]], column,
                float(true[row]), float(predicted[row]), difference,
            )  # fmt: skip


def certain_patches(evaluated: EvaluatedPredictions, stores: Sequence[Store]) -> Iterator[Block]:
    """Yield galleries of the correctly and wrongly classified patches of each class with the highest certainty."""
    subset = evaluated.main[0]
    parts = [part for part in _parts(evaluated, subset) if part[0].level == "patch"]
    if not evaluated.task.of_classes or not parts or not stores:
        return
    scores, _ = parts[0]
    decided = _decided_patches(evaluated, parts[0])
    yield Text(
        f"{subset.capitalize()} patches; p is the predicted probability of the true class.", "soft"
    )
    for code, name in enumerate(evaluated.task.classes):
        of_class = np.flatnonzero(scores.label == code)
        p_true = scores.output[of_class, code]
        correct = decided[of_class] == code
        for outcome, chosen, order in (("correct", correct, -p_true), ("wrong", ~correct, p_true)):
            rows = of_class[chosen][np.argsort(order[chosen], kind="stable")]
            pictures = list(islice(_patches(stores, scores, rows, code), _PATCHES))
            if pictures:
                yield Gallery(f"{name}: {outcome} decisions with the highest certainty", pictures)


def _patches(
    stores: Sequence[Store], scores: Predictions, rows: NDArray[np.intp], code: int
) -> Iterator[Picture]:
    """Yield pictures of the patches that can be read."""
    for row in rows.tolist():
        slide = scores.slides[scores.slide[row]]
        x, y = int(scores.x_l0[row]), int(scores.y_l0[row])
        pixels = _pixels(stores, slide, x, y)
        if pixels is not None:
            caption = f"{slide}, x {x}, y {y}, p = {scores.output[row, code]:.3f}"
            yield Picture.of(f"patch-{row}", caption, resize_image(pixels, _PATCH_SIDE))


def _pixels(stores: Sequence[Store], slide: str, x: int, y: int) -> NDArray[np.uint8] | None:
    place = find_slide(stores, slide)
    if place is None:
        return None
    store, slide_number = place
    try:
        index = store.index(slide_number)
        rows = np.flatnonzero((index["x_l0"] == x) & (index["y_l0"] == y))
        return store.read(store.records[slide_number].id, int(rows[0])) if len(rows) else None
    except (DamagedStore, UsageError):
        return None
