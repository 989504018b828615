"""The checks of `doctor` on this machine, and on machines with simulated problems."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import histopipe
from helpers.commands import run_command, with_tensorflow
from helpers.json_results import check_json
from helpers.paths import SLIDE_ENCODERS
from histopipe.diagnostics import doctor
from histopipe.diagnostics.doctor import DoctorReport, Driver
from histopipe.diagnostics.encoder_checks import Check, State
from histopipe.errors import ExitCode, UsageError
from histopipe.exporting.export_formats import EXPORTS
from histopipe.slides.slide_formats import READERS
from histopipe.system.files import filesystem_of

BUILT = {"version": "2.21.0", "keras": "3.15.1", "cuda": "12.5.1"}
SHARED = Path("/dev/shm")  # noqa: S108 - the system's own
H200 = Driver("580.82.07", ("NVIDIA H200",))


ON_THIS_MACHINE = """
from helpers.inline import InlineWorkers
from histopipe.diagnostics import doctor
doctor.WorkerPool = InlineWorkers
import histopipe, json, sys
store, weights = sys.argv[1:]
results = histopipe.doctor(store), histopipe.doctor(encoder="chief", weights=weights)
print(json.dumps([result.to_json() for result in results]))
"""
"""TensorFlow is that of this process: the next test starts workers."""


def test_this_machine() -> None:
    files = (SHARED / "patches.lmdb", SLIDE_ENCODERS / "clam.safetensors")
    done = with_tensorflow(ON_THIS_MACHINE, *files)
    assert done.returncode == 0, done.stderr
    result, of_encoder = json.loads(done.stdout)
    check_json(("doctor", "--json"), json.dumps(result))
    checks: dict[str, dict[str, Any]] = {check["name"]: check for check in result["checks"]}
    for name in ("Python", "address space", "libraries", "OpenSlide", "TensorFlow"):
        assert checks[name]["state"] == "good", checks[name]
    formats = set(checks["OpenSlide"]["facts"]["formats"])
    assert {"aperio", "dicom", "hamamatsu", "mirax", "zeiss"} <= formats
    assert checks["other readers"]["facts"].keys() == READERS.keys() - {"openslide"}
    assert all(name in checks["exports"]["found"] for name in EXPORTS)
    if filesystem_of(SHARED) == "tmpfs":
        assert "patches.lmdb is on tmpfs" in checks["filesystem"]["found"]
    if doctor.find_driver() is None:
        assert result["exit_code"] == 0 and "no NVIDIA driver" in checks["GPU"]["found"]
    (weights_check,) = (check for check in of_encoder["checks"] if check["name"] == "weights")
    assert weights_check["state"] == "bad" and "another network" in weights_check["found"]


@pytest.mark.long(reason="processes that load what is broken")
def test_broken_tensorflow_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the place of TensorFlow, also in the processes that check it."""
    module = tmp_path / "tensorflow.py"
    monkeypatch.syspath_prepend(tmp_path)
    module.write_text("raise ImportError('libcudart.so.12: cannot open')")
    done = run_command("doctor")
    assert done.returncode == 6, done.stderr
    assert "BAD   TensorFlow     broken: " in done.stdout
    assert "libcudart.so.12: cannot open" in done.stdout
    assert "GPU" in done.stdout  # the checks after TensorFlow still run
    monkeypatch.setattr("importlib.metadata.packages_distributions", dict)  # takes a second
    for code, message in (
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise AttributeError('numpy has no float')", "numpy has no float"),
        ("import time; time.sleep(1000)", "no result after 1 s"),
    ):
        module.write_text(code)
        monkeypatch.setattr(doctor, "_SECONDS", 1.0 if "sleep" in code else 60.0)
        (check,) = doctor.tensorflow()
        assert check.state == "bad" and "broken: " in check.found and message in check.found


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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = bool(driver and driver.gpus and not driver.problem and versions)
    assert ("CUDA_VISIBLE_DEVICES hides" in doctor.missing_gpu(driver, versions).found) == hidden


