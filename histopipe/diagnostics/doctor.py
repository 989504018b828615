"""Check this machine and installation: processor, memory, limits, disk, libraries, JPEG decoding, and TensorFlow's devices."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from packaging.requirements import Requirement

from histopipe.diagnostics.encoder_checks import Check, State, encoder_checks
from histopipe.errors import ExitCode, UsageError
from histopipe.exporting.export_formats import EXPORTS
from histopipe.slides.slide_formats import READERS
from histopipe.system.files import filesystem_of, free_bytes, network_filesystem
from histopipe.system.output import Progress, Result, default_progress
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import TookTooLong, WorkerDied, WorkerPool, count_usable_cores

_NEEDED, _USED = ("avx",), ("avx2", "fma", "avx512f")
"""Processor features. TensorFlow's wheels crash without the needed ones, and are faster with the others."""
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHARED = 8 << 30, 10 << 30, 1 << 30
_OLDEST, _NEWEST = (3, 11), (3, 13)
_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = "it is in memory: files there use memory, and are lost on a restart; use a disk"
_WARNINGS = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": "it is removed with the container: mount a volume (docker run -v) for stores and runs",
}
"""Advice on filesystems that should not hold a store."""
_IMPORTS = {"openslide-python": "openslide", "pillow": "PIL", "opencv-python-headless": "cv2"}
"""Module names that differ from the package name."""
_SECONDS = 180.0
_LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Minimum driver version for each major version of CUDA, by NVIDIA's CUDA compatibility guide (minor versions)."""
_INSTALL_CPU, _INSTALL_GPU = "pip install 'histopipe[train]'", "pip install 'histopipe[gpu]'"
_SIDE = 1024
_TOLERANCE = 1e-2
"""Maximum error relative to the largest entry. GPUs multiply float32 as TF32, with ten bits."""


def _advised(
    name: str,
    description: str,
    todo: str | None,
    *,
    applies: bool,
    state: State = "warning",
    details: dict[str, Any] | None = None,
) -> Check:
    """Return a check that is good; if its advice `applies`, one of another state with the advice."""
    return Check(
        name, description, state if applies else "good", todo if applies else None, details
    )


