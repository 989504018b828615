"""Test the viewer's page in a browser: pixels, layers, selection, keys, drawing, and the address."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
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

from helpers.commands import Run
from helpers.viewed import PATCH, SLIDE, viewing
from histopipe.geometry import PointL0, Size
from histopipe.slides.readers import open_slide
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
    open_page(browser, viewer.url)
    yield browser
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    urls = run_js(browser, "return performance.getEntriesByType('resource').map(it => it.name)")
    assert len(urls) > 5
    assert all(url.startswith((viewer.url, "data:", "blob:")) for url in urls)
    browser.get("about:blank")


def open_page(browser: Browser, url: str, width: int = 1280, **media: str) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(url)
    wait(browser, "window.histopipe?.panes[0]?.viewer.world.getItemCount() > 0")
    settled(browser)


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


def click(browser: Browser, x: float, y: float, count: int = 1) -> None:
    """Click at a level-0 pixel of the first picture."""
    code = (
        "const at = pane.toScreen({x: args[0], y: args[1]}), box = pane.picture.getBoundingClientRect();"
        "return [Math.round(box.x + at.x), Math.round(box.y + at.y)]"
    )
    left, top = run_js(browser, code, x, y)
    actions = ActionChains(browser, duration=0)
    actions.w3c_actions.pointer_action.move_to_location(left, top)  # type: ignore[no-untyped-call]
    for _ in range(count):
        actions.click()
    actions.perform()


@pytest.mark.long(reason="one pass of the browser; CI always has one")
def test_page_shows_pixels_layers_and_patches(page: Browser, viewed: Path) -> None:
    size = run_js(page, "return [pane.picture.clientWidth, pane.picture.clientHeight]")
    left, top = 600, 900
    middle = left + size[0] / 2, top + size[1] / 2
    run_js(page, "pane.go({x: args[0], y: args[1], pixel: 1})", *middle)
    settled(page)
    pixels = screenshot(page)
    with open_slide(viewed / "slides" / f"{SLIDE}.svs") as slide:
        expected = slide.read_region(PointL0(left, top), 0, Size(*size))
    rows, columns = slice(160, size[1] - 80), slice(20, size[0] - 160)  # without map and scale bar
    error = np.abs(pixels[rows, columns].astype(int) - expected[rows, columns]).mean()
    shifted = np.abs(
        pixels[rows, columns].astype(int) - np.roll(expected, 1, axis=1)[rows, columns]
    ).mean()
    assert error < 3
    assert shifted > 6
    text = page.find_element(By.CSS_SELECTOR, ".where").text
    assert text.startswith("20.0×, 0.499 µm/px")
    bar = page.find_element(By.CSS_SELECTOR, ".scale")
    assert bar.text == "50 µm"
    assert bar.size["width"] == pytest.approx(50 / 0.499, abs=1.5)

    # Layers have the colours of their values.
    run_js(page, "pane.viewer.viewport.goHome(true)")
    settled(page)
    index = index_of(viewed)
    half = PATCH / 2

    def centre(row: int) -> tuple[float, float]:
        return float(index["x_l0"][row] + half), float(index["y_l0"][row] + half)

    show(page, "label")
    for number, colour in ((0, ORANGE), (1, BLUE)):
        row = int(np.flatnonzero(index["label"] == number)[3])
        assert overlay_at(page, *centre(row)) == (*colour, 255)
    none = int(np.flatnonzero(index["label"] < 0)[0])
    assert overlay_at(page, *centre(none)) == (0, 0, 0, 0)
    show(page, "label", 0)
    show(page, "quality:tissue")
    full = int(np.flatnonzero(index["tissue"] == 1)[0])
    assert overlay_at(page, *centre(full)) == (253, 231, 37, 255)
    # A range of a quality column hides patches in all layers.
    show(page, "label")
    labelled = np.flatnonzero((index["label"] >= 0) & np.isfinite(index["focus"]))
    row = int(labelled[index["focus"][labelled].argmin()])
    show(page, "quality:tissue", 0)
    assert overlay_at(page, *centre(row))[3] == 255
    code = "const it = pane.layers.find(it => it.key === 'quality:focus'); await pane.show(it, 0, [args[0], Infinity])"
    run_js(page, code, float(index["focus"][row]) + 1)
    assert overlay_at(page, *centre(row)) == (0, 0, 0, 0)
    run_js(
        page,
        "await pane.show(pane.layers.find(it => it.key === 'quality:focus'), 0, [-Infinity, Infinity])",
    )
    show(page, "label", 0)
    for key in (
        "split:run",
        "run:predicted",
        "run:p:Dermis",
        "bags:attention",
        "predictions:p:Epidermis",
    ):
        show(page, key)
        values, corners = run_js(
            page,
            "const it = pane.layers.find(it => it.key === args[0]), grid = pane.slide.grids[it.grid];"
            "return [[...it.values].map(v => v === v ? v : null), [[...grid.x], [...grid.y], grid.size]]",
            key,
        )
        first = next(i for i, value in enumerate(values) if value is not None)
        x, y, side = corners[0][first], corners[1][first], corners[2]
        assert overlay_at(page, x + side / 2, y + side / 2)[3] == 255, key
        show(page, key, 0)
    show(page, "mask")
    assert overlay_at(page, *centre(full)) == (0, 158, 115, 255)
    assert overlay_at(page, 20, 2900)[3] == 0
    show(page, "mask", 0)
    show(page, "grid")
    x, y = float(index["x_l0"][full]), float(index["y_l0"][full])
    assert overlay_at(page, x, y + half)[3] > 100
    assert overlay_at(page, x + half, y + half)[3] == 0

    # A click selects the patch.
    for row in (10, 70):
        click(page, float(index["x_l0"][row]) + 60, float(index["y_l0"][row]) + 70)
        wait(page, f"document.querySelector('#patch h3')?.textContent === 'Patch {row} of {SLIDE}'")
        text = page.find_element(By.ID, "patch").text
        assert f"x, y {index['x_l0'][row]}, {index['y_l0'][row]}" in text
        assert "checksum matches" in text
        assert f"crc {index['crc'][row]:08x}" in text
    page.find_element(By.XPATH, "//button[text()='In all slides']").click()
    wait(page, "document.querySelectorAll('#patch .thumb img').length === 12")
    wait(
        page,
        "[...document.querySelectorAll('#patch .thumb img')].some(it => it.naturalWidth === 128)",
    )
    page.find_element(By.CSS_SELECTOR, "#patch .thumb").click()
    wait(
        page, f"!document.querySelector('#patch h3').textContent.startsWith('Patch 70 of {SLIDE}')"
    )
    page.find_element(By.ID, "tab-errors").click()
    wait(page, "document.querySelectorAll('#errors .thumb').length > 2")
    page.find_element(By.CSS_SELECTOR, "#errors .thumb").click()
    wait(page, "histopipe.panes[0].selected.grid === 0 && histopipe.panes[0].place().pixel < 2")


@NIGHTLY
def test_everything_by_keyboard(page: Browser, viewed: Path) -> None:
    index = index_of(viewed)
    press: Callable[..., None] = lambda *keys: ActionChains(page).send_keys(*keys).perform()  # noqa: E731
    for _ in range(40):
        press(Keys.TAB)
        if page.execute_script("return document.activeElement.className") == "picture":
            break
    outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    run_js(page, "await pane.select({grid: 0, row: args[0]})", 60)
    press(Keys.ARROW_DOWN)
    right_below = (index["x_l0"] == index["x_l0"][60]) & (
        index["y_l0"] == index["y_l0"][60] + PATCH
    )
    expected = int(np.flatnonzero(right_below)[0])
    wait(page, f"histopipe.panes[0].selected.row === {expected}")
    wait(page, f"document.querySelector('#status').textContent.startsWith('Patch {expected} of')")
    before = run_js(page, "return pane.place()")
    press("+")
    assert run_js(page, "return pane.place()")["pixel"] == pytest.approx(before["pixel"] / 1.5)
    press("0", "1")
    assert run_js(page, "return pane.place()")["pixel"] == pytest.approx(1)
    press(Keys.ENTER)
    assert run_js(page, "return pane.place().x") == index["x_l0"][expected] + PATCH / 2
    press("n")
    wait(
        page,
        "histopipe.panes[0].slide.name === 'second' && histopipe.panes[0].viewer.world.getItemCount()",
    )
    press("p")
    wait(
        page,
        f"histopipe.panes[0].slide.name === '{SLIDE}' && histopipe.panes[0].viewer.world.getItemCount()",
    )
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
def test_drawn_areas_label_patches(
    page: Browser, viewed: Path, outlines: Path, tmp_path: Path, run: Run
) -> None:
    index = index_of(viewed)
    page.find_element(By.ID, "tab-draw").click()
    wait(page, "document.querySelector('#class-name')")
    page.find_element(By.ID, "class-name").send_keys("Here")
    page.find_element(By.XPATH, "//button[text()='Polygon']").click()
    row = 60
    x, y = float(index["x_l0"][row]), float(index["y_l0"][row])
    for u, v in ((-8, -8), (136, -8), (136, 136), (-8, 136)):
        click(page, x + u, y + v)
        time.sleep(0.35)  # otherwise it is a double click
    ActionChains(page).send_keys(Keys.ENTER).perform()
    page.find_element(By.ID, "save").click()
    wait(page, "document.querySelector('#status').textContent.startsWith('Saved as')")
    saved = json.loads((outlines / f"{SLIDE}.geojson").read_text())
    assert [feature["properties"]["classification"]["name"] for feature in saved["features"]] == [
        "Here"
    ]
    store = shutil.copytree(viewed / "patches.lmdb", tmp_path / "patches.lmdb")
    done = run("annotate", store, outlines)
    assert done.returncode == 0, done.stderr
    with Store(store) as opened:
        labels = opened.index(0)["label"]
        assert np.flatnonzero(labels == opened.classes.index("Here")).tolist() == [row]
    # Another tab changes the file: the second one to save is warned, and can keep both.
    other = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 0]]]},
        "properties": {"objectType": "annotation", "classification": {"name": "Other"}},
    }
    (outlines / f"{SLIDE}.geojson").write_text(
        json.dumps({"type": "FeatureCollection", "features": [other]})
    )
    name = page.find_element(By.CSS_SELECTOR, ".outlines input")
    name.clear()
    name.send_keys("Mine", Keys.TAB)
    page.find_element(By.ID, "save").click()
    wait(page, "document.querySelector('.conflict')")
    page.get_log("browser")  # type: ignore[no-untyped-call] # Chromium notes the answer 409
    page.find_element(By.XPATH, "//button[text()='Save the outlines of both']").click()
    wait(page, "document.querySelector('#status').textContent.startsWith('Saved as')")
    wait(page, "!document.querySelector('.conflict')")
    saved = json.loads((outlines / f"{SLIDE}.geojson").read_text())
    names = [feature["properties"]["classification"]["name"] for feature in saved["features"]]
    assert names == ["Other", "Mine"]
    # Outlines that are not saved are not lost without a question.
    run_js(page, "await histopipe.compare(true, 'second')")
    run_js(page, "window.confirm = text => { window.asked = text; return false; }")
    run_js(page, "pane.dispatchEvent(new Event('activate'))")
    page.find_element(By.XPATH, "//button[text()='Polygon']").click()
    ActionChains(page).send_keys(" ", Keys.ARROW_RIGHT, " ").perform()
    run_js(page, "await histopipe.open('second')")
    assert run_js(page, "return [window.asked.slice(0, 12), pane.slide.name]") == [
        "The outlines",
        SLIDE,
    ]
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    run_js(page, "await histopipe.compare(false)")


@NIGHTLY
def test_address_holds_the_whole_view(page: Browser, viewer: Viewer) -> None:
    show(page, "label", 0.4)
    show(page, "run:p:Dermis", 0.7)
    code = "const it = pane.layers.find(it => it.key === 'run:p:Dermis'); it.range = [0.25, Infinity]; await pane.show(it, 0.7)"
    run_js(page, code)
    run_js(page, "await pane.select({grid: 0, row: 33}); pane.go({x: 1000, y: 1500, pixel: 1.25})")
    run_js(page, "await histopipe.compare(true, 'second')")
    settled(page)
    time.sleep(0.4)
    # The second picture follows the first.
    places = "return histopipe.panes.map(it => it.place(true))"
    before = run_js(page, places)
    run_js(
        page,
        "pane.dispatchEvent(new Event('activate')); pane.go({...pane.place(), x: 1200, y: 1600})",
    )
    time.sleep(0.4)
    after = run_js(page, places)
    for axis in ("x", "y"):
        moved = [b[axis] - a[axis] for a, b in zip(before, after, strict=True)]
        assert moved[0] == pytest.approx(moved[1], abs=0.5)
        assert abs(moved[0]) > 50
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
    restored = run_js(page, state)
    for a, b in zip(restored, expected, strict=True):
        assert [a[0], *a[2:]] == [b[0], *b[2:]]
        assert a[1]["pixel"] == pytest.approx(b[1]["pixel"], rel=1e-3)
        for axis in ("x", "y"):
            assert a[1][axis] == pytest.approx(b[1][axis], abs=0.2)
    run_js(page, "await histopipe.compare(false)")
    # A range hides patches also while its layer is not visible, and is in the address.
    run_js(
        page,
        "await pane.show(pane.layers.find(it => it.key === 'quality:tissue'), 0, [0.95, Infinity])",
    )
    wait(page, "location.hash.includes('0%7C0.95_%7Cquality')")
    assert " patches" in page.find_element(By.CSS_SELECTOR, ".where").text
    page.get("about:blank")
    page.get(viewer.url + "#s=NoSuchSlide&at=1,1,1")
    wait(
        page,
        "document.querySelector('#status')?.textContent.startsWith('There is no slide NoSuchSlide')",
    )


@NIGHTLY
@pytest.mark.parametrize("width", [400, 1280])
def test_narrow_and_dark(browser: Browser, viewer: Viewer, width: int) -> None:
    open_page(browser, viewer.url, width, prefers_color_scheme="dark")
    sizes = run_js(
        browser,
        "return [document.documentElement.scrollWidth, innerWidth, pane.picture.clientWidth]",
    )
    assert sizes[0] <= sizes[1]
    assert sizes[2] >= 380
    ground = run_js(browser, "return getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(20, 24, 30)"
    named = run_js(
        browser,
        "return [...document.querySelectorAll('button, input, select')].filter(it => it.checkVisibility())"
        ".filter(it => !(it.textContent.trim() || it.ariaLabel || it.labels?.length || it.placeholder))"
        ".map(it => it.outerHTML)",
    )
    assert named == []
