"""Fork server: a process that loads TensorFlow once and forks a process for each training.

Loading TensorFlow and Keras takes several seconds. Each training runs in its own process, so without the server every
fold, trial and restart would load them again. The server runs no TensorFlow operation, because a fork after one hangs.

A control socket connects the server to the process that started it. For each training the client sends one more socket,
which carries the request and the exit status. The server kills the training when that socket closes, and ends when the
control socket closes, so nothing survives a killed client. PR_SET_PDEATHSIG would act when the starting thread ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from histopipe.errors import UsageError
from histopipe.system.output import Bar, Progress
from histopipe.system.tensorflow import load_quietly

ADDRESS = "HISTOPIPE_FORK_SERVER"
"""Environment variable: path of the socket of a running server to use instead of a new one."""
_READ_AT_LOADING = (
    "TF_",
    "KERAS_",
    "XLA_",
    "CUDA",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "MKL_",
    "LD_",
    "PYTHON",
)
"""Prefixes of variables that libraries read when they are loaded: they must be the same in server and training."""
_READ_LATER = ("TF_CONFIG", "PYTHONPATH")
_PR_SET_PDEATHSIG = 1
_CANCEL_SECONDS = 0.2


class TrainingProcess:
    """A process forked for one training. It ends with this process, or when `end` is called.

    `pipe` and `stderr` are file descriptors: its end of a pipe to this process, and its standard error. `pid` is None
    until the process reports it through the pipe. `cancelled` is whether it was terminated before that.
    """

    def __init__(self, environment: Mapping[str, str], *, pipe: int, stderr: int) -> None:
        self.pid: int | None = None
        self.cancelled = False
        self._status: int | None = None
        path = [os.path.abspath(part) for part in sys.path if part]  # noqa: PTH100 - plain texts
        environment = {**environment, "PYTHONPATH": os.pathsep.join(path)}
        request = json.dumps({"environment": environment, "path": path}).encode() + b"\n"
        directory = os.open(".", os.O_PATH)
        self._server, self._socket = _connect(environment)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reported by `wait`
            socket.send_fds(self._socket, [b"\n"], [directory, stderr, pipe])
            self._socket.sendall(request)
        os.close(directory)

    def terminate(self) -> None:
        """Send SIGTERM to the process. If it does not run yet, cancel it."""
        if self.pid is None:
            self.cancelled, self._status = True, -signal.SIGTERM
        elif self._status is None:  # the server keeps the process number reserved until `end`
            os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the exit status: negative for a signal, as in `subprocess`."""
        if self._status is None:
            with contextlib.suppress(ConnectionResetError, ValueError):
                self._status = int(self._socket.makefile("rb").readline())
        if self._status is None:  # the server died, and the training with it
            self._status = -signal.SIGKILL if self._server is None else self._server.wait()
        return self._status

    def end(self) -> None:
        """Kill the process and all that it started, and wait until they are gone."""
        with self._socket, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(_CANCEL_SECONDS if self.cancelled else None)
            while self._socket.recv(1024):
                pass


_servers: dict[frozenset[tuple[str, str]], tuple[subprocess.Popen[bytes], socket.socket]] = {}
"""Process and control socket of each server that this process has started."""
_lock = threading.Lock()


def _connect(
    environment: Mapping[str, str],
) -> tuple[subprocess.Popen[bytes] | None, socket.socket]:
    """Return a socket to a server for an environment, and the server's process if this process started it."""
    key = frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(_READ_AT_LOADING) and name not in _READ_LATER
    )
    if environment.get(ADDRESS) and environment["TF_CPP_MIN_LOG_LEVEL"] == "3":
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(environment[ADDRESS])
        except OSError as error:
            client.close()
            raise UsageError(
                f"cannot use the server of {ADDRESS}={environment[ADDRESS]}",
                found=str(error),
                todo=f"unset {ADDRESS}",
            ) from error
        return None, client
    client, theirs = socket.socketpair()
    with theirs, _lock:
        server = _servers.get(key)
        if server is None or server[0].poll() is not None:
            server = _servers[key] = start_server(environment)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reported by `wait`
            socket.send_fds(server[1], [b"\n"], [theirs.fileno()])
    return server[0], client


