"""Fork server: environment and output of a training, exit status for the client, and end of all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from helpers.commands import NO_TRAINING
from helpers.paths import FAULTY_PATH, PROGRAMS
from histopipe.runs import fork_server
from histopipe.runs.fork_server import ADDRESS, TrainingProcess

HELLO = """
import os, sys
pipe.send(("pid", os.getpid()))
"""


def environment_of(code: str, **variables: str) -> dict[str, str]:
    """Return the environment of a process that runs some code instead of a training."""
    common = {"TF_CPP_MIN_LOG_LEVEL": "3", "HISTOPIPE_TEST_CHILD": HELLO + code}
    return {**os.environ, **common, **variables}


@contextmanager
def forked(code: str, **variables: str) -> Iterator[tuple[TrainingProcess, int]]:
    """Start a process of the shared server that runs some code. Yield it and its process number."""
    process = TrainingProcess(environment_of(code, **variables), NO_TRAINING, stderr=2)
    try:
        assert process.receive(60) == ("begun", None)
        yield process, received(process, "pid")
    finally:
        process.end()


def received(process: TrainingProcess, expected: str) -> Any:
    """Return the value of the next message."""
    message = process.receive()
    assert message is not None and message[0] == expected, message
    return message[1]


def test_answer_that_cannot_be_read_is_a_failed_training() -> None:
    code = """
pipe.send_bytes(b"cfractions\\nnone_of_this\\n.")
"""
    with forked(code) as (process, _):
        error = received(process, "result")
        assert str(error).startswith(
            "the training failed: found an answer that cannot be read: Att"
        )


def test_training_has_environment_directory_and_path_of_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("modules")
    code = """
print("a line")
values = os.environ.get("HOME"), os.environ["EXTRA"], os.getcwd(), sys.path[0], os.getpgid(0), "tensorflow" in sys.modules
pipe.send(("values", values))
"""
    monkeypatch.delenv("HOME")
    with forked(code, EXTRA="\udc80") as (process, pid):
        assert received(process, "values") == (
            None,
            "\udc80",
            str(tmp_path),
            str(tmp_path / "modules"),
            pid,
            True,
        )
        received(process, "ended")
        assert process.status == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("raise RuntimeError", 1),
    ],
)
def test_client_gets_exit_status(code: str, status: int) -> None:
    with forked(code) as (process, _):
        assert process.receive() == ("ended", None) == process.receive()
        assert process.status == status


def test_signal_ends_the_process() -> None:
    with forked("import time; time.sleep(60)") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.receive() == ("ended", None)
        assert process.status == -signal.SIGTERM
        process.send_signal(signal.SIGTERM)  # has no effect


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[1])


def test_guards_ignore_the_signals_of_a_scheduler_and_leave_no_zombie() -> None:
    with forked("import time; time.sleep(60)") as (process, pid):
        guard = parent_of(pid)
        os.kill(guard, signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # is passed on, and ignored
        assert process.receive(0.3) is None
        assert is_alive(pid)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{guard}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_training_ends_with_a_killed_guard() -> None:
    with forked("import time; time.sleep(60)") as (process, pid):
        os.kill(parent_of(pid), signal.SIGKILL)
        assert process.receive(10) == ("ended", None)
        until_ended(pid)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def until_ended(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


GRANDCHILD = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
pipe.send(("child", child.pid))
child.wait()
"""


HOLDS_LOCK = "import re; re.match('(a*)*b', 'a' * 40)"
STOPPED = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("then", ["child.wait()", STOPPED, HOLDS_LOCK])
def test_end_kills_child_processes(then: str) -> None:
    with forked(GRANDCHILD.replace("child.wait()", then)) as (process, pid):
        grandchild = received(process, "child")
        assert is_alive(grandchild)
    assert not is_alive(pid)
    assert not is_alive(grandchild)


CLIENT = """
import os, sys
from pathlib import Path
from histopipe.runs.fork_server import TrainingProcess
process = TrainingProcess(os.environ, (None, None, False), stderr=2)
_, (_, pid), (_, child) = process.receive(), process.receive(), process.receive()
guard = Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[1]
print(pid, child, guard, os.getpid() if process._server is None else process._server.pid, flush=True)
process.receive()
"""


WITHOUT_TENSORFLOW = f"""
import sys
from pathlib import Path
from unittest.mock import MagicMock
for name in ("tensorflow", "histopipe.training.trainer"):
    sys.modules[name] = MagicMock()
exec(Path({str(PROGRAMS / "faults" / "sitecustomize.py")!r}).read_text())
"""


@pytest.mark.parametrize(
    ("starts_server", "then"), [(False, "child.wait()"), (True, STOPPED), (False, HOLDS_LOCK)]
)
def test_all_processes_end_with_killed_client(
    starts_server: bool, then: str, tmp_path: Path
) -> None:
    """The training, its child processes, its guard and a server that the client started all end.

    That server does not load TensorFlow, which would take seconds.
    """
    environment = environment_of(GRANDCHILD.replace("child.wait()", then))
    if starts_server:
        del environment[ADDRESS]
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_TENSORFLOW)
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), FAULTY_PATH])
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    pids = [int(pid) for pid in client.stdout.readline().split()]
    assert len(set(pids)) == 4 and all(is_alive(pid) for pid in pids)
    client.kill()
    client.communicate()
    until_ended(*pids)


LOADS_FOREVER = """
import sys, time
class Finder:
    def find_spec(self, name, *_):
        if name == "histopipe.training.trainer":
            time.sleep(60)
sys.meta_path.insert(0, Finder())
"""
LOADING_CLIENT = """
import os, time
from histopipe.runs.fork_server import start_server
server, _ = start_server(os.environ)
print(server.pid, flush=True)
time.sleep(60)
"""


def test_server_that_still_loads_ends_with_killed_client(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOADS_FOREVER)
    environment = environment_of("", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    del environment[ADDRESS]
    client = subprocess.Popen(
        [sys.executable, "-c", LOADING_CLIENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    server = int(client.stdout.readline())
    time.sleep(1)  # until it loads
    assert is_alive(server)
    client.kill()
    client.communicate()
    until_ended(server)


def test_server_outlives_the_thread_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TENSORFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = environment_of("import time; time.sleep(60)")
    del environment[ADDRESS]
    servers: dict[Any, Any] = {}
    monkeypatch.setattr(fork_server, "_servers", servers)
    started: list[TrainingProcess] = []

    def start() -> None:
        started.append(TrainingProcess(environment, NO_TRAINING, stderr=2))
        assert started[0].receive(60) == ("begun", None)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    ((server, control),) = servers.values()
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.5)
    started[0].end()
    control.close()  # ends the server
    server.wait(10)


def test_server_is_shared_if_library_variables_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    start = MagicMock(return_value=(None, None))
    monkeypatch.setattr(fork_server, "_servers", {})
    monkeypatch.setattr(fork_server, "start_server", start)
    for count, *environments in (
        (1, {}, {"HOME": "/"}, {"TF_CONFIG": "{}"}, {"PYTHONPATH": "/x"}),
        (3, {"CUDA_VISIBLE_DEVICES": "1"}, {"TF_CPP_MIN_LOG_LEVEL": "0", ADDRESS: "/none"}),
    ):
        for variables in environments:
            fork_server._find_server({"TF_CPP_MIN_LOG_LEVEL": "3", **variables})
        assert start.call_count == count
