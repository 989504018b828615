"""Columns of slides by which metrics are reported, and the division of their values into groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.splits.slide_table import COLUMNS
from histopipe.system.csv_files import NUMERIC_SHARE, cell_number, column_key

ORIGIN = ("site", "vendor", "route", "jpeg_generations", "reader", "store", "mpp")
"""Columns of `slides.csv` that no diagnosis depends on."""
QUALITY = ("tissue", "focus", "pen", "dark", "planned")
"""Columns of `slides.csv` that describe the quality of slides."""
AUTOMATIC = (*ORIGIN, "label_source", *QUALITY)
"""Columns that always have subgroups."""
CATEGORIES = {*ORIGIN, "label_source"} - {"mpp"}
"""Columns whose values are names, also if they look like numbers."""
_MOST_VALUES, _LARGEST_SHARE = 8, 0.67
"""Numbers with more different values, or fractions with a larger share of different values, are divided into thirds."""
_SPEC = re.compile(r"(?P<column>[^:,]+?)(:(?P<width>\d+(\.\d+)?))?")
_THIRDS = (0, 1 / 3, 2 / 3, 1)


class NoValue(Enum):
    """Why an item has no value of a column. Its name may also be the value of another item."""

    MISSING = "missing"
    SEVERAL = "several"


def check_subgroup(text: str) -> tuple[str, float | None]:
    """Return the column and the width of its bins of a value of `--subgroup`, such as "site" or "age:10".

    Raises:
        UsageError: the text has another form.
    """
    match = _SPEC.fullmatch(text)
    if match is None or (match["width"] and float(match["width"]) == 0):
        raise UsageError(
            "--subgroup",
            found=repr(text),
            expected="columns of --labels, such as sex,age:10 (age in steps of 10)",
        )
    column = match["column"]
    if column.lower() == "site" and match["width"]:
        raise UsageError("--subgroup", found=repr(text), expected="site: names have no steps")
    if column.lower() in COLUMNS:
        column = column.lower()
        if column not in ("site", *QUALITY):
            raise UsageError(
                "--subgroup", found=f"{column!r}, a column of slides.csv", expected="a column of --labels",
                todo="give the column of the labels file another name",
            )  # fmt: skip
    return column, float(match["width"]) if match["width"] else None


def labels_columns(requested: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of values of `--subgroup` that only the labels file can have.

    Raises:
        UsageError: a value is wrong, or a column is given twice.
    """
    names = [check_subgroup(text)[0] for text in requested]
    lower = [column_key(name) for name in names]
    for number, name in enumerate(lower):
        if name in lower[:number]:
            raise UsageError("--subgroup", found=f"{name!r} twice", expected="each column once")
    return tuple(name for name in names if name not in COLUMNS)


def group_name(value: str | NoValue) -> str:
    """Return the name of a value's group. A real value "missing" or "several" is in quotes.

    Example:
        >>> group_name(NoValue.MISSING), group_name("missing")
        ('missing', '"missing"')
    """
    text = value if isinstance(value, str) else value.value
    return (
        f'"{text}"'
        if value == text and text.strip('"') in {reason.value for reason in NoValue}
        else text
    )


def groups_of(
    values: Sequence[str | NoValue], width: float | None = None, *, categories: bool = False
) -> tuple[list[str], list[int]]:
    """Return the names of the groups in order, and the (N,) group of each value. Empty values are missing.

    Numbers are in bins of `width`; other values are separate groups. Without `width`, numbers are divided into thirds
    if nearly all values are numbers, and there are more than eight different ones, or fractions of which few are equal.
    With `categories`, each value is a group.
    """
    values = [value or NoValue.MISSING for value in values]
    numbers = np.array(
        [cell_number(value) if isinstance(value, str) else math.nan for value in values]
    )
    finite = np.isfinite(numbers) & (not categories)
    numeric = bool(finite.any()) and int(finite.sum()) >= NUMERIC_SHARE * sum(
        isinstance(value, str) for value in values
    )
    places: Sequence[float] = numbers.tolist()
    ranges: dict[float, str] = {}
    if width:
        # Rounded, because 0.3 / 0.1 is below 3.
        places = np.floor(np.round(numbers / width, 9)).tolist()
        ranges = {place: _range(place * width, (place + 1) * width) for place in places}
    elif numeric and _is_divided(numbers[finite]):
        edges = np.unique(np.quantile(numbers[finite], _THIRDS)).tolist()
        if len(edges) < 3:  # most values are equal
            edges = np.quantile(np.unique(numbers[finite]), _THIRDS).tolist()
        places = np.clip(np.searchsorted(edges, numbers, side="right"), 1, len(edges) - 1).tolist()
        ranges = {place: _range(*edges[int(place) - 1 : int(place) + 1]) for place in places}
    keys: list[tuple[float, float, str]] = []
    for value, place, in_range in zip(values, places, finite.tolist(), strict=True):
        name = group_name(value)
        if in_range:
            keys.append((0, place, ranges.get(place, name)))
        else:
            keys.append((math.inf if value is NoValue.MISSING else 1, 0, name))
    groups = sorted(set(keys))
    number_of = {key: number for number, key in enumerate(groups)}
    return [name for _, _, name in groups], [number_of[key] for key in keys]


def median_text(values: Iterable[str]) -> str:
    """Return the median of the numbers among values; empty if there are none."""
    numbers = [number for number in map(cell_number, values) if math.isfinite(number)]
    return f"{float(np.median(numbers)):.6g}" if numbers else ""


def _is_divided(numbers: NDArray[np.float64]) -> bool:
    """Return whether numbers are divided into thirds."""
    whole = bool((numbers % 1 == 0).all())
    most = min(_MOST_VALUES, math.inf if whole else _LARGEST_SHARE * len(numbers))
    return len(np.unique(numbers)) > max(most, 1)


def _range(low: float, high: float) -> str:
    return f"{_text(low)} to {_text(high)}"


def _text(value: float) -> str:
    """Return a number without exponent."""
    text = f"{value:.6g}"
    return f"{value:.0f}" if "e+" in text else text
