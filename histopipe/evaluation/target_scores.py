"""Predictions of tasks other than classification: as arrays, aggregated, and as CSV files."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import TaskName
from histopipe.evaluation.levels import Level

_TRUE = "true_"
_OUTPUT: Mapping[TaskName, str] = {
    "multilabel": "p_",
    "regression": "predicted_",
    "survival": "survival_",
}
_RISK = "risk"
_PLACES: Mapping[Level, tuple[str, ...]] = {
    "patch": ("slide", "patient", "x_l0", "y_l0"), "slide": ("slide", "patient"), "patient": ("patient",),
}  # fmt: skip


def prediction_names(
    task: TaskName, classes: Sequence[str], targets: Sequence[str]
) -> tuple[str, ...]:
    """Return a name for each number that a task predicts; for survival that of the risk alone."""
    if task == "survival":
        return (_RISK,)
    return tuple(targets) if targets else tuple(classes)


@dataclass(frozen=True, slots=True)
class TargetScores:
    """Predictions of patches; of slides or patients if the model takes bags.

    Attributes:
        task: "multilabel", "regression" or "survival".
        columns: names of the T columns of the target.
        grid: times of the survival probabilities; empty for other tasks.
        slides, patients, slide, patient, x_l0, y_l0, level: as in `PatchScores`.
        target: (N, T) float64, NaN for missing values. Survival: time and event.
        output: (N, C) float32. Multilabel: probabilities; regression: values; survival: the risk (higher: the event is
            earlier), and the probability of survival until each time of `grid`.
    """

    task: TaskName
    columns: tuple[str, ...]
    grid: tuple[float, ...]
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    slide: NDArray[np.int32]
    patient: NDArray[np.int32]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    target: NDArray[np.float64]
    output: NDArray[np.float32]
    level: Level = "patch"
    VALUES: ClassVar = ("target", "output")

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the output columns in a CSV file."""
        prefix = _OUTPUT[self.task]
        if self.task == "survival":
            return (_RISK, *(f"{prefix}{time:.9g}" for time in self.grid))
        return tuple(prefix + name for name in self.columns)

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns of a CSV file."""
        targets = (_TRUE + name for name in self.columns)
        return (*_PLACES[self.level], *targets, *self.output_names)

    def rows(self) -> Iterator[list[object]]:
        """Yield the rows of a CSV file."""
        values = zip(self.target.tolist(), self.output.tolist(), strict=True)
        for i, (target, output) in enumerate(values):
            places = {
                "slide": self.slides[self.slide[i]], "patient": self.patients[self.patient[i]],
                "x_l0": self.x_l0[i], "y_l0": self.y_l0[i],
            }  # fmt: skip
            yield [
                *(places[name] for name in _PLACES[self.level]),
                *("" if math.isnan(value) else repr(value) for value in target),
                *(f"{value:.9g}" for value in output),
            ]


@dataclass(frozen=True, slots=True)
class GroupedScores:
    """Predictions of patches, slides or patients for the evaluation.

    Attributes:
        target: (N, T) float64.
        output: (N, C) float64.
        patient: (N,) int32; the unit of resampling.
        item: (N,) int64, number of the patch, slide or patient.
        left_out: number of slides or patients left out because they have several targets.
    """

    target: NDArray[np.float64]
    output: NDArray[np.float64]
    patient: NDArray[np.int32]
    item: NDArray[np.int64]
    left_out: int = 0


def grouped(scores: TargetScores, level: Level) -> GroupedScores:
    """Return the predictions at a level: means of the outputs over the patches of a slide, or the slides of a patient."""
    output = scores.output.astype(np.float64)
    if level == scores.level:
        items = np.arange(len(output)) if level == "patch" else _owner(scores, level)
        return GroupedScores(scores.target, output, scores.patient, items.astype(np.int64))
    group = _owner(scores, level)
    order = np.argsort(group, kind="stable")
    items, starts = np.unique(group[order], return_index=True)
    sizes = np.diff(starts, append=len(order))[:, None]
    means = np.add.reduceat(output[order], starts, axis=0) / sizes
    # NaN is the same target as NaN.
    target = np.nan_to_num(scores.target[order], nan=math.inf)
    lowest, highest = (np_.reduceat(target, starts, axis=0) for np_ in (np.minimum, np.maximum))
    one = (lowest == highest).all(axis=1)
    known = np.where(np.isinf(lowest), np.nan, lowest)
    return GroupedScores(
        known[one], means[one], scores.patient[order][starts][one], items[one].astype(np.int64),
        int((~one).sum()),
    )  # fmt: skip


def _owner(scores: TargetScores, level: Level) -> NDArray[np.int32]:
    return scores.slide if level == "slide" else scores.patient


class TargetRows:
    """Collects rows of a CSV file into arrays. `header` is its header, without the columns before those of the places.

    Raises:
        ValueError: the header is not that of predictions of targets.
    """

    def __init__(self, header: Sequence[str]) -> None:
        level = next(
            (it for it, names in _PLACES.items() if tuple(header[: len(names)]) == names), None
        )
        if level is None:
            raise ValueError(f"unknown columns {', '.join(header)}")
        self._level, self._places = level, _PLACES[level]
        rest = header[len(self._places) :]
        self._columns = tuple(name.removeprefix(_TRUE) for name in rest if name.startswith(_TRUE))
        outputs = rest[len(self._columns) :]
        self._task, self._grid = _task_of(outputs, self._columns)
        self._outputs = len(outputs)
        self._slides: dict[str, int] = {}
        self._patients: dict[str, int] = {}
        self._codes, self._corners = array("i"), array("q")
        self._targets, self._values = array("d"), array("f")

    def add(self, row: Sequence[str]) -> None:
        """Add a row."""
        begin = len(self._places)
        values = dict(zip(self._places, row, strict=False))
        targets, outputs = (
            row[begin : begin + len(self._columns)],
            row[begin + len(self._columns) :],
        )
        if len(outputs) != self._outputs:
            raise ValueError(f"{len(row)} cells")
        patient = values["patient"]
        slide = self._slides.setdefault(values.get("slide", patient), len(self._slides))
        self._codes.extend((slide, self._patients.setdefault(patient, len(self._patients))))
        self._corners.extend((int(values.get("x_l0", 0)), int(values.get("y_l0", 0))))
        self._targets.extend(float(cell) if cell else math.nan for cell in targets)
        self._values.extend(map(float, outputs))

    def scores(self) -> TargetScores:
        """Return the rows as arrays."""
        codes: Any = np.frombuffer(self._codes, np.int32).reshape(-1, 2)
        corners: Any = np.frombuffer(self._corners, np.int64).reshape(-1, 2)
        target: Any = np.frombuffer(self._targets, np.float64)
        output: Any = np.frombuffer(self._values, np.float32)
        return TargetScores(
            self._task, self._columns, self._grid, tuple(self._slides), tuple(self._patients),
            slide=codes[:, 0], patient=codes[:, 1], x_l0=corners[:, 0], y_l0=corners[:, 1],
            target=target.reshape(-1, len(self._columns)),
            output=output.reshape(-1, self._outputs), level=self._level,
        )  # fmt: skip


def _task_of(outputs: Sequence[str], columns: Sequence[str]) -> tuple[TaskName, tuple[float, ...]]:
    """Return the task that has these output columns, and the times of the survival probabilities."""
    if outputs and outputs[0] == _RISK:
        return "survival", tuple(
            float(name.removeprefix(_OUTPUT["survival"])) for name in outputs[1:]
        )
    for task in ("multilabel", "regression"):
        if tuple(outputs) == tuple(_OUTPUT[task] + name for name in columns):
            return task, ()
    raise ValueError(f"unknown columns {', '.join(outputs)}")


def with_common_grid(parts: Sequence[TargetScores]) -> list[TargetScores]:
    """Return survival predictions at the times of the first part, interpolated from survival 1 at time 0.

    Models of different training sets have different times.
    """
    return [_on_grid(part, parts[0].grid) for part in parts]


def _on_grid(scores: TargetScores, grid: tuple[float, ...]) -> TargetScores:
    if scores.grid == grid:
        return scores
    known = np.concatenate([np.ones((len(scores.output), 1)), scores.output[:, 1:]], axis=1)
    rows = [np.interp(grid, (0.0, *scores.grid), row) for row in known]
    survival = np.array(rows, np.float32).reshape(len(rows), len(grid))
    return replace(
        scores, grid=grid, output=np.concatenate([scores.output[:, :1], survival], axis=1)
    )
