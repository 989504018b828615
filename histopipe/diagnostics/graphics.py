"""TensorFlow and its GPUs: what it sees, what the driver says, and what stands between them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from histopipe.diagnostics import probe
from histopipe.diagnostics.check import Check, State
from histopipe.system.worker_pool import TookTooLong, WorkerDied, WorkerPool

_SECONDS = 180.0
_LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest driver for each major version of CUDA.

Source: NVIDIA's CUDA compatibility guide, minor version compatibility.
"""
_INSTALL_CPU, _INSTALL_GPU = "pip install 'histopipe[train]'", "pip install 'histopipe[gpu]'"


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's.

    Attributes:
        version: as "550.54.14"; "" where it does not say.
        gpus: models of those that this process may use.
        problem: what `nvidia-smi` says if it fails.
    """

    version: str
    gpus: tuple[str, ...]
    problem: str | None = None


def find_driver(proc: Path = Path("/proc/driver/nvidia/version")) -> Driver | None:
    """The driver that is loaded; None if there is none."""
    asked = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    problem = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        rows = [row.split(", ", 1) for row in done.stdout.splitlines() if ", " in row]
        if done.returncode == 0 and rows:
            return Driver(rows[0][0], tuple(name for _, name in rows))
        problem = (done.stdout + done.stderr).strip()[:300] or f"exit code {done.returncode}"
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", proc.read_text())
        return Driver(found[1] if found else "", (), problem)
    return None


def tensorflow() -> tuple[Check, probe.Probe | None]:
    """Load TensorFlow in a process of its own, and let every device multiply."""
    if importlib.util.find_spec("tensorflow") is None:
        todo = f"to train: {_INSTALL_CPU}, or with a GPU {_INSTALL_GPU}"
        return Check("TensorFlow", "not installed", State.WARNING, todo), None
    try:
        with WorkerPool(1) as pool:
            found = pool.submit_within(_SECONDS, probe.probe).result()
    except TookTooLong:
        problem = f"it is not done after {_SECONDS:.0f} s"
    except WorkerDied as error:
        problem = f"the process that loaded it was {error}"
    except Exception as error:  # noqa: BLE001 - a broken TensorFlow may raise anything
        problem = str(error)
    else:
        return _devices(found), found
    packages = metadata.packages_distributions()  # tensorflow may come from tensorflow-cpu
    versions = ", ".join(
        f"{package} {metadata.version(package)}"
        for name in ("tensorflow", "keras", "numpy")
        for package in packages.get(name, ())
    )
    todo = f"install it anew, into an environment of its own: {_INSTALL_CPU} or {_INSTALL_GPU}"
    return Check("TensorFlow", f"broken: {problem} ({versions})", State.BAD, todo), None


def _devices(found: probe.Probe) -> Check:
    built = f"built for CUDA {found.cuda}" if found.cuda else "built without CUDA"
    text = f"{found.version} with Keras {found.keras}, {built}"
    facts = {"version": found.version, "keras": found.keras, "cuda": found.cuda}
    cpu = found.devices[0]
    if cpu.problem:
        return Check("TensorFlow", f"{text}; {cpu.problem}", State.BAD, _INSTALL_CPU, facts)
    return Check("TensorFlow", f"{text}; a product of 1024² matrices in {_time(cpu)}", facts=facts)


def gpus(driver: Driver | None, found: probe.Probe | None) -> list[Check]:
    """What stands between TensorFlow and a GPU, or how fast each is."""
    devices = [] if found is None else [d for d in found.devices if d.name.startswith("/GPU")]
    checks = [
        Check(
            device.name[1:], f"{device.model}: {device.problem}", State.BAD,
            "see `nvidia-smi`: it may be full, or broken; CUDA_VISIBLE_DEVICES leaves it out",
        )
        if device.problem
        else Check(device.name[1:], f"{device.model}: a product of 1024² matrices in {_time(device)}")
        for device in devices
    ]  # fmt: skip
    return checks or [_none(driver, found)]


def _none(driver: Driver | None, found: probe.Probe | None) -> Check:
    """Why TensorFlow has no GPU: the first reason that holds."""
    if driver is None:
        todo = (
            "trainings use the processor. If there is an NVIDIA GPU: install its driver; in a container: docker run --gpus "
            "all, with NVIDIA's container toolkit on the host"
        )
        return Check("GPU", "none: no NVIDIA driver is loaded", State.WARNING, todo)
    text = f"driver {driver.version}, {', '.join(driver.gpus) or 'no GPU for this process'}"
    cuda = found.cuda if found else None
    needed = _driver_for(cuda)
    old = tuple(int(part) for part in driver.version.split(".")[:2] if part.isdigit()) < needed
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    reasons = [
        (
            driver.problem, f"nvidia-smi: {driver.problem}",
            "a driver that was updated needs a restart; in a container: docker run --gpus all",
        ),
        (
            not driver.gpus, "none is given to it",
            "in a container: docker run --gpus all; on a cluster: ask the scheduler for one",
        ),
        (found is None, "TensorFlow does not work", _INSTALL_GPU),
        (hidden, "CUDA_VISIBLE_DEVICES hides them", "unset CUDA_VISIBLE_DEVICES"),
        (cuda is None, "TensorFlow is built without CUDA", _INSTALL_GPU),
        (
            old, f"TensorFlow is built for CUDA {cuda}, which needs driver {needed[0]}.{needed[1]} or later",
            "update NVIDIA's driver on the host",
        ),
        (
            True, f"TensorFlow finds no CUDA {cuda} libraries that it can load",
            f"{_INSTALL_GPU}, which brings them; LD_LIBRARY_PATH should name no other CUDA",
        ),
    ]  # fmt: skip
    why, todo = next((why, todo) for holds, why, todo in reasons if holds)
    return Check("GPU", f"{text}: {why}", State.BAD, todo)


def _driver_for(cuda: str | None) -> tuple[int, int]:
    """The oldest driver for a version of CUDA."""
    return _LEAST_DRIVER.get(int(cuda.split(".")[0]), (0, 0)) if cuda else (0, 0)


def _time(device: probe.Device) -> str:
    return f"{1e3 * (device.seconds or 0.0):.1f} ms"
