"""Parts of a report: confident wrong decisions, doubtful labels, prediction sets, and survival of patients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.evaluation.evaluate import with_ends
from histopipe.evaluation.label_errors import LABEL_ERRORS
from histopipe.evaluation.prediction_sets import PredictionSets
from histopipe.predictions.patch_values import SlideImages, stored_patch
from histopipe.reports import charts
from histopipe.reports.html_page import SIDE, Block, Cell, Picture, Table, number
from histopipe.slides.thumbnail import resize_image
from histopipe.splits.slide_table import SlideEntry
from histopipe.store.store import Store
from histopipe.system.grouping import grouped
from histopipe.system.output import counted, plural
from histopipe.tasks.choices import SUBSETS, Subset
from histopipe.tasks.curves import Reliability, SurvivalChecks
from histopipe.tasks.metrics import Metrics
from histopipe.tasks.predictions import (
    EvaluationSettings,
    Predictions,
    ThresholdsByLevel,
    scores_of,
)

_MOST = 20
"""Rows of a table of errors: more are rarely read."""
_PATCHES = 8
"""Patches of a gallery, one line of a page."""
_PATCH_SIDE = 112
"""Side of a patch in a gallery, in pixels; twice as large in a table, which shows one at a time."""
_NUMBERS = ("p_label", "p_suggested", "margin", "share")
_COLUMNS = ("site", "vendor", "route", "jpeg_generations", "tissue", "focus", "pen")


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision on a slide, or on a patient if the model takes bags of patients."""

    name: str
    patient: str
    patches: int
    counts: Mapping[str, int]
    """Number of patches by label."""
    right: float
    """Share of its patches that are decided correctly."""
    decision: str
    probability: Mapping[str, float]
    """Predicted probability by class."""

    @property
    def label(self) -> str:
        """Its label; empty if its patches have several ones."""
        return next(iter(self.counts)) if len(self.counts) == 1 else ""

    @property
    def wrong(self) -> bool:
        """Whether the decision differs from its one label."""
        return self.label not in ("", self.decision)


def failure_blocks(
    evaluated: EvaluatedPredictions, slides: Sequence[SlideEntry], images: SlideImages | None
) -> Iterator[Table]:
    """Yield tables of the errors with the highest confidence: of slides and patches, or of numbers.

    Args:
        evaluated: the evaluation with its predictions.
        slides: the table of slides.
        images: thumbnails of the slides, and stores of the patches; None for no pictures.
    """
    if evaluated.task.of_classes:
        yield from _slide_errors(evaluated, slides, images)
        yield from _patch_errors(evaluated, () if images is None else images.stores)
    elif evaluated.task.of_values:  # errors of survival are not defined
        yield _target_errors(evaluated)


def label_blocks(
    rows: Sequence[Mapping[str, str]], evaluated: EvaluatedPredictions, counts: str
) -> Iterator[Block | Table]:
    """Yield the first labels of each level that models contradict; nothing for tasks without probabilities.

    `counts` is the text of their numbers.
    """
    if not evaluated.task.probabilities:
        return
    text = (
        f"{counts or 'None'}. A label is contradicted if models that have not seen it find another class likely, and more probable "
        "(confident learning). Weak models contradict many right labels: check the picture before you change any."
    )
    yield Block("text", text, tone="soft")
    columns = ("slide", "patient", "x_l0", "y_l0", "column", "label", "suggested", *_NUMBERS)
    for level in dict.fromkeys(row["level"] for row in rows):
        of_level = [row for row in rows if row["level"] == level][:_MOST]
        used = [name for name in columns if any(row[name] for row in of_level)]
        yield Table(
            f"The {len(of_level)} least probable labels of {plural(level)}; all are in {LABEL_ERRORS}",
            [name.replace("_", " ") for name in used],
            [
                [
                    number(float(row[name] or "nan"), 3) if name in _NUMBERS else Cell(row[name])
                    for name in used
                ]
                for row in of_level
            ],
        )


