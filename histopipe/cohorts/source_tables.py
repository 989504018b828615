"""Read the tables that archives publish, and find in each the columns by which its rows belong to slides.

| archive | tables |
| --- | --- |
| GDC | manifest, sample sheet, metadata of a cart (JSON), clinical and biospecimen tables, also as .tar.gz |
| IDC, TCIA | lists of series or slides, CPTAC's table of slides |
| CAMELYON, PANDA, BRACS | `reference.csv`, `stages.csv`, `train.csv`, `BRACS.xlsx` |
| others | any table with a column of slides or patients |
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import re
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.slides.slide_files import patient_of, without_suffix
from histopipe.system.output import message, some
from histopipe.system.table_cells import NA_VALUES, column_key, nfc
from histopipe.system.table_files import UserTable, read_file, read_table

KEYS: Mapping[str, tuple[str, ...]] = {
    "file_id": (
        "file_id",
        "id",
        "seriesinstanceuid",
        "series_uid",
        "series_instance_uid",
        "file_uuid",
        "imageid",
    ),
    "file_name": ("file_name", "filename", "wsi_filename", "image", "wsiimage_url", "imageurl"),
    "slide": (
        "slides_submitter_id",
        "slide_submitter_id",
        "associated_entities_entity_submitter_id",
        "containeridentifier",
        "slide",
        "slide_id",
        "image_id",
        "slide_name",
    ),
    "sample": (
        "samples_submitter_id",
        "sample_submitter_id",
        "cases_samples_submitter_id",
        "sample_id",
    ),
    "patient": (
        "cases_submitter_id",
        "case_submitter_id",
        "bcr_patient_barcode",
        "patient_id",
        "patientid",
        "subject_id",
        "subjectid",
        "patient",
        "submitter_id",
        "case_id",
        "case",
        "cases_case_id",
        "associated_entities_case_id",
    ),
    "case_uuid": ("cases_case_id", "case_id", "associated_entities_case_id"),
    "project": (
        "project_project_id",
        "project_id",
        "cases_project_project_id",
        "collection_id",
        "collection",
        "collectionname",
    ),
    "site": ("site", "center", "data_provider", "institution"),
    "md5": ("md5", "md5sum"),
    "size": ("size", "file_size"),
    "kind": ("experimental_strategy",),
    "modality": ("modality",),
}
"""Spellings of columns, in the form of `plain_name`. The first that a table has is used.

`file_id` is the UUID of a file (GDC) or a series (DICOM), which also names its folder; `case_uuid` the UUID of a patient.
"""
MISSING = frozenset(
    (
        *NA_VALUES,
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
)
"""Cells that are missing values: those of labels files, and further ones of the GDC and TCGA."""
LEVELS = ("file_id", "file_name", "slide", "sample", "patient")
"""Keys by which rows are joined to slides; the first that a table has."""
_WITHOUT_HEADER = re.compile(r"(test|normal|tumor)_\d{3}(\.tiff?)?", re.IGNORECASE)
"""First cell of CAMELYON16's `reference.csv`, which has no header."""
_CAMELYON16 = ("image", "type", "tumor_type", "class")
Line = tuple[int, Sequence[str]]
"""Number of a line, and its cells."""
_BARCODE = re.compile(r"(?=\S*\d)\w+([-.]\w+)+")
"""A barcode, a UUID, or a series of DICOM."""
_MEMBER = re.compile(r"(^|/)(?!annotations\.txt|\.)[^/]+\.(tsv|csv|txt|json)$")
"""A table in an archive, other than gdc-client's notes on files."""


is_uuid = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE).fullmatch
"""Match a UUID."""


def plain_name(column: str) -> str:
    """Return the form in which columns are compared: `Case ID` and `case_id` are one, `cases.0.case_id` is `cases_case_id`.

    Example:
        >>> plain_name("Case ID"), plain_name("cases.0.submitter_id")
        ('case_id', 'cases_submitter_id')
    """
    return re.sub(r"[\W_]+", "_", re.sub(r"\.\d+\.", ".", column.lower())).strip("_")


