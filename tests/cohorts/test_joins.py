"""Joins of tables with slides, compared with joins by exactly equal names."""

from __future__ import annotations

import json
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.examples import examples
from helpers.trainings import csv_rows
from histopipe.errors import UsageError

NAMES = [
    *("p1", "P1", "p1.svs", "a/p1", "b/p1", "p1.1", "p1.2", "1", "01", "1.0", "p 1", "p_1", "p-1"),
    *("Doe, J", "Doe, K", "TCGA-A1-A0SB", "Müller", "MÜLLER", "é1", "É1", "1E5"),
]
"""Patients whose names are alike if they are taken for names of files, numbers or barcodes."""


def joined(folder: Path, slides: dict[str, str], clinical: dict[str, str]) -> dict[str, str]:
    """Return the labels of slides by the patients in one table, and the grades of patients in another one."""
    (folder / "slides").mkdir(exist_ok=True)
    for slide in slides:
        (folder / "slides" / f"{slide}.svs").write_text(slide)
    lists = [f'{slide},"{patient}"' for slide, patient in slides.items()]
    grades = [f'"{patient}",{grade}' for patient, grade in clinical.items()]
    (folder / "slides.csv").write_text("\n".join(["slide_id,patient", *lists]))
    (folder / "clinical.csv").write_text("\n".join(["patient,grade", *grades]))
    tables = [folder / "slides.csv", folder / "clinical.csv", folder / "slides"]
    result = histopipe.cohort(tables, folder / "labels.csv", label="grade")
    return {row["slide"]: row["label"] for row in csv_rows(Path(result.out))}


@examples(300)
@given(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True),
    st.sampled_from(["NFC", "NFD"]),
)
def test_patients_get_their_own_rows(patients: list[str], form: Any) -> None:
    slides = {f"s{number}": patient for number, patient in enumerate(patients)}
    clinical = {unicodedata.normalize(form, name): f"g {name[::-1]}" for name in patients}
    clinical = {name: grade.replace(",", ";").replace("/", ":") for name, grade in clinical.items()}
    with tempfile.TemporaryDirectory() as folder:
        labels = joined(Path(folder), slides, clinical)
    expected = {s: clinical[unicodedata.normalize(form, name)] for s, name in slides.items()}
    assert labels == {s: unicodedata.normalize("NFC", grade) for s, grade in expected.items()}


@pytest.mark.parametrize(
    ("patients", "clinical", "expected"),
    [
        (["pa", "q"], {"PA": "x", "q": "y"}, {"s0": "x", "s1": "y"}),
        (["pa", "PA"], {"Pa": "x"}, r"patient 'Pa': found 'PA' and 'pa' of the slides"),
        (["pa", "PA"], {"PA": "x"}, r"patient 'PA': found 'PA' and 'pa' of the slides"),
        (["pa"], {"Pa": "x", "PA": "y"}, r"patient 'Pa' and 'PA': found 'pa' of the slides"),
        (["p1.svs", "p1"], {"p1": "x"}, {"s1": "x"}),
        (["001", "002"], {"1": "x", "002": "y"}, {"s0": "x", "s1": "y"}),
        (["01", "1"], {"1": "x"}, r"patient '1': found '01' and '1' of the slides"),
        (["Doe, J", "q"], {"Doe": "x", "J": "y", "q": "z"}, {"s1": "z"}),
        # Case does not matter in barcodes of TCGA.
        (["TCGA-A1-A0SB", "tcga-a1-a0sb"], {"tcga-a1-a0sb": "x"}, {"s0": "x", "s1": "x"}),
        (
            ["TCGA-A1-A0SB"],
            {"TCGA-A1-A0SB": "x", "tcga-a1-a0sb": "y"},
            "several values for patient",
        ),
    ],
)
def test_other_spellings_are_the_only_ones_or_refused(
    patients: list[str], clinical: dict[str, str], expected: dict[str, str] | str, tmp_path: Path
) -> None:
    slides = {f"s{number}": patient for number, patient in enumerate(patients)}
    if isinstance(expected, dict):
        assert joined(tmp_path, slides, clinical) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            joined(tmp_path, slides, clinical)


