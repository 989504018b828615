"""CSV files: matching of names with slides, and messages of invalid files."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import openpyxl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.workbooks import write_workbook
from histopipe.errors import UsageError
from histopipe.features.bags import BagSet
from histopipe.ingestion.request import label_by_subfolder, read_request
from histopipe.runs.task_config import make_config
from histopipe.runs.training_data import read_labelling
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.tables import (
    SlideLabel,
    SlideNames,
    patient_of,
    read_labels,
    read_mpps,
    select_listed,
)
from histopipe.splits.labelling import Labelling, candidates
from histopipe.store.record import SlideRecord
from histopipe.system.output import Progress
from histopipe.system.table_files import NA_VALUES, cell_number, read_table
from histopipe.tasks.registry import make_task

NAMES = SlideNames(["a", "x/b", "y/b", "x/c", "d.svs", "d.tif"])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a", "a"),
        ("a.svs", "a"),
        ("x/b", "x/b"),
        ("c", "x/c"),
        ("c.ndpi", "x/c"),
        ("d.svs", "d.svs"),
        ("q", None),
    ],
)
def test_names_match_slide_ids(written: str, expected: str | None) -> None:
    assert NAMES.find(written, where="here") == expected


@pytest.mark.parametrize(("written", "candidates"), [("b", "x/b, y/b"), ("d", r"d\.svs, d\.tif")])
def test_ambiguous_names_list_the_candidates(written: str, candidates: str) -> None:
    with pytest.raises(
        UsageError, match=f"here: '{written}' matches several slides: found {candidates}"
    ):
        NAMES.find(written, where="here")


def test_read_labels(table: Path) -> None:
    table.write_text(
        "\ufeffSlide, label ,patient,site\na,tumour,p1,s1\nc.svs,,,\n\n", encoding="utf-8"
    )
    assert read_labels(table, NAMES) == {
        "a": SlideLabel("tumour", "p1", "s1"),
        "x/c": SlideLabel(None, None, None),
    }


@pytest.mark.parametrize("name", ["patient_age", "case_control", "patients sex", "rapid", "grade"])
def test_columns_about_patients_are_accepted(table: Path, name: str) -> None:
    table.write_text(f"slide,label,{name}\na,tumour,p1\n")
    assert read_labels(table, NAMES) == {"a": SlideLabel("tumour")}


def test_labels_file_may_have_other_columns(table: Path) -> None:
    """One file of a study serves all commands; --subgroup and --target name the columns that are used."""
    table.write_text("slide,label,patient,case_id,age,os_time\na,tumour,p1,7,61,12\n")
    assert read_labels(table, NAMES) == {"a": SlideLabel("tumour", "p1")}
    assert read_labels(table, NAMES, columns=["age"])["a"].cells == {"age": "61"}


@pytest.mark.parametrize(
    "name",
    [
        "patient_id",
        "Patients",
        "case",
        "Subject ID",
        "PatientID",
        "bcr_patient_barcode",
        "Patient (ID)",
        "pid",
        "cases.submitter_id",
    ],
)
def test_other_names_of_patients_are_refused(table: Path, name: str) -> None:
    table.write_text(f"slide,label,{name}\na,tumour,p1\n")
    with pytest.raises(
        UsageError, match=re.escape(f"rename the column '{name.lower()}' to 'patient'")
    ):
        read_labels(table, NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
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
        ("slide,label\nb,x\n", "matches several slides"),
        ("slide,label\na," + "x" * 140_000 + "\n", "field larger than field limit"),
    ],
)
def test_invalid_labels_file_is_refused(table: Path, text: str, message: str) -> None:
    table.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_labels(table, NAMES)
    assert "table.csv" in str(caught.value)


def test_rows_without_slide_can_be_allowed(table: Path) -> None:
    table.write_text("slide,label\nnope,x\na,y\n")
    assert list(read_labels(table, NAMES, allow_extra=True)) == ["a"]


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
    chosen = select_listed(slides(*NAMES.ids), table, NAMES)
    assert {slide.id for slide in chosen} == {"a", "x/c"}


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
    labels = label_by_subfolder(slides(*names)).values()
    assert {label.label for label in labels} == classes


def test_labels_file_takes_precedence_over_subfolders(tmp_path: Path) -> None:
    for name in ("x/1", "x/2", "y/3", "y/4"):
        (tmp_path / f"{name}.svs").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.svs").touch()

    def labels() -> dict[str, SlideLabel | None]:
        slides, _, _ = read_request(tmp_path, tmp_path / "s.lmdb", {}, Progress())
        return {slide.id: slide.label for slide in slides}

    assert labels()["x/1"] == SlideLabel("x")
    (tmp_path / "labels.csv").write_text("slide,label,patient,site\nx/1,t,p,s\n")
    assert labels() == {"x/1": SlideLabel("t", "p", "s"), "x/2": None, "y/3": None, "y/4": None}


def test_missing_values_keep_recorded_ones() -> None:
    fresh = SlideRecord(id="TCGA-CR-7395-01A", path="", resolved_path="")
    first = fresh.with_label(SlideLabel("t", None, "s"))
    assert (first.label, first.patient, first.site) == ("t", "TCGA-CR-7395", "s")
    assert first.with_label(None) == first
    again = first.with_label(SlideLabel(None, "p", None))
    assert (again.label, again.patient, again.site) == (None, "p", "s")


def test_patient_of_tcga_slide() -> None:
    assert patient_of("TCGA-CR-7395-01A-01-TS1") == "TCGA-CR-7395"
    assert patient_of("TCGA-CR-73950") == "TCGA-CR-73950"
    assert patient_of("x/1") == "x/1"


def test_names_are_matched_in_any_unicode_form() -> None:
    """Systems write "ü" as one character or two; ids keep their form."""
    decomposed = unicodedata.normalize("NFD", "Münster")
    assert SlideNames([decomposed]).find("Münster", where="here") == decomposed
    assert SlideNames(["Münster"]).find(decomposed, where="here") == "Münster"


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
    """A table equals what Python's strict reader gives in NFC, or the message names its file and line."""
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    text = f"Slide{separator}Ü label{end}" + body.replace(",", separator).replace("\n", end)
    path.write_bytes(text.encode(encoding, "replace"))
    try:
        expected = strict_rows(text, separator)
    except csv.Error:
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
        assert strict_rows("".join(lines[line - 1 :]), separator)[0] == cells


