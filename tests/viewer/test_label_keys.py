"""Label patches in a browser, by clicks and keys."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from helpers.commands import succeed
from helpers.viewed import SLIDE, viewing
from histopipe.labels.journal import Labels, read_labels
from histopipe.viewer.view import Viewer

Browser = webdriver.Chrome
CLASSES = ("Dermis", "Epidermis")


@pytest.fixture
def viewer(viewed: Path, tmp_path: Path) -> Iterator[Viewer]:
    options = {"journal": tmp_path, "rater": "anna", "classes": CLASSES}
    with viewing(viewed / "patches.lmdb", features=viewed / "features", **options) as running:
        yield running


def run_js(browser: Browser, code: str, *arguments: Any) -> Any:
    """Run JavaScript; `pane` is the first picture."""
    return browser.execute_script(f"const pane = window.histopipe?.panes[0]; {code}", *arguments)


def wait(browser: Browser, condition: str) -> None:
    until = time.monotonic() + 30
    while not run_js(browser, f"return Boolean({condition})"):
        assert time.monotonic() < until, condition
        time.sleep(0.02)


def state(browser: Browser) -> str:
    return browser.find_element(By.ID, "label-state").text


def saved(browser: Browser, acts: int) -> None:
    wait(
        browser,
        f"window.histopipe.labels.state.acts === {acts} && !window.histopipe.labels.waiting.length",
    )
    assert "saved at" in state(browser)


def place_of(browser: Browser, row: int) -> tuple[int, int]:
    """Return the middle of a patch on the screen, from the middle of the picture."""
    code = (
        "const {x, y, size} = pane.slide.grids[0], at = pane.toScreen({x: x[arguments[0]] + size / 2, y: y[arguments[0]] + size / 2});"
        "return [Math.round(at.x - pane.picture.clientWidth / 2), Math.round(at.y - pane.picture.clientHeight / 2)]"
    )
    x, y = run_js(browser, code, row)
    return x, y


def keys(browser: Browser, *pressed: str) -> None:
    ActionChains(browser).send_keys(*pressed).perform()


def chord(browser: Browser, key: str) -> None:
    ActionChains(browser).key_down(Keys.CONTROL).send_keys(key).key_up(Keys.CONTROL).perform()


@pytest.mark.long(reason="a browser")
def test_clicks_rectangles_and_keys_label_patches(
    browser: Browser, viewer: Viewer, tmp_path: Path
) -> None:
    metrics = {"width": 900, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(viewer.url)
    wait(browser, "pane?.viewer.world.getItemCount() > 0 && pane.slide.grids[0].x")
    picture = browser.find_element(By.CSS_SELECTOR, ".picture")
    corners = [
        tuple(at)
        for at in run_js(
            browser,
            "const {x, y} = pane.slide.grids[0]; return Array.from(x, (it, i) => [it, y[i]])",
        )
    ]

    def labels() -> dict[tuple[int, int], str]:
        journal: Labels = read_labels(tmp_path, "anna", CLASSES)
        return {(x, y): name for (_, x, y), name in journal.labels.items()}

    browser.find_element(By.ID, "tab-label").click()
    assert "0 labels of anna saved" in state(browser)
    assert "no login" in state(browser)

    ActionChains(browser).move_to_element_with_offset(
        picture, *place_of(browser, 40)
    ).click().perform()
    wait(browser, "window.histopipe.labels.selected().length === 1")
    keys(browser, "2")
    saved(browser, 1)
    assert labels() == {corners[40]: "Epidermis"}
    wait(browser, "pane.layers.find(it => it.key === 'mine').values[40] === 1")

    keys(browser, Keys.ARROW_DOWN)
    wait(browser, "pane.selected.row !== 40")
    below = corners[run_js(browser, "return pane.selected.row")]
    keys(browser, "u")
    saved(browser, 2)
    assert labels() == {corners[40]: "Epidermis", below: "unsure"}
    chord(browser, "z")
    saved(browser, 3)
    assert labels() == {corners[40]: "Epidermis"}
    chord(browser, "y")
    saved(browser, 4)
    keys(browser, Keys.BACKSPACE)
    saved(browser, 5)
    assert labels() == {corners[40]: "Epidermis"}

    browser.find_element(By.ID, "select-rectangle").click()
    x, y = place_of(browser, 40)
    drag = ActionChains(browser).move_to_element_with_offset(picture, x - 3, y - 3)
    drag.click_and_hold().move_by_offset(60, 60).release().perform()
    wait(browser, "window.histopipe.labels.selected().length > 2")
    chosen = run_js(browser, "return window.histopipe.labels.selected()")
    browser.find_element(By.CSS_SELECTOR, ".class-key").click()
    saved(browser, 6)
    assert labels() == {(x, y): "Dermis" for _, x, y in chosen}

    # The sheet: each key labels the patch in focus, and moves on.
    wait(browser, "window.histopipe.labels.state.loaded")
    keys(browser, "q")
    wait(browser, "document.activeElement.classList.contains('thumb')")
    sheet = run_js(browser, "return window.histopipe.labels.sheet.map(it => [it.x, it.y])")
    before = labels()
    keys(browser, "1", "2", Keys.ARROW_RIGHT, "u")
    saved(browser, 9)
    names = [labels().get((x, y)) for x, y in sheet[:5]]
    assert names == ["Dermis", "Epidermis", None, "unsure", None]
    assert len(labels()) == len(before) + 3
    texts = [thumb.text for thumb in browser.find_elements(By.CSS_SELECTOR, "#sheet .thumb")]
    assert texts[:4] == ["Dermis", "Epidermis", "", "unsure"]
    run_js(browser, "document.querySelector('#sheet button').focus()")
    keys(browser, *"12" * 12)
    saved(browser, 9 + 24)
    wait(
        browser,
        "window.histopipe.labels.state.learned && pane.layers.find(it => it.key === 'learned').values",
    )
    accuracy = browser.find_element(By.ID, "accuracy").text
    assert "held-out regions of the only patient" in accuracy
    assert "One patient allows no interval" in accuracy
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


@pytest.mark.nightly(reason="test_clicks_rectangles_and_keys_label_patches has a browser")
def test_a_label_without_an_answer_is_sent_again_and_not_doubled(
    browser: Browser, viewer: Viewer, tmp_path: Path
) -> None:
    browser.get(viewer.url)
    wait(browser, "pane?.viewer.world.getItemCount() > 0 && pane.slide.grids[0].x")
    browser.find_element(By.ID, "tab-label").click()
    # The first answer is lost.
    run_js(
        browser,
        "const send = window.fetch; window.fetch = async (path, ...rest) => { const answer = await send(path, ...rest);"
        "if (path === 'labels' && rest.length && !window.lost) { window.lost = true; throw new TypeError('connection lost'); }"
        "return answer; }; pane.select({grid: 0, row: 7});",
    )
    wait(browser, "window.histopipe.labels.selected().length === 1")
    keys(browser, "1")
    wait(
        browser,
        "document.querySelector('#label-state').textContent.includes('Not saved yet: 1. connection lost. Trying again')",
    )
    saved(browser, 1)
    assert read_labels(tmp_path, "anna", CLASSES).count == 1
    wait(browser, "pane.layers.find(it => it.key === 'mine').values?.[7] === 0")


@pytest.mark.nightly(reason="test_clicks_rectangles_and_keys_label_patches has a browser")
def test_a_selection_ends_with_its_slide_and_acts_wait_for_their_viewer(
    browser: Browser, viewed: Path, tmp_path: Path
) -> None:
    store, slides = tmp_path / "patches.lmdb", tmp_path / "slides"
    shutil.copytree(viewed / "slides", slides)
    (slides / f"{SLIDE}.svs").rename(slides / "first.svs")
    succeed("ingest", viewed / "slides", slides, "--out", store, "--patch-size", 256)
    classes, journal = ("__proto__", "constructor"), tmp_path / "labels"
    token = {"token": "a-token-of-tests-1"}
    options: dict[str, Any] = {"journal": journal, "classes": classes, **token}
    with viewing(store, rater="anna", **options) as running:
        browser.get(running.url)
        wait(browser, "pane?.viewer.world.getItemCount() > 0 && pane.slide.grids[0].x")
        browser.find_element(By.ID, "tab-label").click()
        run_js(browser, "pane.select({grid: 0, row: 1})")
        wait(browser, "window.histopipe.labels.selected().length === 1")
        keys(browser, "2")
        saved(browser, 1)
        # In one step: the panel may be drawn again meanwhile.
        texts = (
            "return [...document.querySelectorAll('.class-key .soft')].map(it => it.textContent)"
        )
        assert run_js(browser, texts)[:3] == ["0", "1", "0"]
        wait(browser, "pane.layers.find(it => it.key === 'mine').raster")
        run_js(
            browser,
            "const names = [...document.querySelectorAll('#slides button')].map(it => it.dataset.slide);"
            "window.histopipe.open(names.find(name => name !== pane.slide.name))",
        )
        wait(browser, "pane.number === 1 && pane.slide.grids[0].x")
        assert run_js(browser, "return window.histopipe.labels.selected()") == []
        run_js(browser, "pane.select({grid: 0, row: 2})")
        wait(browser, "window.histopipe.labels.selected().length === 1")
        port = running.port
    keys(browser, "1")
    wait(browser, "window.histopipe.labels.failure")
    with viewing(store, rater="ben", **{**options, "port": port}):
        wait(browser, "window.histopipe.labels.failure.includes('another rater')")
        assert read_labels(journal, "ben", classes).count == 0
    with viewing(store, rater="anna", **{**options, "port": port}):
        saved(browser, 2)
    assert [*read_labels(journal, "anna", classes).labels.values()] == ["constructor", "__proto__"]
