"""Test reports in a browser, opened from disk and with many slides; and their ROC curves."""

from __future__ import annotations

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
from sklearn.metrics import roc_curve

from helpers.commands import RunCommand
from helpers.examples import examples
from helpers.scores import class_scores
from helpers.stores import RECORD, SPEC, columns_of, jpegs
from histopipe.reports.charts import roc_chart
from histopipe.reports.report import report
from histopipe.store.writer import StoreWriter
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.statistics import roc_of

SLIDES = 300
EVIL = "<img src=x onerror=document.title='evil'>&\"'"


def visit(browser: webdriver.Chrome, page: Path) -> None:
    """Open a page from disk, and check that it prints nothing to the console and loads no resource."""
    metrics = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
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
def store_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a store of many slides with thumbnails. Every tenth slide failed, and one has a malicious name."""
    path = tmp_path_factory.mktemp("many") / "many.lmdb"
    rng = np.random.default_rng(1)
    thumbnail = simplejpeg.encode_jpeg(rng.integers(0, 255, (30, 40, 3), np.uint8))
    description: dict[str, Any] = {
        "width": 400,
        "height": 300,
        "bounds": [0, 0, 400, 300],
        "mpp": 0.5,
        "read_size": 16,
        "downsample": 1.0,
        "stride": 16,
        "route": "copy",
        "level": 0,
    }
    with StoreWriter(path, SPEC) as writer:
        for i in range(SLIDES):
            name = EVIL if i == 7 else f"slide-{i:04d}"
            record = replace(RECORD, id=name, label="nt"[i % 2], **description)
            number = writer.register([record])[name]
            if i % 10 == 3:
                writer.fail(number, record.with_failure(f"{name} is broken"))
                continue
            count = 1 + i % 3
            patches = jpegs(0, count)
            crc = writer.put_patches(number, range(count), patches)
            columns = columns_of(crc, np.array([len(patch) for patch in patches]))
            columns["focus"] = rng.random(count) * 100
            done = replace(record, planned=count, stored=count)
            writer.complete(number, done, columns, {"thumb": thumbnail})
    return report(path, out=path.with_name("store.html")).file


@pytest.mark.nightly(reason="a browser; test_report_of_a_run_is_complete shows a page in make test")
def test_sort_and_filter_many_slides(browser: webdriver.Chrome, store_report: Path) -> None:
    visit(browser, store_report)
    table = browser.find_elements(By.CSS_SELECTOR, "table.sortable")[-1]
    slides = rows_shown(browser, 1)
    assert len(slides) == SLIDES and EVIL in slides
    headers = {h.text.split()[0]: h for h in table.find_elements(By.CSS_SELECTOR, "th")}
    # Numbers are sorted as numbers in both directions, and missing values stay last.
    for direction in ("ascending", "descending"):
        headers["focus"].find_element(By.TAG_NAME, "button").click()
        assert headers["focus"].get_attribute("aria-sort") == direction
        cells = rows_shown(browser, list(headers).index("focus") + 1)
        numbers = sorted((v for v in cells if v), key=float, reverse=direction == "descending")
        assert cells == [*numbers, *[""] * (SLIDES // 10)]
    # With the keyboard only.
    headers["slide"].find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert headers["focus"].get_attribute("aria-sort") is None
    assert rows_shown(browser, 1)[-1] == f"slide-{SLIDES - 1:04d}"
    search = browser.find_elements(By.CSS_SELECTOR, "input[type=search]")[-1]
    search.send_keys("failed slide-00")
    assert rows_shown(browser, 1) == [f"slide-{i:04d}" for i in range(3, 100, 10)]
    assert browser.find_elements(By.CSS_SELECTOR, "output")[-1].text == f"10 of {SLIDES}"
    assert_quiet(browser)


@pytest.fixture(scope="module")
def result_pages(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(trained, out=tmp_path_factory.mktemp("report") / "run.html").file


def test_report_of_a_run_is_complete(
    browser: webdriver.Chrome, result_pages: Path, trained: Path
) -> None:
    visit(browser, result_pages)
    names = [a.text for a in browser.find_elements(By.CSS_SELECTOR, "nav a")]
    assert [name for name in names if name != "Failure analysis"] == [  # if there are failures
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
    patches = [metrics[side]["patch"] for side in ("validation", "test")]
    text = browser.find_element(By.TAG_NAME, "main").text.lower()
    for part in (
        *(f"{values['auc']:.3f}" for values in patches),
        "split by patient",
        "Performance on slides from another hospital",
        metrics["tensorflow"],
        "too few patients for an interval",
        "correct decisions with the highest confidence",
    ):
        assert part.lower() in text, part
    assert f"{patches[1]['accuracy']:.3f} [" not in text and not patches[1]["intervals"]
    confusion = browser.find_element(By.CSS_SELECTOR, "table.confusion").text
    for row in patches[1]["confusion"]:
        assert " ".join(map(str, row)) in confusion
    # Every picture is decoded when it becomes visible.
    images = browser.find_elements(By.CSS_SELECTOR, "img")
    assert len(images) > 5
    for image in images:
        browser.execute_script("arguments[0].scrollIntoView()", image)
    decoded = "return [...document.images].every(i => i.complete && i.naturalWidth > 50)"
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(decoded))
    assert_quiet(browser)


def test_errors_of_report(trained: Path, tmp_path: Path, run: RunCommand) -> None:
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
    return class_scores(label, np.stack([1 - values, values], axis=1), patient)


@given(some_scores(), st.integers(0, 5))
@examples(80)
def test_roc_curve_equals_scikit_learn_and_its_band_is_valid(
    scores: Predictions, seed: int
) -> None:
    positive, probability = scores.label == 1, scores.output[:, 1]
    roc = roc_of(positive, probability, scores.patient, patients=6, seed=seed)
    assert (roc is None) == (len(np.unique(positive)) < 2)
    if roc is not None:
        expected = roc_curve(positive, probability, drop_intermediate=False)
        assert np.allclose([roc.false_positive, roc.true_positive], expected[:2])
        if roc.band is not None:
            _, low, high = roc.band
            assert ((low >= 0) & (low <= high) & (high <= 1)).all()
            assert (np.diff(low) >= -1e-9).all()
            assert len(np.unique(scores.patient)) > 1


def test_every_class_has_a_curve() -> None:
    rng, names = np.random.default_rng(1), ["_first", r"b\c", *"defghijk"]
    label, probability = rng.integers(0, len(names), 300), rng.dirichlet(np.ones(len(names)), 300)
    patient = np.arange(300, dtype=np.int32) % 30
    curves = {}
    for i, name in enumerate(names):
        curves[name] = roc_of(label == i, probability[:, i], patient, patients=30, seed=1)
    chart = roc_chart("ROC", {name: roc for name, roc in curves.items() if roc is not None})
    assert all(f">{name}<" in chart or f"> {name}<" in chart for name in names)
