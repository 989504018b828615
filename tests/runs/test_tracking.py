"""Test tracking: what a training writes to MLflow, also after interruptions, and if the server is lost."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from helpers.commands import RunCommand
from helpers.trainings import csv_rows
from histopipe.errors import Interrupted, MachineShort, UsageError
from histopipe.runs.observers import Tracker, _numbers, place_of, tracker_of
from histopipe.runs.run import Run
from histopipe.runs.task_config import PatchTrainConfig


def client(folder: Path) -> Any:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    return MlflowClient(folder.absolute().as_uri())


@pytest.mark.long(
    reason="each fold imports MLflow; these are the real trainings of a cross-validation"
)
def test_folds_are_trained_and_tracked(run: RunCommand, small_store: Path, tmp_path: Path) -> None:
    """Without validation, the last epoch is kept."""
    flags = ("--fractions", "0.8,0,0.2", "--epochs", 2, "--folds", 2, "--track", "mlflow:tracked")
    done = run("train", small_store, "--model", "small-cnn", *flags, "--out", "study")
    assert done.returncode == 0, done.stderr
    study, folder = tmp_path / "study", tmp_path / "study" / "fold-2"
    summary = json.loads((study / "summary.json").read_text())
    assert [fold["status"] for fold in summary["folds"]] == ["done"] * 2
    assert all(float(row["host_mb"]) > 100 for row in csv_rows(study / "summary.csv")[:2])
    result, history = Run(folder).result, csv_rows(folder / "history.csv")
    assert result.best_epoch == result.epochs == 2 == len(history)
    assert set(result.metrics) == {"test"} and "val_loss" not in history[0]
    mlflow = client(tmp_path / "tracked")
    runs = mlflow.search_runs([mlflow.get_experiment_by_name("study").experiment_id])
    assert sorted(each.info.run_name for each in runs) == ["fold-1", "fold-2"]
    (tracked,) = (each for each in runs if each.info.run_name == "fold-2")
    assert tracked.info.status == "FINISHED" and tracked.data.params["model"] == "small-cnn"
    for name in ("auc", "loss"):
        metrics = mlflow.get_metric_history(tracked.info.run_id, name)
        assert [(each.step, each.value) for each in metrics] == [
            (int(row["epoch"]), pytest.approx(float(row[name]))) for row in history
        ]
    written = json.loads((folder / "metrics.json").read_text())["test"]["slide"]["mean"]["auc"]
    assert tracked.data.metrics["test/slide/mean/auc"] == written
    files = {file.path for file in mlflow.list_artifacts(tracked.info.run_id)}
    assert files >= {"config.toml", "model.keras", "predictions.csv", "metrics.json"}


def after(rows: list[dict[str, Any]]) -> Any:
    """Return the last of some epochs."""
    return SimpleNamespace(state=SimpleNamespace(history=rows))


def test_lost_server_costs_warnings_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What could not be written is written after the next epoch."""
    (tmp_path / "run").mkdir()
    config = PatchTrainConfig(track=f"mlflow:{tmp_path / 'tracked'}")
    rows = [{"epoch": number, "loss": 1 / number} for number in (1, 2)]
    tracker = Tracker(tmp_path / "run", config).__enter__()
    with monkeypatch.context() as patch:
        lost = MagicMock(side_effect=ConnectionError("the server is lost"))
        patch.setattr(tracker._client, "log_metric", lost)
        tracker.on_epoch_end(after(rows[:1]))
    assert "warning: tracking failed: the server is lost" in capsys.readouterr().err
    again = Tracker(tmp_path / "run", config)  # as after an interruption
    with pytest.raises(Interrupted), again:
        again.on_epoch_end(after(rows))
        again.on_train_end(None, cast(Any, SimpleNamespace(to_json=dict)))
        printed = capsys.readouterr().err
        assert "tracked as" in printed and "ALLOW_FILE_STORE=true mlflow ui --backend-st" in printed
        raise Interrupted("interrupted")
    number = json.loads((tmp_path / "run" / "mlflow.json").read_text())["run"]
    mlflow = client(tmp_path / "tracked")
    losses = mlflow.get_metric_history(number, "loss")
    assert [(each.step, each.value) for each in losses] == [(1, 1.0), (2, 0.5)]
    assert mlflow.get_run(number).info.status == "KILLED"
    mlflow.delete_run(number)
    assert tracker_of(tmp_path / "run", config) is None
    assert "warning: tracking failed: --track mlflow:" in capsys.readouterr().err
    mlflow.delete_experiment(mlflow.get_run(number).info.experiment_id)
    (tmp_path / "run" / "mlflow.json").unlink()
    with pytest.raises(UsageError, match="was deleted there: restore it by `mlflow experiments"):
        Tracker(tmp_path / "run", config).__enter__()
    with Tracker(tmp_path / "run", PatchTrainConfig(track=f"mlflow:{tmp_path / 'new'}")) as other:
        other.on_epoch_end(after(rows))
    moved = json.loads((tmp_path / "run" / "mlflow.json").read_text())
    losses = client(tmp_path / "new").get_metric_history(moved["run"], "loss")
    assert [each.step for each in losses] == [1, 2]


