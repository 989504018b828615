"""Makes a training's process fail at one place, once: put this folder on PYTHONPATH.

HISTOPIPE_TEST_FAULT says where, at which call, how, and names a file that shows that it has failed: PLACE:CALL:KIND:FILE.
A plus behind the place: behind the call. "always" for the file: at every call, in every process.
"""

from __future__ import annotations

import importlib
import os
import signal
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
    "read": ("histopipe.dataset.batches", "Batches", "load"),
    "save": ("histopipe.training.run", None, "save_state"),
    "keep": ("histopipe.training.checkpoint", None, "_keep"),
    "write": ("histopipe.training.checkpoint", None, "_name"),
    "build": ("histopipe.training.run", None, "build_model"),
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
    if kind == "parent":
        os.kill(os.getppid(), signal.SIGKILL)  # and this process dies with it
        time.sleep(60)
    os.kill(os.getpid(), getattr(signal, kind))


def arm(place: str, at: int, kind: str, marker: Path) -> None:
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


fault = os.environ.get("HISTOPIPE_TEST_FAULT")
if fault and "histopipe.training.child" in sys.orig_argv:
    place, at, kind, marker = fault.split(":", 3)
    arm(place, int(at), kind, Path(marker))
