"""Differences between two runs that were tested on the same patches, slides or patients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.evaluation.evaluate import JudgeSettings, Part, joined
from histopipe.evaluation.metrics import FIGURES, decide, interval_of
from histopipe.evaluation.predictions import Aggregation, Level, PatchScores, Scores
from histopipe.evaluation.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Difference:
    """Metric of a run minus the metric of the first run, on the same patients.

    Attributes:
        value: the difference; None if one of the two metrics is not defined.
        interval: 95 % confidence interval, from resampling the same patients for both runs.
    """

    value: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class TestedItems:
    """Test items of a run at one level, sorted by keys that identify them across runs."""

    __test__ = False  # pytest must not collect this class

    keys: list[tuple[Any, ...]]
    scores: Scores
    decided: NDArray[np.intp]

    @property
    def repeats(self) -> bool:
        """Whether items share a key, such as the parts of a slide in different folds."""
        return len(set(self.keys)) < len(self.keys)


def tested_items(
    parts: Sequence[Part],
    level: Level,
    how: Aggregation,
    judging: JudgeSettings,
    positive: int | None,
    *,
    by_patches: bool,
) -> TestedItems:
    """Return the test items of a level.

    `positive` is None for more than two classes. With `by_patches`, slides and patients are equal if their patches are
    equal, otherwise if their names are equal.
    """
    scores, threshold, _ = joined(parts, level, how, judging)
    decided = decide(scores, positive, threshold)
    part_keys = [_keys(part, level, by_patches=by_patches) for part, _ in parts]
    keys = [part_keys[item >> 32][item & 0xFFFFFFFF] for item in scores.item.tolist()]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ordered = replace(
        scores, label=scores.label[order], probability=scores.probability[order],
        patient=scores.patient[order], item=scores.item[order],
    )  # fmt: skip
    return TestedItems([keys[i] for i in order], ordered, decided[order])


def _keys(scores: PatchScores, level: Level, *, by_patches: bool) -> list[tuple[Any, ...]]:
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
    items: TestedItems, other_items: TestedItems, positive: int | None, draws: NDArray[np.float64]
) -> dict[str, Difference]:
    """Return the metrics of `other_items` minus those of `items`, with intervals from resampling the same patients.

    `draws` is (R, P): how often each patient is drawn in each resample.
    """
    first = Statistics(items.scores, items.decided, positive)
    # The runs may name the patient of an item differently, so the patients of `items` are used for both.
    scores = replace(other_items.scores, patient=items.scores.patient)
    other = Statistics(scores, other_items.decided, positive)
    patients = len(np.unique(items.scores.patient))
    values = _differences(other, first, np.ones((1, first.patients)))
    resampled = _differences(other, first, draws[:, : first.patients]) if len(draws) else {}
    found = dict.fromkeys(FIGURES, Difference(None, None))
    for name, (value,) in values.items():
        if np.isfinite(value):
            known = resampled and patients > 1
            interval = interval_of(resampled[name], patients) if known else None
            found[name] = Difference(float(value), interval)
    return found


def _differences(
    a: Statistics, b: Statistics, weights: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    figures, subtracted = a.figures(weights), b.figures(weights)
    return {name: figures[name] - subtracted[name] for name in FIGURES}
