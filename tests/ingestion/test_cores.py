"""Test cores of tissue microarrays as entries of a store: from the grid to patches, labels, patients and splits."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shapely
from click.testing import CliRunner
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from helpers.inline import run_tasks_here
from helpers.microarrays import Array
from helpers.viewed import Notes
from histopipe.cli import histopipe
from histopipe.errors import ExitCode, NothingToDo, UsageError
from histopipe.exporting.masks import tissue
from histopipe.ingestion.ingest import ingest
from histopipe.ingestion.ingest_report import IngestReport
from histopipe.measure.annotate import annotate
from histopipe.measure.staining import stains
from histopipe.reports.heatmap import heatmap
from histopipe.slides.discovery import discover
from histopipe.slides.slide_files import open_slide
from histopipe.slides.staging import StagingArea
from histopipe.splits.labelling import Labelling
from histopipe.splits.splitting import make_splits
from histopipe.store.record import SlideState
from histopipe.store.store import Store
from histopipe.system.output import Progress
from histopipe.tiling.core_files import core_region, read_cores, write_cores
from histopipe.tiling.core_grid import Core

ARRAY = Array(rows=3, columns=4, radius=100, spacing=(280, 260), rotation=5, holes=((0, 0), (0, 1)))
TILING = {"mpp": 2.0, "patch_size": 48, "workers": 1, "progress": Progress()}
PATIENTS = {
    "A-3": "1",
    "A-4": "2",
    "B-1": "1",
    "B-2": "3",
    "B-3": "4",
    "B-4": "2",
    "C-1": "5",
    "C-2": "6",
}
"""Patients of the cores with a row in the labels file."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw an array with its map and labels, and find its cores."""
    folder = tmp_path_factory.mktemp("cores")
    (folder / "slides").mkdir()
    ARRAY.write(folder / "slides" / "tma1.tif")
    ARRAY.write_map(folder / "map.csv")
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("slide", "label", "patient", "site"),
                *((f"tma1/{core}", "ab"[int(p) % 2], p, "s1") for core, p in PATIENTS.items()),
            ]
        )
    with pytest.MonkeyPatch.context() as patch:
        run_tasks_here(folder, patch)
        options: dict[str, Any] = {"cores": folder / "map.csv", "progress": Progress()}
        report = tissue(folder / "slides", folder / "cores", **options)
    assert report.cores == {"tma1": {"core": 10, "uncertain": 0, "missing": 0}}
    return folder


@pytest.fixture
def folder(drawn: Path, tmp_path: Path) -> Path:
    """Copy the grid, to change it."""
    (tmp_path / "cores").mkdir()
    (tmp_path / "cores" / "tma1.geojson").write_bytes((drawn / "cores/tma1.geojson").read_bytes())
    return tmp_path


def run(drawn: Path, folder: Path, **settings: object) -> IngestReport:
    """Ingest the cores."""
    values = {"labels": drawn / "labels.csv", "cores": folder / "cores", **TILING, **settings}
    return ingest(drawn / "slides", folder / "a.lmdb", **values)  # type: ignore[arg-type]


@pytest.mark.usefixtures("inline_workers")
def test_cores_are_entries(drawn: Path, folder: Path) -> None:
    messages = Notes()
    report = run(drawn, folder, progress=messages)
    assert report.exit_code is ExitCode.DONE
    cores = {core.name: core for core in read_cores(folder / "cores" / "tma1.geojson")}
    with Store(folder / "a.lmdb") as store, open_slide(drawn / "slides" / "tma1.tif") as slide:
        records = {record.id: record for record in store.complete.values()}
        assert {n: r.patient for n, r in records.items()} == {
            f"tma1/{core}": patient for core, patient in PATIENTS.items()
        }
        assert len({record.pixel_hash for record in records.values()}) == len(records)
        for number, record in store.complete.items():
            core = cores[record.id.partition("/")[2]]
            assert record.bounds == core_region(core).to_list()
            assert record.scan == [0, 0, ARRAY.size.width, ARRAY.size.height]
            assert (record.label, record.site) == ("ab"[int(str(record.patient)) % 2], "s1")
            assert record.quickhash is record.tile_hash is None
            index = store.index(number)
            assert len(index["x_l0"]) > 4
            side = int(record.side_l0)
            for row, (x, y) in enumerate(zip(index["x_l0"], index["y_l0"], strict=True)):
                cell = shapely.box(x, y, x + side, y + side)
                assert core.area.intersection(cell).area >= 0.45 * cell.area
                pixels = slide.read_region(
                    type(slide.info.bounds.origin)(int(x), int(y)),
                    0,
                    type(slide.info.size)(side, side),
                )
                difference = store.read(record.id, row).astype(int) - pixels
                assert abs(difference).mean() < 4  # of JPEG
        splits = make_splits([store], split_by="patient", seed=1, labelling=Labelling())
        subsets: dict[str, set[int]] = {}
        for each in splits.slides:
            subsets.setdefault(each.patient, set()).update(each.subsets.tolist())
        assert all(len(of_patient) == 1 for of_patient in subsets.values())
    # Cores without a row are left out with the reason, and the same command does nothing.
    assert any(
        "2 cores without a row in the labels file left out: tma1/C-3, tma1/C-4" in t
        for t in messages.messages
    )
    assert {slide.status.value for slide in run(drawn, folder).slides} == {"skipped"}