def python() -> Check:
    """Check the version of Python."""
    return _advised(
        "Python",
        f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "use Python 3.11, 3.12 or 3.13",
        applies=not _OLDEST <= sys.version_info[:2] <= _NEWEST,
        state="bad",
    )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Check the number of usable cores and the processor features."""
    cores, quota = count_usable_cores(), _quota()
    text = f"{cores} cores" + (f", limited to {quota:g}" if quota else "")
    match = re.search(r"^flags[^:]*:(.*)", _text(cpuinfo), re.MULTILINE)
    if platform.machine() != "x86_64" or not match:
        return Check("processor", f"{text}, {platform.machine()}")
    present = [name for name in (*_NEEDED, *_USED) if name in match[1].split()]
    text += f", {' '.join(present) or 'no AVX'}"
    return _advised(
        "processor",
        text,
        "TensorFlow's wheels need AVX: train on another machine; ingest works here",
        applies=not set(_NEEDED) <= set(present),
        state="bad",
        details={"cores": cores, "quota": quota, "features": present},
    )


def memory() -> Check:
    """Check how much memory processes may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_text(_CGROUP / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limit = min([total, *(int(text) for text in limits if text.strip().isdigit())])
    of_machine = f" of {total / 2**30:.0f} GiB in the machine" if limit < total else ""
    return _advised(
        "memory",
        f"{limit / 2**30:.0f} GiB{of_machine}",
        "training takes 3 GB or more: you may need --accumulate and small batches",
        applies=limit < _LEAST_MEMORY,
        details={"bytes": limit, "machine_bytes": total},
    )


def address_space() -> Check:
    """Check the address space limit, since stores are mapped into memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_limited = limit != resource.RLIM_INFINITY
    return _advised(
        "address space",
        f"{limit / 2**30:.1f} GiB" if is_limited else "no limit",
        "stores are mapped into memory, 16 TiB for a writer: run `ulimit -v unlimited` first",
        applies=is_limited,
        state="bad",
    )


def shared_memory(gpus: int, path: Path = Path("/dev/shm")) -> Check:  # noqa: S108 - the system's own
    """Check the shared memory, through which several GPUs exchange gradients."""
    size = os.statvfs(path).f_blocks * os.statvfs(path).f_frsize if path.is_dir() else 0
    return _advised(
        "shared memory",
        f"{size / 2**20:,.0f} MiB in {path}",
        "NCCL needs more for several GPUs: docker run --shm-size 8g, or shm_size in compose.yaml",
        applies=gpus > 1 and size < _LEAST_SHARED,
    )


def disk(folder: Path) -> Check:
    """Check the free space for a store."""
    free = free_bytes(folder)
    return _advised(
        "disk",
        f"{free / 1e9:,.0f} GB free for {folder}",
        "a slide takes 0.3 to 2 GB in a store: free disk space, or use another disk",
        applies=free < _LEAST_DISK,
    )


def filesystem(folder: Path) -> Check:
    """Check the kind of filesystem of a store."""
    kind = filesystem_of(folder)
    description = f"{folder} is on {kind}"
    if network_filesystem(folder):
        return Check(
            "filesystem",
            description,
            "bad",
            "LMDB's locks do not work between machines: write to a local disk, then copy",
        )
    return _advised("filesystem", description, _WARNINGS.get(kind), applies=kind in _WARNINGS)


def _text(path: Path) -> str:
    """Return the content of a file of the kernel; empty if there is none."""
    with suppress(OSError):
        return path.read_text()
    return ""


def _quota() -> float | None:
    """Return the number of cores that a control group, of version 2 or 1, allows; None if there is no limit."""
    files = ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    words = " ".join(_text(_CGROUP / name) for name in files).split()
    is_limited = len(words) > 1 and words[0].isdigit()  # not "max" or -1
    return int(words[0]) / int(words[1]) if is_limited else None


def libraries() -> Check:
    """Check that every library that ingest needs can be imported and has a supported version."""
    versions, wrong = {}, []
    requirements = map(Requirement, metadata.requires("histopipe") or [])
    # Those with a marker belong to extras.
    for requirement in (each for each in requirements if each.marker is None):
        name = requirement.name
        try:
            versions[name] = metadata.version(name)
            if name != "openslide-bin":  # it has no module
                importlib.import_module(_IMPORTS.get(name, name))
        except Exception as error:  # noqa: BLE001 - a broken library may raise any error
            wrong.append(f"{name}: {error}")
        else:
            if not requirement.specifier.contains(versions[name], prereleases=True):
                wrong.append(f"{name} {versions[name]}, expected {requirement}")
    if wrong:
        return Check(
            "libraries",
            "; ".join(wrong),
            "bad",
            "reinstall histopipe in a separate environment",
            versions,
        )
    return Check("libraries", f"all {len(versions)} are installed", facts=versions)


def openslide() -> Check:
    """Check which slide formats OpenSlide can open."""
    try:
        # Late: the library may be broken.
        from histopipe.slides.openslide_reader import openslide_formats

        version, formats = openslide_formats()
    except (ImportError, OSError) as error:
        return Check("OpenSlide", f"cannot be loaded: {error}", "bad", "pip install openslide-bin")
    text = f"{version}: {', '.join(formats) or 'formats unknown'}"
    return Check("OpenSlide", text, facts={"version": version, "formats": formats})


def readers() -> Check:
    """List the libraries that read what OpenSlide does not, and their formats."""
    versions = {}
    for name, reader in READERS.items():
        if name != "openslide":
            version = _version(reader.package)
            versions[name] = f"{version}: {reader.formats}" if version else "not installed"
    return Check(
        "other readers", "; ".join(f"{k} {v}" for k, v in versions.items()), facts=versions
    )


def exports() -> Check:
    """List the formats of `export`, with the extras that are missing for some of them."""
    missing = {
        name: each.extra
        for name, each in EXPORTS.items()
        if each.extra and not _has_extra(each.extra)
    }
    texts = [f"{name} needs [{missing[name]}]" if name in missing else name for name in EXPORTS]
    return Check("exports", ", ".join(texts), facts={"missing": missing})


def _has_extra(extra: str) -> bool:
    """Return whether the libraries of an extra are installed."""
    return all(
        _version(each.name)
        for each in map(Requirement, metadata.requires("histopipe") or [])
        if each.marker and each.marker.evaluate({"extra": extra})
    )


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver, the models of the GPUs that this process may use, and the output of `nvidia-smi` if it fails."""

    version: str
    """Such as "550.54.14"; "" if unknown."""
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


def tensorflow() -> list[Check]:
    """Load TensorFlow in a separate process, and test every device: the check of TensorFlow, and one of each GPU."""
    if importlib.util.find_spec("tensorflow") is None:
        todo = f"to train: {_INSTALL_CPU}, or with a GPU {_INSTALL_GPU}"
        return [Check("TensorFlow", "not installed", "warning", todo)]
    try:
        with WorkerPool(1) as pool:
            return pool.submit_within(_SECONDS, probe).result()
    except TookTooLong:
        problem = f"no result after {_SECONDS:.0f} s"
    except WorkerDied as error:
        problem = f"its process was {error}"
    except Exception as error:  # noqa: BLE001 - a broken TensorFlow may raise any error
        problem = str(error)
    packages = metadata.packages_distributions()  # tensorflow may come from tensorflow-cpu
    installed = ", ".join(
        f"{package} {metadata.version(package)}"
        for name in ("tensorflow", "keras", "numpy")
        for package in packages.get(name, ())
    )
    todo = f"reinstall it in a separate environment: {_INSTALL_CPU} or {_INSTALL_GPU}"
    return [Check("TensorFlow", f"broken: {problem} ({installed})", "bad", todo)]


def missing_gpu(driver: Driver | None, versions: Mapping[str, Any] | None) -> Check:
    """Return a check with the first reason why TensorFlow has no GPU. `versions` are None if it does not work."""
    if driver is None:
        return Check(
            "GPU",
            "none: no NVIDIA driver is loaded",
            "warning",
            "training uses the CPU. To use an NVIDIA GPU, install its driver; in a container: docker run --gpus "
            "all, with NVIDIA's container toolkit on the host",
        )
    cuda = versions["cuda"] if versions else None
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
        (versions is None, "TensorFlow does not work", _INSTALL_GPU),
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
    return Check("GPU", f"{text}: {why}", "bad", todo)


def probe() -> list[Check]:
    """Load TensorFlow and multiply matrices on every device, the CPU first. A broken TensorFlow may raise any error."""
    tf, keras = load_quietly("tensorflow"), load_quietly("keras")
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    models = [tf.config.experimental.get_device_details(gpu).get("device_name", "") for gpu in gpus]
    build = tf.sysconfig.get_build_info()
    cuda = str(build["cuda_version"]) if build.get("is_cuda_build") else None
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    text = f"{tf.__version__} with Keras {keras.__version__}, {built}; "
    versions = {"version": tf.__version__, "keras": keras.__version__, "cuda": cuda}
    todo = "run `nvidia-smi`: it may be full or broken; CUDA_VISIBLE_DEVICES can exclude it"
    return [
        multiply(tf, "/CPU:0", Check("TensorFlow", text, todo=_INSTALL_CPU, facts=versions)),
        *(
            multiply(tf, f"/GPU:{n}", Check(f"GPU:{n}", f"{model}: ", todo=todo))
            for n, model in enumerate(models)
        ),
    ]


def multiply(tf: Any, device: str, check: Check) -> Check:
    """Multiply matrices on a device. Return the check with the speed, or as bad, with the error and what to do."""
    a, b = np.random.default_rng(0).standard_normal((2, _SIDE, _SIDE), np.float32)
    try:
        for _ in range(2):  # the first one loads libraries
            started = time.perf_counter()
            with tf.device(device):
                product = tf.linalg.matmul(a, b).numpy()
            seconds = time.perf_counter() - started
    except Exception as error:  # noqa: BLE001 - reported
        problem = str(error).split("\n", maxsplit=1)[0][:300]
        return replace(check, found=check.found + problem, state="bad")
    expected = a @ b
    worst = float(np.abs(product - expected).max() / np.abs(expected).max())
    if worst > _TOLERANCE:
        problem = f"a matrix product is wrong by {worst:.1%}"
        return replace(check, found=check.found + problem, state="bad")
    speed = f"a product of {_SIDE}² matrices in {1e3 * seconds:.1f} ms"
    return replace(check, found=check.found + speed, todo=None)


_SIGNS = {"good": "ok  ", "warning": "note", "bad": "BAD "}


@dataclass(frozen=True, slots=True, repr=False)
class DoctorReport(Result):
    """Results of all checks."""

    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> ExitCode:
        """6 if a check is bad, else 0."""
        return ExitCode.SHORT if "bad" in {check.state for check in self.checks} else ExitCode.DONE

    def __str__(self) -> str:
        return "\n".join(
            f"{_SIGNS[check.state]}  {check.name:14} {check.found}"
            + (f"\n{'':20} -> {check.todo}" if check.todo else "")
            for check in self.checks
        )


def doctor(
    store: str | Path = "patches.lmdb",
    *,
    encoder: str | None = None,
    weights: str | Path | None = None,
    progress: Progress | None = None,
) -> DoctorReport:
    """Check this machine and installation, and the disk of a store; or whether an encoder can be used here.

    Args:
        store: path of a store, which need not exist.
        encoder: name of `histopipe encoders`: its licence, memory, weights, and the time of a thousand slides are checked
            instead.
        weights: file or folder of its weights.
        progress: shows the progress; `default_progress()` if None.

    Returns:
        The results of all checks.

    Raises:
        UsageError: there is no such encoder, or weights are given without one.

    Example:
        >>> doctor().exit_code  # doctest: +SKIP
        <ExitCode.DONE: 0>
    """
    if weights is not None and encoder is None:
        raise UsageError("--weights", found="no --encoder", expected="the name of the encoder")
    results = _checks(Path(store)) if encoder is None else encoder_checks(encoder, weights)
    checks = []
    with (progress or default_progress()).bar("doctor", unit="checks") as bar:
        for check in results:
            checks.append(check)
            bar.advance()
    return DoctorReport(tuple(checks))


def _checks(folder: Path) -> Iterator[Check]:
    yield from (python(), processor(), memory(), address_space(), disk(folder), filesystem(folder))
    yield from (libraries(), openslide(), readers(), exports())
    # Last: it takes longest. Its GPUs are explained by its versions and by the driver.
    of_tensorflow, *of_gpus = tensorflow()
    of_gpus = of_gpus or [missing_gpu(find_driver(), of_tensorflow.facts)]
    yield from (of_tensorflow, *of_gpus, shared_memory(len(of_gpus)))
