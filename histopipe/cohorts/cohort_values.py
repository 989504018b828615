"""The values of a cohort's slides: rows of all tables joined to slides, conditions, labels, times and events."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain, pairwise, product
from typing import Any

from histopipe.cohorts.cohort_files import CohortFile
from histopipe.cohorts.options import CohortOptions
from histopipe.cohorts.source_tables import (
    LEVELS,
    MISSING,
    Line,
    SourceTable,
    is_tcga,
    plain_name,
    single,
)
from histopipe.errors import UsageError
from histopipe.splits.slide_table import Exclusion
from histopipe.system.output import counted, some
from histopipe.system.table_cells import cell_number, is_number, missing_cells, value_form

_PRIMARY = {
    "diagnosis_is_primary_disease": "true",
    "classification_of_tumor": "primary",
    "days_to_diagnosis": "0",
}
"""Columns of GDC's diagnoses, with the value of the one that the slides are of. Others are recurrences and metastases."""
_EVENTS = {
    **dict.fromkeys(("dead", "deceased", "1", "true", "yes"), "1"),
    **dict.fromkeys(("alive", "living", "0", "false", "no", "censored"), "0"),
}
_FLAGS = ("0", "1", "true", "false", "yes", "no")
_EXPECTED = {
    "map": ("has no label for some values", "a label for each value; VALUE= leaves its slides out"),
    "event": ("has other values", ", ".join(_EVENTS)),
    "time": ("has other values", "numbers with a decimal point"),
}
"""Problem and expected values of the cells of an option that are refused."""
_OF_FILES = ("patient", "site", "project", "kind", "sample_type", "folder")
"""Columns that files have themselves. A column of a table with the same name comes first."""

_SAMPLE = len("TCGA-A1-A0SB-01")
_Combinations = Sequence[dict[int, Line]]
"""Rows of a file: in each item, one of each table, by its number."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: its places in tables, by their number; or without tables, an attribute of files."""

    name: str
    places: Mapping[int, int]

    def cell(self, file: CohortFile, rows: Mapping[int, Line]) -> list[str]:
        """Return the different values of a file in one row of each table."""
        cells = [single(rows[n][1][place]) for n, place in self.places.items() if n in rows]
        return [*dict.fromkeys(cells)] if self.places else [getattr(file, plain_name(self.name))]


