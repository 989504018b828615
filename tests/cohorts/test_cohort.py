"""Cohorts from the tables of archives: every file is used or excluded for one reason, and contradictions are refused."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from archives import MISSING, Gdc, new_uuid, tsv, write_tar
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.examples import examples
from helpers.trainings import csv_rows
from helpers.workbooks import write_workbook
from histopipe.cohorts.cohort import CohortResult, with_cohort
from histopipe.cohorts.cohort_files import md5_of
from histopipe.errors import NothingToDo, UsageError
from histopipe.slides.discovery import discover
from histopipe.slides.slide_files import SlideNames
from histopipe.slides.tables import read_labels
from histopipe.splits.slide_table import Exclusion, SlideEntry

STAGES = ("Stage I", "Stage IIA", "Stage IV")


def make_gdc(patients: int = 6) -> Gdc:
    """One diagnostic slide per patient of three sites, with a stage; patients with odd numbers have died."""
    gdc = Gdc()
    for n in range(patients):
        name = f"TCGA-A{n % 3}-{n:04}"
        gdc.add(f"{name}-01Z-00-DX1")
        dead = n % 2 == 1
        gdc.clinical.append(
            {
                "patient": name,
                "vital_status": "Dead" if dead else "Alive",
                "days_to_death": 100 + n if dead else MISSING,
                "days_to_last_follow_up": MISSING if dead else f"{300 + n}.0",
                "ajcc_pathologic_stage": STAGES[n % 3],
                "tumor_stage": STAGES[n % 3],
                "diagnosis_is_primary_disease": "true",
                "age_at_index": 50 + n,
            }
        )
    return gdc


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def check(result: CohortResult) -> list[dict[str, str]]:
    """Check that every file is in `cohort.csv` once, used or excluded, and that `labels.csv` has the used ones."""
    out = Path(result.out)
    rows, labels = csv_rows(out.with_name("cohort.csv")), csv_rows(out)
    assert len(rows) == result.files == result.slides + sum(result.excluded.values())
    assert Counter(row["reason"] for row in rows if row["reason"]) == Counter(result.excluded)
    used = sorted(row["slide"] for row in rows if not row["reason"])
    assert used == [row["slide"] for row in labels]
    assert len(labels) == result.slides == len(set(used))
    assert json.loads(out.with_name("cohort.json").read_text())["result"]["files"] == len(rows)
    return rows


@pytest.mark.parametrize("flat", [False, True], ids=["folders", "flat"])
@pytest.mark.parametrize("listed_by", ["manifest", "old", "new", "cart", "disk"])
@pytest.mark.parametrize(
    ("clinical", "column"),
    [("2019", "tumor_stage"), ("2024", "ajcc_pathologic_stage"), ("2025", "ajcc_pathologic_stage")],
)
def test_gdc(tmp_path: Path, listed_by: str, clinical: str, column: str, *, flat: bool) -> None:
    gdc = make_gdc()
    texts: dict[str, Callable[[], str]] = {
        "manifest": gdc.manifest,
        "cart": gdc.cart,
        "old": lambda: gdc.sample_sheet("old"),
        "new": gdc.sample_sheet,
    }
    tables = (
        [write(tmp_path / f"list.{'json' if listed_by == 'cart' else 'tsv'}", texts[listed_by]())]
        if listed_by in texts
        else []
    )
    table = write_tar(
        tmp_path / "clinical.cart.tar.gz",
        clinical=gdc.clinical_table(clinical),
        exposure="case_id\n",
    )
    folder = gdc.write_slides(tmp_path / "slides", flat=flat)
    result = histopipe.cohort(
        [*tables, table, folder],
        tmp_path / "out" / "labels.csv",
        label=column,
        map=("Stage I=early,Stage IIA=early, Stage IV=late",),
        event="vital_status",
        time=("days_to_death", "days_to_last_follow_up"),
    )
    ids = {slide.id for slide in discover([folder])}
    assert {row["slide"] for row in check(result)} == ids
    assert result.slides == 6 and result.labels == {"early": (4, 4), "late": (2, 2)}
    labels = read_labels(Path(result.out), SlideNames(ids), columns=["time", "event"])
    for n, file in enumerate(gdc.files):
        name = file.name.removesuffix(".svs")
        row = labels[name if flat else f"{file.id}/{name}"]
        label = ("early", "early", "late")[n % 3]
        assert (row.label, row.patient, row.site) == (label, file.patient, f"A{n % 3}")
        assert row.cells == {"time": str(100 + n if n % 2 else 300 + n), "event": str(n % 2)}


def test_every_trap_has_its_reason(tmp_path: Path) -> None:
    gdc = make_gdc()
    frozen = gdc.add("TCGA-A0-0000-01A-01-TS1")
    normal = gdc.add("TCGA-A0-0000-11A-01-BSA")
    report = gdc.add("TCGA-A0-0003-01Z-00-DX9", suffix=".pdf")
    copy = gdc.add("TCGA-A1-0001-01Z-00-DX1", id=new_uuid("other"), content=gdc.files[1].content)
    absent = gdc.add("TCGA-A2-0002-01Z-00-DX2")
    cut = gdc.add("TCGA-A2-0005-01Z-00-DX2")
    damaged = gdc.add("TCGA-A0-0003-01Z-00-DX2")
    without = gdc.add("TCGA-A9-0009-01Z-00-DX1")
    unknown = gdc.add("TCGA-A8-0008-01Z-00-DX1")
    unwanted = gdc.add("TCGA-A7-0007-01Z-00-DX1")
    gdc.clinical += [
        {"patient": unknown.patient, "ajcc_pathologic_stage": "Not Reported", "age_at_index": 40},
        {"patient": unwanted.patient, "ajcc_pathologic_stage": "Stage I", "age_at_index": 12},
        # A metastasis, in a row before that of the primary disease; and a second row with another treatment.
        *({**row, "treatment_type": "Radiation"} for row in list(gdc.clinical)),
    ]
    gdc.clinical.insert(
        0,
        {
            "patient": "TCGA-A0-0000",
            "ajcc_pathologic_stage": "Stage X",
            "diagnosis_is_primary_disease": "false",
            "age_at_index": 50,
        },
    )
    clinical = write(tmp_path / "clinical.tsv", gdc.clinical_table())
    folder = gdc.write_slides(tmp_path / "slides")
    inputs = [write(tmp_path / "manifest.txt", gdc.manifest()), clinical, folder]
    (folder / absent.id / absent.name).rename(folder / absent.id / f"{absent.name}.partial")
    write(folder / cut.id / cut.name, cut.content[:-1])
    changed = write(folder / damaged.id / damaged.name, damaged.content[:-1] + b"?")
    write(folder / "extra" / "own-slide.svs", b"x")
    write(folder / gdc.files[0].name, gdc.files[0].content)
    column, out = "diagnoses.ajcc_pathologic_stage", tmp_path / "labels.csv"
    result = histopipe.cohort(
        inputs,
        out,
        label=column,
        where="age_at_index >= 18 and project_id != 'TCGA-LUAD' or age_at_index == ''",
        check=True,
    )
    rows = check(result)
    original = f"{gdc.files[1].id}/{gdc.files[1].name.removesuffix('.svs')}"
    size = len(cut.content)
    reasons = {row["file_id"]: (row["reason"], row["detail"]) for row in rows if row["reason"]}
    del reasons[""]  # in no table
    assert reasons == {
        frozen.id: (Exclusion.OTHER_KIND, "frozen"),
        normal.id: (Exclusion.OTHER_KIND, "frozen"),
        report.id: (Exclusion.NO_SLIDE, "pdf"),
        copy.id: (Exclusion.DUPLICATE, f"same content as {original} of TCGA-A1-0001"),
        absent.id: (Exclusion.NOT_ON_DISK, ""),
        cut.id: (Exclusion.INCOMPLETE, f"{size - 1:,} of {size:,} bytes"),
        damaged.id: (Exclusion.INCOMPLETE, f"MD5 is {md5_of(changed)}, expected {damaged.md5}"),
        without.id: (Exclusion.NO_VALUE, f"{column}: no row in {clinical}"),
        unknown.id: (Exclusion.NO_VALUE, f"{column}: Not Reported"),
        unwanted.id: (Exclusion.NOT_WANTED, "age_at_index: 12; project_id: TCGA-ZZZZ"),
    }
    assert {(row["name"], row["reason"]) for row in rows if not row["file_id"]} == {
        ("own-slide.svs", Exclusion.IN_NO_TABLE),
        (gdc.files[0].name, Exclusion.DUPLICATE),
    }
    assert result.slides == 6 and result.labels == dict.fromkeys(STAGES, (2, 2))
    # What is to be downloaded again, also in a form that gdc-client reads.
    missing = (absent, cut, damaged)
    assert (tmp_path / "missing.txt").read_text().splitlines() == [file.name for file in missing]
    heads = ("id", "filename", "md5", "size", "state")
    cells = [(file.id, file.name, file.md5, len(file.content), "released") for file in missing]
    assert (tmp_path / "missing-manifest.txt").read_text() == tsv(
        heads, [dict(zip(heads, each, strict=True)) for each in cells]
    )
    assert "3 files to download again: missing.txt" in str(result)
    assert "warning: 1 slide on disk in no table: extra/own-slide" in str(result)
    for file in missing:
        write(folder / file.id / file.name, file.content)
    again = histopipe.cohort(inputs, out, label=column, where="age_at_index >= 18", check=True)
    assert again.missing == 0 and not list(tmp_path.glob("missing*")) and again.slides == 9
    assert again.changes[0].startswith("3 slides new: ")


@examples(25)
@given(data=st.data())
def test_each_file_is_used_or_excluded_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cohort")
    gdc = make_gdc(data.draw(st.integers(1, 8)))
    barcodes = st.sampled_from(["1Z-01-DX2", "6Z-01-DX2", "1A-01-TS1", "6A-01-TS1", "1A-01-BSA"])
    for number, kind in enumerate(data.draw(st.lists(barcodes, max_size=4))):
        gdc.add(f"TCGA-B0-{number:04}-0{kind}")
    slides = gdc.write_slides(folder / "slides", flat=data.draw(st.booleans()))
    for path in sorted(slides.rglob("*.svs")):
        what = data.draw(st.sampled_from(["keep", "keep", "remove", "cut", "copy", "rename"]))
        if what == "remove":
            path.unlink()
        elif what == "cut":
            path.write_bytes(path.read_bytes()[:7])
        elif what == "copy":
            shutil.copy(path, slides / f"copy-of-{path.name}")
        elif what == "rename":
            path.rename(path.with_name(f"{path.name[:23]}.svs"))
    left_out = data.draw(st.sets(st.integers(0, 3)))
    kept = [row for number, row in enumerate(gdc.clinical) if number not in left_out]
    gdc.clinical = kept or gdc.clinical
    tables = [
        write(folder / "sheet.tsv", gdc.sample_sheet()),
        write(folder / "clinical.tsv", gdc.clinical_table()),
    ]
    where = [None, "age_at_index > 52", "vital_status in ('Dead', 'x')"]
    options: dict[str, Any] = {
        "slides": data.draw(st.sampled_from(["diagnostic", "frozen", "all"])),
        "label": data.draw(st.sampled_from([None, "ajcc_pathologic_stage", "site", "kind"])),
        "where": data.draw(st.sampled_from(where)),
    }
    try:
        result = histopipe.cohort([*tables, slides], folder / "labels.csv", **options)
    except NothingToDo:
        assert not (folder / "labels.csv").exists()
        return
    rows, names = check(result), [slide.id for slide in discover([slides])]
    assert sorted(row["slide"] for row in rows if row["slide"] in names) == sorted(names)
    listed = [row["file_id"] for row in rows if row["file_id"]]
    assert sorted(listed) == sorted(file.id for file in gdc.files)
    labels = read_labels(Path(result.out), SlideNames(names), with_label=False, notify=print)
    assert labels.keys() <= set(names)


def cohort_of(
    folder: Path, tables: dict[str, str | bytes], slides: Sequence[str], **options: Any
) -> CohortResult:
    """Return the cohort of tables, by file name, and of slides, each with its name as content."""
    for name in slides:
        write(folder / "slides" / name, name.replace("copy/", "y/"))
    paths = [write(folder / name, content) for name, content in tables.items()]
    result = histopipe.cohort([*paths, folder / "slides"], folder / "labels.csv", **options)
    check(result)
    return result


REFERENCE = "test_001,Tumor,IDC,Macro\ntest_002,Normal,None,None\n"
IDC_LINES = "Manifest for cohort 'x'\nUser: a@b\nFilters: collection_id IN ('a', 'b')\nTotal records found: 1\n\n"
JSON_LIST = b'[{"file_name": "a.svs", "label": "y"}]'
VISITS = "slide,seen,label\na,{},old\na,{},new\n"
BIOTAB = (
    "bcr_patient_uuid\tbcr_patient_barcode\tlabel\n" * 2 + "CDE_ID:\tCDE_ID:2\tCDE_ID:1\nx\ta\ty\n"
)
LABEL: dict[str, Any] = {"label": "label"}
Tables = dict[str, str | bytes]
FORMS: Tables = {
    "idc.csv": f"{IDC_LINES}collection_id,slide,label\nx,a,y\n",
    "excel.csv": b"sep=;\r\nslide;label\r\na;y\r\n",
    "gdc.tsv": 'slide\tlabel\tnote\na\ty\t"Left" lobe\n',
    "list.json.gz": gzip.compress(JSON_LIST, mtime=0),
    "LIST.JSON": JSON_LIST,
}
"""The label of slide a, as archives and programs write it."""
CASES: dict[str, tuple[Tables, Sequence[str], dict[str, Any], dict[str, str]]] = {
    "numbers of rows and patients are no ids of files": (
        {"t.csv": "id,filename,label\n1,a.svs,x\n1,b.svs,x\n2,1.svs,y\n"},
        ("a.svs", "b.svs", "1.svs"),
        LABEL,
        {"a": "x", "b": "x", "1": "y"},
    ),
    "names in folders are different slides": (
        {"t.csv": "slide,label\nP1/HE,x\nP2/HE,y\n"},
        ("P1/HE.svs", "P2/HE.svs"),
        LABEL,
        {"P1/HE": "x", "P2/HE": "y"},
    ),
    "equal names and sizes are no copies": (
        {},
        ("x/HE.svs", "y/HE.svs"),
        {"label": "folder"},
        {"x/HE": "x", "y/HE": "y"},
    ),
    "each copy is excluded": (
        {},
        ("copy/HE.svs", "x/HE.svs", "y/HE.svs"),
        {"label": "folder"},
        {"copy/HE": "copy", "x/HE": "x"},
    ),
    "column of the exact name": (
        {"t.csv": "slide,os_3_years,os_5_years\na,1,2\n"},
        ("a.svs",),
        {"label": "os_5_years"},
        {"a": "2"},
    ),
    "tables without rows are ignored": (
        {"exposure.tsv": "case_submitter_id\talcohol\n", "t.csv": "slide,patient,label\na,P1,x\n"},
        ("a.svs",),
        LABEL,
        {"a": "x"},
    ),
    "primary diagnosis is that of day 0": (
        {
            "clinical.csv": "patient_id,days_to_diagnosis,stage\nP1,0.0,I\nP1,900.0,IV\n",
            "t.csv": "slide,patient\na,P1\n",
        },
        ("a.svs",),
        {"label": "stage"},
        {"a": "I"},
    ),
    **{
        f"last row, {first} and {last}": (
            {"t.csv": VISITS.format(first, last)},
            ("a.svs",),
            LABEL | {"take": "last:seen"},
            {"a": "new"},
        )
        for first, last in (("2019-12-31", "2020-01-05 10:00:00"), ("3", "20"))
    },
    **{
        f"reference without header, {encoding} {separator}": (
            {"t.csv": REFERENCE.replace(",", separator).encode(encoding)},
            ("test_001.tif", "test_002.tif"),
            {"label": "class", "map": ("None=negative,Macro=positive",)},
            {"test_001": "positive", "test_002": "negative"},
        )
        for encoding in ("utf-8", "utf-8-sig", "utf-16")
        for separator in ",;"
    },
    **{name: ({name: content}, ("a.svs",), LABEL, {"a": "y"}) for name, content in FORMS.items()},
    "classes of folders": (
        {},
        ("normal/normal_001.tif", "tumor/Tumor_001.tif"),
        {"label": "folder", "map": ("normal=Normal,tumor=Tumor",)},
        {"normal/normal_001": "Normal", "tumor/Tumor_001": "Tumor"},
    ),
    "biotab, of patients": (
        {"biotab.txt": BIOTAB, "slides.csv": "slide,patient\na,a\n"},
        ("a.svs",),
        LABEL,
        {"a": "y"},
    ),
}
"""Tables and slides, and the labels of their cohort."""


@pytest.mark.parametrize("name", CASES)
def test_labels_of_tables_and_slides(name: str, tmp_path: Path) -> None:
    tables, slides, options, labels = CASES[name]
    assert labels_of(cohort_of(tmp_path, tables, slides, **options)) == labels


def labels_of(result: CohortResult, *columns: str) -> dict[str, Any]:
    """Return the label, or the cells of some columns, by slide."""
    return {
        row["slide"]: tuple(row[name] for name in columns) if columns else row["label"]
        for row in csv_rows(Path(result.out))
    }


REFUSED: tuple[tuple[Tables, dict[str, Any], str], ...] = (
    ({"t.csv": "slide,诊断\na,x\n"}, {"label": "年龄"}, "no table has a column 年龄"),
    (
        {"t.csv": VISITS.format("12-01-1999", "01-01-2020")},
        LABEL | {"take": "last:seen"},
        "found '12-01-1999', expected a number, or a date",
    ),
    (
        {"t.csv": VISITS.format("2020-01-01", "2020-01-01")},
        LABEL | {"take": "last:seen"},
        "several values",
    ),
    (
        {"t.csv": "slide,event,time\na,1.0,5\nb,0,x\n"},
        {"event": "event", "time": ("time",)},
        r"--time has other values: found 'x' \(1\), expected numbers",
    ),
    ({"t.tsv": 'slide\tlabel\na\t"x"\nb\t"y\n'}, LABEL, r"t\.tsv, line 3"),
    (
        {"labels.csv": "slide,label,comment\na,x,mine\n"},
        LABEL,
        r"labels\.csv, which histopipe cohort did not write",
    ),
)


@pytest.mark.parametrize(("tables", "options", "message"), REFUSED)
def test_tables_and_options_are_refused(
    tables: Tables, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        cohort_of(tmp_path, tables, ("a.svs", "b.svs"), **options)
    assert (tmp_path / "labels.csv").exists() == ("labels.csv" in tables)
    for name, content in tables.items():
        assert (tmp_path / name).read_text() == content  # labels of others are not replaced


def test_cells_of_tables(tmp_path: Path) -> None:
    """Missing cells are no patients, sites and checksums; times and events have other forms."""
    table = (
        "slide,patient,site,md5,label,event,time\na,Unknown,NA,NA,x,1.0,5\n"
        "b,Unknown,'--,NA,y,0.0,7.5\nc,P1,S,NA,y,1,1\n"
    )
    slides = ("a.svs", "b.svs", "c.svs")
    result = cohort_of(tmp_path, {"t.csv": table}, slides, event="event", time=("time",))
    cells = labels_of(result, "patient", "site", "time", "event")
    assert [*cells.values()] == [("a", "", "5", "1"), ("b", "", "7.5", "0"), ("P1", "S", "1", "1")]


def test_broken_links_are_missing(tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "b.svs").symlink_to(tmp_path / "nowhere")
    result = cohort_of(tmp_path, {"t.csv": "slide,label\na,x\nb,y\n"}, ("a.svs",), **LABEL)
    assert labels_of(result) == {"a": "x"}
    details = {row["slide"]: row["detail"] for row in csv_rows(tmp_path / "cohort.csv")}
    assert details == {"a": "", "b": "cannot be read"}
    assert (tmp_path / "missing.txt").read_text() == "b\n"


def test_series_that_are_not_on_disk_are_missing(tmp_path: Path) -> None:
    series = [f"P{n},1.3.6.1.4.1.5962.99.1.2.{n},SM" for n in range(2)]
    table = "\n".join(["PatientID,SeriesInstanceUID,Modality", *series])
    slide = "P0/SM_1.3.6.1.4.1.5962.99.1.2.0/x.dcm"
    assert cohort_of(tmp_path, {"t.csv": table}, (slide,)).excluded == {Exclusion.NOT_ON_DISK: 1}
    assert (tmp_path / "missing.txt").read_text() == "1.3.6.1.4.1.5962.99.1.2.1\n"


def test_camelyon16(tmp_path: Path) -> None:
    table = "image,type,center,class\ntest_001.tif,tumor,0,macro\ntest_002.tif,normal,1,negative\n"
    slides = ("images/test_001.tif", "images/test_002.tif")
    result = cohort_of(tmp_path, {"reference.csv": table}, slides, label="type")
    assert labels_of(result, "label", "site") == {
        "images/test_001": ("tumor", "0"),
        "images/test_002": ("normal", "1"),
    }


def test_outlines_are_found(tmp_path: Path) -> None:
    outlines = write(
        tmp_path / "slides" / "lesions" / "tumor_001.xml", "<ASAP_Annotations/>"
    ).parent
    result = cohort_of(tmp_path, {}, ("tumor_001.tif", "normal_001.tif"))
    assert f"outlines of 1 slide: histopipe annotate STORE {outlines}" in result.warnings


def test_camelyon17(tmp_path: Path) -> None:
    names = [f"patient_{patient:03}_node_{node}.tif" for patient in (0, 21) for node in range(2)]
    stages = zip(names, ("macro", "negative", "negative", "itc"), strict=True)
    table = ["patient,stage", "patient_000.zip,pN1", "patient_021.zip,pN0", *map(",".join, stages)]
    result = cohort_of(
        tmp_path,
        {"stages.csv": "\n".join(table)},
        names,
        label="stage",
        map=("macro=1,itc=,negative=0",),
        columns=("patient_stage",),
    )
    assert result.excluded == {Exclusion.NO_VALUE: 1}
    assert [tuple(row.values()) for row in csv_rows(tmp_path / "labels.csv")] == [
        ("patient_000_node_0", "1", "patient_000", "center_0", "pN1"),
        ("patient_000_node_1", "0", "patient_000", "center_0", "pN1"),
        ("patient_021_node_0", "0", "patient_021", "center_1", "pN0"),
    ]
    assert "1 patient with several labels: patient_000 (0, 1)" in result.warnings


def test_panda(tmp_path: Path) -> None:
    ids = [new_uuid(str(number)).replace("-", "") for number in range(3)]
    rows = [f"{name},{('karolinska', 'radboud')[n % 2]},{n},3+{n}" for n, name in enumerate(ids)]
    table = "\n".join(["image_id,data_provider,isup_grade,gleason_score", *rows])
    slides = [f"{name}.tiff" for name in ids[:2]]
    result = cohort_of(tmp_path, {"train.csv": table}, slides, label="isup_grade")
    cells = labels_of(result, "label", "site")
    assert cells == {ids[0]: ("0", "karolinska"), ids[1]: ("1", "radboud")}
    assert result.excluded == {Exclusion.NOT_ON_DISK: 1}
    assert f"2 slides without a patient, taken for one: {ids[0]}, {ids[1]}" in result.warnings
    assert not (tmp_path / "missing-manifest.txt").exists()  # gdc-client knows no such file


def test_bracs(tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        ["WSI Filename", "Patient Id", "RoI ", "WSI label", "Set"],
        ["BRACS_264", 7, 3, "PB", "Training"],
        ["BRACS_1003714", 12, 0, "IC", "Testing"],
    ]
    book = write_workbook(tmp_path / "BRACS.xlsx", WSI_Information=rows, Other=[["x"]])
    for name in ("train/Group_BT/Type_PB/BRACS_264", "test/Group_MT/Type_IC/BRACS_1003714"):
        write(tmp_path / "slides" / f"{name}.svs", name)
    folder, out = tmp_path / "slides", tmp_path / "labels.csv"
    with pytest.raises(UsageError, match=r"sheet is ambiguous: found WSI_Information, Other"):
        histopipe.cohort([book, folder], out)
    check(histopipe.cohort([book, folder], out, label="wsi label", columns=("set",)))
    sheet = f"{book}#WSI_Information"
    check(histopipe.cohort([sheet, folder], out, label="wsi_label", columns=("set",)))
    assert [tuple(row.values()) for row in csv_rows(out)] == [
        ("test/Group_MT/Type_IC/BRACS_1003714", "IC", "12", "", "Testing"),
        ("train/Group_BT/Type_PB/BRACS_264", "PB", "7", "", "Training"),
    ]


def test_cptac_with_a_clinical_workbook(tmp_path: Path) -> None:
    table = "\ufeffCase_ID,Slide_ID,Tumor,Specimen_Type,Embedding_Medium\nC3L-00001,C3L-00001-21,LUAD,tumor_tissue,FFPE\nC3L-00001,C3L-00001-26,LUAD,normal_tissue,OCT\nC3N-00002,C3N-00002-21,CCRCC,tumor_tissue,\n"
    cells: list[list[Any]] = [["Case ID", "Age"], ["C3L-00001", 61], ["C3N-00002", 70]]
    book = write_workbook(tmp_path / "clinical.xlsx", Sheet1=cells)
    result = cohort_of(
        tmp_path,
        {"cptac.csv": table, "clinical.xlsx": book.read_bytes()},
        ("C3L-00001-21.svs", "C3L-00001-26.svs", "C3N-00002-21.svs"),
        label="tumor",
        where="specimen_type == 'tumor_tissue' and age > 60",
        columns=("age",),
    )
    assert labels_of(result, "label", "patient", "site", "age") == {
        "C3L-00001-21": ("LUAD", "C3L-00001", "", "61"),
        "C3N-00002-21": ("CCRCC", "C3N-00002", "", "70"),
    }
    assert result.excluded == {Exclusion.NOT_WANTED: 1}


def test_idc(tmp_path: Path) -> None:
    series = [f"1.3.6.1.4.1.5962.99.1.{n}.1" for n in range(4)]
    index = [
        f"tcga_zzzz,TCGA-A0-000{n},2.25.{n},{uid},{'SEG' if n == 3 else 'SM'},{new_uuid(uid)}"
        for n, uid in enumerate(series)
    ]
    names = [f"{uid},TCGA-A0-000{n}-01Z-00-DX1,Neoplasm" for n, uid in enumerate(series[:3])]
    heads = (
        "collection_id,PatientID,StudyInstanceUID,SeriesInstanceUID,Modality,crdc_series_uuid",
        "SeriesInstanceUID,ContainerIdentifier,primaryAnatomicStructureModifier_CodeMeaning",
    )
    slides = [
        f"tcga_zzzz/TCGA-A0-000{n}/2.25.{n}/SM_{uid}/{part}.dcm"
        for n, uid in enumerate(series[:2])
        for part in "ab"[: n + 1]
    ]
    result = cohort_of(
        tmp_path,
        {"index.csv": "\n".join([heads[0], *index]), "sm.csv": "\n".join([heads[1], *names])},
        slides,
        label="primaryAnatomicStructureModifier_CodeMeaning",
    )
    assert result.excluded[Exclusion.NO_SLIDE] == result.excluded[Exclusion.NOT_ON_DISK] == 1
    assert (tmp_path / "missing.txt").read_text() == "TCGA-A0-0002-01Z-00-DX1\n"
    cells = labels_of(result, "patient", "site").values()
    assert sorted(cells) == [("TCGA-A0-0000", "A0"), ("TCGA-A0-0001", "A0")]


def test_longitudinal_table(tmp_path: Path) -> None:
    tables: Tables = {
        "slides.csv": "slide,patient\na,P1\nb,P2\n",
        "visits.csv": "Patient ID;visit;grade\nP1;2020-01-31;low\nP1;2021-01-31;high\nP2;2020-05-01;low\n",
    }
    slides, visits = ("a.svs", "b.svs"), re.escape(str(tmp_path / "visits.csv"))
    message = rf"grade: several values for patient P1, file a: found 'low' \({visits}, line 2\), 'high' \({visits}, line 3\), expected one value; choose a row with --where, .* or with --take first:COLUMN"
    with pytest.raises(UsageError, match=message):
        cohort_of(tmp_path, tables, slides, label="grade")
    assert not (tmp_path / "labels.csv").exists()
    choices: list[tuple[dict[str, Any], str]] = [
        ({"take": "first:visit"}, "low"),
        ({"take": "last:visit"}, "high"),
        ({"where": "visit == '2021-01-31' or patient == 'P2'"}, "high"),
    ]
    for option, label in choices:
        result = cohort_of(tmp_path, tables, slides, label="grade", **option)
        assert labels_of(result) == {"a": label, "b": "low"}


def test_survival_of_cbioportal(tmp_path: Path) -> None:
    head = "#Patient\tStatus\tMonths\n#a\tb\tc\n#STRING\tSTRING\tNUMBER\n#1\t1\t1\nPATIENT_ID\tOS_STATUS\tOS_MONTHS\n"
    cells = ("1:DECEASED\t17.97", "0:LIVING\t3", "\t8", "DECEASED\t-1")
    table = head + "".join(f"TCGA-A0-000{n}\t{text}\n" for n, text in enumerate(cells))
    slides = [f"TCGA-A0-000{n}-01Z-00-DX1.svs" for n in range(4)]
    cohort_of(tmp_path, {"patient.txt": table}, slides, event="os_status", time=("os_months",))
    rows = csv_rows(tmp_path / "cohort.csv")
    assert [(row["time"], row["event"], row["detail"]) for row in rows] == [
        ("17.97", "1", ""),
        ("3", "0", ""),
        ("", "", "os_status: missing"),
        ("", "1", "time: -1"),
    ]


def breakages(gdc: Gdc) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """Other tables, and options, that each have one mistake."""
    sheet, clinical, manifest = gdc.sample_sheet(), gdc.clinical_table(), gdc.manifest()
    name, uuid = gdc.files[0].name, new_uuid(gdc.files[0].patient)
    other_events = clinical.replace("demographic.gender", "demographic.x")
    return {
        "two projects": ({"clinical": clinical.replace("TCGA-A", "TCGA-Q").replace(uuid, "q")}, {}),
        "no barcode": ({"sheet": sheet.replace(name, "TCGA-A0-00-DX1.svs")}, {}),
        "other patient": ({"sheet": sheet.replace("\tTCGA-A0-0000\t", "\tTCGA-A0-0009\t")}, {}),
        "several patients": (
            {"sheet": sheet.replace("\tTCGA-A0-0000\t", "\tTCGA-A0-0000, TCGA-A0-0009\t")},
            {},
        ),
        "normal": ({"sheet": sheet.replace("\tTumor\t", "\tNormal\t", 1)}, {}),
        "md5": ({"sheet": manifest.replace(gdc.files[1].md5, "0" * 32)}, {}),
        "map": ({}, {"map": ("Stage I=early",)}),
        "map form": ({}, {"map": ("Stage I",)}),
        "where": ({}, {"where": "sample_typ == 'Tumor'"}),
        "label": ({}, {"label": "stage_of_disease"}),
        "event": (
            {
                "clinical": other_events.replace(
                    "demographic.vital_status", "demographic.gender"
                ).replace("Alive", "Moved")
            },
            {"event": "gender", "time": ("days_to_death",)},
        ),
        "no time": ({}, {"event": "vital_status"}),
        "no key": ({"clinical": "x\ty\n1\t2\n"}, {}),
        "repeated column": (
            {"clinical": clinical.replace("days_to_diagnosis", "ajcc_pathologic_stage")},
            {},
        ),
        "reserved": ({}, {"columns": ("patient",)}),
        "take": ({}, {"take": "newest:days_to_death"}),
        "taken column": ({}, {"take": "last:visit"}),
        "nothing left": ({}, {"where": "age_at_index > 200"}),
    }


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "two projects",
            r"clinical\.tsv: no row belongs to a slide of the cohort: found patient TCGA-Q0-0000, .*, expected such as TCGA-A0-0000, .* use tables of the same project",
        ),
        (
            "no barcode",
            r"sheet\.tsv, line 2: TCGA-A0-00-DX1\.svs is no TCGA barcode: expected a name as GDC lists it",
        ),
        (
            "other patient",
            r"sheet\.tsv, line 2: TCGA-A0-0000.*: patient: found TCGA-A0-0009, expected TCGA-A0-0000, as in another table or in the barcode",
        ),
        (
            "several patients",
            r"sheet\.tsv, line 2: .* belongs to patients TCGA-A0-0000, TCGA-A0-0009: expected one",
        ),
        (
            "normal",
            r"sheet\.tsv, line 2: .* has Normal tissue in the table: expected sample type 01",
        ),
        ("md5", r"manifest\.tsv, line 3: .*: md5: found .*, expected 0000"),
        (
            "map",
            r"--map has no label for some values: found 'Stage IIA' \(1\), 'Stage IV' \(1\).*VALUE= leaves its slides out",
        ),
        ("map form", r"--map: found 'Stage I', expected VALUE=LABEL"),
        ("where", r"--where: no table has a column sample_typ: found .*tissue type"),
        ("label", r"--label: no table has a column stage_of_disease"),
        ("event", r"--event has other values: found 'Moved' \(2\), expected dead, deceased"),
        ("no time", r"--time and --event: found one of them, expected both"),
        ("no key", r"clinical\.tsv has no column of slides, samples or patients: found x, y"),
        ("repeated column", r"--label ajcc_pathologic_stage: .*clinical\.tsv has 2 such columns"),
        (
            "reserved",
            r"--columns: found patient, expected different columns, other than slide, label",
        ),
        ("take", r"--take: found newest:days_to_death, expected first:COLUMN or last:COLUMN"),
        ("taken column", r"--take: no table has a column visit"),
        ("nothing left", r"no slide is left: found condition not fulfilled 3"),
    ],
)
def test_mistakes_are_refused_with_file_row_and_value(
    tmp_path: Path, what: str, message: str
) -> None:
    gdc = make_gdc(3)
    texts, options = breakages(gdc)[what]
    texts = {
        "sheet": gdc.sample_sheet(),
        "manifest": gdc.manifest(),
        "clinical": gdc.clinical_table(),
        **texts,
    }
    if what == "no barcode":
        del texts["manifest"]
    tables = [write(tmp_path / f"{name}.tsv", text) for name, text in texts.items()]
    options = {"label": "ajcc_pathologic_stage", **options}
    with pytest.raises((UsageError, NothingToDo), match=message):
        histopipe.cohort(tables, tmp_path / "out" / "labels.csv", **options)
    assert not (tmp_path / "out" / "labels.csv").exists()


def test_without_slides_on_disk_ids_are_names(tmp_path: Path) -> None:
    gdc = make_gdc(3)
    first, name = gdc.files[0], gdc.files[0].name.removesuffix(".svs")
    other = gdc.add(
        f"{first.patient}-01Z-00-DX1",
        id=new_uuid("second"),
        name=first.name,
        content=b"another scan",
    )
    sheet = write(tmp_path / "sheet.tsv", gdc.sample_sheet())
    result = histopipe.cohort(sheet, tmp_path / "labels.csv")
    check(result)
    names = {file.name.removesuffix(".svs") for file in gdc.files[1:3]}
    assert labels_of(result).keys() == names | {f"{file.id}/{name}" for file in (first, other)}
    assert "no --label: the slides have patients and sites only" in result.warnings
    message = r"has another labels file: found labels\.csv, expected no other\.csv"
    with pytest.raises(UsageError, match=message):
        histopipe.cohort(sheet, tmp_path / "other.csv")


def test_flow_of_a_run_begins_with_the_cohort(tmp_path: Path) -> None:
    gdc = make_gdc(3)
    gdc.add("TCGA-A0-0000-01A-01-TS1")
    gdc.add("TCGA-A0-0003-01A-01-TS1")
    folder, out = gdc.write_slides(tmp_path / "slides"), tmp_path / "labels.csv"
    histopipe.cohort([write(tmp_path / "sheet.tsv", gdc.sample_sheet()), folder], out)
    ids = sorted(slide.id for slide in discover([folder]))
    frozen = [name for name in ids if "-TS1" in name]
    table = [SlideEntry(slide=name, patient=name, train=1) for name in ids if name not in frozen]
    table.append(SlideEntry(slide=frozen[0], patient=frozen[0], reason=Exclusion.NO_LABEL))
    notes: list[str] = []
    slides = with_cohort(table, str(out), notes.append)
    assert len(slides) == 5 and not notes
    reasons = {slide.slide: slide.reason for slide in slides if slide.reason}
    assert reasons == dict.fromkeys(frozen, Exclusion.OTHER_KIND)
    assert Exclusion.OTHER_KIND.step == 0 < Exclusion.INGEST_FAILED.step == 1
    out.write_text(out.read_text() + "x,,P,\n")
    assert with_cohort(table, str(out), notes.append) == table
    assert "is not as histopipe cohort wrote it" in notes[0]


@pytest.mark.parametrize("with_frozen", [False, True])
def test_samples_of_another_vial_belong_to_the_slide(tmp_path: Path, with_frozen: bool) -> None:
    gdc = make_gdc(2)
    patients = [file.patient for file in gdc.files]
    for sample in ("01A", "11A") if with_frozen else ():
        gdc.add(f"TCGA-A0-0000-{sample}-01-TS1")
    molecular = [f"{patient},{patient}-01A,{n}" for n, patient in enumerate(patients)]
    tables = [
        write(tmp_path / "sheet.tsv", gdc.sample_sheet()),
        write(tmp_path / "molecular.csv", "\n".join(["patient_id,sample_id,pam50", *molecular])),
    ]
    result = histopipe.cohort(tables, tmp_path / "labels.csv", label="pam50", slides="all")
    labels = {
        row["name"][13:16]: row["label"] for row in check(result) if row["patient"] == patients[0]
    }
    assert labels == {"01Z": "0"} | ({"01A": "0", "11A": ""} if with_frozen else {})
    assert result.labels["1"] == (1, 1)


def test_mask_in_the_folder_of_a_slide_is_no_slide(tmp_path: Path) -> None:
    gdc = make_gdc(1)
    folder, name = gdc.write_slides(tmp_path / "slides"), gdc.files[0].name
    write(folder / gdc.files[0].id / "A_mask.tif", b"mask")
    manifest = write(tmp_path / "m.txt", gdc.manifest())
    rows = check(histopipe.cohort([manifest, folder], tmp_path / "labels.csv"))
    reasons = {row["name"]: row["reason"] for row in rows}
    assert reasons == {name: "", "A_mask.tif": Exclusion.IN_NO_TABLE}


def test_patients_of_other_programs_come_from_tables(tmp_path: Path) -> None:
    gdc = Gdc()
    for n in (1, 2):
        gdc.add(f"HCM-BROD-000{n}-C25-01A-01-S1-HE", name=f"HCM-BROD-000{n}-C25.svs")
    table = write(tmp_path / "metadata.cart.json", gdc.cart())
    assert histopipe.cohort(table, tmp_path / "labels.csv", slides="all").patients == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.csv", b""),
        ("blank.csv", b"\n\n"),
        ("empty.json", b"[]"),
        ("other.json", b'{"x": 1}'),
        ("header.csv", b"slide,label\n"),
        ("repeated.csv", b"slide,Slide,label\na,b,x\n"),
        ("number.json", b"3"),
        ("surrogate.json", b'[{"file_name": "\\ud800.svs"}]'),
        ("cut.tar.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xed\xcf"),
        ("damaged.tsv.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff\xff"),
        ("archive.zip", b"PK\x03\x04 no workbook"),
        ("named.csv", b"PK\x03\x04 no workbook"),
        ("slide.svs", b"II*\x00\x08\x00\x00\x00"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(UsageError, match=re.escape(name)):
        histopipe.cohort(write(tmp_path / name, content), tmp_path / "out" / "labels.csv")
    assert not (tmp_path / "out").exists()


def test_slide_in_two_formats_is_named(tmp_path: Path) -> None:
    barcode, uid = "TCGA-A0-0001-01Z-00-DX1", "1.3.6.1.4.1.5962.99.1.2.0"
    tables: Tables = {
        "manifest.csv": f"id,filename\n{new_uuid('a')},{barcode}.{new_uuid('b')}.svs\n",
        "idc.csv": f"PatientID,SeriesInstanceUID,ContainerIdentifier\nTCGA-A0-0001,{uid},{barcode}\n",
    }
    paths = [write(tmp_path / name, content) for name, content in tables.items()]
    warnings = histopipe.cohort(paths, tmp_path / "labels.csv").warnings
    assert f"1 barcode with several slides: {barcode}" in "\n".join(warnings)


@pytest.mark.parametrize(
    ("options", "events"),
    [
        ({"event": "status=Progressed"}, {"a": "1", "b": "0", "c": "1"}),
        ({"censored": "cens"}, {"a": "0", "b": "1", "c": "0"}),
        ({"event": "cens=1"}, {"a": "1", "b": "0", "c": "1"}),
    ],
)
def test_event_of_a_value_and_of_censoring(
    tmp_path: Path, options: dict[str, str], events: dict[str, str]
) -> None:
    slides = [f"{name}.svs" for name in "abc"]
    table = "slide,status,cens,time\na,progressed,1,5\nb,stable,0,3\nc,Progressed,true,4\n"
    result = cohort_of(tmp_path, {"t.csv": table}, slides, time=("time",), **options)
    cells = labels_of(result, "event")
    assert {name.removesuffix(".svs"): each[0] for name, each in cells.items()} == events
    # Survival needs no label.
    assert not any("no --label" in text for text in result.warnings)
    recorded = json.loads((tmp_path / "cohort.json").read_text())["options"]
    assert {name: recorded[name] for name in options} == options


def test_words_of_a_status_are_not_inverted(tmp_path: Path) -> None:
    """`dead` is an event also where 1 would be none."""
    table = "slide,status,time\na,dead,5\nb,alive,3\nc,censored,2\nd,1,1\n"
    message = r"--event has other values: found 'dead' \(1\), 'alive' \(1\), 'censored' \(1\)"
    with pytest.raises(UsageError, match=message):
        cohort_of(
            tmp_path,
            {"t.csv": table},
            [f"{name}.svs" for name in "abcd"],
            censored="status",
            time=("time",),
        )


@pytest.mark.parametrize(
    ("event", "cells", "events", "remark"),
    [
        ("2", ("2.0", "1", "1.0"), "100", "no event, since not 2: '1' (1), '1.0' (1)"),
        ("DECEASED", ("1:DECEASED", "0:LIVING", "0:LIVING"), "100", "not DECEASED: '0:LIVING' (2)"),
        ("1", ("1:DECEASED", "0:LIVING", "1"), "101", ""),
    ],
)
def test_values_of_events_are_numbers_and_words(
    tmp_path: Path, event: str, cells: tuple[str, ...], events: str, remark: str
) -> None:
    rows = [f"{name},{cell},5" for name, cell in zip("abc", cells, strict=True)]
    table = "\n".join(["slide,status,time", *rows])
    slides = [f"{name}.svs" for name in "abc"]
    result = cohort_of(tmp_path, {"t.csv": table}, slides, event=f"status={event}", time=("time",))
    of_slides = labels_of(result, "event")
    assert "".join(of_slides[name][0] for name in sorted(of_slides)) == events
    recorded = json.loads((tmp_path / "cohort.json").read_text())["result"]["warnings"]
    for warnings in (result.warnings, recorded):
        assert any(remark in text for text in warnings) or not remark


def test_event_values_that_no_slide_has_are_refused(tmp_path: Path) -> None:
    table = "slide,status,time\na,x,5\nb,y,3\n"
    with pytest.raises(UsageError, match=r"--event has no such value: found 'x' \(1\), 'y' \(1\)"):
        cohort_of(tmp_path, {"t.csv": table}, ["a.svs", "b.svs"], event="status=z", time=("time",))
