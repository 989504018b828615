"""What a model predicts: a task with its targets, and scores of it to evaluate.

A target is a tuple of floats per slide or patient, NaN where it is missing. That of a classification is the number of
the class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.system.arrays import FloatArray
from histopipe.system.csv_files import FLAGS, cell_number, is_number
from histopipe.tasks.choices import Aggregation, EvaluationLevel, TaskName, levels_of
from histopipe.tasks.intervals import FEWEST_PATIENTS, Interval, WeightedStatistics

Target = tuple[float, ...]
TRUE = "true_"
"""Beginning of the columns of targets in tables of predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation.

    Attributes:
        positive: positive class of two; None for the last by name.
        threshold: rule that chooses the threshold; see `choose_threshold`.
        top_k: number of patches for the aggregation "top_k".
        resamples: number of bootstrap resamples of the patients; 0 for no intervals.
        seed: seed of the resamples.
    """

    positive: str | None = None
    threshold: str = "youden"
    top_k: int = 10
    resamples: int = 1000
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Decision thresholds at one level, chosen on validation data, and why the rule was not used.

    `values` has the probability of the positive class, one for each label, or the risk between the risk groups. It is
    empty if nothing is decided by a threshold.
    """

    values: tuple[float, ...] = ()
    note: str = ""


NO_THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True)
class Scores:
    """Predictions of patches, slides or patients for the evaluation.

    Attributes:
        task: the task, with the positive class of the evaluation.
        target: (N, T) float64, NaN for missing values.
        output: (N, C) float64.
        patient: (N,) int32; the unit of resampling.
        item: (N,) int64, number of the patch, slide or patient.
        limits: (N, L) float64, the thresholds of the model of each item.
        left_out: number of slides or patients left out because their patches have different targets.
    """

    task: Task
    target: FloatArray
    output: FloatArray
    patient: NDArray[np.int32]
    item: NDArray[np.int64]
    limits: FloatArray
    left_out: int = 0

    @property
    def label(self) -> NDArray[np.int32]:
        """(N,) class numbers of a classification; -1 for none."""
        return labels_of(self.target)

    def rows(self, rows: NDArray[np.intp]) -> Scores:
        """Return some of the items."""
        return replace(
            self, target=self.target[rows], output=self.output[rows], patient=self.patient[rows],
            item=self.item[rows], limits=self.limits[rows],
        )  # fmt: skip


