"""Where a training ran, for those who look at it later. No name of the machine or of its user."""

from __future__ import annotations

import os
import platform
import sys

import numpy as np
import tensorflow as tf


def environment() -> dict[str, object]:
    """Versions and devices; nothing that tells whose they are."""
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    build = tf.sysconfig.get_build_info()
    return {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [str(it.get("device_name", "unknown")) for it in details],
        "cuda": str(build.get("cuda_version", "none")) if gpus else "none used",
    }
