"""Trainings continue with the same result after kills, a lack of memory, damaged checkpoints and full disks."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.commands import INTERRUPTIBLE, RunCommand, run_program, small_disk
from helpers.examples import examples
from helpers.lazy import keras, training
from helpers.runs import without_training
from helpers.stores import patched
from helpers.trainings import ARGUMENTS, EACH_STEP, SETTINGS, assert_close, assert_equal, faulty
from histopipe.errors import DamagedStore
from histopipe.runs.run import EpochMetrics
from histopipe.runs.task_config import read_config
from histopipe.system.locks import held

MORE_PLACES = pytest.mark.nightly(
    reason="more places of an end that one place in `make test` shows"
)
KILLS = (
    "apply:8",
    pytest.param("write:40", marks=MORE_PLACES),
    pytest.param("keep+:3", marks=MORE_PLACES),
)
"""Places of SIGKILL: between steps, within a file, and between the two renames of a save."""
ENDS = ("build:1", "gradients:1", "predict:2", "save:1", "gradients:15")
"""Places of an exception. The state is saved after each of the five steps of an epoch."""
STOPS = ("predict:3", "predict:7", "save:2")
"""Places of SIGTERM: in validation, in the evaluation of the best model (with other weights), and in a save."""


@pytest.mark.long(reason="the killed and resumed training of `make test`")
@pytest.mark.parametrize("place", KILLS)
def test_killed_and_resumed_equals_uninterrupted(
    run: RunCommand, uninterrupted: Path, tmp_path: Path, place: str
) -> None:
    """Once with a damaged checkpoint, so that the previous one is used. Also: a file repeats a run, flags override it."""
    first = uninterrupted / "config.toml"
    fault = faulty(f"{place}:parent", tmp_path / "failed")
    arguments = ("--config", first, "--out", "run", *EACH_STEP)
    killed = run("train", *arguments, env=fault, new_process=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    if place == KILLS[0]:
        patched(tmp_path / "run" / "resume.npz", 2000)
    resumed = run("train", "--resume", "--out", "run")
    assert resumed.returncode == 0, resumed.stderr
    damage = "resume.npz: does not match its checksum; using the previous checkpoint"
    assert (damage in resumed.stderr) == (place == KILLS[0])
    assert "resuming run after epoch" in resumed.stderr
    assert read_config(tmp_path / "run" / "config.toml") == read_config(first) | {
        "save_minutes": 1e-9
    }
    assert_equal(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    "faults",
    [
        ("predict:3:SIGTERM",),
        pytest.param(
            (*(f"{at}:end" for at in ENDS), *(f"{at}:SIGTERM" for at in STOPS[1:])),
            marks=MORE_PLACES,
        ),
    ],
    ids=["one", "others"],
)
@pytest.mark.long(reason="a training in each case")
def test_ended_at_any_place_and_resumed_equals_uninterrupted(
    small_store: Path, uninterrupted: Path, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    done = run_program("interrupted.py", small_store, tmp_path, json.dumps(SETTINGS), *faults)
    assert done.returncode == 0, done.stderr
    for fault in faults:
        assert_equal(tmp_path / fault.replace(":", "-"), uninterrupted)


@pytest.mark.nightly(
    reason="three new processes; a kill and a stop are shown by other tests of this module"
)
def test_stopped_by_signal_and_resumed_equals_uninterrupted(
    small_store: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """SIGTERM within a step of an epoch, then Ctrl-C after a step of another epoch."""
    out = tmp_path / "run"
    command = [*INTERRUPTIBLE, "train", str(small_store), "--out", str(out), *ARGUMENTS]
    for number, place in ((signal.SIGTERM, "gradients:7"), (signal.SIGINT, "gradients+:5")):
        marker = tmp_path / f"at-{number}"
        child = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=faulty(f"{place}:wait", marker),
            start_new_session=True,
        )
        while not marker.exists():
            time.sleep(0.05)
        time.sleep(0.2)
        child.send_signal(number)
        _, stderr = child.communicate(timeout=10)
        assert child.returncode == 130, stderr
        assert "2 steps of the next; continue with `histopipe train --resume --out" in stderr
        command = [*INTERRUPTIBLE, "train", "--resume", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "after epoch 2 and 2 steps of the next" in done.stderr
    assert_equal(out, uninterrupted)


def variables(fill: float) -> list[Any]:
    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (), (2,))
    return [keras.Variable(np.full(shape, fill, np.float32)) for shape in shapes]


def saved_twice(folder: Path) -> None:
    state = training.outputs.TrainState(
        epoch=1, values=np.ones((2, 3, 4), np.float32), history=[{"loss": 0.5}]
    )
    training.outputs.save_state(folder, state, variables(1))
    training.outputs.save_state(folder, replace(state, epoch=2), variables(2))


@examples(200)
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), cut=st.booleans())
def test_any_changed_byte_of_a_checkpoint_is_detected(
    tmp_path_factory: pytest.TempPathFactory, place: float, change: int, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("state")
    saved_twice(folder)
    content = bytearray((folder / "resume.npz").read_bytes())
    at = int(place * len(content))
    content[at] ^= change
    (folder / "resume.npz").write_bytes(content[:at] if cut else content)
    loaded = variables(0)
    state, problem = training.outputs.load_state(folder, loaded)
    assert str(problem).startswith("resume.npz")
    assert state.epoch == 1
    for variable in loaded:
        np.testing.assert_array_equal(variable.value, 1)


def test_two_damaged_checkpoints_are_reported(tmp_path: Path) -> None:
    saved_twice(tmp_path)
    state, problem = training.outputs.load_state(tmp_path, variables(0))
    assert (state.epoch, state.values.shape, problem) == (2, (2, 3, 4), None)
    for path in tmp_path.iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(DamagedStore, match=r"resume.npz.*resume-older.npz"):
        training.outputs.load_state(tmp_path, variables(0))


@pytest.mark.parametrize(("monitor", "kept"), [("loss", [1, 2, 3, 5]), ("metric", [1, 2, 4, 5])])
def test_epochs_are_chosen_by_the_loss_or_as_in_earlier_versions_by_the_metric(
    monitor: str, kept: list[int]
) -> None:
    """At equal metrics, earlier versions took the lower loss; after an undefined metric, any metric."""
    epochs = ((0.9, None), (0.7, 0.90), (0.5, 0.89), (0.6, 1.0), (0.4, 1.0), (0.4, 0.99))
    state, best_epochs = training.outputs.TrainState(), []
    for state.epoch, (loss, auc) in enumerate(epochs, 1):
        metrics = EpochMetrics(9, loss, {}, auc)
        if state.is_improved_by(metrics, monitor):
            state.keep(metrics)
            best_epochs.append(state.best_epoch)
    assert best_epochs == kept


def test_full_disk_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        saved_twice(disk)
        large = [keras.Variable(np.zeros(100_000, np.float32))]
        with pytest.raises(OSError, match="No space left"):
            training.outputs.save_state(disk, training.outputs.TrainState(epoch=3), large)
        assert {path.name for path in disk.iterdir()} == {"resume.npz", "resume-older.npz"}
        assert training.outputs.load_state(disk, variables(0))[0].epoch == 2


def test_folder_of_a_running_training_is_refused(
    run: RunCommand, small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which each look takes a second."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None)
    monkeypatch.setattr("histopipe.system.locks.time", clock)
    with without_training():
        assert run("train", small_store, "--out", "run", *ARGUMENTS).returncode == 0
        config = (tmp_path / "run" / "config.toml").read_bytes()
        with held(tmp_path / "run"):
            done = run("train", "--resume", "--out", "run", "--epochs", 99)
    assert done.returncode == 2, done.stderr
    assert "run is in use by another process" in done.stderr
    assert (tmp_path / "run" / "config.toml").read_bytes() == config


# Lack of memory

PIECES = (*ARGUMENTS, "--accumulate", "2")
"""As `uninterrupted`, with the gradients of a batch in two pieces."""

# Five steps with batches of 18, each in two pieces of 9: calls 9 and 10 are the pieces of the fifth step.
FAULTS = {
    "gradients:10:exhausted": False,
    "apply:4:exhausted": True,
    "gradients:9:real": False,
    "predict:2:exhausted": False,
    "gradients:9:cuda": True,
    "read:4:memory": True,
    "save:2:memory": True,
}
"""Where memory runs out, and whether a new process is needed to continue."""


@pytest.mark.parametrize(
    "fault", [*FAULTS][:2] + [pytest.param(fault, marks=MORE_PLACES) for fault in [*FAULTS][2:]]
)
@pytest.mark.long(reason="a training in each case")
def test_step_out_of_memory_continues_in_smaller_pieces(
    run: RunCommand, small_store: Path, uninterrupted: Path, tmp_path: Path, fault: str
) -> None:
    """In the same process if nothing has changed, else in a new process from the last checkpoint."""
    out, failed = tmp_path / "run", tmp_path / "failed"
    done = run("train", small_store, "--out", out, *PIECES, env=faulty(fault, failed))
    assert done.returncode == 0, done.stderr
    assert failed.exists()
    assert ("continuing in a new process" in done.stderr) == FAULTS[fault]
    assert "micro-batches of 4 patches" in done.stderr
    assert "Traceback" not in done.stderr
    for name in ("memory.json", "metrics.json"):
        assert json.loads((out / name).read_text())["micro_batch"] == 4
    assert_close(out, uninterrupted)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("build:1:exhausted", "memory ran out before the first step"),
        pytest.param(
            "gradients:1:exhausted",
            "not even single patches fit",
            marks=pytest.mark.nightly(reason="a process for each size of micro-batches"),
        ),
    ],
)
def test_permanent_out_of_memory_is_reported(
    run: RunCommand, small_store: Path, tmp_path: Path, fault: str, expected: str
) -> None:
    done = run("train", small_store, "--out", "run", *PIECES, env=faulty(fault, Path("always")))
    assert done.returncode == 6, done.stderr
    assert expected in done.stderr
    assert (tmp_path / "run").exists() == (not fault.startswith("build"))


@pytest.mark.nightly(reason="two kills; test_killed_and_resumed_equals_uninterrupted has one")
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGABRT"])
def test_process_killed_for_memory_is_reported_and_resumed_in_smaller_pieces(
    run: RunCommand, small_store: Path, uninterrupted: Path, tmp_path: Path, kind: str
) -> None:
    fault = faulty(f"gradients:11:{kind}", tmp_path / "failed")
    done = run("train", small_store, "--out", "run", *PIECES, env=fault)
    assert done.returncode == 6, done.stderr
    assert f"died of {kind}: probably out of memory" in done.stderr
    assert "which uses micro-batches of 4 patches" in done.stderr
    assert not (tmp_path / "run" / "metrics.json").exists()
    if kind != "SIGKILL":
        return  # resuming is the same for both
    again = run("train", "--resume", "--out", "run")
    assert again.returncode == 0, again.stderr
    assert "micro-batches of 4 patches per device, because memory ran out before" in again.stderr
    assert_close(tmp_path / "run", uninterrupted)
