"""The choice of what is trained within a time, and its measurement."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from helpers.commands import run_command
from helpers.examples import examples
from helpers.trainings import TINY, in_fork
from histopipe.errors import MachineShort, UsageError
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import PatchTrainConfig, changed_config, load_config, make_config
from histopipe.runs.train import Pace, chosen, chosen_settings, within_budget

PATCHES = {"train": [400, 90, 300], "validation": [200], "test": [100, 100], "calibration": []}
GIVEN: tuple[dict[str, Any], ...] = (
    {},
    {"epochs": 7},
    {"trainable": "all"},
    {"trainable": "head"},
    {"max_per_slide": 50},
    {"trainable": "head", "head_copies": 2, "patches_per_slide": 100},
    {"epochs": 2, "trainable": "all", "patches_per_slide": 0},
    {"mil": ("features",)},
)


def pace(step: float, prediction: float, start: float = 5.0) -> Pace:
    return Pace(step, prediction, start, {k: np.array(v, np.int64) for k, v in PATCHES.items()})  # type: ignore[misc]


def config_of(fixed: dict[str, Any], budget: float) -> TrainConfig:
    model = {} if "mil" in fixed else {"model": "efficientnet-lite0"}
    recipe = chosen_settings({**model, **fixed})
    return make_config({**model, **recipe, **fixed, "time_budget": budget})


@examples(200)
@given(
    st.sampled_from(GIVEN),
    st.floats(10, 1e5),
    st.floats(1e-4, 1),
    st.floats(0.05, 1),
    st.integers(1, 20),
)
def test_the_choice_fits_and_leaves_given_settings(
    fixed: dict[str, Any], budget: float, step: float, forward: float, runs: int
) -> None:
    config, measured = config_of(fixed, budget), pace(step, step * forward)
    try:
        choice = chosen(config, fixed, measured, runs)
    except UsageError as error:
        # Nothing smaller is allowed.
        smallest: dict[str, Any] = {"epochs": min(3, config.epochs)}
        if isinstance(config, PatchTrainConfig):
            smallest |= {"patches_per_slide": 8}
        if not ({"trainable", "max_per_slide", "mil"} & fixed.keys()):
            smallest |= {"trainable": "head", "head_copies": 1}
        if fixed.get("trainable") == "head":
            smallest |= {"head_copies": 1}
        least = changed_config(config, **{n: v for n, v in smallest.items() if n not in fixed})
        assert measured.seconds(least, runs) > 0.8 * budget * 0.75
        assert "--time-budget" in str(error)
        return
    assert measured.seconds(choice, runs) <= 0.8 * budget
    values = choice.values()
    assert {name: values[name] for name in fixed} == {name: config.values()[name] for name in fixed}
    changed = {name for name, value in values.items() if value != config.values()[name]}
    if measured.seconds(config, runs) <= 0.8 * budget:
        assert changed == {"more_time"} and choice.more_time == "more time would change nothing"
    else:
        assert changed > {"more_time"} and choice.more_time.startswith("with --time-budget ")


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        (20.0, {"trainable": "all", "epochs": 10}),
        (10.0, {"trainable": "all", "epochs": 5}),
        (5.0, {"trainable": "head", "epochs": 20, "head_copies": 4}),
        (2.0, {"trainable": "head", "head_copies": 1, "patches_per_slide": 0}),
        (1.0, {"trainable": "head", "head_copies": 1, "patches_per_slide": 163}),
    ],
)
def test_the_best_that_fits_is_chosen(minutes: float, expected: dict[str, Any]) -> None:
    # An epoch takes 83 s, and four copies 179 s.
    choice = chosen(config_of({}, 60 * minutes), {}, pace(0.09, 0.05), 1)
    values = choice.values()
    assert {name: values[name] for name in expected} == expected


def test_the_last_block_is_chosen_where_all_weights_take_too_long() -> None:
    choice = chosen(config_of({}, 14 * 60), {}, pace(0.3, 0.05), 1)
    assert (choice.values()["trainable"], choice.epochs) == ("last:1", 10)
    assert choice.values()["head_copies"] == 0


def test_too_little_time_is_refused_with_the_time_that_is_needed() -> None:
    fixed = {"trainable": "all", "epochs": 10, "patches_per_slide": 0}
    with pytest.raises(UsageError, match=r"--time-budget 2.0 min: found about 17 min, expected"):
        chosen(config_of(fixed, 120.0), fixed, pace(0.09, 0.05), 1)


@pytest.mark.long(reason="measured steps in a process that loads TensorFlow, and a training")
def test_a_run_records_its_choice_and_continues_with_it(small_store: Path, tmp_path: Path) -> None:
    flags = [word for name, value in TINY.items() for word in (f"--{name}", value)]
    run, splits = tmp_path / "run", ("--split-by", "slide", "--batch-size", 8)
    done = run_command("train", small_store, *flags, *splits, "--time-budget", "1h", "--out", run)
    assert "measuring some steps" in done.stderr and "--time-budget 60 min: about " in done.stderr
    assert "\nmore time would change nothing\nnext: " in done.stderr
    config = load_config(run / "config.toml")
    assert (config.time_budget, config.more_time) == (3600, "more time would change nothing")
    assert within_budget(config, {}) is config  # as when it is resumed
    # The folder is checked before the measurement.
    refused = run_command("train", small_store, "--time-budget", "1h", "--out", run)
    assert "measuring" not in refused.stderr


def seconds_of_step(steps: int) -> tuple[float, int]:
    """Return the measured seconds of a step, and the number of steps: two of 10 s, which compile, and others of 2 s."""
    module = importlib.import_module("histopipe.training.pace")
    now, done = 0.0, 0

    def run(in_step: Any) -> None:
        nonlocal now, done
        for number in range(steps):
            now += 10 if number < 2 else 2
            done += 1
            in_step()
        now += 2

    with mock.patch.object(module.time, "monotonic", lambda: now):
        return module._seconds_of_step(run, 9.0), done


def check_seconds_of_a_step() -> None:
    assert [seconds_of_step(steps) for steps in (100, 6, 1)] == [(2, 7), (2, 6), (2, 1)]


def test_the_seconds_of_a_step_have_no_compilation() -> None:
    in_fork(check_seconds_of_a_step)


def test_a_measurement_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("histopipe.runs.train._measured", end_of_memory)
    with pytest.raises(MachineShort, match=r"probably out of memory: found killed by SIGKILL"):
        within_budget(config_of({}, 60.0), {})


def end_of_memory(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_parts_of_a_cross_validation_do_not_measure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--time-budget: found --part"):
        histopipe.cross_validate(out=tmp_path / "cv", folds=3, part="1/2", time_budget=60.0)
