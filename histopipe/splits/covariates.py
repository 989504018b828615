"""Clinical variables as numbers: numeric ones standardised, categories one-hot, missing values by an indicator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from histopipe.errors import UsageError
from histopipe.system.csv_files import cell_number, is_number

_MOST_CATEGORIES = 50


@dataclass(frozen=True, slots=True)
class Covariate:
    """A column, as in the training set: a number if all cells are numbers, else a category.

    Attributes:
        name: name of the column.
        categories: sorted categories; empty for a number.
        mean, deviation: of the known numbers.
    """

    name: str
    categories: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, name: str, cells: Sequence[str]) -> Covariate:
        """Return the covariate with the cells of the training set.

        Raises:
            UsageError: there is one value only, or too many categories.
        """
        entries = [cell for cell in cells if cell]
        values = sorted(set(entries))
        if len(values) < 2:
            raise UsageError(
                f"--covariates: column {name}", found=f"only {values[0]!r} in training" if values else "no value in training",
                expected="several values", todo="leave the column out",
            )  # fmt: skip
        numbers = [cell_number(cell) for cell in entries]
        if all(map(math.isfinite, numbers)):
            deviation = float(np.std(numbers))
            return cls(name, mean=float(np.mean(numbers)), deviation=deviation or 1.0)
        if len(values) > _MOST_CATEGORIES:
            raise UsageError(
                f"--covariates: column {name}", found=f"{len(values)} categories, such as {values[0]!r}",
                expected=f"numbers, or at most {_MOST_CATEGORIES} categories",
            )  # fmt: skip
        return cls(name, tuple(values))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the numbers that a model gets; the last is 1 if the value is missing."""
        values = [f"{self.name}={category}" for category in self.categories] or [self.name]
        return (*values, f"{self.name} missing")

    def known(self, cell: str) -> bool:
        """Return whether a cell has a value that the training set could have."""
        return cell in self.categories if self.categories else is_number(cell)

    def encode(self, cell: str) -> list[float]:
        """Return the `inputs` of a cell. Unknown categories are missing."""
        if not self.known(cell):
            return [0.0] * (len(self.inputs) - 1) + [1.0]
        if self.categories:
            return [*(float(cell == category) for category in self.categories), 0.0]
        return [(cell_number(cell) - self.mean) / self.deviation, 0.0]


@dataclass(frozen=True, slots=True)
class Covariates:
    """The covariates of a training."""

    columns: tuple[Covariate, ...]

    @classmethod
    def of(cls, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Covariates:
        """Return the covariates with the rows of cells of the training set. Raise as `Covariate.of`."""
        columns = list(zip(*rows, strict=True))
        return cls(
            tuple(Covariate.of(name, cells) for name, cells in zip(names, columns, strict=True))
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the numbers that a model gets."""
        return tuple(name for column in self.columns for name in column.inputs)

    def encode(self, cells: Sequence[str]) -> list[float]:
        """Return the numbers for the cells of a slide."""
        pairs = zip(self.columns, cells, strict=True)
        return [value for column, cell in pairs for value in column.encode(cell)]

    def unknown(self, cells: Sequence[str]) -> list[str]:
        """Return a text for each cell with a value that training never saw, which counts as missing."""
        return [
            f"column {column.name}: {cell!r}"
            for column, cell in zip(self.columns, cells, strict=True)
            if cell and not column.known(cell)
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """Return a JSON-ready list."""
        return [
            {
                "name": column.name,
                "categories": column.categories,
                "mean": column.mean,
                "deviation": column.deviation,
            }
            for column in self.columns
        ]

    @classmethod
    def from_json(cls, value: Sequence[Mapping[str, Any]]) -> Covariates:
        """Return covariates from the result of `to_json`."""
        return cls(
            tuple(
                Covariate(
                    entry["name"], tuple(entry["categories"]), entry["mean"], entry["deviation"]
                )
                for entry in value
            )
        )
