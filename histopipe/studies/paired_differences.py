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
    """Metric of one run minus that of another, on the same patients.

    Attributes:
        value: None if one of the two is not defined.
        interval: 95 % confidence interval, from resampling the patients of both at once.
    """

    value: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class TestedItems:
    """Items that a run was tested on at one level, sorted by keys that identify them across runs."""

    __test__ = False  # not a test, for pytest

    keys: list[tuple[Any, ...]]
    scores: Scores
    decided: NDArray[np.intp]

    @property
    def repeats(self) -> bool:
        """Whether several items have the same key, such as the parts of a slide in different folds."""
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
    """Return the items of a level that were tested.

    `positive` is None for more than two classes. With `by_patches`, slides and patients are equal if their patches are; else if
    their names are.
    """
    scores, threshold, _ = joined(parts, level, how, judging)
    decided = decide(scores, positive, threshold)
    named = [_names(part, level, by_patches=by_patches) for part, _ in parts]
    keys = [named[item >> 32][item & 0xFFFFFFFF] for item in scores.item.tolist()]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    taken = replace(
        scores, label=scores.label[order], probability=scores.probability[order],
        patient=scores.patient[order], item=scores.item[order],
    )  # fmt: skip
    return TestedItems([keys[i] for i in order], taken, decided[order])


def _names(scores: PatchScores, level: Level, *, by_patches: bool) -> list[tuple[Any, ...]]:
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
    ours: TestedItems, theirs: TestedItems, positive: int | None, draws: NDArray[np.float64]
) -> dict[str, Difference]:
    """Return their metrics minus ours, on the same items, with intervals from resampling the patients of both at once.

    `draws` is (R, P): how often each patient was drawn.
    """
    first = Statistics(ours.scores, ours.decided, positive)
    # The patient of an item may be named differently there; it is resampled as here.
    scores = replace(theirs.scores, patient=ours.scores.patient)
    other = Statistics(scores, theirs.decided, positive)
    patients = len(np.unique(ours.scores.patient))
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
    ours, theirs = a.figures(weights), b.figures(weights)
    return {name: ours[name] - theirs[name] for name in FIGURES}
