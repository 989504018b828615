"""Test `tune`: search spaces, trials shared by processes that may die, and splits without test patches."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.commands import COMMAND, RunCommand, processes_in, run_python
from helpers.trainings import csv_rows, interrupt
from histopipe.diagnostics.info import FolderInfo
from histopipe.errors import MachineShort, UsageError
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.search.search_settings import SearchSettings, read_space, settings_of, space_of
from histopipe.search.shared_search import JOURNAL, SharedSearch, _are_same, open_storage

SPACE = """
learning_rate = { low = 1e-4, high = 1e-1, log = true }
augment = ["none", "flips", "flips,colour"]
batch_size = { low = 8, high = 32, step = 8 }
epochs = 2
"""


# Search spaces.


def test_space_of_ranges_choices_and_single_values(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text(SPACE + 'optimizer = "sgd"\ndropout = { low = 0, high = 0.5 }\n')
    space = read_space(path)
    assert space.searched == {
        "learning_rate": {"low": 1e-4, "high": 0.1, "log": True, "step": None},
        "augment": {"values": ("none", "flips", "flips,colour")},
        "batch_size": {"low": 8, "high": 32, "log": False, "step": 8},
        "dropout": {"low": 0.0, "high": 0.5, "log": False, "step": None},
    }
    assert space.fixed == {"epochs": 2, "optimizer": "sgd"}
    search = optuna.create_study(sampler=optuna.samplers.RandomSampler(1))
    for _ in range(20):
        drawn = space.suggest(search.ask())
        assert 1e-4 <= drawn["learning_rate"] <= 0.1 and drawn["batch_size"] in (8, 16, 24, 32)
        assert isinstance(drawn["dropout"], float) and 0 <= drawn["dropout"] <= 0.5
        assert drawn["augment"] in (("none",), ("flips",), ("flips", "colour"))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"colour": [1, 2]}, "colour: expected a setting of `histopipe train`"),
        ({"epochs": 5}, "nothing to search"),
        ({"seed": [1, 2]}, "seed cannot be searched"),
        ({"stores": ["a", "b"]}, "stores cannot be searched"),
        ({"dropout": {"low": 0.5}}, r"dropout: found .*expected \{ low = …, high = … \}"),
        ({"dropout": {"low": 0.5, "high": 0.1}}, "expected low below high"),
        ({"dropout": {"low": 0.0, "high": 0.1, "log": True}}, "low above 0"),
        ({"dropout": {"low": 0.1, "high": 0.5, "log": True, "step": 0.1}}, "not both"),
        ({"dropout": {"low": 0.1, "high": 0.5, "step": -0.1}}, "expected low below high"),
        ({"dropout": {"low": 0.1, "high": math.inf}}, "expected low below high"),
        ({"batch_size": {"low": 4, "high": 64, "step": 100}}, "a step within the range"),
        ({"dropout": {"low": "a", "high": "b"}}, r"dropout\.low: found 'a', expected a number"),
        ({"batch_size": {"low": 0.5, "high": 8}}, r"batch_size\.low: found 0\.5"),
        ({"augment": {"low": 1, "high": 2}}, r"augment\.low: found 1, expected a number"),
        ({"augment": [["flips"], ["none"]]}, "expected strings such as 'flips,crop'"),
        ({"model": ["resnet50"]}, "expected two different values or more"),
        ({"model": ["resnet50", 3]}, "model: found 3"),
        ({"epochs": "two", "model": ["a", "b"]}, "epochs: found 'two'"),
    ],
)
def test_wrong_space_is_an_error(space: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        space_of(space)


@given(
    st.dictionaries(
        st.text(max_size=9), st.one_of(st.none(), st.lists(st.integers()), st.floats(), st.text())
    )
)
def test_any_wrong_space_raises_a_usage_error(space: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        space_of(space)


# Storage of trials.


def test_unusable_storages_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("histopipe.search.shared_search.network_filesystem", lambda _: "nfs4")
    with pytest.raises(UsageError, match=r"SQLite cannot be shared.*on nfs4, where its locks"):
        open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path).get_all_studies() == []
    for url, message in (
        ("sqlite:////no/such/folder/study.db", "--storage cannot be opened: found"),
        ("nonsense://host/db", "--storage cannot be opened: found"),
        ("redis://localhost:1/0", "--storage cannot be opened: found"),
        (tmp_path, "found a folder, or a file in a missing folder"),
        (tmp_path / "none" / "study.journal", "found a folder, or a file in a missing folder"),
    ):
        with pytest.raises(UsageError, match=message):
            open_storage(str(url), tmp_path).get_all_studies()


def test_missing_optuna_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MachineShort, match=r"pip install 'histopipe\[tune\]'"):
        open_storage(None, tmp_path)


def a_search(folder: Path, trials: int = 3, **settings: Any) -> SharedSearch:
    search = SharedSearch(folder, SearchSettings(trials=trials, **settings))
    search.agree(space_of({"dropout": {"low": 0.0, "high": 0.5}}), {"epochs": 2})
    return search


@contextmanager
def claimed(search: SharedSearch, number: int) -> Iterator[optuna.trial.Trial]:
    """Take a trial, which has this number."""
    with search.claimed() as trial:
        assert trial is not None and trial.number == number
        yield trial


@pytest.mark.parametrize("storage", [None, "sqlite"])
def test_trial_has_one_process_and_is_continued_when_its_lock_is_released(
    tmp_path: Path, storage: str | None
) -> None:
    url = f"sqlite:///{tmp_path}/study.db" if storage else None
    one, two = a_search(tmp_path, storage=url), a_search(tmp_path, storage=url)
    with claimed(one, 0) as first, claimed(two, 1):
        dropout = first.suggest_float("dropout", 0.0, 0.5)
        first.report(0.5, 1)
        assert two.wait()
    # The locks were released without a result, as when a process dies.
    with claimed(two, 0) as again, claimed(one, 1) as other:
        assert again.suggest_float("dropout", 0.0, 0.5) == dropout
        two.tell(again, 0.7, "COMPLETE")
        two.tell(other, None, "PRUNED")
    with claimed(two, 2) as third:
        two.tell(third, None, "FAIL")
    with one.claimed() as none:
        assert none is None
    assert not one.wait()
    assert [trial.state.name for trial in one.trials()] == ["COMPLETE", "PRUNED", "FAIL"]


def test_trials_of_another_folder_are_not_continued(tmp_path: Path) -> None:
    """Two machines use one database, without a common folder."""
    url = f"sqlite:///{tmp_path}/study.db"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    search_a, search_b = (a_search(tmp_path / name, storage=url, name="shared") for name in "ab")
    with claimed(search_a, 0):
        pass
    with claimed(search_b, 1) as second:
        search_b.tell(second, 0.5, "COMPLETE")
    assert (
        not search_b.wait()
    )  # the first trial belongs to the other folder, and has its lock there
    with claimed(search_a, 0):
        pass


def test_search_with_other_settings_is_not_continued(tmp_path: Path) -> None:
    a_search(tmp_path)
    with pytest.raises(UsageError, match="holds a search with other settings"):
        a_search(tmp_path, metric="loss")
    for wrong in ({"trials": 0}, {"metric": "f1"}, {"sampler": "grid"}, {"pruner": "all"}):
        with pytest.raises(UsageError, match=f"^(--)?{next(iter(wrong))}: found"):
            SearchSettings(**wrong)


def test_incomplete_last_line_of_the_journal_is_removed(tmp_path: Path) -> None:
    """A full disk can leave such a line. Lines appended to it would be lost."""
    for number, value in enumerate((0.5, 0.6)):
        search = a_search(tmp_path)
        with claimed(search, number) as trial:
            search.tell(trial, value, "COMPLETE")
        with (tmp_path / JOURNAL).open("ab") as file:
            file.write(b'{"op_code":4,"study_')
    assert [trial.value for trial in a_search(tmp_path).trials()] == [0.5, 0.6]


HOLDER = """
import os, sys, time
from pathlib import Path
from histopipe.system.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_killed_process_releases_the_journal_lock(tmp_path: Path) -> None:
    a_search(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / f"{JOURNAL}.flock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a_search, tmp_path)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        holder.kill()
        holder.communicate()
        with claimed(waiting.result(timeout=10), 0):
            pass


def test_settings_with_commas_become_lists_if_the_setting_is_a_list() -> None:
    assert settings_of({"augment": "flips, crop", "model": "a,b", "dropout": 0.1}) == {
        "augment": ("flips", "crop"),
        "model": "a,b",
        "dropout": 0.1,
    }


# Searches.


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "space.toml"
    path.write_text(SPACE)
    return path


@pytest.mark.nightly(
    reason="two new processes, one of which is killed; test_trial_has_one_process_and_is_continued_when_its_lock_is_released shows how trials are shared"
)
def test_two_processes_share_trials_and_one_is_killed(
    run: RunCommand, small_store: Path, space: Path, tmp_path: Path
) -> None:
    arguments = ("tune", str(small_store), "--space", str(space), "--out", "search")
    command = [*COMMAND, *arguments, "--trials", "5", "--pruner", "none"]
    log, search = tmp_path / "victim.log", tmp_path / "search"
    with log.open("w") as file:
        victim = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=file)
    survivor = subprocess.Popen(
        command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )

    def running() -> set[str]:
        text = log.read_text()
        started = set(re.findall(r"(?m)^trial (\d+) of \d+ starts", text))
        return started - set(re.findall(r"(?m)^trial (\d+): validation", text))

    # It is killed during a trial, not between two.
    while victim.poll() is None and not (
        len(list(search.glob("trials/*/history.csv"))) >= 2 and running()
    ):
        time.sleep(0.05)
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    out, survivor_log = survivor.communicate(timeout=300)
    assert survivor.returncode == 0, survivor_log
    (unfinished,) = running()
    assert f"trial {unfinished} of 5" in survivor_log
    rows = csv_rows(search / "trials.csv")
    assert [(row["trial"], row["state"]) for row in rows] == [(str(n), "done") for n in range(5)]
    assert len({row["learning_rate"] for row in rows}) == 5
    assert out.count("done") == 5 and "*best" in out
    assert processes_in(tmp_path) == []
    # The value of each trial equals the metric in the folder of its run.
    files = sorted(search.glob("trials/*/metrics.json"))
    for row, path in zip(rows, files, strict=True):
        metrics = json.loads(path.read_text())
        assert float(row["value"]) == metrics["validation"]["patch"]["auc"]
        assert "test" not in metrics  # trials do not use test patches
    best = max(rows, key=lambda row: float(row["value"]))
    config = tomllib.loads((search / "best.toml").read_text())
    assert config["learning_rate"] == float(best["learning_rate"])
    assert config["epochs"] == 2 and config["augment"] == best["augment"].split(",")
    (tmp_path / "elsewhere").mkdir()
    done = run(
        *("train", "--config", "../search/best.toml", "--out", "best", "--json"),
        cwd=tmp_path / "elsewhere",
    )
    assert done.returncode == 0, done.stderr
    trained = json.loads(done.stdout)
    # The training has the splits and validation patches of the search, and test patches in addition.
    assert trained["validation"]["patch"]["count"] == trained["test"]["patch"]["count"] == 20
    assert trained["validation"]["patch"]["auc"] == pytest.approx(float(best["value"]), abs=0.05)
    # All trials are done, so the same command trains nothing.
    again = run(*command[1:])
    assert again.returncode == 0, again.stderr
    assert "starts" not in again.stderr


