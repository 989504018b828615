"""Main function of a training process, which `histopipe.runs.fork_server` forks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from histopipe.errors import HistopipeError
from histopipe.system.tensorflow import load_quietly


def main(fd: int) -> NoReturn:
    """Receive a training through the pipe `fd`, run it, and send its messages and its result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C
    pipe, lock = Connection(fd), threading.Lock()

    def report(name: str, value: Any) -> None:
        with contextlib.suppress(OSError), lock:
            pipe.send((name, value))

    report("pid", os.getpid())
    config, folder, resume = pipe.recv()
    try:
        train = load_quietly("histopipe.training.trainer", lean=True)
        load_quietly("tensorflow").get_logger().setLevel("ERROR")
        report("result", train.train_here(config, folder, resume=resume, report=report))
    except HistopipeError as error:
        report("error", error)
    except KeyboardInterrupt:
        report("interrupted", None)
    except Exception as error:  # noqa: BLE001 - the client reports it
        traceback.print_exc()
        report("failure", f"{type(error).__name__}: {error}".split("\n")[0])
    # TensorFlow's shutdown may wait forever for a lost worker.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
