"""Main module of the server of a pool, which forks its workers: `python -P -m histopipe.system.worker_process FD PARENT`.

    pool      starts the server, and sends two connections for each worker through the control socket FD
      | standard input: a pickled function that prepares the server, such as by imports
      | control socket: the server sends a byte when it is prepared; its end ends the server
    server    forks a worker for each pair of connections; waits for a worker when the pool asks for its exit code
      |
    worker    answers each pickled call of its first connection; ends with the connection, or with the server

The imports of an ingest take half a second, and its workers share them: without the server each worker repeats them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from histopipe.errors import portable

PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0
"""Time after which a server checks whether its parent has ended: another process may hold the control socket."""


_END_SECONDS = 1.0
"""Time in which a worker ends after its connection was closed."""


def set_process_option(option: int, value: int) -> None:
    """Call prctl(2), which Python does not provide."""
    ctypes.CDLL(None).prctl(option, value)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends. `parent` is the number of its process."""
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def main() -> None:
    """Serve the pool until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to workers, too: ignore it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, there is no exit code
    # Nothing that imports create is garbage. Searching for it takes a seventh of their time, and each worker would copy
    # all pages of it.
    gc.disable()
    prepare = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    if prepare is not None:
        prepare()
    gc.freeze()
    with contextlib.suppress(OSError):  # the pool has ended
        _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)  # the kernel kills the workers


def _serve(control: socket.socket, parent: int) -> None:
    server = os.getpid()
    workers: dict[Connection[Any, Any], int] = {}
    control.sendall(b"\n")
    while os.getppid() == parent:
        for ready in wait([control, *workers], _POLL_SECONDS):
            if isinstance(ready, Connection):
                ready.send(_end(workers.pop(ready), ready))
                continue
            asked, fds, _, _ = socket.recv_fds(control, 1, 2)
            if not asked:
                return
            if len(fds) < 2:  # too many files are open: the pool sees that `end` is closed
                for fd in fds:
                    os.close(fd)
                continue
            pipe, end = Connection(fds[0]), Connection(fds[1])
            with contextlib.suppress(
                OSError
            ):  # no process is left: the pool sees that `end` is closed
                workers[end] = os.fork()
                if not workers[end]:
                    _work(pipe, server)
            pipe.close()
            if end not in workers:
                end.close()


def _end(pid: int, end: Connection[Any, Any]) -> int:
    """Wait for the end of a worker, and return its exit code. The pool asks for it, to be killed or not."""
    try:
        is_killed = end.recv()
    except EOFError:
        is_killed = True
    latest, ended, status = time.monotonic() + (0 if is_killed else _END_SECONDS), 0, 0
    # It may be stopped, or its connection open in a fork of the user.
    while not ended and time.monotonic() < latest:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
    if not ended:
        os.kill(pid, signal.SIGKILL)  # nothing else waits for it: no other process has its number
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _work(pipe: Connection[Any, Any], server: int) -> NoReturn:
    """Answer calls until the pool closes the connection."""
    try:
        end_with_parent(server)  # a worker whose pool was killed must not continue to write
        gc.enable()
        with contextlib.suppress(EOFError, OSError):  # the pool has closed the connection
            pipe.send_bytes(pickle.dumps((True, None)))  # ready
            while True:
                pipe.send_bytes(_answer(pipe.recv_bytes()))
        sys.stdout.flush()
        os._exit(0)
    finally:
        os._exit(1)  # it must not continue as a server


def _answer(message: bytes) -> bytes:
    """Run a call; return whether it succeeded, with its result or exception."""
    try:
        function, args, kwargs = pickle.loads(message)  # noqa: S301 - from our own parent
        return pickle.dumps((True, function(*args, **kwargs)), protocol=5)
    except BaseException as error:  # noqa: BLE001 - the future raises it in the parent
        error.add_note(traceback.format_exc())  # pickling an exception loses its traceback
        return pickle.dumps((False, portable(error)), protocol=5)


if __name__ == "__main__":
    main()
