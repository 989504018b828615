"""Failure analysis: wrong decisions with the highest confidence and largest errors, with their slides and positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UsageError
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.reports.heatmap_values import SlideImages, find_slide
from histopipe.reports.html_page import SIDE, Block, Cell, Picture, Row, Table, number
from histopipe.slides.thumbnail import resize_image
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.subsets import SUBSETS, Subset
from histopipe.store.store import Store
from histopipe.tasks.predictions import ModelPredictions, scores_of
from histopipe.tasks.task import Predictions

_MOST = 20
_PATCHES = 8
_PATCH_SIDE = 112
_COLUMNS = ("site", "vendor", "route", "jpeg_generations", "tissue", "focus", "pen")


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
) -> Iterator[Table]:
    """Yield tables of the errors with the highest confidence: of slides and patches, or of numbers.

    Args:
        evaluated: the evaluation with its predictions.
        slides: the table of slides.
        images: thumbnails of the slides, and stores of the patches; None for no pictures.
    """
    if not evaluated.task.of_classes:
        yield from _target_errors(evaluated)
        return
    wrong = [slide for slide in decisions(evaluated, evaluated.main[0]) if slide.wrong]
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
        group, names = predictions.owner(predictions.unit)
        label = predictions.label
        right = _decided_patches(evaluated, part) == label
        items = scores.owner(predictions.unit)[0].tolist()
        decided_classes = scores.task.decide(scores.output, scores.limits)
        for item, decided, probability in zip(
            items, decided_classes, scores.output.tolist(), strict=True
        ):
            members = np.flatnonzero(group == item)
            counts = {classes[n]: c for n, c in sorted(Counter(label[members].tolist()).items())}
            yield Decided(
                names[item],
                predictions.patients[predictions.patient[members[0]]],
                len(members),
                tuple(counts),
                counts,
                float(right[members].mean()),
                classes[decided],
                probability,
            )


def _decided_patches(evaluated: EvaluatedPredictions, part: ModelPredictions) -> NDArray[np.intp]:
    """Return the (N,) decided classes of patches."""
    scores = scores_of(part[0], "patch", "mean", evaluated.evaluation_settings, part[1])
    return scores.task.decide(scores.output, scores.limits)


def _slide_errors(
    evaluated: EvaluatedPredictions,
    wrong: list[Decided],
    slides: Sequence[SlideEntry],
    images: SlideImages | None,
) -> Table:
    """Return the wrong decisions on slides with quality and thumbnails, the highest confidence first."""

    def of_label(decided: Decided) -> float:
        return decided.probability[evaluated.task.classes.index(decided.labels[0])]

    subset, level = evaluated.main[0], evaluated.predictions[evaluated.main[0]].level
    of_slides = level != "patient"
    entries: dict[str, list[SlideEntry]] = {}
    for entry in slides:
        entries.setdefault(entry.slide if of_slides else entry.patient, []).append(entry)
    names = [
        name for name in _COLUMNS if of_slides and len({entry.value(name) for entry in slides}) > 1
    ]
    rows = []
    for i, decided in enumerate(sorted(wrong, key=of_label)[:_MOST]):
        of_item = entries.get(decided.name, [])
        patches = (
            decided.patches
            if level == "patch"
            else sum(getattr(entry, name) for entry in of_item for name in SUBSETS)
        )
        image = images.of(decided.name) if images is not None and of_slides else None
        rows.append(
            Row(
                [
                    Cell(decided.name, tone="id"),
                    Cell(decided.patient),
                    Cell(decided.labels[0]),
                    Cell(decided.decision),
                    number(of_label(decided), 3),
                    number(patches or None),
                    *(Cell(of_item[-1].value(name) if of_item else "") for name in names),
                ],
                _pictures(f"error-{i}", decided.name, image, SIDE),
            )
        )
    columns = (
        "slide" if of_slides else "patient",
        "patient",
        "label",
        "decided",
        "p of the label",
        "patches",
        *(name.replace("_", " ") for name in names),
    )
    return Table(
        f"{subset.capitalize()}: {len(wrong)} wrong decisions, those with the highest confidence first",
        columns,
        rows,
    )


def _pictures(
    name: str, caption: str, pixels: NDArray[np.uint8] | None, side: int
) -> list[Picture]:
    """Return a picture in a list; an empty list if there are no pixels."""
    return [] if pixels is None else [Picture.of(name, caption, resize_image(pixels, side))]


def _patch_errors(evaluated: EvaluatedPredictions, stores: Sequence[Store]) -> Iterator[Table]:
    """Yield the wrong decisions on patches with their positions, the highest confidence first."""
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
        first = np.argsort(of_label, kind="stable")[:_MOST]
        errors += [
            (
                p,
                patches.slides[patches.slide[row]],
                patches.patients[patches.patient[row]],
                int(patches.x_l0[row]),
                int(patches.y_l0[row]),
                evaluated.task.classes[labels[row]],
                evaluated.task.classes[decided[row]],
            )
            for row, p in zip(wrong[first].tolist(), of_label[first].tolist(), strict=True)
        ]
    rows = [
        Row(
            [
                Cell(slide, tone="id"),
                Cell(patient),
                number(x),
                number(y),
                Cell(label),
                Cell(decision),
                number(p, 3),
            ],
            _pictures(
                f"patch-error-{i}",
                f"{slide}, x {x}, y {y}",
                _pixels(stores, slide, x, y),
                2 * _PATCH_SIDE,
            ),
        )
        for i, (p, slide, patient, x, y, label, decision) in enumerate(sorted(errors)[:_MOST])
    ]
    if rows:
        yield Table(
            f"{subset.capitalize()}: {count:,} wrong decisions on patches, those with the highest confidence first; x and y "
            "are the top left corner in pixels of level 0",
            ("slide", "patient", "x", "y", "label", "decided", "p of the label"),
            rows,
        )


def _target_errors(evaluated: EvaluatedPredictions) -> Iterator[Table]:
    """Yield the largest differences between predictions and targets; none for survival, where errors are not defined."""
    subset = evaluated.main[0]
    parts = [predictions for predictions, _ in _parts(evaluated, subset)]
    if not evaluated.task.of_values or not parts:
        return
    differences = [
        difference for predictions in parts for difference in _differences(predictions, evaluated)
    ]
    rows = [
        Row(
            [
                Cell(name, tone="id"),
                Cell(patient),
                Cell(column),
                *(Cell(f"{value:.4g}", value, "n") for value in values),
            ]
        )
        for _, name, patient, column, *values in sorted(
            differences, key=lambda difference: -difference[0]
        )[:_MOST]
    ]
    yield Table(
        f"{subset.capitalize()}: largest errors first, in standard deviations of the column",
        (parts[0].unit, "patient", "column", "true", "predicted", "difference"),
        rows,
    )


def _differences(
    predictions: Predictions, evaluated: EvaluatedPredictions
) -> Iterator[tuple[float, str, str, str, float, float, float]]:
    """Yield size in standard deviations, slide or patient, patient, column, true and predicted value, and difference."""
    means = scores_of(predictions, predictions.unit, "mean", evaluated.evaluation_settings)
    names = means.ids(predictions.unit)
    for column, true, predicted in zip(
        predictions.task.columns, means.target.T, means.output.T, strict=True
    ):
        rows = np.flatnonzero(np.isfinite(true))
        deviation = float(true[rows].std()) or 1.0 if len(rows) else 1.0
        for row in rows.tolist():
            difference = float(predicted[row] - true[row])
            yield (
                abs(difference) / deviation,
                names[row],
                predictions.patients[means.patient[row]],
                column,
                float(true[row]),
                float(predicted[row]),
                difference,
            )


def confident_patches(evaluated: EvaluatedPredictions, stores: Sequence[Store]) -> Iterator[Block]:
    """Yield galleries of the correctly and wrongly classified patches of each class with the highest confidence."""
    subset = evaluated.main[0]
    parts = [part for part in _parts(evaluated, subset) if part[0].level == "patch"]
    if not evaluated.task.of_classes or not parts or not stores:
        return
    scores, decided = parts[0][0], _decided_patches(evaluated, parts[0])
    yield Block(
        "text",
        f"{subset.capitalize()} patches; p is the predicted probability of the true class.",
        tone="soft",
    )
    for code, name in enumerate(evaluated.task.classes):
        of_class = np.flatnonzero(scores.label == code)
        p_true = scores.output[of_class, code]
        correct = decided[of_class] == code
        for outcome, chosen, order in (("correct", correct, -p_true), ("wrong", ~correct, p_true)):
            rows = of_class[chosen][np.argsort(order[chosen], kind="stable")]
            pictures = list(islice(_patches(stores, scores, rows, code), _PATCHES))
            if pictures:
                title = f"{name}: {outcome} decisions with the highest confidence"
                yield Block("gallery", pictures, title)


def _patches(
    stores: Sequence[Store], scores: Predictions, rows: NDArray[np.intp], code: int
) -> Iterator[Picture]:
    """Yield pictures of the patches that can be read."""
    for row in rows.tolist():
        slide = scores.slides[scores.slide[row]]
        x, y = int(scores.x_l0[row]), int(scores.y_l0[row])
        caption = f"{slide}, x {x}, y {y}, p = {scores.output[row, code]:.3f}"
        yield from _pictures(f"patch-{row}", caption, _pixels(stores, slide, x, y), _PATCH_SIDE)


def _pixels(stores: Sequence[Store], slide: str, x: int, y: int) -> NDArray[np.uint8] | None:
    """Return the patch at a corner; None if it cannot be read."""
    place = find_slide(stores, slide)
    if place is None:
        return None
    store, slide_number = place
    with suppress(DamagedStore, UsageError):
        index = store.index(slide_number)
        rows = np.flatnonzero((index["x_l0"] == x) & (index["y_l0"] == y))
        if len(rows):
            return store.read(store.records[slide_number].id, int(rows[0]))
    return None
