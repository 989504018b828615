"""Tables of predicted slides and patients: `slides.csv` and `patients.csv`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.bags import Bag, common_value
from histopipe.evaluation.prediction_sets import NamedSets
from histopipe.evaluation.unusual import unusual_cells
from histopipe.predicting.external_evaluation import Recalibration
from histopipe.predictions.sources import PATIENTS, SLIDES, PredictedSlide
from histopipe.system.grouping import grouped
from histopipe.system.table_files import write_table
from histopipe.tasks.choices import Aggregation, EvaluationLevel, name_of
from histopipe.tasks.predictions import (
    NO_THRESHOLDS,
    EvaluationSettings,
    Predictions,
    ThresholdsByLevel,
    joined_predictions,
    scores_of,
)
from histopipe.tasks.task import Target, Task

_TABLES: tuple[tuple[EvaluationLevel, str], ...] = (("slide", SLIDES), ("patient", PATIENTS))


def write_summary(
    path: Path,
    level: EvaluationLevel,
    names: Sequence[str],
    *,
    patients: Sequence[str | None],
    labels: Sequence[str | None],
    target: NDArray[np.float64],
    patches: Sequence[int],
    task: Task,
    output: NDArray[np.float64],
    spread: Sequence[Sequence[object]],
    limits: Sequence[float],
    further: Mapping[str, Mapping[str, str]],
) -> None:
    """Write a table with a row per slide or patient atomically: ids, label or targets, patches, decisions, and outputs.

    Args:
        path: the file.
        level, names: what the N rows are, and their ids.
        patients: patients of slides.
        labels, target: known labels, or (N, T) targets, NaN if unknown.
        patches: numbers of patches.
        task: the task; of a classification with the positive class of the evaluation.
        output: (N, C) predictions, NaN for slides or patients without patches, whose cells are empty.
        spread: (N,) standard deviations of the outputs over several models, empty where unknown.
        limits: (L,) thresholds of the decided class.
        further: further columns, each by id.
    """
    table: dict[str, Sequence[object]] = {level: names}
    if level == "slide":
        table["patient"] = patients
    if task.of_classes:  # slides without patches have labels, too
        table["label"] = labels
    else:
        cells = zip(*task.target_cells(target, output), strict=True)
        table |= zip(task.target_names, cells, strict=True)
    table["patches"] = patches
    if task.of_classes:
        for name, numbers in (
            ("predicted", output.argmax(axis=1)),
            ("decided", task.decide(output, np.array(limits))),
        ):
            chosen = np.array(task.classes, object)[numbers]
            table[name] = np.where(np.isnan(output[:, 0]), "", chosen).tolist()
    for name, values in zip(task.output_names, output.T.tolist(), strict=True):
        table[name] = ["" if math.isnan(value) else f"{value:.9g}" for value in values]
    if any(spread):
        for number, name in enumerate(task.output_names):
            table["sd_" + name.removeprefix("p_")] = [row[number] if row else "" for row in spread]
    for column, of_name in further.items():
        table[column] = [of_name.get(name, "") for name in names]
    write_table(path, list(table), zip(*table.values(), strict=True))


def write_patch_tables(
    folder: Path,
    parts: Sequence[Predictions],
    slides: Sequence[PredictedSlide],
    how: Aggregation,
    *,
    task: Task,
    settings: EvaluationSettings,
    thresholds: ThresholdsByLevel,
    sets: NamedSets,
    unusual: Mapping[str, float],
) -> None:
    """Write the tables of slides whose patches were predicted, and of their patients.

    Slides and patients without patches are not in `parts`. Their outputs are empty. Only slides have standard deviations.
    """
    task, by_slide = task.with_settings(settings), {slide.slide: slide for slide in slides}
    joined = joined_predictions(parts) if parts else None
    for level, file in _TABLES:
        labels: dict[str, set[str]] = defaultdict(set)
        for slide in slides:
            labels[getattr(slide, level)].update([] if slide.label is None else [slide.label])
        names = sorted(labels)
        row_of = {name: row for row, name in enumerate(names)}
        output, counts = np.full((len(names), len(task.output_names)), np.nan), Counter[str]()
        target = np.full((len(names), len(task.columns)), np.nan)
        if joined is not None:
            # Without labels, so that patches with different labels are aggregated too.
            scores = scores_of(joined.without_targets(), level, how, settings)
            counts = Counter(joined.ids(level))
            output[[row_of[name] for name in scores.ids(level)]] = scores.output
            labelled = scores_of(joined, level, how, settings)
            target[[row_of[name] for name in labelled.ids(level)]] = labelled.target
        of_slides = [by_slide[name] for name in names] if level == "slide" else []
        write_summary(
            folder / file,
            level,
            names,
            patients=[slide.patient for slide in of_slides],
            # A patient has a label if all slides of the patient have the same.
            labels=[min(labels[name]) if len(labels[name]) == 1 else "" for name in names],
            target=target,
            patches=[counts[name] for name in names],
            task=task,
            output=output,
            spread=[slide.spread for slide in of_slides],
            limits=thresholds.get(name_of(level, how), NO_THRESHOLDS).values,
            further=sets.add(level, *_level_outputs(slides, level))
            | unusual_cells(unusual if of_slides else {}),
        )


def _level_outputs(
    slides: Sequence[PredictedSlide], level: EvaluationLevel
) -> tuple[list[str], NDArray[np.float64]]:
    """Return the slides or patients with `outputs`, and (M, N, C) mean outputs of their patches."""
    groups = grouped((slide for slide in slides if slide.outputs), attrgetter(level))
    means = [
        np.average([slide.outputs for slide in group], axis=0, weights=[s.patches for s in group])
        for group in groups.values()
    ]
    return [*groups], np.stack(means, axis=1) if means else np.empty((0, 0, 0))


def write_bag_tables(
    folder: Path,
    bags: Sequence[Bag],
    targets: Mapping[str, Target | None],
    outputs: NDArray[np.float64],
    *,
    bag_level: EvaluationLevel,
    task: Task,
    settings: EvaluationSettings,
    thresholds: ThresholdsByLevel,
    sets: NamedSets,
    unusual: Mapping[str, float],
    calibration: Recalibration,
) -> None:
    """Write a table of the slides, if they are the bags, and one of the patients: means of their slides.

    `outputs` are (M, N, C), of M models; `targets` those of the bags, and `unusual` their distances, by id. `calibration` is of
    the means over the models.
    """
    task, blank = task.with_settings(settings), (np.nan,) * len(task.columns)
    calibrated = calibration.applied(outputs.mean(axis=0))
    rows = {
        "slide": {bag.id: [row] for row, bag in enumerate(bags)},
        "patient": grouped(range(len(bags)), lambda row: bags[row].patient or bags[row].id),
    }
    for level, file in _TABLES if bag_level == "slide" else _TABLES[1:]:
        names, groups = [*rows[level]], [*rows[level].values()]
        members = [[bags[row] for row in group] for group in groups]
        values = np.stack([outputs[:, group].mean(axis=1) for group in groups], axis=1)
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.empty((0, 0))
        write_summary(
            folder / file,
            level,
            names,
            patients=[each[0].patient for each in members],
            labels=[common_value([bag.label for bag in each]) for each in members],
            target=np.array(
                [common_value([targets[bag.id] for bag in each]) or blank for each in members],
                np.float64,
            ),
            patches=[sum(bag.rows for bag in each) for each in members],
            task=task,
            output=np.stack([calibrated[group].mean(axis=0) for group in groups]),
            spread=[[f"{value:.9g}" for value in row] for row in spread],
            limits=thresholds.get(name_of(level, "mean"), NO_THRESHOLDS).values,
            further=sets.add(level, names, values)
            | unusual_cells(unusual if level == bag_level else {}),
        )