@pytest.mark.long(reason="draws a slide")
@pytest.mark.usefixtures("inline_workers")
def test_a_scanned_area_that_does_not_begin_at_the_corner(tmp_path: Path) -> None:
    slides = tmp_path / "slides"
    slides.mkdir()
    ARRAY.write(slides / "tma1.scn", bounds=(700, 300, 4000, 4000))
    ARRAY.write_map(tmp_path / "map.csv")
    options = {"workers": 1, "progress": Progress()}
    tissue(slides, tmp_path / "cores", cores=tmp_path / "map.csv", **options)  # type: ignore[arg-type]
    cores = {core.name: core for core in read_cores(tmp_path / "cores" / "tma1.geojson")}
    for name, place in ARRAY.places().items():  # as QuPath counts
        assert cores[name].area.centroid.distance(shapely.Point(place)) < 20
    ingest(slides, tmp_path / "a.lmdb", cores=tmp_path / "cores", **TILING)  # type: ignore[arg-type]
    stains(tmp_path / "a.lmdb", amounts=True, progress=Progress())
    heatmap(
        tmp_path / "a.lmdb",
        out=tmp_path / "heat",
        show="eosin",
        slide=["tma1/B-2"],
        formats=["geojson"],
        progress=Progress(),
    )
    with Store(tmp_path / "a.lmdb") as store:
        record = store.records[store.number("tma1/B-2")]
        left, top = record.scan[:2]
        assert (left, top) == (700, 300)
        region = core_region(cores["B-2"]).to_list()
        assert record.bounds == [region[0] + left, region[1] + top, *region[2:]]
    features = json.loads((tmp_path / "heat" / "tma1" / "B-2.heat.geojson").read_text())["features"]
    for feature in features:
        cell = shapely.geometry.shape(feature["geometry"])
        assert cores["B-2"].area.intersection(cell).area > 0.4 * cell.area


@pytest.mark.usefixtures("inline_workers")
def test_neighbours_are_cut(drawn: Path, folder: Path) -> None:
    path = folder / "cores" / "tma1.geojson"
    cores = read_cores(path)
    wide = replace(cores[0], area=cores[0].area.buffer(40))
    half = replace(cores[5], area=cores[5].area & shapely.box(0, 0, cores[5].area.centroid.x, 9999))
    write_cores(path, [wide, *cores[3:5], half])
    report = run(drawn, folder, labels=None, tissue="none", tissue_threshold=0.99)
    assert report.exit_code is ExitCode.DONE
    with Store(folder / "a.lmdb") as store:
        number = store.number(f"tma1/{half.name}")
        index, side = store.index(number), store.records[number].side_l0
        assert (index["x_l0"] + side <= half.area.bounds[2] + 8).all()


@pytest.mark.usefixtures("inline_workers")
def test_uncertain_and_missing_cores(drawn: Path, folder: Path) -> None:
    path = folder / "cores" / "tma1.geojson"
    cores = read_cores(path)
    write_cores(
        path,
        [
            replace(cores[0], state="uncertain", why="torn"),
            replace(cores[1], state="missing"),
            *cores[2:-1],
            replace(cores[-1], name="", state="uncertain"),
        ],
    )
    messages = Notes()
    report = run(drawn, folder, progress=messages)
    assert report.exit_code is ExitCode.PARTLY
    with Store(folder / "a.lmdb") as store:
        failed = {r.id: r.error for r in store.slides if r.state is SlideState.FAILED}
        assert set(failed) == {f"tma1/{cores[0].name}"}
        assert "its name is uncertain (torn)" in str(failed)
        assert f"tma1/{cores[1].name}" not in {record.id for record in store.slides}
    assert any("1 piece of tissue without a name left out" in text for text in messages.messages)
    # The corrected grid is taken without further options.
    write_cores(path, [cores[0], replace(cores[1], state="missing"), *cores[2:]])
    assert run(drawn, folder).exit_code is ExitCode.DONE


