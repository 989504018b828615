"""Probe TensorFlow and its devices, in a process that may crash."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from histopipe.system.tensorflow import load_quietly

_SIDE = 1024
_TOLERANCE = 1e-2
"""Share of the largest entry: GPUs multiply float32 as TF32, with ten bits."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device, such as "/GPU:0", and the seconds or the problem of a product of two 1024² matrices on it."""

    name: str
    model: str = ""
    seconds: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Versions of TensorFlow, of Keras, and of the CUDA that it was built for, if any; its devices, the CPU first."""

    version: str
    keras: str
    cuda: str | None
    devices: tuple[Device, ...]


def probe() -> Probe:
    """Load TensorFlow and multiply matrices on every device. A broken TensorFlow may raise anything."""
    tf, keras = load_quietly("tensorflow"), load_quietly("keras")
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    models = [tf.config.experimental.get_device_details(gpu).get("device_name", "") for gpu in gpus]
    build = tf.sysconfig.get_build_info()
    cuda = str(build["cuda_version"]) if build.get("is_cuda_build") else None
    devices = [_multiply(tf, "/CPU:0", "")]
    devices += [_multiply(tf, f"/GPU:{n}", str(model)) for n, model in enumerate(models)]
    return Probe(tf.__version__, keras.__version__, cuda, tuple(devices))


def _multiply(tf: Any, name: str, model: str) -> Device:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, _SIDE, _SIDE), np.float32)
    try:
        seconds = 0.0
        for _ in range(2):  # the first one loads libraries
            started = time.perf_counter()
            with tf.device(name):
                found = tf.linalg.matmul(a, b).numpy()
            seconds = time.perf_counter() - started
    except Exception as error:  # noqa: BLE001 - reported
        return Device(name, model, problem=str(error).split("\n", maxsplit=1)[0][:300])
    expected = a @ b
    worst = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not worst <= _TOLERANCE:
        return Device(name, model, seconds, f"a matrix product is wrong by {worst:.1%}")
    return Device(name, model, seconds)