def set_blocks(sets: PredictionSets | None) -> Iterator[Block | Table]:
    """Yield what prediction sets reached, and the risk-coverage curve; nothing without sets."""
    if sets is None or not sets.rows:
        return
    yield Block(
        "text",
        f"Patients that have chosen nothing of the model calibrate the sets: for patients of the same population, "
        f"{1 - sets.alpha:.0%} of each class have sets that contain the truth, on average over calibrations. For other "
        f"patients there is no guarantee. A set with several classes, or none, is no decision.",
        tone="soft",
    )
    for line in sets.lines:
        if line.startswith("warning"):
            yield Block("text", f"{line.capitalize()}.", tone="bad")
    yield Table(
        f"Prediction sets of {plural(sets.level)}",
        ("target", "group", "n", "patients", "contain the truth", "mean size", "one class"),
        [
            [
                Cell(row["column"]),
                Cell(row["group"]),
                number(row["count"]),
                number(row["patients"]),
                Cell(with_ends(row["coverage"], row["interval"]), row["coverage"]),
                number(row["size"], 2),
                number(row["single"], 3),
            ]
            for row in sets.rows
        ],
    )
    if sets.curve:
        yield Block("charts", [charts.risk_chart(sets.curve)])


def decisions(evaluated: EvaluatedPredictions, subset: Subset) -> Iterator[Decided]:
    """Yield the decision on each slide, or patient, of a subset."""
    classes = evaluated.task.classes
    for predictions, thresholds in evaluated.models(subset):
        settings, unit = evaluated.evaluation_settings, predictions.unit
        # Without labels, so that patches with different labels are aggregated too.
        scores = scores_of(predictions.without_targets(), unit, "mean", settings, thresholds)
        right = _decide_patches(predictions, thresholds, settings) == predictions.label
        owners = predictions.owner(unit)[0]
        for item, name, decided, probability in zip(
            scores.owner(unit)[0],
            scores.ids(unit),
            scores.task.decide(scores.output, scores.limits),
            scores.output.tolist(),
            strict=True,
        ):
            members = np.flatnonzero(owners == item)
            labels = Counter(sorted(predictions.label[members].tolist()))
            yield Decided(
                name,
                predictions.patients[predictions.patient[members[0]]],
                len(members),
                {classes[number]: count for number, count in labels.items()},
                float(right[members].mean()),
                classes[decided],
                dict(zip(classes, probability, strict=True)),
            )


def _decide_patches(
    predictions: Predictions, thresholds: ThresholdsByLevel, settings: EvaluationSettings
) -> NDArray[np.intp]:
    """Return the (N,) decided classes of patches."""
    scores = scores_of(predictions, "patch", "mean", settings, thresholds)
    return scores.task.decide(scores.output, scores.limits)


