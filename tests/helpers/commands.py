"""Run commands as a user runs them, and code that loads TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest

from helpers.json_results import check_json
from helpers.paths import PROGRAMS
from histopipe.cli import main
from histopipe.runs.fork_server import TrainingProcess

COMMAND = [str(Path(sys.executable).with_name("histopipe"))]

# A background job of a script ignores Ctrl-C, and its child processes inherit this. Restore the default.
_RESET = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
INTERRUPTIBLE = [sys.executable, "-c", _RESET, *COMMAND]


RunCommand = Callable[..., subprocess.CompletedProcess[str]]
Once = Callable[[str, Callable[[Path], object]], Path]


def pool_workers(pid: int) -> list[int]:
    """Return the workers of the pools of a process: children of its servers, which are processes of the same module."""
    servers = [child for child in _children(pid) if "worker_process" in _command(child)]
    return [worker for server in servers for worker in _children(server)]


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children += map(int, thread.read_text().split())
    return children


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a filesystem of `size` on a new folder, or skip the test: most containers do not permit it."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small filesystem cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


LOADS_TENSORFLOW = ("embed", "export", "predict")
"""Commands that load TensorFlow, which keeps devices and memory of a process: each command needs a separate process."""
NEW_PROCESS = ("demo", "doctor", "tune")
"""Commands that inspect the process or the machine, and `tune`, whose Optuna files stay open until its process ends."""


NO_TRAINING = (None, None, False)
"""Arguments of a process that runs other code than a training."""


def with_tensorflow(
    code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code like `python -c CODE ARGUMENTS`, in a fork of a process that has loaded TensorFlow and Keras."""
    words = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        variables = {
            "HISTOPIPE_TEST_CHILD": code,
            "HISTOPIPE_TEST_ARGUMENTS": json.dumps(words),
            "HISTOPIPE_TEST_OUTPUT": str(out),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        environment = {**(os.environ if env is None else env), **variables}
        with err.open("w") as file, chdir(cwd) if cwd else nullcontext():
            process = TrainingProcess(environment, NO_TRAINING, stderr=file.fileno())
        try:
            while process.receive() != ("ended", None):
                pass
        finally:
            process.end()
        return subprocess.CompletedProcess(
            words, process.status, out.read_text() if out.exists() else "", err.read_text()
        )


def run_python(
    code: str, *arguments: object, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGUMENTS` in a new process, as a user does. It must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done


def run_program(
    name: str, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of tests/programs like `with_tensorflow`."""
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    return with_tensorflow(code, PROGRAMS / name, *arguments, env=env)


def run_command(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `histopipe ARGUMENTS` in this process, which saves the start of a new one."""
    words = ["histopipe", *map(str, arguments)]
    with ExitStack() as stack:
        stack.enter_context(chdir(cwd or Path.cwd()))
        stack.enter_context(mock.patch.dict(os.environ, env or {}, clear=env is not None))
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        handler = signal.getsignal(signal.SIGTERM)
        stack.callback(signal.signal, signal.SIGTERM, handler)
        out, err = (stack.enter_context(captured(name)) for name in ("stdout", "stderr"))
        try:
            main()
        except SystemExit as end:
            code = end.code
        except Exception:  # noqa: BLE001 - the interpreter does the same
            traceback.print_exc()
            code = 1
        done = subprocess.CompletedProcess(words, int(code or 0), out(), err())
        check_json(words[1:], done.stdout)
        return done
    raise AssertionError  # for mypy: none of these contexts swallows an exception


@contextmanager
def captured(name: str) -> Iterator[Callable[[], str]]:
    """Capture a standard stream of this process and its child processes. Yield a function that returns the text."""
    original = getattr(sys, name)
    original.flush()
    fd = {"stdout": 1, "stderr": 2}[name]
    kept = os.dup(fd)
    with tempfile.TemporaryFile("a+") as file:
        os.dup2(file.fileno(), fd)
        stream = open(fd, "w", closefd=False)  # noqa: SIM115 - closed below
        setattr(sys, name, stream)

        def written() -> str:
            stream.flush()
            file.seek(0)
            return file.read()

        try:
            yield written
        finally:
            stream.close()
            setattr(sys, name, original)
            os.dup2(kept, fd)
            os.close(kept)


def succeed(*arguments: object) -> str:
    """Run a command that must succeed, and return its standard output."""
    ended = run_command(*arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def messages(ended: subprocess.CompletedProcess[str], code: int) -> str:
    """Check the exit code of a command, and return its messages."""
    assert ended.returncode == code, ended.stderr
    return ended.stderr


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of processes whose working directory is in a folder."""
    commands = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink().is_relative_to(folder):
                    commands.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return commands
