"""What the cells and the names of columns of tables mean: missing values, numbers, events, damage by spreadsheets.

Lists of options import this module, so it imports nothing slow.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterable

from histopipe.errors import UsageError
from histopipe.system.grouping import grouped

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
_UNCLEAR_EVENT = re.compile(
    r"(?i:(^|[^a-z])(cens|no[ _.-]?event|not[ _.-])|alive|living|surviv(ed|or)|free)|Cens"
)
"""Names of columns in which 1 may stand for no event."""
FLAGS = {"false": 0.0, "true": 1.0}
"""Cells that stand for 0 and 1, in lower case."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
NUMERIC_SHARE = 0.8
"""Smallest share of numbers in a column of numbers."""


def nfc(text: str) -> str:
    """Return a text in Unicode NFC, in which names are compared: systems write "ü" as one or two characters."""
    return unicodedata.normalize("NFC", text)


def column_key(name: str) -> str:
    """Return the form in which names of columns are compared: in lower case and NFC."""
    return nfc(name.strip().lower())


has_control_character = re.compile(r"[\x00-\x1f\x7f-\x9f]").search
"""Find a control character in a text; names may have none."""


def cell_number(cell: str) -> float:
    """Return the number in a cell, NaN if there is none. `1_20`, `infinity` and other forms of Python are no numbers.

    Example:
        >>> cell_number("1.5e3"), cell_number("1_20")
        (1500.0, nan)
    """
    return float(cell) if is_number(cell) else math.nan


def is_number(cell: str) -> bool:
    """Return whether a cell is a finite number."""
    return _NUMBER.fullmatch(cell) is not None and math.isfinite(float(cell))


has_decimal_comma = re.compile(r"[+-]?\d*,\d+", re.ASCII).fullmatch
"""Match a number with a decimal comma, such as "3,5"."""


def missing_cells(na: Collection[str]) -> frozenset[str]:
    """Return all cells that are missing values: the empty cell and those of a list.

    Raises:
        UsageError: it is no list of texts.
    """
    if isinstance(na, str) or not all(isinstance(cell, str) for cell in na):
        raise UsageError("na", found=repr(na), expected="a list of texts")
    return frozenset(("", *(nfc(cell.strip()) for cell in na)))


_MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)"
_DAMAGE = {
    "shortened by a spreadsheet, so that several names may have become one": re.compile(
        r"\d([.,]\d+)?e\+\d+", re.IGNORECASE
    ),
    "dates, into which spreadsheets turn names such as 1-2": re.compile(
        rf"\d{{1,2}}[-.]{_MONTH}(-\d\d|-\d{{4}})?|{_MONTH}-\d\d|\d{{4}}-\d\d-\d\d( 00:00:00)?",
        re.IGNORECASE,
    ),
}


def spreadsheet_damage(names: Collection[str]) -> str:
    """Return a text on names that a spreadsheet has probably changed, if any.

    Example:
        >>> spreadsheet_damage(["2-Jan", "2-14"])
        "'2-Jan': dates, into which spreadsheets turn names such as 1-2; format the column as text, and export it again"
    """
    texts = [
        f"{', '.join(map(repr, damaged[:3]))}{', …' * (len(damaged) > 3)}: {what}"
        for what, form in _DAMAGE.items()
        if (damaged := sorted(filter(form.fullmatch, set(names))))
    ]
    return f"{'; '.join(texts)}; format the column as text, and export it again" if texts else ""


def similar_values(values: Iterable[str]) -> str:
    """Return a text on values that differ only in case, blanks, invisible characters or form of a number, if any.

    Example:
        >>> similar_values(["Tumour", "tumour", "normal"])
        "'Tumour' and 'tumour' are different values; correct the spelling if they mean the same"
    """
    groups = grouped(sorted(set(values)), _similarity_key)
    alike = [" and ".join(map(repr, group)) for group in groups.values() if len(group) > 1]
    listed = "; ".join([*alike[:3], *([f"{len(alike) - 3} more"] if alike[3:] else [])])
    return listed and f"{listed} are different values; correct the spelling if they mean the same"


def _similarity_key(value: str) -> object:
    from decimal import Decimal  # late: only tables need it

    visible = "".join(mark for mark in value if unicodedata.category(mark) != "Cf")
    # Decimals are exact: long numbers of patients may be equal as floats.
    return (
        Decimal(value)
        if is_number(value)
        else " ".join(unicodedata.normalize("NFKC", visible).casefold().split())
    )


def event_column(name: str) -> tuple[str, str | None]:
    """Return column and value of COLUMN=VALUE; of another name, the column and None."""
    column, is_given, value = name.rpartition("=")
    return (column, value) if is_given and column else (name, None)


def value_form(cell: str) -> str:
    """Return a form that is the same for equal numbers, for true and 1, and for names in capitals."""
    number = FLAGS.get(cell.lower(), cell_number(cell))
    return f"{number:g}" if math.isfinite(number) else cell.casefold()


def source_column(name: str) -> str:
    """Return the key of the column of a table that has the values of a column or of COLUMN=VALUE."""
    return column_key(event_column(name)[0])


def refuse_unclear_event(name: str | None) -> None:
    """Raise a UsageError for a column of events whose name does not say whether 1 is the event."""
    if name and "=" not in name and _UNCLEAR_EVENT.search(name):
        raise UsageError(
            f"--event {name}",
            found="a name that does not say what 1 means: in some published tables the event, in others no event",
            expected="the value of the event",
            todo=f"use --event {name}=1 if 1 is the event, or --censored {name} if 1 is no event",
        )
