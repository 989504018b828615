"""Differences between two runs that were tested on the same patches, slides or patients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.tasks.choices import Aggregation, EvaluationLevel
from histopipe.tasks.intervals import (
    FEWEST_PATIENTS,
    Difference,
    WeightedStatistics,
    interval_of,
)
from histopipe.tasks.predictions import ModelPredictions, Predictions, joined_scores
from histopipe.tasks.task import EvaluationSettings, Scores


@dataclass(frozen=True, slots=True)
class TestedItems:
    """Test items of a run at one level, sorted by keys that identify them across runs."""

    __test__ = False  # pytest must not collect this class

    keys: list[tuple[Any, ...]]
    scores: Scores

    @property
    def repeats(self) -> bool:
        """Whether items share a key, such as the parts of a slide in different folds."""
        return len(set(self.keys)) < len(self.keys)

    def statistics(self, patient: NDArray[np.int32]) -> WeightedStatistics:
        """Return the metrics as functions of weights, for (N,) numbers of the patients."""
        return self.scores.task.statistics(replace(self.scores, patient=patient))


def tested_items(
    parts: Sequence[ModelPredictions],
    level: EvaluationLevel,
    how: Aggregation,
    evaluation_settings: EvaluationSettings,
    *,
    by_patches: bool,
) -> TestedItems:
    """Return the test items of a level.

    With `by_patches`, slides and patients are equal if their patches are equal, otherwise if their names are equal.
    """
    part_keys = [_keys(part, level, by_patches=by_patches) for part, _ in parts]
    scores, _ = joined_scores(parts, level, how, evaluation_settings)
    keys = [part_keys[item >> 32][item & 0xFFFFFFFF] for item in scores.item.tolist()]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return TestedItems([keys[i] for i in order], scores.rows(np.array(order, np.intp)))


def _keys(
    scores: Predictions, level: EvaluationLevel, *, by_patches: bool
) -> list[tuple[Any, ...]]:
    """Return a key for each patch, slide or patient."""
    columns = (scores.slide.tolist(), scores.x_l0.tolist(), scores.y_l0.tolist())
    patches = [(scores.slides[slide], x, y) for slide, x, y in zip(*columns, strict=True)]
    if level == "patch":
        return patches
    owner, names = scores.owner(level)
    if not by_patches or scores.level != "patch":
        return [(name,) for name in names]
    members: list[list[tuple[Any, ...]]] = [[] for _ in names]
    for number, patch in zip(owner.tolist(), patches, strict=True):
        members[number].append(patch)
    return [
        (name, hashlib.sha256(repr(sorted(of_it)).encode()).hexdigest())
        for name, of_it in zip(names, members, strict=True)
    ]


def differences_of(
    items: TestedItems, other_items: TestedItems, draws: NDArray[np.float64]
) -> dict[str, Difference]:
    """Return the metrics of `other_items` minus those of `items`, with intervals from resampling the same patients.

    `draws` is (R, P): how often each patient is drawn in each resample.
    """
    # The runs may name the patient of an item differently, so the patients of `items` are used for both.
    patient = items.scores.patient
    first, other = items.statistics(patient), other_items.statistics(patient)
    patients = len(np.unique(patient))
    values = _differences(other, first, np.ones((1, first.patients)))
    resampled = _differences(other, first, draws[:, : first.patients]) if len(draws) else {}
    differences = dict.fromkeys(values, Difference(None, None))
    for name, (value,) in values.items():
        if np.isfinite(value):
            has_interval = resampled and patients >= FEWEST_PATIENTS
            interval = interval_of(resampled[name], patients) if has_interval else None
            differences[name] = Difference(float(value), interval)
    return differences


def _differences(
    a: WeightedStatistics, b: WeightedStatistics, weights: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    metric_values, subtracted = a.compute(weights), b.compute(weights)
    return {name: values - subtracted[name] for name, values in metric_values.items()}
