"""Predictions of bags by one model or several: their mean and spread, as scores to evaluate and as tables."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.targets import Target, make_task
from histopipe.errors import NothingToDo
from histopipe.evaluation.evaluate import (
    AnyScores,
    Part,
    mean_thresholds,
    positive_class,
)
from histopipe.evaluation.levels import name_of
from histopipe.evaluation.metrics import decide
from histopipe.evaluation.predictions import PatchScores, Scores
from histopipe.evaluation.target_scores import TargetScores, with_common_grid
from histopipe.features.bags import Bag
from histopipe.inference.trained_bags import TrainedBags
from histopipe.system.files import appearing

T = TypeVar("T")
_SPREAD = "sd_"


@dataclass(frozen=True, slots=True)
class BagPredictions:
    """Predictions of (N,) bags by (M,) models. `outputs` has an (N, C) array for each model."""

    models: Sequence[TrainedBags]
    bags: Sequence[Bag]
    targets: Sequence[Target | None]
    """Known target of each bag; None if it is unknown, and for classification."""
    outputs: Sequence[NDArray[np.float32]]

    @property
    def _first(self) -> TrainedBags:
        return self.models[0]

    def scores(self) -> AnyScores:
        """Return the means over the models, with labels or targets where they are known."""
        return self._scores(self._together().mean(axis=0).astype(np.float32))

    def labelled(self) -> Part | None:
        """Return the bags with known labels, with their thresholds; None if they cannot be evaluated, as with one class."""
        scores = self.scores()
        if isinstance(scores, PatchScores):
            rows = np.flatnonzero(scores.label >= 0)
            if len(np.unique(scores.label[rows])) < 2:
                return None
        else:
            rows = np.flatnonzero([target is not None for target in self.targets])
            task = make_task(scores.task, scores.columns)
            try:
                if task is None or not len(rows):
                    return None
                task.check(scores.target[rows], "predicted")
            except NothingToDo:
                return None
        kept = rows.tolist()
        some = BagPredictions(
            self.models, [self.bags[i] for i in kept], [self.targets[i] for i in kept],
            [output[rows] for output in self.outputs],
        )  # fmt: skip
        return some.scores(), mean_thresholds([model.thresholds for model in self.models])

    def write(self, folder: Path, *, slides: str, patients: str) -> None:
        """Write a table of the slides, if they are the bags, and one of the patients: means of their slides."""
        if self._first.config.bag == "slide":
            groups = [[number] for number in range(len(self.bags))]
            self._write(folder / slides, groups, of_slides=True)
        by_patient: dict[str, list[int]] = {}
        for number, bag in enumerate(self.bags):
            by_patient.setdefault(bag.patient or bag.id, []).append(number)
        self._write(folder / patients, list(by_patient.values()), of_slides=False)

    def _write(self, path: Path, groups: Sequence[Sequence[int]], *, of_slides: bool) -> None:
        """Write a row per group of bags."""
        first, together = self._first, self._together().astype(np.float64)
        values = np.stack([together[:, group].mean(axis=1) for group in groups], axis=1)
        means = values.mean(axis=0)
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else None
        names = self._output_names()
        ids = ("slide", "patient") if of_slides else ("patient",)
        facts = ("label", "patches", "predicted", "decided") if first.classes else (
            *(f"true_{name}" for name in first.targets), "patches",
        )  # fmt: skip
        spreads = (
            () if spread is None else tuple(_SPREAD + name.removeprefix("p_") for name in names)
        )
        decided = self._decided(means, of_slides=of_slides) if first.classes else []
        with appearing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*ids, *facts, *names, *spreads])
            for row, group in enumerate(groups):
                bag = self.bags[group[0]]
                patches = sum(self.bags[number].rows for number in group)
                if first.classes:
                    label = _common([self.bags[number].label for number in group])
                    best = first.classes[int(means[row].argmax())]
                    cells: list[object] = [label, patches, best, first.classes[decided[row]]]
                else:
                    target = _common([self.targets[number] for number in group])
                    known = target or (math.nan,) * len(first.targets)
                    cells = [*("" if math.isnan(it) else repr(it) for it in known), patches]
                numbers = [*means[row], *(() if spread is None else spread[row])]
                own = [bag.id, bag.patient] if of_slides else [bag.patient or bag.id]
                writer.writerow([*own, *cells, *(f"{value:.9g}" for value in numbers)])

    def _decided(self, means: NDArray[np.float64], *, of_slides: bool) -> list[int]:
        """Return the decided class of each row."""
        first = self._first
        positive = positive_class(first.classes, first.judging.positive)
        level = name_of("slide" if of_slides else "patient", "mean")
        limit = mean_thresholds([model.thresholds for model in self.models]).get(level, (None,))[0]
        zeros = np.zeros(len(means), np.int32)
        found = decide(Scores(zeros, means, zeros, zeros.astype(np.int64)), positive, limit)
        return [int(number) for number in found]

    def _together(self) -> NDArray[np.float32]:
        """Return (M, N, C) outputs; of survival at the times of the first model."""
        parts = [
            self._scores(output, model)
            for output, model in zip(self.outputs, self.models, strict=True)
        ]
        of_targets = [part for part in parts if isinstance(part, TargetScores)]
        if of_targets:
            return np.stack([part.output for part in with_common_grid(of_targets)])
        return np.stack(self.outputs)

    def _output_names(self) -> tuple[str, ...]:
        first = self._first
        if first.classes:
            return tuple(f"p_{name}" for name in first.classes)
        scores = self._scores(self.outputs[0])
        assert isinstance(scores, TargetScores)  # noqa: S101 - for mypy
        return scores.output_names

    def _scores(self, output: NDArray[np.float32], model: TrainedBags | None = None) -> AnyScores:
        first, bags = self._first, self.bags
        patients = sorted({bag.patient or bag.id for bag in bags})
        numbers = {name: number for number, name in enumerate(patients)}
        count, level = len(bags), first.config.bag
        places: dict[str, Any] = {
            "slides": tuple(bag.id for bag in bags), "patients": tuple(patients),
            "slide": np.arange(count, dtype=np.int32),
            "patient": np.array([numbers[bag.patient or bag.id] for bag in bags], np.int32),
            "x_l0": np.zeros(count, np.int64), "y_l0": np.zeros(count, np.int64),
        }  # fmt: skip
        if first.classes:
            known = {name: number for number, name in enumerate(first.classes)}
            label = np.array([known.get(str(bag.label), -1) for bag in bags], np.int32)
            return PatchScores(
                first.classes, **places, label=label, probability=output, level=level
            )
        blank = (math.nan,) * len(first.targets)
        target = np.array([it or blank for it in self.targets], np.float64)
        return TargetScores(
            first.task, first.targets, tuple((model or first).network.grid), **places,
            target=target.reshape(count, len(first.targets)), output=output, level=level,
        )  # fmt: skip


def _common(values: Sequence[T]) -> T | None:
    """Return the value that all have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None
