"""Predictions of bags by one model or several: their mean and spread, as scores to evaluate and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import NothingToDo
from histopipe.evaluation.evaluate import mean_thresholds
from histopipe.features.bags import Bag
from histopipe.inference.trained_bags import TrainedBags
from histopipe.system.csv_files import write_table
from histopipe.tasks.choices import EvaluationLevel, name_of
from histopipe.tasks.classification import Classification
from histopipe.tasks.predictions import ModelPredictions, Predictions
from histopipe.tasks.task import NO_THRESHOLDS, Target

T = TypeVar("T")
_SPREAD = "sd_"


@dataclass(frozen=True, slots=True)
class BagPredictions:
    """Predictions of (N,) bags by (M,) models. `outputs` has an (N, C) array for each model."""

    models: Sequence[TrainedBags]
    bags: Sequence[Bag]
    targets: Sequence[Target | None]
    """Known target of each bag; None if it is unknown."""
    outputs: Sequence[NDArray[np.float32]]

    @property
    def _first(self) -> TrainedBags:
        return self.models[0]

    def predictions(self) -> Predictions:
        """Return the means over the models, with targets where they are known."""
        first, bags, columns = self._first, self.bags, self._first.task.columns
        patients = sorted({bag.patient or bag.id for bag in bags})
        numbers = {name: number for number, name in enumerate(patients)}
        zeros = np.zeros(len(bags), np.int64)
        blank = (np.nan,) * len(columns)
        target = np.array([values or blank for values in self.targets], np.float64)
        return Predictions(
            first.task, tuple(bag.id for bag in bags), tuple(patients),
            np.arange(len(bags), dtype=np.int32),
            np.array([numbers[bag.patient or bag.id] for bag in bags], np.int32), zeros, zeros,
            target.reshape(len(bags), len(columns)), self._together().mean(axis=0).astype(np.float32),
            first.config.bag,
        )  # fmt: skip

    def labelled(self) -> ModelPredictions | None:
        """Return the bags with known targets, with their thresholds; None if they cannot be evaluated, as with one class."""
        rows = np.flatnonzero([target is not None for target in self.targets])
        try:
            if not len(rows):
                return None
            self._first.task.check(np.array([self.targets[i] for i in rows.tolist()]), "predicted")
        except NothingToDo:
            return None
        kept = rows.tolist()
        some = BagPredictions(
            self.models, [self.bags[i] for i in kept], [self.targets[i] for i in kept],
            [output[rows] for output in self.outputs],
        )  # fmt: skip
        return some.predictions(), mean_thresholds([model.thresholds for model in self.models])

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
        task, names = first.task, first.task.output_names
        ids = ("slide", "patient") if of_slides else ("patient",)
        facts = (*task.target_names, "patches")
        if task.of_classes:
            facts = ("label", "patches", "predicted", "decided")
        spreads = (
            () if spread is None else tuple(_SPREAD + name.removeprefix("p_") for name in names)
        )
        decided = self._decided(means, "slide" if of_slides else "patient")
        rows = []
        for row, group in enumerate(groups):
            bag = self.bags[group[0]]
            patches = sum(self.bags[number].rows for number in group)
            target = _common([self.targets[number] for number in group])
            of_target = np.array([target or (np.nan,) * len(task.columns)])
            (names_of,) = task.target_cells(of_target, means[row : row + 1])
            cells: list[object] = [*names_of, patches]
            if task.of_classes:
                label, best = _common([self.bags[number].label for number in group]), cells[1]
                cells = [label, patches, best, decided[row]]
            numbers = [*means[row], *(() if spread is None else spread[row])]
            id_cells = [bag.id, bag.patient] if of_slides else [bag.patient or bag.id]
            rows.append([*id_cells, *cells, *(f"{value:.9g}" for value in numbers)])
        write_table(path, [*ids, *facts, *names, *spreads], rows)

    def _decided(self, means: NDArray[np.float64], level: EvaluationLevel) -> list[str]:
        """Return the decided class of each row; nothing for other tasks."""
        task = self._first.task
        if not task.of_classes:
            return []
        limits = mean_thresholds([model.thresholds for model in self.models])
        values = np.array(limits.get(name_of(level, "mean"), NO_THRESHOLDS).values)
        numbers = cast(Classification, task.with_settings(self._first.evaluation_settings)).decide(
            means, values
        )
        return [task.names[number] for number in numbers]

    def _together(self) -> NDArray[np.float32]:
        """Return (M, N, C) outputs, in the form of the first model."""
        task = self._first.task
        pairs = zip(self.models, self.outputs, strict=True)
        return np.stack([task.converted(model.task, output) for model, output in pairs])


def _common(values: Sequence[T]) -> T | None:
    """Return the value that all have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None