def start_server(
    environment: Mapping[str, str], listener: socket.socket | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a server that ends with this process. Return its process and the control socket.

    Other processes can also use the server, if they connect to the listener.
    """
    control, theirs = socket.socketpair()
    fds = [each.fileno() for each in (theirs, listener) if each is not None]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "histopipe.runs.fork_server", *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            pass_fds=fds,
            process_group=0,
        )
    atexit.register(_end_server, process, control)
    return process, control


def _end_server(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    process.kill()
    process.wait()
    control.close()


class _Server:
    """The process that forks trainings."""

    def __init__(self, control: socket.socket, listener: socket.socket | None = None) -> None:
        self._running: dict[socket.socket, int] = {}
        self._reported: set[socket.socket] = set()
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._receive)
        self._selector.register(self._woken, selectors.EVENT_READ, self._report_exits)
        if listener is not None:
            self._selector.register(
                listener, selectors.EVENT_READ, lambda _: self._fork(listener.accept()[0])
            )

    def serve(self) -> NoReturn:
        """Fork trainings until the control socket closes."""
        # Only the client and the trainings handle Ctrl-C and a scheduler's SIGTERM.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _load()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _receive(self, control: socket.socket) -> None:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            for client in list(self._running):
                self._end(client)
            os._exit(0)
        self._fork(socket.socket(fileno=fds[0]))

    def _fork(self, client: socket.socket) -> None:
        _, fds, _, _ = socket.recv_fds(client, 1, 3)
        request = client.makefile("rb").readline()
        if request.endswith(b"\n") and not _is_closed(client):
            server, pid = os.getpid(), os.fork()
            if not pid:
                self._train(server, fds, json.loads(request))
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # the training does this, too: either may be first
            self._running[client] = pid
            self._selector.register(client, selectors.EVENT_READ, self._end)
        else:
            client.close()
        for fd in fds:
            os.close(fd)

    def _train(self, server: int, fds: list[int], request: dict[str, Any]) -> NoReturn:
        """Turn this fork into the process of a training."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)  # a separate process group, so that its child processes end with it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            for key in list(self._selector.get_map().values()):
                cast(socket.socket, key.fileobj).close()
            self._wakes.close()
            self._selector.close()
            directory, stderr, pipe = fds
            os.fchdir(directory)
            os.dup2(stderr, 2)
            os.dup2(stderr, 1)  # only the client writes results to standard output
            os.close(directory)
            os.close(stderr)
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.path[:] = request["path"]
            load_quietly("histopipe.training.child").main(pipe)
        except BaseException:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
        os._exit(1)

    def _report_exits(self, woken: socket.socket) -> None:
        woken.recv(1024)
        for client in self._running.keys() - self._reported:
            # WNOWAIT keeps the process number reserved until the client closes.
            exit_info = os.waitid(
                os.P_PID, self._running[client], os.WEXITED | os.WNOWAIT | os.WNOHANG
            )
            if exit_info is not None:
                sign = 1 if exit_info.si_code == os.CLD_EXITED else -1
                self._reported.add(client)
                with contextlib.suppress(OSError):  # the client may be gone
                    client.sendall(b"%d\n" % (sign * exit_info.si_status))

    def _end(self, client: socket.socket) -> None:
        """Kill the training of a client that has closed its socket."""
        self._selector.unregister(client)
        self._reported.discard(client)
        pid = self._running.pop(client)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        client.close()


def _is_closed(client: socket.socket) -> bool:
    try:
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _load() -> None:
    """Load the modules that all trainings need. Meanwhile the server ends with the client's waiting thread."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(Exception):  # each training fails with the same error, and reports it
        load_quietly("histopipe.training.trainer", lean=True)
    libc.prctl(_PR_SET_PDEATHSIG, 0)
    # The threads are those of OpenBLAS and jemalloc, which support forks.
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
    gc.collect()
    gc.freeze()  # otherwise the garbage collector of each training copies all pages of the server


Report = Callable[[str, Any], None]
"""Sends a message. Several threads may call it."""
_SECONDS_BETWEEN_UPDATES = 0.1


class ReportedProgress(Progress):
    """Progress in the process of a training, sent to its supervisor."""

    def __init__(self, report: Report) -> None:
        self._report, self._numbers = report, itertools.count()

    def bar(self, title: str, **options: Any) -> Bar:
        """Start a bar."""
        bar = _ReportedBar(self._report, next(self._numbers), options.get("done", 0))
        bar.send("bar", title=title, **options)
        return bar

    def message(self, text: str) -> None:
        """Show a line of text."""
        self._report("progress", ("message", 0, {"text": text}))


class _ReportedBar(Bar):
    def __init__(self, report: Report, number: int, done: int) -> None:
        super().__init__(done)
        self._report, self._number, self._sent = report, number, 0.0

    def send(self, method: str, **options: Any) -> None:
        self._report("progress", (method, self._number, options))

    def update(self, done: int, total: int | None = None) -> None:
        self._done, now = done, time.monotonic()
        if total is not None or now - self._sent >= _SECONDS_BETWEEN_UPDATES:
            self._sent = now
            self.send("update", done=done, total=total)

    def retitle(self, title: str) -> None:
        self.send("retitle", title=title)

    def close(self) -> None:
        self.send("close")


def show_progress(
    progress: Progress, bars: dict[int, Bar], event: tuple[str, int, dict[str, Any]]
) -> None:
    """Show the value of a "progress" message. `bars` are the open bars of its process, by number."""
    method, number, options = event
    if method == "message":
        progress.message(**options)
    elif method == "bar":
        bars[number] = progress.bar(**options)
    elif number in bars:
        bar = bars.pop(number) if method == "close" else bars[number]
        getattr(bar, method)(**options)


if __name__ == "__main__":
    _Server(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:])).serve()
