"""Test the viewer's page in a browser: pixels, layers, selection, keys, drawing, and the address."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from helpers.viewed import PATCH, SLIDE, viewing
from histopipe.geometry import PointL0, Size
from histopipe.slides.slide_files import open_slide
from histopipe.store.store import Store
from histopipe.viewer.view import Viewer

Browser = webdriver.Chrome
NIGHTLY = pytest.mark.nightly(
    reason="test_page_shows_pixels_layers_and_patches is the browser's pass in `make test`"
)
ORANGE, BLUE = (230, 159, 0), (86, 180, 233)


@pytest.fixture(scope="module")
def outlines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outlines")


@pytest.fixture(scope="module")
def viewer(viewed: Path, outlines: Path) -> Iterator[Viewer]:
    paths = [viewed / name for name in ("patches.lmdb", "run", "bags", "predictions")]
    shutil.copytree(viewed / "slides", outlines / "slides")
    shutil.copy(outlines / "slides" / f"{SLIDE}.svs", outlines / "slides" / "second.svs")
    paths.append(outlines / "slides")
    with viewing(*paths, annotations=outlines, features=viewed / "features") as running:
        yield running


@pytest.fixture
def page(browser: Browser, viewer: Viewer) -> Iterator[Browser]:
    """The viewer's page. At the end: no message in the console, and no request to another address."""
    metrics = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(viewer.url)
    wait(browser, "window.histopipe?.panes[0]?.viewer.world.getItemCount() > 0")
    settled(browser)
    yield browser
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    urls = run_js(browser, "return performance.getEntriesByType('resource').map(it => it.name)")
    assert len(urls) > 5
    assert all(url.startswith((viewer.url, "data:", "blob:")) for url in urls)
    browser.get("about:blank")


def run_js(browser: Browser, code: str, *arguments: Any) -> Any:
    """Run JavaScript with `await`; `pane` is the first picture."""
    script = (
        "const done = arguments[arguments.length - 1], pane = window.histopipe?.panes[0];"
        f"(async (...args) => {{ {code} }})(...arguments).then(it => done([it]), it => done(String(it.stack)));"
    )
    answer = browser.execute_async_script(script, *arguments)
    assert isinstance(answer, list), answer
    return answer[0]


