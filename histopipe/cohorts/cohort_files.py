"""The files of a cohort: merged from the tables that list files, matched with the slides on disk, and checked."""

from __future__ import annotations

import filecmp
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.cohorts.source_tables import (
    MISSING,
    SourceTable,
    file_key,
    is_slide_name,
    is_uuid,
    parts_of,
    path_key,
    plain_name,
    single,
    tcga_upper,
)
from histopipe.errors import UsageError
from histopipe.slides.discovery import read_series
from histopipe.slides.slide_files import SlideFile, patient_of, without_suffix
from histopipe.splits.slide_table import Exclusion
from histopipe.system.output import Progress, some
from histopipe.system.table_cells import cell_number, nfc
from histopipe.system.worker_pool import count_usable_cores

_BARCODE = re.compile(
    r"(?P<sample>(?P<patient>TCGA-(?P<site>[A-Z0-9]{2})-[A-Z0-9]{4})-(?P<code>\d{2})[A-Z])-\d{2}"
    r"-(?P<kind>DX|TS|MS|BS)[A-Z0-9]{1,2}(?=\.|$)",
    re.IGNORECASE,
)
_TYPES = ("sample_type", "tissue_type")
_FILE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9.]{9,}", re.IGNORECASE)
"""A UUID, or the UID of a DICOM series. An `id` of another form may be that of a patient, or a number of the row."""
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
        listed: the name as in the table, with folders.
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
    listed: str = ""
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
    def folder(self) -> str:
        """Name of the folder on disk."""
        return self.slide.path.parent.name if self.slide else ""

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


class _Index(dict[str, list[CohortFile]]):
    """Files by ids and names: with folders, as `P1/HE`, by the last part, and by the barcode in it; and without case."""

    def add(self, file: CohortFile) -> None:
        """Add a file, or a file that has got a name."""
        names = name_keys(file.listed)
        for key in {*names, *map(str.casefold, names), file.file_id.lower()} - {""}:
            if file not in self.setdefault(key, []):
                self[key].append(file)

    def by_name(self, listed: str) -> list[CohortFile]:
        """Return the files of a name; of one with folders, those with the same folders, or that are listed without."""
        path, name, barcode = name_keys(listed)
        exact = self.get(path) or self.get(path.casefold())
        without_folders = (
            self.get(each) for key in (name, barcode) for each in (key, key.casefold())
        )
        matches = exact or [
            file
            for file in next(filter(None, without_folders), [])
            if path == name or "/" not in path_key(file.listed)
        ]
        same_case = {path, name, barcode}
        return [f for f in matches if same_case & {*name_keys(f.listed)}] or matches


def name_keys(listed: str) -> tuple[str, str, str]:
    """Return a name with its folders, without, and the barcode in it, without suffixes."""
    return path_key(listed), file_key(listed), file_key(barcode_of(base_name(listed)))


def base_name(path: str) -> str:
    """Return the last part of a path, of Windows, too."""
    return path.replace("\\", "/").rpartition("/")[2]


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
    index, names = _Index(), dict[tuple[int, int], str]()
    lists = [(number, table) for number, table in enumerate(tables) if table.lists_files]
    # Tables with ids first: a row without one belongs to all files of its name.
    for number, table in sorted(lists, key=lambda pair: "file_id" not in pair[1].keys):
        for line, row in table.rows:
            file_id, listed = table.cell(row, "file_id"), table.cell(row, "file_name")
            file_id = file_id if _FILE_ID.fullmatch(file_id) else ""
            listed = listed or table.cell(row, "slide") or file_id
            matches = index.get(file_id.lower(), []) if file_id else index.by_name(listed)
            # Other spellings in one table are other files.
            matches = [
                f
                for f in matches
                if file_id or _is_same(names.get((id(f), number), listed), listed)
            ]
            _refuse_several(matches, f"{table.name}, line {line}: {listed}")
            if not matches:
                matches = [CohortFile(base_name(listed), listed, file_id)]
                files += matches
            for file in matches:
                if file.name == file.file_id:
                    file.name, file.listed = base_name(listed), listed
                file.rows.setdefault(number, []).append((line, row))
                names[id(file), number] = listed
                _merge(file, table, line, row)
                index.add(file)
    _find_on_disk(files, index, slides, listed=bool(lists))
    return files


def _is_same(name: str, other: str) -> bool:
    """Return whether two names are of one file: without a suffix it may be any, but `x.svs` and `x.tif` are two."""
    suffixes = is_slide_name(name) and is_slide_name(other)
    return path_key(name) == path_key(other) and (not suffixes or nfc(name) == nfc(other))


