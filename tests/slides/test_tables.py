"""CSV files: matching of names with slides, and messages of invalid files."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
import unicodedata
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.bags import write_bag
from helpers.examples import examples
from helpers.workbooks import write_workbook
from histopipe.dataset.bags import BagSet
from histopipe.errors import UsageError
from histopipe.ingestion.request import label_by_subfolder, read_request
from histopipe.runs.task_config import make_config
from histopipe.slides.slide_files import SlideFile, SlideNames, patient_of
from histopipe.slides.tables import SlideLabel, read_labels, read_mpps, select_listed
from histopipe.splits.labelling import Labelling, candidates
from histopipe.store.record import SlideRecord
from histopipe.system.output import Progress
from histopipe.system.table_cells import NA_VALUES, cell_number, refuse_unclear_event
from histopipe.system.table_files import read_table
from histopipe.tasks.registry import make_task

IDS = ["a", "x/b", "y/b", "x/c", "d.svs", "d.tif"]
NAMES = SlideNames(IDS)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


BLANKS = ["case 1 ", "b", "b "]
DECOMPOSED = unicodedata.normalize("NFD", "Münster")


@pytest.mark.parametrize(
    ("ids", "written", "expected"),
    [
        (IDS, "a", "a"),
        (IDS, "a.svs", "a"),
        (IDS, "x/b", "x/b"),
        (IDS, "c", "x/c"),
        (IDS, "c.ndpi", "x/c"),
        (IDS, "d.svs", "d.svs"),
        (IDS, "q", None),
        # Tables and file names may have lost the blanks at the ends of a slide's name. An exact name comes first.
        *((BLANKS, name, "case 1 ") for name in ("case 1 ", "case 1", "case 1 .svs", " case 1")),
        (BLANKS, "b", "b"),
        (BLANKS, "b ", "b "),
        (BLANKS, "case", None),
        # Systems write "ü" as one character or two; ids keep their form.
        ([DECOMPOSED], "Münster", DECOMPOSED),
        (["Münster"], DECOMPOSED, "Münster"),
        # A spreadsheet removes zeros, and adds none.
        (["P/007", "b"], "7", "P/007"),
        (["7", "007"], "7", "7"),
        (["7"], "007", None),
        (["x007"], "x7", None),
    ],
)
def test_names_match_slide_ids(ids: list[str], written: str, expected: str | None) -> None:
    assert SlideNames(ids).find(written, where="here", but_zeros_of=()) == expected


def test_names_of_files_have_their_zeros() -> None:
    """Outlines and masks are no tables; ids that come second are named like the others."""
    names = SlideNames(["a"], ["007"])
    assert names.find("7", where="here") is None and not names.restored
    assert names.find("7", where="here", but_zeros_of=()) == "007"
    assert names.restored == {"7": "007"}


def test_zeros_are_not_restored_for_a_slide_with_a_row(table: Path) -> None:
    """The row of `7` is that of another slide then."""
    table.write_text("slide,label\n7,A\n007,B\n8,C\n")
    names = SlideNames(["007", "008"])
    labels = read_labels(table, names, allow_extra=True, notify=lambda _: None)
    assert {name: row.label for name, row in labels.items()} == {"007": "B", "008": "C"}
    with pytest.raises(UsageError, match="line 2: no slide matches '7'"):
        read_labels(table, names, notify=lambda _: None)


STUDY = "slide,label,patient,case_id,age,os_time\na,tumour,p1,7,61,12\n"
"""One file of a study serves all commands; --subgroup and --target name the columns that are used."""


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (
            "\ufeffSlide, label ,patient,site\na,tumour,p1,s1\nc.svs,,,\n\n",
            {},
            {"a": SlideLabel("tumour", "p1", "s1"), "x/c": SlideLabel(None)},
        ),
        *(
            (f"slide,label,{name}\na,tumour,p1\n", {}, {"a": SlideLabel("tumour")})
            for name in ("patient_age", "case_control", "patients sex", "rapid", "grade")
        ),
        (STUDY, {}, {"a": SlideLabel("tumour", "p1")}),
        (STUDY, {"columns": ["age"]}, {"a": SlideLabel("tumour", "p1", cells={"age": "61"})}),
        ("slide,label\nnope,x\na,y\n", {"allow_extra": True}, {"a": SlideLabel("y")}),
        # The last cells may be missing in all rows, but not in some.
        ("slide,label,patient\na,x\nc,y\n", {}, {"a": SlideLabel("x"), "x/c": SlideLabel("y")}),
        (
            unicodedata.normalize("NFD", "slide,label,patient,Größe\na,Métastase,Müller,3\n"),
            {"columns": ["größe"]},
            {"a": SlideLabel("Métastase", "Müller", cells={"größe": "3"})},
        ),
    ],
)
def test_read_labels(
    table: Path, text: str, options: dict[str, Any], expected: dict[str, SlideLabel]
) -> None:
    table.write_text(text, encoding="utf-8")
    assert read_labels(table, NAMES, **options) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (
                f"slide,label,{name}\na,tumour,p1\n",
                rf"the column '{re.escape(name.lower())}' to 'pat",
            )
            for name in (
                "patient_id",
                "Patients",
                "case",
                "Subject ID",
                "PatientID",
                "bcr_patient_barcode",
                "Patient (ID)",
                "pid",
                "cases.submitter_id",
            )
        ),
        ("slide,label,label\na,x,y\n", "give each column a different name"),
        ("", "wrong header: found an empty file, expected slide,label"),
        ("slide\na\n", "wrong header: found slide, expected slide,label"),
        ("name,label\na,1\n", "wrong header"),
        ("slide,time,event\na,1,0\n", "pass --task survival"),
        ("slide,label_1,label_2\na,1,0\n", "pass --task multilabel"),
        ("slide,label\na,0.25\nc,0.5\n", "pass --task regression"),
        ("slide,label\nnope,x\n", "line 2: no slide matches 'nope'"),
        ("slide,label\na,x\na,y\n", "a is in lines 2 and 3"),
        ("slide,label\na,x,y\n", "line 2: found 3 cells"),
        ("slide,label,patient\na,x,P1\nc,y\n", "line 3: found 2 cells, expected 3"),
        ("slide,label\nb,x\n", "'b' matches several slides: found x/b, y/b"),
        ("slide,label\nd,x\n", r"'d' matches several slides: found d\.svs, d\.tif"),
        ("slide,label\na," + "x" * 140_000 + "\n", "field larger than field limit"),
        ('slide,label\na,x\nc,"y\nd.svs,z\n', "line 3: found unexpected end of data"),
        ('slide,label\na,"x"y\n', "line 2: found ',' expected after '\"'"),
        (
            'slide,label\na,"x\ny"\n',
            r"line 2: column label: found 'x\\ny', expected a text without",
        ),
        ('slide,label,site\na,"x\n\ny",s\nc,z\n', "line 5: found 2 cells, expected 3"),
        ("slide,label\na,x\x1b[2J\n", "line 2: column label: found"),
        ("slide,label\r\na,x\r\nc,\0\r\n", "line 3: found a NUL character"),
        (
            b"slide,label\na,x\nc,m\xe4nnlich\n",
            "line 3: found 'utf-8' codec .* save it as 'CSV UTF-8'",
        ),
        (
            "slide,label\na,x\n".encode("utf-16-le"),
            "line 1: found a NUL character, expected a CSV file in UTF-8, or in UTF-16 with a byte",
        ),
        (
            "slide,label;grade\na,x;1\n",
            "the separator of the cells is ambiguous: found ',' and ';'",
        ),
        ("slide,label\n", "has no rows: found only a header"),
        ("slide,label\na,1.5\nc,NA\nd.svs,2\n", "the labels are continuous values"),
        ('slide,label\na,"1,5"\nc,3\n', "the labels are continuous values"),
    ],
)
def test_invalid_labels_file_is_refused(table: Path, text: str | bytes, message: str) -> None:
    table.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message) as caught:
        read_labels(table, NAMES)
    assert "table.csv" in str(caught.value)


def test_read_mpps(table: Path) -> None:
    table.write_text("slide,mpp\na,0.25\n")
    assert read_mpps(table, NAMES) == {"a": 0.25}
    for wrong in ("", "x", "0", "352.8", "nan"):
        table.write_text(f"slide,mpp\na,{wrong}\n")
        with pytest.raises(
            UsageError, match=r"line 2: mpp of a: found .* expected a number from 0\.05 to 50"
        ):
            read_mpps(table, NAMES)


def test_slides_of_a_list_are_selected(table: Path) -> None:
    table.write_text("slide,anything\na,1\nc,2\n")
    assert {s.id for s in select_listed(slides(*NAMES.ids), table, NAMES)} == {"a", "x/c"}


def slides(*names: str) -> list[SlideFile]:
    return [SlideFile(n, Path(n), (Path(n),), n.split("/")[0] if "/" in n else None) for n in names]


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["x/1", "x/2", "y/3", "y/4"], {"x", "y"}),
        (["x/1", "x/2", "y/3"], set()),  # a folder with one slide is not a class
        (["x/1", "x/2", "y/3", "y/4", "5"], set()),
        (["x/1", "x/2"], set()),
    ],
)
def test_subfolders_are_classes_only_with_several_slides_each(
    names: list[str], classes: set[str]
) -> None:
    assert {label.label for label in label_by_subfolder(slides(*names)).values()} == classes


def test_labels_file_takes_precedence_over_subfolders(tmp_path: Path) -> None:
    for name in ("x/1", "x/2", "y/3", "y/4"):
        (tmp_path / f"{name}.svs").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.svs").touch()
    (tmp_path / "labels.csv").write_text("slide,label,patient,site\nx/1,t,p,s\n")
    slides, _, _ = read_request(tmp_path, tmp_path / "s.lmdb", {}, Progress())
    assert [slide.label for slide in slides] == [SlideLabel("t", "p", "s"), None, None, None]
    (tmp_path / "labels.csv").rename(tmp_path / "other.csv")
    patients = tmp_path / "patients.csv"
    patients.write_text("slide,patient\nx/1,p\n")
    slides, _, _ = read_request(tmp_path, tmp_path / "s.lmdb", {"labels": patients}, Progress())
    assert [slide.label for slide in slides] == [SlideLabel("x", "p"), None, None, None]
    slides, _, _ = read_request(tmp_path, tmp_path / "s.lmdb", {}, Progress())
    assert [slide.label for slide in slides] == [SlideLabel(label) for label in "xxyy"]


def test_missing_values_keep_recorded_ones() -> None:
    fresh = SlideRecord(id="TCGA-CR-7395-01A", path="", resolved_path="")
    first = fresh.with_label(SlideLabel("t", None, "s"))
    assert (first.label, first.patient, first.site) == ("t", "TCGA-CR-7395", "s")
    assert first.with_label(None) == first
    again = first.with_label(SlideLabel(None, "p", None))
    assert (again.label, again.patient, again.site) == (None, "p", "s")
    old = {"id": "tcga-cr-7395-01a", "path": "", "resolved_path": "", "state": "pending"}
    old |= {"patient": "tcga-cr-7395-01a", "label": unicodedata.normalize("NFD", "é")}
    record = SlideRecord.from_json(old, where="record")
    assert (record.patient, record.label) == ("TCGA-CR-7395", "é")


@pytest.mark.parametrize(
    ("slide", "patient"),
    [
        ("TCGA-CR-7395-01A-01-TS1", "TCGA-CR-7395"),
        ("x/tcga-cr-7395-01a-01-ts1", "TCGA-CR-7395"),
        ("TCGA-CR-73950", "TCGA-CR-73950"),
        ("x/1", "x/1"),
    ],
)
def test_patient_of_tcga_slide(slide: str, patient: str) -> None:
    assert patient_of(slide) == patient


CELLS = st.text(
    st.sampled_from('ab1,;"\t\n\r\0\x0b\x0c\x85\xa0\u2028\u0308uü| '), max_size=4
) | st.sampled_from(["NA", "nan", "1_2", "0.0", "'--", "[Not Available]"])
BODIES = st.one_of(
    st.lists(st.lists(CELLS, min_size=2, max_size=3), max_size=3).map(
        lambda rows: "".join(",".join(map(quoted, row)) + "\n" for row in rows)
    ),
    st.lists(CELLS, max_size=6).map("".join),
)


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\n\r') else cell


@examples(300)
@given(
    body=BODIES,
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    separator=st.sampled_from(",,,,;\t|"),
    encoding=st.sampled_from(["utf-8"] * 6 + ["utf-8-sig", "utf-16", "latin-1"]),
)
def test_accepted_tables_are_those_of_the_csv_module(
    tmp_path_factory: pytest.TempPathFactory, body: str, end: str, separator: str, encoding: str
) -> None:
    """A table equals what Python's strict reader gives in NFC, or the message names its file and line.

    Quotes between tabs that do not fit are data, as in files of the GDC.
    """
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    text = f"Slide{separator}Ü label{end}" + body.replace(",", separator).replace("\n", end)
    path.write_bytes(text.encode(encoding, "replace"))
    quoting: Any = csv.QUOTE_MINIMAL
    try:
        expected = strict_rows(text, separator)
    except csv.Error:
        quoting = csv.QUOTE_NONE
        expected = strict_rows(text, separator, quoting) if separator == "\t" else []
        if any(len(cell) > 1 and cell[0] == cell[-1] == '"' for row in expected for cell in row):
            expected = []
    rectangular = bool(expected) and all(len(row) == 2 for row in expected)
    if not (encoding.startswith("utf") and "\0" not in text and rectangular):
        with pytest.raises(UsageError, match=r"fuzz\.csv, line [1-9]\d*: found "):
            read_table(path)
        return
    header, rows, form, _ = read_table(path)
    assert ("UTF-16" in form) == (encoding == "utf-16") and ("separated" in form) == (
        separator != ","
    )
    assert [header, *(cells for _, cells in rows)] == [["slide", "ü label"], *expected[1:]]
    lines = io.StringIO(text, newline="").readlines()
    for line, cells in rows:
        rest = "".join(lines[line - 1 :])
        assert strict_rows(rest, separator, quoting)[0] == cells


def strict_rows(text: str, separator: str, quoting: Any = csv.QUOTE_MINIMAL) -> list[list[str]]:
    file = io.StringIO(text, newline="")
    rows = csv.reader(file, strict=True, delimiter=separator, quoting=quoting)
    cells = [[unicodedata.normalize("NFC", cell.strip()) for cell in row] for row in rows]
    return [row for row in cells if any(row)]


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"slide;label;patient\r\na;x;P, 1\r\nc;y;P2\r\n", "semicolon-separated"),
        ("\ufeffslide\tlabel\tpatient\na\tx\tP, 1\nc\ty\tP2\n".encode(), "tab-separated"),
        (
            "slide\tlabel\tpatient\r\na\tx\tP, 1\r\nc\ty\tP2".encode("utf-16"),
            "tab-separated, UTF-16",
        ),
        (
            b'# made by hand\nslide|"label"|patient\na|x|P, 1\nc|y|P2\n',
            "separated by vertical bars",
        ),
        # A comma in one of the names: only the semicolons divide all rows alike.
        (b"slide;label;patient;age, years\na;x;P, 1;3\nc;y;P2;4\n", "semicolon-separated"),
        (b'slide,label,patient\na,x,"P, 1"\nc,y,P2\n', ""),
    ],
)
def test_forms_of_tables_are_recognised_and_shown(table: Path, content: bytes, form: str) -> None:
    table.write_bytes(content)
    notes: list[str] = []
    labels = read_labels(table, NAMES, notify=notes.append)
    assert [(row.label, row.patient) for row in labels.values()] == [("x", "P, 1"), ("y", "P2")]
    assert notes == ([f"{table}: {form}"] if form else [])


def test_workbook_has_the_texts_that_excel_shows(tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        ["Slide", "Label", "patient", "age", "seen", "smoker", "dose", None],
        ["a", 1.0, 7, 61, datetime(2020, 1, 31), True, 0.1 + 0.2, None],
        [None] * 8,
        ["c", "2", 12, 62.5, datetime(2020, 1, 31, 8, 30), None, 3, None],
    ]
    path = write_workbook(tmp_path / "labels.xlsx", Empty=[], Slides=rows)
    workbook = openpyxl.load_workbook(path)
    for line in (2, 4):
        workbook["Slides"].cell(line, 3).number_format = "000"
    workbook.save(path)
    table = read_table(path)
    assert table.columns == ["slide", "label", "patient", "age", "seen", "smoker", "dose"]
    assert table.rows == [
        (2, ["a", "1", "007", "61", "2020-01-31", "TRUE", "0.3"]),
        (4, ["c", "2", "012", "62.5", "2020-01-31 08:30:00", "", "3"]),
    ]
    assert table.form == "Excel workbook, sheet Slides"


def test_ambiguous_workbooks_are_refused(tmp_path: Path) -> None:
    rows = [["slide", "label"], ["a", "x"], ["c", "=1+1"]]
    path = write_workbook(tmp_path / "labels.xlsx", One=rows, Two=rows[:2], Merged=rows, Empty=[])
    workbook = openpyxl.load_workbook(path)
    workbook["Merged"].merge_cells("A2:A3")
    workbook.save(path)
    assert read_table(path.with_name("labels.xlsx#Two")).rows == [(2, ["a", "x"])]
    (tmp_path / "cut.xlsx").write_bytes(path.read_bytes()[:500])
    for name, message in (
        ("labels.xlsx", r"sheet is ambiguous: found One, Two, .* name it: '.*#SHEET'"),
        ("labels.xlsx#Three", r"no sheet 'Three': found One, Two, Merged, Empty"),
        ("labels.xlsx#One", r"sheet One, cell B3: found a formula without its value: =1\+1"),
        ("labels.xlsx#Merged", "sheet Merged: merged cells: found A2:A3"),
        ("cut.xlsx", r"cannot be read: found .*, expected an Excel workbook"),
    ):
        with pytest.raises(UsageError, match=message):
            read_table(tmp_path / name)


def test_sheet_with_the_columns_is_taken(tmp_path: Path) -> None:
    """It is named; of several with as many of the columns, none is taken. Rows may be shorter than the header."""
    sheets: dict[str, list[list[Any]]] = {
        "Notes": [["about"], ["x"]],
        "Slides": [[None], ["Slide", "Label", "age"], ["a", "x"], [], ["c", "y", 61]],
        "Patients": [["patient", "age"], ["p", 61]],
    }
    path = write_workbook(tmp_path / "labels.xlsx", **sheets)
    table = read_table(path, columns=["slide", "label"])
    assert table.rows == [(3, ["a", "x", ""]), (5, ["c", "y", "61"])]
    assert table.form == "Excel workbook, sheet Slides"
    notes: list[str] = []
    labels = read_labels(path, NAMES, columns=["age"], notify=notes.append)
    assert [row.label for row in labels.values()] == ["x", "y"]
    assert notes[0] == f"{path}: Excel workbook, sheet Slides"
    for columns, sheet_names in ((["age"], "Slides, Patients"), (["z"], "Notes, Slides, Patients")):
        message = (
            f"ambiguous: found {sheet_names}, expected one sheet with the columns {columns[0]}"
        )
        with pytest.raises(UsageError, match=message):
            read_table(path, columns=columns)


def test_missing_values_are_counted(table: Path) -> None:
    notes: list[str] = []
    cells = ["", *NA_VALUES]
    names = SlideNames(str(i) for i in range(len(cells)))
    rows = [f"{i},{cell},{cell},{cell},{cell}\n" for i, cell in enumerate(cells)]
    table.write_text("slide,label,patient,site,age\n" + "".join(rows))
    labels = read_labels(table, names, columns=["age"], notify=notes.append)
    assert labels == dict.fromkeys(names.ids, SlideLabel(None, cells={"age": ""}))
    for name in ("label", "patient", "site", "age"):
        assert f"{name} 13 (1 empty, 1 #N/A, " in notes[0]
    kept = read_labels(table, names, na=("-",))
    assert [entry.label for entry in kept.values()] == [
        None if cell in ("", "-") else cell for cell in cells
    ]
    with pytest.raises(UsageError, match="na: found 'NA', expected a list of texts"):
        read_labels(table, names, na="NA")


def test_file_of_patients_keeps_labels(table: Path) -> None:
    notes: list[str] = []
    table.write_text("slide,patient,site,age\na,P1,,61\nc,P2,S,\n")
    options: dict[str, Any] = {"with_label": None, "columns": ("age",), "notify": notes.append}
    labels = read_labels(table, NAMES, **options)
    assert notes[0] == f"{table} has no column label: slides keep the labels that they have"
    first, second = labels.values()
    assert (first.patient, first.keeps_label, second.site) == ("P1", True, "S")
    record = SlideRecord(id="a", path="a", resolved_path="a", label="tumour", site="T")
    kept = record.with_label(first)
    assert (kept.label, kept.patient, kept.site) == ("tumour", "P1", "T")
    assert record.with_label(SlideLabel(None)).label is None  # of an empty cell
    # The further column may be meant as the label, and a list of slides has no patients.
    for text in ("slide,patient,class\na,P1,x\n", "slide\na\n"):
        table.write_text(text)
        with pytest.raises(UsageError, match=r"wrong header: .* expected slide,label"):
            read_labels(table, NAMES, with_label=None)


def test_damage_by_spreadsheets_is_named(table: Path) -> None:
    notes: list[str] = []
    table.write_text(
        "slide,label,patient,site\n7,x,2.02401E+11,1-2\n08,y,2.024E+11,2-Jan\n10,x,1e5,2024-01-02\n"
    )
    assert [*read_labels(table, SlideNames(["007", "08", "10"]), notify=notes.append)] == [
        "007",
        "08",
        "10",
    ]
    assert [note.removeprefix(f"warning: {table}: ") for note in notes] == [
        "names without their leading zeros, as spreadsheets save them: 7 is 007",
        "column patient: '2.02401E+11', '2.024E+11': shortened by a spreadsheet, so that several names may have "
        "become one; format the column as text, and export it again",
        "column site: '2-Jan', '2024-01-02': dates, into which spreadsheets turn names such as 1-2; format the column "
        "as text, and export it again",
    ]


def test_similar_values_are_named_and_stay_different(table: Path) -> None:
    notes: list[str] = []
    table.write_text(
        "slide,label,patient,site,age,died,subset\na,Tumour,P1,0,1,TRUE,Test\nc,tumour,p1,0.0,1.0,true,test\n"
        "x/b,t\u200bumour,P\u00a02,00,2,0,TRAIN\ny/b,normal,P 2,1,3,1,Training\n",
        encoding="utf-8",
    )
    options: dict[str, Any] = {"columns": ["age", "died"], "groups": ["subset"]}
    labels = read_labels(table, NAMES, notify=notes.append, **options)
    assert len({entry.label for entry in labels.values()}) == 4
    assert [note.partition("column ")[2].partition(" are ")[0] for note in notes] == [
        "label: 'Tumour' and 'tumour' and 't\\u200bumour'",
        "patient: 'P 2' and 'P\\xa02'; 'P1' and 'p1'",
        "site: '0' and '0.0' and '00'",
    ]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            [*range(20), "unknown"],
            "line 22: column age: found 'unknown', expected a number, as in 20 of 21",
        ),
        (
            ['"3,5"', '"4,25"', "7", "NA"],
            "line 2: column age: found '3,5', expected a number with a",
        ),
        ([*range(20), "NA", "-"], None),
        (["1", "2", "3", "4a", "4b"], None),
        (['"3,5"', "unknown"], None),
    ],
)
def test_numbers_do_not_become_categories(
    table: Path, cells: list[object], message: str | None
) -> None:
    table.write_text("slide,age\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(cells)))
    names = SlideNames(str(i) for i in range(len(cells)))
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        read_labels(table, names, columns=["age"], with_label=False)
    assert read_labels(table, names, groups=["age"], with_label=False)
    assert read_labels(
        table, names, columns=["age"], with_label=False, na=()
    )  # runs without a list


@pytest.mark.parametrize(
    "text", ["1_20", "infinity", "nan", "1e999", "\uff11\uff12", "1,5", "0x1", ""]
)
def test_forms_that_are_no_numbers(text: str) -> None:
    assert math.isnan(cell_number(text))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_exactly(value: float) -> None:
    assert cell_number(repr(value)) == value


def test_feature_files_with_decomposed_names_have_labels(tmp_path: Path, table: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "ä")
    for name in (f"a/{decomposed}", "a/b", "b/ä", "b/b"):
        write_bag(tmp_path / f"{name}.h5", np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int64))
    table.write_text("slide,label,patient\nä,x,é\nb,y,e\n", encoding="utf-8")
    numbers, folders = {unicodedata.normalize("NFD", "é"): 7}, [tmp_path / "a", tmp_path / "b"]
    both = BagSet(folders, labels=partial(read_labels, table), bag="patient", numbers=numbers)
    assert {n: (bag.label, bag.slides) for n, bag in both.complete.items()} == {
        7: ("x", (decomposed,)),
        8: ("y", ("b",)),
    }


def test_different_targets_of_a_patient_are_named(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(8):
        write_bag(tmp_path / "a" / f"s{i}.h5", np.zeros((2, 3), np.float32))
    rows = "".join(f"s{i},p{i // 2},{max(i, 1)},1\n" for i in range(8))
    table.write_text("slide,patient,months,died\n" + rows)
    columns = ("months", "died")
    bags = BagSet(
        tmp_path / "a",
        labels=partial(read_labels, table, columns=columns, with_label=False),
        columns=columns,
    )
    candidates([bags], Labelling(task=make_task("survival", columns)))
    assert (
        "warning: 3 patients with slides of different months, died, such as p1: 2, 1 and 3, 1;"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("column", "cells", "events"),
    [
        ("status=dead", ["dead", "Alive", "", "DEAD"], ["1", "0", "", "1"]),
        ("status=2", ["2", "1", "2.0", "1"], ["1", "0", "1", "0"]),
        ("cens=0", ["0", "1", "false", "1.0"], ["1", "0", "1", "0"]),
        ("cens=0", ["0", "1", "2", ""], ["1", "0", "2", ""]),
        ("e=mc=1", ["1", "0", "1", "0"], ["1", "0", "1", "0"]),
    ],
)
def test_a_column_and_its_value_are_an_event(
    table: Path, column: str, cells: list[str], events: list[str]
) -> None:
    """Of 0 and 1, other values are kept, so that they are refused as targets."""
    rows = [f"s{i},p{i},{cell}" for i, cell in enumerate(cells)]
    table.write_text("\n".join([f"slide,patient,{column.rpartition('=')[0]}", *rows]))
    names = SlideNames([f"s{i}" for i in range(4)])
    labels = read_labels(table, names, columns=[column], with_label=False)
    assert [labels[f"s{i}"].cells[column] for i in range(4)] == events


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            "status=dead",
            "warning: column status: dead is the event (0), no event: died (2), alive (1)",
        ),
        ("status=DIED", "column status: DIED is the event (2), no event: alive (1)"),
        ("code=2", "column code: 2 is the event (2), no event: 1 (1)"),
        ("code=1.0", "column code: 1.0 is the event (1), no event: 2.0 (2)"),
    ],
)
def test_values_that_are_no_event_are_named(table: Path, event: str, line: str) -> None:
    table.write_text("slide,status,code\na,died,2.0\nb,alive,1\nc,died,2.0\nd,,\n")
    lines: list[str] = []
    read_labels(table, SlideNames("abcd"), columns=[event], with_label=False, notify=lines.append)
    assert line in lines
    assert not any("differ" in line for line in lines)


UNCLEAR = (
    "censorship",
    "censored",
    "cens",
    "Censor",
    "event_free",
    "no_event",
    "ALIVE",
    "survived",
    "no event",
    "not_dead",
    "isCensored",
)


@pytest.mark.parametrize("name", UNCLEAR)
def test_events_whose_name_does_not_say_what_1_means_are_refused(name: str, tmp_path: Path) -> None:
    """In trainings, cross-validations, searches, probes and studies; with two cures. Configurations of runs are read."""
    (tmp_path / "f").mkdir()
    survival: dict[str, Any] = {"labels": "l.csv", "task": "survival", "time": "t", "event": name}
    cures = rf"--event {name}=1 if 1 is the event, or --censored {name} if 1 is no event"
    calls: list[Callable[[], object]] = [
        lambda: histopipe.train(mil=tmp_path / "f", out=tmp_path / "r", **survival),
        lambda: histopipe.cross_validate(
            mil=tmp_path / "f", out=tmp_path / "r", folds=2, **survival
        ),
        lambda: histopipe.probe(tmp_path / "f", **survival),
        lambda: histopipe.init(out=tmp_path / "s.toml", encoder="uni", **survival),
        lambda: histopipe.cohort(tmp_path, event=name, time=("t",)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=cures):
            call()
    config = make_config({**survival, "mil": ["f"]})
    assert config.target_columns == ("t", name)
    assert make_config({**survival, "event": f"{name}=1", "mil": ["f"]}).event == f"{name}=1"
    of_censored = make_config({**survival, "event": None, "censored": name, "mil": ["f"]})
    assert of_censored.target_columns == ("t", f"{name}=0")
    for event in ("event", "status", "death", "os_event", "relapse", "incident"):
        refuse_unclear_event(event)
    with pytest.raises(UsageError, match="--censored: found --event dead, expected one of them"):
        make_config({**survival, "event": "dead", "censored": name, "mil": ["f"]})