def wait(browser: Browser, condition: str, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not browser.execute_script(f"return Boolean({condition})"):
        assert time.monotonic() < until, condition
        time.sleep(0.02)


def settled(browser: Browser) -> None:
    """Wait until all visible tiles are drawn."""
    full = "[...Array(it.world.getItemCount()).keys()].every(i => it.world.getItemAt(i).getFullyLoaded())"
    wait(browser, f"window.histopipe.panes.every(({{viewer: it}}) => {full})")
    time.sleep(0.1)


def screenshot(browser: Browser) -> NDArray[np.uint8]:
    """Return the pixels of the first picture."""
    box = run_js(browser, "return pane.picture.getBoundingClientRect().toJSON()")
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    x, y, width, height = (round(box[name]) for name in ("x", "y", "width", "height"))
    return np.asarray(image.crop((x, y, x + width, y + height)))


def show(browser: Browser, key: str, opacity: float = 1.0) -> None:
    run_js(
        browser,
        "await pane.show(pane.layers.find(it => it.key === args[0]), args[1])",
        key,
        opacity,
    )


def overlay_at(browser: Browser, x: float, y: float) -> tuple[int, ...]:
    """Return the colour and opacity of the layers at a level-0 pixel."""
    code = (
        "pane.draw(); const at = pane.toScreen({x: args[0], y: args[1]}), copy = document.createElement('canvas');"
        "copy.width = copy.height = 1; const context = copy.getContext('2d');"
        "context.drawImage(pane.canvas, Math.round(at.x), Math.round(at.y), 1, 1, 0, 0, 1, 1);"
        "return [...context.getImageData(0, 0, 1, 1).data]"
    )
    return tuple(run_js(browser, code, x, y))


def index_of(viewed: Path) -> dict[str, NDArray[Any]]:
    with Store(viewed / "patches.lmdb") as store:
        return store.index(0)


def click(browser: Browser, x: float, y: float) -> None:
    """Click at a level-0 pixel of the first picture."""
    code = (
        "const at = pane.toScreen({x: args[0], y: args[1]}), box = pane.picture.getBoundingClientRect();"
        "return [Math.round(box.x + at.x), Math.round(box.y + at.y)]"
    )
    left, top = run_js(browser, code, x, y)
    actions = ActionChains(browser, duration=0)
    actions.w3c_actions.pointer_action.move_to_location(left, top)  # type: ignore[no-untyped-call]
    actions.click().perform()


@pytest.mark.long(reason="one pass of the browser; CI always has one")
def test_page_shows_pixels_layers_and_patches(page: Browser, viewed: Path) -> None:
    width, height = run_js(page, "return [pane.picture.clientWidth, pane.picture.clientHeight]")
    corner, go = PointL0(600, 900), "pane.go({x: args[0], y: args[1], pixel: 1})"
    run_js(page, go, corner.x + width / 2, corner.y + height / 2)
    settled(page)
    with open_slide(viewed / "slides" / f"{SLIDE}.svs") as slide:
        expected = slide.read_region(corner, 0, Size(width, height))
    part = slice(160, height - 80), slice(20, width - 160)  # without map and scale bar
    pixels = screenshot(page)[part].astype(int)
    assert np.abs(pixels - expected[part]).mean() < 3
    assert np.abs(pixels - np.roll(expected, 1, axis=1)[part]).mean() > 6
    assert page.find_element(By.CSS_SELECTOR, ".where").text.startswith("20.0×, 0.499 µm/px")
    bar = page.find_element(By.CSS_SELECTOR, ".scale")
    assert bar.text == "50 µm"
    assert bar.size["width"] == pytest.approx(50 / 0.499, abs=1.5)

    # Layers have the colours of their values.
    run_js(page, "pane.viewer.viewport.goHome(true)")
    settled(page)
    index, half = index_of(viewed), PATCH / 2
    label, focus, clear = index["label"], index["focus"], (0, 0, 0, 0)

    def centre(row: int | np.int64) -> tuple[float, float]:
        return float(index["x_l0"][row] + half), float(index["y_l0"][row] + half)

    x, y = centre(np.flatnonzero(index["tissue"] == 1)[0])
    for key, point, colour in (
        ("label", centre(np.flatnonzero(label == 0)[3]), (*ORANGE, 255)),
        ("label", centre(np.flatnonzero(label == 1)[3]), (*BLUE, 255)),
        ("label", centre(np.flatnonzero(label < 0)[0]), clear),
        ("quality:tissue", (x, y), (253, 231, 37, 255)),
        ("mask", (x, y), (0, 158, 115, 255)),
        ("mask", (20, 2900), clear),
        ("grid", (x, y), clear),
    ):
        show(page, key)
        assert overlay_at(page, *point) == colour, key
        show(page, key, 0)
    show(page, "grid")
    assert overlay_at(page, x - half, y)[3] > 100
    show(page, "grid", 0)
    # A range of a quality column hides patches in all layers.
    show(page, "label")
    labelled = np.flatnonzero((label >= 0) & np.isfinite(focus))
    row = labelled[focus[labelled].argmin()]
    for least, opacity in ((float(focus[row]) + 1, 0), (None, 255)):
        code = "await pane.show(pane.layers.find(it => it.key === 'quality:focus'), 0, [args[0] ?? -Infinity, Infinity])"
        run_js(page, code, least)
        assert overlay_at(page, *centre(row))[3] == opacity
    show(page, "label", 0)
    code = (
        "const it = pane.layers.find(it => it.key === args[0]), grid = pane.slide.grids[it.grid];"
        "const i = it.values.findIndex(v => v === v), half = grid.size / 2;"
        "return [grid.x[i] + half, grid.y[i] + half]"
    )
    for key in (
        "split:run",
        "run:predicted",
        "run:p:Dermis",
        "bags:attention",
        "predictions:p:Epidermis",
    ):
        show(page, key)
        assert overlay_at(page, *run_js(page, code, key))[3] == 255, key
        show(page, key, 0)

    # A click selects the patch.
    for row in (10, 70):
        x, y, crc = (index[name][row] for name in ("x_l0", "y_l0", "crc"))
        click(page, float(x) + 60, float(y) + 70)
        wait(page, f"document.querySelector('#patch h3')?.textContent === 'Patch {row} of {SLIDE}'")
        text = page.find_element(By.ID, "patch").text
        for value in (f"x, y {x}, {y}", "checksum matches", f"crc {crc:08x}"):
            assert value in text
    page.find_element(By.XPATH, "//button[text()='In all slides']").click()
    wait(page, "document.querySelectorAll('#patch .thumb img').length === 12")
    thumbs = "[...document.querySelectorAll('#patch .thumb img')]"
    wait(page, f"{thumbs}.some(it => it.naturalWidth === 128)")
    page.find_element(By.CSS_SELECTOR, "#patch .thumb").click()
    heading = "document.querySelector('#patch h3').textContent"
    wait(page, f"!{heading}.startsWith('Patch 70 of {SLIDE}')")
    page.find_element(By.ID, "tab-errors").click()
    wait(page, "document.querySelectorAll('#errors .thumb').length > 2")
    page.find_element(By.CSS_SELECTOR, "#errors .thumb").click()
    wait(page, "histopipe.panes[0].selected.grid === 0 && histopipe.panes[0].place().pixel < 2")


@NIGHTLY
def test_everything_by_keyboard(page: Browser, viewed: Path) -> None:
    def press(*keys: str) -> None:
        ActionChains(page).send_keys(*keys).perform()

    index = index_of(viewed)
    while page.execute_script("return document.activeElement.className") != "picture":
        press(Keys.TAB)
    focused = "return getComputedStyle(document.activeElement).outlineStyle"
    assert page.execute_script(focused) == "solid"
    run_js(page, "await pane.select({grid: 0, row: args[0]})", 60)
    press(Keys.ARROW_DOWN)
    x, y = index["x_l0"][60], index["y_l0"][60] + PATCH
    below = int(np.flatnonzero((index["x_l0"] == x) & (index["y_l0"] == y))[0])
    wait(page, f"histopipe.panes[0].selected.row === {below}")
    wait(page, f"document.querySelector('#status').textContent.startsWith('Patch {below} of')")
    before = run_js(page, "return pane.place()")
    press("+")
    assert run_js(page, "return pane.place()")["pixel"] == pytest.approx(before["pixel"] / 1.5)
    press("0", "1")
    assert run_js(page, "return pane.place()")["pixel"] == pytest.approx(1)
    press(Keys.ENTER)
    assert run_js(page, "return pane.place().x") == x + PATCH / 2
    for key, name in (("n", "second"), ("p", SLIDE)):
        press(key)
        drawn = "histopipe.panes[0].viewer.world.getItemCount()"
        wait(page, f"histopipe.panes[0].slide.name === '{name}' && {drawn}")
    press("/")
    press("sec")
    wait(page, "document.querySelector('#count').textContent === '1 of 2 slides'")
    press(Keys.TAB, Keys.TAB, Keys.TAB, Keys.TAB)
    press(Keys.ESCAPE, "?")
    assert page.find_element(By.ID, "keys").is_displayed()
    press(Keys.ESCAPE)
    # Draw with the keyboard.
    page.find_element(By.ID, "tab-draw").send_keys(Keys.ENTER)
    wait(page, "document.querySelector('#class-name')")
    page.find_element(By.ID, "class-name").send_keys("By keys")
    page.find_element(By.XPATH, "//button[text()='Polygon']").send_keys(Keys.ENTER)
    right, down, left = Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT
    press(" ", right, right, " ", down, down, " ", left, left, " ", Keys.BACKSPACE, Keys.ENTER)
    features = run_js(page, "return pane.tools.data.features")
    assert features[-1]["properties"]["classification"]["name"] == "By keys"
    assert len(features[-1]["geometry"]["coordinates"][0]) == 4  # a triangle, closed
    press(Keys.DELETE)
    assert len(run_js(page, "return pane.tools.data.features")) == len(features) - 1


@NIGHTLY
def test_drawn_areas_are_saved(page: Browser, viewed: Path, outlines: Path) -> None:
    file = outlines / f"{SLIDE}.geojson"
    page.find_element(By.ID, "tab-draw").click()
    wait(page, "document.querySelector('#class-name')")
    page.find_element(By.ID, "class-name").send_keys("Here")
    page.find_element(By.XPATH, "//button[text()='Polygon']").click()
    corners = [[400, 600], [900, 600], [900, 1200], [400, 1200]]
    for x, y in corners:
        click(page, x, y)
        time.sleep(0.35)  # otherwise it is a double click
    ActionChains(page).send_keys(Keys.ENTER).perform()
    page.find_element(By.ID, "save").click()
    wait(page, "document.querySelector('#status').textContent.startsWith('Saved as')")
    (feature,) = json.loads(file.read_text())["features"]
    assert feature["properties"]["classification"]["name"] == "Here"
    pixel = run_js(page, "return pane.place().pixel")
    np.testing.assert_allclose(feature["geometry"]["coordinates"][0][:4], corners, atol=pixel)
    # Another tab changes the file: the second one to save is warned, and can keep both.
    feature["properties"]["classification"]["name"] = "Other"
    file.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    name = page.find_element(By.CSS_SELECTOR, ".outlines input")
    name.clear()
    name.send_keys("Mine", Keys.TAB)
    page.find_element(By.ID, "save").click()
    wait(page, "document.querySelector('.conflict')")
    page.get_log("browser")  # type: ignore[no-untyped-call] # Chromium notes the answer 409
    page.find_element(By.XPATH, "//button[text()='Save the outlines of both']").click()
    wait(page, "document.querySelector('#status').textContent.startsWith('Saved as')")
    wait(page, "!document.querySelector('.conflict')")
    features = json.loads(file.read_text())["features"]
    names = [feature["properties"]["classification"]["name"] for feature in features]
    assert names == ["Other", "Mine"]
    # Outlines that are not saved are not lost without a question.
    run_js(page, "await histopipe.compare(true, 'second')")
    run_js(page, "window.confirm = text => { window.asked = text; return false; }")
    run_js(page, "pane.dispatchEvent(new Event('activate'))")
    page.find_element(By.XPATH, "//button[text()='Polygon']").click()
    ActionChains(page).send_keys(" ", Keys.ARROW_RIGHT, " ").perform()
    run_js(page, "await histopipe.open('second')")
    asked = run_js(page, "return [window.asked.slice(0, 12), pane.slide.name]")
    assert asked == ["The outlines", SLIDE]
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    run_js(page, "await histopipe.compare(false)")


@NIGHTLY
def test_address_holds_the_whole_view(page: Browser, viewer: Viewer) -> None:
    show(page, "label", 0.4)
    code = "const it = pane.layers.find(it => it.key === 'run:p:Dermis'); it.range = [0.25, Infinity]; await pane.show(it, 0.7)"
    run_js(page, code)
    run_js(page, "await pane.select({grid: 0, row: 33}); pane.go({x: 1000, y: 1500, pixel: 1.25})")
    run_js(page, "await histopipe.compare(true, 'second')")
    settled(page)
    time.sleep(0.4)
    # The second picture follows the first.
    places = "return histopipe.panes.map(it => it.place(true))"
    before = run_js(page, places)
    move = "pane.go({...pane.place(), x: 1200, y: 1600})"
    run_js(page, f"pane.dispatchEvent(new Event('activate')); {move}")
    time.sleep(0.4)
    after = run_js(page, places)
    for axis in ("x", "y"):
        first, second = (b[axis] - a[axis] for a, b in zip(before, after, strict=True))
        assert abs(first) > 50 and first == pytest.approx(second, abs=0.5)
    settled(page)
    time.sleep(0.4)
    state = (
        "return histopipe.panes.map(it => [it.slide.name, it.place(), it.selected?.row,"
        " it.layers.filter(l => l.opacity).map(l => [l.key, l.opacity, l.range?.[0] ?? null])])"
    )
    expected, url = run_js(page, state), page.current_url
    assert url.startswith(viewer.url + "#s=")
    page.get("about:blank")
    page.get(url)
    wait(page, "window.histopipe?.panes.length === 2 && histopipe.panes[1].slide")
    settled(page)
    for a, b in zip(run_js(page, state), expected, strict=True):
        assert [a[0], *a[2:]] == [b[0], *b[2:]]
        assert a[1].pop("pixel") == pytest.approx(b[1].pop("pixel"), rel=1e-3)
        assert a[1] == pytest.approx(b[1], abs=0.2)
    run_js(page, "await histopipe.compare(false)")
    # A range hides patches also while its layer is not visible, and is in the address.
    tissue = "pane.layers.find(it => it.key === 'quality:tissue')"
    run_js(page, f"await pane.show({tissue}, 0, [0.95, Infinity])")
    wait(page, "location.hash.includes('0%7C0.95_%7Cquality')")
    assert " patches" in page.find_element(By.CSS_SELECTOR, ".where").text
    page.get("about:blank")
    page.get(viewer.url + "#s=NoSuchSlide&at=1,1,1")
    status = "document.querySelector('#status')?.textContent"
    wait(page, f"{status}.startsWith('There is no slide NoSuchSlide')")
