"""Main module of a worker process: `python -P -m histopipe.system.worker_process FD PARENT`.

It reads pickled messages from the pipe FD: first a function that prepares the process, then tasks. It answers each.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from histopipe.errors import portable

PR_SET_PDEATHSIG = 1


def set_process_option(option: int, value: int) -> None:
    """Call prctl(2), which Python does not provide."""
    ctypes.CDLL(None).prctl(option, value)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends. `parent` is the number of its process."""
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def main() -> None:
    """Run tasks until the pool closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to workers, too: ignore it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent(int(sys.argv[2]))  # a worker whose parent was killed must not continue to write
    pipe = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the pool closes the pipe to end its workers
        # Nothing that imports create is garbage: searching for it takes a seventh of the start of a worker of an ingest.
        gc.disable()
        prepare = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from our own parent
        if prepare is not None:
            prepare()
        gc.freeze()
        gc.enable()
        pipe.send_bytes(pickle.dumps((True, None)))  # ready
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes()))


def _answer(message: bytes) -> bytes:
    """Run a task; return whether it succeeded, with its result or exception."""
    try:
        function, args, kwargs = pickle.loads(message)  # noqa: S301 - from our own parent
        answer = True, function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the future raises it in the parent
        error.add_note(traceback.format_exc())  # pickling an exception loses its traceback
        answer = False, portable(error)
    return pickle.dumps(answer, protocol=5)


if __name__ == "__main__":
    main()
