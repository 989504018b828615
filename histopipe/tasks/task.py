"""What a model predicts: a task with its targets, outputs and metrics.

A target is a tuple of floats per slide or patient, NaN where it is missing. That of a classification is the number of
the class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.system.arrays import FloatArray
from histopipe.system.output import listed
from histopipe.system.table_cells import FLAGS, cell_number, is_number
from histopipe.tasks.choices import LEVELS_OF, Aggregation, EvaluationLevel, TaskName
from histopipe.tasks.intervals import RELIABLE_PATIENTS, mean_ranks
from histopipe.tasks.predictions import NO_THRESHOLDS, EvaluationSettings, Predictions, Thresholds
from histopipe.tasks.statistics import Statistics

Target = tuple[float, ...]
TRUE = "true_"
"""Beginning of the columns of targets in tables of predictions."""


@dataclass(frozen=True, slots=True)
class Task(ABC):
    """A kind of prediction. `columns` are those of the labels file that hold the target.

    By default there is an output for each column, in columns of tables that begin with `prefix`.

    Class attributes:
        settings: settings of a training that name the columns.
        aggregations: from patches to slides and patients; the first is the default.
        main: titles of the metrics in a table that have intervals, by name; the first is the main metric.
        plain: those of further metrics in a table.
        ranked: the one of `main` that ranks items; without a signal, it is 0.5, or 0 of a correlation. The first one if the
            task does not rank (`ranks`).
        titles: titles that differ from those of other tasks.
        of_classes: whether each item has one of several classes: its label, or an annotation.
        by_class: whether samples have class numbers: of their class, or of their rarest pixels.
        of_patches: whether models of patches can predict it.
        has_sets: whether it can have prediction sets.
        of_values: whether an output minus the target is an error.
        probabilities: whether the outputs are probabilities.
        by_subgroup, compared: metrics of subgroups, and of differences between runs.
        has_mean: whether the mean of targets is a prediction.
        linear_loss: loss of a linear model, if it differs from the default loss.
        several: what a slide has whose patches have different targets.
        stratum: what is equally frequent in all subsets of a split.
        undefined: what resamples do for which a metric is undefined.
        outcome_text, predicted_text: sentence on what is predicted, and noun phrase on what the model returns, with a
            place for the classes or columns.
    """

    name: ClassVar[TaskName]
    settings: ClassVar[tuple[str, ...]] = ("target",)
    aggregations: ClassVar[tuple[Aggregation, ...]] = ("mean",)
    main: ClassVar[Mapping[str, str]]
    plain: ClassVar[Mapping[str, str]]
    ranked: ClassVar[str] = "auc"
    ranks: ClassVar[bool] = True
    titles: ClassVar[Mapping[str, str]] = {}
    by_subgroup: ClassVar[tuple[str, ...]]
    compared: ClassVar[tuple[str, ...]]
    of_classes: ClassVar[bool] = False
    by_class: ClassVar[bool] = False
    of_patches: ClassVar[bool] = True
    has_sets: ClassVar[bool] = True
    of_values: ClassVar[bool] = True
    probabilities: ClassVar[bool] = False
    has_mean: ClassVar[bool] = True
    linear_loss: ClassVar[str] = ""
    several: ClassVar[str] = "targets"
    stratum: ClassVar[str] = "value"
    undefined: ClassVar[str] = "are undefined"
    outcome_text: ClassVar[str]
    predicted_text: ClassVar[str]
    prefix: ClassVar[str] = "p_"
    columns: tuple[str, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes of which each item has one; empty if it has none."""
        return ()

    @property
    def positive(self) -> int | None:
        """Number of the positive class of two; None for others."""
        return None

    @property
    def has_thresholds(self) -> bool:
        """Whether classes or labels are decided by thresholds."""
        return self.positive is not None

    # Targets.

    def target(self, cells: Mapping[str, str], where: str) -> Target | None:
        """Return the target in the cells of a slide, by column; None if it is missing. `where` is for messages.

        Raises:
            UsageError: a cell has a wrong value.
        """
        values = tuple(self.read_cell(cells[name], f"{where}: {name}") for name in self.columns)
        return None if all(map(math.isnan, values)) else values

    @staticmethod
    def read_cell(cell: str, where: str) -> float:
        """Return a number of the target, or NaN for an empty cell. Raise UsageError for a text."""
        if cell and not is_number(cell):
            raise UsageError(where, found=repr(cell), expected="a number, or an empty cell")
        return cell_number(cell)

    def label_targets(self, labels: NDArray[np.int32]) -> FloatArray:
        """Return the (N, 1) targets of samples with (N,) class numbers, -1 for none."""
        return np.where(labels >= 0, labels, np.nan)[:, None].astype(np.float64)

    @abstractmethod
    def strata(self, targets: FloatArray) -> list[str]:
        """Return a name for each of (N, T) targets. Splits put an equal share of each name in every subset."""

    def names_to_balance(
        self, strata: Sequence[str], slides: Sequence[tuple[str, Target | None]]
    ) -> tuple[list[set[str]], tuple[str, ...], tuple[str, ...]]:
        """Return names for each slide, from stratum and target, of which splits put an equal share in every subset.

        Then the names of which every subset should have slides, and the other names. `strata` are those of all slides.
        """
        # Names of ranges begin with their kind, such as "event, early".
        names = tuple(sorted({name.split()[0] for name in strata}))
        return [{name, name.split()[0]} for name, _ in slides], names, tuple(strata)

    def finite_targets(self, targets: FloatArray) -> dict[str, FloatArray]:
        """Return the values in (N, T) targets that are not missing, by column."""
        return {
            name: values[np.isfinite(values)]
            for name, values in zip(self.columns, targets.T, strict=True)
        }

    @abstractmethod
    def check(self, targets: FloatArray, subset: str) -> None:
        """Check that a model can be trained, chosen or evaluated on the (N, T) targets of a subset.

        Raises:
            NothingToDo: they are all the same.
        """

    def summary(self, targets: FloatArray) -> str:
        """Return (N, T) targets in a line of text. Not for classes, whose numbers are in `subset_text`."""
        raise NotImplementedError

    def subset_text(self, targets: FloatArray, counts: Mapping[str, int], unit: str) -> str:
        """Return the targets of a subset, and its number of patches or bags (`unit`), by class or stratum."""
        return f"{sum(counts.values())} {unit}: {self.summary(targets)}" if len(targets) else "none"

    def flag_counts(self, counts: Mapping[str, int]) -> str:
        """Return numbers of patients with 1 in each of the columns `flags`, as text; empty without such columns."""
        return listed([f"{counts[name]:,} {name}" for name in self.flags])

    @property
    def flags(self) -> tuple[str, ...]:
        """Columns of the target with 0 or 1."""
        return ()

    # Sentences of the methods.

    @property
    def outcome(self) -> str:
        """A sentence on what is predicted."""
        return self.outcome_text.format(listed(self.classes, last="or") or listed(self.columns))

    @property
    def predicted(self) -> str:
        """What the model returns, as a noun phrase."""
        return self.predicted_text.format(listed(self.classes or self.columns))

    # Tables of predictions.

    @classmethod
    def of_header(cls, names: Sequence[str]) -> Self | None:
        """Return the task of a table with these columns after those of the places; None if they are of another one."""
        task = cls(tuple(name.removeprefix(TRUE) for name in names if name.startswith(TRUE)))
        return task if (*task.target_names, *task.output_names) == tuple(names) else None

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each number that a user sees, such as the risk alone."""
        return self.columns

    @property
    def output_names(self) -> tuple[str, ...]:
        """Columns of the outputs."""
        return tuple(self.prefix + name for name in self.names)

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

    # What users see.

    @property
    def value_text(self) -> str:
        """What a value of `patch_values` is, before the name of the class or column."""
        return "probability of" if self.probabilities else "predicted"

    @property
    def value_names(self) -> tuple[str, ...]:
        """Columns of the means of `patch_values` of slides."""
        return self.output_names

    def patch_values(self, output: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the (N, K) values of the `names` on a map of patches, from (N, C) outputs."""
        return output

    def item_values(self, scores: Predictions) -> dict[str, FloatArray]:
        """Return the (N,) values of slides or patients in a table, by column: targets, and outputs that have a name."""
        outputs = zip(self.output_names, scores.output.T[: len(self.names)], strict=False)
        return {
            **{f"true {name}": t for name, t in zip(self.columns, scores.target.T, strict=True)},
            **{name.replace("_", " ", 1): values for name, values in outputs},
        }

    # Evaluation.

    def with_settings(self, settings: EvaluationSettings) -> Self:
        """Return the task with the settings of an evaluation. Raise UsageError if they do not fit."""
        return self

    def levels(self, level: EvaluationLevel) -> list[tuple[EvaluationLevel, Aggregation]]:
        """Return the levels at which predictions of a level are evaluated."""
        return [(at, how) for at, how in LEVELS_OF[level] if how in self.aggregations]

    def aggregate(
        self, output: FloatArray, starts: NDArray[np.intp], how: Aggregation, top_k: int
    ) -> FloatArray:
        """Return (G, C) outputs of the groups of (N, C) rows that begin at `starts`: their means."""
        return group_means(output, starts)

    def decide(self, output: FloatArray, limits: FloatArray) -> NDArray[np.intp]:
        """Return (N,) decided class numbers: by (N, L) or (L,) thresholds of the positive class, or the most probable one."""
        positive = self.positive
        if positive is None or not limits.shape[-1]:
            return np.asarray(np.argmax(output, axis=1), np.intp)
        return np.where(output[:, positive] >= limits[..., 0], positive, 1 - positive)

    def classifications(self, predictions: Predictions) -> Iterator[tuple[str, Predictions]]:
        """Return each classification that predictions consist of, with the name of its column: of classes, one."""
        return iter([(self.columns[0], predictions)])

    @abstractmethod
    def statistics(self, scores: Predictions) -> Statistics:
        """Return the metrics of scores as functions of weights."""

    def epoch_metrics(
        self, target: FloatArray, output: NDArray[np.float32]
    ) -> dict[str, float | None]:
        """Return metrics of an epoch by name: the main one, and perhaps others."""
        zeros: Any = np.zeros(len(target), np.int32)
        scores = Predictions(
            self, (), (), zeros, zeros, zeros, zeros, target, output.astype(np.float64)
        )
        name = next(iter(self.main))
        return {name: self.statistics(scores).values()[name]}

    def thresholds(self, scores: Predictions, rule: str) -> Thresholds:
        """Return the thresholds that a rule chooses on validation data."""
        return NO_THRESHOLDS

    def outcome_counts(self, scores: Predictions) -> dict[str, int]:
        """Return the number of patients by class or value of a label, or with an event; empty for numbers."""
        return {
            f"{part.task.classes[code]}" if self.of_classes else f"{name} {code}": len(
                np.unique(part.patient[part.label == code])
            )
            for name, part in self.classifications(scores)
            for code in (np.unique(part.label).tolist() if self.probabilities else ())
        }

    def cautions(self, scores: Predictions) -> list[str]:
        """Return why intervals of scores may be too narrow, although there are enough patients: a class has few of them."""
        counts = self.outcome_counts(scores) if self.probabilities else {}
        few = [f"{name} {n}" for name, n in counts.items() if n < RELIABLE_PATIENTS]
        text = "intervals of F1, log loss and calibration error may be too narrow"
        return [f"few patients ({listed(few)}): {text}"] if few else []

    def details(self, scores: Predictions, statistics: Any) -> dict[str, Any]:
        """Return further fields of `Metrics`; `values`, `intervals` and `notes` are added to those of the statistics.

        `statistics` is the result of the method `statistics` for the scores.
        """
        return {}