@pytest.mark.usefixtures("inline_workers")
def test_a_slide_with_uncertain_names_only_fails(drawn: Path, folder: Path) -> None:
    path = folder / "cores" / "tma1.geojson"
    cores = read_cores(path)
    write_cores(path, [replace(core, state="uncertain", why="turned") for core in cores])
    report = run(drawn, folder, labels=None)
    (slide,) = report.slides
    assert (slide.id, slide.status.value) == ("tma1", "failed")
    assert "no core with a certain name" in slide.reason
    write_cores(path, [cores[0], replace(cores[1], name=cores[0].name)])
    assert "for several cores" in run(drawn, folder, labels=None).slides[0].reason


@pytest.mark.usefixtures("inline_workers")
def test_corrected_names_are_noticed(drawn: Path, folder: Path) -> None:
    run(drawn, folder)
    path = folder / "cores" / "tma1.geojson"
    cores = read_cores(path)
    first, second, third, *rest = cores
    write_cores(
        path,
        [
            replace(first, name=second.name),
            replace(second, name=first.name),
            replace(third, name="B-9"),
            *rest,
        ],
    )
    messages = Notes()
    report = run(drawn, folder, progress=messages)
    reasons = {slide.id: slide.reason for slide in report.slides if slide.status.value == "failed"}
    assert set(reasons) == {f"tma1/{first.name}", f"tma1/{second.name}"}
    assert all("has another region" in reason for reason in reasons.values())
    assert any(
        f"not in the grids any more, perhaps with wrong names: tma1/{third.name}" in t
        for t in messages.messages
    )
    assert run(drawn, folder, force=True).exit_code is ExitCode.DONE
    with Store(folder / "a.lmdb") as store:
        record = store.records[store.number(f"tma1/{first.name}")]
        assert record.bounds == core_region(second).to_list()


@pytest.mark.usefixtures("inline_workers")
def test_a_name_that_became_uncertain_is_not_kept(drawn: Path, folder: Path) -> None:
    run(drawn, folder)
    path = folder / "cores" / "tma1.geojson"
    first, *rest = read_cores(path)
    write_cores(path, [replace(first, state="uncertain"), *rest])
    report = run(drawn, folder)
    failed = {slide.id: slide.reason for slide in report.slides if slide.status.value == "failed"}
    assert set(failed) == {f"tma1/{first.name}"}
    assert "an uncertain name" in failed[f"tma1/{first.name}"]
    run(drawn, folder, force=True)
    with Store(folder / "a.lmdb") as store:
        assert f"tma1/{first.name}" not in store.numbers
    write_cores(path, [replace(core, state="uncertain") for core in (first, *rest)])
    notes = Notes()
    run(drawn, folder, progress=notes)
    assert any("of the store not in the grids any more" in text for text in notes.messages)


@pytest.mark.usefixtures("inline_workers")
def test_one_slide_without_names_does_not_stop_the_others(drawn: Path, folder: Path) -> None:
    slides = folder / "slides"
    slides.mkdir()
    for name in ("tma1", "tma2"):
        (slides / f"{name}.tif").write_bytes((drawn / "slides" / "tma1.tif").read_bytes())
    labels = (drawn / "labels.csv").read_text()
    (folder / "labels.csv").write_text(labels + labels.partition("\n")[2].replace("tma1", "tma2"))
    options: dict[str, Any] = {"cores": folder / "cores", "labels": folder / "labels.csv", **TILING}
    report = ingest(slides, folder / "a.lmdb", **options)
    assert {s.id for s in report.slides if s.status.value == "failed"} == {"tma2"}
    assert sum(s.status.value == "complete" for s in report.slides) == len(PATIENTS)