def strict_rows(text: str, separator: str) -> list[list[str]]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    cells = [[unicodedata.normalize("NFC", cell.strip()) for cell in row] for row in rows]
    return [row for row in cells if any(row)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'slide,label\na,x\nc,"y\nd.svs,z\n', "line 3: found unexpected end of data"),
        (b'slide,label\na,"x"y\n', "line 2: found ',' expected after '\"'"),
        (
            b'slide,label\na,"x\ny"\n',
            r"line 2: column label: found 'x\\ny', expected a text without",
        ),
        (b'slide,label,site\na,"x\n\ny",s\nc,z\n', "line 5: found 2 cells, expected 3"),
        (b"slide,label\na,x\x1b[2J\n", "line 2: column label: found"),
        (b"slide,label\r\na,x\r\nc,\0\r\n", "line 3: found a NUL character"),
        (
            b"slide,label\na,x\nc,m\xe4nnlich\n",
            "line 3: found 'utf-8' codec .* save it as 'CSV UTF-8'",
        ),
        (
            "slide,label\na,x\n".encode("utf-16-le"),
            "line 1: found a NUL character, expected a CSV file in UTF-8, or in UTF-16 with a byte",
        ),
        (
            b"slide,label;grade\na,x;1\n",
            "the separator of the cells is ambiguous: found ',' and ';'",
        ),
        (b"slide,label\n", "has no rows: found only a header"),
        (b"slide,label\na,1.5\nc,NA\nd.svs,2\n", "the labels are continuous values"),
        (b'slide,label\na,"1,5"\nc,3\n', "the labels are continuous values"),
    ],
)
def test_damaged_table_is_refused_with_its_line(table: Path, content: bytes, message: str) -> None:
    table.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_labels(table, NAMES)


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
    labels = read_labels(path, NAMES, notify=print)
    assert [(name, row.label, row.patient) for name, row in labels.items()] == [
        ("a", "1", "007"),
        ("x/c", "2", "012"),
    ]


def test_ambiguous_workbooks_are_refused(tmp_path: Path) -> None:
    rows = [["slide", "label"], ["a", "x"], ["c", "=1+1"]]
    path = write_workbook(tmp_path / "labels.xlsx", One=rows, Two=rows[:2], Empty=[])
    with pytest.raises(
        UsageError, match=r"sheet is ambiguous: found One, Two, .* name it: '.*#SHEET'"
    ):
        read_table(path)
    with pytest.raises(UsageError, match=r"no sheet 'Three': found One, Two, Empty"):
        read_table(path.with_name("labels.xlsx#Three"))
    assert read_table(path.with_name("labels.xlsx#Two")).rows == [(2, ["a", "x"])]
    with pytest.raises(
        UsageError, match=r"sheet One, cell B3: found a formula without its value: =1\+1"
    ):
        read_table(path.with_name("labels.xlsx#One"))
    workbook = openpyxl.load_workbook(path)
    workbook["Two"].merge_cells("A2:A3")
    workbook.save(path)
    with pytest.raises(UsageError, match="sheet Two: merged cells: found A2:A3"):
        read_table(path.with_name("labels.xlsx#Two"))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UsageError, match=r"cannot be read: found .*, expected an Excel workbook"):
        read_table(path)


