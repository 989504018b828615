"""Fork server: environment and output of a training, exit status for the client, and end of all processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import PROGRAMS
from histopipe.runs import fork_server
from histopipe.runs.fork_server import ADDRESS, TrainingProcess

HELLO = """
import os, sys
from multiprocessing.connection import Connection
pipe = Connection(fd)
pipe.send(("pid", os.getpid()))
"""


@contextmanager
def forked(code: str, **variables: str) -> Iterator[tuple[TrainingProcess, Connection[Any, Any]]]:
    """Start a process of the shared server that runs some code instead of a training."""
    ours, theirs = multiprocessing.Pipe()
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "HISTOPIPE_TEST_CHILD": HELLO + code}
    with ours, theirs:
        process = TrainingProcess(environment | variables, pipe=theirs.fileno(), stderr=2)
        theirs.close()
        try:
            assert ours.poll(60)
            process.pid = ours.recv()[1]
            yield process, ours
        finally:
            process.end()


def test_training_has_environment_directory_and_path_of_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("modules")
    code = """
print("a line")
pipe.send((os.environ.get("HOME"), os.environ["EXTRA"], os.getcwd(), sys.path[0], os.getpgid(0), "tensorflow" in sys.modules))
"""
    monkeypatch.delenv("HOME")
    with forked(code, EXTRA="\udc80") as (process, pipe):
        assert pipe.recv() == (
            None,
            "\udc80",
            str(tmp_path),
            str(tmp_path / "modules"),
            process.pid,
            True,
        )
        assert process.wait() == 0


def test_output_goes_to_file_of_client(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    code = "print('out', flush=True); print('error', file=sys.stderr)"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "HISTOPIPE_TEST_CHILD": HELLO + code}
    with ours, theirs, (tmp_path / "log").open("w") as log:
        process = TrainingProcess(environment, pipe=theirs.fileno(), stderr=log.fileno())
        assert process.wait() == 0
        process.end()
    assert (tmp_path / "log").read_text() == "out\nerror\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("raise RuntimeError", 1),
    ],
)
def test_client_gets_exit_status(code: str, status: int) -> None:
    with forked(code) as (process, _):
        assert process.wait() == status == process.wait()


def test_terminate_ends_the_process() -> None:
    with forked("import time; time.sleep(60)") as (process, _):
        process.terminate()
        assert process.wait() == -signal.SIGTERM
        process.terminate()  # has no effect


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


GRANDCHILD = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
pipe.send(child.pid)
child.wait()
"""


def test_end_kills_child_processes() -> None:
    with forked(GRANDCHILD) as (process, pipe):
        grandchild = pipe.recv()
        assert is_alive(grandchild)
    assert process.pid is not None and not is_alive(process.pid)
    deadline = time.monotonic() + 10
    while is_alive(grandchild):
        assert time.monotonic() < deadline
        time.sleep(0.01)


CLIENT = """
import multiprocessing, os, sys
from histopipe.runs.fork_server import TrainingProcess
ours, theirs = multiprocessing.Pipe()
process = TrainingProcess(os.environ, pipe=theirs.fileno(), stderr=2)
print(ours.recv()[1], ours.recv(), os.getpid() if process._server is None else process._server.pid, flush=True)
ours.recv()
"""


@pytest.mark.parametrize("starts_server", [False, True])
def test_all_processes_end_with_killed_client(starts_server: bool) -> None:
    """The training, its child processes and a server that the client started all end."""
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HISTOPIPE_TEST_CHILD": HELLO + GRANDCHILD,
    }
    if starts_server:
        del environment[ADDRESS]
        environment["PYTHONPATH"] = str(PROGRAMS / "faults")
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    pids = [int(pid) for pid in client.stdout.readline().split()]
    assert len(set(pids)) == 3 and all(is_alive(pid) for pid in pids)
    client.kill()
    client.communicate()
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FakeServer:
    """Stands for a server's process, to test the choice of a server without starting one."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def poll(self) -> None:
        return None


def test_server_is_shared_if_library_variables_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    socks = multiprocessing.Pipe()

    def start(environment: dict[str, str]) -> Any:
        started.append(environment)
        return FakeServer(environment), socks[0]

    monkeypatch.setattr(fork_server, "_servers", {})
    monkeypatch.setattr(fork_server, "start_server", start)
    monkeypatch.setattr("socket.send_fds", lambda *_: None)
    base = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    for variables in ({}, {"HOME": "/"}, {"TF_CONFIG": "{}"}, {"PYTHONPATH": "/x"}):
        fork_server._connect(base | variables)[1].close()
    assert len(started) == 1
    for variables in (
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"TF_CPP_MIN_LOG_LEVEL": "0", ADDRESS: "/none"},
    ):
        fork_server._connect(base | variables)[1].close()
    assert len(started) == 3