@pytest.mark.usefixtures("inline_workers")
def test_a_slide_is_in_a_store_as_a_whole_or_in_cores(drawn: Path, folder: Path) -> None:
    run(drawn, folder)
    with pytest.raises(UsageError, match="tma1: in the store in cores"):
        run(drawn, folder, cores=None, labels=None)
    ingest(drawn / "slides", folder / "b.lmdb", **TILING)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tma1: in the store as a whole"):
        ingest(drawn / "slides", folder / "b.lmdb", cores=folder / "cores", **TILING)  # type: ignore[arg-type]


@pytest.mark.usefixtures("inline_workers")
def test_cases_of_a_map_follow_the_names(drawn: Path, folder: Path) -> None:
    (folder / "cases.csv").write_text(",,p1,p1\np2,p2,p3,p3\np4,p4,p5,p5\n")
    notes = Notes()
    tissue(
        drawn / "slides", folder / "named", cores=folder / "cases.csv", workers=1, progress=notes
    )
    assert any("they are cases" in text for text in notes.messages)
    path = folder / "named" / "tma1.geojson"
    first, second, *rest = read_cores(path)
    assert [(core.name, core.case) for core in (first, second, rest[0])] == [
        ("A-3", "p1"),
        ("A-4", "p1"),
        ("B-1", "p2"),
    ]
    write = json.loads(path.read_text())
    for feature in write["features"]:  # as the page and QuPath do: only names are changed
        swap = {"A-3": "B-1", "B-1": "A-3"}
        feature["properties"]["name"] = swap.get(
            feature["properties"]["name"], feature["properties"]["name"]
        )
    path.write_text(json.dumps(write))
    run(drawn, folder, cores=folder / "named", labels=None)
    with Store(folder / "a.lmdb") as store:
        patients = {record.id: record.patient for record in store.complete.values()}
    assert (patients["tma1/A-3"], patients["tma1/B-1"], patients["tma1/C-4"]) == ("p1", "p2", "p5")


@pytest.mark.usefixtures("inline_workers")
def test_annotations_of_the_slide_label_its_cores(drawn: Path, folder: Path) -> None:
    cores = {core.name: core for core in read_cores(folder / "cores" / "tma1.geojson")}
    (folder / "annotations").mkdir()
    feature = {
        "type": "Feature",
        "geometry": shapely.geometry.mapping(cores["B-2"].area),
        "properties": {"classification": {"name": "tumour"}},
    }
    (folder / "annotations" / "tma1.geojson").write_text(json.dumps(feature))
    run(drawn, folder, annotations=folder / "annotations")
    with Store(folder / "a.lmdb") as store:
        labelled = {r.id: r.patch_labels.get("tumour", 0) for r in store.complete.values()}
        assert labelled["tma1/B-2"] == store.records[store.number("tma1/B-2")].planned
        assert sum(labelled.values()) == labelled["tma1/B-2"]
    result = annotate(
        folder / "a.lmdb",
        folder / "annotations",
        annotation_threshold=0.4,
        workers=1,
        progress=Progress(),
    )
    assert (result.exit_code, result.without) == (ExitCode.DONE, [])


@pytest.mark.usefixtures("inline_workers")
def test_copies_of_a_slide_stay_together(drawn: Path, folder: Path) -> None:
    slides = folder / "slides"
    slides.mkdir()
    for name in ("tma1", "tma2"):
        (slides / f"{name}.tif").write_bytes((drawn / "slides" / "tma1.tif").read_bytes())
        (folder / "cores" / f"{name}.geojson").write_bytes(
            (drawn / "cores/tma1.geojson").read_bytes()
        )
    report = ingest(slides, folder / "a.lmdb", cores=folder / "cores", **TILING)  # type: ignore[arg-type]
    assert sum("are copies of one slide" in text for text in report.warnings) == len(
        read_cores(folder / "cores/tma1.geojson")
    )


@pytest.mark.usefixtures("inline_workers")
def test_a_slide_without_a_grid_fails(drawn: Path, folder: Path) -> None:
    (folder / "cores" / "tma1.geojson").rename(folder / "cores" / "other.geojson")
    with pytest.raises(UsageError, match="no annotation file has the name of a slide"):
        run(drawn, folder)


