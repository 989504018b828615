"""The process that a training runs in: `python -m histopipe.training.child FD`, started by `supervise`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from histopipe.errors import HistopipeError
from histopipe.system.tensorflow import load_quietly


def main() -> None:
    """Receive a training through the pipe, run it, and send back what it comes to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    pipe = Connection(int(sys.argv[1]))
    parent, config, folder, resume = pipe.recv()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody trains for the dead
    if os.getppid() != parent:
        os._exit(1)

    def report(name: str, value: Any) -> None:
        with contextlib.suppress(OSError):
            pipe.send((name, value))

    try:
        train = load_quietly("histopipe.training.train", lean=True)
        load_quietly("tensorflow").get_logger().setLevel("ERROR")
        report("result", train.train_here(config, folder, resume=resume, report=report))
    except HistopipeError as error:
        report("error", error)
    except KeyboardInterrupt:
        report("interrupted", None)
    except Exception as error:  # noqa: BLE001 - the parent is told of everything
        traceback.print_exc()
        report("failure", f"{type(error).__name__}: {error}".split("\n")[0])
    # TensorFlow may wait for ever for a worker that is gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
