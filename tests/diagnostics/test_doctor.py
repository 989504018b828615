"""The checks of `doctor` on this machine, and on machines with simulated problems."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import histopipe
from helpers.commands import Run
from helpers.paths import SLIDE_ENCODERS
from histopipe.diagnostics import doctor
from histopipe.diagnostics.check_result import Check, State
from histopipe.diagnostics.doctor import DoctorReport, Driver
from histopipe.errors import ExitCode, UsageError
from histopipe.system.filesystems import filesystem_of

BUILT = {"version": "2.21.0", "keras": "3.15.1", "cuda": "12.5.1"}
SHARED = Path("/dev/shm")  # noqa: S108 - the system's own
H200 = Driver("580.82.07", ("NVIDIA H200",))


def by_name(text: str) -> dict[str, dict[str, object]]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_this_machine(run: Run) -> None:
    done = run("doctor", SHARED / "patches.lmdb", "--json")
    checks = by_name(done.stdout)
    assert done.returncode == json.loads(done.stdout)["exit_code"]
    for name in ("Python", "address space", "libraries", "OpenSlide", "TensorFlow"):
        assert checks[name]["state"] == "good", checks[name]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in str(checks["Python"]["found"])
    description = checks["OpenSlide"]["facts"]
    assert isinstance(description, dict)
    assert {"aperio", "dicom", "hamamatsu", "mirax", "zeiss"} <= set(description["formats"])
    description = checks["libraries"]["facts"]
    assert isinstance(description, dict)
    assert {"openslide-python", "lmdb", "numpy"} <= set(description)
    if filesystem_of(SHARED) == "tmpfs":
        assert checks["filesystem"]["state"] == "warning"
        assert "patches.lmdb is on tmpfs" in str(checks["filesystem"]["found"])
    if doctor.find_driver() is None:
        assert done.returncode == 0, done.stdout
        assert "no NVIDIA driver" in str(checks["GPU"]["found"])


def test_jpeg_is_measured_with_and_without_simd(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.jpeg()
    assert check.facts is not None
    # Other programs on the machine may slow down one of the two measurements.
    assert 1 < check.facts["without_simd"] < 3 * check.facts["megapixels_per_second"]
    monkeypatch.setattr(doctor, "_seconds", lambda _: 0.01)
    assert doctor.jpeg().state == "warning"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise AttributeError('numpy has no float')", "numpy has no float"),
    ],
)
def test_broken_tensorflow_is_reported(run: Run, tmp_path: Path, module: str, message: str) -> None:
    (tmp_path / "broken" / "tensorflow").mkdir(parents=True)
    (tmp_path / "broken" / "tensorflow" / "__init__.py").write_text(module)
    done = run("doctor", env={**os.environ, "PYTHONPATH": str(tmp_path / "broken")})
    assert done.returncode == 6
    assert "BAD   TensorFlow     broken: " in done.stdout and message in done.stdout
    assert "-> reinstall it in a separate environment" in done.stdout
    assert "GPU" in done.stdout  # the checks after TensorFlow still run
    assert "Traceback" not in done.stdout + done.stderr


def test_hanging_tensorflow_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("import time; time.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_SECONDS", 3.0)
    (check,) = doctor.tensorflow()
    assert check.state == "bad" and "no result after 3 s" in check.found


@pytest.mark.parametrize(
    ("driver", "versions", "message", "todo"),
    [
        (None, BUILT, "no NVIDIA driver", "--gpus all"),
        (Driver("", ()), BUILT, "none is assigned", "docker run --gpus all"),
        (Driver("550.54", (), "Driver/library version mismatch"), BUILT, "version mismatch", "restart the machine"),
        (Driver("470.82.01", ("Tesla T4",)), BUILT, "CUDA 12.5.1, which needs driver 525.60", "update NVIDIA's driver"),
        (H200, None, "TensorFlow does not work", "histopipe[gpu]"),
        (H200, {**BUILT, "cuda": None}, "built without CUDA", "histopipe[gpu]"),
        (H200, BUILT, "no CUDA 12.5.1 libraries", "histopipe[gpu]"),
    ],
)  # fmt: skip
def test_reasons_for_missing_gpu(
    driver: Driver | None,
    versions: dict[str, str | None] | None,
    message: str,
    todo: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check = doctor.missing_gpu(driver, versions)
    assert message in check.found and todo in (check.todo or "")
    assert check.state == ("warning" if driver is None else "bad")


def test_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = doctor.missing_gpu(H200, BUILT)
    assert "CUDA_VISIBLE_DEVICES hides" in check.found


class Devices:
    """A TensorFlow whose GPU 0 multiplies, whose GPU 1 is wrong, and whose GPU 2 is broken."""

    linalg = property(lambda self: self)

    def device(self, name: str) -> contextlib.AbstractContextManager[None]:
        self.number = int(name[-1])
        if self.number == 2:
            raise RuntimeError("out of memory\nstack")
        return contextlib.nullcontext()

    def matmul(self, a: np.ndarray, b: np.ndarray) -> Any:
        return mock.Mock(numpy=lambda: a @ b * (1 + 0.4 * self.number))


def test_good_wrong_and_broken_gpus() -> None:
    check = Check("GPU", "NVIDIA H200: ", todo="run `nvidia-smi`")
    good, wrong, broken = (doctor.multiply(Devices(), f"/GPU:{n}", check) for n in range(3))
    assert [c.state for c in (good, wrong, broken)] == ["good", "bad", "bad"]
    assert good.found.startswith("NVIDIA H200: a product of 1024² matrices in ")
    assert wrong.found == "NVIDIA H200: a matrix product is wrong by 40.0%"
    assert broken.found == "NVIDIA H200: out of memory"
    assert [bool(c.todo) for c in (good, wrong, broken)] == [False, True, True]


def nvidia_smi(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_find_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    nvidia_smi(tmp_path, "echo '550.54.14, NVIDIA A100'; echo '550.54.14, NVIDIA A100'")
    assert doctor.find_driver() == Driver("550.54.14", ("NVIDIA A100", "NVIDIA A100"))
    nvidia_smi(tmp_path, "echo 'Driver/library version mismatch'; exit 18")
    proc = tmp_path / "version"
    proc.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\n")
    assert doctor.find_driver(proc) == Driver("550.54.14", (), "Driver/library version mismatch")
    assert doctor.find_driver(tmp_path / "missing") is None


def test_processor_without_avx(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t\t: fpu sse4_2\n")
    assert doctor.processor(tmp_path / "cpuinfo").state == "bad"


@pytest.mark.parametrize(
    ("kind", "state", "message"),
    [
        ("ext4", "good", None),
        ("tmpfs", "warning", "lost on a restart"),
        ("overlay", "warning", "mount a volume"),
        ("nfs4", "bad", "LMDB's locks"),
    ],
)
def test_filesystems(
    kind: str, state: State, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 d rw\n2 1 0:2 / {tmp_path} rw - {kind} d rw\n")
    assert filesystem_of(tmp_path / "x.lmdb", mounts) == kind
    for name in ("filesystem_of", "network_filesystem"):
        real = getattr(doctor, name)
        monkeypatch.setattr(doctor, name, lambda path, real=real: real(path, mounts))
    check = doctor.filesystem(tmp_path / "x.lmdb")
    assert check.state is state and f"is on {kind}" in check.found
    assert message is None or message in (check.todo or "")


def test_limited_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16 << 30, 16 << 30))
    check = doctor.address_space()
    assert check.state == "bad"
    assert "ulimit -v unlimited" in str(check.todo)


def test_exit_codes() -> None:
    states: tuple[State, ...] = ("good", "warning", "bad")
    good, warning, bad = (Check("x", "y", state) for state in states)
    assert DoctorReport((good, warning)).exit_code == ExitCode.DONE
    assert DoctorReport((good, bad, warning)).exit_code == ExitCode.SHORT


def test_encoders_are_checked_with_their_weights(tmp_path: Path) -> None:
    weights = SLIDE_ENCODERS / "clam.safetensors"
    checks = {check.name: check for check in histopipe.doctor(encoder="chief").checks}
    assert "AGPL" in checks["licence"].found and checks["weights"].state == "warning"
    checks = {c.name: c for c in histopipe.doctor(encoder="chief", weights=weights).checks}
    assert checks["weights"].state == "bad" and "another network" in checks["weights"].found
    with pytest.raises(UsageError, match="no --encoder"):
        histopipe.doctor(weights=weights)
    with pytest.raises(UsageError, match="no encoder 'cheif'"):
        histopipe.doctor(encoder="cheif")
