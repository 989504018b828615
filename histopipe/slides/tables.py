"""Read CSV files of labels, scales or lists of slides, and match the names in them to slide ids."""

from __future__ import annotations

import csv
import difflib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from histopipe.errors import UsageError
from histopipe.geometry import Mpp
from histopipe.slides.scale import PLAUSIBLE_MPP
from histopipe.slides.slide_files import FASTSLIDE_SUFFIXES, SUFFIXES
from histopipe.system.urls import is_url

_SUFFIXES = SUFFIXES | FASTSLIDE_SUFFIXES
_LABEL_COLUMNS = ("slide", "label", "patient", "site")
_SURVIVAL_WORDS = {
    "time", "event", "survival", "os", "os_time", "os_event", "days", "status", "censor",
}  # fmt: skip
_PATIENT_WORDS = {"patient", "case", "subject", "participant", "donor"}
_PATIENT_FORMS = {*(f"{word}id" for word in _PATIENT_WORDS), "patid", "pid", "mrn"}
_ID_WORDS = {
    "id", "name", "number", "no", "nr", "code", "barcode", "key", "uuid", "submitter", "bcr", "study", "pat",
}  # fmt: skip
"""Words of columns that are probably meant as `patient`. To ignore them would put a patient on several sides of the split."""


@dataclass(frozen=True, slots=True)
class SlideLabel:
    """Row of a labels file; None for empty cells and missing columns. `cells` are those of other columns, by name."""

    label: str | None
    patient: str | None = None
    site: str | None = None
    cells: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    slide: str
    others: dict[str, str]
    """Cells of the other columns, by name."""


class SlideNames:
    """Matches names in tables with slide ids: the id, with or without suffix, or its last part if that is unique.

    `others` are ids that are used if none of `ids` matches.
    """

    def __init__(self, ids: Iterable[str], others: Iterable[str] = ()) -> None:
        self._others = SlideNames(others) if others else None
        self._ids: dict[str, set[str]] = defaultdict(set)
        self._last: dict[str, set[str]] = defaultdict(set)
        self._stripped: dict[str, set[str]] = defaultdict(set)
        for name in ids:
            for form in {name, _bare(name)}:
                self._ids[form].add(name)
                self._last[PurePosixPath(form).name].add(name)
                self._stripped[form.strip()].add(name)

    def find(self, written: str, *, where: str) -> str | None:
        """Return the id that matches a name, or None. `where` is for messages.

        Raises:
            UsageError: several slides match.
        """
        written = unicodedata.normalize("NFC", written)
        stripped = (
            written.strip()
        )  # names of files may have blanks at their ends, which tables lose
        for table in (self._ids, self._last, self._stripped):
            for form in (written, _bare(written), stripped, _bare(stripped)):
                ids = table.get(form, set())
                if len(ids) > 1:
                    raise UsageError(
                        f"{where}: {written!r} matches several slides",
                        found=", ".join(sorted(ids)),
                        expected="the name of one slide",
                        todo="write the full id",
                    )
                if ids:
                    return next(iter(ids))
        return self._others.find(written, where=where) if self._others else None

    def nearest(self, written: str) -> str:
        """Return the most similar id, as a hint."""
        near = difflib.get_close_matches(written, list(self._ids), n=1, cutoff=0.3)
        return near[0] if near else next(iter(sorted(self._ids)), "none")


def read_labels(
    path: Path,
    names: SlideNames,
    *,
    columns: Sequence[str] = (),
    with_label: bool = True,
    allow_extra: bool = False,
) -> dict[str, SlideLabel]:
    """Return labels by slide id, from a CSV file with the columns slide, label, and optionally patient and site.

    The file must have `columns` too, and may have others. Without `with_label`, it needs no label.

    Raises:
        UsageError: the file, its header or a row is invalid, or a row matches no slide (unless `allow_extra`).
    """
    required = ("slide", *(["label"] if with_label else []), *(name.lower() for name in columns))
    rows = _rows(path, required=required, optional=("patient", "site"))
    labels = {}
    for name, row in _matched(path, rows, names, allow_extra=allow_extra).items():
        label, patient, site = (row.others.get(column) or None for column in _LABEL_COLUMNS[1:])
        cells = {column: row.others.get(column.lower(), "") for column in columns}
        labels[name] = SlideLabel(label if with_label else None, patient, site, cells)
    if with_label:
        _refuse_regression(path, labels.values())
    return labels


def table_columns(path: Path) -> tuple[str, ...]:
    """Return the column names of a CSV file, in lower case.

    Raises:
        UsageError: the file cannot be read.
    """
    return tuple(_lines(path)[0])


def read_mpps(path: Path, names: SlideNames, *, allow_extra: bool = False) -> dict[str, Mpp]:
    """Return level-0 scales by slide id, from a CSV file with the columns slide,mpp.

    Raises:
        UsageError: the file is invalid, or a value is not between 0.05 and 50.
    """
    rows = _rows(path, required=("slide", "mpp"), others=False)
    matched = _matched(path, rows, names, allow_extra=allow_extra)
    return {name: _mpp(path, row) for name, row in matched.items()}


