"""Labels that are contradicted by models which have not seen them. With weak models, most of these labels are right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.evaluate import fit_temperature, tempered
from histopipe.system.arrays import FloatArray
from histopipe.system.output import counted, listed, plural
from histopipe.system.table_files import read_dicts, write_table
from histopipe.tasks.choices import EvaluationLevel
from histopipe.tasks.predictions import joined_predictions, scores_of
from histopipe.tasks.task import EvaluationSettings, Predictions, group_means

LABEL_ERRORS = "label_errors.csv"
"""Name of the table of a cross-validation."""
_COLUMNS = (
    *("level", "slide", "patient", "x_l0", "y_l0", "column", "label", "suggested"),
    *("p_label", "p_suggested", "margin", "share"),
)
_ROUNDING, _DRAWS = 1e-9, 200


def contradicted(
    probability: FloatArray, label: NDArray[np.int32], patient: NDArray[np.int32]
) -> NDArray[np.intp]:
    """Return the (N,) class that contradicts each label; -1 if none does.

    A class is likely for an item if its probability, (N, C), is at least the mean that this class has among the items with
    this label. The most probable likely class contradicts the label if it is more probable. Each patient counts once in the
    means, so that a patient with many patches does not set them alone.

    Source:
        C. G. Northcutt, L. Jiang and I. L. Chuang, Confident learning: estimating uncertainty in dataset labels, Journal of
        Artificial Intelligence Research 70 (2021), with items in place of patients.
    """
    least = np.full(probability.shape[1], np.inf)
    for number in np.unique(label[label >= 0]).tolist():
        rows = label == number
        numbers, of_rows = np.unique(patient[rows], return_inverse=True)
        sums = np.bincount(of_rows, probability[rows, number], len(numbers))
        least[number] = (sums / np.bincount(of_rows)).mean()
    likely = np.where(probability >= least - _ROUNDING, probability, -np.inf)
    best = likely.argmax(axis=1)
    of_label = probability[np.arange(len(label)), np.maximum(label, 0)]
    wrong = (likely.max(axis=1) > of_label + _ROUNDING) & (label >= 0)
    return np.where(wrong, best, -1)


def find_label_errors(
    parts: Sequence[Predictions], settings: EvaluationSettings
) -> list[dict[str, Any]]:
    """Return the items whose label is contradicted, as rows of `LABEL_ERRORS`: slides, then patches, or patients.

    The parts, at least one, are test predictions of the folds; of several seeds, the mean is used. The lowest margin, which is
    the probability of the label minus that of the suggested class, is first. Only tasks with probabilities have rows.
    """
    predictions = _mean_of_seeds(joined_predictions(parts))
    task = predictions.task.with_settings(settings)
    if not task.probabilities:
        return []
    unit: EvaluationLevel = predictions.unit
    rows: list[dict[str, Any]] = []
    levels = dict.fromkeys((unit, predictions.level))
    for level in reversed(levels):
        for column, part in task.classifications(scores_of(predictions, level, "mean", settings)):
            rows += _rows_of(part, column if len(task.classes) == 0 else "")
    of_patches = Counter(row["slide"] for row in rows if row["level"] == "patch")
    patches = Counter(predictions.ids("slide"))
    for row in rows:
        if row["level"] == "slide" and predictions.level == "patch":
            row["share"] = of_patches[row["slide"]] / patches[row["slide"]]
    order = list(levels)
    return sorted(rows, key=lambda row: (order.index(row["level"]), row["margin"]))


def count_by_chance(parts: Sequence[Predictions], settings: EvaluationSettings) -> float:
    """Return how many slides, or patients, would be contradicted on average if all labels were right; NaN for other tasks.

    Labels are drawn from the probabilities with a fitted temperature, one draw for all slides of a patient. So the number is
    that of a model: it holds as far as these probabilities are right.
    """
    predictions = _mean_of_seeds(joined_predictions(parts))
    task, rng, count = predictions.task.with_settings(settings), np.random.default_rng(0), 0
    if not task.probabilities:
        return math.nan
    scores = scores_of(predictions, predictions.unit, "mean", settings)
    for _, part in task.classifications(scores):
        output = part.output.astype(np.float64)
        limits = np.cumsum(tempered(output, fit_temperature(part)), axis=1)[:, :-1]
        for _ in range(_DRAWS):
            drawn = rng.random(len(part.patients))[part.patient]
            label = (drawn[:, None] > limits).sum(axis=1).astype(np.int32)
            count += int((contradicted(output, label, part.patient) >= 0).sum())
    return count / _DRAWS


def _rows_of(part: Predictions, column: str) -> Iterator[dict[str, Any]]:
    output = part.output.astype(np.float64)
    suggested = contradicted(output, part.label, part.patient)
    slides, patients = part.ids("slide"), part.ids("patient")
    names = part.task.classes
    for row in np.flatnonzero(suggested >= 0).tolist():
        label, other = int(part.label[row]), int(suggested[row])
        place: dict[str, Any] = {}
        if part.level == "patch":
            place = {"x_l0": int(part.x_l0[row]), "y_l0": int(part.y_l0[row])}
        yield {
            "level": part.level,
            "slide": "" if part.level == "patient" else slides[row],
            "patient": patients[row],
            **place,
            "column": column,
            "label": names[label],
            "suggested": names[other],
            "p_label": output[row, label],
            "p_suggested": output[row, other],
            "margin": output[row, label] - output[row, other],
        }


def _mean_of_seeds(predictions: Predictions) -> Predictions:
    """Return predictions with one row per patch, slide or patient, and the mean of its outputs."""
    places = np.stack(
        [getattr(predictions, name) for name in ("slide", "patient", "x_l0", "y_l0")], axis=1
    )
    _, first, group = np.unique(places, axis=0, return_index=True, return_inverse=True)
    if len(first) == len(places):
        return predictions
    order = np.argsort(group.ravel(), kind="stable")
    starts = np.searchsorted(group.ravel()[order], np.arange(len(first)))
    means = group_means(predictions.output[order].astype(np.float64), starts)
    return replace(predictions.rows(first), output=means)


def write_label_errors(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the table atomically, also without rows."""
    cells = ([row.get(name, "") for name in _COLUMNS] for row in rows)
    write_table(
        folder / LABEL_ERRORS,
        _COLUMNS,
        ([f"{c:.6g}" if isinstance(c, float) else c for c in row] for row in cells),
    )


def read_label_errors(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the table; none if there is no table."""
    return list(read_dicts(folder / LABEL_ERRORS)) if (folder / LABEL_ERRORS).exists() else []


def label_errors_text(rows: Sequence[Mapping[str, Any]], by_chance: float) -> str:
    """Return how many slides and patches have a label to check, and how many by chance, as text; empty without any."""
    numbers = Counter(row["level"] for row in rows)
    texts = [counted(number, level) for level, number in numbers.items()]
    unit = next((level for level in numbers if level != "patch"), "slide")
    return (
        f"{listed(texts)} contradicted by the models; about {round(by_chance, 1):g} {plural(unit)} would be if all labels were right "
        "(by the models' calibrated probabilities)"
        if texts
        else ""
    )
