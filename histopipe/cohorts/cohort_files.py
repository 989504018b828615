"""The files of a cohort: merged from the tables that list files, matched with the slides on disk, and checked."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.cohorts.source_tables import SourceTable, is_slide_name, is_uuid, match_key
from histopipe.errors import UsageError
from histopipe.slides.discovery import read_series
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.tables import without_suffix
from histopipe.splits.slide_table import Exclusion
from histopipe.system.output import Progress
from histopipe.system.worker_pool import count_usable_cores

_BARCODE = re.compile(
    r"(?P<sample>(?P<patient>TCGA-(?P<site>[A-Z0-9]{2})-[A-Z0-9]{4})-(?P<code>\d{2})[A-Z])-\d{2}"
    r"-(?P<kind>DX|TS|MS|BS)[A-Z0-9]{1,2}(?=\.|$)",
    re.IGNORECASE,
)
_TYPES = ("sample_type", "tissue_type")
_KINDS = {"diagnostic slide": "diagnostic", "tissue slide": "frozen"}
_CODES = {
    "01": "Primary Tumor",
    "02": "Recurrent Tumor",
    "05": "Additional - New Primary",
    "06": "Metastatic",
    "07": "Additional Metastatic",
    "11": "Solid Tissue Normal",
}
"""Sample types of TCGA barcodes, in the words of GDC."""
_CAMELYON17 = re.compile(r"patient_(\d{3})_node_\d")


@dataclass(slots=True)
class CohortFile:
    """A file of the cohort: a row of a table, or a file on disk.

    Attributes:
        name: name of the file, or of the slide if the tables do not name files.
        file_id: UUID of the file or series; empty if unknown.
        md5, size_bytes: from the tables, empty and None if unknown.
        rows: line and cells of the rows that list it, by number of the table.
        slide: the slide on disk.
        patient, sample, site, project, kind: from tables and barcode, empty if unknown.
        sample_type: type by the barcode, empty without one.
        cells: cells of the labels file, by column.
        reason, detail: why it is excluded; None if it is not.
    """

    name: str
    file_id: str = ""
    md5: str = ""
    size_bytes: int | None = None
    rows: dict[int, list[tuple[int, Sequence[str]]]] = field(default_factory=dict)
    slide: SlideFile | None = None
    patient: str = ""
    sample: str = ""
    site: str = ""
    project: str = ""
    kind: str = ""
    sample_type: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    reason: Exclusion | None = None
    detail: str = ""

    @property
    def slide_id(self) -> str:
        """Id that `ingest` gives to the slide; without the file, its name."""
        return self.slide.id if self.slide else without_suffix(self.name)

    @property
    def names(self) -> dict[str, str]:
        """Values by which rows of tables belong to it, by key."""
        return {
            "file_id": self.file_id,
            "file_name": self.name,
            "slide": barcode_of(self.name),
            "sample": self.sample,
            "patient": self.patient,
        }

    def exclude(self, reason: Exclusion, detail: str = "") -> None:
        """Exclude it, unless it is excluded already."""
        if self.reason is None:
            self.reason, self.detail = reason, detail


def base_name(path: str) -> str:
    """Return the last part of a path, of Windows, too."""
    return path.replace("\\", "/").rpartition("/")[2]


class _Index:
    """Files by their ids and names, in the form of `match_key`, and by the barcodes in their names."""

    def __init__(self) -> None:
        self._files = defaultdict[str, list[CohortFile]](list)

    def add(self, file: CohortFile) -> None:
        """Add a file, or a file that has got a name."""
        for name in filter(None, (file.file_id, file.name, barcode_of(file.name))):
            if file not in self._files[match_key(name)]:
                self._files[match_key(name)].append(file)

    def find(self, name: str) -> list[CohortFile]:
        """Return the files with this id or name, or else with this barcode."""
        return (
            self._files.get(match_key(name)) or self._files.get(match_key(barcode_of(name))) or []
        )


def barcode_of(name: str) -> str:
    """Return the TCGA barcode at the beginning of a name, or else the name."""
    barcode = _BARCODE.match(name)
    return barcode[0] if barcode else name


def list_files(tables: Sequence[SourceTable], slides: Sequence[SlideFile]) -> list[CohortFile]:
    """Return the files of the tables, with their slides on disk, and the slides that no table lists.

    Rows with the same file id, or else the same name, are one file. Without tables of files, all slides on disk are.

    Raises:
        UsageError: tables contradict each other about a file.
    """
    files: list[CohortFile] = []
    index = _Index()
    lists = [number for number, table in enumerate(tables) if table.lists_files]
    # Tables with ids first: a row without one belongs to all files of its name.
    for number in sorted(lists, key=lambda number: "file_id" not in tables[number].keys):
        table = tables[number]
        for line, row in table.rows:
            file_id = table.cell(row, "file_id")
            name = base_name(table.cell(row, "file_name")) or table.cell(row, "slide") or file_id
            matches = index.find(file_id or name)
            if not matches:
                matches = [CohortFile(name, file_id)]
                files += matches
            for file in matches:
                file.name = name if file.name == file.file_id else file.name
                file.rows.setdefault(number, []).append((line, row))
                _merge(file, table, line, row)
                index.add(file)
    _find_on_disk(files, index, slides, listed=bool(lists))
    return files


def _find_on_disk(
    files: list[CohortFile], index: _Index, slides: Sequence[SlideFile], *, listed: bool
) -> None:
    """Set the slides of files, and add the slides that no table lists. A folder with a file's id comes before its name."""
    by_folder = []
    for slide in slides:
        # Such as UUID/NAME.svs of GDC, and SM_SERIES/INSTANCE.dcm of IDC.
        ids = {match_key(part.rpartition("_")[2]) for part in slide.path.parts[-3:-1]}
        matches = [file for name in ids for file in index.find(name)]
        by_folder.append((slide, [file for file in matches if match_key(file.file_id) in ids]))
    for slide, in_folder in sorted(by_folder, key=lambda pair: not pair[1]):
        matches = in_folder or index.find(slide.path.name)
        if not matches and slide.path.suffix.lower() == ".dcm":
            matches = index.find(read_series(slide.path) or "")
        size = slide.path.stat().st_size
        free = sorted(
            (file for file in matches if file.slide is None),
            key=lambda file: file.size_bytes != size,  # two files may have one name
        )
        if free:
            free[0].slide = slide
            continue
        file = CohortFile(slide.path.name, slide=slide)
        files.append(file)
        if matches:
            file.exclude(Exclusion.DUPLICATE, f"same name as {matches[0].slide_id}")
        elif listed:
            file.exclude(Exclusion.IN_NO_TABLE)


