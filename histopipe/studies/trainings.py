"""Run one of several trainings in a separate process, with a time limit, retries and a share of the devices."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from histopipe.errors import (
    DamagedStore,
    HistopipeError,
    Interrupted,
    MachineShort,
    NothingToDo,
    OutOfMemory,
    OutOfTime,
    UsageError,
)
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import TrainResult
from histopipe.runs.supervision import Supervision, supervise
from histopipe.system.progress import Progress

_COUNT_GPUS = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"


class TrainingOutcome(NamedTuple):
    """Result or error of a training, with the duration of all attempts and the peak memory of their processes."""

    result: TrainResult | None
    error: HistopipeError | None
    attempts: int = 0
    seconds: float = 0.0
    host_bytes: int = 0


def train_with_retries(
    config: TrainConfig, folder: Path, watch: Supervision, *, retries: int, progress: Progress
) -> TrainingOutcome:
    """Train, and retry after failures that may be temporary. Each attempt resumes from the last checkpoint.

    An exception raised by `watch.epoch` ends the training and propagates.
    """
    start = time.monotonic()
    for number in range(1, retries + 2):
        result, failed = None, None
        run_folder.clear_leftovers(folder)
        try:
            result = supervise(config, folder, resume=run_folder.has_begun(folder), watch=watch)
        except HistopipeError as error:
            failed = error
        if failed is None or number > retries or not _is_temporary(failed):
            break
        progress.message(f"{folder}: {failed}; retry {number} of {retries}")
    return TrainingOutcome(result, failed, number, time.monotonic() - start, watch.host_bytes)


def _is_temporary(error: HistopipeError) -> bool:
    if isinstance(error, UsageError | NothingToDo | DamagedStore | Interrupted):
        return False
    return not isinstance(error, MachineShort) or isinstance(error, OutOfMemory | OutOfTime)


def share_devices(devices: str, trainings: int) -> list[str]:
    """Return the value of `--devices` for each of several parallel trainings. GPUs are divided, the CPU is shared.

    Raises:
        UsageError: there are fewer GPUs than trainings.
    """
    if trainings == 1 or devices.startswith("cpu"):
        return [devices] * trainings
    if devices.startswith("gpu:"):
        gpus = devices.removeprefix("gpu:").split(",")
    else:
        gpus = [str(number) for number in range(count_gpus())]
    if not gpus:
        return [devices] * trainings
    if len(gpus) < trainings:
        raise UsageError(
            "--parallel-folds", found=trainings, expected=f"at most one per GPU: {len(gpus)}"
        )
    return [f"gpu:{','.join(gpus[first::trainings])}" for first in range(trainings)]


def count_gpus() -> int:
    """Count the GPUs that TensorFlow finds, in another process, because TensorFlow would occupy them in this one."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=False
    )
    return int(done.stdout) if done.returncode == 0 else 0
