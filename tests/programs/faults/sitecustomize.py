"""Faults in the process of a training: put this folder on the PYTHONPATH of the fork server. The training's environment decides.

HISTOPIPE_TEST_FAULT: where, at which call, which fault, and the file that marks it as done: PLACE:CALL:KIND:FILE.
A plus after the place: after the call. "always" as the file: at every call, in every process.
Several are joined by semicolons. FOLDER=PLACE:... fails only in a run's folder of that name.
HISTOPIPE_TEST_CHILD: Python code to run instead of the training; `fd` is its end of the pipe.
HISTOPIPE_TEST_ARGUMENTS, HISTOPIPE_TEST_OUTPUT: its `sys.argv` as JSON, and the file for its standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

PLACES = {
    "gradients": ("histopipe.training.train_step", "TrainStep", "_gradient_step"),
    "apply": ("histopipe.training.train_step", "TrainStep", "apply"),
    "predict": ("histopipe.training.train_step", "TrainStep", "_predict_step"),
    "fetch": ("histopipe.training.epoch_loop", "EpochLoop", "_on_host"),
    "place": ("histopipe.training.epoch_loop", None, "one_per_replica"),
    "read": ("histopipe.dataset.patch_batches", "PatchBatches", "load"),
    "save": ("histopipe.training.trainer", None, "save_state"),
    "keep": ("histopipe.training.checkpoint", None, "_keep"),
    "write": ("histopipe.training.checkpoint", None, "_name"),
    "build": ("histopipe.training.problem", None, "build_model"),
}


def client() -> int:
    """The process that made the pipe of this training."""
    with socket.socket(fileno=os.dup(pipe)) as end:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iii", credentials)[0])


class Ended(BaseException):
    """What ends a training at once, and is caught by the test only."""


def fail(kind: str) -> None:
    if kind == "end":
        raise Ended
    if kind == "exhausted":
        import tensorflow as tf

        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating (made)")
    if kind == "real":
        import tensorflow as tf

        tf.reduce_sum(tf.fill((16384, 16384, 16384), 1.0))  # 16 TiB
    if kind == "cuda":
        import tensorflow as tf

        raise tf.errors.InternalError(None, None, "CUBLAS_STATUS_ALLOC_FAILED (made)")
    if kind == "slow-memory":
        time.sleep(2)
    if kind in ("memory", "slow-memory"):
        raise MemoryError("made")
    if kind == "wait":
        time.sleep(2)
        return
    if kind == "hang":
        time.sleep(3600)
    if kind == "hang-with-child":
        subprocess.run(["sleep", "3600"], check=False)
    if kind == "diverge":
        from histopipe.errors import UsageError

        raise UsageError("the loss of epoch 1 is not finite (made)")
    if kind == "crash":
        raise RuntimeError("made")
    if kind == "parent":
        os.kill(client(), signal.SIGKILL)  # and this process dies with it
        time.sleep(60)
    os.kill(os.getpid(), getattr(signal, kind))


def folder_of_the_run() -> str:
    """The name of the folder that this process trains in."""
    frame: Any = sys._getframe()
    while frame is not None:
        folder = frame.f_locals.get("folder")
        if frame.f_code.co_name == "train_here" and folder is not None:
            return str(folder.name)
        frame = frame.f_back
    return ""


def arm(only: str, place: str, at: int, kind: str, marker: Path) -> None:
    after = place.endswith("+")
    home, owner, name = PLACES[place.rstrip("+")]
    module: Any = importlib.import_module(home)
    where = module if owner is None else getattr(module, owner)
    original = vars(where)[name]
    calls = 0

    def faulty(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        always = marker.name == "always"
        due = always or (calls == at and not marker.exists())
        due = due and (not only or folder_of_the_run() == only)
        if due and not always:
            marker.touch()
        if due and not after:
            fail(kind)
        bound = (
            original.__get__(arguments[0], type(arguments[0])) if owner is not None else original
        )
        found = bound(*(arguments[1:] if owner is not None else arguments), **settings)
        if due and after:
            fail(kind)
        return found

    setattr(where, name, faulty)


pipe = -1


def main(fd: int) -> None:
    global pipe  # noqa: PLW0603 - a process has one training
    pipe = fd
    code = os.environ.pop("HISTOPIPE_TEST_CHILD", "")
    if code:
        run(code)
    faults = os.environ.get("HISTOPIPE_TEST_FAULT")
    for fault in faults.split(";") if faults else ():
        only, _, what = fault.rpartition("=")
        place, at, kind, marker = what.split(":", 3)
        arm(only, place, int(at), kind, Path(marker))
    train(fd)


def run(code: str) -> NoReturn:
    sys.argv = json.loads(os.environ.pop("HISTOPIPE_TEST_ARGUMENTS", "[]"))
    output = os.environ.pop("HISTOPIPE_TEST_OUTPUT", "")
    if output:
        with Path(output).open("w") as file:
            os.dup2(file.fileno(), 1)
    status: Any = 0
    try:
        exec(code, {"fd": pipe, "__name__": "__main__"})  # noqa: S102 - a test's own
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if "histopipe.runs.fork_server" in sys.orig_argv:
    from histopipe.training import child

    train = child.main
    child.main = main  # type: ignore[assignment]  # as a test double
