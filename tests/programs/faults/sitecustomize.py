"""Makes a training's process fail at one place, once: put this folder on PYTHONPATH.

HISTOPIPE_TEST_FAULT says where, at which call, how, and names a file that shows that it has failed: PLACE:CALL:KIND:FILE.
A plus behind the place: behind the call. "always" for the file: at every call, in every process.
Several are joined by semicolons. FOLDER=PLACE:... fails only in a run's folder of that name.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PLACES = {
    "gradients": ("histopipe.training.steps", "Steps", "_gradient_step"),
    "apply": ("histopipe.training.steps", "Steps", "apply"),
    "predict": ("histopipe.training.steps", "Steps", "_predict_step"),
    "fetch": ("histopipe.training.loop", "Trainer", "_on_host"),
    "place": ("histopipe.training.loop", "Trainer", "_one_a_replica"),
    "read": ("histopipe.dataset.patch_batches", "PatchBatches", "load"),
    "save": ("histopipe.training.run", None, "save_state"),
    "keep": ("histopipe.training.checkpoint", None, "_keep"),
    "write": ("histopipe.training.checkpoint", None, "_name"),
    "build": ("histopipe.training.task", None, "build_model"),
}


def fail(kind: str) -> None:
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
        os.kill(os.getppid(), signal.SIGKILL)  # and this process dies with it
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


faults = os.environ.get("HISTOPIPE_TEST_FAULT")
if faults and "histopipe.training.child" in sys.orig_argv:
    for fault in faults.split(";"):
        only, _, what = fault.rpartition("=")
        place, at, kind, marker = what.split(":", 3)
        arm(only, place, int(at), kind, Path(marker))
