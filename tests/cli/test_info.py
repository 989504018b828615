"""`histopipe info` of each kind of folder, and the next command."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

import histopipe
from helpers.commands import RunCommand
from histopipe.diagnostics.info import FolderInfo
from histopipe.errors import NothingToDo
from histopipe.maintenance.store_info import StoreInfo


@pytest.fixture
def earlier(golden_runs: Path, tmp_path: Path) -> Path:
    """Copy with a space in its path."""
    return Path(shutil.copytree(golden_runs, tmp_path / "my results"))


def test_a_run(earlier: Path, run: RunCommand) -> None:
    """A finished run, and an unfinished one, which names the command that continues it."""
    info = histopipe.info(earlier / "run")
    assert isinstance(info, FolderInfo)
    assert (info.kind, info.finished, info.then) == ("run", True, ("report", str(earlier / "run")))
    assert info.facts["epochs"] == "1 (best: 1)"
    assert any(line.startswith("test (held out)") for line in info.table)
    done = run("info", earlier / "run")
    assert "split by    patient" in done.stdout
    assert f"next: histopipe report '{earlier}/run'" in done.stderr
    (earlier / "run" / "metrics.json").unlink()
    done = run("info", earlier / "run")
    assert "(run, not finished)" in done.stdout
    assert f"next: histopipe train --resume --out '{earlier}/run'" in done.stderr


def test_a_store_predictions_features_and_an_empty_folder(
    earlier: Path, tmp_path: Path, run: RunCommand
) -> None:
    done = run("info", earlier / "store.lmdb")
    assert "slides    8 complete" in done.stdout
    assert f"next: histopipe train '{earlier}/store.lmdb'" in done.stderr
    for name, slides, then in (
        ("predictions", 2, ("heatmap", str(earlier / "predictions"))),
        ("features", 8, ("train", "--mil", str(earlier / "features"))),
    ):
        info = histopipe.info(earlier / name)
        assert isinstance(info, FolderInfo)
        assert (info.kind, info.facts["slides"], info.then[: len(then)]) == (name, slides, then)
    with pytest.raises(NothingToDo, match="expected a store, a run, a cross-validation"):
        histopipe.info(tmp_path)


def test_next_command_of_a_store_uses_the_labels_that_exist(earlier: Path) -> None:
    path = str(earlier / "store.lmdb")
    info = histopipe.info(path)
    assert isinstance(info, StoreInfo)
    unlabelled: dict[str, Any] = {"labels": {"unlabelled": 12}, "patch_labels": {}}
    for changes, then in (
        ({}, ("train", path)),
        ({**unlabelled, "patches": 0}, ("ingest", "SLIDES", "--out", path)),
        (unlabelled | {"patch_labels": {"a": 5}}, ("train", path, "--labels-from", "annotation")),
        (unlabelled, ("train", path, "--labels", "labels.csv")),
    ):
        assert dataclasses.replace(info, **changes).then == then
