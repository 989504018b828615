"""What a model predicts: classes, several labels, numbers, or survival, from columns of the labels file.

A target is a tuple of floats per slide or patient, NaN where it is missing. Classification has no target: its class is
the label.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import TaskName
from histopipe.errors import NothingToDo, UsageError
from histopipe.system.csv_files import FLAGS, cell_number, is_number

Target = tuple[float, ...]
_QUARTERS = 4
_LEAST_SPREAD, _SMALLEST = 1e-4, 1e-30
"""Smallest difference of targets, as a share of the largest, and smallest target: networks compute in float32."""
_BOTH = "correct the cell, or leave time and event empty to exclude the slide"


@dataclass(frozen=True, slots=True)
class Task(ABC):
    """A kind of prediction. `columns` are those of the labels file that hold the target."""

    name: ClassVar[TaskName]
    columns: tuple[str, ...]

    @abstractmethod
    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return the target in the cells of a slide, by column; None if it is missing. `where` is for messages.

        Raises:
            UsageError: a cell has a wrong value.
        """

    @abstractmethod
    def strata(self, targets: NDArray[np.float64]) -> list[str]:
        """Return a name for each of (N, T) targets. Splits put an equal share of each name on every side."""

    @abstractmethod
    def check(self, targets: NDArray[np.float64], side: str) -> None:
        """Check that a model can be trained or chosen on the (N, T) targets of a side.

        Raises:
            NothingToDo: they are all the same.
        """

    @abstractmethod
    def summary(self, targets: NDArray[np.float64]) -> str:
        """Return (N, T) targets in a line of text."""


class Multilabel(Task):
    """Several labels, each 0 or 1 or missing."""

    name = "multilabel"
    __slots__ = ()

    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return 0, 1 or NaN for each label; None if all are missing."""
        values = tuple(_flag(cells[name], f"{where}: {name}") for name in self.columns)
        return None if all(map(math.isnan, values)) else values

    def strata(self, targets: NDArray[np.float64]) -> list[str]:
        """Return the rarest label of each slide; see `assignment.assign_labels`, which uses all labels."""
        count = np.nansum(targets, axis=0)
        order = np.argsort(count, kind="stable").tolist()
        return [
            next((self.columns[i] for i in order if row[i] == 1), "none of the labels")
            for row in targets
        ]

    def check(self, targets: NDArray[np.float64], side: str) -> None:
        """Check that each label has both values."""
        for number, name in enumerate(self.columns):
            values = targets[:, number]
            known = values[np.isfinite(values)]
            if not ((known == 0).any() and (known == 1).any()):
                raise NothingToDo(
                    f"column {name} cannot be learned: {side}",
                    found=f"{int(known.sum())} of {len(known)} with 1", expected="both 0 and 1",
                    todo="leave the column out, or add slides",
                )  # fmt: skip

    def summary(self, targets: NDArray[np.float64]) -> str:
        """Return the number of slides with each label."""
        known = np.isfinite(targets).sum(axis=0)
        found = np.nansum(targets, axis=0).astype(int)
        return ", ".join(
            f"{name} {a} of {b}" for name, a, b in zip(self.columns, found, known, strict=True)
        )


class Regression(Task):
    """One or several numbers."""

    name = "regression"
    __slots__ = ()

    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return a number or NaN for each column; None if all are missing."""
        values = tuple(_number(cells[name], f"{where}: {name}") for name in self.columns)
        return None if all(map(math.isnan, values)) else values

    def strata(self, targets: NDArray[np.float64]) -> list[str]:
        """Return the quarter of each slide, by the mean rank over the columns."""
        ranks = np.stack([_ranks(column) for column in targets.T], axis=1)
        return [f"quarter {number}" for number in _parts(np.nanmean(ranks, axis=1), _QUARTERS)]

    def check(self, targets: NDArray[np.float64], side: str) -> None:
        """Check that each column has several values."""
        for number, name in enumerate(self.columns):
            known = targets[np.isfinite(targets[:, number]), number]
            if len(np.unique(known)) < 2:
                raise NothingToDo(
                    f"column {name} cannot be learned: {side}",
                    found=f"{len(known)} slides with {'one value' if len(known) else 'no value'}",
                    expected="several values", todo="leave the column out, or add slides",
                )  # fmt: skip
            spread, largest = float(np.ptp(known)), float(np.abs(known).max())
            if spread < _LEAST_SPREAD * largest or not _SMALLEST < largest < 1 / _SMALLEST:
                raise UsageError(
                    f"column {name} cannot be learned: {side}",
                    found=f"values that differ by {spread:.3g}, up to {largest:.10g}",
                    expected=f"differences above {_LEAST_SPREAD * largest:.3g}, which single precision distinguishes",
                    todo="subtract a constant from the column, or use another unit",
                )

    def summary(self, targets: NDArray[np.float64]) -> str:
        """Return mean and standard deviation of each column."""
        parts = []
        for name, column in zip(self.columns, targets.T, strict=True):
            known = column[np.isfinite(column)]
            if len(known):
                parts.append(f"{name} {known.mean():.4g} ± {known.std():.3g}")
        return ", ".join(parts)