def read_slide_list(path: Path, names: SlideNames, *, allow_extra: bool = False) -> set[str]:
    """Return the slide ids in a CSV file with the column slide.

    Raises:
        UsageError: the file is invalid.
    """
    rows = _rows(path, required=("slide",))
    named = [row for row in rows if not is_url(row.slide)]
    return set(_matched(path, named, names, allow_extra=allow_extra))


def urls_in_list(path: Path) -> list[str]:
    """Return the URLs in a CSV file with the column slide; its other rows are names of slides.

    Raises:
        UsageError: the file is invalid.
    """
    rows = _rows(path, required=("slide",))
    return list(dict.fromkeys(row.slide for row in rows if is_url(row.slide)))


def _lines(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header in lower case, and all lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = list(csv.reader(text.splitlines()))
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist", todo="check the path") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"{path} cannot be read", found=str(error), expected="a CSV file in UTF-8"
        ) from error
    return [cell.strip().lower() for cell in lines[0]] if lines else [], lines


def _rows(
    path: Path, *, required: Sequence[str], optional: Sequence[str] = (), others: bool = True
) -> list[_Row]:
    """Return the rows of a file with `required` and `optional` columns, and with other ones if `others`."""
    header, lines = _lines(path)
    _check_header(path, header, required=required, optional=optional, others=others)
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) > len(header):
            raise UsageError(
                f"{path}, line {number}",
                found=f"{len(cells)} cells",
                expected=f"{len(header)} ({','.join(header)})",
                todo="quote cells that contain a comma",
            )
        named = dict(zip(header, (cell.strip() for cell in cells), strict=False))
        rows.append(_Row(number, named.pop("slide"), named))
    return rows


def _check_header(
    path: Path, header: list[str], *, required: Sequence[str], optional: Sequence[str], others: bool
) -> None:
    unknown = [name for name in header if name not in (*required, *optional)]
    hint = "use these column names, separated by commas"
    if "patient" in optional and "patient" not in header:
        alike = [name for name in unknown if _is_like_patient(name)]
        if alike:
            hint = f"rename the column {alike[0]!r} to 'patient', so that a patient stays on one side of the split"
            unknown, others = alike, False
    missing = [name for name in required if name not in header]
    if not missing and (others or not unknown) and len(set(header)) == len(header):
        return
    if missing and _SURVIVAL_WORDS & set(unknown):
        hint = "this looks like a survival table: pass --task survival --time COLUMN --event COLUMN"
    elif missing and sum(name.startswith("label") for name in header) > 1:
        hint = "for several labels pass --task multilabel --target COLUMN,COLUMN"
    elif not missing and len(set(header)) < len(header):
        hint = "give each column a different name"
    expected = ",".join(required) + "".join(f"[,{n}]" for n in optional if n not in required)
    found = ",".join(header) or "an empty file"
    raise UsageError(f"{path}: wrong header", found=found, expected=expected, todo=hint)


def _is_like_patient(column: str) -> bool:
    """Return whether a column is probably meant as `patient`, such as `bcr_patient_barcode`, but not `patient_age`."""
    words = {word.removesuffix("s") for word in re.findall("[a-z]+", column)}
    if words & _PATIENT_FORMS or words == {"pat", "id"}:
        return len(words) <= 2
    return bool(words & _PATIENT_WORDS) and words <= _PATIENT_WORDS | _ID_WORDS


def _matched(
    path: Path, rows: list[_Row], names: SlideNames, *, allow_extra: bool
) -> dict[str, _Row]:
    matched: dict[str, _Row] = {}
    unknown: list[_Row] = []
    for row in rows:
        name = names.find(row.slide, where=f"{path}, line {row.line}")
        if name is None:
            unknown.append(row)
        elif name in matched and matched[name].others != row.others:
            raise UsageError(
                f"{path}: {name} is in lines {matched[name].line} and {row.line}",
                found=f"{matched[name].others} and {row.others}",
                expected="one row per slide (several labels per slide are not supported)",
                todo="remove one of the rows",
            )
        else:
            matched.setdefault(name, row)
    if unknown and not allow_extra:
        first = unknown[0]
        more = f" and {len(unknown) - 1} more rows" if len(unknown) > 1 else ""
        raise UsageError(
            f"{path}, line {first.line}: no slide matches {first.slide!r}{more}",
            expected=f"the id of a slide, such as {names.nearest(first.slide)!r}",
            todo="correct the name, or pass --allow-extra-rows to ignore such rows",
        )
    return matched


def _mpp(path: Path, row: _Row) -> Mpp:
    low, high = PLAUSIBLE_MPP
    cell = row.others.get("mpp", "")
    with suppress(ValueError):
        if low <= float(cell) <= high:
            return Mpp(float(cell))
    raise UsageError(
        f"{path}, line {row.line}: mpp of {row.slide}",
        found=repr(cell),
        expected=f"a number from {low:g} to {high:g}",
    )


def _refuse_regression(path: Path, labels: Iterable[SlideLabel]) -> None:
    values = [label.label for label in labels if label.label]
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return
    if any(number != int(number) for number in numbers if abs(number) < 1e15):
        raise UsageError(
            f"{path}: the labels are continuous values",
            found=", ".join(values[:4]),
            expected="classes",
            todo="pass --task regression --target label, or group the values into classes",
        )


def _bare(name: str) -> str:
    path = PurePosixPath(name)
    return path.with_suffix("").as_posix() if path.suffix.lower() in _SUFFIXES else name