@dataclass(slots=True)
class Details:
    """What a task adds to the metrics of its statistics.

    Attributes:
        values, intervals: more metrics.
        fields: more attributes of `Metrics`.
        remarks: notes.
        complete: whether resamples with an undefined metric are worth a note.
        few: columns with too few patients for intervals.
    """

    values: dict[str, float | None] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    complete: bool = True
    few: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Task(ABC):
    """A kind of prediction. `columns` are those of the labels file that hold the target.

    Class attributes:
        aggregations: from patches to slides and patients; the first is the default.
        main: titles of the metrics in a table that have intervals, by name; the first is the main metric.
        plain: those of further metrics in a table.
        titles: titles that differ from those of other tasks.
        of_classes: whether each item has one of several classes: its label, or an annotation.
        by_subgroup, compared: metrics of subgroups, and of differences between runs.
        several: what a slide has whose patches have different targets.
        undefined: what resamples do for which a metric is undefined.
    """

    name: ClassVar[TaskName]
    aggregations: ClassVar[tuple[Aggregation, ...]] = ("mean",)
    main: ClassVar[Mapping[str, str]]
    plain: ClassVar[Mapping[str, str]]
    titles: ClassVar[Mapping[str, str]] = {}
    by_subgroup: ClassVar[tuple[str, ...]]
    compared: ClassVar[tuple[str, ...]]
    of_classes: ClassVar[bool] = False
    several: ClassVar[str] = "targets"
    undefined: ClassVar[str] = "are undefined"
    columns: tuple[str, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes of which each item has one; empty if it has none."""
        return ()

    @property
    def positive(self) -> int | None:
        """Number of the positive class of two; None for others."""
        return None

    # Targets.

    @abstractmethod
    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return the target in the cells of a slide, by column; None if it is missing. `where` is for messages.

        Raises:
            UsageError: a cell has a wrong value.
        """

    @abstractmethod
    def strata(self, targets: FloatArray) -> list[str]:
        """Return a name for each of (N, T) targets. Splits put an equal share of each name in every subset."""

    @abstractmethod
    def check(self, targets: FloatArray, subset: str) -> None:
        """Check that a model can be trained, chosen or evaluated on the (N, T) targets of a subset.

        Raises:
            NothingToDo: they are all the same.
        """

    @abstractmethod
    def summary(self, targets: FloatArray) -> str:
        """Return (N, T) targets in a line of text."""

    def subset_text(self, targets: FloatArray, counts: Mapping[str, int], unit: str) -> str:
        """Return the targets of a subset, and its number of patches or bags (`unit`), by class or stratum."""
        total = sum(counts.values())
        return f"{total} {unit}: {self.summary(targets)}" if len(targets) else "none"

    # Sentences of the methods.

    @property
    @abstractmethod
    def outcome(self) -> str:
        """A sentence on what is predicted."""

    @property
    @abstractmethod
    def predicted(self) -> str:
        """What the model returns, as a noun phrase."""

    # Tables of predictions.

    @classmethod
    @abstractmethod
    def of_header(cls, names: Sequence[str]) -> Self | None:
        """Return the task of a table with these columns after those of the places; None if they are of another one."""

    @property
    @abstractmethod
    def output_names(self) -> tuple[str, ...]:
        """Columns of the outputs."""

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each number that a user sees, such as the risk alone."""
        return self.columns

    @property
    def target_names(self) -> tuple[str, ...]:
        """Columns of the targets, before those of the outputs. The first ones have the target, others what follows from it."""
        return tuple(TRUE + name for name in self.columns)

    def target_cells(self, target: FloatArray, output: NDArray[np.floating]) -> list[list[str]]:
        """Return the cells of `target_names` for (N, T) targets and (N, C) outputs, by row."""
        return [
            ["" if math.isnan(value) else repr(value) for value in row] for row in target.tolist()
        ]

    def read_target(self, cells: Sequence[str]) -> Iterable[float]:
        """Return the target from the cells of `target_names`."""
        return (float(cell) if cell else math.nan for cell in cells)

    def converted(self, task: Self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (N, C) outputs of a model with another task of this kind in the form of this one."""
        return output

    # Evaluation.

    def with_settings(self, settings: EvaluationSettings) -> Self:
        """Return the task with the settings of an evaluation. Raise UsageError if they do not fit."""
        return self

    def levels(self, level: EvaluationLevel) -> list[tuple[EvaluationLevel, Aggregation]]:
        """Return the levels at which predictions of a level are evaluated."""
        return [(at, how) for at, how in levels_of(level) if how in self.aggregations]

    def aggregate(
        self, output: FloatArray, starts: NDArray[np.intp], how: Aggregation, top_k: int
    ) -> FloatArray:
        """Return (G, C) outputs of the groups of (N, C) rows that begin at `starts`: their means."""
        return group_means(output, starts)

    @abstractmethod
    def statistics(self, scores: Scores) -> WeightedStatistics:
        """Return the metrics of scores as functions of weights."""

    def epoch_metrics(
        self, target: FloatArray, output: NDArray[np.float32]
    ) -> dict[str, float | None]:
        """Return metrics of an epoch by name: the main one, and perhaps others."""
        numbers = np.arange(len(target))
        values = self.statistics(
            Scores(
                self, target, output.astype(np.float64), np.zeros(len(target), np.int32), numbers,
                np.empty((len(target), 0)),
            )
        ).compute(np.ones((1, 1)))  # fmt: skip
        name = next(iter(self.main))
        return {name: known(values[name][0])}

    def thresholds(self, scores: Scores, rule: str) -> Thresholds:
        """Return the thresholds that a rule chooses on validation data."""
        return NO_THRESHOLDS

    def details(self, scores: Scores, statistics: WeightedStatistics) -> Details:
        """Return more than metrics; `statistics` are those of the scores."""
        return Details()


class ColumnTask(Task):
    """A task with one output for each column of its target, in columns that begin with `prefix`."""

    prefix: ClassVar[str]
    __slots__ = ()

    @classmethod
    def of_header(cls, names: Sequence[str]) -> Self | None:
        """Return the task of the columns `true_NAME` and `prefixNAME`."""
        task = cls(tuple(name.removeprefix(TRUE) for name in names if name.startswith(TRUE)))
        return task if (*task.target_names, *task.output_names) == tuple(names) else None

    @property
    def output_names(self) -> tuple[str, ...]:
        """Columns of the outputs."""
        return tuple(self.prefix + name for name in self.columns)


def few_patients(columns: Sequence[str], scores: Scores) -> list[str]:
    """Return the columns with values of too few patients for an interval."""
    patients = [len(np.unique(scores.patient[rows])) for rows in np.isfinite(scores.target).T]
    return [name for name, count in zip(columns, patients, strict=True) if count < FEWEST_PATIENTS]


def labels_of(target: FloatArray) -> NDArray[np.int32]:
    """Return the (N,) class numbers of (N, 1) targets of a classification; -1 for none."""
    return np.nan_to_num(target[:, 0], nan=-1).astype(np.int32)


def group_means(values: FloatArray, starts: NDArray[np.intp]) -> FloatArray:
    """Return (G, C) means of the groups of (N, C) rows that begin at `starts`."""
    sizes = np.diff(starts, append=len(values))
    return np.asarray(np.add.reduceat(values, starts, axis=0) / sizes[:, None], np.float64)


def known(value: float) -> float | None:
    """Return a metric; None if it is not finite, and so undefined."""
    return float(value) if math.isfinite(value) else None


def numeric_cell(cell: str, where: str) -> float:
    """Return a number, or NaN for an empty cell. Raise UsageError for a text."""
    if cell and not is_number(cell):
        raise UsageError(where, found=repr(cell), expected="a number, or an empty cell")
    return cell_number(cell)


def flag_cell(cell: str, where: str) -> float:
    """Return 0 or 1, or NaN for an empty cell. Raise UsageError for anything else."""
    if not cell:
        return math.nan
    value = FLAGS.get(cell.lower(), cell_number(cell))
    if value not in (0, 1):
        raise UsageError(where, found=repr(cell), expected="0, 1 or an empty cell")
    return value


def relative_ranks(values: FloatArray) -> FloatArray:
    """Return ranks from 0 to 1, equal for equal values; NaN for NaN."""
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return np.full(len(values), np.nan)
    low, high = (np.searchsorted(ordered, values, subset) for subset in ("left", "right"))
    return np.where(np.isfinite(values), (low + high) / (2 * len(ordered)), np.nan)


def rank_parts(ranks: FloatArray, count: int) -> list[int]:
    """Return the part of each rank from 0 to 1, counted from 1 to `count`."""
    numbers = np.minimum(np.nan_to_num(ranks) * count, count - 1).astype(int) + 1
    return [int(number) for number in numbers]
