"""Read CSV files of labels, scales or lists of slides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.geometry import Mpp
from histopipe.slides.scale import PLAUSIBLE_MPP
from histopipe.slides.slide_files import (
    SlideFile,
    SlideNames,
)
from histopipe.system.output import counted, message, some
from histopipe.system.table_cells import (
    FLAGS,
    NA_VALUES,
    NUMERIC_SHARE,
    cell_number,
    column_key,
    event_column,
    has_control_character,
    has_decimal_comma,
    is_number,
    missing_cells,
    similar_values,
    source_column,
    spreadsheet_damage,
    value_form,
)
from histopipe.system.table_files import read_table
from histopipe.system.urls import is_url, public_url

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


def _refuse_control_characters(
    path: Path, rows: Iterable[TableRow], columns: Iterable[str] = ()
) -> None:
    """Refuse names that no record can hold, such as those with a line break."""
    for row in rows:
        for column in ("slide", *columns):
            cell = row.slide if column == "slide" else row.cells.get(column, "")
            if has_control_character(cell):
                raise UsageError(
                    f"{path}, line {row.line}: column {column}",
                    found=repr(cell)[:80],
                    expected="a text without line breaks and control characters",
                    todo="correct the cell, and look for a missing quote in this line",
                )


def _clear_missing(
    path: Path,
    rows: Iterable[TableRow],
    columns: Iterable[str],
    missing: Collection[str],
    notify: Callable[[str], None],
) -> None:
    """Make missing values empty, and report their number by column and spelling."""
    counts = {
        column: Counter(row.cells[column] for row in rows if row.cells.get(column) in missing)
        for column in columns
    }
    for row in rows:
        row.cells.update({name: "" for name, cell in row.cells.items() if cell in missing})
    texts = [
        f"{column} {count.total()} ("
        + ", ".join(f"{count[cell]} {cell or 'empty'}" for cell in sorted(count))
        + ")"
        for column, count in counts.items()
        if count
    ]
    if texts:
        is_spelled = any(count.keys() - {""} for count in counts.values())
        hint = "; --na changes what counts as missing" if is_spelled else ""
        notify(f"{path}: missing values: {'; '.join(texts)}{hint}")


def _check_numbers(path: Path, rows: Iterable[TableRow], column: str) -> None:
    """Refuse a column of numbers with decimal commas, or with a cell that would turn them into categories."""
    filled = [row for row in rows if row.cells[column]]
    odd = [row for row in filled if not is_number(row.cells[column])]
    numbers = {cell for row in filled if is_number(cell := row.cells[column])}
    commas = [row for row in odd if has_decimal_comma(row.cells[column])]
    count = len(filled) - len(odd)
    mostly = count + len(commas) >= NUMERIC_SHARE * len(filled)
    odd = commas or odd
    if odd and mostly and (commas or len(numbers) > _MOST_CODES):
        raise UsageError(
            f"{path}, line {odd[0].line}: column {column}",
            found=repr(odd[0].cells[column]),
            expected="a number with a decimal point"
            if commas
            else f"a number, as in {count} of {len(filled)} cells",
            todo="write 3.5 for 3,5"
            if commas
            else "correct the cell; if it is a missing value, leave it empty or name it with --na",
        )


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


def _warn_of_similar(
    path: Path, rows: Iterable[TableRow], columns: Iterable[str], notify: Callable[[str], None]
) -> None:
    """Warn of values that may be one, such as "Tumour" and "tumour"."""
    for column in columns:
        values = {cell for row in rows if (cell := row.cells.get(column))}
        # "1" and "1.0" are one number, "TRUE" and "true" one flag, and "Test" and "test" one subset, except as names.
        as_names = column in LABEL_COLUMNS or not all(
            is_number(cell) or cell.lower() in {*FLAGS, *SUBSET_SPELLINGS} for cell in values
        )
        texts = [
            similar_values(values) if as_names else "",
            spreadsheet_damage(values) if column in ("patient", "site") else "",
        ]
        for text in filter(None, texts):
            notify(f"warning: {path}: column {column}: {text}")


def _refuse_regression(path: Path, labels: Iterable[str]) -> None:
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


_SURVIVAL_WORDS = {
    "time",
    "event",
    "survival",
    "os",
    "os_time",
    "os_event",
    "days",
    "status",
    "censor",
}
_PATIENT_WORDS = {"patient", "case", "subject", "participant", "donor"}
_PATIENT_FORMS = {*(f"{word}id" for word in _PATIENT_WORDS), "patid", "pid", "mrn"}
_ID_WORDS = {
    "id",
    "name",
    "number",
    "no",
    "nr",
    "code",
    "barcode",
    "key",
    "uuid",
    "submitter",
    "bcr",
    "study",
    "pat",
}
"""Words of columns that are probably meant as `patient`. To ignore them would put a patient in several subsets of the split."""


@dataclass(frozen=True, slots=True)
class SlideLabel:
    """Row of a labels file; None for empty cells and missing columns. `cells` are those of other columns, by name.

    With `keeps_label`, of a file of patients or sites only, the slide keeps the label that it has.
    """

    label: str | None
    patient: str | None = None
    site: str | None = None
    cells: Mapping[str, str] = field(default_factory=dict)
    keeps_label: bool = False


def read_labels(
    path: Path,
    names: SlideNames,
    *,
    columns: Sequence[str] = (),
    groups: Sequence[str] = (),
    with_label: bool | None = True,
    allow_extra: bool = False,
    na: Collection[str] = NA_VALUES,
    notify: Callable[[str], None] = message,
) -> dict[str, SlideLabel]:
    """Return labels by slide id, from a CSV file with the columns slide, label, and optionally patient and site.

    The file must also have `columns`, of targets and covariates, and `groups`, and may have others. COLUMN=VALUE is a
    column that is 1 where COLUMN has this value, and 0 where it has another one. Without `with_label`, it needs no
    label; with None, a file of patients and sites only needs none. Empty cells and those in `na` are missing values.
    `notify` gets a line on missing values, and a warning for each column with values that may be one.

    Raises:
        UsageError: the file, its header or a row is invalid, or a row matches no slide (unless `allow_extra`).
    """
    cell_columns = [source_column(column) for column in (*columns, *groups)]
    keeps_label = with_label is None and _has_no_labels(path, cell_columns)
    with_label = with_label is not False and not keeps_label
    if keeps_label:
        notify(f"{path} has no column label: slides keep the labels that they have")
    labelled = ["label"] if with_label else []
    if "slide" in cell_columns:
        raise UsageError(
            f"{path}: column slide", found="its use for values", expected="another column"
        )
    rows = _rows(
        path,
        required=("slide", *labelled, *cell_columns),
        optional=("patient", "site"),
        notify=notify,
    )
    if not rows:
        raise UsageError(f"{path} has no rows", found="only a header", expected="one row per slide")
    matched = _matched(path, rows, names, allow_extra=allow_extra, notify=notify)
    used = list(dict.fromkeys([*labelled, "patient", "site", *cell_columns]))
    _refuse_control_characters(path, matched.values(), used)
    _clear_missing(path, matched.values(), used, missing_cells(na), notify)
    # Runs of earlier versions have no list: such a cell was a category of their covariate.
    for column in columns if na else ():
        _check_numbers(path, matched.values(), source_column(column))
    of_events = {source_column(column) for column in columns if event_column(column)[1]}
    events = {column: _events(matched.values(), column, notify) for column in columns}
    if with_label:
        _refuse_regression(path, [row.cells["label"] for row in matched.values()])
    _warn_of_similar(path, matched.values(), [c for c in used if c not in of_events], notify)
    return {
        name: SlideLabel(
            label=(row.cells["label"] or None) if with_label else None,
            patient=row.cells.get("patient") or None,
            site=row.cells.get("site") or None,
            cells={
                name: events.get(name, {}).get(row.line) or row.cells.get(column_key(name), "")
                for name in (*columns, *groups)
            },
            keeps_label=keeps_label,
        )
        for name, row in matched.items()
    }


def _events(rows: Iterable[TableRow], name: str, notify: Callable[[str], None]) -> dict[int, str]:
    """Return whether COLUMN has VALUE by line of a table, as 1 or 0; nothing for missing values and other columns.

    Where 0 or 1 is asked for, other values are kept, so that they are refused.
    """
    column, value = event_column(name)
    if value is None:
        return {}
    cells = {row.line: row.cells[column_key(column)] for row in rows}
    events = {line: value_form(cell) == value_form(value) for line, cell in cells.items() if cell}
    counts = Counter(cells[line] for line, happened in events.items() if not happened)
    rest = some([f"{cell} ({count})" for cell, count in counts.most_common()])
    count = sum(events.values())
    notify(
        f"{'' if count else 'warning: '}column {column}: {value} is the event ({count}), no event: {rest or 'none'}"
    )
    is_flag = value in ("0", "1")
    return {
        line: cells[line]
        if is_flag and value_form(cells[line]) not in ("0", "1")
        else f"{is_event:d}"
        for line, is_event in events.items()
    }


def _has_no_labels(path: Path, columns: Sequence[str]) -> bool:
    """Return whether a file has patients or sites, and apart from `columns` nothing that may be meant as a label."""
    header = {*read_table(path, columns=("slide", *columns)).columns}
    return bool(header & {"patient", "site"}) and header <= {"slide", "patient", "site", *columns}


def read_mpps(path: Path, names: SlideNames, *, allow_extra: bool = False) -> dict[str, Mpp]:
    """Return level-0 scales by slide id, from a CSV file with the columns slide,mpp.

    Raises:
        UsageError: the file is invalid, or a value is not between 0.05 and 50.
    """
    rows = _rows(path, required=("slide", "mpp"), extra_columns=False)
    matched = _matched(path, rows, names, allow_extra=allow_extra)
    low, high = PLAUSIBLE_MPP
    for row in matched.values():
        if not low <= cell_number(row.cells["mpp"]) <= high:
            raise UsageError(
                f"{path}, line {row.line}: mpp of {row.slide}",
                found=repr(row.cells["mpp"]),
                expected=f"a number from {low:g} to {high:g}",
            )
    return {name: Mpp(cell_number(row.cells["mpp"])) for name, row in matched.items()}


def describe_changes(
    before: Mapping[str, Mapping[str, str | None]], now: Mapping[str, Mapping[str, str | None]]
) -> Iterator[str]:
    """Yield a line for each column of `now` in which slides have another value than before."""
    for column in dict.fromkeys(column for cells in now.values() for column in cells):
        texts = [
            f"{name}: {before[name].get(column) or 'empty'} → {cells.get(column) or 'empty'}"
            for name, cells in sorted(now.items())
            if name in before and (before[name].get(column) or "") != (cells.get(column) or "")
        ]
        if texts:
            yield f"{column} of {counted(len(texts), 'slide')}: {some(texts, 3)}"


def urls_in_list(path: Path) -> list[str]:
    """Return the URLs in a CSV file with the column slide; its other rows are names of slides.

    Raises:
        UsageError: the file is invalid.
    """
    rows = _rows(path, required=("slide",))
    return list(dict.fromkeys(row.slide for row in rows if is_url(row.slide)))


def select_listed(
    slides: list[SlideFile], path: Path | None, names: SlideNames, *, allow_extra: bool = False
) -> list[SlideFile]:
    """Return the slides in a CSV file with the column slide: those that it names, and those at or below its URLs.

    Without a file, return all.

    Raises:
        UsageError: the list is invalid, or matches no slide.
    """
    if path is None:
        return slides
    rows = _rows(path, required=("slide",))
    listed_ids = _matched(
        path, [row for row in rows if not is_url(row.slide)], names, allow_extra=allow_extra
    ).keys()
    # A slide is the file at a URL, or below this prefix.
    prefixes = tuple(public_url(row.slide).rstrip("/") + "/" for row in rows if is_url(row.slide))
    chosen = [
        slide
        for slide in slides
        if slide.id in listed_ids or (slide.remote and f"{slide.location}/".startswith(prefixes))
    ]
    if not chosen:
        raise UsageError(
            f"{path} matches none of the slides", found=f"{len(listed_ids)} other names"
        )
    return chosen


def read_slide_list(path: Path) -> list[TableRow]:
    """Return the rows of a list of slides: one id per line, or a table with the column slide.

    Raises:
        UsageError: the file is invalid.
    """
    columns, lines, _, header = read_table(path)
    if len(columns) == 1 and columns != ["slide"]:
        return [TableRow(line, cells[0], {}) for line, cells in [(1, [*header]), *lines]]
    return _rows(path, required=("slide",))


def _rows(
    path: Path,
    *,
    required: Sequence[str],
    optional: Sequence[str] = (),
    extra_columns: bool = True,
    notify: Callable[[str], None] = message,
) -> list[TableRow]:
    """Return the rows of a file with `required` and `optional` columns, and with other ones if `extra_columns`."""
    header, lines, form, _ = read_table(path, columns=required)
    if form:
        notify(f"{path}: {form}")
    _check_header(path, header, required=required, optional=optional, extra_columns=extra_columns)
    named = ((line, dict(zip(header, cells, strict=True))) for line, cells in lines)
    rows = [TableRow(line, cells.pop("slide"), cells) for line, cells in named]
    _refuse_control_characters(path, rows)
    return rows


def _check_header(
    path: Path,
    header: list[str],
    *,
    required: Sequence[str],
    optional: Sequence[str],
    extra_columns: bool,
) -> None:
    unknown = [name for name in header if name not in (*required, *optional)]
    missing = [name for name in required if name not in header]
    is_repeated = len(set(header)) < len(header)
    # An unknown column of patients is an error: to ignore it would put a patient in several subsets of the split.
    needs_patient = "patient" in optional and "patient" not in header
    alike = [repr(name) for name in unknown if needs_patient and _is_like_patient(name)]
    if not (missing or is_repeated or alike or (unknown and not extra_columns)):
        return
    # The first hint that applies is shown.
    hints = {
        "this looks like a survival table: pass --task survival --time COLUMN --event COLUMN": missing
        and not alike
        and _SURVIVAL_WORDS & {*unknown},
        "for several labels pass --task multilabel --target COLUMN,COLUMN": missing
        and sum(name.startswith("label") for name in header) > 1,
        "give each column a different name": not missing and is_repeated,
        f"rename the column {''.join(alike[:1])} to 'patient', so that a patient stays in one subset of the split": alike,
        "use these column names, separated by commas": True,
    }
    raise UsageError(
        f"{path}: wrong header",
        found=",".join(header) or "an empty file",
        expected=",".join(required) + "".join(f"[,{n}]" for n in optional if n not in required),
        todo=next(hint for hint, applies in hints.items() if applies),
    )


def _is_like_patient(column: str) -> bool:
    """Return whether a column is probably meant as `patient`, such as `bcr_patient_barcode`, but not `patient_age`."""
    words = {word.removesuffix("s") for word in re.findall("[a-z]+", column)}
    if words & _PATIENT_FORMS or words == {"pat", "id"}:
        return len(words) <= 2
    return bool(words & _PATIENT_WORDS) and words <= _PATIENT_WORDS | _ID_WORDS


def _matched(
    path: Path,
    rows: list[TableRow],
    names: SlideNames,
    *,
    allow_extra: bool,
    notify: Callable[[str], None] = message,
) -> dict[str, TableRow]:
    matched: dict[str, TableRow] = {}
    unknown: list[TableRow] = []
    names.restored.clear()  # those of an earlier table
    exact = {names.find(row.slide, where=f"{path}, line {row.line}") or "" for row in rows}
    for row in rows:
        name = names.find(row.slide, where=f"{path}, line {row.line}", but_zeros_of=exact)
        if name is None:
            unknown.append(row)
        elif name in matched and matched[name].cells != row.cells:
            raise UsageError(
                f"{path}: {name} is in lines {matched[name].line} and {row.line}",
                found=f"{matched[name].cells} and {row.cells}",
                expected="one row per slide (several labels per slide are not supported)",
                todo="remove one of the rows",
            )
        else:
            matched.setdefault(name, row)
    if names.restored:
        pairs = some([f"{written} is {name}" for written, name in names.restored.items()], 3)
        notify(
            f"warning: {path}: names without their leading zeros, as spreadsheets save them: {pairs}"
        )
    if unknown and not allow_extra:
        first = unknown[0]
        rest = f" and {len(unknown) - 1} more rows" if len(unknown) > 1 else ""
        raise UsageError(
            f"{path}, line {first.line}: no slide matches {first.slide!r}{rest}",
            expected=f"the id of a slide, such as {names.nearest(first.slide)!r}",
            todo="correct the name, or pass --allow-extra-rows to ignore such rows",
        )
    return matched
