"""Processes of trainings: a server loads TensorFlow once, and forks a process for each training.

Loading TensorFlow takes several seconds, and every fold, trial and restart trains in a new process, which frees its
memory. The server runs no TensorFlow operation, because a fork after one hangs.

    client       a program with `runs.supervision`: starts the server, and makes a connection for each training
      | control socket: one end of each connection
    server       forks a guard for each connection; ignores Ctrl-C
      |
    guard        forks the training, waits for its end, then kills all that it started
      |
    training     in a separate process group, with environment, working folder and module path of the client

    connection   client   -> guard    environment and arguments, then numbers of signals for the training
                 guard    -> client   first ("begun", None), last ("ended", exit status)
                 training -> client   messages (name, value), last ("result", value)

    If this ends     this ends, too
    client           server, at the end of the control socket; each guard's training, at the end of its connection
    training         what it started: the guard kills its process group, adopts the processes, and waits for them
    guard            training, by PR_SET_PDEATHSIG
    server           nothing: trainings continue, and the next one starts a new server

So nothing survives a killed client, also if the training is stopped or holds Python's lock: another process kills it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from histopipe.errors import HistopipeError
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_process import PR_SET_PDEATHSIG, end_with_parent, set_process_option

ADDRESS = "HISTOPIPE_FORK_SERVER"
"""Environment variable: path of a socket that leads to the control socket of a server, which replaces a new one."""
_READ_AT_LOADING = "TF_(?!CONFIG$)|KERAS_|XLA_|CUDA|NVIDIA_|OMP_|OPENBLAS_|MKL_|LD_|PYTHON(?!PATH$)"
"""Variables that libraries read when they are loaded: they must be the same in server and training."""
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05  # only Linux 5.3 can wait for a process and for a connection at once
_Server = tuple[subprocess.Popen[bytes] | None, socket.socket]  # None: another process started it
_servers: dict[frozenset[Any], _Server] = {}  # by the variables that were read at loading
_lock = threading.Lock()
Report = Callable[[str, Any], None]  # sends a message; several threads may call it


class TrainingProcess:
    """A process forked for one training. It ends with this process, or when `end` is called.

    `arguments` are config, folder and resume of `train_here`, and `stderr` is a file descriptor for its output. `begun`
    is False while the server loads TensorFlow. `status` is the exit status, negative for a signal.
    """

    def __init__(
        self, environment: Mapping[str, str], arguments: Sequence[Any], *, stderr: int
    ) -> None:
        self.begun, self.status = False, -signal.SIGKILL
        path = [os.path.abspath(part) for part in sys.path if part]  # noqa: PTH100 - plain texts
        environment = {**environment, "PYTHONPATH": os.pathsep.join(path)}
        self._server, control = _find_server(environment)
        self._connection, theirs = multiprocessing.Pipe()
        directory = os.open(".", os.O_PATH)
        with theirs, contextlib.suppress(OSError):  # the server died: reported by `receive`
            socket.send_fds(control, [b"\n"], [theirs.fileno(), directory, stderr])
            self._connection.send((environment, *arguments))
        os.close(directory)

    def receive(self, seconds: float | None = None) -> tuple[str, Any] | None:
        """Return the next message; None if there is none within some seconds. The last message is "ended"."""
        try:
            if not self._connection.poll(seconds):
                return None
            message = self._connection.recv_bytes()
        except (EOFError, OSError):  # the guard was killed, or before it the server
            if self._server is not None and not self.begun:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.status = self._server.wait(1)  # may show why it cannot load TensorFlow
            return "ended", None
        self.begun = True
        try:
            name, value = pickle.loads(message)  # noqa: S301 - from our own process
        except Exception as error:  # noqa: BLE001 - the methods of a library
            text = f"an answer that cannot be read: {type(error).__name__}: {error}"
            return "result", HistopipeError("the training failed", found=text)
        if name == "ended":
            self.status, value = value, None
        return name, value

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.send(number)

    def end(self) -> None:
        """Kill the process and all that it started, and wait until they are gone."""
        self.send_signal(signal.SIGKILL)
        # If the server still loads, the guard will see the closed connection, and fork no training.
        while self.begun and self.receive() != ("ended", None):
            pass
        self._connection.close()


def _find_server(environment: Mapping[str, str]) -> _Server:
    """Return a server that has loaded TensorFlow with the variables of an environment. Start one if there is none."""
    key = frozenset(item for item in environment.items() if re.match(_READ_AT_LOADING, item[0]))
    with _lock:
        server = _servers.get(key)
        if server is None or (server[0] is not None and server[0].poll() is not None):
            server = _servers[key] = start_server(environment)
        return server


def start_server(environment: Mapping[str, str]) -> _Server:
    """Start a server that ends with this process, or connect to that of the environment."""
    # A server that another process started does not log the devices of operations.
    if environment.get(ADDRESS) and environment["TF_CPP_MIN_LOG_LEVEL"] == "3":
        control = socket.socket(socket.AF_UNIX)
        control.connect(environment[ADDRESS])
        return None, control
    control, theirs = socket.socketpair()
    call = f"serve({theirs.fileno()}, {os.getpid()})"
    with theirs:
        # Not started by multiprocessing, which would import the main module of the client.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from histopipe.runs.fork_server import serve; {call}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    atexit.register(process.wait)
    atexit.register(process.kill)  # called first
    return process, control


def serve(fd: int, client: int) -> NoReturn:
    """Fork a guard for each connection that the process `client` sends through the control socket `fd`."""
    # Only the client and the trainings handle Ctrl-C and a scheduler's SIGTERM, which is sent to all processes. Without it,
    # the guard ends, and kills the training before it has saved its state.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # While it loads, for seconds, the server does not read the control socket. Later, PR_SET_PDEATHSIG would be wrong: the
    # thread of the client that started the server may end before others have trained.
    end_with_parent(client)
    with contextlib.suppress(Exception):  # each training fails with the same error, and reports it
        load_quietly("histopipe.training.trainer", lean=True)
    set_process_option(PR_SET_PDEATHSIG, 0)
    # The threads are those of OpenBLAS and jemalloc, which support forks.
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
    gc.collect()
    gc.freeze()  # otherwise the garbage collector of each training copies all pages of the server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no guard remains as a zombie
    control = socket.socket(fileno=fd)
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 3)
        if not fds:
            os._exit(0)
        if not os.fork():
            control.close()
            with contextlib.suppress(EOFError, OSError):  # the client has gone
                _guard(Connection(fds[0]), *fds[1:])
            os._exit(0)
        for each in fds:
            os.close(each)


def _guard(connection: Connection[Any, Any], directory: int, stderr: int) -> None:
    """Fork a training, send it the signals of the client, kill all that it started, and send its exit status."""
    request = connection.recv()
    connection.send(("begun", None))  # fails if the client was stopped while the server loaded
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, there is no exit status
    set_process_option(_PR_SET_CHILD_SUBREAPER, 1)
    guard, pid = os.getpid(), os.fork()
    if not pid:
        try:
            os.setpgid(0, 0)
            end_with_parent(guard)
            os.fchdir(directory)
            os.dup2(stderr, 2)
            os.dup2(stderr, 1)  # only the client writes results to standard output
            _train(connection, *request)
        except BaseException:  # noqa: BLE001 - this process must not continue as a guard
            traceback.print_exc()
        os._exit(1)
    try:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if connection.poll(_POLL_SECONDS):
                os.kill(pid, connection.recv())
    except (EOFError, OSError):  # the client has gone
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)  # only now another process may get its number
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # none is left in its group
        os.killpg(pid, signal.SIGKILL)
        while True:
            os.waitpid(-pid, 0)
    connection.send(("ended", os.waitstatus_to_exitcode(status)))


def _train(
    connection: Connection[Any, Any], environment: Mapping[str, str], *arguments: Any
) -> NoReturn:
    """Train in this process, and send the messages and the result: None if it was stopped before there was a state."""
    lock = threading.Lock()

    def report(name: str, value: Any) -> None:
        with contextlib.suppress(OSError), lock:  # without a client, the guard kills this process
            connection.send((name, value))

    # Ctrl-C is for the client, so SIGINT remains ignored until the training handles it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    config, folder, resume = arguments
    try:
        trainer = load_quietly("histopipe.training.trainer", lean=True)
        load_quietly("tensorflow").get_logger().setLevel("ERROR")
        result = trainer.train_here(config, folder, resume=resume, report=report)
    except HistopipeError as error:
        result = error
    except KeyboardInterrupt:
        result = None
    except Exception as error:  # noqa: BLE001 - the client reports it
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        result = HistopipeError("the training failed", found=text)
    # First: when the client has the result, it ends this process.
    sys.stdout.flush()
    sys.stderr.flush()
    report("result", result)
    os._exit(0)  # TensorFlow's shutdown may wait forever for a lost worker