def parts_of(cell: str) -> set[str]:
    """Return the values of a cell: GDC writes "Tumor, Tumor" for a file of two samples, and the barcodes of both.

    A name as "Doe, J" is one value.
    """
    parts = cell.split(", ")
    return {*parts} if len({*parts}) == 1 or all(map(_BARCODE.fullmatch, parts)) else {cell}


def single(cell: str) -> str:
    """Return the value of a cell that is repeated in it, or else the cell."""
    parts = parts_of(cell)
    return parts.pop() if len(parts) == 1 else cell


@functools.cache
def path_key(name: str) -> str:
    """Return the name of a file, with its folders, without its suffix."""
    return nfc(without_suffix(name.replace("\\", "/").rstrip("/")))


def file_key(name: str) -> str:
    """Return the name of a file without folders and suffix."""
    return path_key(name).rpartition("/")[2]


def is_tcga(name: str) -> bool:
    """Return whether a name begins as a barcode of TCGA."""
    return name[:5].upper() == "TCGA-"


def tcga_upper(name: str) -> str:
    """Return a barcode of TCGA, in which case does not matter, in upper case, and other names as written, in NFC."""
    return nfc(name.upper() if is_tcga(name) else name)


def is_slide_name(name: str) -> bool:
    """Return whether a name has the suffix of a slide format."""
    return without_suffix(name) != name


class KeyedRows:
    """Rows of a table by the cells of a key: names of files without folders and suffix, or samples or patients as written.

    A name that the table does not have matches one that differs in case only.
    """

    def __init__(self, table: str, key: str) -> None:
        self._table, self._key = table, key.replace("_", " ")
        self._form = tcga_upper if key in ("sample", "patient") else file_key
        self._spellings = defaultdict[str, list[str]](list)
        self._asked: dict[str, str] = {}
        self.rows = defaultdict[str, list[Line]](list)

    def add(self, names: Iterable[str], line: Line) -> None:
        """Add a row to each of several names."""
        for name in {self._form(name) for name in names}:
            if name not in self.rows:
                self._spellings[name.casefold()].append(name)
            self.rows[name].append(line)

    def find(self, written: str) -> list[Line]:
        """Return the rows of a name.

        Raises:
            UsageError: it is another spelling of several names, or one name is asked for in several spellings.
        """
        name = self._form(written)
        named = [name] if name in self.rows else self._spellings.get(name.casefold(), [])
        short = name.lstrip("0")
        if not named and name.isdecimal() and short in self.rows:
            named = [short]
            if short not in self._asked:
                message(
                    f"warning: {self._table}: {self._key} {short} is {name}: a spreadsheet has removed its zeros"
                )
        asked = sorted({self._asked.setdefault(each, name) for each in named} | {name})
        if len(named) > 1 or len(asked) > 1:
            raise UsageError(
                f"{self._table}: {self._key} {' and '.join(map(repr, named))}",
                found=f"{' and '.join(map(repr, asked))} of the slides",
                expected="the same spelling, since different names may differ in case only",
                todo="correct the spelling in the table, or the names of the slides",
            )
        return self.rows[named[0]] if named else []


