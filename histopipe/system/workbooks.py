"""Read sheets of Excel workbooks as text."""

from __future__ import annotations

import io
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError


def read_workbook(
    path: Path, data: bytes, sheet: str = ""
) -> tuple[list[tuple[int, list[str]]], str]:
    """Return number and cells of each row of a sheet, and a text that names it. Without a name, one sheet has cells.

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
            openpyxl.load_workbook(io.BytesIO(data), data_only=only) for only in (False, True)
        )
    except (
        Exception
    ) as error:  # openpyxl passes on errors of zlib, zipfile and XML, and has some itself
        raise UsageError(
            f"{path} cannot be read", found=str(error), expected="an Excel workbook"
        ) from error
    used = [each.title for each in values.worksheets if any(map(any, each.values))]
    names = [name for name in values.sheetnames if name == sheet] if sheet else used
    if len(names) != 1:
        raise UsageError(
            f"{path}: {'no sheet ' + repr(sheet) if sheet else 'the sheet is ambiguous'}",
            found=", ".join(names or values.sheetnames),
            expected="one sheet with cells" if not sheet else "the name of a sheet",
            todo=f"name it: '{path}#SHEET'",
        )
    (name,) = names
    merged = [str(area) for area in formulas[name].merged_cells.ranges]
    if merged:
        raise UsageError(
            f"{path}, sheet {name}: merged cells",
            found=", ".join(merged[:3]),
            expected="a value in each cell",
            todo="split them in Excel, and write the value into each cell",
        )
    cells = list(values[name].iter_rows())
    blank = (cell.coordinate for row in cells for cell in row if cell.value is None)
    for formula in [formulas[name][place] for place in blank]:
        if formula.data_type == "f":
            raise UsageError(
                f"{path}, sheet {name}, cell {formula.coordinate}",
                found=f"a formula without its value: {formula.value}"[:80],
                expected="a value",
                todo="open and save the file in Excel or LibreOffice",
            )
    rows = [[_text(cell.value, cell.number_format) for cell in row] for row in cells]
    width = max((place for row in rows for place, cell in enumerate(row, 1) if cell), default=0)
    return [(n, row[:width]) for n, row in enumerate(rows, 1)], f"Excel workbook, sheet {name}"


def _text(value: Any, number_format: str) -> str:
    if isinstance(value, datetime):
        return value.date().isoformat() if value == datetime(*value.timetuple()[:3]) else str(value)
    if isinstance(value, bool):
        return str(value).upper()
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, int) and re.fullmatch("0+", number_format):
        return str(value).zfill(len(number_format))
    return "" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)
