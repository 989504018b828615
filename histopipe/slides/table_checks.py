"""Checks of the cells of a table: missing values, columns of numbers, names, and values that may be one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.system.csv_files import (
    FLAGS,
    NUMERIC_SHARE,
    cell_number,
    has_control_character,
    has_decimal_comma,
    is_number,
    similar_values,
)

LABEL_COLUMNS = ("slide", "label", "patient", "site")
_MOST_CODES = 8
"""A column with more different numbers than this may hold no categories."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table.

    Attributes:
        line: line in which it begins.
        slide: cell of the column slide.
        cells: cells of the other columns, by name.
    """

    line: int
    slide: str
    cells: dict[str, str]


def refuse_control_characters(
    path: Path, rows: Iterable[TableRow], columns: Iterable[str] = ()
) -> None:
    """Refuse names that no record can hold, such as those with a line break."""
    for row in rows:
        for column in ("slide", *columns):
            cell = row.slide if column == "slide" else row.cells.get(column, "")
            if has_control_character(cell):
                raise UsageError(
                    f"{path}, line {row.line}: column {column}", found=repr(cell)[:80],
                    expected="a text without line breaks and control characters",
                    todo="correct the cell, and look for a missing quote in this line",
                )  # fmt: skip


def clear_missing(
    path: Path,
    rows: Iterable[TableRow],
    columns: Iterable[str],
    missing: Collection[str],
    notify: Callable[[str], None],
) -> None:
    """Make missing values empty, and report their number by column and spelling."""
    texts, spellings = [], set[str]()
    for column in columns:
        counts = Counter(row.cells[column] for row in rows if row.cells.get(column) in missing)
        listed = ", ".join(f"{counts[cell]} {cell or 'empty'}" for cell in sorted(counts))
        texts += [f"{column} {counts.total()} ({listed})"] if counts else []
        spellings |= counts.keys()
    for row in rows:
        row.cells.update({name: "" for name, cell in row.cells.items() if cell in missing})
    if texts:
        hint = "; --na changes what counts as missing" if spellings - {""} else ""
        notify(f"{path}: missing values: {'; '.join(texts)}{hint}")


def check_numbers(path: Path, rows: Sequence[TableRow], column: str) -> None:
    """Refuse a column of numbers with decimal commas, or with a cell that would turn them into categories."""
    filled = [row for row in rows if row.cells[column]]
    odd = [row for row in filled if not is_number(row.cells[column])]
    numbers = {cell for row in filled if is_number(cell := row.cells[column])}
    commas = [row for row in odd if has_decimal_comma(row.cells[column])]
    numeric = len(filled) - len(odd) + len(commas)
    mostly = numeric >= NUMERIC_SHARE * len(filled) and (bool(commas) or len(numbers) > _MOST_CODES)
    odd = commas or odd
    if odd and mostly:
        raise UsageError(
            f"{path}, line {odd[0].line}: column {column}", found=repr(odd[0].cells[column]),
            expected="a number with a decimal point" if commas else
            f"a number, as in {len(filled) - len(odd)} of {len(filled)} cells",
            todo="write 3.5 for 3,5" if commas else
            "correct the cell; if it is a missing value, leave it empty or name it with --na",
        )  # fmt: skip


SUBSET_SPELLINGS = {
    "train": 0,
    "training": 0,
    "validation": 1,
    "valid": 1,
    "val": 1,
    "test": 2,
    "testing": 2,
}
"""Cells of a split column in lower case, and their subsets."""


def warn_of_similar(
    path: Path, rows: Iterable[TableRow], columns: Iterable[str], notify: Callable[[str], None]
) -> None:
    """Warn of values that may be one, such as "Tumour" and "tumour"."""
    for column in columns:
        values = {cell for row in rows if (cell := row.cells.get(column))}
        # "1" and "1.0" are one number, "TRUE" and "true" one flag, and "Test" and "test" one subset, except as names.
        as_names = column in LABEL_COLUMNS or not all(
            is_number(cell) or cell.lower() in {*FLAGS, *SUBSET_SPELLINGS} for cell in values
        )
        if as_names and (text := similar_values(values)):
            notify(f"warning: {path}: column {column}: {text}")


def refuse_regression(path: Path, labels: Iterable[str]) -> None:
    """Refuse labels of which nearly all are numbers, and some have decimals: they are no classes."""
    values = [label for label in labels if label]
    numbers = [
        cell_number(cell.replace(",", ".") if has_decimal_comma(cell) else cell)
        for cell in values
        if is_number(cell) or has_decimal_comma(cell)
    ]
    if len(numbers) >= NUMERIC_SHARE * len(values) and any(number % 1 for number in numbers):
        raise UsageError(
            f"{path}: the labels are continuous values",
            found=", ".join(values[:4]),
            expected="classes",
            todo="pass --task regression --target label, or group the values into classes",
        )
