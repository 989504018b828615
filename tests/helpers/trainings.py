"""Files of a run, faults in a training, and workers on this machine."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import INTERRUPTIBLE, processes_in, with_tensorflow
from helpers.lazy import keras, tf, training
from helpers.paths import ENCODERS, TESTS
from histopipe.runs.task_config import make_config
from histopipe.runs.train import with_recipe
from histopipe.runs.training_data import opened_sources, splits_and_slides
from histopipe.store.store import Store

FILES = {
    "config.toml",
    "splits.json",
    "slides.csv",
    "history.csv",
    "metrics.json",
    "model.keras",
    "predictions.csv",
    "resume.npz",
    "training-range.npz",
}
"""Files of a finished training of patches."""
IN_TENSORFLOW = [
    pytest.mark.xdist_group("tensorflow"),
    pytest.mark.usefixtures("tensorflow"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation"
    ),  # keras calls numpy in an old way
]
"""Marks of test modules that use TensorFlow in the process of the test: one worker loads it, for all of them."""
SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 18,
    "split_by": "slide",
    "deterministic": True,
    "dropout": 0.3,
    "optimizer": "adamw",
    "schedule": "cosine",
    "warmup_steps": 3,
    "class_weights": "balanced",
}
"""Of `uninterrupted`. Each epoch has five steps, of which the last is incomplete."""
ARGUMENTS = tuple(
    word
    for name, value in SETTINGS.items()
    for word in (f"--{name.replace('_', '-')}", *(() if value is True else (str(value),)))
)
"""`SETTINGS` as words of a command."""
EACH_STEP = ("--save-minutes", "1e-9")
"""Flags of a training that writes its state at every step."""
TINY_WEIGHTS = ENCODERS / "timm-registers.safetensors"
TINY: dict[str, Any] = {"model": str(ENCODERS / "tiny.toml"), "weights": str(TINY_WEIGHTS)}
"""A Vision Transformer of four blocks."""


@contextmanager
def opened_setup(**settings: Any) -> Iterator[Any]:
    """Yield the data and the network of a training (`TrainingSetup`), without a run."""
    config = make_config(with_recipe(settings))
    with opened_sources(config, config.splits) as sources:
        splits, slides = splits_and_slides(config, sources, Path(), resume=False)
        kind: Any = training.trainer.setup_class(config)
        yield kind(config, sources, splits, slides)


def steps_of(setup: Any, count: int = 1) -> tuple[Any, list[float]]:
    """Train on the first batch `count` times. Return the train step, and the mean loss before each update."""
    step = setup.train_step(tf.distribute.OneDeviceStrategy("/CPU:0"), 1)
    for variable, value in setup.initial_values(step):
        variable.assign(value)
    batch = {name: tf.constant(each) for name, each in setup.batches("train", 1).load(0).items()}
    rows, losses = len(batch["key"]), []
    for _ in range(count):
        gradients, ((values,),) = step.gradients(batch, tf.constant(0, tf.int64), rows, 10_000)
        step.apply(gradients, tf.zeros(2))
        losses.append(float(np.mean(values[:, -2])))
    return step, losses


def in_tensorflow(test: Any) -> Any:
    """Mark a test that uses TensorFlow in its process, as `IN_TENSORFLOW`."""
    for mark in IN_TENSORFLOW:
        test = mark(test)
    return test


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def history(run: Path) -> list[dict[str, str]]:
    timing = ("patches_per_s", "input_wait", "seconds")
    rows = csv_rows(run / "history.csv")
    return [{k: v for k, v in row.items() if k not in timing} for row in rows]


def weights(run: Path) -> list[np.ndarray[Any, Any]]:
    with np.load(run / "resume.npz") as saved:
        return [saved[name] for name in sorted(saved.files) if name.startswith("v0")]


def assert_equal(run: Path, other: Path) -> None:
    """Assert that histories, weights and predictions are bitwise equal."""
    assert history(run) == history(other)
    for a, b in zip(weights(run), weights(other), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (run / "predictions.csv").read_bytes() == (other / "predictions.csv").read_bytes()


def assert_close(run: Path, other: Path) -> None:
    """Assert equal losses to 1e-5, and equal weights to 1e-4 of each layer's norm."""
    for a, b in zip(history(run), history(other), strict=True):
        for name in ("loss", "val_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), abs=1e-5)
    for w, v in zip(weights(run), weights(other), strict=True):
        assert np.linalg.norm(w - v) <= 1e-4 * max(1.0, float(np.linalg.norm(v)))


def check_saved_model(store: str, run: str, *, atol: float = 0.02) -> Any:
    """Load a saved model in plain Keras, and check that it gives the probabilities of the run. Return the model."""
    with zipfile.ZipFile(Path(run) / "model.keras") as saved:
        config = saved.read("config.json")
    assert b"histopipe" not in config  # stock layers only
    assert b'"synchronized": true' not in config
    model = keras.models.load_model(Path(run) / "model.keras")
    assert model.inputs[0].dtype == "uint8"
    with Store(Path(store)) as opened:
        for row in csv_rows(Path(run) / "predictions.csv")[::9]:
            y_l0 = opened.index(opened.number(row["slide"]))["y_l0"]
            image = opened.read(row["slide"], np.flatnonzero(y_l0 == int(row["y_l0"]))[0])
            (served,) = model.predict(image[None], verbose=0)
            np.testing.assert_allclose(served, [float(row["p_n"]), float(row["p_t"])], atol=atol)
    return model


def faulty(fault: str, marker: Path) -> dict[str, str]:
    """Return an environment in which a training fails once at `PLACE:CALL:KIND`."""
    return {
        **os.environ,
        "HISTOPIPE_TEST_FAULT": f"{fault}:{marker}",
    }


def interrupt(
    arguments: Iterable[object], faults: Mapping[str, str], started: Sequence[str], folder: Path
) -> str:
    """Interrupt a command in a folder when files match each pattern of `started`; return what it prints on stderr.

    `faults` are those of the trainings, by the name of a run's folder. They occur at every attempt.
    """
    each = [f"{run}={fault}:{folder}/always" for run, fault in faults.items()]
    child = subprocess.Popen(
        [*INTERRUPTIBLE, *map(str, arguments)],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HISTOPIPE_TEST_FAULT": ";".join(each)},
    )
    while child.poll() is None and not all(list(folder.glob(pattern)) for pattern in started):
        time.sleep(0.02)
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 130, errors
    assert processes_in(folder) == []
    return errors


def in_fork(function: Callable[..., None], *arguments: object) -> str:
    """Call a function of a test module with texts in a fork of a process that has loaded TensorFlow; return what it prints."""
    path = Path(function.__code__.co_filename)
    code = (
        f"import sys\nsys.path[:0] = {[str(TESTS), str(path.parent)]}\n"
        f"from {path.stem} import {function.__name__} as call\ncall(*sys.argv[1:])"
    )
    done = with_tensorflow(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def tf_config(ports: list[int], index: int) -> str:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    )
