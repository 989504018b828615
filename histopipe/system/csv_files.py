"""Strict reading of CSV files that users write, and of the values in their cells."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from histopipe.errors import UsageError

NA_VALUES = (
    "NA",
    "N/A",
    "NaN",
    "nan",
    "NULL",
    "null",
    "None",
    "#N/A",
    "-",
    "--",
    "'--",
    "[Not Available]",
)
"""Cells that are missing values, apart from the empty cell: those of R, pandas, SQL, Excel, GDC and cBioPortal."""
FLAGS = {"false": 0.0, "true": 1.0}
"""Cells that stand for 0 and 1, in lower case."""
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_LINE_BREAK = re.compile(rb"\r\n|\r|\n")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+", re.ASCII)
_SAVE = "save it as 'CSV UTF-8', with commas between the cells"


class CsvRow(NamedTuple):
    """A row of a CSV file, with the line in which it begins."""

    line: int
    cells: list[str]


def read_csv(path: Path) -> tuple[list[str], list[CsvRow]]:
    """Return the column names of a CSV file, and its other rows that are not blank.

    Rows and cells are those of Python's `csv` module with strict quotes: only line feeds and carriage returns end a
    line, and quoted ones are data. Cells are in NFC, without surrounding blanks; column names are in lower case.

    Raises:
        UsageError: the file cannot be read, is not UTF-8, has another separator, wrong quotes or a NUL character, or a
            row has more or fewer cells than the header. The message contains file and line.
    """
    text = _decoded(path)
    header: list[str] | None = None
    rows: list[CsvRow] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for cells in reader:
            cells = [nfc(cell.strip()) for cell in cells]  # noqa: PLW2901
            if any(cells):
                if header is None:
                    header = [column_key(cell) for cell in cells]
                else:
                    _check_length(path, line, cells, header)
                    rows.append(CsvRow(line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(
            f"{path}, line {line}",
            found=str(error),
            expected="cells without quotes, or in a pair of quotes",
            todo="correct the quotes of the row that begins in this line; write a quote in a quoted cell twice",
        ) from error
    return header or [], rows


def _decoded(path: Path) -> str:
    """Return the text of a file, without a byte order mark."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist", todo="check the path") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    if data.startswith(_UTF16):
        raise UsageError(
            f"{path}, line 1", found="UTF-16", expected="a CSV file in UTF-8", todo=_SAVE
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}, line {_line_at(data, error.start)}",
            found=str(error),
            expected="a CSV file in UTF-8",
            todo=_SAVE,
        ) from error
    if "\0" in text:
        raise UsageError(
            f"{path}, line {_line_at(data, data.index(0))}",
            found="a NUL character",
            expected="a CSV file in UTF-8",
            todo=_SAVE,
        )
    lines = enumerate(io.StringIO(text, newline=None), 1)
    line, first = next(((line, it) for line, it in lines if it.strip()), (1, ""))
    others = [name for separator, name in _SEPARATORS.items() if separator in first]
    if others and "," not in first:
        raise UsageError(
            f"{path}, line {line}",
            found=f"{others[0]} between the cells",
            expected="cells separated by commas",
            todo=_SAVE,
        )
    return text


def _line_at(data: bytes, position: int) -> int:
    return len(_LINE_BREAK.findall(data[:position])) + 1


def _check_length(path: Path, line: int, cells: list[str], header: list[str]) -> None:
    if len(cells) != len(header):
        raise UsageError(
            f"{path}, line {line}",
            found=f"{len(cells)} cells",
            expected=f"{len(header)} ({','.join(header)})",
            todo="quote cells that contain a comma"
            if len(cells) > len(header)
            else "write a comma for each missing cell",
        )


def nfc(text: str) -> str:
    """Return a text in Unicode NFC, in which names are compared: systems write "ü" as one or two characters."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def column_key(name: str) -> str:
    """Return the form in which names of columns are compared: in lower case and NFC."""
    return nfc(name.strip().lower())


def has_control_character(text: str) -> bool:
    """Return whether a text has a control character, which names may not have."""
    return not text.isprintable() and any(unicodedata.category(it) == "Cc" for it in text)


def cell_number(cell: str) -> float:
    """Return the number in a cell, NaN if there is none. `1_20`, `infinity` and other forms of Python are no numbers.

    Example:
        >>> cell_number("1.5e3"), cell_number("1_20")
        (1500.0, nan)
    """
    value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
    return value if math.isfinite(value) else math.nan


def is_number(cell: str) -> bool:
    """Return whether a cell is a finite number."""
    return math.isfinite(cell_number(cell))


def has_decimal_comma(cell: str) -> bool:
    """Return whether a cell is a number with a decimal comma, such as "3,5"."""
    return _DECIMAL_COMMA.fullmatch(cell) is not None


def missing_cells(na: Collection[str]) -> frozenset[str]:
    """Return all cells that are missing values: the empty cell and those of a list.

    Raises:
        UsageError: it is no list of texts.
    """
    if isinstance(na, str) or not all(isinstance(cell, str) for cell in na):
        raise UsageError("na", found=repr(na), expected="a list of texts")
    return frozenset(("", *(nfc(cell.strip()) for cell in na)))


def similar_values(values: Iterable[str]) -> list[tuple[str, ...]]:
    """Return groups of different values that differ only in case, blanks or invisible characters, or as numbers.

    Example:
        >>> similar_values(["Tumour", "tumour", "0", "0.0", "normal"])
        [('0', '0.0'), ('Tumour', 'tumour')]
    """
    groups: dict[object, list[str]] = defaultdict(list)
    for value in sorted(set(values)):
        groups[_similarity_key(value)].append(value)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _similarity_key(value: str) -> object:
    if is_number(value):
        # Exact, since long numbers of patients may be equal as floats.
        return Decimal(value)
    if not value.isascii():
        visible = (it for it in value if unicodedata.category(it) != "Cf")
        value = unicodedata.normalize("NFKC", "".join(visible))
    return " ".join(value.casefold().split())
