"""Test tissue: the algorithms on slides that are hard, masks as files, and the network of a user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tissue_scenes import CONDITIONS, scene

import histopipe
from helpers.commands import with_tensorflow
from helpers.inline import run_tasks_here
from helpers.slides import make_slides
from helpers.tissue_files import box, feature, make_network, read_mask
from histopipe.errors import ExitCode, MaskUnfit, SlideUnreadable, UsageError
from histopipe.geometry import Mpp, PointL0, RegionL0, Size
from histopipe.ingestion.planning import plan_slide
from histopipe.ingestion.request import read_request, read_tissue
from histopipe.ingestion.slide_job import SlidePlan
from histopipe.slides.openslide_reader import OpenSlideReader
from histopipe.slides.slide_files import SlideNames, open_slide
from histopipe.slides.thumbnail import read_thumbnail
from histopipe.store.store import Store
from histopipe.system.output import Progress
from histopipe.tiling.algorithms import FINDERS
from histopipe.tiling.mask import Components, Grid, TissueMask
from histopipe.tiling.mask_files import (
    TissueReport,
    identify_mask_file,
    write_mask,
)
from histopipe.tiling.network import find_by_network, load_network, read_segmenter
from histopipe.tiling.spec import TilingSpec, resolved_tissue, spec_of_store

otsu1, otsu2, otsu3 = (FINDERS[name] for name in ("otsu-1", "otsu-2", "otsu-3"))
SILENT = Progress()
pytestmark = pytest.mark.usefixtures("inline_workers")
Cells = dict[tuple[int, int], float]


def overlap(mask: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> float:
    """Return intersection over union; of a blank slide, the share that is not in the mask."""
    if not truth.any():
        return 1 - float(mask.mean())
    return float((mask & truth).sum() / (mask | truth).sum())


@pytest.mark.parametrize(
    ("condition", "seed"),
    [
        *((condition, 0) for condition in CONDITIONS),
        *(
            pytest.param(condition, 2, marks=pytest.mark.nightly(reason="other pictures"))
            for condition in CONDITIONS
            if not condition.startswith(("full", "blank "))
        ),
    ],
)
def test_newest_algorithm_finds_tissue_that_is_hard_to_find(condition: str, seed: int) -> None:
    """Purple ink, which seed 1 would draw, has the colour of tissue."""
    picture, truth = scene(condition, seed)
    mask = otsu3(picture, Mpp(8.0)).pixels
    score = overlap(mask, truth)
    assert score > 0.95
    assert score > overlap(otsu1(picture, Mpp(8.0)).pixels, truth) - 0.01
    if not condition.startswith("full"):  # there is glass: nothing has changed
        assert (mask == otsu2(picture, Mpp(8.0)).pixels).all()


@pytest.mark.parametrize("shape", [(2, 3), (30, 40), (100, 150)])
@pytest.mark.parametrize(
    "colour", [(255, 255, 255), (244, 244, 244), (245, 222, 240), (240, 232, 205), (130, 122, 126)]
)
def test_empty_glass_has_no_tissue(shape: tuple[int, int], colour: tuple[int, int, int]) -> None:
    """White, tinted pink, tinted yellow, and dark glass, with the noise of a camera and a mark of a pen."""
    noise = np.random.default_rng(0).normal(0, 2, (*shape, 3))
    picture = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
    picture[10:14, 5:30] = (20, 60, 150)
    mask = otsu3(picture, Mpp(8.0))
    assert not mask.pixels.any() and not mask.notes


@pytest.mark.parametrize("shape", [(40, 60), (300, 300)])
def test_region_full_of_tissue_is_tissue(shape: tuple[int, int]) -> None:
    """Also an even one, and one with white holes; black around a core is not tissue."""
    rng = np.random.default_rng(0)
    picture = (np.array((95, 60, 145)) + rng.normal(0, 3, (*shape, 3))).clip(0, 255)
    picture[3::12, 3::12] = picture[4::12, 3::12] = 245
    whole = otsu3(picture.astype(np.uint8), Mpp(8.0))
    assert whole.pixels.all() and whole.notes == ("no glass found: all of it counts as tissue",)
    picture[:, -15:] = 0
    cut = otsu3(picture.astype(np.uint8), Mpp(8.0)).pixels
    assert cut[:, :-15].all() and not cut[:, -15:].any()


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12))
def test_components_are_measured_pixel_by_pixel(seed: int, height: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((height, width)) < rng.random()
    parts, values = Components(mask), rng.random((height, width))
    count, labels = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    chosen = rng.random(count) < 0.5
    assert parts.areas.tolist() == [0, *(np.sum(labels == n) for n in range(1, count))]
    means = [0.0, *(values[labels == n].mean() for n in range(1, count))]
    assert parts.means(values) == pytest.approx(means)
    assert (parts.pixels_of(chosen) == (chosen[labels] & mask)).all()


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (1, 50), (3, 2)])
def test_tiny_thumbnails_are_possible(shape: tuple[int, int]) -> None:
    for value in (0, 128, 255):
        for find in (otsu2, otsu3):
            assert find(np.full((*shape, 3), value, np.uint8), Mpp(8.0)).pixels.shape == shape


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 30), st.floats(1, 70))
def test_outlines_of_masks_are_exact(seed: int, height: int, width: int, side: float) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((height, width)) < rng.random()
    x, y = rng.uniform(0, 1000, 2)
    grid = Grid(float(x), float(y), side, Size(width, height), Size(5000, 5000))
    outlines = grid.outlines(mask)
    assert all(outline.is_valid for outline in outlines)
    assert sum(outline.area for outline in outlines) == pytest.approx(mask.sum() * side**2)
    assert (grid.covered(outlines) == mask).all()
    assert Grid.from_text(grid.to_text()) == grid


@given(st.integers(0, 2**32 - 1))
def test_pixels_with_their_centre_in_a_polygon_are_covered(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = shapely.MultiPoint(rng.uniform(-5, 25, (6, 2))).convex_hull
    grid = Grid(0, 0, 2.0, Size(10, 8), Size(20, 16))
    area = drawn - shapely.affinity.scale(drawn, 0.4, 0.4)
    for (row, column), value in np.ndenumerate(grid.covered([area])):
        centre = shapely.Point(2 * column + 1, 2 * row + 1)
        if shapely.distance(area.boundary, centre) > 1e-4:
            assert value == area.contains(centre)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slides: one of them is placed in a larger area."""
    folder = tmp_path_factory.mktemp("slides")
    make_slides(folder, "--size", "3000x2300", "--count", "2")
    placed = ("--name", "placed-", "--format", "scn", "--bounds", "512,256,5000,4000")
    make_slides(folder, "--size", "2100x1700", *placed)
    return folder