HOUR_LATER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from histopipe.cli import main
from histopipe.runs import supervision

hanging = Path(sys.argv.pop(1))

def clock():
    return time.monotonic() + 3600 * hanging.exists()

supervision.time = SimpleNamespace(monotonic=clock, time=time.time)
supervision._GRACE_SECONDS = 1.0
main()
"""
"""The command, with a clock that jumps an hour ahead when a file exists."""


@pytest.mark.nightly(reason="nine trials, one of which hangs")
def test_failed_and_pruned_trials_are_reported_and_the_search_continues(
    small_store: Path, tmp_path: Path
) -> None:
    """One trial hangs until its time limit, one has impossible settings, and late trials are pruned."""
    (tmp_path / "space.toml").write_text(
        'learning_rate = { low = 1e-6, high = 1e-1, log = true }\nprecision = ["float32", "float64"]\nepochs = 4\n'
    )
    hanging = str(tmp_path / "hanging")
    words = ("tune", str(small_store), "--space", "space.toml", "--out", "search")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            HOUR_LATER,
            hanging,
            *words,
            "--trials",
            "9",
            "--trial-timeout",
            "600s",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={
            **os.environ,
            "HISTOPIPE_TEST_FAULT": f"trial-0001=gradients:2:hang-with-child:{hanging}",
        },
    )
    assert done.returncode == 3, done.stderr
    rows = csv_rows(tmp_path / "search" / "trials.csv")
    states = [row["state"] for row in rows]
    assert processes_in(tmp_path) == []
    assert states[1] == "failed" and "not done within 600 s" in rows[1]["reason"]
    assert f"trial 1: {rows[1]['reason']}" in done.stdout
    assert set(states[:6]) == {"done", "failed"}
    for row in rows:
        assert (row["value"] != "") == (row["state"] == "done")
    assert not list(tmp_path.glob("search/trials/*/resume*.npz"))
    assert 1 <= int(rows[states.index("pruned")]["epochs"]) < 4


@pytest.mark.nightly(reason="an interrupt of a new process")
def test_interrupted_search_continues_with_the_same_trial(
    run: RunCommand, small_store: Path, space: Path, tmp_path: Path
) -> None:
    arguments = ("tune", small_store, "--space", space, "--out", "search", "--trials", 2)
    faults = {"trial-0000": "gradients:4:wait"}
    errors = interrupt(arguments, faults, ["search/trials/*/config.toml"], tmp_path)
    assert "trial 0 is running; run the same command again to continue it" in errors
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "trial 0 of 2 resumes" in done.stderr and "resuming" in done.stderr
    assert [row["state"] for row in csv_rows(tmp_path / "search/trials.csv")] == ["done", "done"]


@pytest.mark.nightly(reason="a new process")
def test_search_ends_if_the_base_settings_are_wrong(
    run: RunCommand, small_store: Path, space: Path
) -> None:
    (space.parent / "base.toml").write_text('model = "nonsense"\n')
    flags = ("--config", "base.toml", "--out", "search", "--trials", 50)
    done = run("tune", small_store, "--space", space, *flags)
    assert done.returncode == 2, done.stderr
    assert "nonsense" in done.stderr.splitlines()[-1]
    assert done.stderr.count("starts") == 3
    missing = run("tune", small_store, "--space", "none.toml", "--out", "x")
    assert missing.returncode == 2 and "none.toml cannot be read" in missing.stderr


@pytest.mark.long(reason="the real search")
def test_python_function_tune(small_store: Path, tmp_path: Path) -> None:
    code = (
        "import sys, histopipe\n"
        "r = histopipe.tune(sys.argv[1], space={'dropout': {'low': 0.0, 'high': 0.5}}, out='search',\n"
        "    trials=2, epochs=1, batch_size=16, sampler='random', metric='loss')\n"
        "print(len(r.trials), r.best.value == min(t.value for t in r.trials),\n"
        "    r.config.dropout == r.best.settings['dropout'], 'tensorflow' in sys.modules)\n"
    )
    done = run_python(
        code,
        small_store,
        cwd=tmp_path,
        # As a task of a Slurm job: tasks share the trials, and each trial is trained by one task.
        env={**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    )
    assert done.stdout.split() == ["2", "True", "True", "False"]
    summary = histopipe.info(tmp_path / "search")
    assert isinstance(summary, FolderInfo)
    assert (summary.kind, summary.facts["trials"]) == ("search", 2)
    assert summary.then == ("train", "--config", str(tmp_path / "search" / "best.toml"))


def test_searches_of_earlier_versions_are_continued() -> None:
    """Settings that they did not record count as their defaults."""
    base = PatchTrainConfig().values()
    older = {name: value for name, value in base.items() if name not in ("monitor", "loss")}
    early, same, loss, seed = (
        json.dumps([{}, settings, "auc"], sort_keys=True)
        for settings in (older, base, base | {"loss": "huber"}, older | {"seed": 5})
    )
    assert _are_same(early, same)
    assert not _are_same(early, loss)
    assert not _are_same(seed, same)
