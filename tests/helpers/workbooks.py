"""Excel workbooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openpyxl


def write_workbook(path: Path, **sheets: list[list[Any]]) -> Path:
    workbook = openpyxl.Workbook()
    del workbook["Sheet"]
    for name, rows in sheets.items():
        sheet = workbook.create_sheet(name)
        for row in rows:
            sheet.append(row)
    workbook.save(path)
    return path