class JoinedTables:
    """Tables joined to the files of a cohort."""

    def __init__(
        self,
        tables: Sequence[SourceTable],
        files: Sequence[CohortFile],
        aliases: Mapping[str, str],
        options: CohortOptions,
    ) -> None:
        self._tables, self._options = tables, options
        self._missing = missing_cells(sorted(MISSING) if options.na is None else options.na)
        self._rows = [
            {} if table.lists_files else _rows_of(table, files, aliases) for table in tables
        ]

    def column(self, name: str, option: str) -> _Column:
        """Return a column by its name.

        Raises:
            UsageError: no table has it, or one has several of this name.
        """
        places = {n: at for n, table in enumerate(self._tables) if (at := table.find(name))}
        for table, repeated in [(self._tables[n], at) for n, at in places.items() if len(at) > 1]:
            raise UsageError(
                f"{option} {name}: {table.name} has {len(repeated)} such columns",
                found=", ".join(table.columns[place] for place in repeated),
                expected="one",
                todo="write its full name, or rename one of them",
            )
        if not places and plain_name(name) not in _OF_FILES:
            raise UsageError(
                f"{option}: no table has a column {name}",
                found=some(
                    dict.fromkeys([*chain(*(t.columns for t in self._tables)), *_OF_FILES]), 60
                ),
                expected="one of these",
            )
        return _Column(name, {number: each[0] for number, each in places.items()})

    def joined(self, file: CohortFile, columns: Sequence[_Column]) -> Iterator[dict[int, Line]]:
        """Yield each combination of rows of a file, one of each table that has some of the columns."""
        lines: dict[int, list[Line]] = {}
        for number in sorted({number for column in columns for number in column.places}):
            places = [column.places[number] for column in columns if number in column.places]
            # Only rows that differ in these columns: patients may have dozens in each of ten tables.
            different = {
                tuple(row[place] for place in places): (line, row)
                for line, row in reversed(self._rows_of(file, number))
            }
            lines |= {number: list(different.values())[::-1]} if different else {}
        for combination in product(*lines.values()):
            yield dict(zip(lines, combination, strict=True))

    def _rows_of(self, file: CohortFile, number: int) -> Sequence[Line]:
        rows = file.rows.get(number) or self._rows[number].get(id(file), [])
        table = self._tables[number]
        for place, value in [
            (at, cell) for name, cell in _PRIMARY.items() for at in table.find(name)
        ]:
            rows = [
                row for row in rows if row[1][place].lower().removesuffix(".0") == value
            ] or rows
        kind, _, column = (self._options.take or "").partition(":")
        for place in table.find(column) if column else ():
            order = [
                (_order(row[place], f"{table.name}, line {line}: column {column}"), (line, row))
                for line, row in rows
                if row[place] not in self._missing
            ]
            extreme = (min if kind == "first" else max)((at for at, _ in order), default=0.0)
            rows = [row for at, row in order if at == extreme] or rows
        return rows

    def value(
        self,
        file: CohortFile,
        column: _Column,
        combinations: _Combinations,
        present: Collection[str] = (),
    ) -> str:
        """Return the value of a file in a column, empty if it is missing. `present` are cells that are never missing.

        Raises:
            UsageError: its rows have several values.
        """
        cells = {
            cell: rows
            for rows in reversed(combinations)
            for cell in column.cell(file, rows)
            if cell not in self._missing or cell in present
        }
        if len(cells) > 1:
            places = [
                f"{cell!r} ({self._tables[number].name}, line {rows[number][0]})"
                for cell, rows in reversed(cells.items())
                for number in [n for n in column.places if n in rows][:1]
            ]
            raise UsageError(
                f"column {column.name}: several values for patient {file.patient or file.name}",
                found=some(places, 4),
                expected="one value",
                todo='choose a row with --where, such as "days_to_diagnosis == 0", or with --take first:COLUMN or '
                "last:COLUMN",
            )
        return next(iter(cells), "")

    def values(
        self, file: CohortFile, columns: Sequence[_Column], combinations: _Combinations
    ) -> set[str]:
        """Return all values of a file in columns that are not missing."""
        cells = (column.cell(file, rows) for rows in combinations for column in columns)
        return set(chain.from_iterable(cells)) - self._missing

    def why_missing(self, file: CohortFile, column: _Column) -> str:
        """Return the cells of a file in a column, or the tables in which it has no row."""
        cells = {cell for rows in self.joined(file, [column]) for cell in column.cell(file, rows)}
        absent = [self._tables[n].name for n in column.places if not self._rows_of(file, n)]
        reason = f"no row in {some(absent)}" if absent and not cells else "missing"
        return f"{column.name}: {some(sorted(cells - {''})) or reason}"


def _order(cell: str, where: str) -> float:
    """Return a number for a number or a date of the form 2020-01-31, also with a time. Raise a UsageError for anything else."""
    if is_number(cell):
        return float(cell)
    try:
        return datetime.fromisoformat(cell).timestamp()
    except ValueError:
        raise UsageError(
            where, found=repr(cell), expected="a number, or a date as 2020-01-31", todo="correct it"
        ) from None