def _slide_errors(
    evaluated: EvaluatedPredictions, slides: Sequence[SlideEntry], images: SlideImages | None
) -> Iterator[Table]:
    """Yield the wrong decisions on slides with quality and thumbnails, the highest confidence first."""
    subset, level = evaluated.main[0], evaluated.predictions[evaluated.main[0]].level
    wrong = sorted(
        (slide for slide in decisions(evaluated, subset) if slide.wrong),
        key=lambda slide: slide.probability[slide.label],
    )
    if not wrong:
        return
    of_slides = level != "patient"
    entries = grouped(slides, attrgetter("slide" if of_slides else "patient"))
    names = [
        name for name in _COLUMNS if of_slides and len({entry.value(name) for entry in slides}) > 1
    ]
    rows = []
    for decided in wrong[:_MOST]:
        of_item, patches = entries[decided.name], decided.patches
        if level != "patch":
            patches = sum(getattr(entry, name) for entry in of_item for name in SUBSETS)
        rows.append(
            [
                Cell(decided.name, tone="id"),
                Cell(decided.patient),
                Cell(decided.label),
                Cell(decided.decision),
                number(decided.probability[decided.label], 3),
                number(patches or None),
                *(Cell(of_item[-1].value(name) if of_item else "") for name in names),
            ]
        )
    columns = ("slide" if of_slides else "patient", "patient", "label", "decided")
    yield Table(
        f"{subset.capitalize()}: {len(wrong)} wrong decisions, those with the highest confidence first",
        (*columns, "p of the label", "patches", *(name.replace("_", " ") for name in names)),
        rows,
        [
            _pictures(f"error-{i}", decided.name, images.of(decided.name), SIDE)
            for i, decided in enumerate(wrong[:_MOST])
        ]
        if images is not None and of_slides
        else (),
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
    if evaluated.predictions[subset].level != "patch":
        return
    for patches, thresholds in evaluated.models(subset):
        decided = _decide_patches(patches, thresholds, evaluated.evaluation_settings)
        wrong = np.flatnonzero(decided != patches.label)
        of_label = patches.output[wrong, patches.label[wrong]]
        count += len(wrong)
        first = np.argsort(of_label, kind="stable")[:_MOST]
        errors += [
            (
                p,
                patches.slides[patches.slide[row]],
                patches.patients[patches.patient[row]],
                int(patches.x_l0[row]),
                int(patches.y_l0[row]),
                evaluated.task.classes[patches.label[row]],
                evaluated.task.classes[decided[row]],
            )
            for row, p in zip(wrong[first].tolist(), of_label[first].tolist(), strict=True)
        ]
    worst = sorted(errors)[:_MOST]
    if worst:
        yield Table(
            f"{subset.capitalize()}: {count:,} wrong decisions on patches, those with the highest confidence first; x and y "
            "are the top left corner in pixels of level 0",
            ("slide", "patient", "x", "y", "label", "decided", "p of the label"),
            [
                [
                    Cell(slide, tone="id"),
                    Cell(patient),
                    number(x),
                    number(y),
                    Cell(label),
                    Cell(decision),
                    number(p, 3),
                ]
                for p, slide, patient, x, y, label, decision in worst
            ],
            [
                _pictures(
                    f"patch-error-{i}",
                    f"{slide}, x {x}, y {y}",
                    stored_patch(stores, slide, x, y),
                    2 * _PATCH_SIDE,
                )
                for i, (_, slide, _, x, y, _, _) in enumerate(worst)
            ],
        )


def _target_errors(evaluated: EvaluatedPredictions) -> Table:
    """Return the largest differences between predictions and targets."""
    subset = evaluated.main[0]
    errors = sorted(
        (
            error
            for predictions, _ in evaluated.models(subset)
            for error in _differences(predictions, evaluated.evaluation_settings)
        ),
        key=lambda error: -error[0],
    )
    return Table(
        f"{subset.capitalize()}: largest errors first, in standard deviations of the column",
        (
            evaluated.predictions[subset].unit,
            "patient",
            "column",
            "true",
            "predicted",
            "difference",
        ),
        [
            [
                Cell(name, tone="id"),
                Cell(patient),
                Cell(column),
                *(Cell(f"{value:.4g}", value, "n") for value in values),
            ]
            for _, name, patient, column, *values in errors[:_MOST]
        ],
    )


def _differences(
    predictions: Predictions, settings: EvaluationSettings
) -> Iterator[tuple[float, str, str, str, float, float, float]]:
    """Yield size in standard deviations, slide or patient, patient, column, true and predicted value, and difference."""
    means = scores_of(predictions, predictions.unit, "mean", settings)
    names, patients = means.ids(predictions.unit), means.ids("patient")
    for column, true, predicted in zip(
        predictions.task.columns, means.target.T, means.output.T, strict=True
    ):
        rows = np.flatnonzero(np.isfinite(true))
        deviation = float(true[rows].std()) or 1.0 if len(rows) else 1.0
        for row in rows.tolist():
            values = float(true[row]), float(predicted[row]), float(predicted[row] - true[row])
            yield abs(values[2]) / deviation, names[row], patients[row], column, *values


def confident_patches(evaluated: EvaluatedPredictions, stores: Sequence[Store]) -> Iterator[Block]:
    """Yield galleries of the correctly and wrongly classified patches of each class with the highest confidence."""
    subset = evaluated.main[0]
    scores, thresholds = evaluated.models(subset)[0]
    if not evaluated.task.of_classes or scores.level != "patch" or not stores:
        return
    decided = _decide_patches(scores, thresholds, evaluated.evaluation_settings)
    yield Block(
        "text",
        f"{subset.capitalize()} patches; p is the predicted probability of the true class.",
        tone="soft",
    )
    for code, name in enumerate(evaluated.task.classes):
        of_class = np.flatnonzero(scores.label == code)
        p_true, correct = scores.output[of_class, code], decided[of_class] == code
        for outcome, chosen, order in (("correct", correct, -p_true), ("wrong", ~correct, p_true)):
            rows = of_class[chosen][np.argsort(order[chosen], kind="stable")]
            pictures = list(islice(_patches(stores, scores, rows, code), _PATCHES))
            if pictures:
                yield Block(
                    "gallery", pictures, f"{name}: {outcome} decisions with the highest confidence"
                )


def _patches(
    stores: Sequence[Store], scores: Predictions, rows: NDArray[np.intp], code: int
) -> Iterator[Picture]:
    """Yield pictures of the patches that can be read."""
    for row in rows.tolist():
        slide = scores.slides[scores.slide[row]]
        x, y = int(scores.x_l0[row]), int(scores.y_l0[row])
        caption = f"{slide}, x {x}, y {y}, p = {scores.output[row, code]:.3f}"
        yield from _pictures(
            f"patch-{row}", caption, stored_patch(stores, slide, x, y), _PATCH_SIDE
        )


def survival_charts(evaluated: EvaluatedPredictions) -> Iterator[Block | Table | None]:
    """Yield curves of the risk groups with numbers at risk, calibration, and proportional hazards, all of patients."""
    of_patients = {
        subset: evaluation.patient.get("mean") or evaluation.finest
        for subset, evaluation in evaluated.evaluations.items()
    }
    yield Block(
        "charts",
        [
            charts.survival_chart(
                f"Survival of patients, {subset}"
                + ("" if metrics.log_rank is None else f", log-rank p {metrics.log_rank:.2g}"),
                metrics.groups,
            )
            for subset, metrics in of_patients.items()
            if metrics.groups
        ],
    )
    for subset, metrics in of_patients.items():
        title = subset.capitalize()
        if metrics.groups:
            times = metrics.groups[0].at_risk_times
            yield Table(
                f"{title}: risk groups and numbers of patients at risk",
                ("group", "patients", "events", "median", *(f"at {time:.4g}" for time in times)),
                [
                    [
                        Cell(group.name),
                        number(group.count),
                        number(group.events),
                        number(group.median, 3),
                        *map(number, group.at_risk),
                    ]
                    for group in metrics.groups
                ],
            )
        if metrics.checks is not None:
            yield Block("text", survival_text(title, metrics))
            yield _calibration_table(title, metrics.checks)
    curves: dict[str, Reliability] = {
        subset: (metrics.checks.calibration, (np.empty(0), np.empty(0)))
        for subset, metrics in of_patients.items()
        if metrics.checks and metrics.checks.calibration
    }
    if curves:
        yield Block("charts", [charts.calibration_chart("Events until the horizon", curves)])


def survival_text(title: str, metrics: Metrics) -> str:
    """Return follow-up, and whether hazards are proportional, as a sentence; empty if `metrics` have no checks."""
    checks, events = metrics.checks, metrics.outcomes.get("events", 0)
    if checks is None:
        return ""
    values = {
        "median follow-up {:.4g} (reverse Kaplan-Meier)": checks.follow_up,
        "coefficient of the predicted risk in a Cox model {:.3f}": checks.slope,
        "proportional hazards p {:.2g} (scaled Schoenfeld residuals)": checks.hazards_p,
    }
    texts = [text.format(value) for text, value in values.items() if value is not None]
    patients = f"{title}: {metrics.patients:,} patients with {counted(events, 'event')}"
    return f"{', '.join([patients, *texts])}."


def _calibration_table(title: str, checks: SurvivalChecks) -> Table | None:
    rows = [
        [
            Cell(f"{place.low:.3f} to {place.high:.3f}"),
            number(place.count),
            number(place.at_risk),
            number(place.probability, 3),
            Cell(with_ends(place.observed, place.interval), place.observed, "n"),
        ]
        for place in checks.calibration
    ]
    return (
        Table(
            f"{title}: events until {checks.horizon:.4g}, predicted and observed by Kaplan-Meier",
            ("predicted risk", "patients", "at risk then", "mean", "observed"),
            rows,
        )
        if rows
        else None
    )
