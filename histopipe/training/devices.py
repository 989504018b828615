"""The devices of a training, as a `tf.distribute` strategy."""

from __future__ import annotations

import tensorflow as tf

from histopipe.errors import UsageError
from histopipe.runs.config import DEVICES
from histopipe.runs.workers import Cluster


def make_strategy(
    devices: str,
    cluster: Cluster | None = None,
    *,
    timeout: float = 600.0,
    communication: str = "auto",
) -> tf.distribute.Strategy:
    """Return the strategy for `--devices`. Call it before TensorFlow uses a device. Waits for the workers of a cluster.

    Args:
        devices: "auto" (GPUs if there are any), "cpu", "cpu:N" for N logical CPU devices, "gpu" or "gpu:0,1".
        cluster: the workers, each with such devices; default: this process alone.
        timeout: seconds after which a step that waits for another worker fails.
        communication: between workers: "auto", "ring" (gRPC) or "nccl".

    Raises:
        UsageError: not of this form, no such GPU, or TensorFlow already uses other devices.
    """
    names = _set_up(devices)
    if cluster is not None and not cluster.alone:
        return _clustered(names, cluster, timeout, communication)
    if len(names) == 1:
        return tf.distribute.OneDeviceStrategy(names[0])
    return tf.distribute.MirroredStrategy(names)


def _clustered(
    names: list[str], cluster: Cluster, timeout: float, communication: str
) -> tf.distribute.Strategy:
    if len(names) > 1 and names[0].startswith("/CPU"):
        raise UsageError(
            f"--devices cpu:{len(names)}", found=f"{len(cluster.workers)} workers",
            expected="--devices cpu: a worker has one CPU device",
        )  # fmt: skip
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=timeout, implementation=kinds[communication.upper()]
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster.resolver, options)


def _set_up(devices: str) -> list[str]:
    """Configure the devices and return their names."""
    match = DEVICES.fullmatch(devices)
    if match is None:
        raise UsageError(
            "--devices", found=repr(devices), expected="auto, cpu, cpu:N, gpu or gpu:0,1"
        )
    gpus = tf.config.list_physical_devices("GPU")
    try:
        if devices.startswith("cpu") or (devices == "auto" and not gpus):
            return _cpus(int(match["cpus"] or 1))
        return _gpus(gpus, match["gpus"])
    except RuntimeError as error:
        raise UsageError(
            f"--devices {devices}", found="TensorFlow already uses its devices in this process",
            todo="train in a process of its own",
        ) from error  # fmt: skip


def _cpus(count: int) -> list[str]:
    tf.config.set_visible_devices([], "GPU")
    if count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        tf.config.set_logical_device_configuration(cpu, logical)
    return [f"/CPU:{number}" for number in range(count)]


def _gpus(gpus: list[tf.config.PhysicalDevice], wanted: str | None) -> list[str]:
    if not gpus:
        raise UsageError(
            "--devices gpu", found="no GPU that TensorFlow can use",
            todo="install the extra [gpu] and check `nvidia-smi`, or use --devices cpu",
        )  # fmt: skip
    numbers = [int(n) for n in wanted.split(",")] if wanted else list(range(len(gpus)))
    if max(numbers) >= len(gpus) or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--devices gpu:{wanted}", found=f"{len(gpus)} GPUs, 0 to {len(gpus) - 1}",
            expected="numbers of these, each once",
        )  # fmt: skip
    chosen = [gpus[number] for number in numbers]
    tf.config.set_visible_devices(chosen, "GPU")
    for gpu in chosen:
        # Take memory as it is needed: a workstation's GPU is often shared.
        tf.config.experimental.set_memory_growth(gpu, True)
    return [f"/GPU:{number}" for number in range(len(chosen))]
