"""Filter, sort, page and mark slides in the table of a browser, and download it."""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from helpers.viewed import CLASSES, SLIDE, viewing
from histopipe.labels.journal import read_labels
from histopipe.predictions.sources import SLIDES, PredictionsFolder
from histopipe.viewer.view import Viewer

Browser = webdriver.Chrome
COUNT, PAGE = 230, 100
LABELS = ("tumour", None, 'a "label", of\ntwo lines')
P_DERMIS = {f"s{n:03}": n * 37 % COUNT / COUNT for n in range(COUNT) if n % 5}
PATCHES = {f"s{n:03}": n % 7 for n in range(COUNT)}


@pytest.fixture
def viewer(viewed: Path, tmp_path: Path) -> Iterator[Viewer]:
    """A slide with a store, and 230 slides of which predictions only are there."""
    predictions = tmp_path / "predictions"
    shutil.copytree(viewed / "predictions", predictions)
    source = PredictionsFolder(predictions)
    (slide,) = source.predicted_slides.values()
    for n, (name, patches) in enumerate(PATCHES.items()):
        other = replace(slide, slide=name, patient=f"p{n // 2}", label=LABELS[n % 3])
        path = source.path_of(name, ".json")
        path.write_text(json.dumps(asdict(replace(other, patches=patches))))
    rows = [f"{name},{CLASSES[p < 0.5]},{p},{1 - p}" for name, p in P_DERMIS.items()]
    header = ",".join(["slide", "predicted", *(f"p_{name}" for name in CLASSES)])
    (predictions / SLIDES).write_text("\n".join([header, *rows]))
    options = {"journal": tmp_path / "labels", "rater": "anna", "classes": CLASSES}
    with viewing(viewed / "patches.lmdb", predictions, **options) as running:
        yield running


def wait(browser: Browser, condition: str) -> None:
    until = time.monotonic() + 30
    while not browser.execute_script(f"return Boolean({condition})"):
        assert time.monotonic() < until, condition
        time.sleep(0.02)


def keys(browser: Browser, *pressed: str) -> None:
    ActionChains(browser).send_keys(*pressed).perform()


def names(browser: Browser) -> list[str]:
    """Return the slides of the page of the table."""
    code = "return [...document.querySelectorAll('#table tbody tr')].map(row => row.dataset.slide)"
    return [str(name) for name in browser.execute_script(code)]


def focused(browser: Browser) -> str:
    code = "return document.activeElement.closest('[data-slide]')?.dataset.slide ?? ''"
    return str(browser.execute_script(code))


def choose(browser: Browser, filter_key: str, value: str) -> None:
    code = (
        "const select = document.getElementById(arguments[0]); select.value = arguments[1];"
        "select.dispatchEvent(new Event('change'))"
    )
    browser.execute_script(code, f"filter-{filter_key}", value)


def sort_by(browser: Browser, key: str) -> str | None:
    """Click on the header of a column, and return its aria-sort."""
    browser.find_element(By.CSS_SELECTOR, f'#table thead [data-key="{key}"]').click()
    (cell,) = browser.find_elements(By.CSS_SELECTOR, "#table th[aria-sort]")
    button = cell.find_element(By.TAG_NAME, "button")
    return cell.get_attribute("aria-sort") if button.get_attribute("data-key") == key else None


def downloaded(browser: Browser) -> list[dict[str, str]]:
    code = (
        "const done = arguments[0], save = URL.createObjectURL;"
        "URL.createObjectURL = blob => { blob.text().then(done); URL.createObjectURL = save; return save(blob); };"
        "document.querySelector('#csv').click()"
    )
    text = browser.execute_async_script(code)
    assert text.endswith("\r\n")
    return [*csv.DictReader(io.StringIO(text, newline=""))]