@pytest.mark.parametrize(
    ("listed", "slides", "expected"),
    [
        (["aB3x", "AB3X"], ["aB3x", "AB3X"], ["g0", "g1"]),
        (["P1/HE.svs", "P2/HE.svs"], ["P1/HE", "P2/HE"], ["g0", "g1"]),
        (["aB3x"], ["AB3X"], ["g0"]),
        (["ab3x", "aB3X"], ["AB3X"], "may be several files: found ab3x, aB3X|aB3X, ab3x"),
        (["P1/HE.svs", "P2/HE.svs"], ["HE"], "may be several files: found P1/HE, P2/HE"),
        (["C/HE.svs", "A/HE.svs"], ["A/HE", "B/HE"], {"A/HE": "g1"}),
        (["C/HE.svs"], ["B/HE"], {"B/HE": "g0"}),
        (["B/HE.svs"], ["A/HE", "B/HE"], {"B/HE": "g0"}),
        (
            ["HE.svs"],
            ["A/HE", "B/HE"],
            "HE.svs of a table may be several slides: found A/HE and B/HE",
        ),
        (["HE.svs"], ["HE", "B/HE"], {"HE": "g0"}),
        (["x.svs", "x.tif"], ["x"], {"x": "g0"}),
        (["x.tif", "x.svs"], ["x"], {"x": "g1"}),
    ],
)
def test_files_get_their_own_rows(
    listed: list[str],
    slides: list[str],
    expected: list[str] | dict[str, str] | str,
    tmp_path: Path,
) -> None:
    for slide in slides:
        (tmp_path / "slides" / slide).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "slides" / f"{slide}.svs").write_text(slide)
    rows = [f"{name},g{number},p{number}" for number, name in enumerate(listed)]
    (tmp_path / "t.csv").write_text("\n".join(["file_name,label,patient", *rows]))
    arguments = [tmp_path / "t.csv", tmp_path / "slides"], tmp_path / "labels.csv"
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            histopipe.cohort(*arguments, label="label")
    else:
        result = histopipe.cohort(*arguments, label="label")
        labels = {row["slide"]: row["label"] for row in csv_rows(Path(result.out))}
        if isinstance(expected, list):
            expected = dict(zip(slides, expected, strict=True))
        assert labels == expected


def test_files_with_two_suffixes_are_two(tmp_path: Path) -> None:
    """Each has its own patient, also in a second table; exact names come before others in case."""
    (tmp_path / "slides").mkdir()
    for name in ("x.svs", "x.tif", "y.svs", "Y.svs"):
        (tmp_path / "slides" / name).write_text(name)
    cells = {"x.svs": "A", "x.tif": "B", "y.svs": "C", "Y.svs": "D"}
    rows = [f"{name},p{grade},{grade}" for name, grade in cells.items()]
    (tmp_path / "s.csv").write_text("\n".join(["slide,patient,grade", *rows]))
    (tmp_path / "c.csv").write_text("slide,stage\ny,III\nY,IV\n")
    tables = [tmp_path / "s.csv", tmp_path / "c.csv", tmp_path / "slides"]
    result = histopipe.cohort(tables, tmp_path / "l.csv", label="grade", columns=("stage",))
    labels = {row["slide"]: (row["label"], row["stage"]) for row in csv_rows(Path(result.out))}
    assert labels == {
        "x.svs": ("A", ""),
        "x.tif": ("B", ""),
        "y": ("C", "III"),
        "Y": ("D", "IV"),
    }


def test_dates_as_patients_are_named(tmp_path: Path) -> None:
    joined(tmp_path, {"s0": "2-Jan", "s1": "3-Jan-24"}, {"2-Jan": "x", "3-Jan-24": "y"})
    warnings = json.loads((tmp_path / "cohort.json").read_text())["result"]["warnings"]
    assert any("'2-Jan', '3-Jan-24': dates, into which" in text for text in warnings)