@dataclass(frozen=True)
class SourceTable:
    """A table.

    Attributes:
        name: path, for messages.
        columns: names of the columns, in lower case.
        rows: line and cells of each row.
        form: form of the file, empty for CSV in UTF-8.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Line] = field(repr=False)
    form: str = ""

    @functools.cached_property
    def keys(self) -> dict[str, int]:
        """Places of the columns in `KEYS`."""
        plain = [plain_name(column) for column in self.columns]
        places = {
            key: plain.index(name)
            for key, names in KEYS.items()
            for name in reversed(names)
            if name in plain
        }
        # `id` is a file's in a manifest only, and `imageid` a slide's number in the database of TCIA.
        if "file_name" not in places and {"id", "imageid"} & {
            *plain[places.get("file_id", len(plain)) :][:1]
        }:
            del places["file_id"]
        return places

    @property
    def lists_files(self) -> bool:
        """Whether each row is a file. GDC's table of slides also has slides that were not chosen."""
        return {"file_id", "file_name"} & self.keys.keys() != set() or (
            "slide" in self.keys
            and not plain_name(self.columns[self.keys["slide"]]).endswith("submitter_id")
        )

    def cell(self, row: Sequence[str], key: str) -> str:
        """Return the cell of a key in a row; empty if it is missing."""
        place = self.keys.get(key)
        cell = "" if place is None else single(row[place])
        return "" if cell in MISSING else cell

    def rows_by(self, key: str, aliases: Mapping[str, str]) -> KeyedRows:
        """Return the rows by the cells of a key, which may have other names."""
        keyed = KeyedRows(self.name, key)
        for line, row in self.rows:
            parts = parts_of(self.cell(row, key))
            keyed.add({aliases.get(part, part) for part in parts} - {""}, (line, row))
        return keyed

    @functools.cached_property
    def _places(self) -> list[dict[str, list[int]]]:
        """Places of the columns by their names as written, in the form of `plain_name`, and in that without a prefix."""
        names = (
            list(map(column_key, self.columns)),
            list(map(plain_name, self.columns)),
            [plain_name(column.rpartition(".")[2]) for column in self.columns],
        )
        return [
            {name: [n for n, other in enumerate(each) if other == name] for name in each if name}
            for each in names
        ]

    def find(self, name: str) -> list[int]:
        """Return the places of a column of this name, or else with a prefix such as `diagnoses.`."""
        written, plain, without_prefix = self._places
        key = plain_name(name)
        return written.get(column_key(name)) or plain.get(key) or without_prefix.get(key, [])


def read_sources(
    paths: Iterable[Path], columns: Collection[str] = ()
) -> tuple[list[SourceTable], dict[str, str]]:
    """Read tables; of a workbook, the sheet with `columns`. Return them, and the SHA-256 of each file.

    Raises:
        UsageError: a file cannot be read, or has no column of slides or patients.
    """
    tables, digests = [], {}
    for path in paths:
        if is_slide_name(path.name):
            raise UsageError(
                f"{path} is a slide", expected="tables, and folders", todo="pass the slide's folder"
            )
        data = read_file(path)
        digests[str(path)] = hashlib.sha256(data).hexdigest()
        tables += [
            _read(Path(member), content, columns) for member, content in _members(path, data)
        ]
    for table in tables:
        repeated = [
            name
            for name in {table.columns[place] for place in table.keys.values()}
            if table.columns.count(name) > 1
        ]
        is_empty = table.lists_files and not table.rows
        if not table.keys.keys() & {*LEVELS} or repeated or is_empty:
            problem = (
                f"several columns {min(repeated)}"
                if repeated
                else "no rows"
                if is_empty
                else "no column of slides, samples or patients"
            )
            raise UsageError(
                f"{table.name} has {problem}",
                found=some(table.columns) or "no columns",
                expected="one such as slide, file_name, case_id, patient_id or bcr_patient_barcode",
                todo="rename its column, or leave the file out",
            )
    return tables, digests