def _rows_of(
    table: SourceTable, files: Sequence[CohortFile], aliases: Mapping[str, str]
) -> dict[int, list[Line]]:
    """Return the rows of files in a table, each by the finest key that has rows. Samples may be without the vial.

    Raises:
        UsageError: no file has a row.
    """
    by_level = {level: table.rows_by(level, aliases) for level in LEVELS if level in table.keys}
    of_tcga = defaultdict[str, list[Line]](list)
    for name, lines in by_level["sample"].rows.items() if "sample" in by_level else ():
        of_tcga[name[:_SAMPLE].upper()] += lines if is_tcga(name) else []
    rows: dict[int, list[Line]] = {}
    for file in files:
        for level, keyed in by_level.items():
            name = file.names[level]
            lines = keyed.find(name) if name else []
            if level == "sample":
                lines = lines or of_tcga[name[:_SAMPLE].upper()]
            # A row of another sample of the patient, such as normal tissue, is not that of the slide.
            if lines or (level == "sample" and is_tcga(name) and any(of_tcga.values())):
                rows |= {id(file): lines} if lines else {}
                break
    if rows or not table.rows:
        return rows
    level = next(iter(by_level))
    cells = dict.fromkeys(table.cell(row, level) for _, row in table.rows)
    raise UsageError(
        f"{table.name}: no row belongs to a slide of the cohort",
        found=f"{level.replace('_', ' ')} {some(cells, 3)}",
        expected=f"such as {some({file.names[level]: None for file in files}, 3).strip(', ') or 'none'}",
        todo="use tables of the same project, or leave this one out",
    )


