"""Tables in files: those of users are read strictly, with the values of their cells; the project's files are trusted."""

from __future__ import annotations

import codecs
import csv
import io
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from histopipe.errors import UsageError
from histopipe.system.files import atomic_write
from histopipe.system.table_cells import column_key, nfc

_SEPARATORS = {
    ",": "comma-separated",
    ";": "semicolon-separated",
    "\t": "tab-separated",
    "|": "separated by vertical bars",
}
_MERGED = re.compile(r'<mergeCell\b[^>]*?\bref="([^"]+)"')
_COMMENTS = re.compile(
    r"\A((#|sep=|Manifest for cohort |User: |Filters: |Date generated: |Total (records|manifest) |IDC Data Version)"
    r"[^\r\n]*(\r\n|\r|\n))+"
)
"""Lines before the header: comments, Excel's separator, and those of lists of the Imaging Data Commons."""
_LINE_BREAK = re.compile(rb"\r\n|\r|\n")
_SAVE = "save it as 'CSV UTF-8', with commas between the cells"


class UserTable(NamedTuple):
    """A table that a user wrote.

    Attributes:
        columns: names of the columns, in lower case.
        rows: line and cells of each row that is not blank.
        form: form of the file if it is another one than CSV in UTF-8, such as "tab-separated, UTF-16"; else empty.
        header: names of the columns, as written.
    """

    columns: list[str]
    rows: list[tuple[int, list[str]]]
    form: str = ""
    header: Sequence[str] = ()


def without_sheet(path: Path) -> Path:
    """Return the path of a table: FILE.xlsx for FILE.xlsx#SHEET."""
    name = path.name.partition("#")[0]
    return path.with_name(name) if name.lower().endswith((".xlsx", ".xlsm")) else path


def read_file(path: Path) -> bytes:
    """Return the content of a table, also of FILE.xlsx#SHEET. Raise a UsageError if it cannot be read."""
    try:
        return without_sheet(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{without_sheet(path)} {'does not exist' if isinstance(error, FileNotFoundError) else 'cannot be read'}",
            found=error.strerror or str(error),
            todo="check the path",
        ) from error


def read_table(
    path: Path, data: bytes | None = None, *, columns: Collection[str] = ()
) -> UserTable:
    """Read a table that a user wrote: a CSV file with commas, semicolons, tabs or vertical bars, or an Excel workbook.

    Rows and cells of text are those of Python's `csv` module with strict quotes: only line feeds and carriage returns
    end a line, and quoted ones are data. Text is UTF-8, or UTF-16 with a byte order mark. Cells are in NFC, without
    surrounding blanks. A row has the line in which it begins. `FILE.xlsx#SHEET` names a sheet of a workbook, which is
    needed if several sheets have most of the `columns`. Lines before the header that begin with # are left out. Quotes
    in a file with tabs are data if they do not fit, as in files of the GDC.

    Args:
        path: the file, or its name in messages if there are `data`.
        data: content of the file.
        columns: names, in lower case, by which a sheet is chosen.

    Raises:
        UsageError: the file cannot be read, has another encoding, several possible separators, wrong quotes or a NUL
            character, or a row has more cells than the header, or fewer than the header and other rows. The message
            contains file and line.
    """
    lines, form = _read_lines(path, data, columns)
    rows = [
        (line, [nfc(cell.strip()) for cell in cells])
        for line, cells in lines
        if any(map(str.strip, cells))
    ]
    header = rows[0][1] if rows else []
    width = max((len(cells) for _, cells in rows[1:]), default=0)
    for line, cells in rows[1:]:
        # If all rows have a slide and a label only, the other columns are empty: no cell can be in a wrong column.
        if len(cells) == width == 2 and list(map(column_key, header[:2])) == ["slide", "label"]:
            cells.extend([""] * (len(header) - width))
        if len(cells) != len(header):
            raise UsageError(
                f"{path}, line {line}",
                found=f"{len(cells)} cells",
                expected=f"{len(header)} ({','.join(header)})",
                todo="quote cells that contain a comma, and write a comma for each missing cell",
            )
    return UserTable([column_key(name) for name in header], rows[1:], form, header)


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file by one rename."""
    with atomic_write(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_dicts(path: Path, rows: Collection[Mapping[str, object]]) -> None:
    """Write a CSV file by one rename, with a column for each key of any row."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    write_table(path, header, ([row.get(name) for name in header] for row in rows))


