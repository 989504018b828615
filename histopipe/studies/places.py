"""Which devices each of several trainings at once gets."""

from __future__ import annotations

import subprocess
import sys

from histopipe.errors import UsageError

_COUNT = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"


def share_devices(devices: str, trainings: int) -> list[str]:
    """`--devices` for each of several trainings at once: GPUs are dealt out, the CPU is shared.

    Args:
        devices: as given for all of them.
        trainings: how many at once.

    Raises:
        UsageError: there are fewer GPUs.
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
            "--parallel-folds",
            found=trainings,
            expected=f"at most one for each of the {len(gpus)} GPUs",
        )
    return [f"gpu:{','.join(gpus[place::trainings])}" for place in range(trainings)]


def count_gpus() -> int:
    """GPUs that TensorFlow finds, counted in another process: this one must not hold them."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False
    )
    return int(done.stdout) if done.returncode == 0 else 0