def _members(path: Path, data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of a file, or of the tables in an archive."""
    try:
        if path.name.endswith((".tar.gz", ".tgz", ".tar")):
            with tarfile.open(path) as archive:
                for member in archive.getmembers():
                    file = archive.extractfile(member)
                    if file and _MEMBER.search(member.name):
                        content = file.read().strip()
                        if b"\n" in content:  # not only a header
                            yield f"{path}/{member.name}", content
        elif path.suffix == ".gz":
            yield str(path), gzip.decompress(data)
        else:
            yield str(path), data
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"{path} cannot be read", found=str(error), todo="download it again"
        ) from error


def _read(path: Path, data: bytes, columns: Collection[str]) -> SourceTable:
    if data.lstrip().startswith((b"[", b"{")):
        return _read_json(path, data)
    table = read_table(path, data, columns=columns)
    if table.columns and _WITHOUT_HEADER.fullmatch(table.columns[0]):
        columns, first = [*_CAMELYON16[: len(table.columns)]], (1, [*table.header])
        table = table._replace(columns=columns, rows=[first, *table.rows])
    if (
        table.columns[:1] == ["patient"]
        and "stage" in table.columns
        and any(is_slide_name(row[0]) for _, row in table.rows)
    ):
        table = _of_camelyon17(table)
    return SourceTable(str(path), table.columns, table.rows, table.form)


def _of_camelyon17(table: UserTable) -> UserTable:
    """Return the rows of slides in CAMELYON17's table of stages, with the patient, and the patient's stage from its row."""
    stages = {
        file_key(row[0].removesuffix(".zip")).casefold(): row[table.columns.index("stage")]
        for _, row in table.rows
    }
    rows = [
        (line, [row[0], patient, stages.get(patient, ""), *row[1:]])
        for line, row in table.rows
        if is_slide_name(row[0])
        for patient in [file_key(row[0]).casefold().partition("_node_")[0]]
    ]
    return table._replace(
        columns=["image", "patient", "patient_stage", *table.columns[1:]], rows=rows
    )


def _read_json(path: Path, data: bytes) -> SourceTable:
    """Read the metadata of files, as GDC's portal or API writes it: a list of objects, nested to any depth."""
    try:
        value = json.loads(data)
        value = value.get("data", value).get("hits") if isinstance(value, dict) else value
        rows = [dict(_flat(entry)) for entry in value]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read",
            found=str(error) if isinstance(error, ValueError) else "another structure",
            expected="a list of files, such as metadata.cart.json of GDC",
        ) from error
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if rows and "file_name" not in columns:
        raise UsageError(
            f"{path} has no files",
            found=some(columns),
            expected="file_name, as in metadata.cart.json",
            todo="download clinical and biospecimen data as TSV",
        )
    cells = [[row.get(column, "") for column in columns] for row in rows]
    return SourceTable(str(path), list(map(column_key, columns)), list(enumerate(cells, 1)))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the columns of a nested value: `cases.submitter_id`. Different values of a list are joined by commas."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        cells = list(dict.fromkeys(pair for item in value for pair in _flat(item, name)))
        for key in dict.fromkeys(key for key, _ in cells):
            yield key, ", ".join(cell for name, cell in cells if name == key)
    elif value is not None:
        # A lone surrogate, which could not be written, is an error here.
        yield name, nfc(str(value).strip()).encode().decode()


def patient_aliases(tables: Iterable[SourceTable]) -> dict[str, str]:
    """Return barcodes of patients by their UUID, from the tables that have both."""
    names: dict[str, str] = {}
    for uuid, name in _barcodes_by_uuid(tables):
        if names.setdefault(uuid, name).upper() != name.upper():
            raise UsageError(
                f"patient {uuid}",
                found=f"{names[uuid]} and {name}",
                expected="one barcode",
                todo="use the tables of one download",
            )
    return names


def _barcodes_by_uuid(tables: Iterable[SourceTable]) -> Iterator[tuple[str, str]]:
    return (
        (uuid, name)
        for table in tables
        for _, row in table.rows
        for uuid, cell in [(table.cell(row, "case_uuid"), table.cell(row, "patient"))]
        for name in [patient_of(table.cell(row, "slide")) if is_uuid(cell) else cell]
        if is_uuid(uuid) and name and not is_uuid(name)
        # Barcodes of other programs than TCGA do not begin with the patient.
        if name == cell or name.startswith("TCGA-")
    )