def read_dicts(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file that this project wrote, by column."""
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def read_columns(path: Path) -> list[str]:
    """Return the columns of a CSV file that this project wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


_Lines = list[tuple[int, list[str]]]


def _read_lines(path: Path, data: bytes | None, columns: Collection[str]) -> tuple[_Lines, str]:
    """Return line and cells of each row of a file, and its form, empty for CSV in UTF-8."""
    data = read_file(path) if data is None else data
    if data.startswith(b"PK\x03\x04"):
        return _read_workbook(without_sheet(path), data, path.name.partition("#")[2], columns)
    text, encoding = _decoded(path, data)
    # The lines keep their numbers.
    text = _COMMENTS.sub(lambda lines: "\n" * len(lines[0].splitlines()), text, count=1)
    separator = _separator(path, text)
    forms = [_SEPARATORS[separator]] * (separator != ",") + [encoding] * (encoding != "UTF-8")
    return _split_lines(path, text, separator), ", ".join(forms)


def _read_workbook(
    path: Path, data: bytes, sheet: str, columns: Collection[str]
) -> tuple[list[tuple[int, list[str]]], str]:
    """Return number and cells of each row of a sheet, and a text that names it.

    Without a name, one sheet has cells, or more of the `columns` than the others. The others are not read, since that
    takes long. python-calamine, which is faster, loses the zeros of numbers with the format 000.

    Cells are texts as Excel shows them: whole numbers without decimals, numbers with the format 000 with their zeros,
    dates in ISO format. Other formats of numbers do not change the text.

    Raises:
        UsageError: openpyxl is not installed, the file is damaged, the sheet is missing or ambiguous, a cell is merged,
            or the value of a formula is not in the file.
    """
    try:
        import openpyxl
    except ImportError:
        raise UsageError(
            f"{path} needs openpyxl", todo="pip install 'histopipe[xlsx]', or save it as CSV"
        ) from None
    try:
        formulas, values = (
            openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=only)
            for only in (False, True)
        )
        headers = {each.title: next(filter(any, each.values), ()) for each in values.worksheets}
        name = _choose_sheet(path, headers, sheet, columns)
        for book in (formulas, values):
            book[name].reset_dimensions()  # some tools write wrong ones
        cells, drawn = list(values[name].iter_rows()), list(formulas[name].iter_rows())
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # openpyxl reads them of all sheets only
            merged = _MERGED.findall(archive.read(vars(values[name])["_worksheet_path"]).decode())
    except UsageError:
        raise
    except (
        Exception
    ) as error:  # openpyxl passes on errors of zlib, zipfile and XML, and has some itself
        raise UsageError(
            f"{path} cannot be read", found=str(error), expected="an Excel workbook"
        ) from error
    if merged:
        raise UsageError(
            f"{path}, sheet {name}: merged cells",
            found=", ".join(merged[:3]),
            expected="a value in each cell",
            todo="split them in Excel, and write the value into each cell",
        )
    pairs = zip(chain(*cells), chain(*drawn), strict=True)
    for formula in (formula for cell, formula in pairs if cell.value is None):
        if formula.data_type == "f":
            raise UsageError(
                f"{path}, sheet {name}, cell {formula.coordinate}",
                found=f"a formula without its value: {formula.value}"[:80],
                expected="a value",
                todo="open and save the file in Excel or LibreOffice",
            )
    rows = [[_text(cell.value, cell.number_format) for cell in row] for row in cells]
    width = max((place for row in rows for place, cell in enumerate(row, 1) if cell), default=0)
    filled = [(n, [*row, *[""] * width][:width]) for n, row in enumerate(rows, 1)]
    return filled, f"Excel workbook, sheet {name}"