def group_means(values: FloatArray, starts: NDArray[np.intp]) -> FloatArray:
    """Return (G, C) means of the groups of (N, C) rows that begin at `starts`."""
    sums, sizes = np.add.reduceat(values, starts, axis=0), np.diff(starts, append=len(values))
    return np.asarray(sums / sizes[:, None], np.float64)


def flag_cell(cell: str, where: str) -> float:
    """Return 0 or 1, or NaN for an empty cell. Raise UsageError for anything else."""
    value = FLAGS.get(cell.lower(), cell_number(cell))
    if cell and value not in (0, 1):
        raise UsageError(where, found=repr(cell), expected="0, 1 or an empty cell")
    return value


def relative_ranks(values: FloatArray) -> FloatArray:
    """Return ranks from 0 to 1, equal for equal values; NaN for NaN."""
    ranks, finite = np.full(len(values), np.nan), np.isfinite(values)
    ranks[finite] = (mean_ranks(values[finite]) - 0.5) / max(finite.sum(), 1)
    return ranks


def rank_parts(ranks: FloatArray, count: int) -> list[int]:
    """Return the part of each rank from 0 to 1, counted from 1 to `count`."""
    return list((np.minimum(np.nan_to_num(ranks) * count, count - 1).astype(int) + 1).tolist())