def test_last_columns_may_be_missing_in_all_rows_only(table: Path) -> None:
    table.write_text("slide,label,patient\na,x\nc,y\n")
    labels = read_labels(table, NAMES)
    assert [(row.label, row.patient) for row in labels.values()] == [("x", None), ("y", None)]
    table.write_text("slide,label,patient\na,x,P1\nc,y\n")
    with pytest.raises(UsageError, match="line 3: found 2 cells, expected 3"):
        read_labels(table, NAMES)


def test_names_are_read_in_one_unicode_form(table: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "slide,label,patient,Größe\na,Métastase,Müller,3\n")
    table.write_text(decomposed + "c,Métastase,Müller,\n", encoding="utf-8")
    labels = read_labels(table, NAMES, columns=["größe"])
    assert {(entry.label, entry.patient) for entry in labels.values()} == {("Métastase", "Müller")}
    assert labels["a"].cells == {"größe": "3"}


def test_missing_values_are_counted(table: Path) -> None:
    notes: list[str] = []
    cells = ["", *NA_VALUES]
    names = SlideNames(str(i) for i in range(len(cells)))
    rows = [f"{i},{cell},{cell},{cell},{cell}\n" for i, cell in enumerate(cells)]
    table.write_text("slide,label,patient,site,age\n" + "".join(rows))
    labels = read_labels(table, names, columns=["age"], notify=notes.append)
    assert set(map(repr, labels.values())) == {repr(SlideLabel(None, cells={"age": ""}))}
    (note,) = notes
    assert all(
        f"{name} 13 (1 empty, 1 #N/A, " in note for name in ("label", "patient", "site", "age")
    )
    kept = read_labels(table, names, columns=["age"], na=("-",), notify=notes.append)
    assert [entry.label for entry in kept.values()] == [
        None if cell in ("", "-") else cell for cell in cells
    ]
    with pytest.raises(UsageError, match="na: found 'NA', expected a list of texts"):
        read_labels(table, names, na="NA")


def test_similar_values_are_named_and_stay_different(table: Path) -> None:
    notes: list[str] = []
    table.write_text(
        "slide,label,patient,site,age,died,subset\na,Tumour,P1,0,1,TRUE,Test\nc,tumour,p1,0.0,1.0,true,test\n"
        "x/b,t\u200bumour,P\u00a02,00,2,0,TRAIN\ny/b,normal,P 2,1,3,1,Training\n",
        encoding="utf-8",
    )
    labels = read_labels(
        table, NAMES, columns=["age", "died"], groups=["subset"], notify=notes.append
    )
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


def test_patients_of_lower_case_barcodes() -> None:
    assert patient_of("x/tcga-cr-7395-01a-01-ts1") == "TCGA-CR-7395"
    old = {"id": "tcga-cr-7395-01a", "path": "", "resolved_path": "", "state": "pending"}
    old |= {"patient": "tcga-cr-7395-01a", "label": unicodedata.normalize("NFD", "é")}
    record = SlideRecord.from_json(old, where="record")
    assert (record.patient, record.label) == ("TCGA-CR-7395", "é")


def features(folder: Path, names: Sequence[str]) -> Path:
    folder.mkdir()
    for name in names:
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["features"] = np.zeros((2, 3), np.float32)
            file["coords"] = np.zeros((2, 2), np.int64)
    return folder


def test_feature_files_with_decomposed_names_have_labels(tmp_path: Path, table: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "ä")
    bags = features(tmp_path / "a", [decomposed, "b"]), features(tmp_path / "b", ["ä", "b"])
    table.write_text("slide,label,patient\nä,x,é\nb,y,e\n", encoding="utf-8")
    both = BagSet(bags, labels=table, bag="patient", numbers={unicodedata.normalize("NFD", "é"): 7})
    assert {n: (bag.label, bag.slides) for n, bag in both.bags.items()} == {
        7: ("x", (decomposed,)),
        8: ("y", ("b",)),
    }


def test_different_targets_of_a_patient_are_named(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = features(tmp_path / "a", [f"s{i}" for i in range(8)])
    table.write_text(
        "slide,patient,months,died\n" + "".join(f"s{i},p{i // 2},{max(i, 1)},1\n" for i in range(8))
    )
    bags = BagSet(folder, labels=table, columns=("months", "died"), with_label=False)
    task = make_task("survival", ("months", "died"))
    candidates([bags], Labelling(task=task))
    expected = (
        "warning: 3 patients with slides of different months, died, such as p1: 2, 1 and 3, 1;"
    )
    assert expected in capsys.readouterr().err


def test_recorded_names_are_checked(tmp_path: Path) -> None:
    notes: list[str] = []
    bags = BagSet(features(tmp_path / "a", ["s0", "s1", "s2"]))
    for bag, label in zip(bags.bags.values(), ["nan", "Tumour", "tumour"], strict=True):
        object.__setattr__(bag, "label", label)
    read_labelling(make_config({"mil": str(tmp_path)}), [bags], notify=notes.append)
    assert [note.partition(";")[0] for note in notes] == [
        "warning: recorded label: 'nan' is no missing value",
        "warning: recorded label: 'Tumour' and 'tumour' are different values",
    ]