def test_names_of_classes_stay_different() -> None:
    values = {
        "classes": {"<1%": {"auc": 0.5}, ">1%": {"auc": 0.25}, "a/b": {"auc": 0.75}, "ä": {"n": 1}}
    }
    names = dict(_numbers(values))
    assert len(names) == 4 and "classes/ä/n" in names
    assert all(re.fullmatch(r"[\w\-./ ]+", name) for name in names)


def test_trials_of_a_search_share_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another worker creates the experiment at the same moment."""
    config = PatchTrainConfig(track=f"mlflow:{tmp_path / 'tracked'}")
    mlflow = client(tmp_path / "tracked")
    search = type(mlflow).get_experiment_by_name
    for number in range(2):
        folder = tmp_path / "search" / "trials" / f"trial-{number:04d}"
        folder.mkdir(parents=True)
        tracker = Tracker(folder, config)
        with monkeypatch.context() as patch:
            answers = MagicMock(side_effect=[None, search(mlflow, "search")])
            patch.setattr(type(mlflow), "get_experiment_by_name", answers)
            tracker.__enter__()
    runs = mlflow.search_runs([search(mlflow, "search").experiment_id])
    assert {each.info.run_name for each in runs} == {"trial-0000", "trial-0001"}


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracker_of(tmp_path, PatchTrainConfig()) is None
    for text, place in (
        ("mlflow", (tmp_path / "mlruns").as_uri()),
        ("mlflow:a/b", (tmp_path / "a" / "b").as_uri()),
        ("mlflow:http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("mlflow:databricks", "databricks"),
    ):
        assert place_of(text) == place
    for uri in (
        "databricks",
        "databricks://p",
        "uc",
        "sqlite:///m.db",
        "file:./a",
        "http://h",
        "postgresql+psycopg2://h/d",
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert place_of("mlflow") == uri
    for uri in ("./a", "../a", "/a", "~/a"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert place_of("mlflow") == Path(uri).expanduser().absolute().as_uri()
    for uri in ("mlflow.lab", "mlflow.lab:5000", "localhost:5000", "a/b", "~nobody/a"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(UsageError, match=f"MLFLOW_TRACKING_URI: found {uri}, expected a URI"):
            place_of("mlflow")
    with pytest.raises(UsageError, match=r"--track mlflow: found lab:5000, .* as http://lab:5000"):
        place_of("mlflow:lab:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_URI: found a user in the URI"):
        place_of("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(UsageError, match="expected a place where MLflow can write"):
        Tracker(tmp_path, PatchTrainConfig(track="mlflow"))
    for wrong in ("wandb", "mlflow:http://me:secret@127.0.0.1"):
        with pytest.raises(UsageError, match="expected mlflow, or mlflow:URI") as raised:
            PatchTrainConfig(track=wrong)
        assert "secret" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MachineShort, match=r"histopipe\[mlflow\]"):
        Tracker(tmp_path, PatchTrainConfig(track="mlflow"))
    assert not list(tmp_path.rglob("mlflow.json"))
