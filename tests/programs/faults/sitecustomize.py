"""Faults in the process of a training. This folder is on the PYTHONPATH of the fork server. Environment variables:

HISTOPIPE_TEST_FAULT: PLACE:CALL:KIND:FILE: place, number of the call, kind of fault, and a file that marks it as done.
PLACE+ fails after the call. The file "always" fails at every call, in every process.
Several faults are joined by semicolons. FOLDER=PLACE:... fails only in a run's folder of that name.
HISTOPIPE_TEST_CHILD: Python code to run instead of the training; `pipe` is its connection.
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
    "fetch": ("histopipe.training.epochs", "EpochLoop", "_on_host"),
    "place": ("histopipe.training.epochs", None, "one_per_replica"),
    "read": ("histopipe.dataset.batches", "PatchBatches", "load"),
    "save": ("histopipe.training.epochs", None, "save_state"),
    "keep": ("histopipe.training.outputs", None, "_keep"),
    "write": ("histopipe.training.outputs", None, "_name"),
    "build": ("histopipe.training.patch_training", None, "build_model"),
}


def client() -> int:
    """Return the id of the process that created the connection of this training."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iii", credentials)[0])


class Ended(BaseException):
    """Ends a training at once. Only the test catches it."""


def fail(kind: str) -> None:
    if kind == "end":
        raise Ended
    if kind == "exhausted":
        import tensorflow as tf

        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating (injected)")
    if kind == "real":
        import tensorflow as tf

        tf.reduce_sum(tf.fill((16384, 16384, 16384), 1.0))  # 16 TiB
    if kind == "cuda":
        import tensorflow as tf

        raise tf.errors.InternalError(None, None, "CUBLAS_STATUS_ALLOC_FAILED (injected)")
    if kind == "memory":
        raise MemoryError("injected")
    if kind == "wait":
        time.sleep(2)
        return
    if kind == "hang":
        time.sleep(3600)
    if kind == "hang-with-child":
        subprocess.run(["sleep", "3600"], check=False)
    if kind == "diverge":
        from histopipe.errors import UsageError

        raise UsageError("the loss of epoch 1 is not finite (injected)")
    if kind == "crash":
        raise RuntimeError("injected")
    if kind == "parent":
        os.kill(client(), signal.SIGKILL)  # this process ends with it
        time.sleep(60)
    os.kill(os.getpid(), getattr(signal, kind))


def run_folder_name() -> str:
    """Return the name of this process's run folder."""
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
        due = due and (not only or run_folder_name() == only)
        if due and not always:
            marker.touch()
        if due and not after:
            fail(kind)
        bound = (
            original.__get__(arguments[0], type(arguments[0])) if owner is not None else original
        )
        result = bound(*(arguments[1:] if owner is not None else arguments), **settings)
        if due and after:
            fail(kind)
        return result

    setattr(where, name, faulty)


pipe: Any = None


def main(config: Any, folder: Any, **options: Any) -> Any:
    """Run other code, or a training with faults, in the place of `train_here`."""
    global pipe  # noqa: PLW0603 - a process has one training
    pipe = sys._getframe(1).f_locals.get("connection")
    code = os.environ.pop("HISTOPIPE_TEST_CHILD", "")
    count("forks of TensorFlow" if code else "trainings")
    if code:
        run(code)
    faults = os.environ.get("HISTOPIPE_TEST_FAULT")
    for fault in faults.split(";") if faults else ():
        only, _, what = fault.rpartition("=")
        place, at, kind, marker = what.split(":", 3)
        arm(only, place, int(at), kind, Path(marker))
    return train(config, folder, **options)


def count(kind: str) -> None:
    """Count a process of a kind: see `helpers/budget.py`."""
    folder = os.environ.get("HISTOPIPE_TEST_RUN")
    if folder:
        with (Path(folder) / "processes").open("a") as file:
            file.write(f"{kind}\n")


def run(code: str) -> NoReturn:
    sys.argv = json.loads(os.environ.pop("HISTOPIPE_TEST_ARGUMENTS", "[]"))
    output = os.environ.pop("HISTOPIPE_TEST_OUTPUT", "")
    if output:
        with Path(output).open("w") as file:
            os.dup2(file.fileno(), 1)
    status: Any = 0
    try:
        exec(code, {"pipe": pipe, "__name__": "__main__"})  # noqa: S102 - code of a test
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 - as in the interpreter
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def load_with_faults(module: str, **options: Any) -> Any:
    """Load a module like `load_quietly`. A training in it runs with faults."""
    global train
    loaded = load(module, **options)
    if module == "histopipe.training.trainer" and loaded.train_here is not main:
        train, loaded.train_here = loaded.train_here, main
    return loaded


if any("fork_server" in part for part in sys.orig_argv):
    fork_server: Any = importlib.import_module("histopipe.runs.fork_server")
    train: Any = None
    load = fork_server.load_quietly
    fork_server.load_quietly = load_with_faults
