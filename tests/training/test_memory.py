"""Trainings that run out of memory give the same result, and repeated trainings do not use the caller's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import histopipe
from helpers.commands import Run, succeed
from helpers.lazy import tf
from helpers.trainings import faulty, history, in_tensorflow, weights
from histopipe.errors import OutOfMemory

ARGUMENTS = (
    "--epochs",
    "2",
    "--batch-size",
    "16",
    "--split-by",
    "slide",
    "--deterministic",
    "--dropout",
    "0.3",
    "--accumulate",
    "2",
)


@pytest.fixture(scope="module")
def undisturbed(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    succeed("train", small_store, "--out", out, *ARGUMENTS)
    return out


def assert_same_run(run: Path, other: Path) -> None:
    """Assert equal losses to 1e-5, and equal weights to 1e-4 of each layer's norm."""
    rows = list(zip(history(run), history(other), strict=True))
    assert len(rows) == 2
    for a, b in rows:
        for name in ("loss", "val_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), abs=1e-5)
    for w, v in zip(weights(run), weights(other), strict=True):
        assert np.linalg.norm(w - v) <= 1e-4 * max(1.0, float(np.linalg.norm(v)))


# Five steps with batches of 16, each in two pieces of 8: calls 9 and 10 are the pieces of the fifth step.
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
OTHER_PLACES = pytest.mark.nightly(reason="other places of the two ways to continue")


@pytest.mark.parametrize(
    "fault", [*FAULTS][:2] + [pytest.param(fault, marks=OTHER_PLACES) for fault in [*FAULTS][2:]]
)
def test_step_out_of_memory_continues_in_smaller_pieces(
    run: Run, small_store: Path, undisturbed: Path, tmp_path: Path, fault: str
) -> None:
    """In the same process if nothing has changed, else in a new process from the last checkpoint."""
    environment = faulty(fault, tmp_path / "failed")
    done = run("train", small_store, "--out", "run", *ARGUMENTS, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "failed").exists()
    assert ("continuing in a new process" in done.stderr) == FAULTS[fault]
    assert "micro-batches of 4 patches" in done.stderr
    assert "Traceback" not in done.stderr
    out = tmp_path / "run"
    assert json.loads((out / "memory.json").read_text())["micro_batch"] == 4
    assert json.loads((out / "metrics.json").read_text())["micro_batch"] == 4
    assert_same_run(out, undisturbed)


@pytest.mark.nightly(reason="a process for each size of micro-batches")
def test_permanent_out_of_memory_is_reported_after_single_patches(
    run: Run, small_store: Path, tmp_path: Path
) -> None:
    """Every step fails in every process, down to single patches."""
    environment = faulty("gradients:1:exhausted", Path("always"))
    done = run("train", small_store, "--out", "run", *ARGUMENTS, env=environment)
    assert done.returncode == 6, done.stderr
    assert "not even single patches fit" in done.stderr
    assert "Traceback" not in done.stderr


@in_tensorflow
def test_out_of_memory_while_building_the_network_is_reported(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    monkeypatch.setattr("histopipe.training.training_setup.build_model", fail)
    with pytest.raises(OutOfMemory, match="memory ran out before the first step"):
        histopipe.train(small_store, out=tmp_path / "run", in_process=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly(reason="two kills; test_resume.py shows that a killed training continues")
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGABRT"])
def test_process_killed_for_memory_is_reported_and_resumed_in_smaller_pieces(
    run: Run, small_store: Path, undisturbed: Path, tmp_path: Path, kind: str
) -> None:
    environment = faulty(f"gradients:11:{kind}", tmp_path / "failed")
    done = run("train", small_store, "--out", "run", *ARGUMENTS, env=environment)
    assert done.returncode == 6, done.stderr
    assert f"died of {kind}: probably out of memory" in done.stderr
    assert "which uses micro-batches of 4 patches" in done.stderr
    assert not (tmp_path / "run" / "metrics.json").exists()
    if kind != "SIGKILL":
        return  # resuming is the same for both
    again = run("train", "--resume", "--out", "run")
    assert again.returncode == 0, again.stderr
    assert "micro-batches of 4 patches per device, because memory ran out before" in again.stderr
    assert_same_run(tmp_path / "run", undisturbed)