class Survival(Task):
    """A time, and whether the event happened at that time (1) or not until then (0)."""

    name = "survival"
    __slots__ = ()

    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return time and event; None if both are missing."""
        time_name, event_name = self.columns
        if not cells[time_name] and not cells[event_name]:
            return None
        time = _number(cells[time_name], f"{where}: {time_name}")
        if not time >= 0:
            raise UsageError(
                f"{where}: {time_name}",
                found=repr(cells[time_name]) if cells[time_name] else "a missing value",
                expected="a time, 0 or more",
                todo=_BOTH,
            )
        event = _flag(cells[event_name], f"{where}: {event_name}")
        if math.isnan(event):
            raise UsageError(
                f"{where}: {event_name}", found="a missing value", expected="0 or 1", todo=_BOTH
            )
        return time, event

    def strata(self, targets: NDArray[np.float64]) -> list[str]:
        """Return event or censored, in the earlier or later half of these."""
        names = np.empty(len(targets), object)
        for value, name in ((1, "event"), (0, "censored")):
            rows = np.flatnonzero(targets[:, 1] == value)
            halves = _parts(_ranks(targets[rows, 0]), 2)
            for row, half in zip(rows, halves, strict=True):
                names[row] = f"{name}, {('early', 'late')[half - 1]}"
        return [str(name) for name in names]

    def check(self, targets: NDArray[np.float64], side: str) -> None:
        """Check that there is an event that is not the last time."""
        time, event = targets.T
        if not (event == 1).any():
            raise NothingToDo(
                f"survival cannot be learned: {side}", found=f"no event in column {self.columns[1]}",
                expected="at least one", todo="add slides",
            )  # fmt: skip
        if not (time[event == 1].min() < time).any():
            raise NothingToDo(
                f"survival cannot be learned: {side}", found="no time later than the first event",
                expected="patients with different times", todo="add slides",
            )  # fmt: skip

    def summary(self, targets: NDArray[np.float64]) -> str:
        """Return the number of events and the median time."""
        return f"{int(targets[:, 1].sum())} events, median time {np.median(targets[:, 0]):.4g}"


TASKS: Mapping[str, type[Task]] = {it.name: it for it in (Multilabel, Regression, Survival)}


def make_task(name: str, columns: Sequence[str]) -> Task | None:
    """Return the task of a name with its columns; None for classification."""
    return TASKS[name](tuple(columns)) if name in TASKS else None


def _number(cell: str, where: str) -> float:
    if cell and not is_number(cell):
        raise UsageError(where, found=repr(cell), expected="a number, or an empty cell")
    return cell_number(cell)


def _flag(cell: str, where: str) -> float:
    if not cell:
        return math.nan
    value = FLAGS.get(cell.lower(), cell_number(cell))
    if value not in (0, 1):
        raise UsageError(where, found=repr(cell), expected="0, 1 or an empty cell")
    return value


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 0 to 1, equal for equal values; NaN for NaN."""
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return np.full(len(values), np.nan)
    low, high = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return np.where(np.isfinite(values), (low + high) / (2 * len(ordered)), np.nan)


def _parts(ranks: NDArray[np.float64], count: int) -> list[int]:
    """Return the part of each rank from 0 to 1, counted from 1 to `count`."""
    numbers = np.minimum(np.nan_to_num(ranks) * count, count - 1).astype(int) + 1
    return [int(number) for number in numbers]