class CohortValues:
    """Reads the values of files, and excludes files by condition, label, time and event.

    Raises:
        UsageError: an option names a column that no table has, or has another form.
    """

    def __init__(self, tables: JoinedTables, options: CohortOptions) -> None:
        kind, _, column = (options.take or "last:").partition(":")
        if kind not in ("first", "last") or (column and not tables.column(column, "--take")):
            raise UsageError("--take", found=options.take, expected="first:COLUMN or last:COLUMN")
        if options.map and not options.label:
            raise UsageError("--map", found="no --label", expected="the column of the values")
        event, self._event_value = options.event_column
        if bool(event) != bool(options.time):
            raise UsageError(
                "--time and --event", found="one of them", expected="both, for survival, or none"
            )
        self._tables, self._labels = tables, _read_map(options.map)
        named, self._is_fulfilled = parse_condition(options.where or "'' == ''")  # all fulfil this
        self._columns = {"where": [tables.column(name, "--where") for name in named]}
        for option in ("patient", "site", "label", "event", "time", "columns"):
            names = (event if option == "event" else getattr(options, option)) or ()
            self._columns[option] = [
                tables.column(name, f"--{option}")
                for name in ([names] if isinstance(names, str) else names)
            ]
        self._refused = defaultdict[str, Counter[str]](Counter)
        self._happened, self._values = Counter[str](), Counter[str]()
        self._conflicts: list[tuple[str, UsageError]] = []

    def read(self, file: CohortFile) -> None:
        """Set the cells of a file, and its patient and site. Exclude it if the label, time or event is missing."""
        named = {column.name: column for column in self._columns["where"]}
        value = partial(self._tables.value, file)
        try:
            rows = [
                each
                for each in self._tables.joined(file, [*chain(*self._columns.values())])
                if self._is_fulfilled({name: value(c, [each]) for name, c in named.items()})
            ]
            if not rows:
                return file.exclude(
                    Exclusion.NOT_WANTED,
                    "; ".join(self._tables.why_missing(file, column) for column in named.values()),
                )
            for name in ("patient", "site"):
                for column in self._columns[name]:
                    setattr(file, name, value(column, rows) or getattr(file, name))
            for column in self._columns["label"]:
                file.cells["label"] = self._label_of(file, column, rows)
            for column in self._columns["columns"]:
                file.cells[column.name] = value(column, rows)
            for column in self._columns["event"]:
                file.cells |= self._time_and_event(file, column, rows)
        except UsageError as error:
            self._conflicts.append((file.name, error))

    def _label_of(self, file: CohortFile, column: _Column, rows: _Combinations) -> str:
        cell = self._tables.value(file, column, rows, self._labels)
        label = self._labels.get(cell, "") if self._labels and cell else cell
        if self._labels and cell and cell not in self._labels:
            self._refused["map"][cell] += 1
        if not label:
            detail = f"{column.name}: {cell}" if cell else self._tables.why_missing(file, column)
            file.exclude(Exclusion.NO_VALUE, detail)
        return label

    def _time_and_event(
        self, file: CohortFile, column: _Column, rows: _Combinations
    ) -> dict[str, str]:
        cell, times = self._tables.value(file, column, rows), self._columns["time"]
        # cBioPortal writes 1:DECEASED.
        number, _, word = cell.partition(":")
        value = self._event_value
        # Words such as dead already say whether it happened.
        words = _EVENTS.keys() & _FLAGS if value in ("0", "1") else _EVENTS.keys()
        forms = (cell.lower().removesuffix(".0"), number)
        event = next((_EVENTS[form] for form in forms if form in words), "")
        if value in ("0", "1"):
            event = event and f"{int(event == value)}"
        elif value and cell:
            is_event = value_form(value) in map(value_form, {cell, number, word} - {""})
            event = f"{int(is_event)}"
            (self._happened if is_event else self._values)[cell] += 1
        if cell and not event:
            self._refused["event"][cell] += 1
        times = times[:1] if event == "1" else times[1:] or times
        # Patients are under observation until the last of their visits.
        texts = self._tables.values(file, times, rows)
        numbers = [cell_number(text) for text in texts]
        self._refused["time"].update(text for text in texts if not is_number(text))
        if event == "1" and len(set(numbers)) > 1:
            self._tables.value(file, times[0], rows)  # raises
        is_known = event != "" and numbers != [] and all(number >= 0 for number in numbers)
        if not is_known:
            missing = self._tables.why_missing(file, times[0] if event else column)
            file.exclude(
                Exclusion.NO_VALUE, f"time: {some(texts)}" if numbers and event else missing
            )
        return {"time": f"{max(numbers):.15g}" if is_known else "", "event": event}

    def remarks(self) -> list[str]:
        """Return the values that were taken for no event."""
        texts = [f"{cell!r} ({count})" for cell, count in self._values.most_common()]
        return [f"no event, since not {self._event_value}: {some(texts)}"] if texts else []

    def check(self) -> None:
        """Raise a UsageError if values of any file had no label in the map, were no event, or contradicted each other."""
        if self._conflicts:
            (name, first), rest = self._conflicts[0], len(self._conflicts) - 1
            raise UsageError(
                f"{first.what}, file {name}"
                + (f", and {counted(rest, 'slide')} more" if rest else ""),
                found=first.found,
                expected=first.expected,
                todo=first.todo,
            )
        value = self._event_value
        if self._values and value and not self._happened:
            raise UsageError(
                "--event has no such value",
                found=", ".join(f"{cell!r} ({n})" for cell, n in self._values.most_common()),
                expected=repr(value),
            )
        for option, counts in filter(all, self._refused.items()):
            problem, expected = _EXPECTED[option]
            raise UsageError(
                f"--{option} {problem}",
                found=", ".join(f"{value!r} ({count})" for value, count in counts.most_common()),
                expected=expected,
            )


def _read_map(items: Sequence[str]) -> dict[str, str]:
    """Return the labels of values: `A=x,B, C=y` is {"A": "x", "B, C": "y"}, since labels have no commas."""
    text = ",".join(items)
    pairs = re.findall(r"([^=]+)=([^=,]*)(?:,|$)", text)
    labels = {value.strip(): label.strip() for value, label in pairs}
    if len(labels) < len(pairs) or ",".join(map("=".join, pairs)) != text.rstrip(","):
        raise UsageError(
            "--map", found=repr(text), expected="VALUE=LABEL,VALUE=LABEL, each value once"
        )
    return labels