def _merge(file: CohortFile, table: SourceTable, line: int, row: Sequence[str]) -> None:
    """Add the values of a row to a file. Raise a UsageError if it contradicts another row."""
    size = table.cell(row, "size")
    for name, value in (
        ("md5", table.cell(row, "md5").lower()),
        ("size_bytes", int(size) if size.isdecimal() else None),
        ("project", table.cell(row, "project")),
        ("kind", _KINDS.get(table.cell(row, "kind").lower(), "")),
        ("site", table.cell(row, "site")),
    ):
        _set(file, name, value, f"{table.name}, line {line}")
    modality = table.cell(row, "modality")
    if modality not in ("", "SM"):
        file.exclude(Exclusion.NO_SLIDE, f"modality {modality}")


def _set(file: CohortFile, name: str, value: Any, where: str) -> None:
    """Set an attribute that is still unknown, or raise a UsageError if it has another value."""
    before = getattr(file, name)
    if value and before and str(value).casefold() != str(before).casefold():
        raise UsageError(
            f"{where}: {file.name}: {name.replace('_', ' ')}",
            found=value,
            expected=f"{before}, as in another table or in the barcode",
            todo="use the tables of one download",
        )
    setattr(file, name, before or value)


def identify(
    files: Sequence[CohortFile], tables: Sequence[SourceTable], aliases: Mapping[str, str]
) -> None:
    """Set patient, sample, site and kind of files from their barcodes and rows, which must agree.

    `aliases` are barcodes of patients by UUID.

    Raises:
        UsageError: they contradict each other, a file belongs to several patients, or a barcode is malformed.
    """
    for file in files:
        barcode = _BARCODE.match(file.name)
        if barcode:
            file.patient, file.sample = barcode["patient"].upper(), barcode["sample"].upper()
            file.site = file.site or barcode["site"].upper()
            file.sample_type = _CODES.get(barcode["code"], "")
            kind = "diagnostic" if barcode["kind"].upper() == "DX" else "frozen"
            _set(file, "kind", kind, "name of the file")
        elif camelyon17 := _CAMELYON17.match(file.name.lower()):
            # Five centres with 20 patients each, in training and test.
            file.site = file.site or f"center_{int(camelyon17[1]) % 100 // 20}"
        listings = [(tables[n], line, row) for n, rows in file.rows.items() for line, row in rows]
        for table, line, row in listings:
            where, cell = f"{table.name}, line {line}", table.cell(row, "patient")
            patient, sample = (
                aliases.get(cell, "" if is_uuid(cell) else cell),
                table.cell(row, "sample"),
            )
            types = [row[place] for name in _TYPES for place in table.find(name)]
            normal = {"normal" in text.lower() for text in types if text}
            is_named = not barcode and is_slide_name(file.name)
            for is_wrong, what, expected in (
                (", " in patient, f"belongs to patients {patient}", "one patient per slide"),
                (
                    is_named and patient.upper().startswith("TCGA-"),
                    "is no TCGA barcode",
                    "a name as GDC lists it, such as TCGA-A1-A0SB-01Z-00-DX1.svs",
                ),
                (
                    barcode and normal and normal != {barcode["code"][0] == "1"},
                    f"has {' and '.join(types)} tissue in the table",
                    f"sample type {barcode['code'] if barcode else ''}, as in the barcode",
                ),
            ):
                if is_wrong:
                    raise UsageError(
                        f"{where}: {file.name} {what}",
                        expected=expected,
                        todo="correct or remove the row",
                    )
            _set(file, "patient", patient, where)
            _set(file, "sample", sample if barcode and not is_uuid(sample) else "", where)


