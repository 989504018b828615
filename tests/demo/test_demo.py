"""Wrong arguments of the demo, and that of slide models. CI runs the whole demo of patch models with `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.commands import run_command
from histopipe.demo import demo as demo_module
from histopipe.demo.demo import demo
from histopipe.geometry import Size


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
