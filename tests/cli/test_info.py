"""`histopipe info` of each kind of folder, and the next command."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import histopipe
from helpers.commands import Run
from helpers.paths import GOLDEN
from histopipe.errors import NothingToDo
from histopipe.maintenance.store_info import StoreInfo
from histopipe.reports.info import FolderInfo


def folder_info(path: Path) -> FolderInfo:
    info = histopipe.info(path)
    assert isinstance(info, FolderInfo)
    return info


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Copy of the committed results of each kind, since opening a store creates a lock file."""
    return Path(shutil.copytree(GOLDEN / "2026-11-25", tmp_path / "my results"))


def test_a_run(earlier: Path, run: Run) -> None:
    """A finished run, and an unfinished one, which names the command that continues it."""
    info = folder_info(earlier / "run")
    assert (info.kind, info.finished, info.then) == ("run", True, ("report", str(earlier / "run")))
    assert info.facts["epochs"] == "1 (best: 1)"
    assert any(line.startswith("test (held out)") for line in info.table)
    done = run("info", earlier / "run")
    assert "split by    patient" in done.stdout
    assert f"next: histopipe report '{earlier}/run'" in done.stderr
    assert json.loads(run("info", earlier / "run", "--json").stdout)["kind"] == "run"
    (earlier / "run" / "metrics.json").unlink()
    done = run("info", earlier / "run")
    assert "(run, not finished)" in done.stdout
    assert f"next: histopipe train --resume --out '{earlier}/run'" in done.stderr


def test_a_store_predictions_features_and_an_empty_folder(
    earlier: Path, tmp_path: Path, run: Run
) -> None:
    done = run("info", earlier / "store.lmdb")
    assert "slides    8 complete" in done.stdout
    assert f"next: histopipe train '{earlier}/store.lmdb'" in done.stderr
    for name, slides, then in (
        ("predictions", 2, ("heatmap", str(earlier / "predictions"))),
        ("features", 8, ("train", "--mil", str(earlier / "features"))),
    ):
        info = folder_info(earlier / name)
        assert (info.kind, info.facts["slides"], info.then[: len(then)]) == (name, slides, then)
    patches = histopipe.info(earlier / "store.lmdb").to_json()["patches"]
    assert info.facts["patches"] == patches
    with pytest.raises(NothingToDo, match="expected a store, a run, a cross-validation"):
        histopipe.info(tmp_path)


def test_next_command_of_a_store_uses_the_labels_that_exist(earlier: Path) -> None:
    path = str(earlier / "store.lmdb")
    labelled = histopipe.info(path)
    assert isinstance(labelled, StoreInfo) and labelled.then == ("train", path)
    for changes, then in (
        ({"patches": 0}, ("ingest", "SLIDES", "--out", path)),
        ({"patch_labels": {"tumour": 5}}, ("train", path, "--labels-from", "annotation")),
        ({}, ("train", path, "--labels", "labels.csv")),
    ):
        settings: dict[str, Any] = {"labels": {"unlabelled": 12}, "patch_labels": {}, **changes}
        assert dataclasses.replace(labelled, **settings).then == then
