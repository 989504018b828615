"""Correct tissue masks in the viewer: what is saved is the area that was drawn, and what `ingest` reads."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import shapely
from PIL import ExifTags, Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from helpers.commands import RunCommand
from helpers.inline import PicklingWorkers
from helpers.viewed import PATCH, SLIDE, fetch, viewing
from histopipe.errors import MaskUnfit, UsageError
from histopipe.geometry import PointL0, RegionL0, Size
from histopipe.slides.slide_files import open_slide
from histopipe.store.store import Store
from histopipe.tiling.mask import Grid, Mask, TissueMask
from histopipe.tiling.mask_edits import merge_edits, read_mask_features
from histopipe.tiling.mask_files import encode_png, read_mask_file, read_png_grid, write_mask
from histopipe.viewer.pictures import slide_mask
from histopipe.viewer.view import Viewer, view

FULL, BOUNDS = Size(1200, 900), RegionL0(PointL0(200, 100), Size(640, 480))
GRID = Grid(200, 100, 16, Size(40, 30), FULL)


def feature(ring: Any, name: str = "Tissue") -> dict[str, Any]:
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [[*ring, ring[0]]]},
        "properties": {"objectType": "annotation", "classification": {"name": name}},
    }


def box(left: float, top: float, right: float, low: float, name: str = "Tissue") -> Any:
    return feature([[left, top], [right, top], [right, low], [left, low]], name)


def mask_of(path: Path, features: Any, grid: Grid = GRID, bounds: RegionL0 = BOUNDS) -> Mask:
    """Return what `ingest` reads from a file with these features."""
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    content = read_mask_file(path, "s", grid, bounds)
    assert not content.is_ours
    (pixels,) = content.by_frame.values()
    return pixels


def test_saved_area_is_that_of_the_outlines_in_their_order(tmp_path: Path) -> None:
    """Of random additions and cuts, on a slide with a scanned area; the reference paints pixels."""
    rng, seen = np.random.default_rng(3), set()
    for number in range(40):
        features, expected = [], np.zeros((30, 40), np.bool_)
        for _ in range(rng.integers(2, 9)):
            (left, right), (top, low) = (
                np.sort(rng.choice(most + 1, 2, replace=False)).tolist() for most in (40, 30)
            )
            is_cut = bool(rng.random() < 0.4)
            name = "Ignore*" if is_cut else "Tissue"
            features.append(box(16 * left, 16 * top, 16 * right, 16 * low, name))
            expected[top:low, left:right] = not is_cut
        if not expected.any():
            with pytest.raises(UsageError, match="has no tissue, which ingest refuses"):
                merge_edits(features, "s", BOUNDS, FULL)
            continue
        merged = merge_edits(features, "s", BOUNDS, FULL)
        path = tmp_path / f"{number}.geojson"
        np.testing.assert_array_equal(mask_of(path, merged), expected)
        assert {each["properties"]["classification"]["name"] for each in merged} == {"Tissue"}
        again = read_mask_features(path, "s", BOUNDS)
        np.testing.assert_array_equal(mask_of(path, again), expected)
        seen |= {len(each["geometry"]["coordinates"]) for each in merged}
    assert max(seen) > 1  # some have holes


def test_file_of_qupath_starts_with_the_area_that_ingest_reads(tmp_path: Path) -> None:
    """Cuts count wherever they are in the file, and outlines of other classes are kept."""
    path, fold = tmp_path / "s.geojson", box(32, 32, 64, 64, "Fold")
    features = [box(160, 160, 320, 320, "Ignore*"), fold, box(0, 0, 480, 480)]
    expected = mask_of(path, features)
    assert 0 < expected.sum() < 900
    start = read_mask_features(path, "s", BOUNDS)
    assert start[1:] == [fold]
    merged = merge_edits(start, "s", BOUNDS, FULL)
    np.testing.assert_array_equal(mask_of(path, merged), expected)
    assert merged[1:] == [fold]
    # A file of `histopipe tissue`: once edited, it is not "ours".
    write_mask(tmp_path, "ours", TissueMask(expected), GRID, BOUNDS)
    ours = tmp_path / "ours.geojson"
    assert read_mask_file(ours, "s", GRID, BOUNDS).is_ours
    merged = merge_edits(read_mask_features(ours, "s", BOUNDS), "s", BOUNDS, FULL)
    np.testing.assert_array_equal(mask_of(path, merged), expected)


def test_outlines_that_ingest_would_refuse_are_refused(tmp_path: Path) -> None:
    for wrong, error, message in (
        (box(0, 0, 60, 40), None, ""),  # from (200, 100): not at the corner of the slide
        (box(0, 0, 700, 480), None, ""),  # inside of the slide
        (box(0, 0, 5000, 480), MaskUnfit, "inside the 1200×900 pixels"),
        (box(-190, -90, -140, -60), MaskUnfit, "check the unit"),
        (box(0, 0, 300, 0), UsageError, "it has no area"),
    ):
        if error is None:
            assert mask_of(tmp_path / "s.geojson", merge_edits([wrong], "s", BOUNDS, FULL)).any()
        else:
            with pytest.raises(error, match=message):
                merge_edits([wrong], "s", BOUNDS, FULL)


def test_last_pixel_of_the_mask_of_a_small_image_may_be_partly_outside(tmp_path: Path) -> None:
    size = Size(100, 90)
    grid, bounds = Grid(0, 0, 13, Size(8, 7), size), RegionL0(PointL0(0, 0), size)
    merged = merge_edits([box(0, 0, 104, 91)], "s", bounds, size)
    assert mask_of(tmp_path / "s.geojson", merged, grid, bounds).all()


@pytest.fixture
def _without_workers() -> Iterator[None]:
    with mock.patch("histopipe.viewer.layers.WorkerPool", PicklingWorkers):
        yield


def start(viewer: Viewer, slide: int = 0) -> Any:
    status, body, _ = fetch(viewer, f"slides/{slide}/tissue")
    assert status == 200, body
    return json.loads(body)


def put(viewer: Viewer, value: Any, slide: int = 0, **headers: str) -> tuple[int, Any]:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = {"content_type": "application/json", **headers}
    path = f"slides/{slide}/tissue"
    status, answer, _ = fetch(viewer, path, method="PUT", body=body, **headers)
    return status, json.loads(answer) if answer.startswith(b"{") else answer


def mask_and_grid(content: bytes | memoryview | None) -> tuple[Mask, Grid]:
    """Return the pixels of a mask as PNG, and their grid."""
    data = bytes(content or b"")
    grid = read_png_grid(data)
    assert grid is not None
    return np.asarray(Image.open(io.BytesIO(data)).convert("L")) > 0, grid


def whole(grid: Grid) -> RegionL0:
    return RegionL0(PointL0(0, 0), grid.slide)


@pytest.mark.usefixtures("_without_workers")
def test_mask_of_the_store_is_corrected_and_ingested(
    viewed: Path, tmp_path: Path, run: RunCommand
) -> None:
    with Store(viewed / "patches.lmdb") as opened:
        pixels, grid = mask_and_grid(opened.thumbnail(0, "mask"))
    file = tmp_path / "masks" / f"{SLIDE}.geojson"
    with viewing(viewed / "patches.lmdb", tissue=file.parent) as viewer:
        first = start(viewer)
        assert (first["version"], first["file"], first["start"]) == (
            "",
            "",
            "the mask of the store",
        )
        assert not file.parent.exists()
        status, saved = put(viewer, {"features": first["features"], "version": ""})
        assert (status, saved["file"]) == (200, file.name)
        content = read_mask_file(file, SLIDE, grid, whole(grid))
        np.testing.assert_array_equal(content.by_frame["stored"], pixels)
        assert not content.is_ours
        # Cut, then add in the cut: in this order.
        edits = [box(0, 0, 1100, 2967, "Ignore*"), box(128, 2048, 640, 2560)]
        value = {"features": saved["features"] + edits, "version": saved["version"]}
        before = file.read_bytes()
        status, saved = put(viewer, value)
        assert (status, saved["features"]) == (200, json.loads(file.read_text())["features"])
        assert file.with_name(f"{file.name}.previous").read_bytes() == before
        again = start(viewer)
        assert (again["features"], again["start"]) == (saved["features"], "")
        assert again["version"] == saved["version"]
        # Another version, and no tissue: nothing is written.
        kept = file.read_bytes()
        everywhere = box(0, 0, 2220, 2967, "Ignore*")
        value = {"features": [everywhere], "version": "00000000-1"}
        assert put(viewer, {**value, "features": edits})[0] == 409
        status, answer = put(viewer, {**value, "version": saved["version"]})
        assert status == 400 and "--slide-list" in answer["error"]
        assert file.read_bytes() == kept
    store = tmp_path / "new.lmdb"
    words = ("ingest", viewed / "slides", "--out", store, "--tissue", file.parent)
    done = run(*words, "--patch-size", PATCH)
    assert done.returncode == 0, done.stderr
    area = shapely.union_all([shapely.geometry.shape(f["geometry"]) for f in saved["features"]])
    with Store(store) as opened:
        index, side = opened.index(0), opened.records[0].side_l0
        corners = {*zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True)}
    size = int(side)
    share = {
        (x, y): shapely.box(x, y, x + size, y + size).intersection(area).area / size**2
        for x in range(0, 2220 - size, size)
        for y in range(0, 2967 - size, size)
    }
    clear = {at: value > 0.5 for at, value in share.items() if abs(value - 0.5) > 0.1}
    assert {at for at, inside in clear.items() if inside} == corners & clear.keys()
    assert {(256, 2176), (384, 2304)} <= corners and not any(x < 100 for x, _ in corners)


@pytest.mark.usefixtures("_without_workers")
def test_png_and_slides_without_masks_are_starts(viewed: Path, tmp_path: Path) -> None:
    """Another tool's PNG counts as an ingest reads it, and is kept; a slide alone starts with its tissue."""
    slide, folder = viewed / "slides" / f"{SLIDE}.svs", tmp_path / "masks"
    folder.mkdir()
    with open_slide(slide) as opened:
        size = opened.info.size
    png, small = folder / f"{SLIDE}.png", np.zeros((size.height // 10, size.width // 10), np.uint8)
    small[40:200, 30:150] = 255
    Image.fromarray(small).save(png)
    of_slide, grid = mask_and_grid(slide_mask(str(slide)))
    (expected,) = read_mask_file(png, SLIDE, grid, whole(grid)).by_frame.values()
    for name, pixels in ((png.name, expected), ("", of_slide)):
        with viewing(slide, tissue=folder) as viewer:
            first = start(viewer)
            assert (first["file"], first["start"] != "") == (name, True)
            value = {"features": first["features"], "version": first["version"]}
            if name:
                assert put(viewer, {**value, "version": ""})[0] == 409
            assert put(viewer, value)[0] == 200
            assert start(viewer)["start"] == ""  # of the GeoJSON file, also where there is a PNG
        file = folder / first["target"]
        (mask,) = read_mask_file(file, SLIDE, grid, whole(grid)).by_frame.values()
        np.testing.assert_array_equal(mask, pixels)
        assert png.exists() == bool(name)
        file.unlink()
        png.unlink(missing_ok=True)
    # What histopipe has written with another size is the mask of another slide.
    png.write_bytes(encode_png(np.ones((30, 40), np.bool_), GRID))
    with viewing(slide, tissue=folder) as viewer:
        status, answer, _ = fetch(viewer, "slides/0/tissue")
        assert status == 400 and b"1200" in answer


@pytest.mark.usefixtures("_without_workers")
def test_wrong_requests_are_refused(viewed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "masks"
    image = Image.fromarray(np.full((60, 90, 3), 99, np.uint8))
    exif = image.getexif()
    exif[ExifTags.Base.Orientation] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    good = {"features": [box(0, 0, 1500, 1500)], "version": ""}
    with viewing(viewed / "patches.lmdb", tmp_path / "turned.png", tissue=folder) as viewer:
        names = [row["name"] for row in json.loads(fetch(viewer, "slides")[1])["slides"]]
        turned = names.index("turned")
        assert fetch(viewer, f"slides/{turned}/tissue")[0] == put(viewer, good, turned)[0] == 404
        number = names.index(SLIDE)
        for wrong in (
            b"{",
            b"[]",
            {"features": 3, "version": ""},
            {"features": [3], "version": ""},
            {"features": [{**box(0, 0, 9, 9), "geometry": {"type": "Point"}}], "version": ""},
            {"features": [box(0, 0, 1e300, 9)], "version": ""},
            {"features": [box(0, 0, 9, 9, "Other")], "version": ""},
        ):
            status, answer = put(viewer, wrong, number)
            assert status == 400 and answer["error"], wrong
        assert put(viewer, good, number, content_type="text/plain")[0] == 415
        assert put(viewer, good, number, origin="http://evil.example")[0] == 403
        assert put(viewer, good, 99)[0] == 404
        assert fetch(viewer, f"//wrong-token-of-a-page/slides/{number}/tissue")[0] == 403
        assert fetch(viewer, "slides/..%2f..%2f/tissue")[0] in (403, 404)
        with mock.patch("histopipe.viewer.draw_page.MOST_BYTES", 10):
            assert put(viewer, good, number)[0] == 413
        assert not list(tmp_path.rglob("*.geojson"))
        assert put(viewer, good, number)[0] == 200
    with viewing(viewed / "patches.lmdb") as viewer:
        assert fetch(viewer, "slides/0/tissue")[0] == put(viewer, good)[0] == 404
    shutil.rmtree(folder)
    folder.write_text("a file")
    with pytest.raises(UsageError, match="which is a file"):
        view(viewed / "slides", tissue=folder / "x")


Browser = webdriver.Chrome


def run_js(browser: Browser, code: str, *arguments: Any) -> Any:
    return browser.execute_script(f"const pane = window.histopipe?.panes[0]; {code}", *arguments)


def wait(browser: Browser, condition: str) -> None:
    until = time.monotonic() + 30
    while not run_js(browser, f"return Boolean({condition})"):
        assert time.monotonic() < until, condition
        time.sleep(0.02)


def filled(browser: Browser, x: int, y: int) -> bool:
    """Return whether the page shows tissue at a pixel of level 0."""
    code = (
        "pane.draw(); const at = pane.toScreen({x: arguments[0], y: arguments[1]}), copy = document.createElement('canvas');"
        "copy.width = copy.height = 1; const context = copy.getContext('2d');"
        "context.drawImage(pane.canvas, Math.round(at.x), Math.round(at.y), 1, 1, 0, 0, 1, 1);"
        "return context.getImageData(0, 0, 1, 1).data[3] > 0"
    )
    return bool(run_js(browser, code, x, y))


@pytest.mark.long(reason="a browser")
def test_tissue_is_cut_and_added_by_mouse_and_keys(
    browser: Browser, viewed: Path, tmp_path: Path
) -> None:
    file = tmp_path / "masks" / f"{SLIDE}.geojson"
    options = {"tissue": file.parent, "annotations": tmp_path / "outlines"}
    with viewing(viewed / "patches.lmdb", **options) as viewer:
        metrics = {"width": 900, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(viewer.url)
        wait(browser, "pane?.viewer.world.getItemCount() > 0")
        browser.find_element(By.ID, "tab-draw").click()
        wait(browser, "document.querySelector('#class-name')")
        browser.find_element(By.ID, "kind-tissue").send_keys(Keys.SPACE)
        wait(browser, "document.querySelector('#part-cut')")
        places = [(1100, 1000), (1100, 1500), (400, 2400), (150, 2400)]
        assert [filled(browser, *at) for at in places] == [True, True, False, False]

        browser.find_element(By.ID, "part-cut").click()
        browser.find_element(By.ID, "draw-rectangle").click()
        picture = browser.find_element(By.CSS_SELECTOR, ".picture")
        code = (
            "return arguments[0].map(([x, y]) => { const at = pane.toScreen({x, y});"
            "return [Math.round(at.x - pane.picture.clientWidth / 2), Math.round(at.y - pane.picture.clientHeight / 2)]; })"
        )
        (x0, y0), (x1, y1) = run_js(browser, code, [[20, 600], [2000, 1200]])
        actions = ActionChains(browser, duration=20)
        actions.move_to_element_with_offset(picture, x0, y0).click_and_hold()
        actions.move_by_offset(20, 20).move_to_element_with_offset(picture, x1, y1)
        actions.release().perform()
        wait(
            browser, "pane.tools.data.features.at(-1).properties.classification.name === 'Ignore*'"
        )
        assert [filled(browser, *at) for at in places] == [False, True, False, False]

        # By keys: add, undo, and add again.
        browser.find_element(By.ID, "draw-polygon").send_keys(Keys.ENTER)
        run_js(browser, "Object.assign(pane.tools.cross, {x: 300, y: 2300})")
        right, down, left = (
            8 * [key] for key in (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT)
        )
        triangle = [" ", *right, " ", *down, " ", *left, " ", Keys.ENTER]
        ActionChains(browser).send_keys("x", *triangle).perform()
        assert [filled(browser, *at) for at in places] == [False, True, True, False]
        count = run_js(browser, "return pane.tools.data.features.length")
        ActionChains(browser).key_down(Keys.CONTROL).send_keys("z").key_up(Keys.CONTROL).perform()
        assert run_js(browser, "return pane.tools.data.features.length") == count - 1
        assert not filled(browser, 400, 2400)
        browser.find_element(By.ID, "draw-polygon").send_keys(Keys.ENTER)
        run_js(browser, "Object.assign(pane.tools.cross, {x: 300, y: 2300})")
        ActionChains(browser).send_keys(*triangle).perform()
        assert "(not saved)" in browser.find_element(By.ID, "drawing-file").text
        run_js(browser, "window.confirm = text => { window.asked = text; return false; }")
        browser.find_element(By.ID, "kind-drawing").send_keys(Keys.SPACE)
        assert run_js(browser, "return window.asked").startswith(
            "The outlines of this slide are not"
        )
        assert run_js(browser, "return document.querySelector('#kind-tissue').checked")
        browser.find_element(By.ID, "save").send_keys(Keys.ENTER)
        wait(browser, "document.querySelector('#status').textContent.startsWith('Saved as')")
        assert not run_js(browser, "return pane.tools.unsaved")
        wait(browser, "document.activeElement === pane.picture")
        assert [filled(browser, *at) for at in places] == [False, True, True, False]
        assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
        browser.get("about:blank")
    area = shapely.union_all(
        [shapely.geometry.shape(f["geometry"]) for f in json.loads(file.read_text())["features"]]
    )
    inside = [bool(area.intersects(shapely.Point(at))) for at in places]
    assert inside == [False, True, True, False]
