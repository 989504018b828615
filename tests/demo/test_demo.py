"""Wrong arguments of the demo, and its slides. CI runs the whole demo of patch models with `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.commands import run_command
from histopipe.annotations.annotation_files import read_annotations
from histopipe.demo import demo as demo_module
from histopipe.demo.demo import demo
from histopipe.demo.synthetic_slides import SlideSettings, make_slide
from histopipe.geometry import PointL0, Size
from histopipe.slides.readers import open_slide


def test_demo_refuses_nonempty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    Path("demo/mine.txt").write_text("mine")
    for words, message in (
        ((), "demo exists and is not empty"),
        (("--count", 3, "--out", "other"), "--count: found 3, expected 6 or more"),
    ):
        done = run_command("demo", *words)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert [*Path().rglob("*")] == [Path("demo"), Path("demo/mine.txt")]


@pytest.mark.nightly(reason="draws a large slide; the demo in `make demo` has the same outlines")
def test_nodules_match_their_outlines(tmp_path: Path) -> None:
    path = tmp_path / "slide.svs"
    make_slide(path, "normal", 0, SlideSettings(size=Size(2048, 2048), nodules=2))
    outlines = read_annotations(path.with_suffix(".geojson"))
    assert [outline.name for outline in outlines.entries] == ["normal", "tumour", "tumour"]
    tissue, *nodules = (outline.area for outline in outlines.entries)
    assert all(tissue.contains(nodule) for nodule in nodules)
    with open_slide(path) as slide:
        darkness = []
        for area in (tissue.difference(nodules[0]).difference(nodules[1]), *nodules):
            point = area.representative_point()
            corner = PointL0(int(point.x) - 48, int(point.y) - 48)
            darkness.append(255 - float(slide.read_region(corner, 0, Size(96, 96)).mean()))
    assert min(darkness[1:]) > 1.15 * darkness[0], "nodules must have more nuclei"


@pytest.mark.nightly(reason="the full pipeline; `make demo` runs that of patch models")
def test_demo_of_slide_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "_SIZE", Size(768, 768))
    monkeypatch.setattr(demo_module, "_NEW_LABELLED_SLIDES", 2)
    monkeypatch.setattr(demo_module, "_STAINS_OF_LABELLED", 1)
    result = demo(tmp_path / "demo", slides=True, count=10)
    assert result.predicted.done == ("slide-010", "slide-011")
    assert result.predicted.metrics is not None
    assert len(list(result.heatmaps.glob("*.heat.png"))) == 2
    assert result.reports[0].exists()
    assert "new slides" in str(result)
