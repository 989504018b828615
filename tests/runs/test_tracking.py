"""Test tracking: what a training writes to MLflow, also after interruptions, and if the server is lost."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import Run
from helpers.trainings import csv_rows
from histopipe.errors import Interrupted, MachineShort, UsageError
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.runs.tracking import Tracker, _numbers, place_of, tracker_of

FAST = ("--model", "small-cnn", "--fractions", "0.5,0.25,0.25")


def client(folder: Path) -> Any:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    return MlflowClient(folder.absolute().as_uri())


@pytest.mark.long(reason="a training that is continued")
def test_training_is_tracked(run: Run, small_store: Path, tmp_path: Path) -> None:
    """Every epoch once, although the training was continued."""
    flags = (*FAST, "--epochs", 1, "--track", "mlflow:tracked", "--out", "runs/first")
    assert run("train", small_store, *flags).returncode == 0
    assert run("train", "--resume", "--epochs", 3, "--out", "runs/first").returncode == 0
    mlflow = client(tmp_path / "tracked")
    (first,) = mlflow.search_runs([mlflow.get_experiment_by_name("runs").experiment_id])
    assert (first.info.run_name, first.info.status) == ("first", "FINISHED")
    assert first.data.params["model"] == "small-cnn"
    history = csv_rows(tmp_path / "runs" / "first" / "history.csv")
    for name in ("auc", "loss", "val_loss"):
        metrics = mlflow.get_metric_history(first.info.run_id, name)
        assert [(each.step, each.value) for each in metrics] == [
            (int(row["epoch"]), pytest.approx(float(row[name]))) for row in history
        ]
    result = json.loads((tmp_path / "runs" / "first" / "metrics.json").read_text())
    assert first.data.metrics["test/slide/mean/auc"] == result["test"]["slide"]["mean"]["auc"]
    files = {file.path for file in mlflow.list_artifacts(first.info.run_id)}
    assert files >= {"config.toml", "model.keras", "predictions.csv", "metrics.json"}


def test_nothing_is_tracked_unasked(tmp_path: Path) -> None:
    assert tracker_of(tmp_path / "run", PatchTrainConfig()) is None


def test_lost_server_costs_warnings_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What could not be written is written after the next epoch."""
    (tmp_path / "run").mkdir()
    config = PatchTrainConfig(track=f"mlflow:{tmp_path / 'tracked'}")
    tracker = Tracker(tmp_path / "run", config).__enter__()
    rows = [{"epoch": number, "loss": 1 / number} for number in (1, 2)]
    write = tracker._client.log_metric

    def lost(*_: object, **__: object) -> None:
        raise ConnectionError("the server is lost")

    monkeypatch.setattr(tracker._client, "log_metric", lost)
    tracker.epochs(rows[:1])
    assert "warning: tracking failed: the server is lost" in capsys.readouterr().err
    monkeypatch.setattr(tracker._client, "log_metric", write)
    again = Tracker(tmp_path / "run", config)  # as after an interruption
    with pytest.raises(Interrupted), again:
        again.epochs(rows)
        raise Interrupted("interrupted")
    record = json.loads((tmp_path / "run" / "mlflow.json").read_text())
    mlflow = client(tmp_path / "tracked")
    losses = mlflow.get_metric_history(record["run"], "loss")
    assert [(each.step, each.value) for each in losses] == [(1, 1.0), (2, 0.5)]
    assert mlflow.get_run(record["run"]).info.status == "KILLED"
    mlflow.delete_run(record["run"])
    assert tracker_of(tmp_path / "run", config) is None
    assert "warning: tracking failed: --track mlflow:" in capsys.readouterr().err
    with pytest.raises(UsageError, match="expected a place where MLflow can write"):
        tracker_of(tmp_path / "run", PatchTrainConfig(track="mlflow:http://127.0.0.1:1"))
    with Tracker(tmp_path / "run", PatchTrainConfig(track=f"mlflow:{tmp_path / 'new'}")) as other:
        other.epochs(rows)
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


@pytest.mark.nightly(reason="builds two networks; test_places refuses the same places")
def test_a_place_that_cannot_be_used_costs_no_folder(
    run: Run, small_store: Path, tmp_path: Path
) -> None:
    for place in ("mlflow:http://me:secret@127.0.0.1:1", "mlflow:http://127.0.0.1:1"):
        done = run("train", small_store, *FAST, "--epochs", 1, "--track", place, "--out", "run")
        assert done.returncode == 2 and "secret" not in done.stderr
        assert not (tmp_path / "run").exists()


def test_trials_of_a_search_and_folds_share_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another worker creates the experiment at the same moment."""
    config = PatchTrainConfig(track=f"mlflow:{tmp_path / 'tracked'}")
    trials = [tmp_path / "search" / "trials" / f"trial-{number:04d}" for number in range(2)]
    for folder in trials:
        folder.mkdir(parents=True)
    Tracker(trials[0], config).__enter__()
    mlflow = client(tmp_path / "tracked")
    search = type(mlflow).get_experiment_by_name
    answers = list[None]()
    monkeypatch.setattr(
        type(mlflow),
        "get_experiment_by_name",
        lambda self, name: answers.pop() if answers else search(self, name),
    )
    other = Tracker(trials[1], config)
    answers.append(None)
    other.__enter__()
    assert not answers
    runs = mlflow.search_runs([mlflow.get_experiment_by_name("search").experiment_id])
    assert {each.info.run_name for each in runs} == {"trial-0000", "trial-0001"}
    (fold := tmp_path / "study" / "fold-1").mkdir(parents=True)
    Tracker(fold, config).__enter__()
    (of_fold,) = mlflow.search_runs([mlflow.get_experiment_by_name("study").experiment_id])
    assert of_fold.info.run_name == "fold-1"


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert place_of("mlflow") == (tmp_path / "mlruns").as_uri()
    assert place_of("mlflow:a/b") == (tmp_path / "a" / "b").as_uri()
    assert place_of("mlflow:http://127.0.0.1:5000") == "http://127.0.0.1:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_URI: found a user in the URI"):
        place_of("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert place_of("mlflow") == "http://127.0.0.1:1"
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
