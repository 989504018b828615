"""Differences between two runs that were tested on the same patches, slides or patients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.evaluate import (
    JudgeSettings,
    Part,
    class_parts,
    joined,
    positive_class,
    target_parts,
)
from histopipe.evaluation.intervals import (
    FEWEST_PATIENTS,
    Difference,
    WeightedStatistics,
    interval_of,
)
from histopipe.evaluation.levels import Aggregation, Level
from histopipe.evaluation.metrics import decide
from histopipe.evaluation.predictions import PatchScores, Scores
from histopipe.evaluation.statistics import Statistics
from histopipe.evaluation.target_metrics import joined_targets, target_statistics
from histopipe.evaluation.target_scores import GroupedScores, TargetScores


@dataclass(frozen=True, slots=True)
class TestedItems:
    """Test items of a run at one level, sorted by keys that identify them across runs.

    Attributes:
        keys: one per item.
        truth: (N, ...) labels or targets.
        patient: (N,) numbers of the patients.
        statistics: returns the metrics as functions of weights, for (N,) numbers of the patients.
    """

    __test__ = False  # pytest must not collect this class

    keys: list[tuple[Any, ...]]
    truth: NDArray[Any]
    patient: NDArray[np.int32]
    statistics: Callable[[NDArray[np.int32]], WeightedStatistics]

    @property
    def repeats(self) -> bool:
        """Whether items share a key, such as the parts of a slide in different folds."""
        return len(set(self.keys)) < len(self.keys)


def tested_items(
    parts: Sequence[Part],
    level: Level,
    how: Aggregation,
    judging: JudgeSettings,
    *,
    by_patches: bool,
) -> TestedItems:
    """Return the test items of a level.

    With `by_patches`, slides and patients are equal if their patches are equal, otherwise if their names are equal.
    """
    part_keys = [_keys(part, level, by_patches=by_patches) for part, _ in parts]

    def ordered(items: NDArray[np.int64]) -> tuple[list[tuple[Any, ...]], list[int]]:
        keys = [part_keys[item >> 32][item & 0xFFFFFFFF] for item in items.tolist()]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return [keys[i] for i in order], order

    kind = parts[0][0]
    if isinstance(kind, TargetScores):
        found, limits = joined_targets(target_parts(parts), level, how)
        keys, order = ordered(found.item)
        target, output, limits = found.target[order], found.output[order], limits[order]

        def of_targets(patient: NDArray[np.int32]) -> WeightedStatistics:
            rows = GroupedScores(target, output, patient, np.arange(len(target)))
            return target_statistics(kind, rows, limits)

        return TestedItems(keys, target, found.patient[order], of_targets)
    scores, threshold, _ = joined(class_parts(parts), level, how, judging)
    positive = positive_class(kind.classes, judging.positive)
    decided = decide(scores, positive, threshold)
    keys, order = ordered(scores.item)
    label, probability, decided = scores.label[order], scores.probability[order], decided[order]

    def of_classes(patient: NDArray[np.int32]) -> WeightedStatistics:
        return Statistics(
            Scores(label, probability, patient, np.arange(len(label))), decided, positive
        )

    return TestedItems(keys, label, scores.patient[order], of_classes)


def _keys(
    scores: PatchScores | TargetScores, level: Level, *, by_patches: bool
) -> list[tuple[Any, ...]]:
    """Return a key for each patch, slide or patient."""
    columns = (scores.slide.tolist(), scores.x_l0.tolist(), scores.y_l0.tolist())
    patches = [(scores.slides[slide], x, y) for slide, x, y in zip(*columns, strict=True)]
    if level == "patch":
        return patches
    names = scores.slides if level == "slide" else scores.patients
    if not by_patches or scores.level != "patch":
        return [(name,) for name in names]
    owner = (scores.slide if level == "slide" else scores.patient).tolist()
    members: list[list[tuple[Any, ...]]] = [[] for _ in names]
    for number, patch in zip(owner, patches, strict=True):
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
    first, other = items.statistics(items.patient), other_items.statistics(items.patient)
    patients = len(np.unique(items.patient))
    values = _differences(other, first, np.ones((1, first.patients)))
    resampled = _differences(other, first, draws[:, : first.patients]) if len(draws) else {}
    found = dict.fromkeys(values, Difference(None, None))
    for name, (value,) in values.items():
        if np.isfinite(value):
            known = resampled and patients >= FEWEST_PATIENTS
            interval = interval_of(resampled[name], patients) if known else None
            found[name] = Difference(float(value), interval)
    return found


def _differences(
    a: WeightedStatistics, b: WeightedStatistics, weights: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    figures, subtracted = a.figures(weights), b.figures(weights)
    return {name: values - subtracted[name] for name, values in figures.items()}
