"""The runner of published results: rows are kept when it ends early, and the page in the docs is that of the results."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers.paths import PROJECT

RECIPE = """
from pathlib import Path
from run import Row
TITLE, METRIC, REFERENCE, SEEDS, SOURCE, DIFFERENCES = "Toy", "AUC", "published", 2, "a paper", "- none"

def has_data(shared):
    return (shared / "toy").is_dir()

def run(work, shared, seeds, done):
    for name in ("one", "two"):
        if (name, "mean") in done:
            continue
        with (shared / "ran").open("a") as file:
            file.write(name + " ")
        if (shared / f"fails-at-{name}").exists():
            raise RuntimeError(name)
        yield Row(name, "mean", "0.5", 0.25, (0.1, 0.4), 0.05, seeds)
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner, with a recipe of two rows."""
    monkeypatch.syspath_prepend(str(PROJECT / "tools" / "published"))
    runner = importlib.import_module("run")
    (tmp_path / "recipes" / "toy").mkdir(parents=True)
    (tmp_path / "recipes" / "toy" / "recipe.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path / "recipes"))
    monkeypatch.setattr(runner, "HERE", tmp_path / "recipes")
    monkeypatch.setattr(runner, "PAGE", tmp_path / "page.md")
    monkeypatch.setenv("HISTOPIPE_TEST_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["run.py", "--work", str(tmp_path / "work")])
    return runner


def test_rows_are_kept_and_continued(tmp_path: Path, runner: ModuleType) -> None:
    runner.main()
    assert not (tmp_path / "ran").exists()  # without data
    (tmp_path / "toy").mkdir()
    (tmp_path / "fails-at-two").touch()
    with pytest.raises(RuntimeError, match="two"):
        runner.main()
    result = json.loads((tmp_path / "recipes" / "toy" / "result.json").read_text())
    assert [row["data"] for row in result["rows"]] == ["one"] and result["seeds"] == 2
    (tmp_path / "fails-at-two").unlink()
    runner.main()
    assert (tmp_path / "ran").read_text() == "one two two "
    assert (
        "\n| two | mean | 0.5 | 0.250 [0.100, 0.400] | 0.050 | 2 | "
        in (tmp_path / "page.md").read_text()
    )
    sys.argv += ["--seeds", "3"]  # other settings begin again
    runner.main()
    assert (tmp_path / "ran").read_text() == "one two two one two "


def test_page_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROJECT / "tools" / "published"))
    runner = importlib.import_module("run")
    assert runner.text() == runner.PAGE.read_text()