def _find_on_disk(
    files: list[CohortFile], index: _Index, slides: Sequence[SlideFile], *, listed: bool
) -> None:
    """Set the slides of files, and add the slides that no table lists. A folder with a file's id comes before its name."""
    by_folder, on_disk = [], Counter(file_key(slide.path.name) for slide in slides)
    for slide in slides:
        # Such as UUID/NAME.svs of GDC, and SM_SERIES/INSTANCE.dcm of IDC. Masks may be in the folder, too.
        ids = [part.rpartition("_")[2] for part in slide.path.parts[-3:-1]]
        in_folder = [
            file
            for name in ids
            for file in index.get(name.lower(), [])
            if file.file_id.lower() == name.lower()
            if is_dicom(slide.path)
            or file.name == file.file_id
            or file_key(file.name).casefold() == file_key(slide.path.name).casefold()
        ]
        by_folder.append((slide, in_folder))
    for slide, in_folder in sorted(
        by_folder, key=lambda pair: (not pair[1], path_key(pair[0].id) not in index)
    ):
        matches = (
            in_folder
            or index.by_name(slide.id)
            or _of_name(index, slide, is_only=on_disk[file_key(slide.path.name)] == 1)
            or index.get((is_dicom(slide.path) and read_series(slide.path)) or "", [])
        )
        free = [file for file in matches if file.slide is None]
        if free:
            # Two files may have one name, or one with another suffix.
            free = [f for f in free if base_name(f.listed) == slide.path.name] or free
            of_size = [file for file in free if file.size_bytes == size_of(slide.path)]
            _refuse_several(of_size or free, str(slide.path))
            (of_size or free)[0].slide = slide
            continue
        file = CohortFile(slide.path.name, slide.id, slide=slide)
        files.append(file)
        for other in matches:
            if is_copy(slide, other.slide):
                file.exclude(Exclusion.DUPLICATE, f"same content as {other.slide_id}")
            elif not other.file_id and path_key(other.listed) != path_key(other.slide_id):
                raise UsageError(
                    f"{other.listed} of a table may be several slides",
                    found=f"{other.slide_id} and {slide.id}",
                    expected="the name of one of them",
                    todo="write the names in the table with their folders",
                )
        if listed:
            namesake = f"{matches[0].slide_id} has the name in the table" if matches else ""
            file.exclude(Exclusion.IN_NO_TABLE, namesake)


def _of_name(index: _Index, slide: SlideFile, *, is_only: bool) -> list[CohortFile]:
    """Return the files of the name of a slide; those whose folders end as the slide's, unless both are the only ones."""
    named = [(f"/{path_key(file.listed)}", file) for file in index.by_name(slide.path.name)]
    on_disk, several = f"/{path_key(slide.id)}", len(dict(named)) > 1
    alike = [file for key, file in named if key.endswith(on_disk) or on_disk.endswith(key)]
    return [file for _, file in named] if is_only and not several else alike


def _refuse_several(files: Sequence[CohortFile], where: str) -> None:
    """Raise a UsageError if what names one file may be several, whose names differ in folders, case or suffix."""
    names = sorted({path_key(file.listed) for file in files})
    if len(names) > 1:
        raise UsageError(
            f"{where} may be several files",
            found=some(names),
            expected="the name of one of them",
            todo="write the names as the tables do, with their folders",
        )


def is_dicom(path: Path) -> bool:
    """Return whether a file is an instance of a DICOM series."""
    return path.suffix.lower() == ".dcm"


