"""`histopipe info` of each kind of folder, the command groups, and the next command that each command prints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import histopipe
from helpers.commands import Run
from histopipe.cli import GROUPS
from histopipe.errors import NothingToDo
from histopipe.maintenance.store_info import StoreInfo
from histopipe.reports.info import FolderInfo


def folder_info(path: Path) -> FolderInfo:
    info = histopipe.info(path)
    assert isinstance(info, FolderInfo)
    return info


def test_a_finished_run(trained: Path, run: Run) -> None:
    info = folder_info(trained)
    assert (info.kind, info.finished, info.then) == ("run", True, ("report", str(trained)))
    assert info.facts["epochs"] == "1 (best: 1)"
    assert any(line.startswith("test (held out)") for line in info.table)
    done = run("info", trained)
    assert "split by    patient" in done.stdout
    assert f"next: histopipe report {trained}" in done.stderr
    assert json.loads(run("info", trained, "--json").stdout)["kind"] == "run"


def test_an_unfinished_run_names_the_command_that_continues_it(
    trained: Path, tmp_path: Path, run: Run
) -> None:
    copy = Path(shutil.copytree(trained, tmp_path / "my run"))
    (copy / "metrics.json").unlink()
    done = run("info", copy)
    assert "(run, not finished)" in done.stdout
    assert f"next: histopipe train --resume --out '{copy}'" in done.stderr


def test_predictions_and_features(
    trained: Path, made_store: Path, tmp_path: Path, run: Run
) -> None:
    done = run("predict", trained, made_store, "--out", "predictions")
    assert "next: histopipe heatmap predictions" in done.stderr
    info = folder_info(tmp_path / "predictions")
    assert (info.kind, info.facts["slides"]) == ("predictions", 12)
    done = run("embed", made_store, "--model", trained, "--out", "features")
    assert "next: histopipe train --mil features" in done.stderr
    info = folder_info(tmp_path / "features")
    assert (info.kind, info.facts["slides"]) == ("features", 12)
    assert info.facts["patches"] == histopipe.info(made_store).to_json()["patches"]


def test_a_store_and_an_empty_folder(made_store: Path, tmp_path: Path, run: Run) -> None:
    done = run("info", made_store)
    assert "slides    12 complete" in done.stdout
    assert f"next: histopipe train {made_store}" in done.stderr
    with pytest.raises(NothingToDo, match="expected a store, a run, a cross-validation"):
        histopipe.info(tmp_path)


def test_next_command_of_a_store_uses_the_labels_that_exist(made_store: Path) -> None:
    labelled = histopipe.info(made_store)
    assert isinstance(labelled, StoreInfo)
    path = str(made_store)
    assert labelled.then == ("train", path)
    unlabelled = dataclasses.replace(labelled, labels={"unlabelled": 12}, patch_labels={})
    assert unlabelled.then == ("train", path, "--labels", "labels.csv")
    annotated = dataclasses.replace(unlabelled, patch_labels={"tumour": 5})
    assert annotated.then == ("train", path, "--labels-from", "annotation")
    empty = dataclasses.replace(unlabelled, patches=0)
    assert empty.then == ("ingest", "SLIDES", "--out", path)


def test_commands_are_listed_in_groups(run: Run) -> None:
    overview = run().stderr
    places = [overview.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    for commands in GROUPS.values():
        assert all(f"\n  {name} " in overview for name in commands)


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("verfy", "verify")])
def test_a_mistyped_command_names_the_nearest(typed: str, meant: str, run: Run) -> None:
    done = run(typed)
    assert done.returncode == 2
    assert f"No such command {typed!r}. Did you mean {meant!r}?" in done.stderr
    assert "Did you mean" not in run("zzzzzz").stderr
