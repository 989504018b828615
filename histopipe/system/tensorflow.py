"""Load TensorFlow without its messages, and Keras with the settings that histopipe needs; and read `TF_CONFIG`."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from histopipe.errors import MachineShort, UsageError, reported_as

_OPTIONAL = ("matplotlib", "pandas", "sklearn")
"""Packages that Keras imports for functions that histopipe does not use. They take a third of Keras' loading time."""
_KERAS = {"image_data_format": "channels_last", "floatx": "float32", "epsilon": 1e-7}
"""Settings of Keras, which it also reads from `keras.json`, as the backend."""


# Leave out TensorFlow's advice to trace our functions less often: each training in a process traces its own.
_ADVICE = re.compile(r"(TrainStep|KerasNetwork)\..*tf\.function retracing")
logging.getLogger("tensorflow").addFilter(lambda record: not _ADVICE.search(record.getMessage()))


def load_quietly(module: str, *, lean: bool = False) -> Any:
    """Import a module that loads TensorFlow.

    With `lean`, Keras loads without its optional packages. They can still be imported later. If this call loads Keras,
    Keras gets our settings, and those of the user's files and environment have no effect; else see `check_keras`.

    Raises:
        MachineShort: TensorFlow is not installed or cannot be loaded.
    """
    loaded = "keras" in sys.modules
    try:
        with _quiet(_OPTIONAL if lean else ()):
            imported = importlib.import_module(module)
    except (ImportError, ValueError, AssertionError, AttributeError) as error:
        is_missing = isinstance(error, ImportError)  # else, keras.json has a wrong value
        raise MachineShort(
            "this needs TensorFlow, which is not installed or cannot be loaded",
            found=str(error) or repr(error),
            todo="run pip install 'histopipe[train]' (CPU) or 'histopipe[gpu]'"
            if is_missing
            else "correct or remove keras.json in ~/.keras or KERAS_HOME",
        ) from error
    if not loaded and "keras" in sys.modules:
        for name, value in _KERAS.items():
            getattr(sys.modules["keras"].config, f"set_{name}")(value)
    return imported


def check_keras() -> None:
    """Check that Keras has our settings. A program that loaded Keras first keeps its own, and must change them itself.

    Raises:
        UsageError: a setting differs.
    """
    config = sys.modules["keras"].config
    for name, expected in {"backend": "tensorflow", **_KERAS}.items():
        value = getattr(config, name)()
        if value != expected:
            raise UsageError(
                f"the {name} of Keras in this process",
                found=repr(value),
                expected=repr(expected),
                todo="set KERAS_BACKEND=tensorflow"
                if name == "backend"
                else f"call keras.config.set_{name}({expected!r})",
            )


@contextmanager
def _quiet(packages: Sequence[str]) -> Iterator[None]:
    """Discard standard error: TensorFlow's libraries write to it while they load, and no setting prevents it.

    Keras gets the backend TensorFlow, which cannot be changed later. Imports of `packages` fail, unless they are
    already loaded.
    """
    hidden = [name for name in packages if name not in sys.modules]
    sys.stderr.flush()
    # TensorFlow and Keras read these variables once; child processes must not inherit them.
    before = {name: os.environ.get(name) for name in ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND")}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        for name, value in before.items():
            del os.environ[name]
            os.environ.update({} if value is None else {name: value})
        os.dup2(kept, 2)
        os.close(kept)


def in_cluster(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment describes this process as one of several workers."""
    # The number of tasks of the Slurm job step of this process. A batch script has no step.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    return tf_config(environment) is not None or tasks > 1


def tf_config(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return `TF_CONFIG` if it names more than one worker."""
    text = environment.get("TF_CONFIG", "")
    if not text.strip():
        return None
    with reported_as(
        UsageError,
        "TF_CONFIG",
        (ValueError, KeyError, TypeError, AttributeError),
        reason=repr,
        expected='{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}',
    ):
        config: dict[str, Any] = json.loads(text)
        addresses = [address for part in config["cluster"].values() for address in part]
        int(config["task"]["index"])
        str(config["task"]["type"])
    return config if len(addresses) > 1 else None


_DEVICES = re.compile(r"auto|cpu(:(?P<cpus>[1-9]\d*))?|gpu(:(?P<gpus>\d+(,\d+)*))?")


def parse_devices(devices: str) -> re.Match[str]:
    """Match a value of `--devices`. Group `cpus` is the number of CPUs, `gpus` the GPU numbers; None if not given.

    Raises:
        UsageError: the value is malformed.
    """
    match = _DEVICES.fullmatch(devices)
    if match is None:
        raise UsageError(
            "--devices", found=repr(devices), expected="auto, cpu, cpu:N, gpu or gpu:0,1"
        )
    return match


def share_devices(devices: str, trainings: int) -> list[str]:
    """Return the value of `--devices` for each of several parallel trainings. GPUs are divided, the CPU is shared.

    Raises:
        UsageError: there are fewer GPUs than trainings.
    """
    gpus: list[str] = []
    if trainings > 1 and devices.startswith("gpu:"):
        gpus = devices.removeprefix("gpu:").split(",")
    elif trainings > 1 and not devices.startswith("cpu"):
        gpus = [str(number) for number in range(count_gpus())]
    if not gpus:
        return [devices] * trainings
    if len(gpus) < trainings:
        raise UsageError(
            "--parallel-folds", found=trainings, expected=f"at most one per GPU: {len(gpus)}"
        )
    return [f"gpu:{','.join(gpus[first::trainings])}" for first in range(trainings)]


def count_gpus() -> int:
    """Count the GPUs that TensorFlow finds, in another process, because TensorFlow would occupy them in this one."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return int(done.stdout) if done.returncode == 0 else 0
