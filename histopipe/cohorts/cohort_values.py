"""The values of a cohort's slides: rows of all tables joined to slides, conditions, labels, times and events."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from histopipe.cohorts.cohort_files import CohortFile
from histopipe.cohorts.options import CohortOptions
from histopipe.cohorts.source_tables import LEVELS, SourceTable, match_key, plain_name, single
from histopipe.errors import UsageError
from histopipe.splits.slide_table import Exclusion
from histopipe.system.conditions import Condition
from histopipe.system.output import counted, some
from histopipe.system.table_files import NA_VALUES, cell_number, missing_cells

GDC_MISSING = (
    "Not Reported",
    "not reported",
    "Unknown",
    "unknown",
    "Not Allowed To Collect",
    "Not Applicable",
    "[Not Applicable]",
    "[Not Evaluated]",
    "[Unknown]",
    "[Discrepancy]",
)
"""Further cells of the GDC and TCGA that are missing values."""
_PRIMARY = {"diagnosis_is_primary_disease": "true", "classification_of_tumor": "primary"}
"""Columns of GDC's diagnoses, with the value of the one that the slides are of. Others are recurrences and metastases."""
_EVENTS = {
    **dict.fromkeys(("dead", "deceased", "1", "true", "yes"), "1"),
    **dict.fromkeys(("alive", "living", "0", "false", "no", "censored"), "0"),
}
_OF_FILES = ("patient", "site", "project", "kind", "sample_type", "folder")
"""Columns that files have themselves. A column of a table with the same name comes first."""

_Line = tuple[int, Sequence[str]]
_Combinations = Sequence[dict[int, _Line]]
"""Rows of a file: in each item, one of each table, by its number."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: its places in tables, by their number; or without tables, an attribute of files."""

    name: str
    places: Mapping[int, int]

    def cell(self, file: CohortFile, rows: Mapping[int, _Line]) -> list[str]:
        """Return the different values of a file in one row of each table."""
        if not self.places:
            folder = file.slide.path.parent.name if file.slide else ""
            return [folder if self.name == "folder" else str(getattr(file, self.name))]
        cells = [
            single(rows[number][1][place])
            for number, place in self.places.items()
            if number in rows
        ]
        return list(dict.fromkeys(cells))


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
        self._missing = missing_cells(
            (*NA_VALUES, *GDC_MISSING) if options.na is None else options.na
        )
        self._rows = [
            {} if table.lists_files else _rows_of(table, files, aliases) for table in tables
        ]

    def column(self, name: str, option: str) -> _Column:
        """Return a column by its name.

        Raises:
            UsageError: no table has it, or one has several of this name.
        """
        places = {}
        for number, table in enumerate(self._tables):
            found_places = table.find(name)
            if len(found_places) > 1:
                raise UsageError(
                    f"{option} {name}: {table.name} has {len(found_places)} such columns",
                    found=", ".join(table.columns[place] for place in found_places),
                    expected="one",
                    todo="write its full name, or rename one of them",
                )
            if found_places:
                places[number] = found_places[0]
        if not places and plain_name(name) not in _OF_FILES:
            columns = {column: None for table in self._tables for column in table.columns}
            raise UsageError(
                f"{option}: no table has a column {name}",
                found=some([*columns, *_OF_FILES], 60),
                expected="one of these",
            )
        return _Column(plain_name(name) if not places else name, places)

    def joined(self, file: CohortFile, columns: Sequence[_Column]) -> Iterator[dict[int, _Line]]:
        """Yield each combination of rows of a file, one of each table that has some of the columns."""
        numbers = sorted({number for column in columns for number in column.places})
        lines = {number: self._rows_of(file, number) for number in numbers}
        present = [number for number in numbers if lines[number]]
        for rows in product(*(lines[number] for number in present)):
            yield dict(zip(present, rows, strict=True))

    def _rows_of(self, file: CohortFile, number: int) -> Sequence[_Line]:
        rows = file.rows.get(number) or self._rows[number].get(id(file), [])
        table = self._tables[number]
        for name, value in _PRIMARY.items():
            for place in table.find(name):
                rows = [row for row in rows if row[1][place].lower() == value] or rows
        kind, _, column = (self._options.take or "").partition(":")
        for place in table.find(column) if column else ():
            order = sorted(
                (row for row in rows if not math.isnan(_order(row[1][place]))),
                key=lambda row: _order(row[1][place]),
            )
            rows = [order[0 if kind == "first" else -1]] if order else rows
        return rows

    def value(self, file: CohortFile, column: _Column, combinations: _Combinations) -> str:
        """Return the value of a file in a column, empty if it is missing.

        Raises:
            UsageError: its rows have several values.
        """
        cells: dict[str, dict[int, _Line]] = {}
        for rows in combinations:
            for cell in column.cell(file, rows):
                if cell not in self._missing:
                    cells.setdefault(cell, rows)
        if len(cells) > 1:
            places = [
                f"{cell!r} ({self._tables[number].name}, line {rows[number][0]})"
                for cell, rows in cells.items()
                for number in [n for n in column.places if n in rows][:1]
            ]
            raise UsageError(
                f"column {column.name}: several values for patient {file.patient or file.name}",
                found=some(places, 4),
                expected="one value",
                todo="choose a row with --where, or with --take first:COLUMN or last:COLUMN",
            )
        return next(iter(cells), "")

    def values(
        self, file: CohortFile, column: _Column, combinations: _Combinations | None = None
    ) -> set[str]:
        """Return all values of a file in a column that are not missing; by default, in all its rows."""
        if combinations is None:
            combinations = list(self.joined(file, [column]))
        return {cell for rows in combinations for cell in column.cell(file, rows)} - self._missing

    def why_missing(self, file: CohortFile, column: _Column) -> str:
        """Return why a file has no value in a column."""
        absent = [n for n in column.places if not self._rows_of(file, n)]
        if column.places and len(absent) == len(column.places):
            return f"{column.name}: no row in {some([self._tables[n].name for n in absent])}"
        cells = {cell for rows in self.joined(file, [column]) for cell in column.cell(file, rows)}
        return f"{column.name}: {some(sorted(cells - {''})) or 'missing'}"