@pytest.fixture(scope="module")
def masks(slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    with pytest.MonkeyPatch.context() as patch:
        run_tasks_here(folder, patch)
        histopipe.tissue(slides, folder, progress=SILENT)
    return folder


@pytest.fixture(scope="module")
def direct(slides: Path) -> dict[str, Cells]:
    """Cells of each slide without masks."""
    return planned(slides)


def cells(x: Any, y: Any, tissue: Any) -> Cells:
    corners = zip(x.tolist(), y.tolist(), strict=True)
    return dict(zip(corners, tissue.tolist(), strict=True))


def planned(slides: Path, store: Path | None = None, **settings: Any) -> dict[str, Cells]:
    """Plan small patches as `ingest` does, and return the tissue share of each cell by slide."""
    jobs, spec, options = read_request(slides, store, {"patch_size": 64, **settings}, SILENT)
    by_slide = {}
    for job in jobs:
        result = plan_slide(job, spec, options)
        assert isinstance(result, SlidePlan), result
        by_slide[job.id] = cells(result.plan.x_l0, result.plan.y_l0, result.plan.tissue)
    return by_slide


def ingested(slides: Path, store: Path, **settings: Any) -> dict[str, Cells]:
    """Ingest small patches, of one slide unless the settings name others, and return the cells in the store."""
    one = store.with_suffix(".csv")
    one.write_text("slide\nslide-000\n")
    settings = {"patch_size": 64, "progress": SILENT, "slide_list": one, **settings}
    assert not histopipe.ingest(slides, store, **settings).failed
    with Store(store) as opened:
        indices = {record.id: opened.index(number) for number, record in opened.complete.items()}
    return {slide: cells(i["x_l0"], i["y_l0"], i["tissue"]) for slide, i in indices.items()}


def test_masks_out_and_in_give_the_same_plan(
    slides: Path, masks: Path, direct: dict[str, Cells], tmp_path: Path
) -> None:
    assert planned(slides, tissue=masks) == direct
    assert len(direct) == 3 and all(direct.values())
    shutil.copytree(masks, tmp_path / "png", ignore=shutil.ignore_patterns("*.geojson"))
    assert planned(slides, tissue=tmp_path / "png") == direct
    store, exported = tmp_path / "s.lmdb", tmp_path / "exported"
    assert ingested(slides, store, slide_list=None) == direct
    report = histopipe.export(store, exported, to="masks", progress=SILENT)
    assert isinstance(report, TissueReport) and report.exit_code is ExitCode.DONE
    assert planned(slides, tissue=exported) == direct
    corrected = exported / "slide-000.geojson"
    corrected.write_text("corrected")
    with pytest.raises(UsageError, match="has masks already"):
        histopipe.export(store, exported, to="masks", progress=SILENT)
    assert corrected.read_text() == "corrected"


def test_corrected_mask_changes_the_cells_it_touches(
    slides: Path, masks: Path, tmp_path: Path
) -> None:
    corrected = Path(shutil.copytree(masks, tmp_path / "masks"))
    file = corrected / "slide-000.geojson"
    drawn = json.loads(file.read_text())
    hole = shapely.Polygon([(1010, 900), (1500, 950), (1400, 1400), (990, 1300)])
    for outline in drawn["features"]:
        area = shapely.geometry.shape(outline["geometry"]) - hole
        outline["geometry"] = shapely.geometry.mapping(area)
    del drawn["histopipe"]  # as QuPath does
    file.write_text(json.dumps(drawn))
    before, after = (
        planned(slides / "slide-000.svs", tissue=folder, tissue_threshold=0.0)["slide-000"]
        for folder in (masks, corrected)
    )
    assert before.keys() == after.keys()
    # A pixel of the mask is cut out if its centre is.
    wide, narrow = hole.buffer(12), hole.buffer(-12)
    changed = {cell for cell in before if before[cell] != after[cell]}
    squares = {cell: shapely.box(*cell, cell[0] + 64, cell[1] + 64) for cell in before}
    assert changed <= {cell for cell, square in squares.items() if square.intersects(wide)}
    inside = {c for c, square in squares.items() if square.intersects(narrow) and before[c] > 0}
    assert inside <= changed and len(inside) > 50
    assert {after[cell] for cell in squares if narrow.covers(squares[cell])} == {0.0}


GRID = Grid(0, 0, 16.0, Size(64, 48), Size(1024, 768))
BOUNDS = RegionL0(PointL0(0, 0), Size(1024, 768))
MASK = np.zeros((48, 64), np.bool_)
MASK[5:30, 10:50] = True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "it has no outline, expected outlines of tissue"),
        ([feature([box(0, 0, 1024, 768)], "Ignore*")], "it has no outline"),
        ([feature([[(0, 0), (500, 500), (500, 0), (0, 500), (0, 0)]])], "self-intersection"),
        ([feature([[(5, 5), (9, 9), (5, 5)]])], "has no area"),
        ([feature([box(0, 0, 3000, 700)])], "outlines from (0, 0) to (3000, 700), expected inside"),
        ([feature([box(-300, 0, 500, 700)])], "outlines from (-300, 0)"),
        ([feature([box(5, 5, 60, 40)])], "check the unit"),
        ([feature([box(500, 500, 501, 501)])], "smaller than a pixel"),
        ("hello", "not JSON"),
        (Image.new("L", (64, 64), 255), "64×64 pixels, expected the shape of the slide"),
        (Image.new("L", (64, 48), 0), "no pixel of tissue"),
        (Image.new("RGBA", (64, 48), (255, 0, 0, 0)), "transparent pixels"),
        (b"no picture", "found not a PNG file, expected a PNG file"),
    ],
)
def test_unfit_masks_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / ("one.geojson" if isinstance(content, list | str) else "one.png")
    if isinstance(content, Image.Image):
        content.save(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(MaskUnfit, match="the-slide") as caught:
        read_mask(path, "the-slide", GRID, BOUNDS)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_pictures_up_to_the_documented_size_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow's own limit, which is smaller, does not apply. A larger picture fails its slide only."""
    path = tmp_path / "one.png"
    Image.new("L", (64, 48), 255).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert read_mask(path, "the-slide", GRID, BOUNDS).all()
    monkeypatch.setattr("histopipe.tiling.mask_files._MOST_PIXELS", 3_000)
    with pytest.raises(MaskUnfit, match="found 64×48 pixels, expected at most 3,000"):
        read_mask(path, "the-slide", GRID, BOUNDS)
    monkeypatch.setattr("histopipe.annotations.annotation_files.MOST_BYTES", 10)
    with pytest.raises(MaskUnfit, match="too large"):
        identify_mask_file(path)


def test_exclude_needs_outlines(tmp_path: Path) -> None:
    progress = mock.Mock()
    settings = {"tissue": tmp_path, "exclude": ["Fold"]}
    (tmp_path / "a.png").touch()
    with pytest.raises(UsageError, match="1 of 1 mask have no outlines of classes: found PNG"):
        read_tissue(settings, None, SlideNames(["a", "b"]), SILENT)
    read_tissue({**settings, "annotations": tmp_path}, None, SlideNames(["a"]), SILENT)
    (tmp_path / "b.geojson").touch()
    read_tissue(settings, None, SlideNames(["a", "b"]), progress)
    progress.message.assert_called_once_with(
        "--exclude: 1 of 2 masks have no outlines of classes: only --annotations can cut them"
    )


def test_unexpected_error_fails_only_its_slide(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(folder: Path, slide: str, *arguments: Any, **options: Any) -> Any:
        if slide.endswith("slide-001"):
            raise KeyError("x")
        return write_mask(folder, slide, *arguments, **options)

    monkeypatch.setattr("histopipe.tiling.mask_files.write_mask", failing)
    result = histopipe.tissue(slides, tmp_path / "masks", progress=SILENT)
    assert list(result.failed.values()) == [
        "KeyError: 'x'; this is a bug in histopipe: please report it"
    ]
    assert len(result.slides) == 2 and result.exit_code == ExitCode.PARTLY


@pytest.mark.parametrize("suffix", [".png", ".geojson"])
def test_mask_of_another_slide_is_refused(tmp_path: Path, suffix: str) -> None:
    write_mask(tmp_path, "one", TissueMask(MASK), GRID, BOUNDS)
    assert (read_mask(tmp_path / f"one{suffix}", "one", GRID, BOUNDS) == MASK).all()
    other = Grid(0, 0, 16.0, Size(64, 48), Size(1020, 768))
    with pytest.raises(MaskUnfit, match="the mask of a slide of 1024×768 pixels, expected one of"):
        read_mask(tmp_path / f"one{suffix}", "two", other, BOUNDS)


@pytest.mark.parametrize("colours", [[(0, 0, 0), (255, 0, 0)], [(0, 0, 1), (0, 0, 0)]])
def test_palette_of_a_picture_is_used(tmp_path: Path, colours: list[tuple[int, int, int]]) -> None:
    """Tissue is what is not black, not what has a number above 0."""
    image = Image.fromarray(MASK.astype(np.uint8), "L")
    image.putpalette([value for colour in colours for value in colour])
    image.save(tmp_path / "one.png")
    expected = np.array([any(colour) for colour in colours])[MASK.astype(int)]
    assert (read_mask(tmp_path / "one.png", "one", GRID, BOUNDS) == expected).all()


def test_masks_of_other_tools(tmp_path: Path) -> None:
    """PNG of the whole slide at any size, and outlines without a class; a class Tissue has precedence."""
    bounds = RegionL0(PointL0(160, 96), Size(640, 480))
    grid = Grid(160, 96, 16.0, Size(40, 30), Size(1024, 768))
    whole = np.zeros((384, 512), np.uint8)
    whole[100:200, 150:300] = 1  # pixels of 2 × 2 level-0 pixels
    Image.fromarray(whole).save(tmp_path / "one.png")
    expected = np.zeros((30, 40), np.bool_)
    expected[6:19, 9:27] = True  # centres: x = 160 + 16 (c + ½) in 300 to 600, y in 200 to 400
    assert (read_mask(tmp_path / "one.png", "one", grid, bounds) == expected).all()
    outline = box(140, 104, 440, 304)  # QuPath counts from the scanned area
    tissue, fold = feature([outline], "tissue"), feature([box(140, 104, 300, 304)], "Fold")
    path = tmp_path / "one.geojson"
    for drawn in ([feature([outline], None)], [tissue, feature([box(0, 0, 640, 480)], "T"), fold]):
        path.write_text(json.dumps(drawn))
        assert (read_mask(path, "one", grid, bounds) == expected).all()
    expected[:, :19] = False
    assert (read_mask(path, "one", grid, bounds, exclude=["Fold"]) == expected).all()


def test_slide_without_mask_fails_or_has_the_fallback(
    slides: Path, masks: Path, direct: dict[str, Cells], tmp_path: Path
) -> None:
    some = tmp_path / "some"
    some.mkdir()
    shutil.copy(masks / "slide-001.geojson", some)
    settings: dict[str, Any] = {"patch_size": 64, "tissue": some, "progress": SILENT}
    report = histopipe.ingest(slides, tmp_path / "s.lmdb", **settings)
    assert set(report.failed) == {"slide-000", "placed-000"}
    assert "slide-000 has no mask: expected a file slide-000.geojson" in report.failed["slide-000"]
    with pytest.raises(UsageError, match="tissue_fallback"):
        histopipe.ingest(slides, tmp_path / "s.lmdb", tissue_fallback="otsu", **settings)
    assert planned(slides, tissue=some, tissue_fallback="otsu") == direct
    # A mask that is added later is used at the next ingest.
    shutil.copy(masks / "slide-000.geojson", some)
    added = ingested(slides, tmp_path / "s.lmdb", tissue=some)
    assert added == {name: direct[name] for name in ("slide-000", "slide-001")}


def test_changed_mask_is_reported_and_ingested_with_force(
    slides: Path, masks: Path, tmp_path: Path
) -> None:
    some = Path(shutil.copytree(masks, tmp_path / "masks", ignore=shutil.ignore_patterns("*.png")))
    store, two = tmp_path / "s.lmdb", tmp_path / "two.csv"
    two.write_text("slide\nslide-000\nplaced-000\n")
    settings: dict[str, Any] = {"tissue": some, "slide_list": two, "tissue_check": "off"}
    before = ingested(slides, store, **settings)
    with Store(store) as opened:
        origins = {record.id: str(record.mask) for record in opened.slides}
    assert origins["slide-000"].startswith("slide-000.geojson, crc32 ")
    square = feature([box(0, 0, 1500, 1500)])
    (some / "slide-000.geojson").write_text(json.dumps([square]))
    report = histopipe.ingest(slides, store, progress=SILENT, patch_size=64, **settings)
    (reason,) = report.failed.values()
    assert "was assigned another mask" in reason
    after = ingested(slides, store, force=True, **settings)
    assert max(x for x, _ in before["slide-000"]) > 1500 > max(x for x, _ in after["slide-000"])
    assert after["placed-000"] == before["placed-000"]
    with Store(store) as opened:
        assert spec_of_store(opened.spec).to_json() == opened.spec  # as `repair` does


def test_drawn_artefacts_are_cut_out(
    slides: Path, direct: dict[str, Cells], tmp_path: Path
) -> None:
    fold = feature([box(1000, 900, 1600, 1500)], "Fold")
    (tmp_path / "slide-000.geojson").write_text(json.dumps([fold]))
    cut = planned(slides, annotations=tmp_path, exclude=["Fold"])
    gone = direct["slide-000"].keys() - cut["slide-000"].keys()
    assert cut["slide-000"].keys() <= direct["slide-000"].keys() and len(gone) > 60
    assert all(900 < x < 1600 and 800 < y < 1500 for x, y in gone)
    assert all(cut[name] == direct[name] for name in ("slide-001", "placed-000"))


@pytest.mark.parametrize("algorithm", FINDERS)
def test_spec_keeps_its_algorithm(algorithm: Any) -> None:
    spec = TilingSpec(mpp=Mpp(0.5), tissue=algorithm)
    recorded = spec.to_json()
    assert recorded["tissue"] == "otsu" and recorded["algorithms"]["tissue"] == algorithm
    assert resolved_tissue("otsu", recorded) == algorithm
    assert spec_of_store(recorded) == spec
    assert resolved_tissue("otsu", None) == "otsu-3"


def test_existing_store_keeps_its_algorithm(
    slides: Path, direct: dict[str, Cells], tmp_path: Path
) -> None:
    store = tmp_path / "s.lmdb"
    assert ingested(slides, store, tissue="otsu-1").keys() == {"slide-000"}
    with Store(store) as opened:  # the spec of stores of earlier versions
        assert not {"exclude", "tissue_fallback", "tissue_model"} & opened.spec.keys()
    assert planned(slides, store) == planned(slides, tissue="otsu-1") != direct
    with pytest.raises(UsageError, match="otsu-1"):
        histopipe.ingest(slides, store, patch_size=64, tissue="otsu-3", progress=SILENT)


def test_tissue_keeps_corrected_masks_and_draws_them(slides: Path, tmp_path: Path) -> None:
    folder = tmp_path / "masks"
    first = histopipe.tissue(slides, folder, progress=SILENT)
    corrected = json.dumps([feature([box(0, 0, 1600, 1600)])])
    (folder / "slide-000.geojson").write_text(corrected)
    second = histopipe.tissue(slides, folder, progress=SILENT)
    assert (folder / "slide-000.geojson").read_text() == corrected
    (row,) = (row for row in second.slides if row.slide == "slide-000")
    assert row.source == "slide-000.geojson"
    assert row.tissue_mm2 == pytest.approx((1600 * 0.499e-3) ** 2, rel=0.01)
    assert np.asarray(Image.open(folder / "slide-000.png")).mean() == pytest.approx(row.share)
    page = (folder / "index.html").read_text()
    assert page.count("data:image/webp") == 3 and "http" not in page.replace("http-equiv", "")
    assert (folder / "masks.csv").read_text().count("\n") == 4
    third = histopipe.tissue(slides, folder, force=True, progress=SILENT)
    assert [row.share for row in third.slides] == [row.share for row in first.slides]


def test_tissue_of_bad_and_missing_slides(tmp_path: Path, run: Any) -> None:
    make_slides(tmp_path / "in", "--size", "1000x1000")
    (tmp_path / "in" / "bad.svs").write_bytes(b"no slide")
    done = run("tissue", "in", "--out", "masks")
    assert (done.returncode, "failed bad: " in done.stdout) == (ExitCode.PARTLY, True)
    assert "next: histopipe ingest in --tissue masks" in done.stderr
    done = run("tissue", "in/bad.svs", "--out", "none")
    assert done.returncode == ExitCode.NOTHING and "no tissue mask was written" in done.stderr


@pytest.mark.parametrize(
    ("mpp", "scale"),
    [
        ("0.5", 4),
        ("0.5", 16),
        *(
            pytest.param(mpp, scale, marks=pytest.mark.nightly(reason="other scales"))
            for mpp in ("1", "2.2")
            for scale in (4, 16)
        ),
    ],
)
def test_network_finds_the_same_tissue_at_every_scale(
    tmp_path: Path, mpp: str, scale: float
) -> None:
    """The network sees green below 200; so does this test, on the thumbnail."""
    (path,) = make_slides(tmp_path, "--size", "3000x2000", "--mpp", mpp, "--levels", "1,4")
    make_network(tmp_path / "network.onnx", 64, mpp=scale)
    with open_slide(path) as slide:
        thumbnail = read_thumbnail(slide, Mpp(float(mpp)))
        mask = find_by_network(tmp_path / "network.onnx", slide, "one", Mpp(float(mpp)), thumbnail)
    truth = thumbnail.pixels[..., 1] < 200
    assert mask.pixels.shape == truth.shape and 0.1 < truth.mean() < 0.6
    assert overlap(mask.pixels, truth) > (0.9 if scale < 8 else 0.8)


def test_ingest_with_a_network(slides: Path, direct: dict[str, Cells], tmp_path: Path) -> None:
    make_network(tmp_path / "network.onnx", 64)
    store, slide = tmp_path / "s.lmdb", slides / "slide-000.svs"
    by_network = ingested(slide, store, tissue=tmp_path / "network.onnx")
    assert planned(slide, tissue=tmp_path / "network.onnx") == by_network
    both = by_network["slide-000"].keys() & direct["slide-000"].keys()
    assert len(both) > 0.9 * len(direct["slide-000"])
    make_network(tmp_path / "network.onnx", 64, threshold=0.6)
    with pytest.raises(UsageError, match=r"tissue_model: network\.onnx, crc32 "):
        ingested(slide, store, tissue=tmp_path / "network.onnx")


def test_network_that_computes_nan_finds_no_tissue_silently(tmp_path: Path) -> None:
    pixels = np.zeros((1, 64, 64, 3), np.uint8)
    make_network(tmp_path / "network.onnx", 64)
    assert load_network(tmp_path / "network.onnx", 1)(pixels).min() > 0.5
    make_network(tmp_path / "network.onnx", 64, mean=[float("nan")] * 3)
    with pytest.raises(MaskUnfit, match=r"network\.onnx: the network computed NaN"):
        load_network(tmp_path / "network.onnx", 2)(pixels)


@pytest.mark.long(reason="starts the process that runs networks")
def test_network_counts_unreadable_areas_as_tissue(tmp_path: Path) -> None:
    (path,) = make_slides(tmp_path, "--size", "3000x2000", "--levels", "1")
    make_network(tmp_path / "network.onnx", 64, mpp=4)

    class Damaged(OpenSlideReader):
        def read_region(self, origin: PointL0, level: int, size: Size) -> Any:
            if origin.x < 300 and origin.y < 300:
                raise SlideUnreadable("damaged")
            return super().read_region(origin, level, size)

    with open_slide(path) as slide, Damaged(path) as damaged:
        thumbnail = read_thumbnail(slide, Mpp(0.499))
        whole, part = (
            find_by_network(tmp_path / "network.onnx", reader, "one", Mpp(0.499), thumbnail).pixels
            for reader in (slide, damaged)
        )
    assert not whole[:15, :15].any() and part[:15, :15].all()
    assert (whole == part)[60:].all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mpp": -1}, "network.json: mpp: found -1"),
        ({"layout": "CHW"}, "layout"),
        ({"std": [0, 1, 1]}, "std"),
        ({"clas": 1}, "clas"),
        ({"class": 2}, "wrong output"),
        ({"size": 32}, "network.onnx cannot be run"),
        ({"layout": "NHWC"}, "network.onnx cannot be run"),
    ],
)
def test_wrong_networks_are_refused(
    slides: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    network = tmp_path / "network.onnx"
    make_network(network, 64, **settings)
    with pytest.raises(UsageError, match=message), open_slide(slides / "slide-000.svs") as slide:
        read_segmenter(network)
        thumbnail = read_thumbnail(slide, Mpp(0.499))
        find_by_network(network, slide, "one", Mpp(0.499), thumbnail)
    with pytest.raises(UsageError, match=message):  # before a store is created
        read_tissue({"tissue": network}, None, SlideNames(["one"]), SILENT)


KERAS = """
import sys, keras, numpy as np
from histopipe.errors import UsageError
from histopipe.geometry import Mpp
from histopipe.slides.slide_files import open_slide
from histopipe.slides.thumbnail import read_thumbnail
from histopipe.tiling.network import find_by_network, load_network
from pathlib import Path
network, same = Path("network.keras"), Path("same.onnx")
inputs = keras.Input((64, 64, 3))
layer = keras.layers.Conv2D(1, 1, activation="sigmoid")
outputs = layer(inputs)
weights = np.array([0, -100, 0], np.float32).reshape(1, 1, 3, 1), np.array([100 * 200 / 255])
layer.set_weights(list(weights))
keras.Model(inputs, outputs).save(network)
with open_slide(Path(sys.argv[1])) as slide:
    thumbnail = read_thumbnail(slide, Mpp(0.499))
    a, b = (find_by_network(n, slide, "one", Mpp(0.499), thumbnail).pixels for n in (network, same))
print(a.mean(), (a != b).mean())
layer.set_weights([np.full((1, 1, 3, 1), np.nan), np.zeros(1)])
keras.Model(inputs, keras.layers.ReLU()(outputs)).save(network)
try: load_network(network, 2)
except UsageError as error: print(error)
"""


@pytest.mark.long(reason="writes, reads and runs a network of Keras")
def test_keras_network(slides: Path, tmp_path: Path) -> None:
    described = {"mpp": 8, "size": 64, "layout": "NHWC", "output": "probabilities"}
    (tmp_path / "network.json").write_text(json.dumps(described))
    make_network(tmp_path / "same.onnx", 64)
    done = with_tensorflow(KERAS, slides / "slide-000.svs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    masks, error = done.stdout.splitlines()
    tissue, different = map(float, masks.split())
    assert tissue > 0.1 and different < 0.001
    assert "network.keras: a weight is not finite" in error