_ORDERS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}


def parse_condition(text: str) -> tuple[tuple[str, ...], Callable[[dict[str, str]], bool]]:
    """Return the columns of a condition, as written, and a function that returns whether a row fulfils it.

    Numbers are compared as numbers, and everything else as text. A missing cell fulfils no comparison, except with ''.
    The row has a cell for each of the columns. The function raises a UsageError if a cell that is compared by size is no
    number.

    Raises:
        UsageError: the text is no condition.

    Example:
        >>> columns, is_fulfilled = parse_condition("grade in ('2', '3') and age >= 60")
        >>> columns, is_fulfilled({"grade": "3", "age": "71"})
        (('grade', 'age'), True)
    """
    columns: dict[str, str] = {}
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _holds(tree, columns)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(
            "--where",
            found=f"{text!r}: {error}",
            expected="columns, 'texts' and numbers with == != < <= > >= in, not in, and, or, not, ()",
            todo="write underscores for blanks, and a capital for words of Python: Class == 'Macro'",
        ) from error
    return tuple(columns), partial(_holds, tree)


def _holds(tree: ast.expr, row: dict[str, str]) -> bool:
    """Return whether a row fulfils a tree. All parts are evaluated, also to check them. Raise ValueError for other trees.

    Columns that the row lacks are added to it as missing.
    """
    match tree:
        case ast.BoolOp(op=kind, values=parts):
            return (all if isinstance(kind, ast.And) else any)(
                [_holds(each, row) for each in parts]
            )
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _holds(part, row)
        case ast.Compare(left=first, ops=operators, comparators=rest):
            pairs = zip(operators, pairwise([first, *rest]), strict=True)
            results = [_compare(kind, left, right, row) for kind, (left, right) in pairs]
            return all(results)
    raise ValueError(f"{ast.unparse(tree)!r} is no comparison")


def _compare(kind: ast.cmpop, left: ast.expr, right: ast.expr, row: dict[str, str]) -> bool:
    values: list[Any] = [_value(left, row)]
    if isinstance(kind, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple):
        equal = [_compare(ast.Eq(), left, item, row) for item in right.elts]
        return values != [""] and any(equal) == isinstance(kind, ast.In)
    values.append(_value(right, row))
    if type(kind) not in (ast.Eq, ast.NotEq, *_ORDERS):
        raise ValueError(f"{ast.unparse(left)!r} and {ast.unparse(right)!r} cannot be compared so")
    with_blank = any(isinstance(tree, ast.Constant) and tree.value == "" for tree in (left, right))
    if "" in values and not with_blank:
        return False
    of_equality = isinstance(kind, ast.Eq | ast.NotEq)
    if not of_equality or not all(isinstance(value, str) for value in values):
        texts, values = values, [cell_number(v) if isinstance(v, str) else v for v in values]
    if of_equality:
        return bool(values[0] == values[1]) == isinstance(kind, ast.Eq)
    if math.isnan(sum(values)):
        raise UsageError(
            f"--where: {ast.unparse(left)} and {ast.unparse(right)} are compared by size",
            found=" and ".join(map(repr, texts)),
            expected="numbers",
            todo="make such cells missing values by --na",
        )
    return bool(_ORDERS[type(kind)](*values))


def _value(tree: ast.expr, row: dict[str, str]) -> Any:
    match tree:
        case ast.Name() | ast.Attribute():  # such as `demographic.vital_status`
            name = ast.unparse(tree)
            if all(map(str.isidentifier, name.split("."))):
                return row.setdefault(name, "")
        case ast.Constant(value=bool() as constant):
            raise ValueError(
                f"cells are texts: write '{constant}' as in the table, such as '{str(constant).upper()}'"
            )
        case ast.Constant(value=str() | int() | float() as constant):
            return constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError(f"{ast.unparse(tree)!r} is neither a column, a 'text' nor a number")
