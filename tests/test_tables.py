"""CSV files: matching of names with slides, and messages of invalid files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from histopipe.errors import UsageError
from histopipe.ingestion.records import labelled, subfolder_labels
from histopipe.ingestion.request import read_request
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.tables import (
    SlideLabel,
    SlideNames,
    patient_of,
    read_labels,
    read_mpps,
    read_slide_list,
)
from histopipe.store.record import SlideRecord
from histopipe.system.progress import SilentProgress

NAMES = SlideNames(["a", "x/b", "y/b", "x/c", "d.svs", "d.tif"])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


@pytest.mark.parametrize(
    ("written", "found"),
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
def test_names_match_slide_ids(written: str, found: str | None) -> None:
    assert NAMES.find(written, where="here") == found


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
        ("slide;label\na;1\n", "separated by commas"),
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


def test_table_in_other_encoding_is_refused(table: Path) -> None:
    table.write_bytes("slide,label\na,männlich\n".encode("latin-1"))
    with pytest.raises(UsageError, match="expected a CSV file in UTF-8"):
        read_labels(table, NAMES)


def test_read_mpps(table: Path) -> None:
    table.write_text("slide,mpp\na,0.25\n")
    assert read_mpps(table, NAMES) == {"a": 0.25}
    for wrong in ("", "x", "0", "352.8", "nan"):
        table.write_text(f"slide,mpp\na,{wrong}\n")
        with pytest.raises(
            UsageError, match=r"line 2: mpp of a: found .* expected a number from 0\.05 to 50"
        ):
            read_mpps(table, NAMES)


def test_read_slide_list(table: Path) -> None:
    table.write_text("slide,anything\na,1\nc,2\n")
    assert read_slide_list(table, NAMES) == {"a", "x/c"}


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
    assert set(subfolder_labels(slides(*names)).values()) == classes


def test_labels_file_takes_precedence_over_subfolders(tmp_path: Path) -> None:
    for name in ("x/1", "x/2", "y/3", "y/4"):
        (tmp_path / f"{name}.svs").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.svs").touch()

    def labels() -> dict[str, SlideLabel | None]:
        slides, _, _ = read_request(tmp_path, tmp_path / "s.lmdb", {}, SilentProgress())
        return {slide.id: slide.label for slide in slides}

    assert labels()["x/1"] == SlideLabel("x")
    (tmp_path / "labels.csv").write_text("slide,label,patient,site\nx/1,t,p,s\n")
    assert labels() == {"x/1": SlideLabel("t", "p", "s"), "x/2": None, "y/3": None, "y/4": None}


def test_missing_values_keep_recorded_ones() -> None:
    fresh = SlideRecord(id="TCGA-CR-7395-01A", path="", resolved_path="")
    first = labelled(fresh, SlideLabel("t", None, "s"))
    assert (first.label, first.patient, first.site) == ("t", "TCGA-CR-7395", "s")
    assert labelled(first, None) == first
    again = labelled(first, SlideLabel(None, "p", None))
    assert (again.label, again.patient, again.site) == (None, "p", "s")


def test_patient_of_tcga_slide() -> None:
    assert patient_of("TCGA-CR-7395-01A-01-TS1") == "TCGA-CR-7395"
    assert patient_of("TCGA-CR-73950") == "TCGA-CR-73950"
    assert patient_of("x/1") == "x/1"