def _order(cell: str) -> float:
    """Return a number for a number or a date of the form 2020-01-31; NaN for anything else."""
    return cell_number(cell.replace("-", "") if cell.count("-") == 2 else cell)


def _rows_of(
    table: SourceTable, files: Sequence[CohortFile], aliases: Mapping[str, str]
) -> dict[int, list[_Line]]:
    """Return the rows of files in a table, by the finest key that matches any file.

    Raises:
        UsageError: no file has a row.
    """
    for level in (level for level in LEVELS if level in table.keys):
        by_key = table.rows_by(level)
        for uuid in by_key.keys() & aliases.keys() if level == "patient" else ():
            by_key[match_key(aliases[uuid])] += by_key[uuid]
        rows = {}
        for file in files:
            name = match_key(file.names[level])
            # cBioPortal's samples have no letter of the vial.
            lines = by_key.get(name) or (by_key.get(name[:-1]) if level == "sample" else None)
            if name and lines:
                rows[id(file)] = lines
        if rows:
            return rows
    level = str(table.level)
    cells = dict.fromkeys(table.cell(row, level) for _, row in table.rows)
    raise UsageError(
        f"{table.name}: no row belongs to a slide of the cohort",
        found=f"{level.replace('_', ' ')} {some(cells, 3)}",
        expected=f"such as {some([file.names[level] for file in files], 3)}",
        todo="use tables of the same project, or leave this one out",
    )