@pytest.mark.parametrize(
    ("factor", "state", "text"),
    [
        (1.0, "good", "NVIDIA H200: a product of 1024² matrices in "),
        (1.4, "bad", "NVIDIA H200: a matrix product is wrong by 40.0%"),
        (None, "bad", "NVIDIA H200: out of memory"),
    ],
)
def test_good_wrong_and_broken_gpus(factor: float | None, state: State, text: str) -> None:
    """With a TensorFlow whose products are multiplied by a factor, or fail."""
    matmul = mock.Mock(side_effect=lambda a, b: mock.Mock(numpy=lambda: a @ b * factor))
    if factor is None:
        matmul.side_effect = RuntimeError("out of memory\nstack")
    tf = mock.MagicMock()
    tf.linalg.matmul = matmul
    check = doctor.multiply(tf, "/GPU:0", Check("GPU", "NVIDIA H200: ", todo="run `nvidia-smi`"))
    assert check.state == state and check.found.startswith(text)
    tf.device.assert_called_with("/GPU:0")
    assert bool(check.todo) == (state == "bad")


def test_find_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program, proc = tmp_path / "nvidia-smi", tmp_path / "version"
    program.write_text("#!/bin/sh\necho '550.54.14, NVIDIA A100'; echo '550.54.14, NVIDIA A100'\n")
    program.chmod(0o755)
    assert doctor.find_driver() == Driver("550.54.14", ("NVIDIA A100", "NVIDIA A100"))
    program.write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    proc.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\n")
    assert doctor.find_driver(proc) == Driver("550.54.14", (), "Driver/library version mismatch")
    assert doctor.find_driver(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("kind", "state", "message"),
    [
        ("ext4", "good", ""),
        ("tmpfs", "warning", "lost on a restart"),
        ("overlay", "warning", "mount a volume"),
        ("nfs4", "bad", "LMDB's locks"),
    ],
)
def test_filesystems(
    kind: str, state: State, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 d rw\n2 1 0:2 / {tmp_path} rw - {kind} d rw\n")
    for name in ("filesystem_of", "network_filesystem"):
        real = getattr(doctor, name)
        monkeypatch.setattr(doctor, name, lambda path, real=real: real(path, mounts))
    check = doctor.filesystem(tmp_path / "x.lmdb")
    assert check.state is state and f"is on {kind}" in check.found
    assert message in (check.todo or "")


def test_missing_extras_of_exports_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ['pyarrow; extra == "parquet"', 'no-such-library; extra == "h5ad"', "numpy"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requirements)
    check = doctor.exports()
    assert check.facts == {"missing": {"h5ad": "h5ad"}}
    assert "parquet, tfrecord" in check.found and "h5ad needs [h5ad]" in check.found


def test_limits_and_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without AVX, and a limited address space."""
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t\t: fpu sse4_2\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16 << 30, 16 << 30))
    bad, check = doctor.processor(tmp_path / "cpuinfo"), doctor.address_space()
    assert (bad.state, check.state) == ("bad", "bad")
    assert "ulimit -v unlimited" in str(check.todo)
    good, warning = Check("x", "y", "good"), Check("x", "y", "warning")
    assert DoctorReport((good, warning)).exit_code == ExitCode.DONE
    assert DoctorReport((good, bad, warning)).exit_code == ExitCode.SHORT


def test_encoders_are_checked_with_their_weights() -> None:
    """Those of another network are refused in `test_this_machine`."""
    checks = {check.name: check for check in histopipe.doctor(encoder="chief").checks}
    assert "AGPL" in checks["licence"].found and checks["weights"].state == "warning"
    with pytest.raises(UsageError, match="no --encoder"):
        histopipe.doctor(weights="clam.safetensors")
    with pytest.raises(UsageError, match="no encoder 'cheif'"):
        histopipe.doctor(encoder="cheif")
