"""Trainings that run out of memory give the same result, and repeated trainings do not use the caller's memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.commands import Run
from helpers.trainings import ARGUMENTS, assert_close, faulty

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
OTHER_PLACES = pytest.mark.nightly(reason="other places of the two ways to continue")


@pytest.mark.parametrize(
    "fault", [*FAULTS][:2] + [pytest.param(fault, marks=OTHER_PLACES) for fault in [*FAULTS][2:]]
)
@pytest.mark.long(reason="a training in each case")
def test_step_out_of_memory_continues_in_smaller_pieces(
    run: Run, small_store: Path, uninterrupted: Path, tmp_path: Path, fault: str
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
    run: Run, small_store: Path, tmp_path: Path, fault: str, expected: str
) -> None:
    done = run("train", small_store, "--out", "run", *PIECES, env=faulty(fault, Path("always")))
    assert done.returncode == 6, done.stderr
    assert expected in done.stderr
    assert (tmp_path / "run").exists() == (not fault.startswith("build"))


@pytest.mark.nightly(reason="two kills; test_resume.py shows that a killed training continues")
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGABRT"])
def test_process_killed_for_memory_is_reported_and_resumed_in_smaller_pieces(
    run: Run, small_store: Path, uninterrupted: Path, tmp_path: Path, kind: str
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