def is_copy(slide: SlideFile | None, other: SlideFile | None) -> bool:
    """Return whether two slides have the same content; False if one is missing or cannot be read."""
    with suppress(OSError):
        return bool(slide and other and filecmp.cmp(slide.path, other.path, shallow=False))
    return False


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None if it cannot be read, such as a link to a missing file."""
    with suppress(OSError):
        return path.stat().st_size
    return None


def _merge(file: CohortFile, table: SourceTable, line: int, row: Sequence[str]) -> None:
    """Add the values of a row to a file. Raise a UsageError if it contradicts another row."""
    size, md5 = cell_number(table.cell(row, "size")), table.cell(row, "md5").lower()
    for name, value in (
        ("md5", md5 if re.fullmatch("[0-9a-f]{32}", md5) else ""),
        ("size_bytes", int(size) if size % 1 == 0 else None),
        ("project", table.cell(row, "project")),
        ("kind", _KINDS.get(table.cell(row, "kind").lower(), "")),
        ("site", table.cell(row, "site")),
    ):
        _set(file, name, value, f"{table.name}, line {line}")
    modality = table.cell(row, "modality")
    if modality not in ("", "SM"):
        file.exclude(Exclusion.NO_SLIDE, f"modality {modality}")


def _set(file: CohortFile, name: str, value: Any, where: str) -> None:
    """Set an attribute that is still unknown, or raise a UsageError if it has another value.

    Archives spell a project in several ways: TCGA-BRCA and tcga_brca. Barcodes of TCGA may differ in case.
    """
    before = getattr(file, name)
    form = plain_name if name == "project" else tcga_upper
    if value and before and form(str(value)) != form(str(before)):
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
            _set(
                file,
                "kind",
                "diagnostic" if barcode["kind"].upper() == "DX" else "frozen",
                "name of the file",
            )
        elif camelyon17 := _CAMELYON17.match(file.name.lower()):
            # Five centres with 20 patients each, in training and test.
            file.site = file.site or f"center_{int(camelyon17[1]) % 100 // 20}"
        for number, line, row in [(n, *each) for n, rows in file.rows.items() for each in rows]:
            _identify_by_row(file, tables[number], line, row, aliases)
        # Short names, such as TCGA-A1-A0SB.svs.
        short = patient_of(without_suffix(file.name))
        file.patient = file.patient or (short if short.startswith("TCGA-") else "")


def _identify_by_row(
    file: CohortFile,
    table: SourceTable,
    line: int,
    row: Sequence[str],
    aliases: Mapping[str, str],
) -> None:
    """Set patient and sample of a file from a row that lists it. Raises as `identify`."""
    barcode, where = _BARCODE.match(file.name), f"{table.name}, line {line}"
    cell, sample = table.cell(row, "patient"), table.cell(row, "sample")
    patient = tcga_upper(aliases.get(cell, "" if barcode and is_uuid(cell) else cell))
    cells = [single(row[place]) for name in _TYPES for place in table.find(name)]
    normal = {bool(re.search(r"\bnormal\b", text.lower())) for text in cells if text not in MISSING}
    for is_wrong, what, expected in (
        (
            len(parts_of(patient)) > 1,
            f"belongs to patients {patient}",
            "one patient per slide",
        ),
        (
            not barcode and is_slide_name(file.name) and patient.upper().startswith("TCGA-"),
            "is no TCGA barcode",
            "a name as GDC lists it, such as TCGA-A1-A0SB-01Z-00-DX1.svs",
        ),
        (
            barcode and normal and normal != {barcode["code"][0] == "1"},
            f"has {' and '.join(cells)} tissue in the table",
            f"sample type {barcode['code'] if barcode else ''}, as in the barcode",
        ),
    ):
        if is_wrong:
            raise UsageError(
                f"{where}: {file.name} {what}", expected=expected, todo="correct or remove the row"
            )
    _set(file, "patient", patient, where)
    # One of several samples of a cell, also without the vial, agrees with the barcode.
    agrees = any(file.sample.startswith(part) for part in parts_of(sample))
    if barcode and not agrees and not is_uuid(sample):
        _set(file, "sample", sample, where)


def exclude_copies(files: Sequence[CohortFile]) -> None:
    """Exclude files with the content of an earlier one: the same MD5 in the tables, or else the same name and content."""
    kept = defaultdict[str, list[CohortFile]](list)
    used = [file for file in files if file.reason is None]
    for file in sorted(used, key=lambda file: file.slide is None):  # one on disk is kept
        alike = kept[file.md5 or file_key(file.name).casefold()]
        for original in alike:
            if file.md5 or is_copy(file.slide, original.slide):
                name = original.slide_id if original.slide else original.file_id
                file.exclude(
                    Exclusion.DUPLICATE,
                    f"same content as {name} of {original.patient or 'no patient'}",
                )
        alike.append(file)


def check_files(files: Sequence[CohortFile], progress: Progress, *, md5: bool) -> None:
    """Exclude files whose size on disk differs from that in the tables, or with `md5`, whose MD5 does."""
    on_disk = [
        (file, file.slide.path, size_of(file.slide.path))
        for file in files
        if file.slide and file.reason is None
    ]
    for file, path, size in on_disk:
        if size is None:
            file.exclude(Exclusion.INCOMPLETE, "cannot be read")
        elif file.size_bytes not in (None, size) and not is_dicom(path):
            file.exclude(Exclusion.INCOMPLETE, f"{size:,} of {file.size_bytes:,} bytes")
    compared = [(f, path) for f, path, _ in on_disk if md5 and f.md5 and f.reason is None]
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