def open_page(browser: Browser, viewer: Viewer) -> None:
    metrics = {"width": 900, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(viewer.url)
    wait(browser, "window.histopipe?.slides.filters.has('predictions:predicted')")


@pytest.mark.long(reason="a browser")
def test_slides_are_paged_sorted_filtered_and_marked(
    browser: Browser, viewer: Viewer, tmp_path: Path
) -> None:
    open_page(browser, viewer)
    slides = [SLIDE, *PATCHES]
    assert len(browser.find_elements(By.CSS_SELECTOR, "#slides li")) == PAGE
    keys(browser, "t")
    assert names(browser) == slides[:PAGE]
    assert len(browser.find_elements(By.TAG_NAME, "img")) <= PAGE + 1
    assert not browser.find_elements(By.CSS_SELECTOR, "#slides li")
    assert browser.execute_script("return document.querySelector('#panes').inert")

    # Pages and rows by keys.
    steps: list[tuple[str, int, int]] = [
        (Keys.ARROW_DOWN, 0, 1), (Keys.PAGE_DOWN, 100, 100), (Keys.ARROW_UP, 0, 99), (Keys.ARROW_DOWN, 100, 100),
        (Keys.END, 200, 200), (Keys.PAGE_DOWN, 200, 230), (Keys.PAGE_UP, 100, 100), (Keys.HOME, 0, 0), (Keys.ARROW_UP, 0, 0),
    ]  # fmt: skip
    for pressed, first, at in steps:
        keys(browser, pressed)
        assert names(browser) == slides[first : first + PAGE]
        assert focused(browser) == slides[at], pressed

    # A click on a header sorts, another one reverses; missing values are last.
    key = f"predictions:{CLASSES[0]}"
    by_p = sorted(P_DERMIS, key=lambda name: -P_DERMIS[name])
    missing = [name for name in slides if name not in P_DERMIS]
    for direction, ranked in (("descending", by_p), ("ascending", by_p[::-1])):
        assert sort_by(browser, key) == direction
        assert names(browser) == ranked[:PAGE]
        keys(browser, Keys.END)
        assert names(browser) == (ranked + missing)[200:]
    assert sort_by(browser, "patches") == "descending"
    # Of equal values, the order is that of the names.
    assert names(browser)[1:50] == sorted(PATCHES, key=lambda name: -PATCHES[name])[:49]

    # Filters. The table that is downloaded has all pages.
    choose(browser, "predictions:predicted", CLASSES[0])
    rows = downloaded(browser)
    chosen = {name for name, p in P_DERMIS.items() if p >= 0.5}
    assert {row["slide"] for row in rows} == chosen
    for row in rows:
        number = int(row["slide"][1:])
        assert row["label"] == (LABELS[number % 3] or "")
        assert float(row[key]) == P_DERMIS[row["slide"]]
        assert (row["patches"], row["labelled"], row["marked"]) == (str(number % 7), "", "0")
    choose(browser, "label", LABELS[2] or "")
    browser.find_element(By.ID, "search").send_keys("P10")
    tenth = [n for n in (20, 21, *range(200, 220)) if n % 3 == 2 and f"s{n:03}" in chosen]
    wait(browser, f"document.querySelectorAll('#table tbody tr').length === {len(tenth)}")
    assert sorted(names(browser)) == [f"s{n:03}" for n in tenth]
    browser.find_element(By.ID, "search").clear()
    for name in ("predictions:predicted", "label"):
        choose(browser, name, "")
    wait(browser, "document.querySelectorAll('#table tbody tr').length === 100")

    # A mark is shown as saved when it is in the journal.
    assert sort_by(browser, "slide") == "ascending"
    browser.find_element(By.CSS_SELECTOR, '[data-slide="s000"] .mark').click()
    keys(browser, Keys.ARROW_DOWN, "m")
    wait(browser, "window.histopipe.labels.state.acts === 2 && histopipe.slides.marks.size === 2")
    assert read_labels(tmp_path / "labels", "anna", CLASSES).marks == {"s000", "s001"}
    assert focused(browser) == "s001"
    choose(browser, "marked", "marked")
    assert names(browser) == ["s000", "s001"]
    keys(browser, "m")
    wait(browser, "histopipe.slides.marks.size === 1")
    assert names(browser) == ["s000", "s001"]  # until the filter is used again

    # A click on a row opens the slide, Escape only closes.
    browser.find_element(By.CSS_SELECTOR, '[data-slide="s000"] td.number').click()
    wait(browser, "histopipe.panes[0].slide.name === 's000'")
    assert not browser.find_element(By.ID, "table").is_displayed()
    keys(browser, "t", Keys.ESCAPE)
    assert not browser.find_element(By.ID, "table").is_displayed()
    assert browser.execute_script("return document.activeElement.className") == "picture"
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


@pytest.mark.nightly(reason="test_slides_are_paged_sorted_filtered_and_marked has a browser")
def test_progress_and_marks_are_those_of_the_journal(browser: Browser, viewer: Viewer) -> None:
    open_page(browser, viewer)
    code = (
        "const {labels, panes: [pane]} = window.histopipe, {x, y} = pane.slide.grids[0];"
        "labels.label([[0, x[0], y[0]], [0, x[1], y[1]]], arguments[0])"
    )
    wait(browser, "window.histopipe.panes[0].slide.grids[0].x")
    browser.execute_script(code, CLASSES[0])
    # The first answer to the mark is lost.
    lose = (
        "const send = window.fetch; window.fetch = async (path, ...rest) => { const answer = await send(path, ...rest);"
        "if (rest[0]?.body?.includes('mark') && !window.lost) { window.lost = true; throw new TypeError('connection lost'); }"
        "return answer; }"
    )
    wait(browser, "window.histopipe.labels.state.acts === 1")
    browser.execute_script(lose)
    keys(browser, "t", "m")
    # Read by scripts: the page makes the rows again.
    star = f"document.querySelector('[data-slide=\"{SLIDE}\"] .mark')"
    wait(browser, f"{star}.title === 'not saved yet'")
    state = "document.querySelector('#table-state').textContent"
    wait(browser, f"{state} === 'Not saved yet: 1. connection lost. Trying again'")
    wait(browser, f"{state}.includes('saved at')")
    wait(browser, f"{star}.textContent === '★' && {star}.title === 'Key m'")
    wait(browser, "histopipe.slides.labelled[0] === 2")
    open_page(browser, viewer)
    wait(browser, "histopipe.slides.marks.has(0)")
    keys(browser, "t")
    choose(browser, "labelled", "labelled")
    assert names(browser) == [SLIDE]
    count = browser.execute_script("return window.histopipe.slides.all[0].patches")
    wait(browser, f"document.querySelector('#table tbody').textContent.includes('2 of {count}')")