class CohortValues:
    """Reads the values of files, and excludes files by condition, label, time and event.

    Raises:
        UsageError: an option names a column that no table has, or has another form.
    """

    def __init__(self, tables: JoinedTables, options: CohortOptions) -> None:
        self._tables = tables
        kind, _, column = (options.take or "last:patient").partition(":")
        if kind not in ("first", "last") or not tables.column(column, "--take"):
            raise UsageError("--take", found=options.take, expected="first:COLUMN or last:COLUMN")
        self._condition = None if options.where is None else Condition.parse(options.where)
        named = self._condition.columns if self._condition else ()
        self._named = {name: tables.column(name, "--where") for name in named}
        self._label = options.label and tables.column(options.label, "--label")
        self._event = options.event and tables.column(options.event, "--event")
        self._times = [tables.column(name, "--time") for name in options.time]
        if bool(self._event) != bool(self._times):
            raise UsageError(
                "--time and --event", found="one of them", expected="both, for survival, or none"
            )
        self._further = {name: tables.column(name, "--columns") for name in options.columns}
        self._people = {
            name: tables.column(column, f"--{name}")
            for name, column in (("patient", options.patient), ("site", options.site))
            if column
        }
        self._labels = _read_map(options.map)
        self._unmapped, self._no_events = Counter[str](), Counter[str]()
        self._conflicts: list[UsageError] = []

    def read(self, file: CohortFile) -> None:
        """Set the cells of a file, and its patient and site. Exclude it if the label, time or event is missing."""
        needed = (self._label, self._event, *self._times, *self._named.values())
        optional = (*self._further.values(), *self._people.values())
        columns = [column for column in (*needed, *optional) if column]
        rows = list(self._tables.joined(file, columns))
        try:
            if self._condition is not None:
                rows = [each for each in rows if self._holds(file, each, self._condition)]
            if not rows:
                values = {
                    name: sorted(self._tables.values(file, column)) or "missing"
                    for name, column in self._named.items()
                }
                texts = (
                    f"{name}: {some(cells, 3) if cells != 'missing' else cells}"
                    for name, cells in values.items()
                )
                file.exclude(Exclusion.NOT_WANTED, "; ".join(texts))
                return
            for name, column in self._people.items():
                setattr(file, name, self._tables.value(file, column, rows) or getattr(file, name))
            if self._label:
                file.cells["label"] = self._label_of(file, self._label, rows)
            for name, column in self._further.items():
                file.cells[name] = self._tables.value(file, column, rows)
            if self._event:
                file.cells |= self._time_and_event(file, self._event, rows)
        except UsageError as error:
            self._conflicts.append(error)

    def _holds(self, file: CohortFile, rows: dict[int, _Line], condition: Condition) -> bool:
        return condition.holds(
            {name: self._tables.value(file, c, [rows]) for name, c in self._named.items()}
        )

    def _label_of(self, file: CohortFile, column: _Column, rows: _Combinations) -> str:
        cell = self._tables.value(file, column, rows)
        label = self._labels.get(cell, "") if self._labels and cell else cell
        if self._labels and cell and cell not in self._labels:
            self._unmapped[cell] += 1
        if not label:
            detail = f"{column.name}: {cell}" if cell else self._tables.why_missing(file, column)
            file.exclude(Exclusion.NO_VALUE, detail)
        return label

    def _time_and_event(
        self, file: CohortFile, column: _Column, rows: _Combinations
    ) -> dict[str, str]:
        cell = self._tables.value(file, column, rows)
        # cBioPortal writes 1:DECEASED.
        event = _EVENTS.get(cell.lower(), _EVENTS.get(cell.partition(":")[0], ""))
        if cell and not event:
            self._no_events[cell] += 1
        columns = self._times[:1] if event == "1" else self._times[1:] or self._times
        # Patients are under observation until the last of their visits.
        texts = {text for column in columns for text in self._tables.values(file, column, rows)}
        numbers = [cell_number(text) for text in texts]
        if not event or not numbers or not min(numbers) >= 0:
            column = columns[0] if event else column
            detail = (
                f"time: {some(texts)}"
                if numbers and event
                else self._tables.why_missing(file, column)
            )
            file.exclude(Exclusion.NO_VALUE, detail)
            return {"time": "", "event": event}
        if event == "1" and len(set(numbers)) > 1:
            self._tables.value(file, columns[0], rows)  # raises
        return {"time": f"{max(numbers):.15g}", "event": event}

    def check(self) -> None:
        """Raise a UsageError if values of any file had no label in the map, were no event, or contradicted each other."""
        if self._conflicts:
            first, rest = self._conflicts[0], len(self._conflicts) - 1
            raise UsageError(
                first.what + (f", and {counted(rest, 'slide')} more" if rest else ""),
                found=first.found,
                expected=first.expected,
                todo=first.todo,
            )
        for option, counts, expected in (
            ("--map has no label for some values", self._unmapped, "a label for each value"),
            ("--event has other values", self._no_events, ", ".join(_EVENTS)),
        ):
            if counts:
                raise UsageError(
                    option,
                    found=", ".join(
                        f"{value!r} ({count})" for value, count in counts.most_common()
                    ),
                    expected=expected,
                    todo="'VALUE=' in --map leaves slides out"
                    if counts is self._unmapped
                    else None,
                )


def _read_map(items: Sequence[str]) -> dict[str, str]:
    """Return the labels of values: `A=x,B, C=y` is {"A": "x", "B, C": "y"}, since labels have no commas."""
    text = ",".join(items)
    pairs = re.findall(r"([^=]+)=([^=,]*)(?:,|$)", text)
    if ",".join(map("=".join, pairs)) != text.rstrip(","):
        raise UsageError("--map", found=repr(text), expected="VALUE=LABEL, VALUE=LABEL, ...")
    return {value.strip(): label.strip() for value, label in pairs}
