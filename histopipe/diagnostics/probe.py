"""What TensorFlow finds on this machine, and whether its devices can count: for a process that may die of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from histopipe.system.tensorflow import load_quietly

_SIDE = 1024
_TOLERANCE = 1e-2
"""Of the largest entry: GPUs multiply float32 in TF32, of ten bits."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and a product of two 1024² matrices on it.

    Attributes:
        name: TensorFlow's, as "/GPU:0".
        model: the maker's; "" of a CPU.
        seconds: of the second product; None if there was none.
        problem: why not, or what is wrong with it.
    """

    name: str
    model: str = ""
    seconds: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """What TensorFlow says of itself.

    Attributes:
        version: its own.
        keras: Keras's.
        cuda: the version that it was built for; None if for none.
        devices: the CPU, and all GPUs that it sees.
    """

    version: str
    keras: str
    cuda: str | None
    devices: tuple[Device, ...]


def probe() -> Probe:
    """Load TensorFlow, and multiply on every device.

    Raises:
        MachineShort: it is not installed, or does not load.
        Exception: whatever else a broken TensorFlow raises.
    """
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
    except Exception as error:  # noqa: BLE001 - it is what is looked for
        return Device(name, model, problem=str(error).split("\n", maxsplit=1)[0][:300])
    expected = a @ b
    worst = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not worst <= _TOLERANCE:
        return Device(name, model, seconds, f"a matrix product is wrong by {worst:.1%}")
    return Device(name, model, seconds)