def _choose_sheet(
    path: Path, headers: Mapping[str, Sequence[object]], sheet: str, columns: Collection[str]
) -> str:
    """Return the sheet of this name, or the one with cells and the most of the columns. UsageError if there are several."""
    names = [name for name in headers if (name == sheet if sheet else headers[name])]
    if len(names) > 1:
        counts = {n: len({column_key(str(c)) for c in headers[n]} & {*columns}) for n in names}
        names = [name for name in names if counts[name] == max(counts.values())]
    if len(names) != 1:
        raise UsageError(
            f"{path}: {'no sheet ' + repr(sheet) if sheet else 'the sheet is ambiguous'}",
            found=", ".join(names or headers),
            expected="the name of a sheet"
            if sheet
            else f"one sheet with the columns {', '.join(columns)}"
            if columns
            else "one sheet with cells",
            todo=f"name it: '{path}#SHEET'",
        )
    return names[0]


def _text(value: Any, number_format: str) -> str:
    if isinstance(value, datetime):
        return value.date().isoformat() if value == datetime(*value.timetuple()[:3]) else str(value)
    if isinstance(value, bool):
        return str(value).upper()
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, int) and re.fullmatch("0+", number_format):
        return str(value).zfill(len(number_format))
    return "" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)


def _split_lines(path: Path, text: str, separator: str) -> _Lines:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    rows: _Lines = []
    line = 1
    try:
        for cells in reader:
            rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        plain = [line.split("\t") for line in re.split(r"\r\n|\r|\n", text)]
        if separator == "\t" and not any(
            re.fullmatch('".*"', cell) for row in plain for cell in row
        ):
            return list(enumerate(plain, 1))
        raise UsageError(
            f"{path}, line {line}",
            found=str(error),
            expected="cells without quotes, or in a pair of quotes",
            todo="correct the quotes of the row that begins in this line; write a quote in a quoted cell twice",
        ) from error
    return rows


def _separator(path: Path, text: str) -> str:
    """Return the separator: the one in the header, or of several the one by which all rows have as many cells as it."""
    line = next(filter(str.strip, re.split(r"[\r\n]+", text)), "")
    header = re.sub(r'"[^"]*"', "", line)
    possible = [separator for separator in _SEPARATORS if separator in header] or [","]
    if len(possible) > 1:
        possible = [each for each in possible if len(_widths(path, text, each)) == 1] or possible
    if len(possible) > 1:
        raise UsageError(
            f"{path}: the separator of the cells is ambiguous",
            found=" and ".join(repr(separator) for separator in possible) + f" in {line!r}"[:80],
            expected="one of them in the header",
            todo=f"quote the column names that contain the other, or {_SAVE}",
        )
    return possible[0]


def _widths(path: Path, text: str, separator: str) -> set[int]:
    """Return the numbers of cells of rows, by one of several separators; none if the quotes do not fit."""
    with suppress(UsageError):
        rows = _split_lines(path, text, separator)
        return {len(cells) for _, cells in rows if any(map(str.strip, cells))}
    return set()


def _decoded(path: Path, data: bytes) -> tuple[str, str]:
    """Return the text of a file, without a byte order mark, and its encoding."""
    encoding = "UTF-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "UTF-8"
    text, problem, position = "", "a NUL character", -1
    try:
        text = data.decode("utf-16" if encoding == "UTF-16" else "utf-8-sig")
        position = text.find("\0")
        before = text[:position].encode()
    except UnicodeDecodeError as error:
        problem, position, before = str(error), error.start, data[: error.start]
    if position >= 0:
        raise UsageError(
            f"{path}, line {len(_LINE_BREAK.findall(before)) + 1}",
            found=problem,
            expected="a CSV file in UTF-8, or in UTF-16 with a byte order mark, or an Excel workbook (.xlsx)",
            todo=_SAVE,
        )
    return text, encoding
