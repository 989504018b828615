"""The values of a cohort's slides: rows of all tables joined to slides, conditions, labels, times and events."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product

from histopipe.cohorts.cohort_files import CohortFile
from histopipe.cohorts.options import CohortOptions
from histopipe.cohorts.source_tables import (
    LEVELS,
    MISSING,
    SourceTable,
    match_key,
    plain_name,
    single,
)
from histopipe.errors import UsageError
from histopipe.splits.slide_table import Exclusion
from histopipe.system.conditions import Condition
from histopipe.system.output import counted, some
from histopipe.system.table_files import cell_number, is_number, missing_cells

_PRIMARY = {"diagnosis_is_primary_disease": "true", "classification_of_tumor": "primary"}
"""Columns of GDC's diagnoses, with the value of the one that the slides are of. Others are recurrences and metastases."""
_EVENTS = {
    **dict.fromkeys(("dead", "deceased", "1", "true", "yes"), "1"),
    **dict.fromkeys(("alive", "living", "0", "false", "no", "censored"), "0"),
}
_OF_FILES = ("patient", "site", "project", "kind", "sample_type", "folder")
"""Columns that files have themselves. A column of a table with the same name comes first."""

_SAMPLE = len("TCGA-A1-A0SB-01")
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
        for number, repeated in places.items():
            if len(repeated) > 1:
                table = self._tables[number]
                raise UsageError(
                    f"{option} {name}: {table.name} has {len(repeated)} such columns",
                    found=", ".join(table.columns[place] for place in repeated),
                    expected="one",
                    todo="write its full name, or rename one of them",
                )
        if not places and plain_name(name) not in _OF_FILES:
            columns = {column: None for table in self._tables for column in table.columns}
            raise UsageError(
                f"{option}: no table has a column {name}",
                found=some([*columns, *_OF_FILES], 60),
                expected="one of these",
            )
        first = {number: each[0] for number, each in places.items()}
        return _Column(name if places else plain_name(name), first)

    def joined(self, file: CohortFile, columns: Sequence[_Column]) -> Iterator[dict[int, _Line]]:
        """Yield each combination of rows of a file, one of each table that has some of the columns."""
        lines: dict[int, list[_Line]] = {}
        for number in sorted({number for column in columns for number in column.places}):
            places = [column.places[number] for column in columns if number in column.places]
            # Only rows that differ in these columns: patients may have dozens in each of ten tables.
            rows = reversed(self._rows_of(file, number))
            different = {tuple(row[place] for place in places): (n, row) for n, row in rows}
            lines |= {number: list(different.values())[::-1]} if different else {}
        for combination in product(*lines.values()):
            yield dict(zip(lines, combination, strict=True))

    def _rows_of(self, file: CohortFile, number: int) -> Sequence[_Line]:
        rows = file.rows.get(number) or self._rows[number].get(id(file), [])
        table = self._tables[number]
        for name, value in _PRIMARY.items():
            for place in table.find(name):
                rows = [row for row in rows if row[1][place].lower() == value] or rows
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
        cells: dict[str, dict[int, _Line]] = {}
        for rows in combinations:
            for cell in column.cell(file, rows):
                if cell not in self._missing or cell in present:
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
                todo='choose a row with --where, such as "days_to_diagnosis == 0", or with --take first:COLUMN or '
                "last:COLUMN",
            )
        return next(iter(cells), "")

    def values(self, file: CohortFile, column: _Column, combinations: _Combinations) -> set[str]:
        """Return all values of a file in a column that are not missing."""
        return {cell for rows in combinations for cell in column.cell(file, rows)} - self._missing

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
) -> dict[int, list[_Line]]:
    """Return the rows of files in a table, each by the finest key that has rows. Samples may be without the vial.

    Raises:
        UsageError: no file has a row.
    """
    by_level = {level: table.rows_by(level) for level in LEVELS if level in table.keys}
    by_patient, samples = by_level.get("patient", {}), by_level.get("sample", {})
    for uuid in by_patient.keys() & aliases.keys():
        by_patient.setdefault(match_key(aliases[uuid]), []).extend(by_patient[uuid])
    of_tcga: dict[str, list[_Line]] = {}
    for name, lines in samples.items():
        if name.startswith("tcga-"):
            of_tcga.setdefault(name[:_SAMPLE], []).extend(lines)
    rows: dict[int, list[_Line]] = {}
    for file in files:
        for level, by_key in by_level.items():
            name = match_key(file.names[level])
            lines = by_key.get(name, []) if name else []
            if level == "sample":
                lines = lines or of_tcga.get(name[:_SAMPLE], [])
            # A row of another sample of the patient, such as normal tissue, is not that of the slide.
            if lines or (level == "sample" and name.startswith("tcga-") and of_tcga):
                rows |= {id(file): lines} if lines else {}
                break
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
        kind, _, column = (options.take or "last:").partition(":")
        if kind not in ("first", "last") or (column and not tables.column(column, "--take")):
            raise UsageError("--take", found=options.take, expected="first:COLUMN or last:COLUMN")
        if options.map and not options.label:
            raise UsageError("--map", found="no --label", expected="the column of the values")
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
        self._no_times = Counter[str]()
        self._conflicts: list[tuple[str, UsageError]] = []

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
                texts = (self._tables.why_missing(file, c) for c in self._named.values())
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
            self._conflicts.append((file.name, error))

    def _holds(self, file: CohortFile, rows: dict[int, _Line], condition: Condition) -> bool:
        return condition.holds(
            {name: self._tables.value(file, c, [rows]) for name, c in self._named.items()}
        )

    def _label_of(self, file: CohortFile, column: _Column, rows: _Combinations) -> str:
        cell = self._tables.value(file, column, rows, self._labels)
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
        event = _EVENTS.get(
            cell.lower().removesuffix(".0"), _EVENTS.get(cell.partition(":")[0], "")
        )
        if cell and not event:
            self._no_events[cell] += 1
        columns = self._times[:1] if event == "1" else self._times[1:] or self._times
        # Patients are under observation until the last of their visits.
        texts = {text for column in columns for text in self._tables.values(file, column, rows)}
        numbers = [cell_number(text) for text in texts]
        self._no_times.update(text for text in texts if not is_number(text))
        if not event or not numbers or not all(number >= 0 for number in numbers):
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
            (name, first), rest = self._conflicts[0], len(self._conflicts) - 1
            raise UsageError(
                f"{first.what}, file {name}"
                + (f", and {counted(rest, 'slide')} more" if rest else ""),
                found=first.found,
                expected=first.expected,
                todo=first.todo,
            )
        for option, counts, expected in (
            ("--map has no label for some values", self._unmapped, "a label for each value"),
            ("--event has other values", self._no_events, ", ".join(_EVENTS)),
            ("--time has other values", self._no_times, "numbers with a decimal point"),
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
    repeated = len({value.strip() for value, _ in pairs}) < len(pairs)
    if repeated or ",".join(map("=".join, pairs)) != text.rstrip(","):
        raise UsageError(
            "--map", found=repr(text), expected="VALUE=LABEL,VALUE=LABEL, each value once"
        )
    return {value.strip(): label.strip() for value, label in pairs}
