"""Check this machine and installation: `doctor`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.diagnostics import machine
from histopipe.diagnostics.machine import Check, State
from histopipe.errors import ExitCode
from histopipe.system.output import Progress, Result, default_progress
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import TookTooLong, WorkerDied, WorkerPool

_SECONDS = 180.0
_LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Minimum driver version for each major version of CUDA.

Source: NVIDIA's CUDA compatibility guide, minor version compatibility.
"""
_INSTALL_CPU, _INSTALL_GPU = "pip install 'histopipe[train]'", "pip install 'histopipe[gpu]'"

_SIDE = 1024
_TOLERANCE = 1e-2
"""Maximum error relative to the largest entry. GPUs multiply float32 as TF32, with ten bits."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device, such as "/GPU:0", and the seconds that a product of two 1024² matrices takes on it, or the error."""

    name: str
    model: str = ""
    seconds: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Versions of TensorFlow, Keras and CUDA (None if built without CUDA), and the devices, with the CPU first."""

    version: str
    keras: str
    cuda: str | None
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver, the models of the GPUs that this process may use, and the output of `nvidia-smi` if it fails.

    The version is, for example, "550.54.14"; "" if unknown.
    """

    version: str
    gpus: tuple[str, ...]
    problem: str | None = None


def find_driver(proc: Path = Path("/proc/driver/nvidia/version")) -> Driver | None:
    """Return the loaded driver; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    problem = None
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        rows = [row.split(", ", 1) for row in done.stdout.splitlines() if ", " in row]
        if done.returncode == 0 and rows:
            return Driver(rows[0][0], tuple(name for _, name in rows))
        problem = (done.stdout + done.stderr).strip()[:300] or f"exit code {done.returncode}"
    with suppress(OSError):
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", proc.read_text())
        return Driver(match[1] if match else "", (), problem)
    return None


def tensorflow() -> tuple[Check, Probe | None]:
    """Load TensorFlow in a separate process, and test every device."""
    if importlib.util.find_spec("tensorflow") is None:
        todo = f"to train: {_INSTALL_CPU}, or with a GPU {_INSTALL_GPU}"
        return Check("TensorFlow", "not installed", State.WARNING, todo), None
    try:
        with WorkerPool(1) as pool:
            result = pool.submit_within(_SECONDS, probe).result()
    except TookTooLong:
        problem = f"no result after {_SECONDS:.0f} s"
    except WorkerDied as error:
        problem = f"its process was {error}"
    except Exception as error:  # noqa: BLE001 - a broken TensorFlow may raise any error
        problem = str(error)
    else:
        built = f"built for CUDA {result.cuda}" if result.cuda else "built without CUDA"
        text = f"{result.version} with Keras {result.keras}, {built}; "
        versions = {"version": result.version, "keras": result.keras, "cuda": result.cuda}
        check = _device_check("TensorFlow", text, result.devices[0], _INSTALL_CPU, versions)
        return check, result
    packages = metadata.packages_distributions()  # tensorflow may come from tensorflow-cpu
    installed = ", ".join(
        f"{package} {metadata.version(package)}"
        for name in ("tensorflow", "keras", "numpy")
        for package in packages.get(name, ())
    )
    todo = f"reinstall it in a separate environment: {_INSTALL_CPU} or {_INSTALL_GPU}"
    return Check("TensorFlow", f"broken: {problem} ({installed})", State.BAD, todo), None


def _device_check(
    name: str, text: str, device: Device, todo: str, details: dict[str, Any] | None = None
) -> Check:
    """Return a check whose text ends with the speed of a device, or is bad and ends with its error."""
    if device.problem:
        return Check(name, text + device.problem, State.BAD, todo, details)
    text += f"a product of 1024² matrices in {1e3 * (device.seconds or 0.0):.1f} ms"
    return Check(name, text, facts=details)


def gpus(driver: Driver | None, result: Probe | None) -> list[Check]:
    """Return a check of each GPU, or one check with the reason why TensorFlow has no GPU."""
    todo = "run `nvidia-smi`: it may be full or broken; CUDA_VISIBLE_DEVICES can exclude it"
    devices = result.devices[1:] if result else ()
    checks = [_device_check(d.name[1:], f"{d.model}: ", d, todo) for d in devices]
    return checks or [_missing_gpu(driver, result)]


def _missing_gpu(driver: Driver | None, result: Probe | None) -> Check:
    """Return a check with the first reason that applies why TensorFlow has no GPU."""
    if driver is None:
        return Check(
            "GPU",
            "none: no NVIDIA driver is loaded",
            State.WARNING,
            "training uses the CPU. To use an NVIDIA GPU, install its driver; in a container: docker run --gpus "
            "all, with NVIDIA's container toolkit on the host",
        )
    cuda = result.cuda if result else None
    needed = _LEAST_DRIVER.get(int(cuda.split(".")[0]), (0, 0)) if cuda else (0, 0)
    version = tuple(int(part) for part in driver.version.split(".")[:2] if part.isdigit())
    reasons = (
        (
            driver.problem is not None,
            f"nvidia-smi: {driver.problem}",
            "restart the machine after a driver update; in a container: docker run --gpus all",
        ),
        (
            not driver.gpus,
            "none is assigned",
            "in a container: docker run --gpus all; on a cluster: request one from the scheduler",
        ),
        (result is None, "TensorFlow does not work", _INSTALL_GPU),
        (
            os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"),
            "CUDA_VISIBLE_DEVICES hides them",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (cuda is None, "TensorFlow is built without CUDA", _INSTALL_GPU),
        (
            version < needed,
            f"TensorFlow is built for CUDA {cuda}, which needs driver {needed[0]}.{needed[1]} or later",
            "update NVIDIA's driver on the host",
        ),
        (
            True,
            f"TensorFlow finds no CUDA {cuda} libraries that it can load",
            f"{_INSTALL_GPU} installs them; LD_LIBRARY_PATH must not contain another CUDA",
        ),
    )
    why, todo = next((why, todo) for applies, why, todo in reasons if applies)
    text = f"driver {driver.version}, {', '.join(driver.gpus) or 'no GPU for this process'}"
    return Check("GPU", f"{text}: {why}", State.BAD, todo)


def probe() -> Probe:
    """Load TensorFlow and multiply matrices on every device. A broken TensorFlow may raise any error."""
    tf, keras = load_quietly("tensorflow"), load_quietly("keras")
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    models = [tf.config.experimental.get_device_details(gpu).get("device_name", "") for gpu in gpus]
    names = {"/CPU:0": ""} | {f"/GPU:{n}": str(model) for n, model in enumerate(models)}
    build = tf.sysconfig.get_build_info()
    return Probe(
        tf.__version__,
        keras.__version__,
        str(build["cuda_version"]) if build.get("is_cuda_build") else None,
        tuple(_multiply(tf, name, model) for name, model in names.items()),
    )


def _multiply(tf: Any, name: str, model: str) -> Device:
    a, b = np.random.default_rng(0).standard_normal((2, _SIDE, _SIDE), np.float32)
    try:
        for _ in range(2):  # the first one loads libraries
            started = time.perf_counter()
            with tf.device(name):
                product = tf.linalg.matmul(a, b).numpy()
            seconds = time.perf_counter() - started
    except Exception as error:  # noqa: BLE001 - reported
        return Device(name, model, problem=str(error).split("\n", maxsplit=1)[0][:300])
    expected = a @ b
    worst = float(np.abs(product - expected).max() / np.abs(expected).max())
    problem = None if worst <= _TOLERANCE else f"a matrix product is wrong by {worst:.1%}"
    return Device(name, model, seconds, problem)


_SIGNS = {State.GOOD: "ok  ", State.WARNING: "note", State.BAD: "BAD "}


@dataclass(frozen=True, slots=True, repr=False)
class DoctorReport(Result):
    """Results of all checks."""

    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> ExitCode:
        """6 if a check is bad, else 0."""
        bad = any(check.state is State.BAD for check in self.checks)
        return ExitCode.SHORT if bad else ExitCode.DONE

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            lines.append(f"{_SIGNS[check.state]}  {check.name:14} {check.found}")
            if check.todo:
                lines.append(f"{'':20} -> {check.todo}")
        return "\n".join(lines)


def doctor(store: str | Path = "patches.lmdb", *, progress: Progress | None = None) -> DoctorReport:
    """Check this machine and installation, and the disk of a store.

    Args:
        store: path of a store, which need not exist.
        progress: shows the progress; `default_progress()` if None.

    Returns:
        The results of all checks.

    Example:
        >>> doctor().exit_code  # doctest: +SKIP
        <ExitCode.DONE: 0>
    """
    checks = []
    with (progress or default_progress()).bar("doctor", unit="checks") as bar:
        for check in _checks(Path(store)):
            checks.append(check)
            bar.advance()
    return DoctorReport(tuple(checks))


def _checks(folder: Path) -> Iterator[Check]:
    for check in (machine.python, machine.processor, machine.memory, machine.address_space):
        yield check()
    yield machine.disk(folder)
    yield machine.filesystem(folder)
    for check in (machine.libraries, machine.openslide, machine.readers, machine.jpeg):
        yield check()
    of_tensorflow, result = tensorflow()
    gpu_checks = gpus(find_driver(), result)
    yield from (of_tensorflow, *gpu_checks, machine.shared_memory(len(gpu_checks)))
