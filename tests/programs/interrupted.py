"""Trains with a fault, then resumes, for each of several faults, in one process that has loaded TensorFlow.

Usage: interrupted.py STORE OUT SETTINGS PLACE:CALL:KIND...    SETTINGS: as JSON. Run by `with_tensorflow` of helpers/commands.py.

A fault raises an exception that the training does not catch, so the same files remain as after a kill, except temporary
files. SIGTERM stops the training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sitecustomize as faults  # programs/faults, on the path of the tests' fork server

from histopipe.errors import Interrupted
from histopipe.runs.task_config import PatchTrainConfig, load_config
from histopipe.training.trainer import train_here


def main() -> None:
    store, out, settings, *fault_names = sys.argv[1:]
    values = json.loads(settings) | {"stores": (store,)}
    for fault in fault_names:
        name, at, kind = fault.split(":")
        folder = Path(out) / fault.replace(":", "-")
        config = PatchTrainConfig(**values, save_minutes=1e-9 if kind == "end" else 10.0)
        faults.arm("", name, int(at), kind, folder.with_suffix(".failed"))
        try:
            train_here(config, folder)
            ended = "nothing"
        except faults.Ended:
            ended = "end"
        except Interrupted:
            ended = "SIGTERM"
        assert ended == kind, f"{fault}: ended by {ended}"
        if folder.exists():
            train_here(load_config(folder / "config.toml"), folder, resume=True)
        else:
            train_here(config, folder)


if __name__ == "__main__":
    main()