def exclude_copies(files: Sequence[CohortFile]) -> None:
    """Exclude files with the content of an earlier one: the same MD5, or without it the same name and size on disk."""
    first: dict[object, CohortFile] = {}
    for file in sorted(files, key=lambda file: file.slide is None):  # one on disk is kept
        if file.reason is None:
            size = file.slide.path.stat().st_size if file.slide else file.size_bytes
            key = file.md5 or (match_key(file.name), size or file.file_id)
            if (original := first.setdefault(key, file)) is not file:
                same = "MD5" if file.md5 else "name and size"
                file.exclude(
                    Exclusion.DUPLICATE,
                    f"same {same} as {original.slide_id if original.slide else original.file_id}",
                )


def check_files(files: Sequence[CohortFile], progress: Progress, *, md5: bool) -> None:
    """Exclude files whose size on disk differs from that in the tables, or with `md5`, whose MD5 does."""
    compared: list[tuple[CohortFile, Path]] = []
    for file in files:
        if file.slide is None or file.reason is not None:
            continue
        path = file.slide.path
        size = path.stat().st_size
        if file.size_bytes not in (None, size) and path.suffix.lower() != ".dcm":
            file.exclude(Exclusion.INCOMPLETE, f"{size:,} of {file.size_bytes:,} bytes")
        elif md5 and file.md5:
            compared.append((file, path))
    # In threads: hashing releases the interpreter's lock, and needs no process that could crash.
    with (
        ThreadPoolExecutor(count_usable_cores()) as pool,
        progress.bar("check MD5", unit="files", total=len(compared)) as bar,
    ):
        digests = pool.map(md5_of, (path for _, path in compared))
        for (file, _), digest in zip(compared, digests, strict=True):
            if digest != file.md5:
                file.exclude(Exclusion.INCOMPLETE, f"MD5 is {digest}, expected {file.md5}")
            bar.advance()


def md5_of(path: Path) -> str:
    """Return the MD5 of a file; why it cannot be read instead."""
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    except OSError as error:
        return str(error.strerror)
