"""Test reports in a browser: opened from disk, with many slides, on a narrow screen, and printed."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from sklearn.metrics import roc_auc_score, roc_curve

from helpers.commands import Run
from helpers.examples import examples
from helpers.scores import class_scores
from helpers.stores import RECORD, SPEC, columns_of
from histopipe.maintenance.store_info import info_of
from histopipe.reports.charts import roc_chart
from histopipe.reports.store_report import _cards
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.tasks.statistics import roc_of
from histopipe.tasks.task import Predictions

SLIDES = 300
EVIL = "<img src=x onerror=document.title='evil'>&\"'"


def visit(browser: webdriver.Chrome, page: Path, width: int = 1280, **media: str) -> None:
    """Open a page from disk, and check that it prints nothing to the console and loads no resource."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.resolve().as_uri())
    assert_quiet(browser)


def assert_quiet(browser: webdriver.Chrome) -> None:
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    requested = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))"
    )
    assert requested == []


def rows_shown(browser: webdriver.Chrome, column: int) -> list[str]:
    """Return a column of the visible rows of the last table, in the displayed order."""
    script = (
        "return Array.from([...document.querySelectorAll('table.sortable')].at(-1).tBodies[0].rows)"
        f".filter(r => !r.hidden && r.cells.length > 3).map(r => r.cells[{column}].textContent)"
    )
    texts: list[str] = browser.execute_script(script)
    return texts