def test_cores_of_a_file_are_staged_once(drawn: Path, folder: Path) -> None:
    copied = list[int]()
    cores = read_cores(folder / "cores" / "tma1.geojson")[:3]
    path = drawn / "slides" / "tma1.tif"
    (slide,) = discover([path])
    with StagingArea(folder / "stage", 10**9, copied.append) as stage:
        futures = [
            stage.start(replace(slide, id=f"tma1/{core.name}", core=core_region(core)))
            for core in cores
        ]
        copies = [future.result() for future in futures if future is not None]
        assert sum(copied) == path.stat().st_size
        assert {copy.id for copy in copies} == {f"tma1/{core.name}" for core in cores}
        assert [copy.core for copy in copies] == [core_region(core) for core in cores]
        (copied_path,) = {copy.path for copy in copies}
        for _ in copies[1:]:
            stage.release(copied_path.parent)
            assert copied_path.stat().st_size == path.stat().st_size
        stage.release(copied_path.parent)
        assert not copied_path.exists()


@pytest.mark.usefixtures("inline_workers")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cores": "missing.csv"}, "missing"),
        ({"cores": "map.csv", "part": "1/2"}, "--part with --cores"),
    ],
)
def test_wrong_options(drawn: Path, tmp_path: Path, options: dict[str, str], message: str) -> None:
    values = {**options, "cores": drawn / options["cores"]}
    with pytest.raises(UsageError, match=message):
        tissue(drawn / "slides", tmp_path / "out", progress=Progress(), **values)
    with pytest.raises(NothingToDo):
        tissue(drawn / "cores", tmp_path / "out", cores=drawn / "map.csv", progress=Progress())


@pytest.mark.usefixtures("inline_workers")
def test_a_corrected_grid_is_kept(drawn: Path, folder: Path) -> None:
    path = folder / "cores" / "tma1.geojson"
    first, *rest = read_cores(path)
    write_cores(path, [replace(first, name="X"), *rest])
    command = [
        "tissue",
        str(drawn / "slides"),
        "--cores",
        str(drawn / "map.csv"),
        "--out",
        str(path.parent),
    ]
    assert CliRunner().invoke(histopipe, command).exit_code == 0
    assert "X" in {core.name for core in read_cores(path)}
    assert CliRunner().invoke(histopipe, [*command, "--force"]).exit_code == 0
    assert "X" not in {core.name for core in read_cores(path)}
    assert "tma1/A-3" in (path.parent / "cores.csv").read_text()


def test_the_page_corrects_names(drawn: Path, folder: Path, browser: webdriver.Chrome) -> None:
    page = folder / "cores" / "tma1.html"
    page.write_bytes((drawn / "cores" / "tma1.html").read_bytes())
    browser.get(page.as_uri())
    assert "10 named" in browser.find_element(By.ID, "counts").text

    def saved() -> list[Core]:
        """Return what the page would save."""
        text = browser.execute_script(
            "let saved; URL.createObjectURL = blob => { saved = blob; return '#'; };"
            "document.getElementById('save').click(); return saved ? saved.text() : null"
        )
        path = folder / "saved.geojson"
        path.write_text(text)
        assert json.loads(text)["histopipe-cases"] == {}
        return read_cores(path)

    before = read_cores(folder / "cores" / "tma1.geojson")
    assert [(c.name, c.state, c.row, c.column) for c in saved()] == [
        (c.name, c.state, c.row, c.column) for c in before
    ]
    Select(browser.find_element(By.ID, "turn")).select_by_visible_text("turned by 180°")
    turned = {(c.row, c.column): (c.name, c.state) for c in saved()}
    assert turned[0, 2] == ("C-2", "uncertain")
    assert turned[2, 3][0] == ""  # empty in the map
    browser.find_element(By.ID, "confirm").click()
    assert {c.state for c in saved() if c.name} == {"core"}
    for _ in range(2):
        browser.find_element(By.ID, "undo").click()
    assert [(c.name, c.state) for c in saved()] == [(c.name, c.state) for c in before]
    # Two cores of one name are not saved.
    browser.execute_script("choose(3)")
    browser.find_element(By.ID, "name").clear()
    browser.find_element(By.ID, "name").send_keys(before[0].name, Keys.ENTER)
    browser.find_element(By.ID, "save").click()
    assert (
        f"give each core one name, without /: {before[0].name}"
        in browser.find_element(By.ID, "saved").text
    )
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("inline_workers")
def test_labels_of_no_core_ingest_no_core(drawn: Path, folder: Path) -> None:
    (folder / "labels.csv").write_text("slide,label\nother/A-3,a\n")
    notes = Notes()
    report = run(drawn, folder, labels=folder / "labels.csv", progress=notes)
    assert not report.slides
    assert any("10 cores without a row in the labels file left out" in t for t in notes.messages)