@pytest.fixture(scope="module")
def many_slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of many slides with thumbnails. Every tenth slide failed, and one has a malicious name."""
    path = tmp_path_factory.mktemp("many") / "many.lmdb"
    rng = np.random.default_rng(1)
    patches = [simplejpeg.encode_jpeg(rng.integers(0, 255, (8, 8, 3), np.uint8)) for _ in range(3)]
    thumbnail = simplejpeg.encode_jpeg(rng.integers(0, 255, (30, 40, 3), np.uint8))
    description: dict[str, Any] = {
        "width": 400,
        "height": 300,
        "bounds": [0, 0, 400, 300],
        "mpp": 0.5,
        "read_size": 8,
        "downsample": 1.0,
        "stride": 8,
        "route": "copy",
        "level": 0,
    }
    with StoreWriter(path, dataclasses.replace(SPEC, patch_size=8)) as writer:
        ids = [f"slide-{i:04d}" for i in range(SLIDES)]
        ids[7] = EVIL
        records = [
            dataclasses.replace(RECORD, id=name, label="nt"[i % 2], **description)
            for i, name in enumerate(ids)
        ]
        numbers = writer.register(records)
        for i, record in enumerate(records):
            if i % 10 == 3:
                writer.fail(numbers[record.id], record.with_failure(f"{record.id} is broken"))
                continue
            count = 1 + i % 3
            crc = writer.put_patches(numbers[record.id], range(count), patches[:count])
            columns = columns_of(crc, np.array([len(p) for p in patches[:count]]))
            columns["focus"] = rng.random(count) * 100
            done = dataclasses.replace(record, planned=count, stored=count)
            writer.complete(numbers[record.id], done, columns, {"thumb": thumbnail})
    return path


@pytest.fixture(scope="module")
def store_report(many_slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from histopipe.reports.report import report

    return report(many_slides, out=tmp_path_factory.mktemp("report") / "store.html").file


@pytest.mark.nightly(reason="a browser; test_report_of_a_run_is_complete shows a page in make test")
def test_sort_and_filter_many_slides(browser: webdriver.Chrome, store_report: Path) -> None:
    visit(browser, store_report)
    assert browser.title == "Store many.lmdb"
    table = browser.find_elements(By.CSS_SELECTOR, "table.sortable")[-1]
    slides = rows_shown(browser, 1)
    assert len(slides) == SLIDES and EVIL in slides
    headers = {h.text.split()[0]: h for h in table.find_elements(By.CSS_SELECTOR, "th")}
    # Numbers are sorted as numbers in both directions, and missing values stay last.
    for times, direction in ((1, "ascending"), (2, "descending")):
        headers["focus"].find_element(By.TAG_NAME, "button").click()
        assert headers["focus"].get_attribute("aria-sort") == direction
        cells = rows_shown(browser, list(headers).index("focus") + 1)
        numbers = [float(v) for v in cells if v]
        assert numbers == sorted(numbers, reverse=times == 2)
        assert cells[: len(numbers)] == [v for v in cells if v]
        assert len(cells) - len(numbers) == SLIDES // 10
    # With the keyboard only.
    headers["slide"].find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert headers["focus"].get_attribute("aria-sort") is None
    assert rows_shown(browser, 1)[-1] == f"slide-{SLIDES - 1:04d}"
    search = browser.find_elements(By.CSS_SELECTOR, "input[type=search]")[-1]
    search.send_keys("failed slide-00")
    assert rows_shown(browser, 1) == [f"slide-{i:04d}" for i in range(3, 100, 10)]
    assert browser.find_elements(By.CSS_SELECTOR, "output")[-1].text == f"10 of {SLIDES}"
    search.send_keys(Keys.CONTROL, "a")
    search.send_keys(Keys.DELETE)
    assert len(rows_shown(browser, 1)) == SLIDES
    assert_quiet(browser)


@pytest.mark.nightly(reason="a browser")
def test_only_visible_pictures_are_decoded(browser: webdriver.Chrome, store_report: Path) -> None:
    visit(browser, store_report)
    assert browser.find_elements(By.TAG_NAME, "img") == []
    button = browser.find_element(By.CSS_SELECTOR, "tbody button.open")
    button.send_keys(Keys.SPACE)
    assert button.get_attribute("aria-expanded") == "true"
    loaded = "return [...document.images].filter(i => i.complete && i.naturalWidth > 80).length"
    WebDriverWait(browser, 10).until(lambda b: b.execute_script(loaded) == 2)
    button.send_keys(Keys.SPACE)
    assert browser.find_elements(By.TAG_NAME, "img") == []
    browser.find_element(By.CSS_SELECTOR, ".tools button.open").click()
    images = browser.find_elements(By.TAG_NAME, "img")
    assert len(images) == 2 * (SLIDES - SLIDES // 10)
    with_source = browser.execute_script("return [...document.images].filter(i => i.src).length")
    assert with_source < 60, "pictures far from the visible area are not decoded"
    assert_quiet(browser)


def test_unlabelled_slides_have_no_label(small_store: Path) -> None:
    with Store(small_store) as store:
        summary = replace(info_of(store), labels={"unlabelled": 7})
    cards = {name: (value, note) for name, value, note in _cards(summary).content}
    assert cards["labels"] == ("0", "7 unlabelled")


@pytest.mark.nightly(reason="a browser")
@pytest.mark.parametrize("width", [1200, 400])
def test_page_fits_the_width_of_the_screen(
    browser: webdriver.Chrome, store_report: Path, run_report: Path, width: int
) -> None:
    for page in (store_report, run_report):
        visit(browser, page, width)
        browser.find_element(By.CSS_SELECTOR, "nav")
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
        hidden = "return [...document.querySelectorAll('#metrics .scroll')].map(e => e.scrollWidth - e.clientWidth)"
        assert width < 1000 or not any(browser.execute_script(hidden))
        charts = browser.find_elements(By.CSS_SELECTOR, "svg.chart")
        assert len(charts) >= 2
        assert all(0 < chart.size["width"] <= width for chart in charts)
        assert all(chart.get_attribute("aria-label") for chart in charts)


@pytest.mark.nightly(reason="a browser")
def test_light_and_dark_colours_and_print(browser: webdriver.Chrome, run_report: Path) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        visit(browser, run_report, prefers_color_scheme=scheme)
        text = "text, tspan"
        colours[scheme] = browser.execute_script(
            "const c = e => getComputedStyle(e);"
            f"return [c(document.body).backgroundColor, c(document.querySelector('svg.chart {text}')).fill]"
        )
    assert colours["light"] == ["rgb(255, 255, 255)", "rgb(28, 36, 48)"]
    assert colours["dark"] == ["rgb(20, 24, 30)", "rgb(230, 234, 240)"]
    paper = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(base64.b64decode(paper["data"])) > 20_000


@pytest.fixture(scope="module")
def run_report(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from histopipe.reports.report import report

    return report(trained, out=tmp_path_factory.mktemp("report") / "run.html").file


def test_report_of_a_run_is_complete(
    browser: webdriver.Chrome, run_report: Path, trained: Path
) -> None:
    visit(browser, run_report)
    names = [a.text for a in browser.find_elements(By.CSS_SELECTOR, "nav a")]
    names = [name for name in names if name != "Failure analysis"]  # if there are failures
    assert names == [
        "Summary",
        "Metrics",
        "ROC and calibration",
        "Confusion",
        "Learning curves",
        "Slides",
        "Patches",
        "Heatmaps",
        "Participant flow",
        "Splits",
        "Configuration",
        "Environment",
        "Limitations",
    ]
    metrics = json.loads((trained / "metrics.json").read_text())
    text = browser.find_element(By.TAG_NAME, "main").text
    for side in ("validation", "test"):
        assert f"{metrics[side]['patch']['auc']:.3f}" in text
        assert metrics[side]["patch"]["patients"] < 5
        assert metrics[side]["patch"]["intervals"] == {}
    accuracy = metrics["test"]["patch"]["accuracy"]
    assert f"{accuracy:.3f} [" not in text
    for part in (
        "split by patient",
        "Performance on slides from another hospital",
        metrics["tensorflow"],
        "too few patients for an interval",
        "correct decisions with the highest confidence",
    ):
        assert part.lower() in text.lower(), part
    confusion = browser.find_element(By.CSS_SELECTOR, "table.confusion").text
    for row in metrics["test"]["patch"]["confusion"]:
        assert " ".join(map(str, row)) in confusion
    # Every picture is decoded when it becomes visible.
    decoded = "return [...document.images].every(i => i.complete && i.naturalWidth > 50)"
    for image in browser.find_elements(By.CSS_SELECTOR, "img"):
        browser.execute_script("arguments[0].scrollIntoView()", image)
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(decoded))
    assert len(browser.find_elements(By.CSS_SELECTOR, "img")) > 5
    assert_quiet(browser)


def test_errors_of_report(trained: Path, tmp_path: Path, run: Run) -> None:
    def refused(code: int, message: str, *arguments: object) -> None:
        done = run("report", *arguments)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr

    refused(4, "is neither a store, a run nor predictions", tmp_path)
    refused(2, "--out: found .", trained, "--out", ".")
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "history.csv").write_text("epoch\nx\n")
    refused(5, "history.csv is damaged", folder)
    (folder / "metrics.json").unlink()
    refused(2, "no finished run in", folder)
    (folder / "splits").mkdir()
    refused(2, "has no finished fold", folder)
    assert not list(tmp_path.rglob("report.html"))


# ROC curves


@st.composite
def some_scores(draw: st.DrawFn) -> Predictions:
    count = draw(st.integers(2, 40))
    values = np.array(draw(st.lists(st.integers(0, 10), min_size=count, max_size=count))) / 10
    label = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.int32)
    patient = np.array(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)), np.int32)
    probability = np.stack([1 - values, values], axis=1)
    return class_scores(label, probability, patient)


@given(some_scores(), st.integers(0, 5))
@examples(80)
def test_roc_curve_equals_scikit_learn_and_its_band_is_valid(
    scores: Predictions, seed: int
) -> None:
    roc = roc_of(scores.label == 1, scores.output[:, 1], scores.patient, patients=6, seed=seed)
    if len(np.unique(scores.label)) < 2:
        assert roc is None
        return
    assert roc is not None
    false_rate, true_rate, _ = roc_curve(scores.label, scores.output[:, 1], drop_intermediate=False)
    assert np.allclose(roc.false_positive, false_rate)
    assert np.allclose(roc.true_positive, true_rate)
    area = np.trapezoid(roc.true_positive, roc.false_positive)
    assert area == pytest.approx(roc_auc_score(scores.label, scores.output[:, 1]))
    if roc.band is not None:
        _, low, high = roc.band
        assert ((low >= 0) & (low <= high) & (high <= 1)).all()
        assert (np.diff(low) >= -1e-9).all()
        assert len(np.unique(scores.patient)) > 1


def test_every_class_has_a_curve() -> None:
    rng = np.random.default_rng(1)
    names = ["_first", r"b\c", *"defghijk"]
    label = rng.integers(0, len(names), 300).astype(np.int32)
    probability = rng.dirichlet(np.ones(len(names)), 300)
    patient = np.arange(300, dtype=np.int32) % 30
    curves = {
        name: roc_of(label == i, probability[:, i], patient, patients=30, seed=1)
        for i, name in enumerate(names)
    }
    chart = roc_chart("ROC", {name: roc for name, roc in curves.items() if roc is not None})
    assert all(f">{name}<" in chart or f"> {name}<" in chart for name in names)
